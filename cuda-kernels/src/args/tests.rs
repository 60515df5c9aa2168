//! What both sides of the argument structs say, held against each other.

use super::*;

#[test]
fn the_c_side_asserts_the_same_layout() {
    let layout = include_str!("../../include/amphora/args_layout.h");
    let mut wanted = 0;
    for (name, size, fields) in ALL {
        assert!(layout.contains(&format!("AMPHORA_SIZE({name}, {size});")), "{name}");
        for (field, at) in *fields {
            let line = format!("AMPHORA_AT({name}, {field}, {at});");
            assert!(layout.contains(&line), "{line}");
        }
        wanted += 1 + fields.len();
    }
    let found = layout.matches("AMPHORA_SIZE(").count() + layout.matches("AMPHORA_AT(").count();
    assert_eq!(found, wanted + 2, "the two definitions, and one line for each size and field");
}

#[test]
fn enumerations_and_bounds_are_those_of_the_c_side() {
    let header = include_str!("../../include/amphora/args.h");
    for line in [
        format!("kF32 = {}, kF16 = {}, kBf16 = {}", element::F32, element::F16, element::BF16),
        format!("kCausal = {}, kWindow = {}, kChunk = {}", mask::CAUSAL, mask::WINDOW, mask::CHUNK),
        format!(
            "kSoftmaxTopk = {}, kSoftmax = {}, kSigmoid = {}",
            score::SOFTMAX_TOPK,
            score::SOFTMAX,
            score::SIGMOID
        ),
        format!(
            "kSwiglu = {}, kClampedInterleaved = {}",
            activation::SWIGLU,
            activation::CLAMPED_INTERLEAVED
        ),
        format!(
            "kNeedsAll = {}, kNeedsNothing = {}, kNeedsX = {}",
            needs::ALL,
            needs::NOTHING,
            needs::X
        ),
        format!("kMaxSlices = {MAX_SLICES};"),
        format!("kMaxRank = {MAX_RANK};"),
        format!("kMostBest = {MOST_BEST};"),
        format!("kLogitChunk = {LOGIT_CHUNK};"),
        format!("kShortVectors = {SHORT_VECTORS};"),
        format!("kMostCandidates = {MOST_CANDIDATES};"),
    ] {
        assert!(header.contains(&line), "{line}");
    }
}
