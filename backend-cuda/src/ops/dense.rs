//! Dense projections, plain and with adapters. Both run one base product.

use amphora_cuda_kernels::args::{LinearArgs, LoraLinearArgs, LoraShrinkArgs};
use amphora_cuda_kernels::{DevicePtr, LINEAR, LORA_LINEAR, LORA_SHRINK};
use amphora_hal::ops::{Linear, LoraLinear};
use amphora_hal::{DType, OpKind, Result};

use super::lora_args;
use crate::device::{Cuda, CudaStream};
use crate::heuristics;
use crate::launch::{Workspace, int, launch, optional, pitch, ptr, weight_type};

fn linear_args(kind: OpKind, op: &Linear<'_, Cuda>) -> Result<LinearArgs> {
    Ok(LinearArgs {
        x: ptr(op.x),
        weight: ptr(op.weight.data()),
        bias: optional(op.bias),
        out: ptr(op.out),
        x_pitch: pitch(op.x)?,
        out_pitch: pitch(op.out)?,
        tokens: int(op.x.dims()[0])?,
        n: int(op.weight.n())?,
        k: int(op.weight.k())?,
        weight_type: weight_type(kind, op.x.dtype(), op.weight.scheme())?,
        out_f32: i32::from(op.out.dtype() == DType::F32),
        reserved: 0,
    })
}

pub(super) fn linear(cuda: &Cuda, s: &mut CudaStream, op: Linear<'_, Cuda>) -> Result<()> {
    let args = linear_args(OpKind::Linear, &op)?;
    let grid = heuristics::linear(op.x.dims()[0], op.weight.n());
    launch(cuda, s, LINEAR, op.x.dtype(), grid, &args)
}

pub(super) fn lora_linear(cuda: &Cuda, s: &mut CudaStream, op: LoraLinear<'_, Cuda>) -> Result<()> {
    let base = linear_args(OpKind::LoraLinear, &op.base)?;
    let (tokens, dtype) = (op.base.x.dims()[0], op.base.x.dtype());
    let (perm, tiles) = (op.segments.perm().tensor(), op.segments.tiles().tensor());
    let shrunk = Workspace::of(s).take(heuristics::shrunk_bytes(tokens))?;
    let lora = lora_args(OpKind::LoraLinear, op.lora, op.slices, shrunk)?;
    let shrink = LoraShrinkArgs {
        x: base.x,
        tiles: ptr(tiles),
        perm: ptr(perm),
        pair_weights: DevicePtr::NULL,
        lora,
        x_pitch: base.x_pitch,
        k: base.k,
        tile_words: 3,
        pairs_per_row: 1,
        reserved: 0,
    };
    let grid = heuristics::shrink(tiles.dims()[0], op.slices.len());
    launch(cuda, s, LORA_SHRINK, dtype, grid, &shrink)?;
    let args = LoraLinearArgs {
        base,
        lora,
        perm: ptr(perm),
        tiles: ptr(tiles),
        tile_count: int(tiles.dims()[0])?,
        reserved: 0,
    };
    let grid = heuristics::linear(tokens, op.base.weight.n());
    launch(cuda, s, LORA_LINEAR, dtype, grid, &args)
}
