//! AscendC kernels: their sources, their names, and the tiling blocks that launches carry.
//!
//! A kernel entry takes device addresses only, the tiling block last. The block is computed on the
//! host from shapes and bounds, never from values that only the device knows, so a captured launch
//! stays right when the plan and the adapters change under it. `include/tiling.h` has the same
//! structs in C; both sides assert size and offsets.
#![forbid(unsafe_code)]

use std::mem::offset_of;
use std::path::PathBuf;

/// Most rows of one tile: what `lora_fused` keeps in its local buffers.
pub const LORA_FUSED_ROWS: usize = 16;
/// Most outputs of one unit of work.
pub const LORA_FUSED_WIDTH: usize = 512;
/// Largest rank class.
pub const LORA_FUSED_RANK: usize = 256;
/// Most tiles of a step: each core holds the list.
pub const LORA_FUSED_TILES: usize = 2048;
/// Most slices of one projection.
pub const LORA_FUSED_SLICES: usize = 8;

/// The outputs that take one slice's delta: `out_offset + i · out_stride`, i < `len`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct LoraSliceTiling {
    /// The slice's row within a slot of the table.
    pub row: u32,
    /// Output of its first element.
    pub out_offset: u32,
    /// Outputs from one element to the next.
    pub out_stride: u32,
    /// Elements.
    pub len: u32,
}

/// The tiling block of `lora_fused_*`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct LoraFusedTiling {
    /// Rows of x and out.
    pub tokens: u32,
    /// Inputs.
    pub k: u32,
    /// Outputs.
    pub n: u32,
    /// Elements from one row of x to the next.
    pub x_pitch: u32,
    /// Elements from one row of out to the next.
    pub out_pitch: u32,
    /// Outputs of one unit of work.
    pub width: u32,
    /// Entries of the tile list; 0 runs without adapters, and `perm` is not read.
    pub tiles: u32,
    /// Rows of one slot of the table.
    pub table_rows: u32,
    /// Used entries of `slice`.
    pub slices: u32,
    /// 1: `out` is f32, else the compute type.
    pub out_f32: u32,
    /// 1: there is a bias.
    pub has_bias: u32,
    /// Always 0.
    pub reserved: u32,
    /// The slices.
    pub slice: [LoraSliceTiling; LORA_FUSED_SLICES],
}

const _: () = {
    assert!(size_of::<LoraSliceTiling>() == 16);
    assert!(size_of::<LoraFusedTiling>() == 48 + 16 * LORA_FUSED_SLICES);
    assert!(offset_of!(LoraFusedTiling, width) == 20);
    assert!(offset_of!(LoraFusedTiling, has_bias) == 40);
    assert!(offset_of!(LoraFusedTiling, slice) == 48);
};

/// Kernel entries, by their names in the binary.
pub const LORA_FUSED_F32: &str = "lora_fused_f32";
/// See [`LORA_FUSED_F32`].
pub const LORA_FUSED_F16: &str = "lora_fused_f16";
/// See [`LORA_FUSED_F32`].
pub const LORA_FUSED_BF16: &str = "lora_fused_bf16";

/// The file that holds the kernels for one product, as `CMakeLists.txt` names it.
pub fn binary_name(soc: &str) -> String {
    format!("amphora_kernels_{soc}.o")
}

/// Kernel sources, for whoever compiles them.
pub fn sources() -> Vec<PathBuf> {
    vec![root().join("kernels/lora_fused.cpp")]
}

/// The folder of the kernels' own headers.
pub fn include_dir() -> PathBuf {
    root().join("include")
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}
