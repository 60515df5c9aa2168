//! The operators: each its checked struct to kernel arguments, a grid, and a launch.

mod attention;
mod dense;
mod dense_group;
mod dense_tiles;
mod elementwise;
mod moe;
mod rows;
mod sample;
mod shrink;

use amphora_cuda_kernels::DevicePtr;
use amphora_cuda_kernels::args::{LoraArgs, MAX_SLICES, SliceArgs, activation};
use amphora_hal::ops::{
    Activation, CopyBlocks, Embed, FusedMoe, FusedMoeLora, GatherRows, KvWrite, Linear, Logprobs,
    LoraLinear, MoeRoute, PagedAttention, RmsNorm, Rope, Sample, Swiglu, WriteTokens,
};
use amphora_hal::{
    Checked, Device, Error, HostFactor, LoraOps, LoraShape, LoraSlice, LoraTable, OpKey, OpKind,
    RankClass, Result, Support, TensorOps,
};

use crate::device::{Cuda, CudaStream};
use crate::heuristics::MAX_HEAD;
use crate::launch::{int, ptr};
use crate::pack;

const HEAD_TOO_WIDE: &str = "heads of more than 256 elements";
const TOO_MANY_SLICES: &str = "more than 4 adapter slices of one projection";
const TOO_MANY_EXPERTS: &str = "more experts than shared memory holds the scores of";

// The kernel's rows of log-probabilities are the contract's.
const _: () = assert!(amphora_cuda_kernels::args::MOST_BEST == amphora_hal::MOST_BEST);

/// Whether and how an operator runs.
pub(crate) fn supports(key: &OpKey) -> Support {
    if !key.dtype.is_float() {
        return Support::No { reason: "computes in f32, f16 or bf16" };
    }
    if key.scheme.is_some_and(|scheme| pack::stored(scheme).is_err()) {
        return Support::No { reason: pack::DENSE_ONLY };
    }
    if key.class.is_some_and(|class| class.get() > amphora_cuda_kernels::args::MAX_RANK) {
        return Support::No { reason: "no such rank class" };
    }
    if key.op == OpKind::PagedAttention && key.head_dim.is_some_and(|dim| dim > MAX_HEAD) {
        return Support::No { reason: HEAD_TOO_WIDE };
    }
    Support::Yes {
        path: match key.op {
            OpKind::FusedMoe | OpKind::FusedMoeLora if key.dtype.size() == 2 => {
                "weights streamed once for up to 64 rows; else f32 multiply-adds, 16 x 64 tiles"
            }
            OpKind::Linear | OpKind::LoraLinear | OpKind::FusedMoe | OpKind::FusedMoeLora => {
                "f32 multiply-adds, 16 x 64 tiles"
            }
            OpKind::PagedAttention => "a block for each row and head",
            _ => "plain",
        },
    }
}

/// An activation as kernels take it: its kind, limit and alpha.
fn activation_args(of: Activation) -> (i32, f32, f32) {
    match of {
        Activation::Swiglu => (activation::SWIGLU, 0.0, 0.0),
        Activation::ClampedInterleaved { limit, alpha } => {
            (activation::CLAMPED_INTERLEAVED, limit, alpha)
        }
    }
}

/// The adapters of one projection, as kernels take them.
fn lora_args(
    op: OpKind,
    table: &LoraTable<Cuda>,
    slices: &[LoraSlice],
    shrunk: DevicePtr,
) -> Result<LoraArgs> {
    if slices.len() > MAX_SLICES {
        let key = OpKey::new(op, table.dtype());
        return Err(Error::Unsupported { key, reason: TOO_MANY_SLICES });
    }
    let mut args = LoraArgs {
        arena: ptr(table.arena()),
        rows: ptr(table.rows().tensor()),
        shrunk,
        table_rows: int(table.layout().rows())?,
        slice_count: int(slices.len())?,
        ..LoraArgs::NONE
    };
    for (to, slice) in args.slices.iter_mut().zip(slices) {
        *to = SliceArgs {
            table: int(slice.table.row())?,
            offset: int(slice.out_offset)?,
            stride: int(slice.out_stride)?,
            len: int(slice.len)?,
        };
    }
    Ok(args)
}

macro_rules! forward {
    ($($method:ident $op:ident $module:ident;)+) => {
        $(
            fn $method(&self, stream: &mut CudaStream, op: Checked<$op<'_, Self>>) -> Result<()> {
                $module::$method(self, stream, op.into_inner())?;
                self.count_launch(stream);
                Ok(())
            }
        )+
    };
}

impl TensorOps for Cuda {
    forward! {
        write_tokens WriteTokens rows;
        embed Embed rows;
        gather_rows GatherRows rows;
        rms_norm RmsNorm elementwise;
        rope Rope elementwise;
        swiglu Swiglu elementwise;
        kv_write KvWrite attention;
        paged_attention PagedAttention attention;
        linear Linear dense;
        moe_route MoeRoute moe;
        fused_moe FusedMoe moe;
        copy_blocks CopyBlocks attention;
        sample Sample sample;
        logprobs Logprobs sample;
    }
}

impl LoraOps for Cuda {
    fn lora_block(&self, shape: LoraShape, class: RankClass) -> Result<usize> {
        pack::lora_block(self.caps().rank_classes, shape, class)
    }

    fn pack_lora(&self, factor: &HostFactor<'_>, into: &mut [u8]) -> Result<()> {
        pack::pack_lora(self.caps().rank_classes, factor, into)
    }

    forward! {
        lora_linear LoraLinear dense;
        fused_moe_lora FusedMoeLora moe;
    }
}
