//! Known gaps, as data: which cases a backend does not pass yet, and why. A case listed here that
//! passes fails the run, so that the list cannot outlive its reasons.

/// One gap.
#[derive(Debug, Clone, Copy)]
pub struct Expectation {
    /// `Device::NAME`.
    pub backend: &'static str,
    /// Cases whose name starts with this.
    pub key: &'static str,
    /// Why, in one line.
    pub reason: &'static str,
}

/// All known gaps.
pub const EXPECTATIONS: &[Expectation] = &[
    ascend("write_tokens"),
    ascend("embed"),
    ascend("gather_rows"),
    ascend("rope"),
    ascend("swiglu"),
    ascend("kv_write"),
    ascend("paged_attention"),
    ascend("moe_route"),
    ascend("fused_moe"),
    ascend("copy_blocks"),
    ascend("sample"),
    ascend("logprobs"),
    ascend("laws/fused_moe"),
    ascend("laws/rows_alone/rope"),
    ascend("laws/rows_alone/swiglu"),
    ascend("laws/rows_alone/paged_attention"),
    ascend("laws/rows_alone/moe_route"),
    ascend("laws/rows_alone/fused_moe"),
    ascend("laws/rows_alone/sample"),
];

const fn ascend(key: &'static str) -> Expectation {
    Expectation { backend: "ascend", key, reason: "not written for Ascend yet" }
}

/// The gap that covers a case.
pub fn expected(backend: &str, case: &str) -> Option<&'static Expectation> {
    let covers = |e: &&Expectation| e.backend == backend && case.starts_with(e.key);
    EXPECTATIONS.iter().find(covers)
}
