//! `tidy`: the rules of ARCHITECTURE.md and CONTRIBUTING.md that no compiler checks.

mod layers;
mod source;
mod text;
mod unsafety;

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::tree;

/// One violation, printed so that an editor can jump to it.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    severity: Severity,
    file: PathBuf,
    /// From 1; 0 if the finding is about the whole file.
    line: usize,
    message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Severity {
    Warning,
    Error,
}

impl Finding {
    fn error(file: &Path, line: usize, message: impl Into<String>) -> Self {
        Finding {
            severity: Severity::Error,
            file: file.to_path_buf(),
            line,
            message: message.into(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Warning => "warning",
            Severity::Error => "error",
        };
        write!(f, "{severity}: {}", self.file.display())?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        write!(f, ": {}", self.message)
    }
}

/// Reads the tree and prints what is wrong; true if nothing is, warnings apart.
pub fn run(root: &Path) -> Result<bool> {
    let mut findings = layers::check(root)?;
    let files = tree::files(root)?;
    for file in &files {
        let bytes = std::fs::read(root.join(file))
            .with_context(|| format!("cannot read {}", file.display()))?;
        // Weights and other binary files have no lines to look at.
        if let Ok(contents) = std::str::from_utf8(&bytes) {
            findings.extend(check_file(file, contents));
        }
    }
    findings.extend(stale_mutants(root, &files)?);
    for finding in &findings {
        println!("{finding}");
    }
    let count = |severity| findings.iter().filter(|f| f.severity == severity).count();
    let errors = count(Severity::Error);
    println!("tidy: {} files, {errors} errors, {} warnings", files.len(), count(Severity::Warning));
    Ok(errors == 0)
}

/// Mutants whose patch the tree has left behind: they would show nothing.
fn stale_mutants(root: &Path, files: &[PathBuf]) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| file.starts_with("tests/mutants")) {
        let mut apply = Command::new("git");
        apply.args(["apply", "--check"]).arg(file).current_dir(root).stderr(Stdio::null());
        if !apply.status().context("cannot start git")?.success() {
            findings.push(Finding::error(file, 0, "the patch does not apply any more"));
        }
    }
    Ok(findings)
}

/// Written by a tool, to be read by none.
const GENERATED: &[&str] = &["backend-ascend/src/sys/bindings.rs"];

/// Every rule that looks at one file.
fn check_file(file: &Path, contents: &str) -> Vec<Finding> {
    if GENERATED.iter().any(|generated| file == Path::new(generated)) {
        return text::forbidden(file, contents);
    }
    let mut findings = text::check(file, contents);
    if file.extension().is_some_and(|extension| extension == "rs") {
        let code = source::code_only(contents);
        findings.extend(text::check_rust(file, contents, &code));
        findings.extend(unsafety::check(file, contents, &code));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_printed_as_places() {
        let finding = Finding::error(Path::new("hal/src/lib.rs"), 7, "wrong");
        assert_eq!(finding.to_string(), "error: hal/src/lib.rs:7: wrong");
    }

    #[test]
    fn a_patch_that_does_not_apply_is_found() {
        let folder = std::env::temp_dir().join(format!("amphora-tidy-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("tests/mutants")).expect("a folder");
        let patch = |from: &str| {
            format!("# mutant: x\n--- a/file\n+++ b/file\n@@ -1 +1 @@\n-{from}\n+two\n")
        };
        std::fs::write(folder.join("file"), "one\n").expect("written");
        std::fs::write(folder.join("tests/mutants/good.patch"), patch("one")).expect("written");
        std::fs::write(folder.join("tests/mutants/stale.patch"), patch("old")).expect("written");
        let files = ["good", "stale"].map(|name| format!("tests/mutants/{name}.patch").into());
        let found = stale_mutants(&folder, &files).expect("git runs");
        std::fs::remove_dir_all(&folder).expect("removed");
        assert_eq!(found.len(), 1);
        assert!(found[0].file.ends_with("stale.patch"));
    }

    #[test]
    fn own_sources_pass() {
        let root = tree::root();
        for file in tree::files(&root).expect("git lists the tree") {
            if file.starts_with("xtask") {
                let contents = std::fs::read_to_string(root.join(&file)).expect("readable");
                let errors: Vec<_> = check_file(&file, &contents)
                    .into_iter()
                    .filter(|f| f.severity == Severity::Error)
                    .collect();
                assert_eq!(errors, []);
            }
        }
    }
}
