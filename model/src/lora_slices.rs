//! Where the deltas of an adapter go: each projection slice of each layer has an id in the LoRA table
//! and a place among the outputs of its (fused) weight.

use std::sync::Arc;

use amphora_hal::ops::Activation;
use amphora_hal::{LoraLayout, LoraSlice, SliceId, SliceMeta};

use crate::adapter::Target;
use crate::config::{Config, MlpKind};

/// The slices of one layer, by the weight whose outputs they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSlices {
    /// q, k and v, one after another.
    pub qkv: [LoraSlice; 3],
    /// Attention output.
    pub o: [LoraSlice; 1],
    /// The router, in a layer with experts.
    pub router: Option<LoraSlice>,
    /// Gate and up of the experts or of the dense MLP: one after another, or in the even and the odd
    /// outputs where the activation interleaves them.
    pub gate_up: [LoraSlice; 2],
    /// Down of the experts or of the dense MLP.
    pub down: [LoraSlice; 1],
}

/// All slices of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoraSlices {
    layout: Arc<LoraLayout>,
    layers: Vec<LayerSlices>,
}

impl LoraSlices {
    /// The slices of a model.
    pub fn new(config: &Config) -> Self {
        let mut layout = LoraLayout::default();
        let layers = config.mlps.iter().map(|mlp| layer(&mut layout, config, *mlp)).collect();
        LoraSlices { layout: Arc::new(layout), layers }
    }

    /// Rows of the LoRA table.
    pub fn layout(&self) -> &Arc<LoraLayout> {
        &self.layout
    }

    /// The slices of each layer.
    pub fn layers(&self) -> &[LayerSlices] {
        &self.layers
    }

    /// The slice of `target` in `layer`, if there is such a layer and it has one: gate, up and down
    /// are those of the experts or of the dense MLP, whichever the layer has.
    pub fn id(&self, layer: usize, target: Target) -> Option<SliceId> {
        let slices = self.layers.get(layer)?;
        let slice = match target {
            Target::Q => &slices.qkv[0],
            Target::K => &slices.qkv[1],
            Target::V => &slices.qkv[2],
            Target::O => &slices.o[0],
            Target::Router => slices.router.as_ref()?,
            Target::Gate => &slices.gate_up[0],
            Target::Up => &slices.gate_up[1],
            Target::Down => &slices.down[0],
        };
        Some(slice.table)
    }
}

fn layer(layout: &mut LoraLayout, config: &Config, mlp: MlpKind) -> LayerSlices {
    let (hidden, q, kv) = (config.hidden, config.q_width(), config.kv_width());
    let (experts, inner) = match mlp {
        MlpKind::Dense => (1, config.dense_intermediate),
        MlpKind::Experts => (config.experts, config.intermediate),
    };
    let (up_offset, stride) = match config.activation {
        Activation::Swiglu => (inner, 1),
        Activation::ClampedInterleaved { .. } => (1, 2),
    };
    let mut slice = |meta: SliceMeta, out_offset: usize, out_stride: usize| LoraSlice {
        table: layout.push(meta),
        out_offset,
        out_stride,
        len: meta.n,
    };
    let dense = |k: usize, n: usize| SliceMeta { k, n, experts: 1 };
    let each = |k: usize, n: usize| SliceMeta { k, n, experts };
    LayerSlices {
        qkv: [
            slice(dense(hidden, q), 0, 1),
            slice(dense(hidden, kv), q, 1),
            slice(dense(hidden, kv), q + kv, 1),
        ],
        o: [slice(dense(q, hidden), 0, 1)],
        router: match mlp {
            MlpKind::Dense => None,
            MlpKind::Experts => Some(slice(dense(hidden, experts), 0, 1)),
        },
        gate_up: [
            slice(each(hidden, inner), 0, stride),
            slice(each(hidden, inner), up_offset, stride),
        ],
        down: [slice(each(inner, hidden), 0, 1)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn golden(model: &str) -> Config {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = root.join("../tests/golden/models").join(model);
        let files = crate::ModelFiles::open(&folder).expect("a stored model");
        Config::read(&files).expect("sound")
    }

    #[test]
    fn slices_cover_each_output_of_a_layer_once() {
        let covered = |slices: &[LoraSlice]| {
            let mut outputs: Vec<usize> = slices
                .iter()
                .flat_map(|s| (0..s.len).map(|i| s.out_offset + i * s.out_stride))
                .collect();
            outputs.sort_unstable();
            outputs
        };
        let all = |n: usize| (0..n).collect::<Vec<_>>();
        for model in ["gpt_oss", "qwen3_moe", "qwen3_moe_sparse", "mixtral", "llama", "qwen3"] {
            let config = golden(model);
            let slices = LoraSlices::new(&config);
            let mut rows = 0;
            assert_eq!(slices.layers().len(), config.layers());
            for (layer, mlp) in slices.layers().iter().zip(&config.mlps) {
                assert_eq!(covered(&layer.qkv), all(config.q_width() + 2 * config.kv_width()));
                assert_eq!(covered(&layer.o), all(config.hidden));
                let (router, experts, inner) = match mlp {
                    MlpKind::Dense => (0, 1, config.dense_intermediate),
                    MlpKind::Experts => (config.experts, config.experts, config.intermediate),
                };
                assert_eq!(covered(layer.router.as_slice()), all(router));
                assert_eq!(covered(&layer.gate_up), all(2 * inner));
                assert_eq!(covered(&layer.down), all(config.hidden));
                rows += 4 + layer.router.iter().len() + 3 * experts;
            }
            assert_eq!(slices.layout().rows(), rows);
        }
    }

    #[test]
    fn targets_are_those_of_the_layer() {
        let config = golden("qwen3_moe_sparse");
        let slices = LoraSlices::new(&config);
        let experts = |layer, target| {
            Some(slices.layout().meta(slices.id(layer, target)?).expect("its own id").experts)
        };
        assert_eq!(config.mlps[2..], [MlpKind::Dense, MlpKind::Experts]);
        assert_eq!(experts(2, Target::Up), Some(1));
        assert_eq!(experts(2, Target::Router), None);
        assert_eq!(experts(3, Target::Up), Some(config.experts));
        assert_eq!(experts(3, Target::Router), Some(1));
        assert_eq!(experts(config.layers(), Target::Q), None);
    }
}
