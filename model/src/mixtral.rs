//! Mixtral: a plain decoder with a mixture of experts in every layer, softmax over the chosen.

use amphora_hal::Backend;
use amphora_hal::ops::RouteScore;

use crate::config::Config;
use crate::error::Result;
use crate::layers::description::{self, ExpertNames, LayerNames};
use crate::layers::{Decoder, DecoderLayer, Mlp, assembly};
use crate::weights::{Item, LoadOptions, Store};

/// w1 is gate, w3 up and w2 down.
const EXPERTS: ExpertNames =
    ExpertNames { folder: "block_sparse_moe.experts", gate: "w1", up: "w3", down: "w2" };

/// Everything the model needs on the device.
pub(crate) fn describe(config: &Config, options: &LoadOptions) -> Vec<Item> {
    let mut items = description::shell(config, options);
    for layer in 0..config.layers() {
        let at = LayerNames::new(layer);
        items.extend(description::norms(&at, config));
        items.extend(description::attention(&at, config));
        items.push(description::router(&at, config, "block_sparse_moe.gate.weight"));
        items.extend(description::separate_experts(&at, config, &EXPERTS));
    }
    items
}

pub(crate) fn assemble<B: Backend>(store: &mut Store<B>, config: &Config) -> Result<Decoder<B>> {
    assembly::decoder(store, config, |store, layer| {
        let at = LayerNames::new(layer);
        let window = config.windows[layer];
        Ok(DecoderLayer {
            input_norm: assembly::norm(store, config, &at.key("input_norm"))?,
            attention: assembly::attention(store, &at, config, window)?,
            post_norm: assembly::norm(store, config, &at.key("post_norm"))?,
            mlp: Mlp::Experts(assembly::moe(store, &at, config, RouteScore::SoftmaxTopk)?),
        })
    })
}
