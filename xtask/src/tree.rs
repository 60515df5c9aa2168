//! The working tree: its root, and the files that belong to it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The workspace root, which holds this crate's folder.
pub fn root() -> PathBuf {
    let here = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    here.parent().map(Path::to_path_buf).unwrap_or(here)
}

/// Files that git tracks or would track, relative to the root, sorted. Deleted ones are left out.
pub fn files(root: &Path) -> Result<Vec<PathBuf>> {
    // In a container the checkout often belongs to another user, at which git would stop.
    let output = Command::new("git")
        .args(["-c", "safe.directory=*", "ls-files", "-z"])
        .args(["--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .context("git ls-files: git is needed to tell which files belong to the tree")?;
    ensure!(
        output.status.success(),
        "git ls-files: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let names = String::from_utf8(output.stdout).context("git ls-files: a name is not UTF-8")?;
    let mut files: Vec<PathBuf> = names
        .split_terminator('\0')
        .map(PathBuf::from)
        .filter(|file| root.join(file).is_file())
        .collect();
    files.sort();
    files.dedup();
    Ok(files)
}
