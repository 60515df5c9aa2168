//! The operators: tiling → launch, or the vendor's two-phase call. What this backend lacks says so.

mod dense;
pub(crate) mod grouped;
mod norm;

use amphora_hal::ops::{
    CopyBlocks, Embed, FusedMoe, FusedMoeLora, GatherRows, KvWrite, Linear, Logprobs, LoraLinear,
    MoeRoute, PagedAttention, RmsNorm, Rope, Sample, Swiglu, WriteTokens,
};
use amphora_hal::{
    Checked, DType, Error, HostFactor, LoraOps, LoraShape, OpKey, OpKind, RankClass, Result,
    TensorOps, narrow,
};

use crate::Ascend;
use crate::capability::{NOT_WRITTEN, RANK_CLASSES};
use crate::driver::Stream;

fn unsupported(op: OpKind, dtype: DType, reason: &'static str) -> Error {
    Error::Unsupported { key: OpKey::new(op, dtype), reason }
}

fn not_written(op: OpKind, dtype: DType) -> Result<()> {
    Err(unsupported(op, dtype, NOT_WRITTEN))
}

impl TensorOps for Ascend {
    fn write_tokens(&self, _: &mut Stream, _: Checked<WriteTokens<'_, Self>>) -> Result<()> {
        not_written(OpKind::WriteTokens, DType::I32)
    }

    fn embed(&self, _: &mut Stream, op: Checked<Embed<'_, Self>>) -> Result<()> {
        not_written(OpKind::Embed, op.into_inner().out.dtype())
    }

    fn rms_norm(&self, stream: &mut Stream, op: Checked<RmsNorm<'_, Self>>) -> Result<()> {
        norm::rms_norm(stream, op.into_inner())?;
        self.launched(stream);
        Ok(())
    }

    fn rope(&self, _: &mut Stream, op: Checked<Rope<'_, Self>>) -> Result<()> {
        not_written(OpKind::Rope, op.into_inner().q.dtype())
    }

    fn swiglu(&self, _: &mut Stream, op: Checked<Swiglu<'_, Self>>) -> Result<()> {
        not_written(OpKind::Swiglu, op.into_inner().x.dtype())
    }

    fn kv_write(&self, _: &mut Stream, op: Checked<KvWrite<'_, Self>>) -> Result<()> {
        not_written(OpKind::KvWrite, op.into_inner().k.dtype())
    }

    fn paged_attention(&self, _: &mut Stream, op: Checked<PagedAttention<'_, Self>>) -> Result<()> {
        not_written(OpKind::PagedAttention, op.into_inner().q.dtype())
    }

    fn linear(&self, stream: &mut Stream, op: Checked<Linear<'_, Self>>) -> Result<()> {
        dense::project(self, stream, &op.into_inner(), None)?;
        self.launched(stream);
        Ok(())
    }

    fn moe_route(&self, _: &mut Stream, op: Checked<MoeRoute<'_, Self>>) -> Result<()> {
        not_written(OpKind::MoeRoute, op.into_inner().logits.dtype())
    }

    fn fused_moe(&self, _: &mut Stream, op: Checked<FusedMoe<'_, Self>>) -> Result<()> {
        not_written(OpKind::FusedMoe, op.into_inner().x.dtype())
    }

    fn gather_rows(&self, _: &mut Stream, op: Checked<GatherRows<'_, Self>>) -> Result<()> {
        not_written(OpKind::GatherRows, op.into_inner().x.dtype())
    }

    fn copy_blocks(&self, _: &mut Stream, op: Checked<CopyBlocks<'_, Self>>) -> Result<()> {
        not_written(OpKind::CopyBlocks, op.into_inner().k_cache.dtype())
    }

    fn logprobs(&self, _: &mut Stream, op: Checked<Logprobs<'_, Self>>) -> Result<()> {
        not_written(OpKind::Logprobs, op.into_inner().logits.dtype())
    }

    fn sample(&self, _: &mut Stream, op: Checked<Sample<'_, Self>>) -> Result<()> {
        not_written(OpKind::Sample, op.into_inner().logits.dtype())
    }
}

impl LoraOps for Ascend {
    /// A is `[class, k]` and B `[class, n]`, both row-major: the kernel reads one rank's row at a time.
    fn lora_block(&self, shape: LoraShape, class: RankClass) -> Result<usize> {
        if !shape.dtype.is_float() || !RANK_CLASSES.contains(&class) {
            let key = OpKey::new(OpKind::LoraLinear, shape.dtype).class(class);
            let reason = "no such block here";
            return Err(Error::Unsupported { key, reason });
        }
        Ok(class.get() * shape.width * shape.dtype.size())
    }

    fn pack_lora(&self, factor: &HostFactor<'_>, into: &mut [u8]) -> Result<()> {
        let HostFactor { shape, class, rank, data } = *factor;
        let bytes = self.lora_block(shape, class)?;
        if into.len() != bytes || rank > class.get() || data.len() != rank * shape.width {
            return Err(Error::invalid(
                "lora block",
                format!(
                    "{} numbers of rank {rank} and {} bytes for {shape:?} of class {}",
                    data.len(),
                    into.len(),
                    class.get()
                ),
            ));
        }
        let mut row = vec![0.0f32; shape.width];
        for (r, to) in into.chunks_exact_mut(shape.width * shape.dtype.size()).enumerate() {
            for (w, value) in row.iter_mut().enumerate() {
                *value = factor.at(r, w);
                // 65520 rounds to infinity.
                if shape.dtype == DType::F16 && value.is_finite() && value.abs() >= 65_520.0 {
                    return Err(Error::invalid("lora block", format!("{value} overflows f16")));
                }
            }
            narrow(&row, shape.dtype, to);
        }
        Ok(())
    }

    fn lora_linear(&self, stream: &mut Stream, op: Checked<LoraLinear<'_, Self>>) -> Result<()> {
        let LoraLinear { base, lora, slices, segments } = op.into_inner();
        let adapters = dense::Adapters { lora, slices, segments };
        dense::project(self, stream, &base, Some(&adapters))?;
        self.launched(stream);
        Ok(())
    }

    fn fused_moe_lora(&self, _: &mut Stream, op: Checked<FusedMoeLora<'_, Self>>) -> Result<()> {
        not_written(OpKind::FusedMoeLora, op.into_inner().moe.x.dtype())
    }
}
