//! `fuzz`: the targets of fuzz/, each for some seconds, from seeds made of the stored models and
//! adapters.
//!
//! They need a nightly toolchain, its address sanitizer and cargo-fuzz, which is why they are no part
//! of `check`. Where one is missing the targets are NOT RUN, which counts as a failure: whoever asks
//! for fuzzing and got none must not read success.

mod seed;

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

#[derive(Debug, clap::Args)]
pub struct Options {
    /// Targets to run; all if none is named.
    targets: Vec<String>,
    /// Seconds for each target.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Say which targets there are, and run nothing.
    #[arg(long)]
    list: bool,
}

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
    let missing = missing()?;
    let mut rows = Vec::new();
    for target in chosen {
        let outcome = match &missing {
            Some(reason) => Outcome::NotRun(reason.clone()),
            None => run_target(root, target, options.seconds)?,
        };
        rows.push((target, outcome));
    }
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

/// What fuzzing needs and this machine lacks.
fn missing() -> Result<Option<String>> {
    let Some(sysroot) = output(nightly("rustc").args(["--print", "sysroot"])) else {
        return Ok(Some("no nightly toolchain (rustup toolchain install nightly)".to_owned()));
    };
    if !has_sanitizer(Path::new(sysroot.trim()))? {
        return Ok(Some("nightly has no address sanitizer for this machine".to_owned()));
    }
    if output(nightly("cargo").args(["fuzz", "--version"])).is_none() {
        return Ok(Some("cargo-fuzz is not installed (cargo install cargo-fuzz)".to_owned()));
    }
    Ok(None)
}

/// A tool of the nightly toolchain, whichever toolchain runs us.
fn nightly(tool: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", tool]).stdin(Stdio::null());
    command
}

/// What a command prints, if it can be started and succeeds.
fn output(command: &mut Command) -> Option<String> {
    let output = command.stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether a toolchain has the sanitizer's runtime, `librustc-nightly_rt.asan.a` or a name like it.
fn has_sanitizer(sysroot: &Path) -> Result<bool> {
    let hosts = sysroot.join("lib/rustlib");
    let list = |folder: &Path| -> Result<Vec<PathBuf>> {
        let entries = std::fs::read_dir(folder)
            .with_context(|| format!("cannot list {}", folder.display()))?;
        entries.map(|entry| Ok(entry?.path())).collect()
    };
    for host in list(&hosts)? {
        let libraries = host.join("lib");
        if libraries.is_dir() && list(&libraries)?.iter().any(|file| is_runtime(file)) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn is_runtime(file: &Path) -> bool {
    let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.starts_with("librustc") && name.contains("_rt.asan.")
}

fn run_target(root: &Path, target: &str, seconds: u32) -> Result<Outcome> {
    eprintln!("\n=== {target}");
    let corpus = root.join("fuzz/corpus").join(target);
    let seeds = root.join("fuzz/seeds").join(target);
    std::fs::create_dir_all(&corpus).with_context(|| corpus.display().to_string())?;
    seed::write(root, target, &seeds)?;
    let log = root.join("fuzz/seeds").join(format!("{target}.log"));
    let errors = File::create(&log).with_context(|| log.display().to_string())?;
    let build = nightly("cargo").args(["fuzz", "build", target]).current_dir(root).status();
    if !build.context("cannot start cargo-fuzz")?.success() {
        return Ok(Outcome::Failed);
    }
    let mut command = nightly("cargo");
    command.args(["fuzz", "run", target]).arg(&corpus).arg(&seeds).arg("--");
    // A parser that takes 10 seconds or 1 GiB for one input is a finding too.
    command.arg(format!("-max_total_time={seconds}"));
    command.args(["-timeout=10", "-rss_limit_mb=1024", "-print_final_stats=1"]);
    let status =
        command.current_dir(root).stderr(errors).status().context("cannot start cargo-fuzz")?;
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
        let reason = "no nightly toolchain".to_owned();
        assert_eq!(Outcome::NotRun(reason).to_string(), "NOT RUN: no nightly toolchain");
        assert_eq!(Outcome::Passed { iterations: Some(12) }.to_string(), "passed, 12 iterations");
    }

    #[test]
    fn the_sanitizer_is_known_by_its_file() {
        assert!(is_runtime(Path::new("lib/librustc-nightly_rt.asan.a")));
        assert!(is_runtime(Path::new("lib/librustc-nightly_rt.asan.dylib")));
        assert!(!is_runtime(Path::new("lib/librustc-nightly_rt.tsan.a")));
        assert!(!is_runtime(Path::new("lib/libstd.so")));
    }

    #[test]
    fn the_closing_line_has_the_count() {
        assert_eq!(iterations("stat::number_of_executed_units: 812"), Some(812));
        assert_eq!(iterations("stat::peak_rss_mb: 92"), None);
    }
}
