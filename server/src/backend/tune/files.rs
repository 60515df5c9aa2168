//! The files of a search: what is found, and what earlier searches left in the same folder.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use amphora_hal::Device;
use anyhow::{Context, ensure};

use super::super::Cuda;
use super::super::tuning::{AnyFile, Entry, File, Made, Operator, Tuning, file_name};
use crate::console::Voice;
use crate::text::clock::strftime;

/// The GPU as its driver names it.
pub fn gpu(device: &Cuda) -> &str {
    &device.caps().name
}

/// What a search has found so far, a file for each operator.
#[derive(Debug, Default)]
pub struct Found {
    files: BTreeMap<&'static str, AnyFile>,
}

impl Found {
    /// A file of one entry.
    pub fn file<U: Operator>(gpu: &str, entry: Entry<U>) -> AnyFile {
        let (gpu, operator) = (gpu.to_owned(), U::NAME.to_owned());
        U::any(File { gpu, operator, made: None, entries: vec![entry] })
    }

    pub fn add<U: Operator>(&mut self, gpu: &str, entry: Entry<U>) -> anyhow::Result<()> {
        let file = Self::file(gpu, entry);
        match self.files.get_mut(U::NAME) {
            Some(earlier) => earlier.absorb(file)?,
            None => {
                self.files.insert(U::NAME, file);
            }
        }
        Ok(())
    }

    /// What is found in front of what the device has.
    pub fn tuning(&self, device: &Cuda) -> Tuning {
        let mut tuning = device.choices();
        for file in self.files.values() {
            tuning.put_first(file.clone());
        }
        tuning
    }
}

/// The folder of a search, with the files of earlier ones for the same GPU.
#[derive(Debug)]
pub struct Earlier<'a> {
    folder: &'a Path,
    files: BTreeMap<&'static str, AnyFile>,
}

impl<'a> Earlier<'a> {
    /// Makes the folder and reads the files that are in it: what is wrong there is said before a search
    /// takes its time.
    pub fn read(folder: &'a Path, gpu: &str) -> anyhow::Result<Self> {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let mut files = BTreeMap::new();
        for operator in AnyFile::NAMES {
            let path = folder.join(file_name(gpu, operator));
            if path.exists() {
                let at = || path.display().to_string();
                let text = std::fs::read_to_string(&path).with_context(at)?;
                let file = AnyFile::parse(&text).with_context(at)?;
                for (field, is, expected) in
                    [("gpu", file.gpu(), gpu), ("operator", file.operator(), operator)]
                {
                    ensure!(is == expected, "{}: {field}: {is}: expected {expected}", at());
                }
                files.insert(operator, file);
            }
        }
        Ok(Earlier { folder, files })
    }

    /// Runs a search and writes what it found, though it failed in the end, with what was found earlier
    /// for other calls.
    pub fn search(
        self,
        search: impl FnOnce(&mut Found) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut found = Found::default();
        let outcome = search(&mut found);
        match (outcome, self.write(found)) {
            (Err(failed), Err(unwritten)) => Err(failed.context(format!("{unwritten:#}"))),
            (outcome, written) => outcome.and(written),
        }
    }

    fn write(mut self, found: Found) -> anyhow::Result<()> {
        let made = made()?;
        let mut written = Vec::new();
        for (operator, file) in found.files {
            let mut all = match self.files.remove(operator) {
                Some(mut earlier) => {
                    earlier.absorb(file)?;
                    earlier
                }
                None => file,
            };
            all.set_made(made.clone());
            let path = self.folder.join(file_name(all.gpu(), operator));
            std::fs::write(&path, all.text()).with_context(|| path.display().to_string())?;
            written.push(path);
        }
        // Nothing is left unwritten because nobody reads on.
        for path in written {
            Voice::Out.line(format_args!("wrote {}", path.display()))?;
        }
        Ok(())
    }
}

fn made() -> anyhow::Result<Made> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let date = strftime("%F", seconds).unwrap_or_default();
    // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  ..", or with "Open" words in between.
    let version = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let is_version =
        |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    let driver = version.split_whitespace().find(is_version).unwrap_or("unknown").to_owned();
    let arguments = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
    Ok(Made { date, driver, command: format!("amphora {arguments}") })
}

#[cfg(test)]
mod tests {
    use super::super::super::tuning::{DenseUse, RouteUse, When};
    use super::*;

    const GPU: &str = "NVIDIA H200";

    /// A folder that is not there yet, and gone with it.
    struct Folder(std::path::PathBuf);

    impl Folder {
        fn new(test: &str) -> Self {
            let path = std::env::temp_dir().join(format!("amphora-{test}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            Folder(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn left_alone<U: Operator>(tokens: usize) -> Entry<U> {
        let when = When { tokens: Some(tokens), ..When::default() };
        Entry { when, choice: None, measured: None }
    }

    #[test]
    fn what_was_found_is_written_though_the_search_failed() {
        let folder = Folder::new("tune-failed");
        for tokens in [1, 8] {
            let earlier = Earlier::read(&folder.0, GPU).expect("a new folder, then a good file");
            let failed = earlier.search(|found| {
                found.add::<DenseUse>(GPU, left_alone(tokens))?;
                anyhow::bail!("the device is lost")
            });
            assert_eq!(failed.expect_err("it failed").to_string(), "the device is lost");
        }
        let files = Earlier::read(&folder.0, GPU).expect("good files").files;
        assert_eq!(files[DenseUse::NAME].entries(), 2, "{files:?}");
    }

    #[test]
    fn a_file_that_cannot_be_added_to_is_refused_before_the_search() {
        let folder = Folder::new("tune-refused");
        std::fs::create_dir_all(&folder.0).expect("a temporary folder");
        let path = folder.0.join(file_name(GPU, DenseUse::NAME));
        let refused = |file: AnyFile, parts: &[&str]| {
            std::fs::write(&path, file.text()).expect("it was just made");
            let error = format!("{:#}", Earlier::read(&folder.0, GPU).expect_err("no such file"));
            for part in parts {
                assert!(error.contains(part), "{part} in {error}");
            }
        };
        let other = Found::file::<DenseUse>("NVIDIA A100", left_alone(1));
        refused(other, &["NVIDIA_H200.linear.json", "gpu", "NVIDIA A100", "expected NVIDIA H200"]);
        let other = Found::file::<RouteUse>(GPU, left_alone(1));
        refused(other, &["NVIDIA_H200.linear.json", "operator", "moe_route", "expected linear"]);
        let error = Earlier::read(&path, GPU).expect_err("no folder can be there").to_string();
        assert!(error.contains("NVIDIA_H200.linear.json"), "{error}");
    }
}
