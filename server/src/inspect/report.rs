//! What `inspect` found, in the form that `--json` writes. Sizes are bytes.

use std::collections::BTreeMap;

use serde::Serialize;

/// The report on one folder.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Report {
    Model(ModelReport),
    Adapter(AdapterReport),
}

/// Whether the folder would be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Accepted,
    Refused,
    /// Nothing speaks against the adapter, but no model was named to hold it against.
    Open,
}

impl Report {
    pub fn verdict(&self) -> Verdict {
        match self {
            Self::Model(report) => report.verdict,
            Self::Adapter(report) => report.verdict,
        }
    }
}

/// One reason to refuse.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fault {
    /// Its kind, for adapters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub category: Option<&'static str>,
    pub message: String,
    /// Tensors or fields of which it is true.
    pub count: usize,
}

/// A number of bytes in each type of arithmetic.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ByDtype {
    pub f32: usize,
    pub bf16: usize,
}

#[derive(Debug, Serialize)]
pub struct ModelReport {
    pub folder: String,
    pub backend: &'static str,
    pub dtype: String,
    pub verdict: Verdict,
    pub reasons: Vec<Fault>,
    /// What the configuration says; absent if it is not sound.
    pub config: Option<ModelFacts>,
    /// What the tensor files hold; absent if they cannot be read.
    pub files: Option<ModelFileFacts>,
    /// Absent without a sound configuration.
    pub memory: Option<ModelMemory>,
}

#[derive(Debug, Serialize)]
pub struct ModelFacts {
    pub architecture: &'static str,
    pub layers: usize,
    /// Layers with experts.
    pub expert_layers: usize,
    pub experts: usize,
    pub experts_per_token: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub expert_intermediate: usize,
    pub dense_intermediate: usize,
    pub vocab: usize,
    pub max_positions: usize,
    pub tied_embeddings: bool,
}

#[derive(Debug, Serialize)]
pub struct ModelFileFacts {
    pub shards: usize,
    pub tensors: usize,
    /// Numbers stored, those of MXFP4 blocks counted one by one.
    pub parameters: usize,
    pub bytes: usize,
    /// Bytes by element type.
    pub dtypes: BTreeMap<String, usize>,
}

#[derive(Debug, Serialize)]
pub struct ModelMemory {
    /// Weights as this backend packs them.
    pub weights: ByDtype,
    pub kv_per_1000_tokens: ByDtype,
    /// Activations and workspace of a step at the default settings of `serve`.
    pub step: ByDtype,
    /// The table of adapters' blocks at the default number of slots.
    pub adapter_table: usize,
}

#[derive(Debug, Serialize)]
pub struct AdapterReport {
    pub folder: String,
    /// The model it was held against.
    pub model: Option<String>,
    pub backend: &'static str,
    pub dtype: String,
    pub verdict: Verdict,
    pub reasons: Vec<Fault>,
    pub says: AdapterSays,
    pub file: AdapterFile,
    /// What becomes of it on the model; absent without one, or if it is refused.
    pub applied: Option<Applied>,
}

/// What the configuration says, as far as it is sound.
#[derive(Debug, Serialize)]
pub struct AdapterSays {
    pub rank: Option<usize>,
    pub alpha: Option<f64>,
    pub use_rslora: bool,
    pub target_parameters: Vec<String>,
    pub peft_version: Option<String>,
    pub base_model: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct AdapterFile {
    pub bytes: usize,
    pub tensors: usize,
    /// Tensors by element type.
    pub dtypes: BTreeMap<String, usize>,
    pub modules: Vec<FileModule>,
}

/// Pairs of alike modules in the file.
#[derive(Debug, Serialize)]
pub struct FileModule {
    /// Numbers of layers and experts are left out.
    pub name: String,
    pub pairs: usize,
    pub layers: usize,
    pub lora_a: Vec<Vec<usize>>,
    pub lora_b: Vec<Vec<usize>>,
}

#[derive(Debug, Serialize)]
pub struct Applied {
    pub architecture: &'static str,
    /// How the experts lie in the file, and how that was found out.
    pub layout: Vec<String>,
    pub notes: Vec<String>,
    pub modules: Vec<AppliedModule>,
    pub memory: AdapterMemory,
}

/// All factors of one projection.
#[derive(Debug, PartialEq, Serialize)]
pub struct AppliedModule {
    pub projection: &'static str,
    pub layers: usize,
    /// Pairs of factors: one a layer, or one an expert.
    pub factors: usize,
    /// Smallest and largest.
    pub rank: (usize, usize),
    /// What the ranks are rounded up to on the device.
    pub rank_class: (usize, usize),
    pub scale: (f32, f32),
}

#[derive(Debug, Serialize)]
pub struct AdapterMemory {
    pub file: usize,
    /// Pages in host memory.
    pub host: ByDtype,
    /// Blocks on the device.
    pub device: ByDtype,
}
