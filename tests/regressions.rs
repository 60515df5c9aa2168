//! Bugs that were found and mended, so that they stay mended.

use std::sync::Arc;

use amphora_backend_cpu::Cpu;
use amphora_engine::measure::Pattern;
use amphora_engine::measure::experts::{Call, Extent, Layer, Model, Rows};
use amphora_hal::ops::{
    Embed, GatherRows, Linear, LoraLinear, MoeRoute, Rope, RopePairing, RouteScore, Routing,
    RoutingShape, Sample, WriteTokens,
};
use amphora_hal::{
    Backend, Bucket, Carver, DType, Device, DeviceConfig, Index, LoraLayout, LoraTable,
    PlanBuilder, PlanLimits, PlanView, Pool, Result, StreamRole, Tensor, TokenTable,
};
use amphora_tests::fixtures::HostMatrices;
use amphora_tests::rig::Rig;
use amphora_tests::rng::Rng;
use amphora_tests::step::{Step, limits, rows_bucket};

const TOKENS: usize = 4;
const SLOTS: usize = 2;

fn open() -> Cpu {
    Cpu::open(&DeviceConfig::default()).expect("the host")
}

fn carver(device: &Cpu) -> Carver<Cpu> {
    Carver::new(device.reserve(Pool::Scratch, 1 << 20).expect("memory"))
}

fn plan_limits() -> PlanLimits {
    limits(rows_bucket(TOKENS), SLOTS, open().caps().tile_rows)
}

fn plan(device: &Cpu) -> PlanView<Cpu> {
    let mut rig = Rig::new(device, 1 << 16, &[]).expect("memory");
    rig.plan(&Step::of_rows(&[Some(0), None, Some(1)], TOKENS, plan_limits())).expect("sound")
}

fn refused(checked: Result<()>, says: &str) {
    let text = checked.expect_err(says).to_string();
    assert!(text.contains(says), "{text}");
}

/// Each device has a lock of its own, so two of them could have written the same bytes at once.
#[test]
#[should_panic(expected = "used on the device that it was made on")]
fn a_tensor_is_no_operand_on_another_device() {
    let [owner, other] = [open(), open()];
    let tensor = carver(&owner).carve(&[8], DType::U8).expect("room");
    let mut stream = other.stream(StreamRole::Copy, 0).expect("a stream");
    let host = other.reserve_host(8).expect("memory");
    let _ = other.download(&mut stream, &tensor, host);
}

/// A plan's values were held against its own limits, but not against what they then addressed.
#[test]
fn indices_are_held_against_what_they_address() {
    let device = open();
    let (mut carver, plan, limits) = (carver(&device), plan(&device), plan_limits());
    let mut carve = |dims: &[usize], dtype| carver.carve(dims, dtype).expect("room");

    let rope = |position: &Index<Cpu>, table: &Tensor<Cpu>, qk: &Tensor<Cpu>| {
        let (mut q, mut k) = (qk.narrow(1, 0, 1).expect("two"), qk.narrow(1, 1, 1).expect("two"));
        let pairing = RopePairing::Half;
        Rope { q: &mut q, k: &mut k, position, table, pairing, q_scale: None, store: None }
            .check()
            .map(drop)
    };
    let qk = carve(&[TOKENS, 2, 8], DType::F32);
    let turns = carve(&[limits.positions, 8], DType::F32);
    rope(plan.position(), &turns, &qk).expect("sound");
    let short = turns.rows(limits.positions - 1).expect("inside");
    refused(rope(plan.position(), &short, &qk), "position holds 0..16, expected indices of 15");
    refused(rope(plan.kv_index(), &turns, &qk), "position holds -1..");

    let x = carve(&[TOKENS - 1, 8], DType::F32);
    let mut out = carve(&[TOKENS, 8], DType::F32);
    let gather = GatherRows { x: &x, rows: plan.logit_row(), out: &mut out };
    refused(gather.check().map(drop), "rows holds 0..4, expected indices of 3");

    let ids = carve(&[limits.sequences + limits.tokens], DType::I32);
    let mut table = TokenTable::new(ids.clone(), &limits).expect("as the limits say");
    let weight = carve(&[limits.vocab - 1, 8], DType::F32);
    let embed = Embed { index: plan.token_index(), table: &table, weight: &weight, out: &mut out };
    refused(embed.check().map(drop), "table holds 0..100, expected indices of 99");
    let write = WriteTokens { prompt: plan.kv_index(), table: &mut table };
    refused(write.check().map(drop), "prompt holds -1..");

    let logits = carve(&[TOKENS, limits.vocab + 1], DType::F32);
    let mut result = carve(&[TOKENS, 2], DType::I32);
    let draw = Sample { logits: &logits, plan: &plan, table: &mut table, result: &mut result };
    refused(draw.check().map(drop), "logits of 101 tokens, a table of tokens below 100");
    let fewer = PlanLimits { sequences: 1, tokens: limits.sequences + limits.tokens - 1, ..limits };
    let mut table = TokenTable::new(ids, &fewer).expect("as the limits say");
    let logits = carve(&[TOKENS, limits.vocab], DType::F32);
    let draw = Sample { logits: &logits, plan: &plan, table: &mut table, result: &mut result };
    refused(draw.check().map(drop), "sample_slot holds -1..4, expected −1 or indices of 1");
}

/// A plan for more adapter slots than the table or the routing has reached past their ends.
#[test]
fn slots_are_held_against_table_and_routing() {
    let device = open();
    let (mut carver, plan) = (carver(&device), plan(&device));
    let arena = carver.carve(&[4096], DType::U8).expect("room");
    let mut layout = LoraLayout::default();
    let meta = amphora_hal::SliceMeta { k: 8, n: 8, experts: 1 };
    layout.push(meta);
    let layout = Arc::new(layout);
    let words = LoraTable::<Cpu>::row_bytes(&layout, SLOTS - 1) / 4;
    let rows = carver.carve(&[words], DType::I32).expect("room");
    let lora = LoraTable::new(arena, rows, layout, SLOTS - 1, DType::F32).expect("as it says");
    let host = HostMatrices::random(&mut Rng::new(1, "weight"), [1, 8, 8], DType::F32);
    let bytes = device.packed_bytes(&host.meta()).expect("f32 is everyone's");
    let into = carver.carve(&[bytes], DType::U8).expect("room");
    let mut stream = device.stream(StreamRole::Compute, 0).expect("a stream");
    let packed = host.with_host_weight(|host| device.pack(&mut stream, host, into));
    let weight = packed.expect("f32 is everyone's");
    let x = carver.carve(&[TOKENS, 8], DType::F32).expect("room");
    let mut out = carver.carve(&[TOKENS, 8], DType::F32).expect("room");
    let base = Linear { x: &x, weight: &weight, bias: None, out: &mut out };
    let op = LoraLinear { base, lora: &lora, slices: &[], segments: plan.segments() };
    refused(op.check().map(drop), "segments of 2 slots, a table of 1");

    let tile_rows = device.caps().tile_rows;
    let shape = RoutingShape { tokens: TOKENS, top_k: 1, experts: 8, slots: SLOTS - 1, tile_rows };
    let mut routing = Routing::carve(&mut carver, shape).expect("room");
    let op = MoeRoute {
        logits: &x,
        live: plan.kv_index(),
        slot: plan.slot(),
        score: RouteScore::Softmax,
        correction: None,
        groups: None,
        renorm: false,
        scale: 1.0,
        routing: &mut routing,
    };
    refused(op.check().map(drop), "slot holds -1..2, expected −1 or indices of 1");
}

/// Sums of absurd limits and positions wrapped instead of being refused.
#[test]
fn absurd_plans_are_refused() {
    let bucket = Bucket { tokens: 1, sequences: 1, logit_rows: 1 };
    let limits = plan_limits();
    for absurd in [
        PlanLimits { tile_rows: 0, ..limits },
        PlanLimits { vocab: 1 << 31, ..limits },
        PlanLimits { kv_blocks: usize::MAX, ..limits },
        PlanLimits { positions: 1 << 40, ..limits },
    ] {
        refused(PlanBuilder::new(&absurd, bucket).map(drop), "PlanLimits");
    }
    let mut builder = PlanBuilder::new(&limits, bucket).expect("sound");
    let sequence = amphora_hal::SequencePlan {
        sequence: 0,
        slot: None,
        first_position: usize::MAX,
        tokens: amphora_hal::Tokens::Last,
        blocks: &[0],
        copy: None,
        sample: None,
        edits: &[],
        logprobs: None,
        logits: amphora_hal::LogitRows::None,
    };
    refused(builder.push(sequence), "a position leaves the rotary table");
}

/// 4096 rows were there whatever was asked for, so a search of longer steps failed behind all others.
#[test]
fn a_measured_layer_has_the_rows_it_was_made_for() {
    let device = open();
    let model = Model { name: "tiny", hidden: 64, inner: 64, experts: 2, top_k: 1, gpt_oss: false };
    let (extent, pattern) = (Extent { slots: 1, sets: 1, tokens: 4097 }, Pattern::new());
    let mut layer = Layer::new(&device, model, extent, &pattern).expect("room");
    let logits = [model.random_logits(extent.tokens, 0)];
    let mut rows = Rows::new(&mut layer, &vec![Some(0); extent.tokens], &logits).expect("room");
    layer.run(&mut rows, 0, Call::Lora).expect("as many rows as were asked for");
}
