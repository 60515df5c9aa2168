//! The files of a search: what is found, and what earlier searches left in the same folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use amphora_hal::Device;
use anyhow::Context;

use super::super::Cuda;
use super::super::tuning::{AnyFile, Entry, File, Made, Operator, Tuning, file_name};
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
    pub fn file<U: Operator>(device: &Cuda, entry: Entry<U>) -> AnyFile {
        let (gpu, operator) = (gpu(device).to_owned(), U::NAME.to_owned());
        U::any(File { gpu, operator, made: None, entries: vec![entry] })
    }

    pub fn add<U: Operator>(&mut self, device: &Cuda, entry: Entry<U>) -> anyhow::Result<()> {
        let file = Self::file(device, entry);
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

/// The files of earlier searches for the same GPU.
#[derive(Debug)]
pub struct Earlier {
    files: BTreeMap<&'static str, AnyFile>,
}

impl Earlier {
    /// Reads those that are in `folder`, before a search takes its time.
    pub fn read(folder: &Path, device: &Cuda) -> anyhow::Result<Self> {
        let mut files = BTreeMap::new();
        for operator in AnyFile::NAMES {
            let path = folder.join(file_name(gpu(device), operator));
            if path.exists() {
                let text = std::fs::read_to_string(&path);
                let text = text.with_context(|| path.display().to_string())?;
                let file = AnyFile::parse(&text).with_context(|| path.display().to_string())?;
                files.insert(operator, file);
            }
        }
        Ok(Earlier { files })
    }

    /// Writes what is found, and what was found earlier for other calls.
    pub fn write(mut self, folder: &Path, found: Found) -> anyhow::Result<Vec<PathBuf>> {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
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
            let path = folder.join(file_name(all.gpu(), operator));
            std::fs::write(&path, all.text()).with_context(|| path.display().to_string())?;
            written.push(path);
        }
        Ok(written)
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
