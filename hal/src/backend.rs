//! The operators a backend implements. Each method takes an operator whose check has passed.

use crate::checked::Checked;
use crate::device::Device;
use crate::error::Result;
use crate::lora::{HostFactor, LoraShape, RankClass};
use crate::ops::{
    CopyBlocks, Embed, FusedMoe, FusedMoeLora, GatherRows, KvWrite, Linear, Logprobs, LoraLinear,
    MoeRoute, PagedAttention, RmsNorm, Rope, Sample, Swiglu, WriteTokens,
};
use crate::tensor::Tensor;
use crate::weight::{HostWeight, HostWeightMeta, Weight};

/// The operators of a transformer. Each puts its work on `stream` and returns; errors are the
/// driver's, or `Lost`.
#[allow(missing_docs)] // Each method is documented at its operator.
#[allow(clippy::missing_errors_doc)]
pub trait TensorOps: Device {
    fn write_tokens(
        &self,
        stream: &mut Self::Stream,
        op: Checked<WriteTokens<'_, Self>>,
    ) -> Result<()>;
    fn embed(&self, stream: &mut Self::Stream, op: Checked<Embed<'_, Self>>) -> Result<()>;
    fn rms_norm(&self, stream: &mut Self::Stream, op: Checked<RmsNorm<'_, Self>>) -> Result<()>;
    fn rope(&self, stream: &mut Self::Stream, op: Checked<Rope<'_, Self>>) -> Result<()>;
    fn swiglu(&self, stream: &mut Self::Stream, op: Checked<Swiglu<'_, Self>>) -> Result<()>;
    fn kv_write(&self, stream: &mut Self::Stream, op: Checked<KvWrite<'_, Self>>) -> Result<()>;
    fn paged_attention(
        &self,
        stream: &mut Self::Stream,
        op: Checked<PagedAttention<'_, Self>>,
    ) -> Result<()>;
    fn linear(&self, stream: &mut Self::Stream, op: Checked<Linear<'_, Self>>) -> Result<()>;
    fn moe_route(&self, stream: &mut Self::Stream, op: Checked<MoeRoute<'_, Self>>) -> Result<()>;
    fn fused_moe(&self, stream: &mut Self::Stream, op: Checked<FusedMoe<'_, Self>>) -> Result<()>;
    fn gather_rows(
        &self,
        stream: &mut Self::Stream,
        op: Checked<GatherRows<'_, Self>>,
    ) -> Result<()>;
    fn copy_blocks(
        &self,
        stream: &mut Self::Stream,
        op: Checked<CopyBlocks<'_, Self>>,
    ) -> Result<()>;
    fn sample(&self, stream: &mut Self::Stream, op: Checked<Sample<'_, Self>>) -> Result<()>;
    fn logprobs(&self, stream: &mut Self::Stream, op: Checked<Logprobs<'_, Self>>) -> Result<()>;
}

/// The operators that adapters add.
///
/// The law of the base row: `linear` and `lora_linear`, `fused_moe` and `fused_moe_lora`, share one
/// base product each, so in one bucket a row without an adapter has the same bits from both.
pub trait LoraOps: Device {
    /// Bytes of one block in this device's layout, before rounding to [`crate::ARENA_UNIT`].
    ///
    /// # Errors
    /// The class or the type is not one of this device's.
    fn lora_block(&self, shape: LoraShape, class: RankClass) -> Result<usize>;

    /// Writes one factor in this device's layout: the host half of loading an adapter.
    ///
    /// # Errors
    /// As [`LoraOps::lora_block`]; or `into` has another size, `data` does not fit the rank, or a
    /// value overflows the block's type.
    fn pack_lora(&self, factor: &HostFactor<'_>, into: &mut [u8]) -> Result<()>;

    /// See [`LoraLinear`].
    ///
    /// # Errors
    /// The driver's, or `Lost`.
    fn lora_linear(
        &self,
        stream: &mut Self::Stream,
        op: Checked<LoraLinear<'_, Self>>,
    ) -> Result<()>;

    /// See [`FusedMoeLora`].
    ///
    /// # Errors
    /// The driver's, or `Lost`.
    fn fused_moe_lora(
        &self,
        stream: &mut Self::Stream,
        op: Checked<FusedMoeLora<'_, Self>>,
    ) -> Result<()>;
}

/// A device that runs models with adapters.
pub trait Backend: TensorOps + LoraOps {
    /// Bytes that [`Backend::pack`] needs for such a weight.
    ///
    /// # Errors
    /// The scheme is not one of this device's.
    fn packed_bytes(&self, meta: &HostWeightMeta) -> Result<usize>;

    /// Brings one host weight into this backend's layout in `into`, dense bytes of
    /// [`Backend::packed_bytes`]. Load time only; returns when `weight` has been read.
    ///
    /// # Errors
    /// As [`Backend::packed_bytes`]; the driver's.
    fn pack(
        &self,
        stream: &mut Self::Stream,
        weight: &HostWeight<'_>,
        into: Tensor<Self>,
    ) -> Result<Weight<Self>>;
}
