//! What runs how: pure answers from the product's name and the symbols that were found.

use amphora_hal::{DType, OpBounds, OpKey, OpKind, RankClass, Scheme, Support};

/// Rank classes of the arena's blocks: those that are multiples of 16, the width of a matrix unit's
/// fractal, so all but 8.
pub(crate) const RANK_CLASSES: &[RankClass] = RankClass::ALL.split_at(1).1;

/// Compute types.
pub(crate) const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Workspace left to a vendor's operator, whose wish is known only when it is called. One that wants
/// more is refused then.
const VENDOR_WORKSPACE: usize = 16 << 20;

/// What was found when the device was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found {
    /// The product is of a family that the kernels are made for.
    pub(crate) family: bool,
    /// Our kernels were loaded.
    pub(crate) kernels: bool,
    /// `aclnnMatmul`.
    pub(crate) matmul: bool,
    /// `aclnnRmsNorm`, `aclnnInplaceAdd` and `aclnnInplaceCopy`.
    pub(crate) norm: bool,
}

/// Whether a product has the vector core that the kernels are made for: Atlas A2 and A3.
pub(crate) fn is_known_family(soc: &str) -> bool {
    soc.starts_with("Ascend910B") || soc.starts_with("Ascend910_93")
}

const fn no(reason: &'static str) -> Support {
    Support::No { reason }
}

/// Why an operator that this backend lacks does not run.
pub(crate) const NOT_WRITTEN: &str = "not written for Ascend yet";

/// Whether an operator runs, and by which path.
pub(crate) fn support(found: &Found, key: &OpKey) -> Support {
    if !found.family {
        return no("the product is of neither the 910B nor the 910_93 family");
    }
    if !DTYPES.contains(&key.dtype) {
        return no("the compute type is none of f32, f16 and bf16");
    }
    match key.op {
        OpKind::RmsNorm if found.norm => Support::Yes { path: "aclnnRmsNorm" },
        OpKind::RmsNorm => no("aclnnRmsNorm, aclnnInplaceAdd or aclnnInplaceCopy was not found"),
        OpKind::Linear | OpKind::LoraLinear => {
            if key.scheme.is_some_and(|s| s != Scheme::Dense(key.dtype)) {
                no("weights are stored dense in the compute type here")
            } else if key.class.is_some_and(|c| !RANK_CLASSES.contains(&c)) {
                no("no such rank class here")
            } else if !found.matmul {
                no("aclnnMatmul was not found")
            } else if !found.kernels {
                no("the kernel binary of this product was not found or does not load")
            } else {
                Support::Yes { path: "aclnnMatmul, lora_fused" }
            }
        }
        _ => no(NOT_WRITTEN),
    }
}

/// Most workspace of an operator within these bounds.
pub(crate) fn workspace(bounds: &OpBounds) -> usize {
    let aligned = |bytes: usize| bytes.next_multiple_of(amphora_hal::ALIGN);
    match bounds.op {
        // The base product in f32.
        Some(OpKind::Linear | OpKind::LoraLinear) => {
            aligned(bounds.tokens * bounds.n * 4) + VENDOR_WORKSPACE
        }
        // The reciprocal roots, and the result of a norm in place.
        Some(OpKind::RmsNorm) => {
            aligned(bounds.tokens * 4) + aligned(bounds.tokens * bounds.k * 4) + VENDOR_WORKSPACE
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Found = Found { family: true, kernels: true, matmul: true, norm: true };

    #[test]
    fn every_refusal_has_a_reason_of_its_own() {
        let linear = OpKey::new(OpKind::LoraLinear, DType::BF16);
        assert!(matches!(support(&ALL, &linear), Support::Yes { .. }));
        let cases = [
            (Found { family: false, ..ALL }, linear, "family"),
            (Found { kernels: false, ..ALL }, linear, "kernel binary"),
            (Found { matmul: false, ..ALL }, linear, "aclnnMatmul"),
            (ALL, linear.scheme(Scheme::Mxfp4), "dense"),
            (ALL, linear.scheme(Scheme::Dense(DType::F32)), "dense"),
            (ALL, linear.class(RankClass::new(8)), "rank class"),
            (Found { norm: false, ..ALL }, OpKey::new(OpKind::RmsNorm, DType::F16), "aclnnRmsNorm"),
            (ALL, OpKey::new(OpKind::Rope, DType::BF16), "not written"),
        ];
        for (found, key, wanted) in cases {
            match support(&found, &key) {
                Support::No { reason } => assert!(reason.contains(wanted), "{key}: {reason}"),
                Support::Yes { path } => panic!("{key} runs by {path}"),
            }
        }
    }

    #[test]
    fn families_go_by_name() {
        assert!(is_known_family("Ascend910B3") && is_known_family("Ascend910_9392"));
        assert!(!is_known_family("Ascend310P3") && !is_known_family("Ascend950"));
    }
}
