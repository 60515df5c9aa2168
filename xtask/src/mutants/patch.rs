//! One patch file: three comment lines, then a diff.
//!
//! ```text
//! # mutant: no-attention-sinks
//! # breaks: the softmax forgets the sink of each head
//! # caught-by: cargo test -p amphora-tests --test conformance_cpu -- paged_attention
//! diff --git a/… b/…
//! ```

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

#[derive(Debug, PartialEq, Eq)]
pub struct Patch {
    pub file: PathBuf,
    pub name: String,
    /// What is wrong once it is applied.
    pub breaks: String,
    /// Arguments of cargo, separated by spaces; a test command that fails once it is applied.
    pub test: String,
}

impl Patch {
    pub fn read(file: &Path) -> Result<Self> {
        let contents = std::fs::read_to_string(file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        Patch::parse(file, &contents)
    }

    fn parse(file: &Path, contents: &str) -> Result<Self> {
        let field = |key: &str| {
            let start = format!("# {key}: ");
            contents
                .lines()
                .take_while(|line| line.starts_with('#'))
                .find_map(|line| line.strip_prefix(&start))
                .map(|value| value.trim().to_owned())
                .with_context(|| format!("{}: no line `# {key}: …` at the head", file.display()))
        };
        let name = field("mutant")?;
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if name.is_empty() || !name.chars().all(plain) {
            bail!("{}: mutant `{name}`: expected letters, digits, - and _", file.display());
        }
        let command = field("caught-by")?;
        let Some(test) = command.strip_prefix("cargo ").filter(|t| t.starts_with("test ")) else {
            bail!("{}: caught-by `{command}`: expected `cargo test …`", file.display());
        };
        Ok(Patch {
            file: file.to_path_buf(),
            name,
            breaks: field("breaks")?,
            test: test.to_owned(),
        })
    }

    /// The test command with nothing run, which tells a broken build from a failed test.
    pub fn build_only(&self) -> String {
        match self.test.split_once(" -- ") {
            Some((build, _)) => format!("{build} --no-run"),
            None => format!("{} --no-run", self.test),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "# mutant: no-sinks\n# breaks: sinks\n# caught-by: cargo test -p x -- y z\n";

    fn parse(contents: &str) -> Result<Patch> {
        Patch::parse(Path::new("a.patch"), contents)
    }

    #[test]
    fn head_is_read() {
        let patch = parse(&format!("{HEAD}diff --git a/x b/x\n")).expect("a complete head");
        assert_eq!((patch.name.as_str(), patch.breaks.as_str()), ("no-sinks", "sinks"));
        assert_eq!(patch.test, "test -p x -- y z");
        assert_eq!(patch.build_only(), "test -p x --no-run");
    }

    #[test]
    fn an_incomplete_head_is_refused() {
        for missing in ["mutant", "breaks", "caught-by"] {
            let head: String = HEAD
                .split_inclusive('\n')
                .filter(|line| !line.contains(&format!("# {missing}:")))
                .collect();
            let error = parse(&head).expect_err("a line is missing").to_string();
            assert!(error.contains(missing), "{error}");
        }
    }

    #[test]
    fn only_cargo_tests_are_run() {
        let other = HEAD.replace("cargo test", "cargo install");
        assert!(parse(&other).is_err());
        let outside = HEAD.replace("no-sinks", "../x");
        assert!(parse(&outside).is_err());
    }
}
