//! Qwen3: a dense decoder whose query and key heads are normed before they are turned.

use amphora_hal::Backend;

use crate::config::Config;
use crate::error::Result;
use crate::layers::description::{self, LayerNames};
use crate::layers::{Attention, Decoder, DecoderLayer, Mlp, assembly};
use crate::weights::{Item, LoadOptions, Store};

/// Everything the model needs on the device.
pub(crate) fn describe(config: &Config, options: &LoadOptions) -> Vec<Item> {
    let mut items = description::shell(config, options);
    for layer in 0..config.layers() {
        let at = LayerNames::new(layer);
        items.extend(description::norms(&at, config));
        items.extend(description::attention(&at, config));
        items.extend(description::head_norms(&at, config));
        items.extend(description::dense_mlp(&at, config));
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
            mlp: Mlp::Dense(assembly::dense_mlp(store, &at, config)?),
        })
    })
}
