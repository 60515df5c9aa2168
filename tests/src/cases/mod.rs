//! The cases, one file for each operator (the experts with and without adapters share one), and
//! one for the device itself. Small and odd sizes first.

pub mod copy_blocks;
pub mod device;
pub mod fused_moe;
pub mod kv_write;
pub mod linear;
pub mod logprobs;
pub mod lora_linear;
pub mod moe_route;
pub mod paged_attention;
pub mod rms_norm;
pub mod rope;
pub mod rows;
pub mod sample;
pub mod swiglu;

use amphora_hal::Backend;

use crate::compare::Want;
use crate::harness::Case;

/// Every case, in the order that a new backend wants to pass them.
pub fn all<B: Backend>(device: &B) -> Vec<Case<B>> {
    let caps = device.caps();
    [
        device::cases(),
        rows::cases(caps),
        rms_norm::cases(caps),
        linear::cases(caps),
        lora_linear::cases(caps),
        rope::cases(caps),
        swiglu::cases(caps),
        kv_write::cases(caps),
        paged_attention::cases(caps),
        moe_route::cases(caps),
        fused_moe::cases(caps),
        fused_moe::lora_cases(caps),
        copy_blocks::cases(caps),
        sample::cases(caps),
        logprobs::cases(caps),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Elements near these numbers.
pub(crate) fn near(values: &[f64]) -> Vec<Want> {
    values.iter().map(|&value| Want::Near(value)).collect()
}

/// Rows of `width` wanted elements placed as columns `[offset, offset + width)` of rows of `pitch`;
/// the other columns stay as they are.
pub(crate) fn columns(wants: &[Want], width: usize, offset: usize, pitch: usize) -> Vec<Want> {
    let mut out = Vec::new();
    for row in wants.chunks(width) {
        out.extend(std::iter::repeat_n(Want::Same, offset));
        out.extend_from_slice(row);
        out.extend(std::iter::repeat_n(Want::Same, pitch - offset - width));
    }
    out
}
