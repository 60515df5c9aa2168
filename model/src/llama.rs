//! Llama: a plain dense decoder; biases only where the configuration says so, positions of Llama 3.1.

use amphora_hal::Backend;

use crate::config::Config;
use crate::error::Result;
use crate::layers::description::{self, LayerNames};
use crate::layers::{Decoder, DecoderLayer, Mlp, assembly};
use crate::weights::{Item, LoadOptions, Store};

/// Everything the model needs on the device.
pub(crate) fn describe(config: &Config, options: &LoadOptions) -> Vec<Item> {
    let mut items = description::shell(config, options);
    for layer in 0..config.layers() {
        let at = LayerNames::new(layer);
        items.extend(description::norms(&at, config));
        items.extend(description::attention(&at, config));
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
            attention: assembly::attention(store, &at, config, window)?,
            post_norm: assembly::norm(store, config, &at.key("post_norm"))?,
            mlp: Mlp::Dense(assembly::dense_mlp(store, &at, config)?),
        })
    })
}
