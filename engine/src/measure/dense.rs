//! A dense projection with adapters, several times over, so that weights never come from a cache.

use std::sync::Arc;

use amphora_hal::ops::{Linear, LoraLinear, RmsNorm};
use amphora_hal::{
    ARENA_UNIT, Backend, Carver, Ctx, DType, HostWeightMeta, LoraLayout, LoraSlice, LoraTable,
    OpBounds, OpKind, Pool, Result, Scheme, SliceMeta, StreamRole, Tensor, Weight,
};

use super::{
    Effort, Pattern, Plans, RANK, copies, fill, place, row_major, take, times, write_rows,
};

/// A projection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    pub k: usize,
    /// Outputs of each slice, one after another.
    pub slices: Vec<usize>,
    /// Most rows.
    pub tokens: usize,
    /// Of outputs: kernels are chosen by it too.
    pub out: DType,
    /// With a bias. It stays zero: reading it is what costs.
    pub bias: bool,
}

/// Which tensor of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Weight,
    X,
    Arena,
}

/// The pattern's seed of a tensor.
pub fn seed(set: usize, part: Part) -> u64 {
    (set * 3 + part as usize) as u64
}

impl Shape {
    /// Outputs.
    pub fn n(&self) -> usize {
        self.slices.iter().sum()
    }

    /// Where the blocks A and B of an adapter's slices lie in a copy's arena, in bytes.
    pub fn blocks(&self, slot: usize) -> Vec<[usize; 2]> {
        let mut at = slot * self.adapter_bytes();
        let mut take = |bytes: usize| {
            let from = at;
            at += bytes.next_multiple_of(ARENA_UNIT);
            from
        };
        self.slices.iter().map(|n| [take(RANK * self.k * 2), take(RANK * n * 2)]).collect()
    }

    fn adapter_bytes(&self) -> usize {
        let unit = |width: usize| (RANK * width * 2).next_multiple_of(ARENA_UNIT);
        self.slices.iter().map(|&n| unit(self.k) + unit(n)).sum()
    }
}

/// The copies of a projection.
pub struct Projection<B: Backend> {
    /// What launches go through: another handle of the same device changes how they are chosen.
    pub device: B,
    pub shape: Shape,
    pub slots: usize,
    stream: B::Stream,
    sets: Vec<Set<B>>,
    common: Common<B>,
}

/// What all copies have in common.
struct Common<B: Backend> {
    slices: Vec<LoraSlice>,
    bias: Option<Tensor<B>>,
    /// Ones: the weight of the norm in front.
    ones: Tensor<B>,
}

struct Set<B: Backend> {
    x: Tensor<B>,
    weight: Weight<B>,
    lora: LoraTable<B>,
}

/// The rows of a step: its plans and where outputs go.
pub struct Rows<B: Backend> {
    tokens: usize,
    plans: Plans<B>,
    out: Tensor<B>,
}

/// What a call does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// `linear`.
    Base,
    /// `lora_linear`.
    Lora,
    /// `linear` behind a `rms_norm` that writes its rows: what runs in front of one ends with the norm, as
    /// in a layer.
    NormBase,
    /// The same with `lora_linear`.
    NormLora,
}

fn call<B: Backend>(
    (device, stream): (&B, &mut B::Stream),
    (set, common): (&Set<B>, &Common<B>),
    rows: &mut Rows<B>,
    what: Call,
) -> Result<()> {
    let cx = &mut Ctx { device, stream };
    let x = set.x.rows(rows.tokens)?;
    if matches!(what, Call::NormBase | Call::NormLora) {
        let (x, out, weight) = (&mut x.clone(), &mut x.clone(), &common.ones);
        RmsNorm { x, add: None, weight, eps: 1e-5, out }.run(cx)?;
    }
    let bias = common.bias.as_ref();
    let base = Linear { x: &x, weight: &set.weight, bias, out: &mut rows.out };
    match what {
        Call::Base | Call::NormBase => base.run(cx),
        Call::Lora | Call::NormLora => {
            let segments = rows.plans.with.segments();
            LoraLinear { base, lora: &set.lora, slices: &common.slices, segments }.run(cx)
        }
    }
}

impl<B: Backend> Projection<B> {
    /// Copies in bf16 with `slots` adapters on every slice.
    ///
    /// # Errors
    /// The device's.
    pub fn new(device: &B, shape: Shape, slots: usize, pattern: &Pattern) -> Result<Self> {
        let (k, n) = (shape.k, shape.n());
        let bounds = |op| OpBounds {
            op: Some(op),
            tokens: shape.tokens,
            k,
            n,
            rank: RANK,
            ..OpBounds::default()
        };
        let ops = [OpKind::Linear, OpKind::LoraLinear];
        let workspace = ops.map(|op| device.workspace(&bounds(op))).into_iter().max();
        let mut stream = device.stream(StreamRole::Compute, workspace.unwrap_or(0))?;
        let mut host = pattern.host(device)?;
        let mut layout = LoraLayout::default();
        let mut offset = 0;
        let slices = shape.slices.iter().map(|&len| {
            let table = layout.push(SliceMeta { k, n: len, experts: 1 });
            offset += len;
            LoraSlice { table, out_offset: offset - len, out_stride: 1, len }
        });
        let slices: Vec<LoraSlice> = slices.collect();
        let layout = Arc::new(layout);
        row_major(device, [k, n], DType::BF16)?;
        let arena_bytes = shape.adapter_bytes() * slots;
        let row_bytes = LoraTable::<B>::row_bytes(&layout, slots);
        let mut carver: Carver<B> =
            Carver::new(device.reserve(Pool::Weights, 4 * (n + k) + (1 << 12))?);
        let ones: Vec<u8> = (0..k).flat_map(|_| 1f32.to_le_bytes()).collect();
        let ones = place((device, &mut stream), &mut carver, &ones, (&[k], DType::F32))?;
        let bias = shape.bias.then(|| carver.carve(&[n], DType::F32)).transpose()?;
        let bytes = (n + shape.tokens) * k * 2 + arena_bytes + row_bytes + (1 << 12);
        let mut sets = Vec::new();
        for set in 0..copies(n * k * 2) {
            let mut carver: Carver<B> = Carver::new(device.reserve(Pool::Weights, bytes)?);
            let mut part = |dims: &[usize], dtype, part| -> Result<Tensor<B>> {
                let tensor = carver.carve(dims, dtype)?;
                fill(device, &mut stream, &mut host, (&tensor, seed(set, part)))?;
                Ok(tensor)
            };
            let data = part(&[n * k], DType::BF16, Part::Weight)?;
            let x = part(&[shape.tokens, k], DType::BF16, Part::X)?;
            let arena = part(&[arena_bytes.max(1)], DType::U8, Part::Arena)?;
            let meta = HostWeightMeta { matrices: 1, n, k, scheme: Scheme::Dense(DType::BF16) };
            let rows = carver.carve(&[row_bytes / 4], DType::I32)?;
            let lora = LoraTable::new(arena, rows, layout.clone(), slots, DType::BF16)?;
            for slot in 0..slots {
                write_rows((device, &mut stream), &lora, slot, &shape.blocks(slot))?;
            }
            sets.push(Set { x, weight: Weight::new(data, None, meta), lora });
        }
        let common = Common { slices, bias, ones };
        Ok(Projection { device: device.clone(), shape, slots, stream, sets, common })
    }

    /// Rows with these adapters.
    ///
    /// # Errors
    /// The device's.
    pub fn rows(&mut self, of_rows: &[Option<usize>]) -> Result<Rows<B>> {
        let tokens = of_rows.len();
        let plans = Plans::bytes(&self.device, tokens, self.slots)?;
        let out = self.shape.out;
        let bytes = tokens * self.shape.n() * out.size() + plans + (1 << 12);
        let mut carver: Carver<B> = Carver::new(self.device.reserve(Pool::Scratch, bytes)?);
        let out = carver.carve(&[tokens, self.shape.n()], out)?;
        let at = (&self.device, &mut self.stream);
        let plans = Plans::new(at, &mut carver, of_rows, self.slots)?;
        Ok(Rows { tokens, plans, out })
    }

    /// Puts a call on copy `index` on the stream.
    ///
    /// # Errors
    /// The device's.
    pub fn run(&mut self, rows: &mut Rows<B>, index: usize, what: Call) -> Result<()> {
        let Projection { device, stream, sets, common, .. } = self;
        call((device, stream), (&sets[index], common), rows, what)
    }

    /// A graph of the call on each copy in turn, run once before.
    ///
    /// # Errors
    /// The device's.
    pub fn capture(&mut self, rows: &mut Rows<B>, what: Call) -> Result<B::Graph> {
        self.run(rows, 0, what)?;
        let Projection { device, stream, sets, common, .. } = self;
        device.capture(stream, |stream| {
            sets.iter().try_for_each(|set| call((device, stream), (set, common), rows, what))
        })
    }

    /// The output as it is now, `[tokens, n]`, and fills it with what is no number.
    ///
    /// # Errors
    /// The device's.
    pub fn take_out(&mut self, rows: &Rows<B>) -> Result<Vec<f32>> {
        take((&self.device, &mut self.stream), &rows.out)
    }

    /// Median microseconds of one call in each graph, the graphs in turns.
    ///
    /// # Errors
    /// The device's.
    pub fn times(
        &mut self,
        rows: &Rows<B>,
        graphs: &[B::Graph],
        effort: Effort,
    ) -> Result<Vec<f64>> {
        let at = (&self.device, &mut self.stream);
        times(at, &rows.plans.with, (graphs, self.sets.len()), effort)
    }
}
