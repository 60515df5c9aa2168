//! A copy of the tree to apply patches to. A file is written only where it differs, so cargo sees
//! no change where there is none.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::tree;

pub struct Copy {
    original: PathBuf,
    root: PathBuf,
    /// Relative to both roots.
    files: Vec<PathBuf>,
}

impl Copy {
    /// Makes or refreshes the copy of `original` at `root`.
    pub fn of(original: &Path, root: PathBuf) -> Result<Self> {
        let copy = Copy { original: original.to_path_buf(), files: tree::files(original)?, root };
        copy.restore()?;
        Ok(copy)
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Applies a patch; git's own words if it does not fit.
    pub fn apply(&self, patch: &Path) -> Result<Result<(), String>> {
        // Within a repository git would take paths as the repository's, and skip what lies outside.
        let ceiling = self.root.parent().unwrap_or(&self.root);
        let output = Command::new("git")
            .arg("apply")
            .arg(patch)
            .current_dir(&self.root)
            .env("GIT_CEILING_DIRECTORIES", ceiling)
            .env_remove("GIT_DIR")
            .output()
            .context("git apply: git is needed")?;
        Ok(match output.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        })
    }

    /// Makes the copy equal to the original again.
    pub fn restore(&self) -> Result<()> {
        for file in &self.files {
            let (from, to) = (self.original.join(file), self.root.join(file));
            let wanted = fs::read(&from).with_context(|| from.display().to_string())?;
            if fs::read(&to).is_ok_and(|found| found == wanted) {
                continue;
            }
            let folder = to.parent().unwrap_or(&self.root);
            fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
            fs::write(&to, wanted).with_context(|| to.display().to_string())?;
        }
        let known: HashSet<&Path> = self.files.iter().map(PathBuf::as_path).collect();
        self.remove_others(&self.root, &known)
    }

    fn remove_others(&self, folder: &Path, known: &HashSet<&Path>) -> Result<()> {
        for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            let relative = path.strip_prefix(&self.root).unwrap_or(&path);
            if path.is_dir() {
                self.remove_others(&path, known)?;
            } else if !known.contains(relative) {
                fs::remove_file(&path).with_context(|| path.display().to_string())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("amphora-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).expect("a temporary folder");
            Folder(path)
        }

        fn write(&self, file: &str, contents: &str) -> PathBuf {
            let path = self.0.join(file);
            fs::create_dir_all(path.parent().expect("inside")).expect("a folder");
            fs::write(&path, contents).expect("writable");
            path
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).ok();
        }
    }

    const DIFF: &str = "# mutant: x\ndiff --git a/src/a.txt b/src/a.txt\n--- a/src/a.txt\n\
                        +++ b/src/a.txt\n@@ -1 +1 @@\n-one\n+two\n";

    /// As in use: the copy lies in an ignored folder of the repository itself.
    fn repository(name: &str) -> (Folder, Copy, PathBuf) {
        let folder = Folder::new(name);
        folder.write("src/a.txt", "one\n");
        folder.write(".gitignore", "/target\n*.patch\n");
        let patch = folder.write("x.patch", DIFF);
        let init = Command::new("git").arg("init").arg("--quiet").current_dir(&folder.0).status();
        assert!(init.expect("git").success());
        let copy = Copy::of(&folder.0, folder.0.join("target/mutants/tree")).expect("copied");
        (folder, copy, patch)
    }

    #[test]
    fn a_patch_changes_the_copy_alone_and_is_taken_back() {
        let (folder, copy, patch) = repository("apply");
        let read = |root: &Path| fs::read_to_string(root.join("src/a.txt")).expect("there");
        assert_eq!(copy.apply(&patch).expect("git runs"), Ok(()));
        assert_eq!((read(&folder.0).as_str(), read(copy.root()).as_str()), ("one\n", "two\n"));
        assert!(copy.apply(&patch).expect("git runs").is_err());
        fs::write(copy.root().join("src/new.txt"), "x").expect("writable");
        copy.restore().expect("restored");
        assert_eq!(read(copy.root()), "one\n");
        assert!(!copy.root().join("src/new.txt").exists());
    }

    #[test]
    fn an_equal_file_is_not_written_again() {
        let (_folder, copy, _) = repository("equal");
        let changed = || fs::metadata(copy.root().join("src/a.txt")).and_then(|m| m.modified());
        let before = changed().expect("there");
        copy.restore().expect("restored");
        assert_eq!(changed().expect("there"), before);
    }
}
