//! What a device is (`Caps`), what it can run (`OpKey`, `Support`), and how large an operator may
//! become (`OpBounds`).

use crate::dtype::DType;
use crate::lora::RankClass;
use crate::weight::Scheme;

/// Facts about an open device.
#[derive(Debug, Clone)]
pub struct Caps {
    /// The device as its vendor names it.
    pub name: String,
    /// Bytes of device memory.
    pub memory: usize,
    /// Most rows of a [`crate::Tile`].
    pub tile_rows: usize,
    /// Whether streams can be captured.
    pub graphs: bool,
    /// Compute types.
    pub dtypes: &'static [DType],
    /// Rank classes, ascending.
    pub rank_classes: &'static [RankClass],
    /// Whether a packed weight is its rows as they are, so that a tensor of rows is one too
    /// ([`crate::Weight::of_rows`]) and a tied head needs no memory of its own.
    pub packs_rows: bool,
}

impl Caps {
    /// The smallest class that holds `rank`.
    pub fn rank_class(&self, rank: usize) -> Option<RankClass> {
        self.rank_classes.iter().copied().find(|class| class.get() >= rank)
    }
}

/// The operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // Each is the struct of that name in `ops`.
pub enum OpKind {
    WriteTokens,
    Embed,
    RmsNorm,
    Rope,
    Swiglu,
    KvWrite,
    PagedAttention,
    Linear,
    LoraLinear,
    MoeRoute,
    FusedMoe,
    FusedMoeLora,
    GatherRows,
    CopyBlocks,
    Sample,
    Logprobs,
}

/// An operator at the types that decide which implementation runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OpKey {
    /// The operator.
    pub op: OpKind,
    /// Compute type.
    pub dtype: DType,
    /// How its weight is stored.
    pub scheme: Option<Scheme>,
    /// Rank class of its deltas.
    pub class: Option<RankClass>,
    /// Width of an attention head.
    pub head_dim: Option<usize>,
}

impl OpKey {
    /// A key that only names the operator and its compute type.
    pub fn new(op: OpKind, dtype: DType) -> Self {
        OpKey { op, dtype, scheme: None, class: None, head_dim: None }
    }

    /// The same with a weight's scheme.
    pub fn scheme(self, scheme: Scheme) -> Self {
        OpKey { scheme: Some(scheme), ..self }
    }

    /// The same with a rank class.
    pub fn class(self, class: RankClass) -> Self {
        OpKey { class: Some(class), ..self }
    }

    /// The same with a head width.
    pub fn head_dim(self, head_dim: usize) -> Self {
        OpKey { head_dim: Some(head_dim), ..self }
    }
}

impl std::fmt::Display for OpKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} in {}", self.op, self.dtype)?;
        if let Some(scheme) = self.scheme {
            write!(f, ", weight {scheme}")?;
        }
        if let Some(class) = self.class {
            write!(f, ", rank class {}", class.get())?;
        }
        if let Some(head_dim) = self.head_dim {
            write!(f, ", heads of {head_dim}")?;
        }
        Ok(())
    }
}

/// A backend's answer to an [`OpKey`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// It runs, by this path (shown in start-up reports and test tables).
    Yes {
        /// The implementation's name.
        path: &'static str,
    },
    /// It does not run.
    No {
        /// Why, in one line.
        reason: &'static str,
    },
}

/// Upper bounds of an operator's sizes, from which its workspace is counted before anything runs.
/// Fields an operator does not have are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpBounds {
    /// The operator; `None` is the bound of nothing.
    pub op: Option<OpKind>,
    /// Most rows of a step.
    pub tokens: usize,
    /// Width of a product's input; a head's width for attention; the vocabulary for
    /// sampling and log-probabilities.
    pub k: usize,
    /// Width of a product's output; heads for attention.
    pub n: usize,
    /// Width between the two expert products (before the activation halves it).
    pub inner: usize,
    /// Experts.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Most rank of a delta.
    pub rank: usize,
    /// Most positions of a sequence.
    pub context: usize,
}
