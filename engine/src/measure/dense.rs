//! A dense projection with adapters, several times over, so that weights never come from a cache.

use std::sync::Arc;

use amphora_hal::ops::{Linear, LoraLinear};
use amphora_hal::{
    ARENA_UNIT, Backend, Carver, Ctx, DType, HostWeightMeta, LoraLayout, LoraSlice, LoraTable,
    OpBounds, OpKind, Pool, Result, Scheme, SliceMeta, StreamRole, Tensor, Weight,
};

use super::{Effort, Pattern, Plans, RANK, fill, row_major, times, write_rows};

/// Bytes of weights that no cache holds.
const UNCACHED: usize = 256 << 20;

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
}

impl Shape {
    /// Outputs.
    pub fn n(&self) -> usize {
        self.slices.iter().sum()
    }

    /// Copies that are enough.
    fn sets(&self) -> usize {
        UNCACHED.div_ceil(self.n() * self.k * 2).clamp(2, 32)
    }

    /// Bytes of one adapter's factors, each slice from a multiple of the arena's unit on.
    fn blocks(&self) -> Vec<[usize; 2]> {
        let mut at = 0;
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
    shape: Shape,
    slots: usize,
    stream: B::Stream,
    sets: Vec<Set<B>>,
    slices: Vec<LoraSlice>,
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
        let bytes = (n + shape.tokens) * k * 2 + arena_bytes + row_bytes + (1 << 12);
        let mut sets = Vec::new();
        for set in 0..shape.sets() {
            let mut carver: Carver<B> = Carver::new(device.reserve(Pool::Weights, bytes)?);
            let mut part = |dims: &[usize], dtype, part| -> Result<Tensor<B>> {
                let tensor = carver.carve(dims, dtype)?;
                fill(device, &mut stream, &mut host, (&tensor, (3 * set + part) as u64))?;
                Ok(tensor)
            };
            let data = part(&[n * k], DType::BF16, 0)?;
            let x = part(&[shape.tokens, k], DType::BF16, 1)?;
            let arena = part(&[arena_bytes.max(1)], DType::U8, 2)?;
            let meta = HostWeightMeta { matrices: 1, n, k, scheme: Scheme::Dense(DType::BF16) };
            let rows = carver.carve(&[row_bytes / 4], DType::I32)?;
            let lora = LoraTable::new(arena, rows, layout.clone(), slots, DType::BF16)?;
            for slot in 0..slots {
                let from = slot * shape.adapter_bytes();
                let of = |[a, b]: [usize; 2]| [from + a, from + b];
                let at: Vec<[usize; 2]> = shape.blocks().into_iter().map(of).collect();
                write_rows((device, &mut stream), &lora, slot, &at)?;
            }
            sets.push(Set { x, weight: Weight::new(data, None, meta), lora });
        }
        Ok(Projection { device: device.clone(), shape, slots, stream, sets, slices })
    }

    /// Rows whose adapters are each in turn.
    ///
    /// # Errors
    /// The device's.
    pub fn rows(&mut self, tokens: usize) -> Result<Rows<B>> {
        let of_rows: Vec<Option<usize>> = (0..tokens).map(|t| Some(t % self.slots)).collect();
        let plans = Plans::bytes(&self.device, tokens, self.slots)?;
        let out = self.shape.out;
        let bytes = tokens * self.shape.n() * out.size() + plans + (1 << 12);
        let mut carver: Carver<B> = Carver::new(self.device.reserve(Pool::Scratch, bytes)?);
        let out = carver.carve(&[tokens, self.shape.n()], out)?;
        let at = (&self.device, &mut self.stream);
        let plans = Plans::new(at, &mut carver, &of_rows, self.slots)?;
        Ok(Rows { tokens, plans, out })
    }

    /// A graph of the call on each copy in turn, run once before.
    ///
    /// # Errors
    /// The device's.
    pub fn capture(&mut self, rows: &mut Rows<B>, what: Call) -> Result<B::Graph> {
        let Projection { device, stream, sets, slices, .. } = self;
        let mut call = |stream: &mut B::Stream, set: &Set<B>| -> Result<()> {
            let cx = &mut Ctx { device, stream };
            let x = set.x.rows(rows.tokens)?;
            let base = Linear { x: &x, weight: &set.weight, bias: None, out: &mut rows.out };
            match what {
                Call::Base => base.run(cx),
                Call::Lora => {
                    let segments = rows.plans.with.segments();
                    LoraLinear { base, lora: &set.lora, slices, segments }.run(cx)
                }
            }
        };
        call(stream, &sets[0])?;
        device.capture(stream, |stream| sets.iter().try_for_each(|set| call(stream, set)))
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
