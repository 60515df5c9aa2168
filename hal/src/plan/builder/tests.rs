//! The plan builder's own tests: what it writes where, and what it refuses.

use super::*;
use crate::plan::SampleParams;

const LIMITS: PlanLimits = PlanLimits {
    sequences: 4,
    tokens: 8,
    blocks_per_sequence: 3,
    block_size: 4,
    kv_blocks: 10,
    vocab: 100,
    positions: 12,
    slots: 2,
    tile_rows: 2,
    edits: 3,
};
const BUCKET: Bucket = Bucket { tokens: 8, sequences: 4, logit_rows: 6 };

fn prompt<'a>(ids: &'a [u32], blocks: &'a [u32]) -> SequencePlan<'a> {
    SequencePlan {
        sequence: 2,
        slot: Some(Slot::new(1)),
        first_position: 3,
        tokens: Tokens::Prompt(ids),
        blocks,
        copy: None,
        sample: Some(SampleParams::GREEDY),
        edits: &[],
        logprobs: None,
        logits: LogitRows::None,
    }
}

fn words(builder: PlanBuilder, field: Field) -> Vec<i32> {
    let layout = builder.layout.clone();
    let mut bytes = vec![7; layout.bytes()];
    builder.write(&mut bytes);
    let at = layout.offsets[field as usize];
    let [rows, width] = layout.dims[field as usize];
    let words = bytes[at..at + rows * width * 4].chunks_exact(4);
    words.map(|w| i32::from_ne_bytes([w[0], w[1], w[2], w[3]])).collect()
}

fn built() -> PlanBuilder {
    let mut builder = PlanBuilder::new(&LIMITS, BUCKET).expect("within limits");
    let last = SequencePlan {
        sequence: 0,
        slot: None,
        first_position: 5,
        tokens: Tokens::Last,
        ..prompt(&[], &[9, 8])
    };
    builder.push(last).expect("sound");
    builder.push(prompt(&[50, 60], &[4, 5])).expect("sound");
    builder
}

#[test]
fn every_field_is_written_and_padded() {
    assert_eq!(words(built(), Field::TokenIndex), [0, 5, 6, 0, 0, 0, 0, 0]);
    assert_eq!(words(built(), Field::Prompt), [0, 50, 60, 0, 0, 0, 0, 0]);
    assert_eq!(words(built(), Field::Position), [5, 3, 4, 0, 0, 0, 0, 0]);
    assert_eq!(words(built(), Field::KvIndex), [33, 19, 20, -1, -1, -1, -1, -1]);
    assert_eq!(words(built(), Field::Slot), [-1, 1, 1, -1, -1, -1, -1, -1]);
    assert_eq!(words(built(), Field::Perm), [1, 2, 0, 3, 4, 5, 6, 7]);
    assert_eq!(words(built(), Field::Tiles)[..6], [1, 0, 2, 0, 0, 0]);
    assert_eq!(words(built(), Field::QStart), [0, 1, 3, 3, 3]);
    assert_eq!(words(built(), Field::Context), [6, 5, 0, 0]);
    assert_eq!(words(built(), Field::BlockTable)[..6], [9, 8, 0, 4, 5, 0]);
    assert_eq!(words(built(), Field::LogitRow), [0, 2, 0, 0, 0, 0]);
    assert_eq!(words(built(), Field::SampleSlot), [0, 2, -1, -1]);
    assert_eq!(words(built(), Field::Sampling)[12 + 3], 5, "the sampled token's position");
}

#[test]
fn asked_logits_follow_the_sampled_ones() {
    let mut builder = PlanBuilder::new(&LIMITS, BUCKET).expect("within limits");
    let all = SequencePlan { logits: LogitRows::All, ..prompt(&[1, 2, 3], &[4, 5]) };
    builder.push(all).expect("sound");
    let last = SequencePlan { sequence: 1, tokens: Tokens::Last, ..prompt(&[], &[1]) };
    builder.push(last).expect("sound");
    let mut bytes = vec![0; builder.layout.bytes()];
    let host = builder.write(&mut bytes);
    assert_eq!((host.sampled, host.logit_rows), (2, 5));
    assert_eq!(host.sequences[0].logits, 2..5);
    assert_eq!((host.sequences[1].result, host.sequences[1].logits.len()), (Some(1), 0));
}

#[test]
fn edits_lie_at_the_end_and_only_theirs_is_uploaded() {
    let edit = |token| LogitEdit { token, output_count: 2, flags: 1, bias: 0.5 };
    let mut builder = PlanBuilder::new(&LIMITS, BUCKET).expect("within limits");
    let one = |sequence| SequencePlan { sequence, ..prompt(&[1], &[4, 5]) };
    builder.push(SequencePlan { edits: &[edit(7)], ..one(0) }).expect("sound");
    builder.push(SequencePlan { sample: None, ..one(1) }).expect("sound");
    builder.push(one(2)).expect("sound");
    let last = SequencePlan { edits: &[edit(3), edit(99)], ..one(3) };
    builder.push(last).expect("sound");
    let layout = builder.layout.clone();
    let mut bytes = vec![7; layout.bytes()];
    assert_eq!(builder.write(&mut bytes).edits, 3);
    let at = layout.offsets[Field::EditStart as usize];
    let starts: &[i32] = bytemuck::cast_slice(&bytes[at..at + 5 * 4]);
    assert_eq!(starts, [0, 1, 1, 3, 3], "rows of results, not sequences");
    let at = layout.offsets[Field::Edits as usize];
    let edits: Vec<LogitEdit> =
        bytes[at..at + 48].chunks_exact(16).map(bytemuck::pod_read_unaligned).collect();
    assert_eq!(edits, [edit(7), edit(3), edit(99)]);
    assert_eq!(layout.used_bytes(3), at + 48);
    assert!(layout.used_bytes(3) <= layout.bytes() && layout.used_bytes(0) == at);
}

#[test]
fn log_probabilities_are_asked_for_by_row_of_logits() {
    let mut builder = PlanBuilder::new(&LIMITS, BUCKET).expect("within limits");
    let targets = LogitRows::Targets { tokens: &[60, 70], best: 0 };
    let chunk = SequencePlan { logits: targets, ..prompt(&[50, 60, 70], &[4, 5]) };
    builder.push(SequencePlan { sample: None, ..chunk }).expect("sound");
    let drawn = SequencePlan { sequence: 1, logprobs: Some(20), ..prompt(&[1], &[4]) };
    builder.push(drawn).expect("sound");
    builder.push(SequencePlan { sequence: 3, ..prompt(&[1], &[5]) }).expect("sound");
    let layout = builder.layout.clone();
    let mut bytes = vec![0; layout.bytes()];
    let host = builder.write(&mut bytes);
    let field = |field: Field| {
        let at = layout.offsets[field as usize];
        bytemuck::cast_slice::<_, i32>(&bytes[at..at + 6 * 4]).to_vec()
    };
    assert_eq!(field(Field::LogitRow), [3, 4, 0, 1, 0, 0]);
    assert_eq!(field(Field::LogprobTarget), [-1, -1, 60, 70, 0, 0]);
    assert_eq!(field(Field::LogprobBest), [20, -1, 0, 0, -1, -1]);
    assert_eq!((host.logprob_rows, host.raw_logit_rows, host.logit_rows), (3, 0, 4));
    assert_eq!(host.sequences[0].logits, 2..4);
}

#[test]
fn copies_of_a_step_are_independent() {
    let copy = |from, to| Some(BlockCopy { from, to });
    let fork = |sequence, copy, block: &'static [u32]| SequencePlan {
        sequence,
        copy,
        first_position: 0,
        ..prompt(&[1], block)
    };
    let mut builder = PlanBuilder::new(&LIMITS, BUCKET).expect("within limits");
    builder.push(fork(0, copy(1, 2), &[2])).expect("sound");
    builder.push(fork(1, copy(1, 3), &[3])).expect("one block may be copied twice");
    let mut refused = |plan| {
        let refused = builder.push(plan).expect_err("dependent").to_string();
        assert!(refused.contains("copied block"), "{refused}");
    };
    refused(fork(2, copy(2, 4), &[4]));
    refused(fork(2, copy(5, 2), &[2]));
    refused(fork(2, copy(5, 1), &[1]));
    refused(fork(2, copy(5, 5), &[5]));
    refused(fork(2, copy(5, 6), &[7]));
    refused(fork(2, copy(10, 6), &[6]));
    assert_eq!(words(builder, Field::Copies), [1, 2, 1, 3, -1, -1, -1, -1]);
}

#[test]
fn values_out_of_bounds_are_refused() {
    let blocks = [4, 5];
    let sound = || prompt(&[1, 2], &blocks);
    let refused = |sequence: SequencePlan<'_>| {
        let mut builder = PlanBuilder::new(&LIMITS, BUCKET).expect("within limits");
        builder.push(sequence).expect_err("out of bounds").to_string()
    };
    assert!(refused(prompt(&[100], &blocks)).contains("vocabulary"));
    assert!(refused(prompt(&[], &blocks)).contains("no token"));
    assert!(refused(prompt(&[1], &[10])).contains("block leaves"));
    assert!(refused(prompt(&[1, 2], &[1])).contains("cover"));
    assert!(refused(SequencePlan { sequence: 4, ..sound() }).contains("token table"));
    assert!(refused(SequencePlan { slot: Some(Slot::new(2)), ..sound() }).contains("slot"));
    assert!(refused(SequencePlan { first_position: 11, ..sound() }).contains("rotary"));
    let unsound = SampleParams { top_p: f32::NAN, ..SampleParams::GREEDY };
    assert!(refused(SequencePlan { sample: Some(unsound), ..sound() }).contains("sampling"));
    let edit = |token| LogitEdit { token, ..LogitEdit::default() };
    let unsound = |edits: &[LogitEdit]| {
        assert!(refused(SequencePlan { edits, ..sound() }).contains("its edits"), "{edits:?}");
    };
    unsound(&[edit(100)]);
    unsound(&[edit(2), edit(1)]);
    unsound(&[edit(2), edit(2)]);
    unsound(&[LogitEdit { bias: f32::NAN, ..edit(1) }]);
    unsound(&[LogitEdit { flags: 2, ..edit(1) }]);
    unsound(&[LogitEdit { output_count: 1, ..edit(1) }]);
    unsound(&[edit(1), edit(2), edit(3), edit(4)]);
    let greedless = SequencePlan { sample: None, edits: &[edit(1)], ..sound() };
    assert!(refused(greedless).contains("edits"));
    for params in [
        SampleParams { min_p: 1.5, ..SampleParams::GREEDY },
        SampleParams { repetition: 0.0, ..SampleParams::GREEDY },
        SampleParams { presence: f32::INFINITY, ..SampleParams::GREEDY },
    ] {
        assert!(refused(SequencePlan { sample: Some(params), ..sound() }).contains("sampling"));
    }
    let targets = |tokens, best| LogitRows::Targets { tokens, best };
    for logits in [targets(&[1, 2, 3], 0), targets(&[100], 0), targets(&[1], 21)] {
        assert!(refused(SequencePlan { logits, ..sound() }).contains("log-probabilities"));
    }
    let without = SequencePlan { sample: None, logprobs: Some(0), ..sound() };
    assert!(refused(without).contains("log-probabilities"));
    let mut builder = built();
    assert!(builder.push(sound()).expect_err("twice").to_string().contains("taken"));
    let long = SequencePlan { sequence: 3, first_position: 0, ..prompt(&[1; 6], &blocks) };
    assert!(builder.push(long).expect_err("full").to_string().contains("no row left"));
    assert!(PlanLayout::new(&LIMITS, Bucket { tokens: 9, ..BUCKET }).is_err());
}
