//! `conformance`: the operator suite's binary for one backend.

use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::command::cargo;

#[derive(Debug, clap::Args)]
pub struct Options {
    /// The backend, as in tests/conformance_BACKEND.rs.
    backend: String,
    /// Only the cases whose name contains one of these, e.g. `lora_linear/bf16`.
    filters: Vec<String>,
    /// Optimised build.
    #[arg(long)]
    release: bool,
}

/// Runs the suite; true if it passed.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let known = backends(root)?;
    if !known.contains(&options.backend) {
        bail!(
            "no conformance suite for `{}`; there is one for: {}",
            options.backend,
            if known.is_empty() { "none".to_owned() } else { known.join(", ") }
        );
    }
    let status = cargo(root, &arguments(options))
        .arg("--")
        .args(&options.filters)
        .status()
        .context("cannot start cargo")?;
    Ok(status.success())
}

/// Backends that have a suite, sorted.
fn backends(root: &Path) -> Result<Vec<String>> {
    let folder = root.join("tests");
    let entries =
        std::fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut names = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        let backend =
            name.to_str().and_then(|name| name.strip_prefix("conformance_")?.strip_suffix(".rs"));
        names.extend(backend.map(str::to_owned));
    }
    names.sort();
    Ok(names)
}

/// The CPU is the default feature; every other backend is behind the feature of its name.
fn arguments(options: &Options) -> String {
    let backend = &options.backend;
    let mut line = format!("test -p amphora-tests --test conformance_{backend}");
    if backend != "cpu" {
        line += &format!(" --features {backend}");
    }
    if options.release {
        line += " --release";
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_backends_need_their_feature() {
        let line = |backend: &str, release| {
            arguments(&Options { backend: backend.to_owned(), filters: Vec::new(), release })
        };
        assert_eq!(line("cpu", false), "test -p amphora-tests --test conformance_cpu");
        assert_eq!(
            line("cuda", true),
            "test -p amphora-tests --test conformance_cuda --features cuda --release"
        );
    }
}
