//! The operators: plain functions over slices, and the glue that views tensors for them.

mod attention;
mod dense;
mod elementwise;
mod logits;
mod moe;
mod rows;
mod sample;

use amphora_hal::ops::{
    CopyBlocks, Embed, FusedMoe, FusedMoeLora, GatherRows, KvWrite, Linear, Logprobs, LoraLinear,
    MoeRoute, PagedAttention, RmsNorm, Rope, Sample, Swiglu, WriteTokens,
};
use amphora_hal::{
    Checked, DType, HostFactor, LoraOps, LoraShape, OpBounds, OpKind, RankClass, Result, Tensor,
    TensorOps,
};
use half::bf16;

use crate::memory::{Access, RowsMut};
use crate::scratch::{Scratch, piece};
use crate::simd::{self, Level};
use crate::threads::ranges;
use crate::{Cpu, CpuStream, lora};

/// Runs `$body` with `$T` standing for the compute type of `$tensor`.
macro_rules! by_dtype {
    ($tensor:expr, $T:ident => $body:expr) => {
        match $tensor.dtype() {
            amphora_hal::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            _ => {
                type $T = f32;
                $body
            }
        }
    };
}
use by_dtype;

/// Most workspace bytes of an operator; the counterpart of what each takes from [`Scratch`].
pub(crate) fn workspace(bounds: &OpBounds, threads: usize) -> usize {
    let OpBounds { tokens, k, n, inner, experts, top_k, rank, context, .. } = *bounds;
    let Some(op) = bounds.op else { return 0 };
    // Blocks and shrunk rows have the rank's class.
    let rank = RankClass::ALL.iter().map(|c| c.get()).find(|&c| c >= rank).unwrap_or(rank);
    let product = piece::<f32>(tokens * n);
    match op {
        OpKind::Linear => product,
        OpKind::LoraLinear => product + dense::delta_workspace(k, n, rank, threads),
        OpKind::PagedAttention => attention::workspace(threads, k, context),
        OpKind::MoeRoute => moe::route_workspace(tokens, top_k, experts),
        OpKind::FusedMoe | OpKind::FusedMoeLora => {
            moe::workspace(moe::Sizes { pairs: tokens * top_k, hidden: k, inner, rank, threads })
        }
        OpKind::Swiglu => elementwise::swiglu_workspace(k, threads),
        OpKind::Sample => sample::workspace(k, threads),
        OpKind::WriteTokens
        | OpKind::Embed
        | OpKind::RmsNorm
        | OpKind::Rope
        | OpKind::KvWrite
        | OpKind::GatherRows
        | OpKind::CopyBlocks
        | OpKind::Logprobs => 0,
    }
}

/// The f32 rows that a product fills before its one rounding into `out`: `out` itself where that
/// is f32, else scratch to be passed to [`finish`].
fn unrounded<'a>(
    access: &'a Access<'_>,
    scratch: &mut Scratch<'a>,
    out: &'a mut Tensor<Cpu>,
) -> (RowsMut<'a, f32>, Option<RowsMut<'a, bf16>>) {
    if out.dtype() == DType::F32 {
        return (access.write(out), None);
    }
    let narrow = access.write::<bf16>(out);
    let (rows, width) = (narrow.len(), narrow.width());
    (RowsMut::of(scratch.take::<f32>(rows * width), width), Some(narrow))
}

/// The bias of every row, in f32, behind the product and before deltas.
fn add_bias(level: Level, sums: &mut RowsMut<'_, f32>, bias: Option<&[f32]>) {
    let Some(bias) = bias else { return };
    for row in 0..sums.len() {
        simd::add_scaled(level, 1.0, bias, sums.row(row));
    }
}

fn finish(device: &Cpu, sums: RowsMut<'_, f32>, narrow: Option<RowsMut<'_, bf16>>) {
    if let Some(narrow) = narrow {
        let cost = ELEMENT_COST * sums.width();
        by_rows(device, cost, (sums, narrow), |_, sums, to| {
            simd::narrow(device.0.level, sums, to);
        });
    }
}

/// What an element costs where it is read, changed and written, in multiply-adds.
const ELEMENT_COST: usize = 8;

/// Gives each row of `to`, with its number and its row of `from`, to `body`; the rows shared among threads.
/// `cost` is a row's, in multiply-adds.
fn by_rows<F: Send, T: Send>(
    device: &Cpu,
    cost: usize,
    (from, to): (RowsMut<'_, F>, RowsMut<'_, T>),
    body: impl Fn(usize, &mut [F], &mut [T]) + Sync,
) {
    let rows = to.len();
    let mut left = (from, to);
    let mut tasks = Vec::new();
    for range in ranges(rows, device.0.threads.parts(rows * cost), 1) {
        let (from, from_rest) = left.0.split_rows(range.len());
        let (to, to_rest) = left.1.split_rows(range.len());
        left = (from_rest, to_rest);
        tasks.push((range, from, to));
    }
    device.0.threads.run(tasks, |(range, mut from, mut to)| {
        for (i, row) in range.enumerate() {
            body(row, from.row(i), to.row(i));
        }
    });
}

impl TensorOps for Cpu {
    fn write_tokens(&self, s: &mut CpuStream, op: Checked<WriteTokens<'_, Self>>) -> Result<()> {
        rows::write_tokens(self, s, op.into_inner());
        Ok(())
    }
    fn embed(&self, s: &mut CpuStream, op: Checked<Embed<'_, Self>>) -> Result<()> {
        rows::embed(self, s, op.into_inner());
        Ok(())
    }
    fn rms_norm(&self, s: &mut CpuStream, op: Checked<RmsNorm<'_, Self>>) -> Result<()> {
        elementwise::rms_norm(self, s, op.into_inner());
        Ok(())
    }
    fn rope(&self, s: &mut CpuStream, op: Checked<Rope<'_, Self>>) -> Result<()> {
        elementwise::rope(self, s, op.into_inner());
        Ok(())
    }
    fn swiglu(&self, s: &mut CpuStream, op: Checked<Swiglu<'_, Self>>) -> Result<()> {
        elementwise::swiglu(self, s, op.into_inner());
        Ok(())
    }
    fn kv_write(&self, s: &mut CpuStream, op: Checked<KvWrite<'_, Self>>) -> Result<()> {
        attention::kv_write(self, s, op.into_inner());
        Ok(())
    }
    fn paged_attention(
        &self,
        s: &mut CpuStream,
        op: Checked<PagedAttention<'_, Self>>,
    ) -> Result<()> {
        attention::paged_attention(self, s, op.into_inner());
        Ok(())
    }
    fn linear(&self, s: &mut CpuStream, op: Checked<Linear<'_, Self>>) -> Result<()> {
        dense::linear(self, s, op.into_inner());
        Ok(())
    }
    fn moe_route(&self, s: &mut CpuStream, op: Checked<MoeRoute<'_, Self>>) -> Result<()> {
        moe::route(self, s, op.into_inner());
        Ok(())
    }
    fn fused_moe(&self, s: &mut CpuStream, op: Checked<FusedMoe<'_, Self>>) -> Result<()> {
        moe::fused(self, s, op.into_inner(), None);
        Ok(())
    }
    fn gather_rows(&self, s: &mut CpuStream, op: Checked<GatherRows<'_, Self>>) -> Result<()> {
        rows::gather_rows(self, s, op.into_inner());
        Ok(())
    }
    fn copy_blocks(&self, s: &mut CpuStream, op: Checked<CopyBlocks<'_, Self>>) -> Result<()> {
        attention::copy_blocks(self, s, op.into_inner());
        Ok(())
    }
    fn logprobs(&self, s: &mut CpuStream, op: Checked<Logprobs<'_, Self>>) -> Result<()> {
        sample::logprobs(self, s, op.into_inner());
        Ok(())
    }
    fn sample(&self, s: &mut CpuStream, op: Checked<Sample<'_, Self>>) -> Result<()> {
        sample::sample(self, s, op.into_inner());
        Ok(())
    }
}

impl LoraOps for Cpu {
    fn lora_block(&self, shape: LoraShape, class: RankClass) -> Result<usize> {
        lora::block_bytes(shape, class)
    }
    fn pack_lora(&self, factor: &HostFactor<'_>, into: &mut [u8]) -> Result<()> {
        lora::pack(factor, into)
    }
    fn lora_linear(&self, s: &mut CpuStream, op: Checked<LoraLinear<'_, Self>>) -> Result<()> {
        dense::lora_linear(self, s, op.into_inner());
        Ok(())
    }
    fn fused_moe_lora(&self, s: &mut CpuStream, op: Checked<FusedMoeLora<'_, Self>>) -> Result<()> {
        let FusedMoeLora { moe, lora, gate_up_slices, down_slices } = op.into_inner();
        let with = moe::With { table: lora, gate_up: gate_up_slices, down: down_slices };
        moe::fused(self, s, moe, Some(with));
        Ok(())
    }
}
