//! Dense projections: the vendor's product in f32 into the workspace, then one kernel that adds bias
//! and deltas and rounds once. With and without adapters it is the same two calls, so the law of the
//! base row holds by construction.

use amphora_ascendc_kernels::LORA_FUSED_ROWS;
use amphora_hal::ops::Linear;
use amphora_hal::{DType, LoraSlice, LoraTable, OpKind, Result, Scheme, SegmentTable, Tensor};

use super::unsupported;
use crate::Ascend;
use crate::aclnn::{Scratch, address, matmul, view};
use crate::driver::{LoraFused, Stream, View, data_type};
use crate::tiling::{Deltas, Projection, lora_fused};

/// What `lora_linear` adds to `linear`.
pub(super) struct Adapters<'a> {
    pub(super) lora: &'a LoraTable<Ascend>,
    pub(super) slices: &'a [LoraSlice],
    pub(super) segments: &'a SegmentTable<Ascend>,
}

/// Rows of a checked operand: elements from one to the next.
fn pitch(tensor: &Tensor<Ascend>) -> usize {
    let (_, pitch, _) =
        tensor.shape().as_rows().expect("the operator's check admits operands of rows only");
    pitch
}

pub(super) fn project(
    device: &Ascend,
    stream: &mut Stream,
    op: &Linear<'_, Ascend>,
    adapters: Option<&Adapters<'_>>,
) -> Result<()> {
    let kind = match adapters {
        Some(_) => OpKind::LoraLinear,
        None => OpKind::Linear,
    };
    let dtype = op.x.dtype();
    let refused = |reason| unsupported(kind, dtype, reason);
    if op.weight.scheme() != Scheme::Dense(dtype) {
        return Err(refused("weights are stored dense in the compute type here"));
    }
    let (tokens, k, n) = (op.x.dims()[0], op.weight.k(), op.weight.n());
    if tokens == 0 {
        return Ok(());
    }
    let projection = Projection {
        tokens,
        k,
        n,
        x_pitch: pitch(op.x),
        out_pitch: pitch(op.out),
        out_f32: op.out.dtype() == DType::F32,
        has_bias: op.bias.is_some(),
    };
    let deltas = adapters.map_or(Deltas::default(), |a| Deltas {
        tiles: a.segments.tiles().tensor().dims()[0],
        table_rows: a.lora.layout().rows(),
        slices: a.slices,
    });
    debug_assert_eq!(device.tile_rows(), LORA_FUSED_ROWS);
    let kernels = device.kernels().ok_or_else(|| {
        refused("the kernel binary of this product was not found or does not load")
    })?;
    let (tiling, blocks) =
        lora_fused(&projection, &deltas, device.vector_cores()).map_err(refused)?;

    let mut scratch = Scratch::of(stream);
    let base = scratch.take(tokens * n * size_of::<f32>())?;
    let weight = View::dense(address(op.weight.data()), &[n, k], data_type(dtype)).transposed();
    let product = View::dense(base, &[tokens, n], data_type(DType::F32));
    matmul(stream, &scratch, (&view(op.x), &weight), &product)?;

    // Shapes, disjointness and every index are proven by `Checked`, the plan builder and the table.
    let of = |tensor: Option<&Tensor<Ascend>>| tensor.map_or(0, address);
    let addresses = LoraFused {
        x: address(op.x),
        base,
        bias: of(op.bias),
        out: address(op.out),
        arena: of(adapters.map(|a| a.lora.arena())),
        table: of(adapters.map(|a| a.lora.rows().tensor())),
        perm: of(adapters.map(|a| a.segments.perm().tensor())),
        tiles: of(adapters.map(|a| a.segments.tiles().tensor())),
    };
    kernels.lora_fused(stream, dtype, &addresses, (&tiling, blocks))
}
