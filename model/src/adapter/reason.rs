//! Why an adapter is refused: every tensor of its file is applied, or nothing is.

use crate::config::MlpKind;
use crate::error::{ConfigError, FileError};

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
    /// A value that the wanted type of factors does not hold.
    #[error(
        "tensor `{tensor}` holds a value that overflows {dtype}, the type adapters are wanted in"
    )]
    Overflow {
        /// The tensor.
        tensor: String,
        /// The type.
        dtype: amphora_hal::DType,
    },
    /// A square parameter whose orientation nothing settles.
    #[error(
        "tensor `{tensor}` is of a square parameter ({width}×{width}), and neither another tensor nor `peft_version` ({version}) settles whether lora_A is over its inputs; the operator can say so (--adapter-orientation natural, or swapped)"
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

impl Category {
    /// The name that reports use.
    pub fn name(self) -> &'static str {
        match self {
            Category::Config => "config",
            Category::CorruptFile => "corrupt_file",
            Category::DType => "dtype",
            Category::MissingFile => "missing_file",
            Category::MissingTensor => "missing_tensor",
            Category::NonFinite => "non_finite",
            Category::RankLimit => "rank_limit",
            Category::Shape => "shape",
            Category::UnknownTarget => "unknown_target",
            Category::Unsupported => "unsupported",
        }
    }
}

impl Reason {
    /// What the reason is about, where that is a tensor, a module or an entry of the configuration.
    pub fn subject(&self) -> Option<&str> {
        match self {
            Reason::Unsupported { source_of: subject, .. }
            | Reason::OutOfRange { tensor: subject, .. }
            | Reason::OtherMlp { tensor: subject, .. }
            | Reason::UnknownParameter { entry: subject }
            | Reason::NotTargeted { tensor: subject }
            | Reason::SameModule { tensor: subject, .. }
            | Reason::MissingHalf { present: subject, .. }
            | Reason::MissingPair { missing: subject, .. }
            | Reason::Shape { tensor: subject, .. }
            | Reason::Rank { tensor: subject, .. }
            | Reason::RankLimit { module: subject, .. }
            | Reason::Scale { module: subject, .. }
            | Reason::DType { tensor: subject, .. }
            | Reason::Overflow { tensor: subject, .. }
            | Reason::NonFinite { tensor: subject, .. }
            | Reason::Orientation { tensor: subject, .. } => Some(subject),
            Reason::File(_)
            | Reason::Config(_)
            | Reason::NoTensors
            | Reason::Unmatched { .. }
            | Reason::Twice { .. } => None,
        }
    }

    /// Whether `other` says the same of another tensor, so that one stands for both in a message.
    pub(super) fn is_like(&self, other: &Reason) -> bool {
        match (self, other) {
            (Reason::File(_), _) | (Reason::Config(_), _) => false,
            (Reason::Unsupported { feature: a, .. }, Reason::Unsupported { feature: b, .. }) => {
                a == b
            }
            (Reason::OutOfRange { what: a, .. }, Reason::OutOfRange { what: b, .. }) => a == b,
            (
                Reason::Shape { found: a, expected: x, .. },
                Reason::Shape { found: b, expected: y, .. },
            ) => (a, x) == (b, y),
            (
                Reason::Rank { found: a, expected: x, .. },
                Reason::Rank { found: b, expected: y, .. },
            ) => (a, x) == (b, y),
            (Reason::DType { found: a, .. }, Reason::DType { found: b, .. }) => a == b,
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
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
            Reason::NonFinite { .. } | Reason::Overflow { .. } => Category::NonFinite,
        }
    }
}

/// Names in backticks, one after another.
pub(super) struct Quoted<'a>(pub(super) &'a [String]);

impl std::fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, name) in self.0.iter().enumerate() {
            write!(f, "{}`{name}`", if i > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}
