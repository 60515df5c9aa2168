//! `mutants`: each patch of tests/mutants breaks the code in one way, and the test that it names
//! must notice.
//!
//! Patches are applied to a copy of the tree, never to the tree itself. Copy and build folder are
//! kept between runs, so a mutant costs what its change makes cargo rebuild. A mutant counts as
//! caught only if its test passes without it, and builds and fails with it.

mod copy;
mod patch;

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::command::cargo;
use copy::Copy;
use patch::Patch;

#[derive(Debug, clap::Args)]
pub struct Options {
    /// Only mutants whose name contains one of these.
    names: Vec<String>,
    /// Say what there is, and run nothing.
    #[arg(long)]
    list: bool,
}

/// What became of one mutant.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    /// With the names of the tests that failed, as far as they can be told.
    Caught(Vec<String>),
    /// The test passed all the same.
    NotCaught,
    DoesNotApply(String),
    DoesNotBuild,
    /// The test fails without the mutant too, so it shows nothing.
    FailsAnyway,
}

impl Verdict {
    fn caught(&self) -> bool {
        matches!(self, Verdict::Caught(_))
    }

    fn label(&self) -> &'static str {
        match self {
            Verdict::Caught(_) => "caught",
            Verdict::NotCaught => "NOT CAUGHT",
            Verdict::DoesNotApply(_) => "DOES NOT APPLY",
            Verdict::DoesNotBuild => "DOES NOT BUILD",
            Verdict::FailsAnyway => "FAILS WITHOUT IT",
        }
    }
}

/// Runs the mutants; true if every one was caught.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let patches = chosen(&root.join("tests/mutants"), &options.names)?;
    if options.list {
        for patch in &patches {
            println!("{:<32} {}", patch.name, patch.breaks);
            println!("{:<32} caught by: cargo {}", "", patch.test);
        }
        return Ok(true);
    }
    let mut laboratory = Laboratory::open(root)?;
    // All of these first: between mutants they would each rebuild the unbroken code.
    for patch in &patches {
        laboratory.passes_clean(patch)?;
    }
    let mut rows = Vec::new();
    for patch in &patches {
        eprintln!("{}: {}", patch.name, patch.breaks);
        let start = Instant::now();
        let verdict = laboratory.examine(patch)?;
        eprintln!("    {}", verdict.label());
        rows.push((patch, verdict, start.elapsed().as_secs_f64()));
    }
    for (patch, verdict, seconds) in &rows {
        println!("{:<32} {:<16} {seconds:>7.1} s", patch.name, verdict.label());
        match verdict {
            Verdict::Caught(tests) => {
                for test in tests.iter().take(3) {
                    println!("    {test}");
                }
                if let Some(more @ 1..) = tests.len().checked_sub(3) {
                    println!("    and {more} more");
                }
            }
            Verdict::DoesNotApply(reason) => println!("    {reason}"),
            Verdict::NotCaught | Verdict::DoesNotBuild | Verdict::FailsAnyway => {
                println!("    log: {}", laboratory.log(patch).display());
            }
        }
    }
    let caught = rows.iter().filter(|(_, verdict, _)| verdict.caught()).count();
    println!("{caught} of {} mutants caught", rows.len());
    Ok(caught == rows.len())
}

/// The patches of a folder whose name contains one of `names`, or all, sorted by file name.
fn chosen(folder: &Path, names: &[String]) -> Result<Vec<Patch>> {
    let mut files = Vec::new();
    let entries = std::fs::read_dir(folder)
        .with_context(|| format!("no mutants: cannot list {}", folder.display()))?;
    for entry in entries {
        let file = entry?.path();
        if file.extension().is_some_and(|extension| extension == "patch") {
            files.push(file);
        }
    }
    files.sort();
    let mut patches = Vec::new();
    for file in files {
        let patch = Patch::read(&file)?;
        if names.is_empty() || names.iter().any(|name| patch.name.contains(name)) {
            patches.push(patch);
        }
    }
    if patches.is_empty() {
        bail!("no mutant of that name in {}", folder.display());
    }
    Ok(patches)
}

/// The copy of the tree, its build folder, and what the tests say without any mutant.
struct Laboratory {
    copy: Copy,
    build: PathBuf,
    clean: HashMap<String, bool>,
}

impl Laboratory {
    fn open(root: &Path) -> Result<Self> {
        let build = root.join("target/mutants");
        let copy = Copy::of(root, build.join("tree"))?;
        Ok(Laboratory { copy, build, clean: HashMap::new() })
    }

    fn examine(&mut self, patch: &Patch) -> Result<Verdict> {
        if !self.passes_clean(patch)? {
            return Ok(Verdict::FailsAnyway);
        }
        if let Err(reason) = self.copy.apply(&patch.file)? {
            return Ok(Verdict::DoesNotApply(reason));
        }
        let log = self.log(patch);
        let verdict = if !self.succeeds(&patch.build_only(), &log)? {
            Verdict::DoesNotBuild
        } else if self.succeeds(&patch.test, &log)? {
            Verdict::NotCaught
        } else {
            let output = std::fs::read(&log).with_context(|| log.display().to_string())?;
            Verdict::Caught(failing_tests(&String::from_utf8_lossy(&output)))
        };
        self.copy.restore()?;
        Ok(verdict)
    }

    fn passes_clean(&mut self, patch: &Patch) -> Result<bool> {
        if let Some(&passes) = self.clean.get(&patch.test) {
            return Ok(passes);
        }
        eprintln!("without a mutant: cargo {}", patch.test);
        let passes = self.succeeds(&patch.test, &self.log(patch))?;
        self.clean.insert(patch.test.clone(), passes);
        Ok(passes)
    }

    fn log(&self, patch: &Patch) -> PathBuf {
        self.build.join(format!("{}.log", patch.name))
    }

    /// Runs cargo in the copy, its output in the log.
    fn succeeds(&self, line: &str, log: &Path) -> Result<bool> {
        let output = File::create(log).with_context(|| log.display().to_string())?;
        let status = cargo(self.copy.root(), line)
            .env("CARGO_TARGET_DIR", &self.build)
            .stdout(output.try_clone()?)
            .stderr(output)
            .status()
            .context("cannot start cargo")?;
        Ok(status.success())
    }
}

/// Names of failed tests in the output of a test binary: `test NAME ... FAILED` or `NAME ... FAILED`.
fn failing_tests(output: &str) -> Vec<String> {
    output
        .lines()
        .filter_map(|line| line.trim().strip_suffix("FAILED"))
        .filter_map(|line| line.trim_end().strip_suffix("..."))
        .map(|line| line.trim().trim_start_matches("test ").to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failing_tests_are_named() {
        let output = "running 3 tests\ntest a::b ... ok\ntest a::c ... FAILED\n\
                      lora_linear/bf16/t=7 ... FAILED\ntest result: FAILED. 1 passed";
        assert_eq!(failing_tests(output), ["a::c", "lora_linear/bf16/t=7"]);
    }

    #[test]
    fn only_a_noticed_mutant_counts() {
        assert!(Verdict::Caught(Vec::new()).caught());
        for verdict in [
            Verdict::NotCaught,
            Verdict::DoesNotApply(String::new()),
            Verdict::DoesNotBuild,
            Verdict::FailsAnyway,
        ] {
            assert!(!verdict.caught(), "{verdict:?}");
        }
    }
}
