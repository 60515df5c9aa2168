//! The configuration of each architecture: which fields it has, and what transformers' own
//! configuration class takes where a file says nothing.

use amphora_hal::ops::Activation;
use serde_json::Value;

use super::parts::{self, Windows};
use super::rope::{self, RopeDefaults};
use super::{
    Architecture, Config, GenerationDefaults, MAX_COUNT, MAX_POSITIONS, MAX_WIDTH, MlpKind,
    RopeScaling,
};
use crate::error::ConfigError;
use crate::json::Fields;

type Result<T> = std::result::Result<T, ConfigError>;

/// What an architecture decides before the fields that all have are read.
struct Family {
    architecture: Architecture,
    /// Where a file has no `head_dim`; `None` divides the hidden width by the heads.
    head_dim: Option<usize>,
    max_positions: usize,
    rms_eps: f32,
    rope: RopeDefaults,
    attention_bias: bool,
}

const NO_SCALING: RopeDefaults = RopeDefaults { theta: 10_000.0, scaling: RopeScaling::None };

pub(super) fn gpt_oss(fields: &Fields<'_>) -> Result<Config> {
    let experts = fields.need_count("num_local_experts", 1..=MAX_COUNT)?;
    let layers = parts::layers(fields)?;
    let window = match fields.count("sliding_window", 1..=MAX_POSITIONS)? {
        // Then `layer_types` must say that no layer slides.
        None if fields.is_null("sliding_window") => None,
        None => Some(128),
        given => given,
    };
    let family = Family {
        architecture: Architecture::GptOss,
        head_dim: Some(64),
        max_positions: 131_072,
        rms_eps: 1e-5,
        rope: rope::GPT_OSS,
        attention_bias: true,
    };
    Ok(Config {
        windows: parts::windows(fields, layers, &Windows { window, slides: &|i| i % 2 == 0 })?,
        mlps: vec![MlpKind::Experts; layers],
        experts,
        top_k: parts::top_k(fields, experts)?,
        intermediate: fields.need_count("intermediate_size", 1..=MAX_WIDTH)?,
        activation: Activation::ClampedInterleaved {
            limit: parts::positive(fields, "swiglu_limit", 7.0)?,
            alpha: parts::positive(fields, "swiglu_alpha", 1.702)?,
        },
        ..family.common(fields)?
    })
}

pub(super) fn qwen3_moe(fields: &Fields<'_>) -> Result<Config> {
    let layers = parts::layers(fields)?;
    let mlps = qwen3_moe_mlps(fields, layers)?;
    let family = Family {
        architecture: Architecture::Qwen3Moe,
        head_dim: None,
        max_positions: 32_768,
        rms_eps: 1e-6,
        rope: NO_SCALING,
        attention_bias: false,
    };
    let mut config = Config {
        windows: parts::windows(
            fields,
            layers,
            &Windows { window: qwen_window(fields)?, slides: &|_| true },
        )?,
        ..family.common(fields)?
    };
    if mlps.contains(&MlpKind::Experts) {
        config.experts = num_experts(fields)?;
        config.top_k = parts::top_k(fields, config.experts)?;
        config.intermediate = fields.need_count("moe_intermediate_size", 1..=MAX_WIDTH)?;
        config.renorm_top_k = fields.flag("norm_topk_prob")?.unwrap_or(false);
    }
    if mlps.contains(&MlpKind::Dense) {
        config.dense_intermediate = fields.need_count("intermediate_size", 1..=MAX_WIDTH)?;
    }
    config.mlps = mlps;
    Ok(config)
}

/// Layer i has experts if it is not listed in `mlp_only_layers` and i + 1 is a multiple of
/// `decoder_sparse_step`.
fn qwen3_moe_mlps(fields: &Fields<'_>, layers: usize) -> Result<Vec<MlpKind>> {
    let step = fields.count("decoder_sparse_step", 1..=MAX_COUNT)?.unwrap_or(1);
    let dense = match fields.get("mlp_only_layers") {
        None => Vec::new(),
        Some(Value::Array(list)) => list
            .iter()
            .map(|index| {
                index.as_u64().ok_or_else(|| {
                    fields.refuse("mlp_only_layers", index, "whole numbers, each a layer")
                })
            })
            .collect::<Result<Vec<_>>>()?,
        Some(other) => return Err(fields.refuse("mlp_only_layers", other, "a list of layers")),
    };
    let kind = |layer: usize| match (layer + 1).is_multiple_of(step) {
        true if !dense.contains(&(layer as u64)) => MlpKind::Experts,
        _ => MlpKind::Dense,
    };
    Ok((0..layers).map(kind).collect())
}

pub(super) fn mixtral(fields: &Fields<'_>) -> Result<Config> {
    let layers = parts::layers(fields)?;
    let experts = num_experts(fields)?;
    let window = fields.count("sliding_window", 1..=MAX_POSITIONS)?;
    let family = Family {
        architecture: Architecture::Mixtral,
        head_dim: None,
        max_positions: 131_072,
        rms_eps: 1e-5,
        rope: RopeDefaults { theta: 1_000_000.0, ..NO_SCALING },
        attention_bias: false,
    };
    Ok(Config {
        windows: parts::windows(fields, layers, &Windows { window, slides: &|_| true })?,
        mlps: vec![MlpKind::Experts; layers],
        experts,
        top_k: parts::top_k(fields, experts)?,
        intermediate: fields.need_count("intermediate_size", 1..=MAX_WIDTH)?,
        ..family.common(fields)?
    })
}

pub(super) fn llama(fields: &Fields<'_>) -> Result<Config> {
    let layers = parts::layers(fields)?;
    let family = Family {
        architecture: Architecture::Llama,
        head_dim: None,
        max_positions: 2048,
        rms_eps: 1e-6,
        rope: NO_SCALING,
        attention_bias: false,
    };
    Ok(Config {
        windows: parts::windows(fields, layers, &Windows { window: None, slides: &|_| false })?,
        mlps: vec![MlpKind::Dense; layers],
        dense_intermediate: fields.need_count("intermediate_size", 1..=MAX_WIDTH)?,
        mlp_bias: fields.flag("mlp_bias")?.unwrap_or(false),
        ..family.common(fields)?
    })
}

pub(super) fn qwen3(fields: &Fields<'_>) -> Result<Config> {
    let layers = parts::layers(fields)?;
    let first = fields.count("max_window_layers", 0..=MAX_COUNT)?.unwrap_or(28);
    let family = Family {
        architecture: Architecture::Qwen3,
        head_dim: Some(128),
        max_positions: 32_768,
        rms_eps: 1e-6,
        rope: NO_SCALING,
        attention_bias: false,
    };
    Ok(Config {
        windows: parts::windows(
            fields,
            layers,
            &Windows { window: qwen_window(fields)?, slides: &|i| i >= first },
        )?,
        mlps: vec![MlpKind::Dense; layers],
        dense_intermediate: fields.need_count("intermediate_size", 1..=MAX_WIDTH)?,
        ..family.common(fields)?
    })
}

/// Qwen's files name a window that counts only where `use_sliding_window` says so.
fn qwen_window(fields: &Fields<'_>) -> Result<Option<usize>> {
    let window = fields.count("sliding_window", 1..=MAX_POSITIONS)?;
    Ok(match fields.flag("use_sliding_window")?.unwrap_or(false) {
        true if !fields.is_null("sliding_window") => Some(window.unwrap_or(4096)),
        _ => None,
    })
}

/// `num_local_experts`; hub files of qwen3_moe call it `num_experts`.
fn num_experts(fields: &Fields<'_>) -> Result<usize> {
    parts::one_of(fields, ["num_local_experts", "num_experts"], MAX_COUNT)
}

impl Family {
    /// The fields that all architectures have; dense MLPs and experts are still to be said.
    fn common(&self, fields: &Fields<'_>) -> Result<Config> {
        parts::check_activation(fields)?;
        let heads = parts::heads(fields, self.head_dim)?;
        let vocab = parts::vocab(fields)?;
        let max_positions = fields
            .count("max_position_embeddings", 1..=MAX_POSITIONS)?
            .unwrap_or(self.max_positions);
        let tokens = parts::special_tokens(fields, vocab)?;
        let attention_bias = fields.flag("attention_bias")?.unwrap_or(self.attention_bias);
        Ok(Config {
            architecture: self.architecture,
            hidden: heads.hidden,
            heads: heads.q,
            kv_heads: heads.kv,
            head_dim: heads.dim,
            vocab,
            mlps: Vec::new(),
            experts: 0,
            top_k: 0,
            renorm_top_k: false,
            intermediate: 0,
            dense_intermediate: 0,
            rms_eps: parts::positive(fields, "rms_norm_eps", self.rms_eps)?,
            windows: Vec::new(),
            activation: Activation::Swiglu,
            rope: rope::read(fields, max_positions, &self.rope)?,
            max_positions,
            eos: tokens.eos,
            bos: tokens.bos,
            pad: tokens.pad,
            tied_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
            // Mixtral's projections have none, whatever a file says.
            attention_bias: attention_bias && self.architecture != Architecture::Mixtral,
            mlp_bias: false,
            stored_dtype: parts::stored_dtype(fields)?,
            quantization: parts::quantization(fields, self.architecture)?,
            generation: GenerationDefaults::default(),
        })
    }
}
