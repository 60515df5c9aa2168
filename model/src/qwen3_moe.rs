//! Qwen3-MoE: a decoder whose query and key heads are normed before they are turned. Most layers end
//! in a mixture of experts, softmax over all of them; some may end in a dense MLP instead.

use amphora_hal::Backend;
use amphora_hal::ops::RouteScore;

use crate::config::{Config, MlpKind};
use crate::error::Result;
use crate::layers::description::{self, ExpertNames, LayerNames};
use crate::layers::{Attention, Decoder, DecoderLayer, Mlp, assembly};
use crate::weights::{Item, LoadOptions, Store};

const EXPERTS: ExpertNames =
    ExpertNames { folder: "mlp.experts", gate: "gate_proj", up: "up_proj", down: "down_proj" };

/// Everything the model needs on the device.
pub(crate) fn describe(config: &Config, options: &LoadOptions) -> Vec<Item> {
    let mut items = description::shell(config, options);
    for (layer, mlp) in config.mlps.iter().enumerate() {
        let at = LayerNames::new(layer);
        items.extend(description::norms(&at, config));
        items.extend(description::attention(&at, config));
        items.extend(description::head_norms(&at, config));
        match mlp {
            MlpKind::Dense => items.extend(description::dense_mlp(&at, config)),
            MlpKind::Experts => {
                items.push(description::router(&at, config, "mlp.gate.weight"));
                items.extend(description::separate_experts(&at, config, &EXPERTS));
            }
        }
    }
    items
}

pub(crate) fn assemble<B: Backend>(store: &mut Store<B>, config: &Config) -> Result<Decoder<B>> {
    assembly::decoder(store, config, |store, layer| {
        let at = LayerNames::new(layer);
        let window = config.windows[layer];
        Ok(DecoderLayer {
            input_norm: assembly::norm(store, config, &at.key("input_norm"))?,
            attention: Attention {
                head_norms: Some(assembly::head_norms(store, &at, config)?),
                ..assembly::attention(store, &at, config, window)?
            },
            post_norm: assembly::norm(store, config, &at.key("post_norm"))?,
            mlp: match config.mlps[layer] {
                MlpKind::Dense => Mlp::Dense(assembly::dense_mlp(store, &at, config)?),
                MlpKind::Experts => {
                    Mlp::Experts(assembly::moe(store, &at, config, RouteScore::Softmax)?)
                }
            },
        })
    })
}
