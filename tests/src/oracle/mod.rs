//! Each operator in f64, from its formula, by plain loops over host arrays.
//!
//! Nothing here is shared with a backend, and nothing is clever: speed is no concern, a formula on
//! the page is. `tests/oracle_stored.rs` holds each against a case stored with torch.

pub mod fused_moe;
pub mod linear;
pub mod lora_linear;
pub mod moe_route;
pub mod paged_attention;
pub mod rms_norm;
pub mod rope;
pub mod rows;
pub mod sample;
pub mod swiglu;
