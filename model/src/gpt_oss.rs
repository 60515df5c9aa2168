//! GPT-OSS: a decoder of alternating windowed and full attention with sinks, each layer followed by
//! a mixture of experts with a clamped, interleaved SwiGLU; biases everywhere, YaRN positions.

use amphora_hal::Backend;
use amphora_hal::ops::RouteScore;

use crate::config::{Config, Quantization};
use crate::error::Result;
use crate::files::ModelFiles;
use crate::layers::description::{self, LayerNames};
use crate::layers::{Attention, Decoder, DecoderLayer, Mlp, assembly};
use crate::weights::{Item, Kind, LoadOptions, Part, Store, Stored};

/// Everything the model needs on the device.
pub(crate) fn describe(files: &ModelFiles, config: &Config, options: &LoadOptions) -> Vec<Item> {
    let mut items = description::shell(config, options);
    for layer in 0..config.layers() {
        let at = LayerNames::new(layer);
        items.extend(description::norms(&at, config));
        items.extend(description::attention(&at, config));
        items.push(at.vector("sinks", "self_attn.sinks", &[config.heads]));
        items.push(description::router(&at, config, "mlp.router.weight"));
        items.push(at.vector("router.bias", "mlp.router.bias", &[config.experts]));
        items.extend(experts(&at, files, config));
    }
    items
}

/// Experts are stored as one tensor for each projection, inputs before outputs, or in MXFP4.
fn experts(at: &LayerNames, files: &ModelFiles, config: &Config) -> [Item; 4] {
    let (experts, hidden, inner) = (config.experts, config.hidden, config.intermediate);
    let matrix = |key: &str, of: &str, k: usize, n: usize| {
        let tensor = at.tensor(of);
        let blocks = format!("{tensor}_blocks");
        // A checkpoint that was dequantised and saved again may still say mxfp4.
        let packed = config.quantization == Quantization::Mxfp4 && files.tensor(&blocks).is_some();
        let stored = match packed {
            true => Stored::Mxfp4(tensor),
            false => Stored::Experts(tensor),
        };
        let parts = vec![Part { n, stored }];
        Item::new(&at.key(key), Kind::Matrix { matrices: experts, k, parts })
    };
    [
        at.vector("gate_up.bias", "mlp.experts.gate_up_proj_bias", &[experts, 2 * inner]),
        at.vector("down.bias", "mlp.experts.down_proj_bias", &[experts, hidden]),
        matrix("gate_up", "mlp.experts.gate_up_proj", hidden, 2 * inner),
        matrix("down", "mlp.experts.down_proj", inner, hidden),
    ]
}

pub(crate) fn assemble<B: Backend>(store: &mut Store<B>, config: &Config) -> Result<Decoder<B>> {
    assembly::decoder(store, config, |store, layer| {
        let at = LayerNames::new(layer);
        let window = config.windows[layer];
        Ok(DecoderLayer {
            input_norm: assembly::norm(store, config, &at.key("input_norm"))?,
            attention: Attention {
                sinks: Some(store.tensor(&at.key("sinks"))?),
                ..assembly::attention(store, &at, config, window)?
            },
            post_norm: assembly::norm(store, config, &at.key("post_norm"))?,
            mlp: Mlp::Experts(assembly::moe(store, &at, config, RouteScore::SoftmaxTopk)?),
        })
    })
}
