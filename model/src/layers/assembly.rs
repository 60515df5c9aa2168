//! Layers made of what [`super::description`] asked for, now on the device.

use amphora_hal::Backend;
use amphora_hal::ops::{Mask, RouteScore};

use super::description::LayerNames;
use super::{Attention, Decoder, DecoderLayer, DenseMlp, HeadNorms, Heads, Moe, Norm, Projection};
use crate::config::Config;
use crate::error::Result;
use crate::weights::Store;

/// A decoder of the layers that `layer` makes.
pub(crate) fn decoder<B: Backend>(
    store: &mut Store<B>,
    config: &Config,
    layer: impl Fn(&mut Store<B>, usize) -> Result<DecoderLayer<B>>,
) -> Result<Decoder<B>> {
    Ok(Decoder {
        embedding: store.tensor("embedding")?,
        rope: store.tensor("rope")?,
        layers: (0..config.layers()).map(|index| layer(store, index)).collect::<Result<_>>()?,
        final_norm: norm(store, config, "final_norm")?,
        head: projection(store, "head")?,
    })
}

pub(crate) fn norm<B: Backend>(
    store: &mut Store<B>,
    config: &Config,
    key: &str,
) -> Result<Norm<B>> {
    Ok(Norm { weight: store.tensor(key)?, eps: config.rms_eps })
}

/// A projection, with its bias if one was described.
pub(crate) fn projection<B: Backend>(store: &mut Store<B>, key: &str) -> Result<Projection<B>> {
    Ok(Projection { weight: store.matrix(key)?, bias: store.optional(&format!("{key}.bias")) })
}

/// Attention without sinks and head norms: those that have them add them.
pub(crate) fn attention<B: Backend>(
    store: &mut Store<B>,
    at: &LayerNames,
    config: &Config,
    window: Option<usize>,
) -> Result<Attention<B>> {
    Ok(Attention {
        qkv: projection(store, &at.key("qkv"))?,
        o: projection(store, &at.key("o"))?,
        head_norms: None,
        sinks: None,
        heads: Heads { q: config.heads, kv: config.kv_heads, dim: config.head_dim },
        mask: window.map_or(Mask::Causal, Mask::Window),
    })
}

pub(crate) fn head_norms<B: Backend>(
    store: &mut Store<B>,
    at: &LayerNames,
    config: &Config,
) -> Result<HeadNorms<B>> {
    Ok(HeadNorms {
        q: norm(store, config, &at.key("q_norm"))?,
        k: norm(store, config, &at.key("k_norm"))?,
    })
}

pub(crate) fn dense_mlp<B: Backend>(
    store: &mut Store<B>,
    at: &LayerNames,
    config: &Config,
) -> Result<DenseMlp<B>> {
    Ok(DenseMlp {
        gate_up: projection(store, &at.key("gate_up"))?,
        down: projection(store, &at.key("down"))?,
        activation: config.activation,
    })
}

/// Router and experts; biases of the experts if they were described.
pub(crate) fn moe<B: Backend>(
    store: &mut Store<B>,
    at: &LayerNames,
    config: &Config,
    score: RouteScore,
) -> Result<Moe<B>> {
    Ok(Moe {
        router: projection(store, &at.key("router"))?,
        score,
        renorm: config.renorm_top_k,
        gate_up: store.matrix(&at.key("gate_up"))?,
        gate_up_bias: store.optional(&at.key("gate_up.bias")),
        down: store.matrix(&at.key("down"))?,
        down_bias: store.optional(&at.key("down.bias")),
        activation: config.activation,
    })
}
