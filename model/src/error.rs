//! What can be wrong with a model folder. Every error names the file, the field or tensor, what was
//! found there and what was expected. Refused adapters have their own type, [`crate::adapter`]'s.

use std::path::PathBuf;

/// Shorthand of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model could not be loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `config.json` or `generation_config.json`.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A file that is missing, unreadable or not in its format.
    #[error(transparent)]
    File(#[from] FileError),
    /// A tensor that is missing, of another shape, or not known.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// The device, or a bug that `hal` noticed.
    #[error(transparent)]
    Device(#[from] amphora_hal::Error),
}

/// Why a configuration file was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The text is not JSON, or not an object.
    #[error("{file}: not a JSON object: {reason}")]
    NotJson {
        /// The file.
        file: String,
        /// The parser's words.
        reason: String,
    },
    /// A field that must be there is not.
    #[error("{file}: field `{field}` is missing, expected {expected}")]
    Missing {
        /// The file.
        file: String,
        /// The field.
        field: String,
        /// What it must hold.
        expected: String,
    },
    /// A field holds what it must not.
    #[error("{file}: field `{field}` is {found}, expected {expected}")]
    Field {
        /// The file.
        file: String,
        /// The field.
        field: String,
        /// What it holds.
        found: String,
        /// What it must hold.
        expected: String,
    },
    /// The architecture is not one of ours.
    #[error("{file}: model_type `{found}` is not supported; supported: {supported}")]
    ModelType {
        /// The file.
        file: String,
        /// What it says.
        found: String,
        /// What there is.
        supported: String,
    },
    /// The architecture is known, and no file of this crate runs it.
    #[error("{file}: model_type `{found}` is not supported yet; supported: {supported}")]
    NotYet {
        /// The file.
        file: String,
        /// What it says.
        found: String,
        /// What there is.
        supported: String,
    },
}

/// Why a file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// A file that must be there is not.
    #[error("{}: not found; expected {expected}", path.display())]
    Missing {
        /// Where it was looked for.
        path: PathBuf,
        /// What it would hold.
        expected: &'static str,
    },
    /// The system refused.
    #[error("{}: {reason}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's words.
        reason: std::io::Error,
    },
    /// The file is larger than any sound one.
    #[error("{}: {bytes} bytes, expected at most {limit}", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// The bytes are not in the file's format.
    #[error("{}: {what}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what was expected.
        what: String,
    },
    /// The index names a shard that is not there.
    #[error("{}: names shard `{shard}` (for tensor `{tensor}`), which is not in the folder", index.display())]
    MissingShard {
        /// The index file.
        index: PathBuf,
        /// The shard.
        shard: String,
        /// The first tensor it should hold.
        tensor: String,
    },
    /// The index names a tensor that its shard does not have.
    #[error("{}: places tensor `{tensor}` in `{shard}`, which does not have it", index.display())]
    NotInShard {
        /// The index file.
        index: PathBuf,
        /// The shard.
        shard: String,
        /// The tensor.
        tensor: String,
    },
    /// A shard has a tensor that the index places nowhere.
    #[error("{}: does not place tensor `{tensor}`, which is in `{shard}`", index.display())]
    NotInIndex {
        /// The index file.
        index: PathBuf,
        /// The shard.
        shard: String,
        /// The tensor.
        tensor: String,
    },
    /// The folder has a shard that the index does not name.
    #[error("{}: does not name shard `{shard}`, which is in the folder", index.display())]
    SurplusShard {
        /// The index file.
        index: PathBuf,
        /// The shard.
        shard: String,
    },
}

/// Why the tensors of a model do not make the model that its configuration describes.
#[derive(Debug, thiserror::Error)]
pub enum WeightError {
    /// A tensor that the architecture needs is not there.
    #[error("{folder}: tensor `{tensor}` is missing, expected shape {expected:?}")]
    Missing {
        /// The model folder.
        folder: String,
        /// The tensor.
        tensor: String,
        /// Its shape by the configuration.
        expected: Vec<usize>,
    },
    /// A tensor has another shape than the configuration says.
    #[error(
        "{folder}: tensor `{tensor}` has shape {found:?}, expected {expected:?} by config.json"
    )]
    Shape {
        /// The model folder.
        folder: String,
        /// The tensor.
        tensor: String,
        /// Its shape in the file.
        found: Vec<usize>,
        /// Its shape by the configuration.
        expected: Vec<usize>,
    },
    /// An expert has another shape than the others of its layer, which one product cannot have.
    #[error(
        "{folder}: expert tensor `{tensor}` has shape {found:?}, others of its layer have {others:?}; \
         experts of unlike shapes are not supported"
    )]
    UnlikeExperts {
        /// The model folder.
        folder: String,
        /// The tensor.
        tensor: String,
        /// Its shape in the file.
        found: Vec<usize>,
        /// The shape that the others have, and config.json says.
        others: Vec<usize>,
    },
    /// A tensor has an element type that cannot be read as such a weight.
    #[error("{folder}: tensor `{tensor}` is {found}, expected {expected}")]
    DType {
        /// The model folder.
        folder: String,
        /// The tensor.
        tensor: String,
        /// Its type in the file.
        found: String,
        /// The types that can be read.
        expected: &'static str,
    },
    /// Tensors that play no part in the architecture: another model, or a format not understood.
    #[error("{folder}: {count} tensors play no part in {architecture}, for example {examples:?}")]
    Unused {
        /// The model folder.
        folder: String,
        /// The architecture.
        architecture: &'static str,
        /// How many.
        count: usize,
        /// The first few.
        examples: Vec<String>,
    },
    /// The shape of the model is one that no packed weight can have.
    #[error("{folder}: {what}, expected {expected}")]
    Unsupported {
        /// The model folder.
        folder: String,
        /// The fact.
        what: String,
        /// What would do.
        expected: &'static str,
    },
}
