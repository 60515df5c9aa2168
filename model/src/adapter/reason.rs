//! Why an adapter is refused: every tensor of its file is applied, or nothing is.

use crate::config::MlpKind;
use crate::error::{ConfigError, FileError};

/// A refused adapter, with as many reasons as were cheap to find.
#[derive(Debug, thiserror::Error)]
#[error("adapter {adapter} is refused: {}", Listed(.reasons))]
pub struct AdapterRefused {
    /// The folder.
    pub adapter: String,
    /// At least one reason.
    pub reasons: Vec<Reason>,
}

/// One reason.
#[derive(Debug, thiserror::Error)]
pub enum Reason {
    /// A file that is missing, cut short or not in its format.
    #[error(transparent)]
    File(#[from] FileError),
    /// A field of `adapter_config.json` that is missing or holds what it must not.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A feature beyond plain LoRA, which would change the result.
    #[error("`{source_of}` asks for {feature}, which is not supported")]
    Unsupported {
        /// The field or tensor that asks for it.
        source_of: String,
        /// The feature.
        feature: &'static str,
    },
    /// The file has no tensor at all.
    #[error("adapter_model.safetensors holds no tensors, expected lora_A and lora_B pairs")]
    NoTensors,
    /// Names that belong to no module of the served model.
    #[error(
        "{count} of {of} tensors match no module of the model, for example {}; expected names like \
         `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`",
        Quoted(.examples)
    )]
    Unmatched {
        /// How many.
        count: usize,
        /// Tensors of the file.
        of: usize,
        /// The first few.
        examples: Vec<String>,
    },
    /// A layer or expert the model does not have.
    #[error("tensor `{tensor}` is for {what} {found}, but the model has {limit}")]
    OutOfRange {
        /// The tensor.
        tensor: String,
        /// `layer` or `expert`.
        what: &'static str,
        /// Its number.
        found: usize,
        /// How many there are.
        limit: usize,
    },
    /// Experts of a dense layer, or a dense MLP of a layer with experts.
    #[error("tensor `{tensor}` does not fit layer {layer} of the model, which has {}", match .is {
        MlpKind::Dense => "one dense MLP and no experts",
        MlpKind::Experts => "experts and no dense MLP",
    })]
    OtherMlp {
        /// The tensor.
        tensor: String,
        /// The layer.
        layer: usize,
        /// What the layer has.
        is: MlpKind,
    },
    /// `target_parameters` names what the model does not have.
    #[error(
        "adapter_config.json: `target_parameters` names `{entry}`, which is no parameter of the model that adapters can change"
    )]
    UnknownParameter {
        /// The entry.
        entry: String,
    },
    /// A tensor whose module the configuration does not target: file and configuration disagree.
    #[error(
        "tensor `{tensor}` is for a module that adapter_config.json does not target (neither `target_modules` nor `target_parameters`)"
    )]
    NotTargeted {
        /// The tensor.
        tensor: String,
    },
    /// Two pairs for one projection: fused and expert by expert.
    #[error(
        "layer {layer}: {} of expert {expert} is in the file twice, fused and on its own",
        .target.name()
    )]
    Twice {
        /// The layer.
        layer: usize,
        /// The projection.
        target: super::Target,
        /// The expert.
        expert: usize,
    },
    /// Two names for one half of one module.
    #[error("tensors `{tensor}` and `{other}` are for the same module")]
    SameModule {
        /// The tensor.
        tensor: String,
        /// The other one.
        other: String,
    },
    /// One half of a pair is missing.
    #[error("tensor `{present}` is there without `{missing}`")]
    MissingHalf {
        /// The tensor that is there.
        present: String,
        /// The one that is not.
        missing: String,
    },
    /// Both expert parameters of a layer are targeted, but only one pair is there.
    #[error(
        "layer {layer}: both gate_up_proj and down_proj of the experts are targeted, but `{missing}` is missing"
    )]
    MissingPair {
        /// The layer.
        layer: usize,
        /// The tensor that is not there.
        missing: String,
    },
    /// A tensor of another shape than its module wants.
    #[error("tensor `{tensor}` has shape {found:?}, expected {expected}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// What would fit.
        expected: String,
    },
    /// A tensor of another rank than the configuration says.
    #[error("tensor `{tensor}` has rank {found}, expected {expected} by adapter_config.json")]
    Rank {
        /// The tensor.
        tensor: String,
        /// Its rank.
        found: usize,
        /// The configured one.
        expected: usize,
    },
    /// A rank above the limit.
    #[error(
        "module `{module}` has rank {rank}, expected at most {limit} (the limit on adapter ranks)"
    )]
    RankLimit {
        /// The module.
        module: String,
        /// Its rank.
        rank: usize,
        /// The limit.
        limit: usize,
    },
    /// A scale that is not a number f32 can hold.
    #[error("module `{module}` has scale {scale}, expected a finite number")]
    Scale {
        /// The module.
        module: String,
        /// Its scale.
        scale: f64,
    },
    /// An element type that is not floating point.
    #[error("tensor `{tensor}` is {found}, expected F32, F16 or BF16")]
    DType {
        /// The tensor.
        tensor: String,
        /// Its type.
        found: String,
    },
    /// A value that is not finite.
    #[error("tensor `{tensor}` holds {value} at element {index}, expected finite numbers")]
    NonFinite {
        /// The tensor.
        tensor: String,
        /// The first such value.
        value: f32,
        /// Where.
        index: usize,
    },
    /// A square parameter whose orientation nothing settles.
    #[error(
        "tensor `{tensor}` is of a square parameter ({width}×{width}), and neither another tensor nor `peft_version` ({version}) settles whether lora_A is over its inputs; state the orientation when loading"
    )]
    Orientation {
        /// The tensor.
        tensor: String,
        /// Inputs and outputs.
        width: usize,
        /// What the configuration says.
        version: String,
    },
}

/// Kinds of reasons, for callers that act on them and for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // Each is what its name says.
pub enum Category {
    Config,
    CorruptFile,
    DType,
    MissingFile,
    MissingTensor,
    NonFinite,
    RankLimit,
    Shape,
    UnknownTarget,
    Unsupported,
}

impl Reason {
    /// Whether `others` refuse the same feature already.
    pub(super) fn is_repeated(&self, others: &[Reason]) -> bool {
        let Reason::Unsupported { feature, .. } = self else {
            return false;
        };
        others
            .iter()
            .any(|other| matches!(other, Reason::Unsupported { feature: f, .. } if f == feature))
    }

    /// The kind of this reason.
    pub fn category(&self) -> Category {
        match self {
            Reason::File(FileError::Missing { .. }) => Category::MissingFile,
            Reason::File(_) | Reason::Config(ConfigError::NotJson { .. }) => Category::CorruptFile,
            Reason::Config(_) | Reason::Scale { .. } => Category::Config,
            Reason::Unsupported { .. } | Reason::Orientation { .. } => Category::Unsupported,
            Reason::NoTensors
            | Reason::Unmatched { .. }
            | Reason::OutOfRange { .. }
            | Reason::OtherMlp { .. }
            | Reason::UnknownParameter { .. }
            | Reason::NotTargeted { .. }
            | Reason::SameModule { .. }
            | Reason::Twice { .. } => Category::UnknownTarget,
            Reason::MissingHalf { .. } | Reason::MissingPair { .. } => Category::MissingTensor,
            Reason::Shape { .. } | Reason::Rank { .. } => Category::Shape,
            Reason::RankLimit { .. } => Category::RankLimit,
            Reason::DType { .. } => Category::DType,
            Reason::NonFinite { .. } => Category::NonFinite,
        }
    }
}

/// Most reasons that a message spells out.
const SHOWN: usize = 5;

struct Listed<'a>(&'a [Reason]);

impl std::fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, reason) in self.0.iter().take(SHOWN).enumerate() {
            write!(f, "{}{reason}", if i > 0 { "; " } else { "" })?;
        }
        match self.0.len().checked_sub(SHOWN) {
            Some(more) if more > 0 => write!(f, "; and {more} more"),
            _ => Ok(()),
        }
    }
}

struct Quoted<'a>(&'a [String]);

impl std::fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, name) in self.0.iter().enumerate() {
            write!(f, "{}`{name}`", if i > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}
