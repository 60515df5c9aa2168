//! `check`: every part that has to pass, streamed, with a table at the end.

use std::fmt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::command::{cargo, has_cxx};
use crate::{fuzz, kernels, tidy};

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
    /// What is built for a GPU alone: it compiles on any machine.
    Cuda,
    Docs,
    Tidy,
    Tests,
    /// The Ascend backend on the host twin, whose kernels a C++ compiler builds.
    Twin,
    /// Every CUDA kernel to machine code.
    Kernels,
    /// Every parser of outside bytes on bytes of all kinds.
    Fuzz,
}

/// Seconds for each fuzz target: enough to find what a change broke, not what hides.
const FUZZ_SECONDS: u32 = 30;

/// The crate that needs a C++ compiler, left out where there is none.
const WITHOUT_TWIN: &str = " --exclude amphora-ascend-twin";

impl Part {
    /// Arguments of cargo; `None` for a part that is not one call of it.
    fn arguments(self, cxx: bool) -> Option<String> {
        let without = if cxx { "" } else { WITHOUT_TWIN };
        match self {
            Part::Fmt => Some("fmt --all --check".to_owned()),
            Part::Clippy => {
                Some(format!("clippy --workspace{without} --all-targets -- -D warnings"))
            }
            Part::Cuda => Some(
                "clippy -p amphora-server -p amphora-tests -p amphora-benches --all-targets --features \
                 amphora-server/cuda,amphora-tests/cuda,amphora-benches/cuda -- -D warnings"
                    .to_owned(),
            ),
            Part::Docs => Some(format!("doc --workspace{without} --no-deps")),
            Part::Tests => Some(format!("test --workspace{without} --no-fail-fast")),
            Part::Twin => Some(
                "test -p amphora-tests --features ascend-twin --test conformance_ascend \
                 --test laws_ascend --test ascend"
                    .to_owned(),
            ),
            Part::Tidy | Part::Kernels | Part::Fuzz => None,
        }
    }

    /// Why the part cannot run here, if it cannot.
    fn missing(self, root: &Path, cxx: bool) -> Result<Option<&'static str>> {
        let installed = |arguments| {
            let mut probe = cargo(root, arguments);
            succeeds(probe.stdout(Stdio::null()).stderr(Stdio::null()))
        };
        let component = "not installed: try `rustup component add rustfmt clippy`";
        Ok(match self {
            Part::Fmt if !installed("fmt --version")? => Some(component),
            Part::Clippy | Part::Cuda if !installed("clippy --version")? => Some(component),
            Part::Twin | Part::Fuzz if !cxx => Some(fuzz::MISSING),
            Part::Kernels if kernels::compiler(root).is_none() => Some(kernels::MISSING),
            _ => None,
        })
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
    let (mut rows, cxx) = (Vec::new(), has_cxx());
    for part in Part::value_variants().iter().copied().filter(chosen) {
        let start = Instant::now();
        let outcome = run_part(root, part, cxx)?;
        rows.push(Row { part, outcome, time: start.elapsed() });
    }
    let in_ci = std::env::var("CI").is_ok_and(|value| value == "true");
    print!("{}", table(&rows));
    Ok(passed(&rows, in_ci))
}

fn run_part(root: &Path, part: Part, cxx: bool) -> Result<Outcome> {
    let arguments = part.arguments(cxx);
    eprintln!(
        "\n=== {part}: {}",
        arguments.as_deref().map_or("here".to_owned(), |a| format!("cargo {a}"))
    );
    if let Some(why) = part.missing(root, cxx)? {
        eprintln!("{why}");
        return Ok(Outcome::NotRun);
    }
    let passed = match (part, arguments) {
        (Part::Kernels, _) => kernels::run(root, &kernels::Options::default())?,
        (Part::Fuzz, _) => fuzz::run(root, &fuzz::Options::all(FUZZ_SECONDS))?,
        (_, None) => tidy::run(root)?,
        (_, Some(arguments)) => {
            let mut command = cargo(root, &arguments);
            if part == Part::Docs {
                command.env("RUSTDOCFLAGS", "-D warnings");
            }
            succeeds(&mut command)?
        }
    };
    Ok(if passed { Outcome::Passed } else { Outcome::Failed })
}

fn succeeds(command: &mut std::process::Command) -> Result<bool> {
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
        let expected =
            ["fmt", "clippy", "cuda", "docs", "tidy", "tests", "twin", "kernels", "fuzz"];
        assert_eq!(names, expected);
    }
}
