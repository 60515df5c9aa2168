//! What layers need from a checkpoint: [`Item`]s, by the names that the hub gives tensors. An
//! architecture's file lists the parts it has.

use crate::config::Config;
use crate::weights::{Item, Kind, LoadOptions, Part, Stored};

const EMBEDDING: &str = "model.embed_tokens.weight";

/// The tensor of a head of its own.
pub(crate) const HEAD: &str = "lm_head.weight";

/// Names of one layer: of its items here, and of its tensors in the files.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerNames {
    layer: usize,
}

impl LayerNames {
    pub(crate) fn new(layer: usize) -> Self {
        LayerNames { layer }
    }

    /// The item `name` of this layer.
    pub(crate) fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.layer)
    }

    /// The tensor `name` of this layer.
    pub(crate) fn tensor(&self, name: &str) -> String {
        format!("model.layers.{}.{name}", self.layer)
    }

    /// One tensor as f32.
    pub(crate) fn vector(&self, key: &str, tensor: &str, dims: &[usize]) -> Item {
        Item::vector(&self.key(key), &self.tensor(tensor), dims)
    }

    /// One dense projection of several Linears, each (tensor, outputs).
    pub(crate) fn linear(&self, key: &str, k: usize, parts: &[(&str, usize)]) -> Item {
        let named: Vec<(String, usize)> = parts.iter().map(|&(t, n)| (self.tensor(t), n)).collect();
        let parts: Vec<(&str, usize)> = named.iter().map(|(t, n)| (t.as_str(), *n)).collect();
        Item::linear(&self.key(key), k, &parts)
    }

    /// The biases of such a projection.
    pub(crate) fn bias(&self, key: &str, parts: &[(&str, usize)]) -> Item {
        let tensors: Vec<_> = parts.iter().map(|&(t, n)| (self.tensor(t), vec![n])).collect();
        let dims = vec![parts.iter().map(|(_, n)| n).sum()];
        Item::new(&self.key(key), Kind::Vector { dims, tensors })
    }
}

/// Everything outside the layers: embedding, rotary table, final norm and head.
pub(crate) fn shell(config: &Config, options: &LoadOptions) -> Vec<Item> {
    let (hidden, vocab) = (config.hidden, config.vocab);
    let positions = options.positions.min(config.max_positions);
    let head = match config.tied_embeddings {
        true => EMBEDDING,
        false => HEAD,
    };
    vec![
        Item::new("embedding", Kind::Table { tensor: EMBEDDING.to_owned(), dims: [vocab, hidden] }),
        Item::new("rope", Kind::Rotary { dims: [positions, config.head_dim], rope: config.rope }),
        Item::vector("final_norm", "model.norm.weight", &[hidden]),
        Item::linear("head", hidden, &[(head, vocab)]),
    ]
}

/// A tied head may be stored too, if it is the embedding.
pub(crate) fn tied_copy(config: &Config) -> Option<(&'static str, &'static str)> {
    config.tied_embeddings.then_some((HEAD, EMBEDDING))
}

/// The norms before attention and before the MLP.
pub(crate) fn norms(at: &LayerNames, config: &Config) -> [Item; 2] {
    let hidden = [config.hidden];
    [
        at.vector("input_norm", "input_layernorm.weight", &hidden),
        at.vector("post_norm", "post_attention_layernorm.weight", &hidden),
    ]
}

/// Both projections of attention, with their biases where the configuration has them.
pub(crate) fn attention(at: &LayerNames, config: &Config) -> Vec<Item> {
    let (hidden, q, kv) = (config.hidden, config.q_width(), config.kv_width());
    let qkv = [
        ("self_attn.q_proj.weight", q),
        ("self_attn.k_proj.weight", kv),
        ("self_attn.v_proj.weight", kv),
    ];
    let mut items = vec![
        at.linear("qkv", hidden, &qkv),
        at.linear("o", q, &[("self_attn.o_proj.weight", hidden)]),
    ];
    if config.attention_bias {
        let qkv = [
            ("self_attn.q_proj.bias", q),
            ("self_attn.k_proj.bias", kv),
            ("self_attn.v_proj.bias", kv),
        ];
        items.push(at.bias("qkv.bias", &qkv));
        items.push(at.bias("o.bias", &[("self_attn.o_proj.bias", hidden)]));
    }
    items
}

/// The norms over each query head and each key head.
pub(crate) fn head_norms(at: &LayerNames, config: &Config) -> [Item; 2] {
    let dims = [config.head_dim];
    [
        at.vector("q_norm", "self_attn.q_norm.weight", &dims),
        at.vector("k_norm", "self_attn.k_norm.weight", &dims),
    ]
}

/// A dense MLP, with its biases where the configuration has them.
pub(crate) fn dense_mlp(at: &LayerNames, config: &Config) -> Vec<Item> {
    let (hidden, inner) = (config.hidden, config.dense_intermediate);
    let gate_up = [("mlp.gate_proj.weight", inner), ("mlp.up_proj.weight", inner)];
    let mut items = vec![
        at.linear("gate_up", hidden, &gate_up),
        at.linear("down", inner, &[("mlp.down_proj.weight", hidden)]),
    ];
    if config.mlp_bias {
        let gate_up = [("mlp.gate_proj.bias", inner), ("mlp.up_proj.bias", inner)];
        items.push(at.bias("gate_up.bias", &gate_up));
        items.push(at.bias("down.bias", &[("mlp.down_proj.bias", hidden)]));
    }
    items
}

/// The router `tensor`.
pub(crate) fn router(at: &LayerNames, config: &Config, tensor: &str) -> Item {
    at.linear("router", config.hidden, &[(tensor, config.experts)])
}

/// What an architecture calls the Linears of an expert: `{folder}.{expert}.{gate}.weight`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertNames {
    pub(crate) folder: &'static str,
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
}

/// Experts that are stored one by one.
pub(crate) fn separate_experts(at: &LayerNames, config: &Config, names: &ExpertNames) -> [Item; 2] {
    let (hidden, inner) = (config.hidden, config.intermediate);
    let part = |linear: &str, n: usize| {
        let name = |expert| at.tensor(&format!("{}.{expert}.{linear}.weight", names.folder));
        Part { n, stored: Stored::Separate((0..config.experts).map(name).collect()) }
    };
    let matrix = |key: &str, k: usize, parts: Vec<Part>| {
        Item::new(&at.key(key), Kind::Matrix { matrices: config.experts, k, parts })
    };
    [
        matrix("gate_up", hidden, vec![part(names.gate, inner), part(names.up, inner)]),
        matrix("down", inner, vec![part(names.down, hidden)]),
    ]
}
