//! `fuzz`: the targets of fuzz/, each for some seconds, from seeds made of the stored models and
//! adapters.
//!
//! They are built by the pinned toolchain with LLVM's coverage counters, which libFuzzer reads; what it
//! takes beside that is a C++ compiler. Without one the targets are NOT RUN, which counts as a
//! failure: whoever asks for fuzzing and got none must not read success. No sanitizer watches: the
//! parsers are safe Rust. `cargo +nightly fuzz` runs the same targets under one.

mod seed;

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::command::{cargo, has_cxx};

#[derive(Debug, clap::Args)]
pub struct Options {
    /// Targets to run; all if none is named.
    targets: Vec<String>,
    /// Seconds for each target.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Targets to run at a time [default: one for each core]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    jobs: Option<u32>,
    /// Say which targets there are, and run nothing.
    #[arg(long)]
    list: bool,
}

impl Options {
    /// Every target for so many seconds.
    pub fn all(seconds: u32) -> Self {
        Options { targets: Vec::new(), seconds, jobs: None, list: false }
    }
}

/// What libFuzzer needs to see: a counter for each edge, their places, and what is compared. The
/// flags are LLVM's, and those that cargo-fuzz passes.
const COVERAGE: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Ccodegen-units=1 -Cdebug-assertions=on -Coverflow-checks=on";

/// What became of one target.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Passed {
        /// As libFuzzer counts them, if it said so.
        iterations: Option<u64>,
    },
    /// Did not build, or found an input that breaks it.
    Failed,
    /// Why it could not be tried.
    NotRun(String),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Passed { iterations: Some(n) } => write!(f, "passed, {n} iterations"),
            Outcome::Passed { iterations: None } => f.write_str("passed"),
            Outcome::Failed => f.write_str("FAILED"),
            Outcome::NotRun(reason) => write!(f, "NOT RUN: {reason}"),
        }
    }
}

/// Runs the targets; true if each ran and found nothing.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let known = targets(root)?;
    if let Some(unknown) = options.targets.iter().find(|name| !known.contains(name)) {
        bail!("no fuzz target `{unknown}`; there are: {}", known.join(", "));
    }
    let chosen = if options.targets.is_empty() { &known } else { &options.targets };
    if options.list {
        println!("{}", chosen.join("\n"));
        return Ok(true);
    }
    let rows: Vec<(&String, Outcome)> = if !has_cxx() {
        let reason = || Outcome::NotRun(MISSING.to_owned());
        chosen.iter().map(|target| (target, reason())).collect()
    } else {
        let Some(folder) = build(root)? else { return Ok(false) };
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let jobs = options.jobs.map_or(cores, |jobs| jobs as usize);
        let mut rows = Vec::new();
        for together in chosen.chunks(jobs) {
            let run = |target| run_target(root, &folder, target, options.seconds);
            let outcomes: Result<Vec<Outcome>> = std::thread::scope(|scope| {
                let runs: Vec<_> =
                    together.iter().map(|target| scope.spawn(move || run(target))).collect();
                let ended = runs.into_iter().map(|run| run.join());
                ended.map(|run| run.unwrap_or_else(|_| bail!("a run panicked"))).collect()
            });
            rows.extend(together.iter().zip(outcomes?));
        }
        rows
    };
    println!();
    for (target, outcome) in &rows {
        println!("{target:<20} {outcome}");
    }
    Ok(rows.iter().all(|(_, outcome)| matches!(outcome, Outcome::Passed { .. })))
}

/// Names of the targets, sorted.
fn targets(root: &Path) -> Result<Vec<String>> {
    let folder = root.join("fuzz/fuzz_targets");
    let entries =
        std::fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut names = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        names.extend(name.to_str().and_then(|name| name.strip_suffix(".rs")).map(str::to_owned));
    }
    names.sort();
    Ok(names)
}

/// What a machine lacks that cannot fuzz.
pub const MISSING: &str = "no C++ compiler: install g++";

/// Builds every target; the folder of their binaries, or nothing where one does not build.
fn build(root: &Path) -> Result<Option<PathBuf>> {
    let version = Command::new("rustc").arg("-vV").current_dir(root).output();
    let version = version.context("cannot start rustc")?.stdout;
    let version = String::from_utf8_lossy(&version);
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.context("rustc does not say its host")?;
    // A named target keeps the flags from build scripts, which nothing would link libFuzzer to.
    let folder = root.join("target/fuzz");
    let mut command = cargo(root, "build --release --bins --manifest-path fuzz/Cargo.toml");
    command.arg("--target").arg(host).arg("--target-dir").arg(&folder);
    command.env("RUSTFLAGS", COVERAGE);
    let built = command.status().context("cannot start cargo")?.success();
    Ok(built.then(|| folder.join(host).join("release")))
}

fn run_target(root: &Path, binaries: &Path, target: &str, seconds: u32) -> Result<Outcome> {
    eprintln!("=== {target}");
    let corpus = root.join("fuzz/corpus").join(target);
    let seeds = root.join("fuzz/seeds").join(target);
    let artifacts = root.join("fuzz/artifacts").join(target);
    for folder in [&corpus, &artifacts] {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    seed::write(root, target, &seeds)?;
    let log = root.join("fuzz/seeds").join(format!("{target}.log"));
    let errors = File::create(&log).with_context(|| log.display().to_string())?;
    let mut command = Command::new(binaries.join(target));
    command.arg(format!("-artifact_prefix={}/", artifacts.display()));
    // A parser that takes 10 seconds or 1 GiB for one input is a finding too.
    command.arg(format!("-max_total_time={seconds}"));
    command.args(["-timeout=10", "-rss_limit_mb=1024", "-print_final_stats=1"]);
    command.arg(&corpus).arg(&seeds).stdin(Stdio::null()).stderr(errors);
    let status = command.current_dir(root).status().with_context(|| format!("start {target}"))?;
    if !status.success() {
        eprintln!("log: {}", log.display());
        return Ok(Outcome::Failed);
    }
    let log = BufReader::new(File::open(&log).with_context(|| log.display().to_string())?);
    let iterations = log.lines().map_while(Result::ok).find_map(|line| iterations(&line));
    Ok(Outcome::Passed { iterations })
}

/// The count in libFuzzer's closing line.
fn iterations(line: &str) -> Option<u64> {
    line.strip_prefix("stat::number_of_executed_units:")?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree;

    #[test]
    fn every_target_is_a_binary_of_the_manifest_and_the_other_way_round() {
        let root = tree::root();
        let manifest = std::fs::read_to_string(root.join("fuzz/Cargo.toml")).expect("readable");
        let mut binaries: Vec<&str> = manifest
            .split("[[bin]]")
            .skip(1)
            .filter_map(|bin| bin.split_once("name = \"")?.1.split_once('"'))
            .map(|(name, _)| name)
            .collect();
        binaries.sort_unstable();
        assert_eq!(targets(&root).expect("listed"), binaries);
    }

    #[test]
    fn only_a_run_counts_as_passed() {
        let reason = Outcome::NotRun(MISSING.to_owned()).to_string();
        assert_eq!(reason, "NOT RUN: no C++ compiler: install g++");
        assert_eq!(Outcome::Passed { iterations: Some(12) }.to_string(), "passed, 12 iterations");
    }

    #[test]
    fn the_closing_line_has_the_count() {
        assert_eq!(iterations("stat::number_of_executed_units: 812"), Some(812));
        assert_eq!(iterations("stat::peak_rss_mb: 92"), None);
    }
}
