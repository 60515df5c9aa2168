//! Where files come from: a folder, bytes embedded in the binary, or bytes in memory. The demo model
//! and its adapters are embedded, fuzzing makes files in memory; everything else reads all alike.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::FileError;

/// One file of an embedded folder: its name and its bytes.
pub type EmbeddedFile = (&'static str, &'static [u8]);

/// One file in memory: its name and its bytes, shared by all clones of its source.
pub type MemoryFile = (String, Arc<[u8]>);

/// A flat set of files.
#[derive(Debug, Clone)]
pub enum Source {
    /// A folder on disk.
    Folder(PathBuf),
    /// Files embedded in the binary.
    Embedded {
        /// Stands for the folder in messages.
        name: &'static str,
        /// The files.
        files: &'static [EmbeddedFile],
    },
    /// Files that were made or received in memory.
    Memory {
        /// Stands for the folder in messages.
        name: String,
        /// The files.
        files: Vec<MemoryFile>,
    },
}

impl Source {
    /// The folder as messages show it.
    pub fn name(&self) -> String {
        match self {
            Source::Folder(path) => path.display().to_string(),
            Source::Embedded { name, .. } => (*name).to_owned(),
            Source::Memory { name, .. } => name.clone(),
        }
    }

    /// Where `file` would be.
    pub fn path(&self, file: &str) -> PathBuf {
        match self {
            Source::Folder(path) => path.join(file),
            Source::Embedded { name, .. } => Path::new(name).join(file),
            Source::Memory { name, .. } => Path::new(name).join(file),
        }
    }

    /// The files' names, sorted; none if a folder cannot be listed.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = match self {
            Source::Folder(path) => std::fs::read_dir(path)
                .into_iter()
                .flatten()
                .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
                .collect(),
            Source::Embedded { files, .. } => files.iter().map(|(n, _)| (*n).to_owned()).collect(),
            Source::Memory { files, .. } => files.iter().map(|(n, _)| n.clone()).collect(),
        };
        names.sort();
        names
    }

    /// Whether there is such a file.
    pub fn has(&self, file: &str) -> bool {
        match self {
            Source::Folder(path) => path.join(file).is_file(),
            Source::Embedded { files, .. } => files.iter().any(|(name, _)| *name == file),
            Source::Memory { files, .. } => files.iter().any(|(name, _)| name == file),
        }
    }

    /// The bytes of `file` read whole, or `None` if there is no such file. More than `limit` bytes
    /// are refused before they are read.
    ///
    /// # Errors
    /// The file is larger than `limit`, or the system refuses.
    pub fn read(&self, file: &str, limit: u64) -> Result<Option<Vec<u8>>, FileError> {
        let held = match self {
            Source::Folder(path) => return read_file(&path.join(file), limit),
            Source::Embedded { files, .. } => {
                files.iter().find(|(name, _)| *name == file).map(|(_, bytes)| *bytes)
            }
            Source::Memory { files, .. } => {
                files.iter().find(|(name, _)| name == file).map(|(_, bytes)| &**bytes)
            }
        };
        match held {
            Some(held) if held.len() as u64 > limit => {
                Err(FileError::TooLarge { path: self.path(file), bytes: held.len() as u64, limit })
            }
            held => Ok(held.map(<[u8]>::to_vec)),
        }
    }

    /// The same as text.
    ///
    /// # Errors
    /// As [`Source::read`], or the bytes are not UTF-8.
    pub fn read_text(&self, file: &str, limit: u64) -> Result<Option<String>, FileError> {
        let Some(bytes) = self.read(file, limit)? else {
            return Ok(None);
        };
        String::from_utf8(bytes).map(Some).map_err(|e| FileError::Corrupt {
            path: self.path(file),
            what: format!("not UTF-8 text: {e}"),
        })
    }

    /// The same, of a file that must be there.
    ///
    /// # Errors
    /// As [`Source::read_text`], or there is no such file.
    pub fn need_text(
        &self,
        file: &str,
        limit: u64,
        expected: &'static str,
    ) -> Result<String, FileError> {
        self.read_text(file, limit)?
            .ok_or_else(|| FileError::Missing { path: self.path(file), expected })
    }
}

fn read_file(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, FileError> {
    let too_large = |bytes| FileError::TooLarge { path: path.to_owned(), bytes, limit };
    let io = |reason| FileError::Io { path: path.to_owned(), reason };
    // Asked before it is opened: opening a named pipe waits for a writer.
    match std::fs::metadata(path) {
        Ok(file) if !file.is_file() => {
            let what = "not a regular file".to_owned();
            return Err(FileError::Corrupt { path: path.to_owned(), what });
        }
        Ok(_) => {}
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io(e)),
    }
    let opened = match std::fs::File::open(path) {
        Ok(opened) => opened,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io(e)),
    };
    let bytes = opened.metadata().map_err(io)?.len();
    if bytes > limit {
        return Err(too_large(bytes));
    }
    let mut content = Vec::with_capacity(bytes as usize);
    // The file may grow while it is read; the limit holds all the same.
    let read = opened.take(limit + 1).read_to_end(&mut content).map_err(io)?;
    if read as u64 > limit {
        return Err(too_large(read as u64));
    }
    Ok(Some(content))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_in_memory_read_like_any_other() {
        let source = Source::Memory {
            name: "made".to_owned(),
            files: vec![("a.json".to_owned(), Arc::from(*b"{}"))],
        };
        assert!(source.has("a.json") && !source.has("b.json"));
        assert_eq!(source.read_text("a.json", 2).expect("within the limit").as_deref(), Some("{}"));
        assert_eq!(source.read("b.json", 2).expect("only missing"), None);
        let error = source.read("a.json", 1).expect_err("over the limit").to_string();
        assert!(error.contains("made/a.json"), "{error}");
    }
}
