//! The operators between a layer's dense products: norms, rope, which stores keys and values, attention over
//! caches that no cache of the device holds, and the activation of a dense MLP.

use amphora_hal::ops::{
    Activation, KvStore, Mask, PagedAttention, RmsNorm, Rope, RopePairing, Swiglu, split_mix64,
};
use amphora_hal::{
    ALIGN, Backend, Carver, Ctx, DType, Error, OpBounds, OpKind, PlanLimits, PlanView, Pool,
    Result, SequencePlan, StreamRole, Tensor,
};

use super::{BLOCK, Effort, Pattern, copies, fill, place, silent, take, times, upload};

/// A step's rows and the attention of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the dense MLP after its activation; 0: there is none.
    pub inner: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// Width of a head, all of which turns.
    pub dim: usize,
    /// Of each sequence the positions in the cache before, and its rows.
    pub sequences: Vec<(usize, usize)>,
    pub mask: Mask,
}

impl Shape {
    /// Rows of the step.
    pub fn rows(&self) -> usize {
        self.sequences.iter().map(|(_, rows)| rows).sum()
    }

    fn blocks(&self) -> usize {
        self.sequences.iter().map(|(before, rows)| (before + rows).div_ceil(BLOCK)).sum()
    }

    /// Positions of the longest sequence.
    fn positions(&self) -> usize {
        self.sequences.iter().map(|(before, rows)| before + rows).max().unwrap_or(0)
    }

    /// Bytes of keys and values of all sequences.
    pub fn cache_bytes(&self) -> usize {
        self.blocks() * BLOCK * self.kv_heads * self.dim * 2 * 2
    }

    /// (query, position) pairs that the mask leaves, of one head.
    pub fn pairs(&self) -> usize {
        let seen = |position: usize| match self.mask {
            Mask::Causal => position + 1,
            Mask::Window(window) => (position + 1).min(window),
            Mask::Chunk(chunk) => position % chunk + 1,
        };
        self.sequences.iter().flat_map(|&(before, rows)| before..before + rows).map(seen).sum()
    }
}

/// What a call does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// `rms_norm` with the residual add, `[rows, hidden]`.
    Norm,
    /// `rms_norm` of each head of the queries, and of each of the keys, in place.
    HeadNorms,
    /// `rope`, which stores keys and values.
    Rope,
    /// `paged_attention` with sinks.
    Attention,
    /// `swiglu`, of a shape with a dense MLP.
    Activation,
}

/// A step's rows in bf16, which lie where the product in front left them, and copies of the cache.
pub struct Attention<B: Backend> {
    pub device: B,
    stream: B::Stream,
    plan: PlanView<B>,
    /// Keys and values.
    caches: Vec<[Tensor<B>; 2]>,
    common: Common<B>,
}

/// What calls on all copies have in common.
struct Common<B: Backend> {
    mask: Mask,
    dim: usize,
    /// `[rows, heads, dim]`, `[rows, kv_heads, dim]` twice: columns of one tensor.
    qkv: [Tensor<B>; 3],
    out: Tensor<B>,
    sinks: Tensor<B>,
    /// `[positions, dim]`.
    table: Tensor<B>,
    /// x, what is added, the result.
    hidden: [Tensor<B>; 3],
    /// `[rows, 2 · inner]` and `[rows, inner]`.
    mlp: Option<[Tensor<B>; 2]>,
    /// Ones.
    weight: Tensor<B>,
}

impl<B: Backend> Attention<B> {
    /// # Errors
    /// The device's.
    pub fn new(device: &B, shape: &Shape, pattern: &Pattern) -> Result<Self> {
        let &Shape { hidden, inner, heads, kv_heads, dim, mask, .. } = shape;
        let (rows, positions) = (shape.rows(), shape.positions());
        let bounds = |op, k, n| OpBounds {
            op: Some(op),
            tokens: rows,
            k,
            n,
            context: positions,
            ..OpBounds::default()
        };
        let bounds = [
            bounds(OpKind::RmsNorm, hidden, hidden),
            bounds(OpKind::Rope, dim, heads),
            bounds(OpKind::PagedAttention, dim, heads),
            bounds(OpKind::Swiglu, inner, inner),
        ];
        let workspace = bounds.map(|bounds| device.workspace(&bounds)).into_iter().max();
        let mut stream = device.stream(StreamRole::Compute, workspace.unwrap_or(0))?;
        let limits = PlanLimits {
            blocks_per_sequence: positions.div_ceil(BLOCK),
            kv_blocks: shape.blocks(),
            positions,
            tokens: rows,
            ..super::limits(shape.sequences.len(), 0, device.caps().tile_rows)
        };
        let width = (heads + 2 * kv_heads) * dim;
        let bytes = rows * (width + heads * dim + 3 * hidden + 3 * inner) * 2;
        let bytes = bytes + positions * dim * 4;
        let bytes = bytes + super::plan_bytes(&limits)? + 4 * (hidden + heads) + 14 * ALIGN;
        let mut carver: Carver<B> = Carver::new(device.reserve(Pool::Scratch, bytes)?);
        let mut host = pattern.host(device)?;
        let mut seed = 0;
        let mut random = |stream: &mut B::Stream, tensor: Tensor<B>| -> Result<Tensor<B>> {
            seed += 1;
            fill(device, stream, &mut host, (&tensor, seed))?;
            Ok(tensor)
        };
        let floats = |values: Vec<f32>| -> Vec<u8> {
            values.into_iter().flat_map(f32::to_le_bytes).collect()
        };
        let at = (&[positions, dim][..], DType::F32);
        let table = place((device, &mut stream), &mut carver, &floats(turns(positions, dim)), at)?;
        let at = (&[hidden][..], DType::F32);
        let weight = place((device, &mut stream), &mut carver, &floats(vec![1.0; hidden]), at)?;
        let qkv = random(&mut stream, carver.carve(&[rows, width], DType::BF16)?)?;
        let heads_of = |from: usize, heads: usize| -> Result<Tensor<B>> {
            qkv.narrow(1, from * dim, heads * dim)?.split_last(dim)
        };
        let qkv = [
            heads_of(0, heads)?,
            heads_of(heads, kv_heads)?,
            heads_of(heads + kv_heads, kv_heads)?,
        ];
        let mut wide = |width| random(&mut stream, carver.carve(&[rows, width], DType::BF16)?);
        let hidden = [wide(hidden)?, wide(hidden)?, wide(hidden)?];
        let mlp = match inner {
            0 => None,
            _ => Some([wide(2 * inner)?, wide(inner)?]),
        };
        let common = Common {
            mask,
            dim,
            qkv,
            out: carver.carve(&[rows, heads, dim], DType::BF16)?,
            sinks: carver.carve(&[heads], DType::F32)?,
            table,
            hidden,
            mlp,
            weight,
        };
        let plan = plan((device, &mut stream), &mut carver, &limits, &shape.sequences)?;
        let half = shape.cache_bytes() / 2;
        let dims = [shape.blocks(), BLOCK, kv_heads, dim];
        let mut caches = Vec::new();
        for _ in 0..copies(2 * half) {
            let buffer = device.reserve(Pool::KvCache, 2 * half + 2 * ALIGN)?;
            let mut carver: Carver<B> = Carver::new(buffer);
            let mut half = || random(&mut stream, carver.carve(&dims, DType::BF16)?);
            caches.push([half()?, half()?]);
        }
        Ok(Attention { device: device.clone(), stream, plan, caches, common })
    }

    /// Puts a call on the first copy on the stream.
    ///
    /// # Errors
    /// The device's.
    pub fn run(&mut self, what: Call) -> Result<()> {
        let Attention { device, stream, plan, caches, common } = self;
        call((device, stream), (&mut caches[0], common), plan, what)
    }

    /// A graph of the call on each copy in turn, run once before.
    ///
    /// # Errors
    /// The device's.
    pub fn capture(&mut self, what: Call) -> Result<B::Graph> {
        self.run(what)?;
        let Attention { device, stream, plan, caches, common } = self;
        device.capture(stream, |stream| {
            caches
                .iter_mut()
                .try_for_each(|cache| call((device, stream), (cache, common), plan, what))
        })
    }

    /// What attention gave, `[rows, heads, dim]`, and fills it with what is no number.
    ///
    /// # Errors
    /// The device's.
    pub fn take_out(&mut self) -> Result<Vec<f32>> {
        take((&self.device, &mut self.stream), &self.common.out)
    }

    /// Median microseconds of one call in each graph, the graphs in turns.
    ///
    /// # Errors
    /// The device's.
    pub fn times(&mut self, graphs: &[B::Graph], effort: Effort) -> Result<Vec<f64>> {
        let at = (&self.device, &mut self.stream);
        times(at, &self.plan, (graphs, self.caches.len()), effort)
    }
}

/// The cosines and sines of `dim / 2` frequencies at each position.
fn turns(positions: usize, dim: usize) -> Vec<f32> {
    let pairs = dim / 2;
    let rates: Vec<f32> = (0..pairs).map(|i| 1e4f32.powf(-(i as f32) / pairs as f32)).collect();
    let angles = |position: usize| rates.iter().map(move |rate| position as f32 * rate);
    (0..positions)
        .flat_map(|position| angles(position).map(f32::cos).chain(angles(position).map(f32::sin)))
        .collect()
}

/// A plan of these sequences, their blocks anywhere in the cache.
fn plan<B: Backend>(
    at: (&B, &mut B::Stream),
    carver: &mut Carver<B>,
    limits: &PlanLimits,
    sequences: &[(usize, usize)],
) -> Result<PlanView<B>> {
    let mut order: Vec<u32> = (0..limits.kv_blocks as u32).collect();
    order.sort_by_key(|&block| split_mix64(0, u64::from(block) + 1));
    let mut free = order.as_slice();
    let zeros = vec![0; limits.tokens];
    let sequences = sequences.iter().enumerate().map(|(i, &(before, rows))| {
        let (blocks, rest) = free.split_at((before + rows).div_ceil(BLOCK));
        free = rest;
        SequencePlan { first_position: before, ..silent(i, &zeros[..rows], blocks) }
    });
    upload(at, carver, limits, sequences)
}

/// Puts a call on the stream.
fn call<B: Backend>(
    (device, stream): (&B, &mut B::Stream),
    ([k_cache, v_cache], common): (&mut [Tensor<B>; 2], &mut Common<B>),
    plan: &PlanView<B>,
    what: Call,
) -> Result<()> {
    let cx = &mut Ctx { device, stream };
    let Common { mask, dim, qkv: [q, k, v], out, sinks, table, hidden, mlp, weight } = common;
    match what {
        Call::Norm => {
            let [x, add, out] = hidden;
            RmsNorm { x, add: Some(add), weight, eps: 1e-5, out }.run(cx)
        }
        Call::HeadNorms => {
            let weight = &weight.narrow(0, 0, *dim)?;
            [q, k].into_iter().try_for_each(|x| {
                let out = &mut x.clone();
                RmsNorm { x, add: None, weight, eps: 1e-5, out }.run(cx)
            })
        }
        Call::Rope => Rope {
            q,
            k,
            position: plan.position(),
            table,
            pairing: RopePairing::Half,
            q_scale: None,
            store: Some(KvStore { v, plan, k_cache, v_cache }),
        }
        .run(cx),
        Call::Attention => {
            let scale = (*dim as f32).powf(-0.5);
            let (mask, sinks) = (*mask, Some(&*sinks));
            PagedAttention { q, k_cache, v_cache, plan, mask, sinks, scale, out }.run(cx)
        }
        Call::Activation => match mlp {
            Some([x, out]) => Swiglu { x, activation: Activation::Swiglu, out }.run(cx),
            None => Err(Error::invalid("measure", "a shape without a dense MLP")),
        },
    }
}
