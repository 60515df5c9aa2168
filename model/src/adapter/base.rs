//! The model that an adapter is for, as far as adapters see it: dimensions, what follows attention in
//! each layer, and how files of its family name modules.

use crate::config::{Architecture, Config, MlpKind};

/// The finest cut of a model's projections that any adapter file uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    /// Attention queries.
    Q,
    /// Attention keys.
    K,
    /// Attention values.
    V,
    /// Attention output.
    O,
    /// The router of a layer with experts.
    Router,
    /// Gate of an expert, or of a dense MLP.
    Gate,
    /// Up of an expert, or of a dense MLP.
    Up,
    /// Down of an expert, or of a dense MLP.
    Down,
}

impl Target {
    /// All of them, in the order of factors.
    pub const ALL: [Target; 8] = [
        Target::Q,
        Target::K,
        Target::V,
        Target::O,
        Target::Router,
        Target::Gate,
        Target::Up,
        Target::Down,
    ];

    /// The name that messages and reports use.
    pub fn name(self) -> &'static str {
        match self {
            Target::Q => "q",
            Target::K => "k",
            Target::V => "v",
            Target::O => "o",
            Target::Router => "router",
            Target::Gate => "gate",
            Target::Up => "up",
            Target::Down => "down",
        }
    }
}

/// The model an adapter is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterBase {
    /// Says how files name modules, and how gate and up lie in a fused parameter.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of all query heads.
    pub q: usize,
    /// Width of all key heads.
    pub kv: usize,
    /// Experts of a layer that has them.
    pub experts: usize,
    /// Width inside an expert.
    pub intermediate: usize,
    /// Width inside the MLP of a dense layer.
    pub dense_intermediate: usize,
    /// For each layer, what follows attention.
    pub mlps: Vec<MlpKind>,
}

impl From<&Config> for AdapterBase {
    fn from(config: &Config) -> Self {
        AdapterBase {
            architecture: config.architecture,
            hidden: config.hidden,
            q: config.q_width(),
            kv: config.kv_width(),
            experts: config.experts,
            intermediate: config.intermediate,
            dense_intermediate: config.dense_intermediate,
            mlps: config.mlps.clone(),
        }
    }
}

impl AdapterBase {
    /// Layers.
    pub fn layers(&self) -> usize {
        self.mlps.len()
    }

    /// Inputs and outputs of a target, for each expert if it is one of experts; `None` if the layer
    /// does not exist or has no such projection.
    pub fn dims(&self, layer: usize, target: Target) -> Option<(usize, usize)> {
        let mlp = *self.mlps.get(layer)?;
        let inner = match mlp {
            MlpKind::Dense => self.dense_intermediate,
            MlpKind::Experts => self.intermediate,
        };
        Some(match (target, mlp) {
            (Target::Q, _) => (self.hidden, self.q),
            (Target::K | Target::V, _) => (self.hidden, self.kv),
            (Target::O, _) => (self.q, self.hidden),
            (Target::Router, MlpKind::Experts) => (self.hidden, self.experts),
            (Target::Router, MlpKind::Dense) => return None,
            (Target::Gate | Target::Up, _) => (self.hidden, inner),
            (Target::Down, _) => (inner, self.hidden),
        })
    }

    /// How many experts have a projection `target` of their own; `None` where it is one for all
    /// tokens, or the layer has none.
    pub fn experts_of(&self, layer: usize, target: Target) -> Option<usize> {
        match (target, self.mlps.get(layer)?) {
            (Target::Gate | Target::Up | Target::Down, MlpKind::Experts) => Some(self.experts),
            _ => None,
        }
    }

    /// The step between two outputs of gate in a fused gate_up parameter: 2 where gate and up take
    /// turns, 1 where the one follows the other.
    pub fn gate_up_stride(&self) -> usize {
        match self.architecture {
            Architecture::GptOss => 2,
            Architecture::Qwen3Moe
            | Architecture::Mixtral
            | Architecture::Llama
            | Architecture::Qwen3 => 1,
        }
    }

    /// Names of the module that holds router and experts, in checkpoints or as a newer transformers
    /// calls it.
    pub(super) fn expert_blocks(&self) -> &'static [&'static str] {
        match self.architecture {
            Architecture::Mixtral => &["block_sparse_moe", "mlp"],
            Architecture::GptOss
            | Architecture::Qwen3Moe
            | Architecture::Llama
            | Architecture::Qwen3 => &["mlp"],
        }
    }

    /// Name of the router inside that module.
    pub(super) fn router_name(&self) -> &'static str {
        match self.architecture {
            Architecture::GptOss => "router",
            Architecture::Qwen3Moe
            | Architecture::Mixtral
            | Architecture::Llama
            | Architecture::Qwen3 => "gate",
        }
    }

    /// The projection that an expert's Linear of this name is.
    pub(super) fn expert_projection(&self, name: &str) -> Option<Target> {
        match (self.architecture, name) {
            (Architecture::Mixtral, "w1") => Some(Target::Gate),
            (Architecture::Mixtral, "w2") => Some(Target::Down),
            (Architecture::Mixtral, "w3") => Some(Target::Up),
            (Architecture::Mixtral, _) => None,
            (_, name) => dense_projection(name),
        }
    }

    /// The parameters of a layer that an adapter can change, as `target_parameters` names them.
    pub(super) fn parameters(&self, layer: usize) -> Vec<String> {
        let attention = ["q_proj", "k_proj", "v_proj", "o_proj"];
        let mut names: Vec<String> =
            attention.iter().map(|p| format!("self_attn.{p}.weight")).collect();
        match self.mlps.get(layer) {
            None => return Vec::new(),
            Some(MlpKind::Dense) => {
                let dense = ["gate_proj", "up_proj", "down_proj"];
                names.extend(dense.iter().map(|p| format!("mlp.{p}.weight")));
            }
            Some(MlpKind::Experts) => {
                for block in self.expert_blocks() {
                    names.push(format!("{block}.{}.weight", self.router_name()));
                    names.push(format!("{block}.experts.gate_up_proj"));
                    names.push(format!("{block}.experts.down_proj"));
                }
            }
        }
        names.into_iter().map(|name| format!("model.layers.{layer}.{name}")).collect()
    }
}

/// The projection that a dense MLP's Linear of this name is.
pub(super) fn dense_projection(name: &str) -> Option<Target> {
    match name {
        "gate_proj" => Some(Target::Gate),
        "up_proj" => Some(Target::Up),
        "down_proj" => Some(Target::Down),
        _ => None,
    }
}
