//! PEFT LoRA adapters: a folder read and checked → factors A and B for each module, projection
//! slice and expert, with ranks and scales, whatever the layout of the file.
//!
//! **All or nothing**: every tensor of the file is applied, or the adapter is refused, naming the
//! tensor and the reason. Adapters come and go while a server runs, so files are *read*, never
//! mapped: a file cut short is an error, not a signal.
//!
//! Read are `lora_A`/`lora_B` pairs in f32, f16 or bf16 of attention projections, of dense MLPs, of the
//! router (a Linear, or the parameter `mlp.router.weight`), of experts one by one
//! (`experts.3.down_proj`), and of fused expert parameters (`target_parameters`) in either
//! orientation, all under the names of the model's family; any subset of modules, layers and experts; `r`, `lora_alpha`, `use_rslora`, `rank_pattern` and `alpha_pattern` as PEFT means them.
//! `target_modules` decides nothing: it is held against the tensors, which say what is adapted.

mod base;
mod config;
mod fused;
mod linear;
mod names;
mod pattern;
mod read;
mod reason;
mod refusal;
mod survey;
#[cfg(test)]
mod tests;

use amphora_hal::DType;

use crate::source::{EmbeddedFile, Source};

pub use base::{AdapterBase, Target};
pub use reason::{Category, Reason};
pub use refusal::{AdapterRefused, Refusal};
pub use survey::{Survey, SurveyedModule, survey};

/// The files of an adapter's folder that are read: its configuration and its tensors.
pub const ADAPTER_FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

/// Which way round the tensors of a fused expert parameter lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Orientation {
    /// A over the inputs, B over the outputs.
    Natural,
    /// A over the outputs, B over the inputs.
    Swapped,
}

/// What settled an orientation, the best evidence first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DecidedBy {
    /// The parameter is not square.
    Shapes,
    /// The other parameter of the layer's experts, which is not square.
    SameLayer,
    /// The other layers' parameters, which agree.
    OtherLayers,
    /// The version of PEFT that wrote the file.
    Version,
    /// The operator's word.
    Operator,
}

impl DecidedBy {
    /// In words, for reports.
    pub fn words(self) -> &'static str {
        match self {
            DecidedBy::Shapes => "the tensors' shapes",
            DecidedBy::SameLayer => "the shapes of the layer's other expert parameter",
            DecidedBy::OtherLayers => "the shapes of the other layers' expert parameters",
            DecidedBy::Version => "peft_version",
            DecidedBy::Operator => "the operator's word",
        }
    }
}

/// How one fused parameter was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FusedLayout {
    /// The layer.
    pub layer: usize,
    /// `gate_up_proj` or `down_proj`.
    pub parameter: &'static str,
    /// Which way round.
    pub orientation: Orientation,
    /// What says so.
    pub decided_by: DecidedBy,
}

/// How the experts of an adapter lie in its file; both may be true of unlike layers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layouts {
    /// Experts one by one.
    pub per_expert: bool,
    /// Fused parameters, by layer.
    pub fused: Vec<FusedLayout>,
}

/// What the operator has to say about loading.
#[derive(Debug, Clone, Copy)]
pub struct AdapterOptions {
    /// Most rank of a module.
    pub max_rank: usize,
    /// For files whose fused parameters are all square, where neither tensors nor version tell.
    pub square_orientation: Option<Orientation>,
    /// What the factors' numbers are rounded to, if to anything: f16 or bf16 give what a device that
    /// stores such factors computes with.
    pub round_to: Option<DType>,
    /// Most bytes of a weights file.
    pub max_file_bytes: u64,
}

impl Default for AdapterOptions {
    fn default() -> Self {
        AdapterOptions {
            max_rank: 256,
            square_orientation: None,
            round_to: None,
            max_file_bytes: 16 << 30,
        }
    }
}

/// A row-major f32 matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// The numbers.
    pub data: Vec<f32>,
}

/// The factors of one projection slice of one layer, for one expert if it is an expert's:
/// W += scale · B·A.
#[derive(Debug, Clone, PartialEq)]
pub struct ModuleFactor {
    /// The layer.
    pub layer: usize,
    /// The slice.
    pub target: Target,
    /// The expert, if the layer has experts and the slice is one of theirs.
    pub expert: Option<usize>,
    /// Rank of both factors.
    pub rank: usize,
    /// alpha / r or alpha / √r; never folded into a factor.
    pub scale: f32,
    /// Which A of [`AdapterFactors::shrinks`]; gate and up of a fused file have the same one.
    pub shrink: usize,
    /// B, `[out, rank]`.
    pub b: Matrix,
}

/// A checked adapter in host memory.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterFactors {
    /// Sorted by layer, target and expert.
    pub modules: Vec<ModuleFactor>,
    /// The factors A, `[rank, in]` each.
    pub shrinks: Vec<Matrix>,
    /// How the experts lay in the file.
    pub layouts: Layouts,
    /// Widest element type of the file.
    pub dtype: DType,
    /// Bytes of the weights file.
    pub file_bytes: usize,
    /// The PEFT version that wrote it, if it says so.
    pub peft_version: Option<String>,
    /// The base model it says it was trained on; informative, dimensions decide.
    pub base_model: Option<String>,
    /// What was assumed where the file leaves a choice, for logs and `inspect`.
    pub notes: Vec<String>,
}

impl AdapterFactors {
    /// Reads the adapter in `source` for a model of these dimensions.
    ///
    /// # Errors
    /// The files are missing or broken, or not every tensor can be applied; with all reasons.
    pub fn load(
        source: &Source,
        base: &AdapterBase,
        options: &AdapterOptions,
    ) -> Result<Self, AdapterRefused> {
        read::load(source, base, options).map_err(|reasons| reasons.refuse(source.name()))
    }

    /// Reads an adapter folder on disk.
    ///
    /// # Errors
    /// As [`AdapterFactors::load`].
    pub fn open(
        folder: &std::path::Path,
        base: &AdapterBase,
        options: &AdapterOptions,
    ) -> Result<Self, AdapterRefused> {
        Self::load(&Source::Folder(folder.to_owned()), base, options)
    }

    /// Reads an adapter embedded in the binary.
    ///
    /// # Errors
    /// As [`AdapterFactors::load`].
    pub fn embedded(
        name: &'static str,
        files: &'static [EmbeddedFile],
        base: &AdapterBase,
        options: &AdapterOptions,
    ) -> Result<Self, AdapterRefused> {
        Self::load(&Source::Embedded { name, files }, base, options)
    }

    /// A of a module, `[rank, in]`.
    pub fn a(&self, module: &ModuleFactor) -> &Matrix {
        &self.shrinks[module.shrink]
    }

    /// Largest rank of any module.
    pub fn max_rank(&self) -> usize {
        self.modules.iter().map(|m| m.rank).max().unwrap_or(0)
    }
}
