//! Our kernels as functions: a kernel's parameter list stands beside its name, and nowhere else.

use std::path::Path;

use amphora_ascendc_kernels::{self as kernels, LoraFusedTiling};
use amphora_hal::{DType, Result};

use super::module::{Function, Module, launch};
use super::{Context, Stream};

/// The kernels of a product.
#[derive(Debug)]
pub(crate) struct Kernels {
    f32: Function,
    f16: Function,
    bf16: Function,
    /// Holds the functions' code.
    _module: Module,
}

/// Device addresses that `lora_fused` takes; 0 stands for an operand that its tiling says is absent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LoraFused {
    /// `[tokens, k]`.
    pub(crate) x: usize,
    /// `[tokens, n]` f32, dense.
    pub(crate) base: usize,
    /// `[n]` f32.
    pub(crate) bias: usize,
    /// `[tokens, n]`.
    pub(crate) out: usize,
    /// The adapters' blocks.
    pub(crate) arena: usize,
    /// The table's rows.
    pub(crate) table: usize,
    /// `[tokens]`.
    pub(crate) perm: usize,
    /// `[tiles, 3]`.
    pub(crate) tiles: usize,
}

impl Kernels {
    /// Loads the binary at an absolute path.
    ///
    /// # Errors
    /// The runtime's: no such file, not for this product, or a kernel is missing.
    pub(crate) fn load(context: &Context, path: &Path) -> Result<Self> {
        let module = Module::load(context, path)?;
        Ok(Kernels {
            f32: module.function(kernels::LORA_FUSED_F32)?,
            f16: module.function(kernels::LORA_FUSED_F16)?,
            bf16: module.function(kernels::LORA_FUSED_BF16)?,
            _module: module,
        })
    }

    /// Puts `lora_fused` for `dtype`, a floating-point type, on the stream.
    ///
    /// # Errors
    /// The runtime's.
    pub(crate) fn lora_fused(
        &self,
        stream: &mut Stream,
        dtype: DType,
        addresses: &LoraFused,
        (tiling, blocks): (&LoraFusedTiling, u32),
    ) -> Result<()> {
        let function = match dtype {
            DType::F16 => self.f16,
            DType::BF16 => self.bf16,
            DType::F32 | DType::I32 | DType::U8 => self.f32,
        };
        let LoraFused { x, base, bias, out, arena, table, perm, tiles } = *addresses;
        let arguments = [x, base, bias, out, arena, table, perm, tiles];
        // SAFETY: these are the parameters of `lora_fused_*` in order, with its own tiling block. What
        // the addresses name is the device's: a wrong one is a fault there (see `driver`).
        unsafe { launch(stream, function, blocks, &arguments, bytemuck::bytes_of(tiling)) }
    }
}
