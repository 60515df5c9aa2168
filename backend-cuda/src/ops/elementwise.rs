//! Norms, rotary positions, and the activation of a dense MLP.

use amphora_cuda_kernels::args::{RmsNormArgs, RopeArgs, SwigluArgs};
use amphora_cuda_kernels::{RMS_NORM, RMS_NORM_SHORT, ROPE, ROPE_MANY, SWIGLU};
use amphora_hal::ops::{RmsNorm, Rope, RopePairing, Swiglu};
use amphora_hal::{DType, Result};

use super::activation_args;
use crate::device::{Cuda, CudaStream};
use crate::heuristics::{self, per_block, rope as rope_blocks};
use crate::launch::{int, launch, optional, pitch, ptr};

pub(super) fn rms_norm(cuda: &Cuda, s: &mut CudaStream, op: RmsNorm<'_, Cuda>) -> Result<()> {
    let width = op.weight.dims()[0];
    let vectors = op.x.shape().elements() / width;
    // A tensor of one dimension is one row, so its only vector is the first of row 0.
    let rows = if op.x.dims().len() == 1 { 1 } else { op.x.dims()[0] };
    let args = RmsNormArgs {
        x: ptr(op.x),
        add: optional(op.add),
        weight: ptr(op.weight),
        out: ptr(op.out),
        x_pitch: pitch(op.x)?,
        add_pitch: op.add.map_or(Ok(0), pitch)?,
        out_pitch: pitch(op.out)?,
        vectors: int(vectors)?,
        inner: int(vectors.checked_div(rows).unwrap_or(0))?,
        width: int(width)?,
        eps: op.eps,
    };
    let dtype = op.x.dtype();
    let threads = RMS_NORM_SHORT.id().kernel().threads as usize;
    let short = heuristics::short_norm(vectors, width * dtype.size(), threads);
    if let Some(geometry) = short.filter(|_| norm_by_pieces(&args, dtype)) {
        return launch(cuda, s, RMS_NORM_SHORT, dtype, geometry, &args);
    }
    launch(cuda, s, RMS_NORM, dtype, per_block(vectors).overlapped(), &args)
}

/// Whether the rows of all operands lie on whole pieces of 16 bytes.
fn norm_by_pieces(args: &RmsNormArgs, dtype: DType) -> bool {
    let piece = 16 / dtype.size() as i64;
    [args.x_pitch, args.add_pitch, args.out_pitch].iter().all(|pitch| pitch % piece == 0)
        && [args.x, args.add, args.weight, args.out].iter().all(|at| at.0.is_multiple_of(16))
}

pub(super) fn rope(cuda: &Cuda, s: &mut CudaStream, op: Rope<'_, Cuda>) -> Result<()> {
    let [tokens, heads, dim] = [op.q.dims()[0], op.q.dims()[1], op.q.dims()[2]];
    let args = RopeArgs {
        q: ptr(op.q),
        k: ptr(op.k),
        position: ptr(op.position.tensor()),
        table: ptr(op.table),
        q_scale: optional(op.q_scale),
        v: optional(op.store.as_ref().map(|store| store.v)),
        kv_index: optional(op.store.as_ref().map(|store| store.plan.kv_index().tensor())),
        k_cache: optional(op.store.as_ref().map(|store| &*store.k_cache)),
        v_cache: optional(op.store.as_ref().map(|store| &*store.v_cache)),
        q_pitch: pitch(op.q)?,
        k_pitch: pitch(op.k)?,
        v_pitch: op.store.as_ref().map_or(Ok(0), |store| pitch(store.v))?,
        tokens: int(tokens)?,
        heads: int(heads)?,
        kv_heads: int(op.k.dims()[1])?,
        dim: int(dim)?,
        rotary: int(op.table.dims()[1])?,
        interleaved: i32::from(op.pairing == RopePairing::Interleaved),
        v_width: int(op.store.as_ref().map_or(0, |store| store.v.dims()[1] * store.v.dims()[2]))?,
        row_threads: 0,
    };
    let threads = ROPE_MANY.id().kernel().threads as usize;
    let many = heuristics::rope_many(tokens, threads).filter(|_| by_pieces(&args, op.q.dtype()));
    if let Some((geometry, row_threads)) = many {
        let args = RopeArgs { row_threads: int(row_threads)?, ..args };
        return launch(cuda, s, ROPE_MANY, op.q.dtype(), geometry, &args);
    }
    let pairs = (heads + op.k.dims()[1]) * (dim / 2);
    let threads = ROPE.id().kernel().threads as usize;
    launch(cuda, s, ROPE, op.q.dtype(), rope_blocks(tokens, pairs, threads).overlapped(), &args)
}

/// Whether all elements turn, pairs are half a head apart, and rows and halves of heads are whole pieces of 16
/// bytes, of which the threads of a row take whole heads.
fn by_pieces(args: &RopeArgs, dtype: DType) -> bool {
    let piece = 16 / dtype.size() as i64;
    let half = i64::from(args.rotary / 2);
    let whole = |elements: i64| elements % piece == 0;
    let starts = [args.q, args.k, args.v, args.k_cache, args.v_cache, args.table];
    args.interleaved == 0
        && args.rotary == args.dim
        && half > 0
        && whole(half)
        && (half / piece).unsigned_abs().is_power_of_two()
        && half / piece <= 128
        && [args.q_pitch, args.k_pitch, args.v_pitch, i64::from(args.v_width)].map(whole)
            == [true; 4]
        && starts.iter().all(|start| start.0.is_multiple_of(16))
}

pub(super) fn swiglu(cuda: &Cuda, s: &mut CudaStream, op: Swiglu<'_, Cuda>) -> Result<()> {
    let [rows, inner] = [op.out.dims()[0], op.out.dims()[1]];
    let (activation, limit, alpha) = activation_args(op.activation);
    let args = SwigluArgs {
        x: ptr(op.x),
        out: ptr(op.out),
        x_pitch: pitch(op.x)?,
        out_pitch: pitch(op.out)?,
        inner: int(inner)?,
        activation,
        limit,
        alpha,
    };
    let threads = SWIGLU.id().kernel().threads as usize;
    let geometry = heuristics::swiglu(rows, inner * op.x.dtype().size(), threads);
    launch(cuda, s, SWIGLU, op.x.dtype(), geometry, &args)
}
