//! A dense projection with its bias, plain or with the deltas of the rows' adapters.

use amphora_hal::ops::{Linear, LoraLinear};
use amphora_hal::{Backend, Ctx, LoraSlice, LoraTable, Result, SegmentTable, Tensor, Weight};

use crate::lora_slices::LayerSlices;

/// `[n, k]` and `[n]`.
#[derive(Debug)]
pub(crate) struct Projection<B: Backend> {
    pub(crate) weight: Weight<B>,
    pub(crate) bias: Option<Tensor<B>>,
}

/// The adapters of a step, for some slices of a layer.
#[derive(Debug)]
pub(crate) struct Deltas<'a, B: Backend, S: ?Sized> {
    pub(crate) table: &'a LoraTable<B>,
    pub(crate) segments: &'a SegmentTable<B>,
    pub(crate) slices: &'a S,
}

impl<'a, B: Backend> Deltas<'a, B, LayerSlices> {
    /// The same adapters, for one projection.
    pub(crate) fn of(
        &self,
        pick: impl FnOnce(&'a LayerSlices) -> &'a [LoraSlice],
    ) -> Deltas<'a, B, [LoraSlice]> {
        Deltas { table: self.table, segments: self.segments, slices: pick(self.slices) }
    }
}

impl<B: Backend> Projection<B> {
    /// `out = x·Wᵀ + bias`, plus the deltas if there are any.
    pub(crate) fn run(
        &self,
        cx: &mut Ctx<'_, B>,
        x: &Tensor<B>,
        out: &mut Tensor<B>,
        deltas: Option<Deltas<'_, B, [LoraSlice]>>,
    ) -> Result<()> {
        let base = Linear { x, weight: &self.weight, bias: self.bias.as_ref(), out };
        match deltas {
            None => base.run(cx),
            Some(Deltas { table, segments, slices }) => {
                LoraLinear { base, lora: table, slices, segments }.run(cx)
            }
        }
    }
}
