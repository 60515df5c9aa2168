//! `check`: every part that has to pass, streamed, with a table at the end.

use std::fmt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::{command::cargo, tidy};

#[derive(Debug, clap::Args)]
pub struct Options {
    /// Parts to run; all if none is named.
    parts: Vec<Part>,
}

/// In the order in which they run: the quick ones first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Fmt,
    Clippy,
    Docs,
    Tidy,
    Tests,
}

impl Part {
    /// Arguments of cargo; `None` for a part that runs in this process.
    fn arguments(self) -> Option<&'static str> {
        match self {
            Part::Fmt => Some("fmt --all --check"),
            Part::Clippy => Some("clippy --workspace --all-targets -- -D warnings"),
            Part::Docs => Some("doc --workspace --no-deps"),
            Part::Tidy => None,
            Part::Tests => Some("test --workspace"),
        }
    }

    /// Arguments of cargo that succeed if the part's tool is installed.
    fn probe(self) -> Option<&'static str> {
        match self {
            Part::Fmt => Some("fmt --version"),
            Part::Clippy => Some("clippy --version"),
            Part::Docs | Part::Tidy | Part::Tests => None,
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{self:?}").to_lowercase())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    /// Its tool is not installed.
    NotRun,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Outcome::Passed => "passed",
            Outcome::Failed => "FAILED",
            Outcome::NotRun => "NOT RUN",
        })
    }
}

struct Row {
    part: Part,
    outcome: Outcome,
    time: Duration,
}

/// Runs the parts; true if the whole passed.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let chosen = |part: &Part| options.parts.is_empty() || options.parts.contains(part);
    let mut rows = Vec::new();
    for part in Part::value_variants().iter().copied().filter(chosen) {
        let start = Instant::now();
        let outcome = run_part(root, part)?;
        rows.push(Row { part, outcome, time: start.elapsed() });
    }
    let in_ci = std::env::var("CI").is_ok_and(|value| value == "true");
    print!("{}", table(&rows));
    Ok(passed(&rows, in_ci))
}

fn run_part(root: &Path, part: Part) -> Result<Outcome> {
    let Some(arguments) = part.arguments() else {
        eprintln!("\n=== {part}");
        return Ok(match tidy::run(root)? {
            true => Outcome::Passed,
            false => Outcome::Failed,
        });
    };
    eprintln!("\n=== {part}: cargo {arguments}");
    if let Some(probe) = part.probe() {
        let mut probe = cargo(root, probe);
        probe.stdout(Stdio::null()).stderr(Stdio::null());
        if !succeeds(&mut probe)? {
            eprintln!("not installed: try `rustup component add rustfmt clippy`");
            return Ok(Outcome::NotRun);
        }
    }
    let mut command = cargo(root, arguments);
    if part == Part::Docs {
        command.env("RUSTDOCFLAGS", "-D warnings");
    }
    Ok(match succeeds(&mut command)? {
        true => Outcome::Passed,
        false => Outcome::Failed,
    })
}

fn succeeds(command: &mut Command) -> Result<bool> {
    let status =
        command.status().with_context(|| format!("cannot start {:?}", command.get_program()))?;
    Ok(status.success())
}

/// A part that did not run is a failure where nobody reads the table.
fn passed(rows: &[Row], in_ci: bool) -> bool {
    rows.iter().all(|row| match row.outcome {
        Outcome::Passed => true,
        Outcome::Failed => false,
        Outcome::NotRun => !in_ci,
    })
}

fn table(rows: &[Row]) -> String {
    let mut text = format!("\n{:<8} {:<8} {:>8}\n", "part", "result", "seconds");
    for Row { part, outcome, time } in rows {
        text += &format!("{part:<8} {outcome:<8} {:>8.1}\n", time.as_secs_f64());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(outcome: Outcome) -> Vec<Row> {
        [Outcome::Passed, outcome, Outcome::Passed]
            .into_iter()
            .zip(Part::value_variants())
            .map(|(outcome, &part)| Row { part, outcome, time: Duration::from_millis(1250) })
            .collect()
    }

    #[test]
    fn one_failure_fails_the_whole() {
        assert!(passed(&rows(Outcome::Passed), true));
        assert!(!passed(&rows(Outcome::Failed), true));
        assert!(!passed(&rows(Outcome::Failed), false));
    }

    #[test]
    fn a_missing_tool_fails_in_ci_only() {
        assert!(!passed(&rows(Outcome::NotRun), true));
        assert!(passed(&rows(Outcome::NotRun), false));
    }

    #[test]
    fn table_names_parts_results_and_seconds() {
        let text = table(&rows(Outcome::Failed));
        assert!(text.contains("clippy   FAILED        1.2"), "{text}");
    }

    #[test]
    fn parts_run_in_the_documented_order() {
        let names: Vec<String> = Part::value_variants().iter().map(Part::to_string).collect();
        assert_eq!(names, ["fmt", "clippy", "docs", "tidy", "tests"]);
    }
}
