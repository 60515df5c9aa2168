//! A model folder: configuration, tokenizer and chat template as text, and its tensors by name, in
//! one safetensors file or in many with an index.
//!
//! Tensor files are mapped, since a base model is large and read once, front to back. This is the
//! only module of the crate with `unsafe`. Adapters are never mapped: see [`crate::adapter`].

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::Dtype;
use serde_json::Value;

use crate::error::FileError;
use crate::safetensors_header::read_header;
use crate::source::{EmbeddedFile, Source};
use crate::synthetic::{self, Spread};

/// No configuration or template is larger.
const TEXT_LIMIT: u64 = 64 << 20;
/// Tokenizers hold vocabularies and merges.
const TOKENIZER_LIMIT: u64 = 512 << 20;
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// One tensor of a file, as it lies there.
#[derive(Debug, Clone, Copy)]
pub struct FileTensor<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Extents, outermost first.
    pub shape: &'a [usize],
    /// Little-endian, row-major, at no particular alignment.
    pub bytes: &'a [u8],
}

/// An opened model folder.
#[derive(Debug)]
pub struct ModelFiles {
    source: Source,
    shards: Vec<Bytes>,
    tensors: BTreeMap<String, Place>,
    origin: Origin,
}

/// Whether tensors are read or made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// They lie in files.
    Files,
    /// They are made at load: see [`crate::synthetic`].
    Synthetic(Spread),
}

#[derive(Debug)]
enum Bytes {
    Mapped(Mmap),
    Embedded(&'static [u8]),
    Shared(Arc<[u8]>),
}

#[derive(Debug)]
struct Place {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    range: Range<usize>,
}

impl ModelFiles {
    /// Opens a folder on disk. Its tensors are found and their headers checked; data is not read.
    ///
    /// # Errors
    /// The folder or its tensor files are missing, cut short, or contradict their index.
    pub fn open(folder: &Path) -> Result<Self, FileError> {
        if !folder.is_dir() {
            return Err(FileError::Missing {
                path: folder.to_owned(),
                expected: "a model folder with config.json and model.safetensors",
            });
        }
        Self::from_source(Source::Folder(folder.to_owned()))
    }

    /// Opens files embedded in the binary; `name` stands for the folder in messages.
    ///
    /// # Errors
    /// As [`ModelFiles::open`].
    pub fn embedded(name: &'static str, files: &'static [EmbeddedFile]) -> Result<Self, FileError> {
        Self::from_source(Source::Embedded { name, files })
    }

    /// Opens files wherever they are.
    ///
    /// # Errors
    /// As [`ModelFiles::open`].
    pub fn from_source(source: Source) -> Result<Self, FileError> {
        let mut files = Self::without_tensors(source, Origin::Files);
        if files.source.has(INDEX) {
            files.add_indexed()?;
        } else if files.source.has(SINGLE) {
            files.add_shard(SINGLE)?;
        } else {
            return Err(FileError::Missing {
                path: files.source.path(SINGLE),
                expected: "the model's tensors (or model.safetensors.index.json and its shards)",
            });
        }
        Ok(files)
    }

    /// A model without files: `name` is one of [`crate::synthetic::names`]. It has a configuration and
    /// no text files, and any tensor that its architecture needs; its routers choose experts by `spread`.
    ///
    /// # Errors
    /// There is no such shape.
    pub fn synthetic(name: &str, spread: Spread) -> Result<Self, FileError> {
        let folder = format!("{}{name}", synthetic::PREFIX);
        let Some(config) = synthetic::config(name) else {
            let known: Vec<&str> = synthetic::names().collect();
            let what = format!("no such shape; there are {}", known.join(", "));
            return Err(FileError::Corrupt { path: folder.into(), what });
        };
        let files = vec![("config.json".to_owned(), Arc::from(config.as_bytes()))];
        Ok(Self::without_tensors(Source::Memory { name: folder, files }, Origin::Synthetic(spread)))
    }

    fn without_tensors(source: Source, origin: Origin) -> Self {
        ModelFiles { source, shards: Vec::new(), tensors: BTreeMap::new(), origin }
    }

    pub(crate) fn origin(&self) -> Origin {
        self.origin
    }

    /// The folder as messages show it.
    pub fn name(&self) -> String {
        self.source.name()
    }

    /// Where the folder is.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The text of `config.json`.
    ///
    /// # Errors
    /// It is missing or unreadable.
    pub fn config(&self) -> Result<String, FileError> {
        self.source.need_text("config.json", TEXT_LIMIT, "the model's configuration")
    }

    /// The text of `generation_config.json`, if there is one.
    ///
    /// # Errors
    /// It is unreadable.
    pub fn generation_config(&self) -> Result<Option<String>, FileError> {
        self.source.read_text("generation_config.json", TEXT_LIMIT)
    }

    /// The text of `tokenizer.json`.
    ///
    /// # Errors
    /// It is missing or unreadable.
    pub fn tokenizer(&self) -> Result<String, FileError> {
        self.source.need_text(
            "tokenizer.json",
            TOKENIZER_LIMIT,
            "the tokenizer in the format of the tokenizers library",
        )
    }

    /// The text of `tokenizer_config.json`, if there is one.
    ///
    /// # Errors
    /// It is unreadable.
    pub fn tokenizer_config(&self) -> Result<Option<String>, FileError> {
        self.source.read_text("tokenizer_config.json", TEXT_LIMIT)
    }

    /// The chat template: `chat_template.jinja`, else the one in `tokenizer_config.json` (a string,
    /// or a list of named templates of which `default` counts). `None` for a model without one.
    ///
    /// # Errors
    /// A file is unreadable, or the field holds something else.
    pub fn chat_template(&self) -> Result<Option<String>, FileError> {
        if let Some(text) = self.source.read_text("chat_template.jinja", TEXT_LIMIT)? {
            return Ok(Some(text));
        }
        let Some(text) = self.tokenizer_config()? else {
            return Ok(None);
        };
        let corrupt = |what: String| FileError::Corrupt {
            path: self.source.path("tokenizer_config.json"),
            what,
        };
        let config: Value =
            serde_json::from_str(&text).map_err(|e| corrupt(format!("not JSON: {e}")))?;
        match config.get("chat_template") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(template)) => Ok(Some(template.clone())),
            Some(Value::Array(named)) => named
                .iter()
                .find(|t| t.get("name").and_then(Value::as_str) == Some("default"))
                .and_then(|t| t.get("template")?.as_str())
                .map(|t| Some(t.to_owned()))
                .ok_or_else(|| {
                    corrupt("field `chat_template` lists no template named `default`".to_owned())
                }),
            Some(_) => Err(corrupt(
                "field `chat_template` is neither a string nor a list of named templates"
                    .to_owned(),
            )),
        }
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<FileTensor<'_>> {
        let place = self.tensors.get(name)?;
        let bytes = self.shards[place.shard].all();
        Some(FileTensor {
            dtype: place.dtype,
            shape: &place.shape,
            bytes: &bytes[place.range.clone()],
        })
    }

    /// All tensors' names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Files that hold tensors.
    pub fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> usize {
        self.tensors.values().map(|p| p.range.len()).sum()
    }

    fn add_indexed(&mut self) -> Result<(), FileError> {
        let index = self.source.path(INDEX);
        let corrupt = |what: String| FileError::Corrupt { path: index.clone(), what };
        let text = self.source.need_text(INDEX, TEXT_LIMIT, "the index of the shards")?;
        let parsed: Value =
            serde_json::from_str(&text).map_err(|e| corrupt(format!("not JSON: {e}")))?;
        let Some(map) = parsed.get("weight_map").and_then(Value::as_object) else {
            return Err(corrupt(
                "field `weight_map` is missing, expected an object of tensor: shard".to_owned(),
            ));
        };
        let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, shard) in map {
            // A shard is a file of this folder, whatever the index says.
            let plain =
                shard.as_str().filter(|s| !s.is_empty() && !s.contains(['/', '\\']) && *s != "..");
            let Some(shard) = plain else {
                return Err(corrupt(format!(
                    "`weight_map` places `{tensor}` in {shard}, expected a file name"
                )));
            };
            shards.entry(shard).or_default().push(tensor);
        }
        let shard_names: Vec<&str> = shards.keys().copied().collect();
        for (shard, tensors) in shards {
            if !self.source.has(shard) {
                return Err(FileError::MissingShard {
                    index,
                    shard: shard.to_owned(),
                    tensor: tensors[0].to_owned(),
                });
            }
            self.add_shard(shard)?;
            let here = self.shards.len() - 1;
            for tensor in tensors {
                if self.tensors.get(tensor).is_none_or(|p| p.shard != here) {
                    return Err(FileError::NotInShard {
                        index,
                        shard: shard.to_owned(),
                        tensor: tensor.to_owned(),
                    });
                }
            }
        }
        let placed = |name: &str| map.get(name).is_some();
        if let Some((tensor, place)) = self.tensors.iter().find(|(name, _)| !placed(name)) {
            return Err(FileError::NotInIndex {
                index,
                shard: shard_names[place.shard].to_owned(),
                tensor: tensor.clone(),
            });
        }
        let known = |file: &String| shard_names.contains(&file.as_str());
        match self.source.names().into_iter().find(|file| is_shard(file) && !known(file)) {
            Some(shard) => Err(FileError::SurplusShard { index, shard }),
            None => Ok(()),
        }
    }

    fn add_shard(&mut self, file: &str) -> Result<(), FileError> {
        let path = self.source.path(file);
        let missing = || FileError::Missing { path: path.clone(), expected: "the model's tensors" };
        let bytes = match &self.source {
            Source::Folder(_) => map(&path)?,
            Source::Embedded { files, .. } => files
                .iter()
                .find(|(name, _)| *name == file)
                .map(|(_, bytes)| Bytes::Embedded(bytes))
                .ok_or_else(missing)?,
            Source::Memory { files, .. } => files
                .iter()
                .find(|(name, _)| name == file)
                .map(|(_, bytes)| Bytes::Shared(bytes.clone()))
                .ok_or_else(missing)?,
        };
        let (data, header) = read_header(&path, bytes.all())?;
        let shard = self.shards.len();
        for (name, info) in header.tensors() {
            let (start, end) = info.data_offsets;
            let place = Place {
                shard,
                dtype: info.dtype,
                shape: info.shape.clone(),
                range: data + start..data + end,
            };
            if self.tensors.insert(name.clone(), place).is_some() {
                return Err(FileError::Corrupt {
                    path,
                    what: format!("tensor `{name}` is in another shard too"),
                });
            }
        }
        self.shards.push(bytes);
        Ok(())
    }
}

/// `model-00002-of-00003.safetensors`: a shard of some save. Others keep files of another format
/// beside a model, which concern nobody.
fn is_shard(file: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    file.strip_prefix("model-")
        .and_then(|rest| rest.strip_suffix(".safetensors"))
        .and_then(|rest| rest.split_once("-of-"))
        .is_some_and(|(shard, shards)| number(shard) && number(shards))
}

impl Bytes {
    fn all(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Embedded(bytes) => bytes,
            Bytes::Shared(bytes) => bytes,
        }
    }
}

fn map(path: &PathBuf) -> Result<Bytes, FileError> {
    let io = |reason| FileError::Io { path: path.clone(), reason };
    let file = std::fs::File::open(path).map_err(io)?;
    if file.metadata().map_err(io)?.len() == 0 {
        return Err(FileError::Corrupt {
            path: path.clone(),
            what: "0 bytes, expected a safetensors file".to_owned(),
        });
    }
    // SAFETY: the mapping is read-only and private to this process, and we never hand out a mutable
    // view of it. What Rust cannot see is another process writing to the file or cutting it short:
    // written bytes would change under a `&[u8]`, and a read past a new end raises SIGBUS. We rely
    // on the operator, who owns the model folder, not to change a base model in place while it
    // is being loaded; replacing the file by a rename is fine, since the mapping keeps the old
    // inode. Bytes are read during loading alone, every offset was checked against the length at
    // mapping, and no value read is ever trusted as an index, so bytes that do change give wrong
    // numbers, not a wrong access.
    let mapped = unsafe { Mmap::map(&file) }.map_err(io)?;
    Ok(Bytes::Mapped(mapped))
}

#[cfg(test)]
mod tests;
