//! Where the deltas of an adapter go: each projection slice of each layer has an id in the LoRA table
//! and a place among the outputs of its (fused) weight.

use std::sync::Arc;

use amphora_hal::{LoraLayout, LoraSlice, SliceId, SliceMeta};

use crate::adapter::{AdapterBase, Target};
use crate::config::Config;

/// The slices of one layer, by the weight whose outputs they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerSlices {
    /// q, k and v, one after another.
    pub qkv: Vec<LoraSlice>,
    /// Attention output.
    pub o: Vec<LoraSlice>,
    /// The router; none in a layer without experts.
    pub router: Vec<LoraSlice>,
    /// Gate and up, of the experts or of the one MLP: one after the other, or by turns in the experts of
    /// gpt_oss.
    pub gate_up: Vec<LoraSlice>,
    /// Down.
    pub down: Vec<LoraSlice>,
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
        let base = AdapterBase::from(config);
        let mut layout = LoraLayout::default();
        let layers = (0..base.layers()).map(|i| layer(&mut layout, &base, i)).collect();
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

    /// The slice of `target` in `layer`, if there is such a layer and it has such a projection.
    pub fn id(&self, layer: usize, target: Target) -> Option<SliceId> {
        let slices = self.layers.get(layer)?;
        let slice = match target {
            Target::Q => slices.qkv.first(),
            Target::K => slices.qkv.get(1),
            Target::V => slices.qkv.get(2),
            Target::O => slices.o.first(),
            Target::Router => slices.router.first(),
            Target::Gate => slices.gate_up.first(),
            Target::Up => slices.gate_up.get(1),
            Target::Down => slices.down.first(),
        }?;
        Some(slice.table)
    }
}

fn layer(layout: &mut LoraLayout, base: &AdapterBase, index: usize) -> LayerSlices {
    // None where the layer has no such projection.
    let mut slice = |target: Target, out_offset: usize, out_stride: usize| {
        let (k, n) = base.dims(index, target)?;
        let experts = base.experts_of(index, target).unwrap_or(1);
        let table = layout.push(SliceMeta { k, n, experts });
        Some(LoraSlice { table, out_offset, out_stride, len: n })
    };
    let mut all = |wanted: &[(Target, usize, usize)]| -> Vec<LoraSlice> {
        wanted
            .iter()
            .filter_map(|&(target, offset, stride)| slice(target, offset, stride))
            .collect()
    };
    let inner = base.dims(index, Target::Up).map_or(0, |(_, up)| up);
    let fused_stride = match base.experts_of(index, Target::Up) {
        Some(_) => base.gate_up_stride(),
        None => 1,
    };
    let up_offset = if fused_stride == 1 { inner } else { 1 };
    LayerSlices {
        qkv: all(&[(Target::Q, 0, 1), (Target::K, base.q, 1), (Target::V, base.q + base.kv, 1)]),
        o: all(&[(Target::O, 0, 1)]),
        router: all(&[(Target::Router, 0, 1)]),
        gate_up: all(&[(Target::Gate, 0, fused_stride), (Target::Up, up_offset, fused_stride)]),
        down: all(&[(Target::Down, 0, 1)]),
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
