//! Dense projections, plain and with segmented deltas.

use super::runnable;
use crate::checked::{Check, Checked};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::lora::{LoraSlice, LoraTable};
use crate::segments::SegmentTable;
use crate::tensor::Tensor;
use crate::weight::Weight;

/// `out = x·Wᵀ + bias`.
#[derive(Debug)]
pub struct Linear<'a, D: Device> {
    /// `[tokens, k]`.
    pub x: &'a Tensor<D>,
    /// `[n, k]`, any scheme.
    pub weight: &'a Weight<D>,
    /// `[n]` f32.
    pub bias: Option<&'a Tensor<D>>,
    /// `[tokens, n]`, the compute type, or f32 (router, head).
    pub out: &'a mut Tensor<D>,
}

impl<D: Device> Linear<'_, D> {
    fn validate(&self, check: &Check) -> Result<()> {
        check.ndim("x", self.x, 2)?;
        check.float("x", self.x)?;
        check.rows("x", self.x)?;
        check.that(self.weight.matrices() == 1, || "the weight holds experts".to_owned())?;
        let (tokens, k, n) = (self.x.dims()[0], self.weight.k(), self.weight.n());
        check.dims("x", self.x, &[tokens, k])?;
        check.dims("out", self.out, &[tokens, n])?;
        check.rows("out", self.out)?;
        if self.out.dtype() != DType::F32 {
            check.dtype("out", self.out, self.x.dtype())?;
        }
        let mut inputs = vec![("x", self.x), ("weight", self.weight.data())];
        inputs.extend(self.weight.scales().map(|scales| ("scales", scales)));
        if let Some(bias) = self.bias {
            check.f32_dense("bias", bias, &[n])?;
            inputs.push(("bias", bias));
        }
        check.disjoint(&[("out", self.out)], &inputs)
    }

    /// # Errors
    /// A shape or type is another, or the output overlaps an input.
    pub fn check(self) -> Result<Checked<Self>> {
        self.validate(&Check::of("linear"))?;
        Ok(Checked::new(self))
    }
}
runnable!(Linear, linear);

/// The same product plus the deltas of the rows' adapters:
/// `out = x·Wᵀ + bias + scale · (x·Aᵀ)·Bᵀ`, with A, B and scale taken for each row's slot and each
/// slice. The intermediate stays f32; base and delta meet in f32 and are rounded once.
#[derive(Debug)]
pub struct LoraLinear<'a, D: Device> {
    /// The base product.
    pub base: Linear<'a, D>,
    /// Arena and rows.
    pub lora: &'a LoraTable<D>,
    /// Which outputs take which delta.
    pub slices: &'a [LoraSlice],
    /// The tokens by slot.
    pub segments: &'a SegmentTable<D>,
}

/// Checks the slices of one weight `[n, k]` against the table's layout.
pub(super) fn check_slices<D: Device>(
    check: &Check,
    lora: &LoraTable<D>,
    slices: &[LoraSlice],
    weight: &Weight<D>,
) -> Result<()> {
    for slice in slices {
        let meta = lora.layout().meta(slice.table);
        let last = slice.len.checked_sub(1).and_then(|last| last.checked_mul(slice.out_stride));
        let reach = last.and_then(|last| last.checked_add(slice.out_offset));
        let sound = meta.is_some_and(|m| {
            m.k == weight.k() && m.n == slice.len && m.experts == weight.matrices()
        }) && slice.out_stride > 0
            && reach.is_some_and(|reach| reach < weight.n());
        check.that(sound, || {
            format!("{slice:?} of {meta:?} on a weight [{}, {}]", weight.n(), weight.k())
        })?;
    }
    Ok(())
}

impl<D: Device> LoraLinear<'_, D> {
    /// # Errors
    /// As [`Linear::check`]; a slice leaves the weight; or the segments are another step's.
    pub fn check(self) -> Result<Checked<Self>> {
        let check = Check::of("lora_linear");
        self.base.validate(&check)?;
        check_slices(&check, self.lora, self.slices, self.base.weight)?;
        check.dims("perm", self.segments.perm().tensor(), &[self.base.x.dims()[0]])?;
        check.that(self.segments.slots() <= self.lora.slots(), || {
            format!("segments of {} slots, a table of {}", self.segments.slots(), self.lora.slots())
        })?;
        check.that(self.lora.dtype() == self.base.x.dtype(), || {
            format!("blocks are {}, x is {}", self.lora.dtype(), self.base.x.dtype())
        })?;
        check.disjoint(
            &[("out", self.base.out)],
            &[
                ("arena", self.lora.arena()),
                ("rows", self.lora.rows().tensor()),
                ("slot", self.segments.slot().tensor()),
                ("perm", self.segments.perm().tensor()),
                ("tiles", self.segments.tiles().tensor()),
            ],
        )?;
        Ok(Checked::new(self))
    }
}
runnable!(LoraLinear, lora_linear);
