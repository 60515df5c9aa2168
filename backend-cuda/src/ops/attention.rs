//! The paged cache: writing it, and attention over it.

use amphora_cuda_kernels::args::{AttentionArgs, CopyBlocksArgs, KvWriteArgs, mask};
use amphora_cuda_kernels::{
    ATTENTION_FLASH_64, ATTENTION_FLASH_128, ATTENTION_FLASH_256, ATTENTION_GROUP_64,
    ATTENTION_GROUP_128, ATTENTION_SPLIT_64, ATTENTION_SPLIT_128, ATTENTION_SPLIT_256, COPY_BLOCKS,
    DevicePtr, KV_WRITE, PAGED_ATTENTION,
};
use amphora_hal::ops::{CopyBlocks, KvWrite, Mask, PagedAttention};
use amphora_hal::{DType, Error, OpKey, OpKind, Result, Tensor};

use crate::device::{Cuda, CudaStream};
use crate::heuristics::attention::{Call, GroupWidth, Operands, Path, Width};
use crate::heuristics::tuned::attention_path;
use crate::heuristics::{MAX_HEAD, block_copies, per_block};
use crate::launch::{int, launch, optional, pitch, ptr};

pub(super) fn kv_write(cuda: &Cuda, s: &mut CudaStream, op: KvWrite<'_, Cuda>) -> Result<()> {
    let tokens = op.k.dims()[0];
    let args = KvWriteArgs {
        k: ptr(op.k),
        v: ptr(op.v),
        kv_index: ptr(op.plan.kv_index().tensor()),
        k_cache: ptr(op.k_cache),
        v_cache: ptr(op.v_cache),
        k_pitch: pitch(op.k)?,
        v_pitch: pitch(op.v)?,
        k_width: int(op.k.dims()[1] * op.k.dims()[2])?,
        v_width: int(op.v.dims()[1] * op.v.dims()[2])?,
    };
    launch(cuda, s, KV_WRITE, op.k.dtype(), per_block(tokens).overlapped(), &args)
}

pub(super) fn copy_blocks(cuda: &Cuda, s: &mut CudaStream, op: CopyBlocks<'_, Cuda>) -> Result<()> {
    let block_bytes =
        |cache: &Tensor<Cuda>| cache.bytes().checked_div(cache.dims()[0]).unwrap_or(0);
    let (k_bytes, v_bytes) = (block_bytes(op.k_cache), block_bytes(op.v_cache));
    let copies = op.plan.copies().tensor();
    let args = CopyBlocksArgs {
        copies: ptr(copies),
        k_cache: ptr(op.k_cache),
        v_cache: ptr(op.v_cache),
        k_bytes: k_bytes as i64,
        v_bytes: v_bytes as i64,
    };
    let geometry = block_copies(copies.dims()[0], k_bytes.max(v_bytes));
    launch(cuda, s, COPY_BLOCKS, DType::F32, geometry.overlapped(), &args)
}

pub(super) fn paged_attention(
    cuda: &Cuda,
    s: &mut CudaStream,
    op: PagedAttention<'_, Cuda>,
) -> Result<()> {
    let [tokens, heads, k_dim] = [op.q.dims()[0], op.q.dims()[1], op.q.dims()[2]];
    let [kv_heads, v_dim] = [op.v_cache.dims()[2], op.v_cache.dims()[3]];
    if k_dim.max(v_dim) > MAX_HEAD {
        return Err(Error::Unsupported {
            key: OpKey::new(OpKind::PagedAttention, op.q.dtype()).head_dim(k_dim.max(v_dim)),
            reason: super::HEAD_TOO_WIDE,
        });
    }
    let (mask, width) = match op.mask {
        Mask::Causal => (mask::CAUSAL, 0),
        // Positions are counted in 31 bits, so a wider window or chunk sees the same.
        Mask::Window(width) => (mask::WINDOW, width.min(i32::MAX as usize)),
        Mask::Chunk(width) => (mask::CHUNK, width.min(i32::MAX as usize)),
    };
    let table = op.plan.block_table().tensor();
    let sequences = op.plan.context().tensor().dims()[0];
    let args = AttentionArgs {
        q: ptr(op.q),
        k_cache: ptr(op.k_cache),
        v_cache: ptr(op.v_cache),
        q_start: ptr(op.plan.q_start().tensor()),
        context: ptr(op.plan.context().tensor()),
        block_table: ptr(table),
        sinks: optional(op.sinks),
        out: ptr(op.out),
        q_pitch: pitch(op.q)?,
        out_pitch: pitch(op.out)?,
        sequences: int(sequences)?,
        table_width: int(table.shape().elements().checked_div(sequences).unwrap_or(0))?,
        block_size: int(op.plan.kv_shape().1)?,
        heads: int(heads)?,
        kv_heads: int(kv_heads)?,
        k_dim: int(k_dim)?,
        v_dim: int(v_dim)?,
        mask,
        mask_width: int(width)?,
        scale: op.scale,
    };
    let context = args.table_width.unsigned_abs() as usize * op.plan.kv_shape().1;
    let span = match op.mask {
        Mask::Causal => context,
        Mask::Window(width) | Mask::Chunk(width) => width.min(context),
    };
    let dim = k_dim.max(v_dim);
    let operands = operands(&op, &args);
    let call = Call { tokens, sequences, heads, kv_heads, dim, span, operands };
    let dtype = op.q.dtype();
    match attention_path(&call, dtype, (cuda.limits(), cuda.tuning())) {
        Path::Exact(grid) => launch(cuda, s, PAGED_ATTENTION, dtype, grid, &args),
        Path::Split(width, grid) => {
            let entry = match width {
                Width::W64 => ATTENTION_SPLIT_64,
                Width::W128 => ATTENTION_SPLIT_128,
                Width::W256 => ATTENTION_SPLIT_256,
            };
            launch(cuda, s, entry, dtype, grid, &args)
        }
        Path::Group(width, grid) => {
            let entry = match width {
                GroupWidth::W64 => ATTENTION_GROUP_64,
                GroupWidth::W128 => ATTENTION_GROUP_128,
            };
            launch(cuda, s, entry, dtype, grid, &args)
        }
        Path::Flash(width, grid) => {
            let entry = match width {
                Width::W64 => ATTENTION_FLASH_64,
                Width::W128 => ATTENTION_FLASH_128,
                Width::W256 => ATTENTION_FLASH_256,
            };
            launch(cuda, s, entry, dtype, grid, &args)
        }
    }
}

/// Whether tensor cores take the operands: 16-bit types, cached heads copied by 16 bytes, and pairs of
/// queries and outputs read and written as one word.
fn operands(op: &PagedAttention<'_, Cuda>, args: &AttentionArgs) -> Operands {
    let whole = |dim: usize| dim.is_multiple_of(8);
    let words = |pointer: DevicePtr, pitch: i64| {
        pointer.0.is_multiple_of(4) && pitch.unsigned_abs().is_multiple_of(2)
    };
    let fits = op.q.dtype() != DType::F32
        && whole(op.q.dims()[2])
        && whole(op.v_cache.dims()[3])
        && args.k_cache.0.is_multiple_of(16)
        && args.v_cache.0.is_multiple_of(16)
        && words(args.q, args.q_pitch)
        && words(args.out, args.out_pitch);
    if fits { Operands::Half } else { Operands::Exact }
}
