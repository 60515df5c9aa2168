//! One layer of experts with adapters, several times over, so that weights never come from a cache: its
//! memory on the device, and the calls on it.

use std::sync::Arc;

use amphora_hal::ops::{
    Activation, Combine, FusedMoe, FusedMoeLora, MoeRoute, RouteScore, Routing, RoutingShape,
    WeightOn, split_mix64,
};
use amphora_hal::{
    ARENA_UNIT, Backend, Carver, Ctx, DType, HostWeightMeta, LoraLayout, LoraSlice, LoraTable,
    OpBounds, OpKind, Pool, Result, Scheme, SliceMeta, StreamRole, Tensor, Weight,
};

use super::{Effort, Pattern, Plans, RANK, fill, place, row_major, take, times, write_rows};

/// A model's layer.
#[derive(Debug, Clone, Copy)]
pub struct Model {
    pub name: &'static str,
    pub hidden: usize,
    /// Width after the activation.
    pub inner: usize,
    pub experts: usize,
    pub top_k: usize,
    /// gpt-oss's activation, biases, and one factor A for gate and up.
    pub gpt_oss: bool,
}

/// The layer of gpt-oss-20b.
pub const GPT_OSS: Model =
    Model { name: "gpt-oss-20b", hidden: 2880, inner: 2880, experts: 32, top_k: 4, gpt_oss: true };
/// The layer of Qwen3-30B-A3B.
pub const QWEN3: Model = Model {
    name: "qwen3-30b-a3b",
    hidden: 2048,
    inner: 768,
    experts: 128,
    top_k: 8,
    gpt_oss: false,
};

impl Model {
    /// Bytes of one expert's weights.
    pub fn expert_bytes(&self) -> usize {
        3 * self.hidden * self.inner * 2
    }

    /// Bytes of one adapter's factors of one expert.
    pub fn adapter_bytes(&self) -> usize {
        let shrinks = if self.gpt_oss { self.hidden } else { 2 * self.hidden };
        RANK * 2 * (shrinks + 2 * self.inner + self.inner + self.hidden)
    }

    /// Logits of `tokens` tokens that choose any experts, others for each `seed`.
    pub fn random_logits(&self, tokens: usize, seed: u64) -> Vec<f32> {
        let logit = |i| (split_mix64(seed, i as u64 + 1) >> 40) as f32 / (1 << 24) as f32;
        (0..tokens * self.experts).map(logit).collect()
    }

    pub fn activation(&self) -> Activation {
        match self.gpt_oss {
            true => Activation::ClampedInterleaved { limit: 7.0, alpha: 1.702 },
            false => Activation::Swiglu,
        }
    }
}

/// Which tensor of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    GateUp,
    Down,
    X,
    Arena,
}

/// The pattern's seed of a tensor.
pub fn seed(set: usize, part: Part) -> u64 {
    (set * 4 + part as usize) as u64
}

/// One copy of the layer.
pub struct Set<B: Backend> {
    x: Tensor<B>,
    gate_up: Weight<B>,
    down: Weight<B>,
    lora: LoraTable<B>,
    biases: Option<[Tensor<B>; 2]>,
}

/// Where an adapter's blocks lie in a set's arena, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Blocks {
    pub a: [usize; 3],
    pub b: [usize; 3],
}

/// The blocks of one (slot, expert): A and B of gate, up and down.
pub fn blocks(model: &Model, slot: usize, expert: usize) -> Blocks {
    let [hidden, inner] = [model.hidden, model.inner].map(|width| RANK * width * 2);
    let unit = (4 * hidden + 4 * inner).next_multiple_of(ARENA_UNIT);
    let at = (slot * model.experts + expert) * unit;
    let up = if model.gpt_oss { at } else { at + hidden };
    Blocks {
        a: [at, up, at + 2 * hidden],
        b: [at + 2 * hidden + inner, at + 2 * hidden + 2 * inner, at + 2 * hidden + 3 * inner],
    }
}

/// How much of a layer there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Adapters, each on every expert.
    pub slots: usize,
    /// Copies.
    pub sets: usize,
    /// Most rows of a step.
    pub tokens: usize,
}

/// The layer, and what calls need beside it.
pub struct Layer<B: Backend> {
    pub device: B,
    pub stream: B::Stream,
    pub model: Model,
    pub slots: usize,
    pub sets: Vec<Set<B>>,
    /// Most rows.
    tokens: usize,
    slices: [LoraSlice; 3],
}

impl<B: Backend> Layer<B> {
    /// Copies with adapters that touch every expert.
    pub fn new(device: &B, model: Model, extent: Extent, pattern: &Pattern) -> Result<Self> {
        let Extent { slots, sets, tokens } = extent;
        let Model { hidden, inner, experts, top_k, .. } = model;
        let bounds = |op| OpBounds {
            op: Some(op),
            tokens,
            k: hidden,
            n: hidden,
            inner: 2 * inner,
            experts,
            top_k,
            rank: RANK,
            ..OpBounds::default()
        };
        let ops = [OpKind::MoeRoute, OpKind::FusedMoe, OpKind::FusedMoeLora];
        let workspace = ops.map(|op| device.workspace(&bounds(op))).into_iter().max();
        let mut stream = device.stream(StreamRole::Compute, workspace.unwrap_or(0))?;
        let mut host = pattern.host(device)?;
        let mut layout = LoraLayout::default();
        let half = SliceMeta { k: hidden, n: inner, experts };
        let ids = [half, half, SliceMeta { k: inner, n: hidden, experts }].map(|m| layout.push(m));
        let (second, stride) = if model.gpt_oss { (1, 2) } else { (inner, 1) };
        let slice = |i: usize, out_offset, out_stride, len| LoraSlice {
            table: ids[i],
            out_offset,
            out_stride,
            len,
        };
        let slices =
            [slice(0, 0, stride, inner), slice(1, second, stride, inner), slice(2, 0, 1, hidden)];
        let layout = Arc::new(layout);
        let mut layer =
            Layer { device: device.clone(), stream, model, slots, sets: vec![], tokens, slices };
        for set in 0..sets {
            layer.add(set, &layout, &mut host)?;
        }
        stream = layer.stream;
        let event = device.record(&mut stream)?;
        device.block_on(&event)?;
        layer.stream = stream;
        Ok(layer)
    }

    fn add(
        &mut self,
        set: usize,
        layout: &Arc<LoraLayout>,
        host: &mut Option<B::Host>,
    ) -> Result<()> {
        let Model { hidden, inner, experts, gpt_oss, .. } = self.model;
        let arena_bytes = blocks(&self.model, self.slots, 0).a[0];
        let row_bytes = LoraTable::<B>::row_bytes(layout, self.slots);
        let weights = experts * 3 * hidden * inner * 2;
        let bytes = weights + arena_bytes + row_bytes + self.tokens * hidden * 2;
        let bytes = bytes + experts * (2 * inner + hidden) * 4 + (1 << 16);
        let (device, stream) = (&self.device, &mut self.stream);
        let mut carver: Carver<B> = Carver::new(device.reserve(Pool::Weights, bytes)?);
        let dtype = DType::BF16;
        let mut weight = |part, n: usize, k: usize| -> Result<Weight<B>> {
            let data = carver.carve(&[experts * n * k], dtype)?;
            fill(device, stream, host, (&data, seed(set, part)))?;
            let scheme = Scheme::Dense(dtype);
            Ok(Weight::new(data, None, HostWeightMeta { matrices: experts, n, k, scheme }))
        };
        let gate_up = weight(Part::GateUp, 2 * inner, hidden)?;
        let down = weight(Part::Down, hidden, inner)?;
        let x = carver.carve(&[self.tokens, hidden], dtype)?;
        fill(device, stream, host, (&x, seed(set, Part::X)))?;
        let arena = carver.carve(&[arena_bytes], DType::U8)?;
        fill(device, stream, host, (&arena, seed(set, Part::Arena)))?;
        // Biases stay zero: reading them is what costs.
        let biases = match gpt_oss {
            true => Some([
                carver.carve(&[experts, 2 * inner], DType::F32)?,
                carver.carve(&[experts, hidden], DType::F32)?,
            ]),
            false => None,
        };
        let rows = carver.carve(&[row_bytes / 4], DType::I32)?;
        let lora = LoraTable::new(arena, rows, layout.clone(), self.slots, dtype)?;
        row_major(device, [hidden, inner], dtype)?;
        for slot in 0..self.slots {
            let mut at = vec![[0, 0]; layout.rows()];
            for expert in 0..experts {
                let of = blocks(&self.model, slot, expert);
                for (i, slice) in self.slices.iter().enumerate() {
                    at[slice.table.row() + expert] = [of.a[i], of.b[i]];
                }
            }
            write_rows((device, stream), &lora, slot, &at)?;
        }
        self.sets.push(Set { x, gate_up, down, lora, biases });
        Ok(())
    }
}

/// The rows of a step: logits and routing for each set, plans with and without adapters.
pub struct Rows<B: Backend> {
    pub tokens: usize,
    pub slots: Vec<Option<usize>>,
    logits: Vec<Tensor<B>>,
    routing: Vec<Routing<B>>,
    pub out: Tensor<B>,
    pub plans: Plans<B>,
}

impl<B: Backend> Rows<B> {
    /// `logits`: of each set, `[tokens, experts]`.
    pub fn new(layer: &mut Layer<B>, slots: &[Option<usize>], logits: &[Vec<f32>]) -> Result<Self> {
        let (tokens, model) = (slots.len(), layer.model);
        let shape = RoutingShape {
            tokens,
            top_k: model.top_k,
            experts: model.experts,
            slots: layer.slots,
            tile_rows: layer.device.caps().tile_rows,
        };
        let per_set = shape.bytes() + tokens * model.experts * 4 + (1 << 12);
        let plans = Plans::bytes(&layer.device, tokens, layer.slots)?;
        let bytes = logits.len() * per_set + tokens * model.hidden * 2 + plans + (1 << 16);
        let device = layer.device.clone();
        let mut carver: Carver<B> = Carver::new(device.reserve(Pool::Scratch, bytes)?);
        // All bits set is no number.
        let nothing = vec![0xff; tokens * model.hidden * 2];
        let at = (&[tokens, model.hidden][..], DType::BF16);
        let out = place((&device, &mut layer.stream), &mut carver, &nothing, at)?;
        let mut of_sets = Vec::new();
        for of in logits {
            let bytes: Vec<u8> = of.iter().flat_map(|v| v.to_le_bytes()).collect();
            let at = (&[tokens, model.experts][..], DType::F32);
            of_sets.push(place((&device, &mut layer.stream), &mut carver, &bytes, at)?);
        }
        let routing = logits.iter().map(|_| Routing::carve(&mut carver, shape));
        let routing = routing.collect::<Result<Vec<_>>>()?;
        let plans = Plans::new((&device, &mut layer.stream), &mut carver, slots, layer.slots)?;
        Ok(Rows { tokens, slots: slots.to_vec(), logits: of_sets, routing, out, plans })
    }
}

/// What a call does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// `moe_route` alone, with adapters in the plan.
    Route,
    /// `moe_route` and `fused_moe`, nobody with an adapter.
    Base,
    /// `fused_moe` behind routing made before.
    Experts,
    /// `moe_route` and `fused_moe_lora`.
    Lora,
    /// The same, nobody with an adapter.
    LoraIdle,
}

/// Puts a call on set `set` on the stream.
pub fn call<B: Backend>(
    (device, stream): (&B, &mut B::Stream),
    (model, slices): (&Model, &[LoraSlice; 3]),
    (rows, set, index): (&mut Rows<B>, &Set<B>, usize),
    what: Call,
) -> Result<()> {
    let cx = &mut Ctx { device, stream };
    let plan = match what {
        Call::Route | Call::Lora => &rows.plans.with,
        Call::Base | Call::Experts | Call::LoraIdle => &rows.plans.without,
    };
    if what != Call::Experts {
        MoeRoute {
            logits: &rows.logits[index],
            live: plan.kv_index(),
            slot: plan.slot(),
            score: if model.gpt_oss { RouteScore::SoftmaxTopk } else { RouteScore::Softmax },
            correction: None,
            groups: None,
            renorm: !model.gpt_oss,
            scale: 1.0,
            routing: &mut rows.routing[index],
        }
        .run(cx)?;
    }
    if what == Call::Route {
        return Ok(());
    }
    let moe = FusedMoe {
        x: &set.x.rows(rows.tokens)?,
        routing: &rows.routing[index],
        gate_up: &set.gate_up,
        gate_up_bias: set.biases.as_ref().map(|[bias, _]| bias),
        down: &set.down,
        down_bias: set.biases.as_ref().map(|[_, bias]| bias),
        activation: model.activation(),
        weight_on: WeightOn::Output,
        combine: Combine::Replace,
        out: &mut rows.out,
    };
    match what {
        Call::Lora | Call::LoraIdle => FusedMoeLora {
            moe,
            lora: &set.lora,
            gate_up_slices: &slices[..2],
            down_slices: &slices[2..],
        }
        .run(cx),
        _ => moe.run(cx),
    }
}

impl<B: Backend> Layer<B> {
    /// Puts a call on set `index` on the stream.
    pub fn run(&mut self, rows: &mut Rows<B>, index: usize, what: Call) -> Result<()> {
        let Layer { device, stream, model, sets, slices, .. } = self;
        call((device, stream), (model, slices), (rows, &sets[index], index), what)
    }

    /// A graph of the call on each set in turn.
    pub fn capture(&mut self, rows: &mut Rows<B>, what: Call) -> Result<B::Graph> {
        let Layer { device, stream, model, sets, slices, .. } = self;
        let count = rows.logits.len();
        device.capture(stream, |stream| {
            (0..count).try_for_each(|index| {
                call((device, stream), (model, slices), (rows, &sets[index], index), what)
            })
        })
    }

    /// Median microseconds of one call in each graph, the graphs in turns.
    pub fn times(
        &mut self,
        rows: &Rows<B>,
        graphs: &[B::Graph],
        effort: Effort,
    ) -> Result<Vec<f64>> {
        let at = (&self.device, &mut self.stream);
        times(at, &rows.plans.with, (graphs, rows.logits.len()), effort)
    }

    /// The output as it is now, `[tokens, hidden]`, and fills it with what is no number.
    pub fn take_out(&mut self, rows: &Rows<B>) -> Result<Vec<f32>> {
        take((&self.device, &mut self.stream), &rows.out)
    }
}
