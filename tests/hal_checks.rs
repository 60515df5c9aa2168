//! Each operator's check refuses what breaks its contract, and says which operator and field.
//! Checks are hal's own, so any backend's tensors do; nothing runs.

use std::sync::Arc;

use amphora_backend_cpu::Cpu;
use amphora_hal::ops::{
    Activation, Combine, CopyBlocks, Embed, ExpertGroups, FusedMoe, FusedMoeLora, GatherRows,
    KvStore, KvWrite, Linear, Logprobs, LoraLinear, Mask, MoeRoute, PagedAttention, RmsNorm, Rope,
    RopePairing, RouteScore, Routing, RoutingShape, Sample, Swiglu, WeightOn, WriteTokens,
};
use amphora_hal::{
    Backend, Carver, DType, Device, DeviceConfig, LoraLayout, LoraSlice, LoraTable, PlanLimits,
    PlanView, Pool, Result, SliceId, SliceMeta, StreamRole, Tensor, TokenTable, Weight,
};
use amphora_tests::fixtures::HostMatrices;
use amphora_tests::rig::Rig;
use amphora_tests::rng::Rng;
use amphora_tests::step::{Step, limits, rows_bucket};

const TOKENS: usize = 4;

/// A device and memory to carve operands from.
struct Bench {
    device: Cpu,
    carver: Carver<Cpu>,
    plan: PlanView<Cpu>,
    tokens: TokenTable<Cpu>,
}

impl Bench {
    fn new() -> Self {
        let device = Cpu::open(&DeviceConfig::default()).expect("the host");
        let plan_limits = limits(rows_bucket(TOKENS), 2, device.caps().tile_rows);
        let mut rig = Rig::new(&device, 1 << 16, &[]).expect("memory");
        let step = Step::of_rows(&[Some(0), None, Some(1)], TOKENS, plan_limits);
        let buffer = device.reserve(Pool::Scratch, 1 << 20).expect("memory");
        let mut carver = Carver::new(buffer);
        let table = carver.carve(&[2 * TOKENS], DType::I32).expect("room");
        Bench {
            plan: rig.plan(&step).expect("a sound step"),
            tokens: TokenTable::new(table, &plan_limits).expect("as the limits say"),
            carver,
            device,
        }
    }

    fn f32(&mut self, dims: &[usize]) -> Tensor<Cpu> {
        self.carver.carve(dims, DType::F32).expect("room")
    }

    fn bf16(&mut self, dims: &[usize]) -> Tensor<Cpu> {
        self.carver.carve(dims, DType::BF16).expect("room")
    }

    fn i32(&mut self, dims: &[usize]) -> Tensor<Cpu> {
        self.carver.carve(dims, DType::I32).expect("room")
    }

    fn weight(&mut self, shape: [usize; 3]) -> Weight<Cpu> {
        let weight = HostMatrices::random(&mut Rng::new(1, "weight"), shape, DType::F32);
        let bytes = self.device.packed_bytes(&weight.meta()).expect("f32 is everyone's");
        let into = self.carver.carve(&[bytes], DType::U8).expect("room");
        let mut stream = self.device.stream(StreamRole::Compute, 0).expect("a stream");
        let packed = weight.with_host_weight(|host| self.device.pack(&mut stream, host, into));
        packed.expect("f32 is everyone's")
    }

    fn routing(&mut self, experts: usize) -> Routing<Cpu> {
        let tile_rows = self.device.caps().tile_rows;
        let shape = RoutingShape { tokens: TOKENS, top_k: 2, experts, slots: 2, tile_rows };
        Routing::carve(&mut self.carver, shape).expect("room")
    }

    /// A table with one slice of these sizes.
    fn lora(&mut self, meta: SliceMeta, dtype: DType) -> (LoraTable<Cpu>, SliceId) {
        let mut layout = LoraLayout::default();
        let id = layout.push(meta);
        let layout = Arc::new(layout);
        let words = LoraTable::<Cpu>::row_bytes(&layout, 2) / 4;
        let arena = self.carver.carve(&[4096], DType::U8).expect("room");
        let rows = self.i32(&[words]);
        (LoraTable::new(arena, rows, layout, 2, dtype).expect("as the layout says"), id)
    }
}

/// The check refuses, naming the operator and saying this.
fn refused(checked: Result<()>, op: &str, says: &str) {
    match checked {
        Ok(()) => panic!("{op} took an operand that should be refused for {says:?}"),
        Err(error) => {
            let text = error.to_string();
            assert!(text.starts_with(&format!("invalid {op}: ")) && text.contains(says), "{text}");
        }
    }
}

#[test]
fn write_tokens_and_embed() {
    let mut bench = Bench::new();
    let mut table = bench.tokens.clone();
    let write = WriteTokens { prompt: bench.plan.prompt(), table: &mut table };
    write.check().expect("sound");
    let (weight, mut out) = (bench.bf16(&[100, 8]), bench.bf16(&[TOKENS, 8]));
    let plan = bench.plan.clone();
    let embed = |weight: &Tensor<Cpu>, out: &mut Tensor<Cpu>| {
        Embed { index: plan.token_index(), table: &table, weight, out }.check().map(drop)
    };
    let says = |result, text: &str| refused(result, "embed", text);
    embed(&weight, &mut out).expect("sound");
    says(embed(&weight, &mut bench.f32(&[TOKENS, 8])), "out is f32");
    says(embed(&weight, &mut bench.bf16(&[TOKENS + 1, 8])), "out is [5, 8]");
    says(embed(&bench.bf16(&[100, 2, 4]), &mut out), "weight");
    says(embed(&bench.i32(&[100, 8]), &mut out), "weight is i32");
    says(embed(&weight.narrow(1, 0, 4).expect("inside"), &mut out), "weight");
    says(embed(&weight, &mut weight.rows(TOKENS).expect("inside")), "output out overlaps weight");
    let mut plan_limits = limits(rows_bucket(1), 2, 1);
    plan_limits.sequences = 7;
    let short = TokenTable::new(bench.i32(&[8]), &plan_limits).expect("as the limits say");
    let mut short = short;
    let write = WriteTokens { prompt: bench.plan.prompt(), table: &mut short };
    refused(write.check().map(drop), "write_tokens", "4 tokens for 1 entries");
}

#[test]
fn gather_rows() {
    let mut bench = Bench::new();
    let plan = bench.plan.clone();
    let (x, mut out) = (bench.bf16(&[TOKENS, 6]), bench.bf16(&[TOKENS, 6]));
    let check = |x: &Tensor<Cpu>, out: &mut Tensor<Cpu>| {
        GatherRows { x, rows: plan.logit_row(), out }.check().map(drop)
    };
    check(&x, &mut out).expect("sound");
    refused(check(&x, &mut x.clone()), "gather_rows", "out overlaps x");
    refused(check(&x, &mut bench.f32(&[TOKENS, 6])), "gather_rows", "out is f32");
    refused(check(&x, &mut bench.bf16(&[TOKENS, 5])), "gather_rows", "out is [4, 5]");
    refused(check(&bench.i32(&[TOKENS, 6]), &mut out), "gather_rows", "x is i32");
}

#[test]
fn rms_norm() {
    let mut bench = Bench::new();
    let (mut x, add) = (bench.bf16(&[TOKENS, 6]), bench.bf16(&[TOKENS, 6]));
    let (weight, mut out) = (bench.f32(&[6]), bench.bf16(&[TOKENS, 6]));
    let check =
        |x: &mut Tensor<Cpu>, add: Option<&Tensor<Cpu>>, w: &Tensor<Cpu>, out: &mut Tensor<Cpu>| {
            RmsNorm { x, add, weight: w, eps: 1e-5, out }.check().map(drop)
        };
    check(&mut x, Some(&add), &weight, &mut out).expect("sound");
    check(&mut x.clone(), None, &weight, &mut x).expect("in place, without add");
    let says = |result, text: &str| refused(result, "rms_norm", text);
    says(check(&mut x.clone(), Some(&add), &weight, &mut x), "output x overlaps out");
    says(check(&mut x, Some(&out.clone()), &weight, &mut out), "output out overlaps add");
    says(check(&mut x, None, &bench.bf16(&[6]), &mut out), "weight is bf16");
    says(check(&mut x, None, &bench.f32(&[5]), &mut out), "weight is [5]");
    says(check(&mut x, None, &weight, &mut bench.f32(&[TOKENS, 6])), "out is f32");
    says(check(&mut x, Some(&bench.bf16(&[TOKENS, 5])), &weight, &mut out), "add is [4, 5]");
    says(check(&mut bench.i32(&[TOKENS, 6]), None, &weight, &mut out), "x is i32");
    let eps = RmsNorm { x: &mut x, add: None, weight: &weight, eps: f32::NAN, out: &mut out };
    refused(eps.check().map(drop), "rms_norm", "eps NaN");
}

#[test]
fn rope() {
    let mut bench = Bench::new();
    let plan = bench.plan.clone();
    let qkv = bench.bf16(&[TOKENS, 4 * 8]);
    let heads = |first: usize, heads: usize| {
        qkv.narrow(1, first * 8, heads * 8).and_then(|t| t.split_last(8)).expect("inside")
    };
    let table = bench.f32(&[16, 8]);
    let check = |mut q: Tensor<Cpu>, mut k: Tensor<Cpu>, table: &Tensor<Cpu>| {
        let position = plan.position();
        let pairing = RopePairing::Half;
        Rope { q: &mut q, k: &mut k, position, table, pairing, q_scale: None, store: None }
            .check()
            .map(drop)
    };
    let says = |result, text: &str| refused(result, "rope", text);
    check(heads(0, 2), heads(2, 1), &table).expect("sound");
    says(check(heads(0, 2), heads(1, 1), &table), "output q overlaps k");
    says(check(heads(0, 2), heads(2, 1), &bench.f32(&[16, 10])), "10 of 8 turn");
    says(check(heads(0, 2), heads(2, 1), &bench.f32(&[16, 7])), "7 of 8 turn");
    says(check(heads(0, 2), heads(2, 1), &bench.bf16(&[16, 8])), "table is bf16");
    says(check(heads(0, 2), bench.f32(&[TOKENS, 1, 8]), &table), "k is f32");
    says(check(heads(0, 2), bench.bf16(&[TOKENS, 1, 4]), &table), "k is [4, 1, 4]");
    says(check(qkv.clone(), heads(2, 1), &table), "q is [4, 32], expected 3 dimensions");
    let mut q = heads(0, 2);
    let mut k = heads(2, 1);
    let scale = bench.f32(&[15]);
    let scaled = Rope {
        q: &mut q,
        k: &mut k,
        position: plan.position(),
        table: &table,
        pairing: RopePairing::Interleaved,
        q_scale: Some(&scale),
        store: None,
    };
    refused(scaled.check().map(drop), "rope", "q_scale is [15], expected [16]");

    let (blocks, size) = plan.kv_shape();
    let mut store = |v: &Tensor<Cpu>, kv_heads: usize| {
        let cache = [blocks, size, kv_heads, 8];
        let (mut k_cache, mut v_cache) = (bench.bf16(&cache), bench.bf16(&cache));
        let (mut q, mut k) = (heads(0, 2), heads(2, 1));
        let store = KvStore { v, plan: &plan, k_cache: &mut k_cache, v_cache: &mut v_cache };
        Rope {
            q: &mut q,
            k: &mut k,
            position: plan.position(),
            table: &table,
            pairing: RopePairing::Half,
            q_scale: None,
            store: Some(store),
        }
        .check()
        .map(drop)
    };
    store(&heads(3, 1), 1).expect("sound");
    says(store(&heads(2, 1), 1), "output k overlaps v");
    says(store(&heads(3, 1), 2), "k_cache is");
}

#[test]
fn kv_write_and_attention() {
    let mut bench = Bench::new();
    let plan = bench.plan.clone();
    let (blocks, size) = plan.kv_shape();
    let (k, v) = (bench.bf16(&[TOKENS, 2, 8]), bench.bf16(&[TOKENS, 2, 8]));
    let cache = [blocks, size, 2, 8];
    let (k_cache, v_cache) = (bench.bf16(&cache), bench.bf16(&cache));
    let write = |k: &Tensor<Cpu>, mut k_cache: Tensor<Cpu>, mut v_cache: Tensor<Cpu>| {
        let op = KvWrite { k, v: &v, plan: &plan, k_cache: &mut k_cache, v_cache: &mut v_cache };
        op.check().map(drop)
    };
    let both = || (k_cache.clone(), v_cache.clone());
    write(&k, both().0, both().1).expect("sound");
    refused(write(&k, both().0, both().0), "kv_write", "output k_cache overlaps v_cache");
    refused(write(&bench.f32(&[TOKENS, 2, 8]), both().0, both().1), "kv_write", "k_cache is bf16");
    refused(write(&bench.bf16(&[TOKENS, 3, 8]), both().0, both().1), "kv_write", "k_cache is");
    refused(write(&bench.bf16(&[3, 2, 8]), both().0, both().1), "kv_write", "k is [3, 2, 8]");
    let fewer = bench.bf16(&[blocks + 1, size, 2, 8]);
    refused(write(&k, fewer, both().1), "kv_write", "k_cache is");

    let q = bench.bf16(&[TOKENS, 4, 8]);
    let (sinks, out) = (bench.f32(&[4]), bench.bf16(&[TOKENS, 4, 8]));
    let attend = |q: &Tensor<Cpu>, mask: Mask, sinks: &Tensor<Cpu>, mut out: Tensor<Cpu>| {
        let op = PagedAttention {
            q,
            k_cache: &k_cache,
            v_cache: &v_cache,
            plan: &plan,
            mask,
            sinks: Some(sinks),
            scale: 1.0,
            out: &mut out,
        };
        op.check().map(drop)
    };
    let op = "paged_attention";
    attend(&q, Mask::Window(3), &sinks, out.clone()).expect("sound");
    refused(attend(&q, Mask::Window(0), &sinks, out.clone()), op, "Window(0)");
    refused(attend(&q, Mask::Chunk(0), &sinks, out.clone()), op, "Chunk(0)");
    refused(attend(&q, Mask::Causal, &bench.f32(&[3]), out.clone()), op, "sinks is [3]");
    refused(attend(&q, Mask::Causal, &bench.bf16(&[4]), out.clone()), op, "sinks is bf16");
    refused(attend(&q, Mask::Causal, &sinks, q.clone()), op, "output out overlaps q");
    refused(attend(&q, Mask::Causal, &sinks, bench.bf16(&[TOKENS, 4, 7])), op, "out is [4, 4, 7]");
    let odd = bench.bf16(&[TOKENS, 3, 8]);
    refused(attend(&odd, Mask::Causal, &sinks, out.clone()), op, "3 heads over 2 KV heads");
    let narrow = bench.bf16(&[TOKENS, 4, 6]);
    refused(attend(&narrow, Mask::Causal, &sinks, out), op, "k_cache is");
}

#[test]
fn linear_and_lora_linear() {
    let mut bench = Bench::new();
    let plan = bench.plan.clone();
    let (x, weight) = (bench.f32(&[TOKENS, 6]), bench.weight([1, 10, 6]));
    let (bias, out) = (bench.f32(&[10]), bench.f32(&[TOKENS, 10]));
    let linear =
        |x: &Tensor<Cpu>, weight: &Weight<Cpu>, bias: &Tensor<Cpu>, mut out: Tensor<Cpu>| {
            Linear { x, weight, bias: Some(bias), out: &mut out }.check().map(drop)
        };
    linear(&x, &weight, &bias, out.clone()).expect("sound");
    refused(linear(&bench.f32(&[TOKENS, 5]), &weight, &bias, out.clone()), "linear", "x is [4, 5]");
    refused(linear(&x, &weight, &bench.f32(&[9]), out.clone()), "linear", "bias is [9]");
    refused(linear(&x, &weight, &bias, bench.bf16(&[TOKENS, 10])), "linear", "out is bf16");
    refused(linear(&x, &weight, &bias, bench.f32(&[TOKENS, 9])), "linear", "out is [4, 9]");
    let wide = bench.f32(&[TOKENS, 12]);
    let (left, right) = (wide.narrow(1, 0, 6), wide.narrow(1, 2, 10));
    let (left, right) = (left.expect("inside"), right.expect("inside"));
    refused(linear(&left, &weight, &bias, right), "linear", "output out overlaps x");
    let experts = bench.weight([2, 10, 6]);
    refused(linear(&x, &experts, &bias, out.clone()), "linear", "the weight holds experts");

    let meta = SliceMeta { k: 6, n: 4, experts: 1 };
    let (lora, id) = bench.lora(meta, DType::F32);
    let fits = LoraSlice { table: id, out_offset: 2, out_stride: 2, len: 4 };
    let adapted = |x: &Tensor<Cpu>, lora: &LoraTable<Cpu>, slice: LoraSlice| {
        let mut out = out.clone();
        let base = Linear { x, weight: &weight, bias: None, out: &mut out };
        let slices = [slice];
        LoraLinear { base, lora, slices: &slices, segments: plan.segments() }.check().map(drop)
    };
    let op = "lora_linear";
    adapted(&x, &lora, fits).expect("sound");
    refused(adapted(&x, &lora, LoraSlice { out_offset: 4, ..fits }), op, "LoraSlice");
    refused(adapted(&x, &lora, LoraSlice { len: 3, ..fits }), op, "LoraSlice");
    refused(adapted(&x, &lora, LoraSlice { out_stride: 0, ..fits }), op, "LoraSlice");
    let (other, other_id) = bench.lora(SliceMeta { k: 5, ..meta }, DType::F32);
    refused(adapted(&x, &other, LoraSlice { table: other_id, ..fits }), op, "LoraSlice");
    let (half, _) = bench.lora(meta, DType::BF16);
    refused(adapted(&x, &half, fits), op, "blocks are bf16, x is f32");
    let mut out = bench.f32(&[3, 10]);
    let x = bench.f32(&[3, 6]);
    let base = Linear { x: &x, weight: &weight, bias: None, out: &mut out };
    let short = LoraLinear { base, lora: &lora, slices: &[fits], segments: plan.segments() };
    refused(short.check().map(drop), op, "perm is [4], expected [3]");
}

#[test]
fn moe_route() {
    let mut bench = Bench::new();
    let plan = bench.plan.clone();
    let (logits, mut routing) = (bench.f32(&[TOKENS, 8]), bench.routing(8));
    let mut check = |logits: &Tensor<Cpu>, groups: Option<ExpertGroups>, scale: f32| {
        let op = MoeRoute {
            logits,
            live: plan.kv_index(),
            slot: plan.slot(),
            score: RouteScore::Softmax,
            correction: None,
            groups,
            renorm: false,
            scale,
            routing: &mut routing,
        };
        op.check().map(drop)
    };
    let says = |result, text: &str| refused(result, "moe_route", text);
    let groups = |groups, keep, best| Some(ExpertGroups { groups, keep, best });
    check(&logits, None, 1.0).expect("sound");
    check(&logits, groups(4, 1, 2), 1.0).expect("sound");
    says(check(&bench.f32(&[TOKENS, 7]), None, 1.0), "logits is [4, 7]");
    says(check(&bench.bf16(&[TOKENS, 8]), None, 1.0), "logits is bf16");
    says(check(&logits, None, f32::INFINITY), "scale inf");
    says(check(&logits, groups(3, 1, 1), 1.0), "of 8 experts");
    says(check(&logits, groups(4, 5, 1), 1.0), "of 8 experts");
    says(check(&logits, groups(4, 2, 3), 1.0), "of 8 experts");
    says(check(&logits, groups(8, 1, 1), 1.0), "of 8 experts");
}

#[test]
fn fused_moe_and_fused_moe_lora() {
    let mut bench = Bench::new();
    let routing = bench.routing(3);
    let (x, out) = (bench.f32(&[TOKENS, 6]), bench.f32(&[TOKENS, 6]));
    let (gate_up, down) = (bench.weight([3, 8, 6]), bench.weight([3, 6, 4]));
    let bias = bench.f32(&[3, 8]);
    struct Operands<'a> {
        x: &'a Tensor<Cpu>,
        gate_up: &'a Weight<Cpu>,
        down: &'a Weight<Cpu>,
        bias: &'a Tensor<Cpu>,
    }
    let moe =
        |of: &Operands<'_>, out: &mut Tensor<Cpu>, lora: Option<(&LoraTable<Cpu>, LoraSlice)>| {
            let moe = FusedMoe {
                x: of.x,
                routing: &routing,
                gate_up: of.gate_up,
                gate_up_bias: Some(of.bias),
                down: of.down,
                down_bias: None,
                activation: Activation::Swiglu,
                weight_on: WeightOn::Output,
                combine: Combine::Replace,
                out,
            };
            match lora {
                None => moe.check().map(drop),
                Some((lora, slice)) => {
                    let gate_up_slices = &[slice];
                    FusedMoeLora { moe, lora, gate_up_slices, down_slices: &[] }.check().map(drop)
                }
            }
        };
    let sound = || Operands { x: &x, gate_up: &gate_up, down: &down, bias: &bias };
    let mut out = out;
    moe(&sound(), &mut out, None).expect("sound");
    refused(moe(&sound(), &mut x.clone(), None), "fused_moe", "output out overlaps x");
    refused(moe(&sound(), &mut bench.bf16(&[TOKENS, 6]), None), "fused_moe", "out is bf16");
    let wide = bench.f32(&[TOKENS, 7]);
    refused(moe(&Operands { x: &wide, ..sound() }, &mut out, None), "fused_moe", "x is [4, 7]");
    let short = bench.f32(&[3, 4]);
    refused(
        moe(&Operands { bias: &short, ..sound() }, &mut out, None),
        "fused_moe",
        "gate_up_bias is [3, 4]",
    );
    let fewer = bench.weight([2, 6, 4]);
    refused(moe(&Operands { down: &fewer, ..sound() }, &mut out, None), "fused_moe", "3 experts");
    let narrow = bench.weight([3, 6, 8]);
    refused(
        moe(&Operands { down: &narrow, ..sound() }, &mut out, None),
        "fused_moe",
        "gate_up [3, 8, 6]",
    );

    let meta = SliceMeta { k: 6, n: 4, experts: 3 };
    let (lora, id) = bench.lora(meta, DType::F32);
    let fits = LoraSlice { table: id, out_offset: 1, out_stride: 2, len: 4 };
    let op = "fused_moe_lora";
    moe(&sound(), &mut out, Some((&lora, fits))).expect("sound");
    refused(
        moe(&sound(), &mut out, Some((&lora, LoraSlice { out_offset: 2, ..fits }))),
        op,
        "LoraSlice",
    );
    let (dense, dense_id) = bench.lora(SliceMeta { experts: 1, ..meta }, DType::F32);
    let of_dense = LoraSlice { table: dense_id, ..fits };
    refused(moe(&sound(), &mut out, Some((&dense, of_dense))), op, "LoraSlice");
    let (half, _) = bench.lora(meta, DType::BF16);
    refused(moe(&sound(), &mut out, Some((&half, fits))), op, "blocks are bf16, x is f32");
}

#[test]
fn sample() {
    let mut bench = Bench::new();
    let plan = bench.plan.clone();
    let mut tokens = bench.tokens.clone();
    let (logits, result) = (bench.f32(&[TOKENS, 20]), bench.i32(&[TOKENS, 2]));
    let mut check = |logits: &Tensor<Cpu>, mut result: Tensor<Cpu>| {
        Sample { logits, plan: &plan, table: &mut tokens, result: &mut result }.check().map(drop)
    };
    let says = |result, text: &str| refused(result, "sample", text);
    check(&logits, result.clone()).expect("sound");
    says(check(&bench.bf16(&[TOKENS, 20]), result.clone()), "logits is bf16");
    says(check(&bench.f32(&[TOKENS - 1, 20]), result.clone()), "4 sequences sample");
    says(check(&logits, bench.i32(&[TOKENS, 3])), "result is [4, 3]");
    says(check(&logits, bench.f32(&[TOKENS, 2])), "result is f32");
    let table = bench.tokens.index().tensor().narrow(0, 0, 2 * TOKENS).expect("whole");
    let inside = table.split_last(2).expect("even").rows(TOKENS).expect("inside");
    says(check(&logits, inside), "output result overlaps table");
    let edits = PlanLimits { edits: 1, ..limits(rows_bucket(TOKENS), 2, 1) };
    let mut rig = Rig::new(&bench.device, 1 << 16, &[]).expect("memory");
    let edited = rig.plan(&Step::of_rows(&[None], TOKENS, edits)).expect("a sound step");
    let mut check = |logits: &Tensor<Cpu>| {
        let mut result = result.clone();
        let op = Sample { logits, plan: &edited, table: &mut tokens, result: &mut result };
        op.check().map(drop)
    };
    check(&bench.f32(&[TOKENS, 100])).expect("sound");
    says(check(&bench.f32(&[TOKENS, 99])), "edits of tokens below 100");
}

#[test]
fn swiglu() {
    let mut bench = Bench::new();
    let (x, mut out) = (bench.bf16(&[TOKENS, 12]), bench.bf16(&[TOKENS, 6]));
    let check = |x: &Tensor<Cpu>, activation, out: &mut Tensor<Cpu>| {
        Swiglu { x, activation, out }.check().map(drop)
    };
    let says = |result, text: &str| refused(result, "swiglu", text);
    let plain = Activation::Swiglu;
    check(&x, plain, &mut out).expect("sound");
    says(check(&x, plain, &mut bench.bf16(&[TOKENS, 5])), "x is [4, 12], expected [4, 10]");
    says(check(&x, plain, &mut bench.f32(&[TOKENS, 6])), "out is f32, expected bf16");
    says(check(&x, plain, &mut bench.bf16(&[TOKENS, 2, 3])), "out is [4, 2, 3]");
    says(check(&bench.i32(&[TOKENS, 12]), plain, &mut out), "x is i32");
    says(check(&x, plain, &mut x.narrow(1, 0, 6).expect("inside")), "output out overlaps x");
    let unsound = Activation::ClampedInterleaved { limit: f32::NAN, alpha: 1.0 };
    says(check(&x, unsound, &mut out), "limit: NaN");
}

#[test]
fn copy_blocks() {
    let mut bench = Bench::new();
    let plan = bench.plan.clone();
    let (blocks, size) = plan.kv_shape();
    let caches = |bench: &mut Bench, dims: [usize; 4]| (bench.bf16(&dims), bench.bf16(&dims));
    let check = |k_cache: &mut Tensor<Cpu>, v_cache: &mut Tensor<Cpu>| {
        CopyBlocks { plan: &plan, k_cache, v_cache }.check().map(drop)
    };
    let says = |result, text: &str| refused(result, "copy_blocks", text);
    let (mut k, mut v) = caches(&mut bench, [blocks, size, 2, 8]);
    check(&mut k, &mut v).expect("sound");
    says(check(&mut k, &mut v.narrow(3, 0, 4).expect("inside")), "v_cache");
    let mut same = k.clone();
    says(check(&mut k, &mut same), "output k_cache overlaps v_cache");
    let (mut few, _) = caches(&mut bench, [blocks - 1, size, 2, 8]);
    says(check(&mut few, &mut v), "k_cache is");
    says(check(&mut bench.i32(&[blocks, size, 2, 8]), &mut v), "k_cache is i32");
}

#[test]
fn logprobs() {
    let mut bench = Bench::new();
    let (plan, table) = (bench.plan.clone(), bench.tokens.clone());
    let check = |logits: &Tensor<Cpu>, out: &mut Tensor<Cpu>| {
        Logprobs { logits, plan: &plan, table: &table, out }.check().map(drop)
    };
    let says = |result, text: &str| refused(result, "logprobs", text);
    let (logits, mut out) =
        (bench.f32(&[TOKENS, 100]), bench.i32(&[TOKENS, amphora_hal::ops::LOGPROB_WORDS]));
    check(&logits, &mut out).expect("sound");
    says(check(&bench.f32(&[TOKENS, 99]), &mut out), "logits of 99 tokens");
    says(check(&bench.f32(&[TOKENS - 1, 100]), &mut out), "4 rows may ask");
    says(check(&bench.bf16(&[TOKENS, 100]), &mut out), "logits is bf16");
    says(check(&logits, &mut bench.i32(&[TOKENS, 2])), "out is [4, 2]");
    says(check(&logits, &mut bench.f32(&[TOKENS, 43])), "out is f32");
}
