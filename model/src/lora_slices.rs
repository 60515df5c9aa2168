//! Where the deltas of an adapter go: each projection slice of each layer has an id in the LoRA table
//! and a place among the outputs of its (fused) weight.

use std::sync::Arc;

use amphora_hal::{LoraLayout, LoraSlice, SliceId, SliceMeta};

use crate::adapter::{AdapterBase, Target};
use crate::config::Config;

/// The slices of one layer, by the weight whose outputs they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSlices {
    /// q, k and v, one after another.
    pub qkv: [LoraSlice; 3],
    /// Attention output.
    pub o: [LoraSlice; 1],
    /// The router.
    pub router: [LoraSlice; 1],
    /// Gate in the even outputs, up in the odd ones.
    pub gate_up: [LoraSlice; 2],
    /// Down.
    pub down: [LoraSlice; 1],
}

/// All slices of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoraSlices {
    layout: Arc<LoraLayout>,
    layers: Vec<LayerSlices>,
}

impl LoraSlices {
    /// The slices of a gpt_oss model.
    pub fn new(config: &Config) -> Self {
        let base = AdapterBase::from(config);
        let mut layout = LoraLayout::default();
        let layers = (0..base.layers).map(|_| layer(&mut layout, &base)).collect();
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

    /// The slice of `target` in `layer`, if there is such a layer.
    pub fn id(&self, layer: usize, target: Target) -> Option<SliceId> {
        let slices = self.layers.get(layer)?;
        let slice = match target {
            Target::Q => &slices.qkv[0],
            Target::K => &slices.qkv[1],
            Target::V => &slices.qkv[2],
            Target::O => &slices.o[0],
            Target::Router => &slices.router[0],
            Target::Gate => &slices.gate_up[0],
            Target::Up => &slices.gate_up[1],
            Target::Down => &slices.down[0],
        };
        Some(slice.table)
    }
}

fn layer(layout: &mut LoraLayout, base: &AdapterBase) -> LayerSlices {
    let mut slice = |target: Target, out_offset: usize, out_stride: usize| {
        let (k, n) = base.dims(target);
        let experts = match target {
            Target::Gate | Target::Up | Target::Down => base.experts,
            Target::Q | Target::K | Target::V | Target::O | Target::Router => 1,
        };
        LoraSlice {
            table: layout.push(SliceMeta { k, n, experts }),
            out_offset,
            out_stride,
            len: n,
        }
    };
    LayerSlices {
        qkv: [
            slice(Target::Q, 0, 1),
            slice(Target::K, base.q, 1),
            slice(Target::V, base.q + base.kv, 1),
        ],
        o: [slice(Target::O, 0, 1)],
        router: [slice(Target::Router, 0, 1)],
        gate_up: [slice(Target::Gate, 0, 2), slice(Target::Up, 1, 2)],
        down: [slice(Target::Down, 0, 1)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_each_output_of_a_layer_once() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = root.join("../tests/golden/models/gpt_oss");
        let files = crate::ModelFiles::open(&folder).expect("a stored model");
        let config = Config::read(&files).expect("sound");
        let slices = LoraSlices::new(&config);
        let covered = |slices: &[LoraSlice]| {
            let mut outputs: Vec<usize> = slices
                .iter()
                .flat_map(|s| (0..s.len).map(|i| s.out_offset + i * s.out_stride))
                .collect();
            outputs.sort_unstable();
            outputs
        };
        let all = |n: usize| (0..n).collect::<Vec<_>>();
        for layer in slices.layers() {
            assert_eq!(covered(&layer.qkv), all(config.q_width() + 2 * config.kv_width()));
            assert_eq!(covered(&layer.o), all(config.hidden));
            assert_eq!(covered(&layer.router), all(config.experts));
            assert_eq!(covered(&layer.gate_up), all(2 * config.intermediate));
            assert_eq!(covered(&layer.down), all(config.hidden));
        }
        let rows = config.layers() * (5 + 3 * config.experts);
        assert_eq!(slices.layout().rows(), rows);
        let up = slices.id(1, Target::Up).expect("there");
        assert_eq!(slices.layout().meta(up).map(|m| m.experts), Some(config.experts));
        assert_eq!(slices.id(config.layers(), Target::Q), None);
    }
}
