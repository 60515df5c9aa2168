//! Cases of `paged_attention`: ragged queries over blocks in random order.

use amphora_hal::ops::{Mask, PagedAttention};
use amphora_hal::{Backend, Bucket, Caps, DType, OpBounds, OpKey, OpKind, PlanLimits, Result};

use crate::compare::Want;
use crate::harness::{ByRow, Case, Expect, HostOp, Launch, case};
use crate::host::HostTensor;
use crate::oracle::paged_attention::Attention;
use crate::rig::Rig;
use crate::rng::Rng;
use crate::step::{Ragged, Step};

/// What lies in places of the cache that no query of its sequence sees. They were another's, who may have left
/// what is no number there; a product that touches it is noticed, whatever it is multiplied by.
const UNSEEN: f64 = f64::NAN;

/// Sizes and variants of a call.
#[derive(Debug, Clone)]
pub struct AttentionSpec {
    /// For each sequence (positions in the cache before, queries).
    pub sequences: Vec<(usize, usize)>,
    /// Rows of the bucket beyond them; if any, one padding sequence as well.
    pub padding: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of the cache.
    pub kv_heads: usize,
    /// Width of q and k.
    pub k_dim: usize,
    /// Width of v.
    pub v_dim: usize,
    /// Positions of a block.
    pub block_size: usize,
    /// What a query sees.
    pub mask: Mask,
    /// With sinks.
    pub sinks: bool,
    /// Compute type.
    pub dtype: DType,
}

impl AttentionSpec {
    fn rows(&self) -> usize {
        self.sequences.iter().map(|(_, rows)| rows).sum()
    }

    /// What a case of it is called.
    pub fn name(&self) -> String {
        let AttentionSpec { heads, kv_heads, k_dim, v_dim, block_size, padding, mask, .. } = self;
        let contexts: Vec<String> =
            self.sequences.iter().map(|(b, r)| format!("{b}+{r}")).collect();
        let mut dims = format!("{k_dim}");
        if v_dim != k_dim {
            dims += &format!("/{v_dim}");
        }
        let mask = match mask {
            Mask::Causal => String::new(),
            Mask::Window(window) => format!(",window={window}"),
            Mask::Chunk(chunk) => format!(",chunk={chunk}"),
        };
        let sinks = if self.sinks { ",sinks" } else { "" };
        format!(
            "paged_attention/{}/s={},h={heads}/{kv_heads},d={dims},block={block_size},padding={padding}{mask}{sinks}",
            self.dtype,
            contexts.join(","),
        )
    }
}

/// One call; q lies in columns of a fused tensor, as q of a qkv product does.
#[derive(Debug, Clone)]
pub struct HostAttention {
    /// Sizes.
    pub spec: AttentionSpec,
    /// Two steps of one bucket over the same cache.
    pub steps: Vec<Step>,
    /// `[tokens, heads · k_dim + beside]`.
    pub q: HostTensor,
    /// k and v.
    pub caches: [HostTensor; 2],
    /// `[heads]`.
    pub sinks: Option<Vec<f64>>,
}

/// Columns of the fused tensor behind q: rows that begin at multiples of 16 bytes, and where blocks are small
/// some that do not.
fn beside(spec: &AttentionSpec) -> usize {
    if spec.block_size == 4 { 18 } else { 16 }
}

impl HostAttention {
    /// Random operands.
    pub fn random(rng: &mut Rng, caps: &Caps, spec: AttentionSpec) -> Self {
        let AttentionSpec { heads, kv_heads, k_dim, v_dim, block_size, dtype, .. } = spec;
        let tokens = spec.rows() + spec.padding;
        let sequences = spec.sequences.len() + usize::from(spec.padding > 0);
        let longest = spec.sequences.iter().map(|(before, rows)| before + rows).max().unwrap_or(1);
        let bucket = Bucket { tokens, sequences, logit_rows: sequences };
        let needed = |&(before, rows): &(usize, usize)| (before + rows).div_ceil(block_size);
        let limits = PlanLimits {
            sequences,
            tokens,
            blocks_per_sequence: longest.div_ceil(block_size) + 1,
            block_size,
            kv_blocks: spec.sequences.iter().map(needed).sum::<usize>() + 2,
            vocab: 9,
            positions: longest,
            slots: 0,
            tile_rows: caps.tile_rows,
            edits: 0,
        };
        let mut step = |sequences| Step::random(rng, &Ragged { sequences, bucket, limits });
        let one = spec.sequences.first().map_or(0, |_| 1);
        let steps = vec![step(spec.sequences.clone()), step(vec![(0, 1); one])];
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for seen in seen(&steps) {
            let mut fill = |into: &mut Vec<f64>, dim: usize| {
                let random = rng.normals(kv_heads * dim, 1.0, dtype);
                into.extend(random.into_iter().map(|v| if seen { v } else { UNSEEN }));
            };
            fill(&mut keys, k_dim);
            fill(&mut values, v_dim);
        }
        let cache = |dim| [limits.kv_blocks, block_size, kv_heads, dim];
        let width = heads * k_dim + beside(&spec);
        HostAttention {
            q: HostTensor::real(&[tokens, width], dtype, &rng.normals(tokens * width, 2.0, dtype)),
            caches: [
                HostTensor::real(&cache(k_dim), dtype, &keys),
                HostTensor::real(&cache(v_dim), dtype, &values),
            ],
            sinks: spec.sinks.then(|| rng.normals(heads, 2.0, DType::F32)),
            spec,
            steps,
        }
    }

    fn scale(&self) -> f32 {
        (self.spec.k_dim as f32).powf(-0.5)
    }
}

/// Of each place of the cache, whether it holds a position of one of the steps' sequences.
fn seen(steps: &[Step]) -> Vec<bool> {
    let PlanLimits { kv_blocks, block_size, .. } = steps[0].limits;
    let mut seen = vec![false; kv_blocks * block_size];
    for sequence in steps.iter().flat_map(|step| &step.sequences) {
        for position in 0..sequence.first + sequence.rows() {
            let block = sequence.blocks[position / block_size] as usize;
            seen[block * block_size + position % block_size] = true;
        }
    }
    seen
}

impl HostOp for HostAttention {
    fn keys(&self) -> Vec<OpKey> {
        vec![OpKey::new(OpKind::PagedAttention, self.spec.dtype).head_dim(self.spec.k_dim)]
    }

    fn bounds(&self) -> Vec<OpBounds> {
        let AttentionSpec { heads, k_dim, v_dim, .. } = self.spec;
        let op = Some(OpKind::PagedAttention);
        let context = self.steps[0].limits.positions;
        let tokens = self.q.dims[0];
        vec![OpBounds { op, tokens, k: k_dim.max(v_dim), n: heads, context, ..OpBounds::default() }]
    }

    fn steps(&self) -> &[Step] {
        &self.steps
    }

    fn bytes(&self) -> usize {
        (1 << 16)
            + 2 * (self.q.bytes.len() + self.caches[0].bytes.len() + self.caches[1].bytes.len())
    }

    fn place<B: Backend>(&self, rig: &mut Rig<B>) -> Result<Launch<B>> {
        let AttentionSpec { heads, k_dim, v_dim, mask, dtype, .. } = self.spec;
        let q = rig.tensor("q", &self.q)?.narrow(1, 0, heads * k_dim)?.split_last(k_dim)?;
        let k_cache = rig.tensor("k_cache", &self.caches[0])?;
        let v_cache = rig.tensor("v_cache", &self.caches[1])?;
        let sinks = match &self.sinks {
            Some(sinks) => {
                Some(rig.tensor("sinks", &HostTensor::real(&[heads], DType::F32, sinks))?)
            }
            None => None,
        };
        let out = rig.poisoned("out", &[self.q.dims[0], heads * v_dim], dtype)?;
        let mut out = out.split_last(v_dim)?;
        let scale = self.scale();
        Ok(Box::new(move |cx, plan| {
            PagedAttention {
                q: &q,
                k_cache: &k_cache,
                v_cache: &v_cache,
                plan,
                mask,
                sinks: sinks.as_ref(),
                scale,
                out: &mut out,
            }
            .run(cx)
        }))
    }

    fn expect(&self, step: usize) -> Vec<(&'static str, Expect)> {
        let AttentionSpec { heads, kv_heads, k_dim, v_dim, block_size, mask, .. } = self.spec;
        let (k_cache, v_cache) = (self.caches[0].values(), self.caches[1].values());
        let attention = Attention {
            heads,
            kv_heads,
            k_dim,
            v_dim,
            block_size,
            k_cache: &k_cache,
            v_cache: &v_cache,
            mask,
            sinks: self.sinks.as_deref(),
            scale: f64::from(self.scale()),
        };
        let all = self.q.values();
        let rows = all.chunks(self.q.dims[1]);
        let q: Vec<f64> = rows.flat_map(|row| row[..heads * k_dim].to_vec()).collect();
        let out = attention.attend(&q, &self.steps[step].attention_sequences());
        let wants = out.into_iter().map(|value| value.map_or(Want::Any, Want::Near));
        vec![("out", Expect::Elements(wants.collect()))]
    }
}

impl ByRow for HostAttention {
    const OUTPUTS: &'static [&'static str] = &["out"];

    fn rows(&self) -> usize {
        self.steps[0].rows()
    }

    fn of_rows(&self, rows: &[usize]) -> Self {
        let steps = vec![self.steps[0].of_single_rows(rows)];
        HostAttention { q: self.q.of_rows(rows), steps, ..self.clone() }
    }
}

fn specs(dtype: DType) -> Vec<AttentionSpec> {
    let base = |sequences: &[(usize, usize)]| AttentionSpec {
        sequences: sequences.to_vec(),
        padding: 0,
        heads: 4,
        kv_heads: 2,
        k_dim: 16,
        v_dim: 16,
        block_size: 16,
        mask: Mask::Causal,
        sinks: false,
        dtype,
    };
    let heads_of = |dim, spec: AttentionSpec| AttentionSpec { k_dim: dim, v_dim: dim, ..spec };
    let decode = [(0, 1), (14, 1), (15, 1), (16, 1), (40, 1)];
    let mixed = [(31, 1), (0, 17), (13, 5), (3, 1)];
    let mut specs = vec![
        AttentionSpec { heads: 1, kv_heads: 1, ..base(&[(0, 1)]) },
        AttentionSpec { sinks: true, ..base(&[(0, 1)]) },
        base(&decode),
        AttentionSpec { sinks: true, padding: 3, ..base(&decode) },
        AttentionSpec { heads: 5, kv_heads: 5, ..base(&mixed) },
        AttentionSpec { heads: 8, kv_heads: 1, padding: 8, ..base(&mixed) },
        AttentionSpec {
            heads: 64,
            kv_heads: 8,
            sinks: true,
            ..heads_of(64, base(&[(37, 1), (2, 3)]))
        },
        AttentionSpec { sinks: true, ..heads_of(64, base(&mixed)) },
        heads_of(80, base(&mixed)),
        heads_of(128, base(&[(20, 2)])),
        AttentionSpec { sinks: true, ..heads_of(256, base(&mixed)) },
        AttentionSpec { v_dim: 8, ..base(&mixed) },
        AttentionSpec { k_dim: 24, ..base(&mixed) },
        AttentionSpec { block_size: 4, padding: 1, ..base(&mixed) },
        AttentionSpec { block_size: 32, ..base(&mixed) },
        base(&[(0, 70)]),
        base(&[(250, 3), (0, 1)]),
        AttentionSpec { padding: 3, ..base(&[]) },
        heads_of(64, AttentionSpec { padding: 70, sinks: true, ..base(&[]) }),
    ];
    for window in [1, 2, 7, 16, 33] {
        let spec = AttentionSpec { mask: Mask::Window(window), ..base(&mixed) };
        specs.push(AttentionSpec { sinks: window % 2 == 1, padding: 2, ..spec });
    }
    for chunk in [1, 5, 16] {
        specs.push(AttentionSpec { mask: Mask::Chunk(chunk), ..base(&mixed) });
    }
    let window =
        AttentionSpec { mask: Mask::Window(128), sinks: true, ..base(&[(200, 1), (120, 20)]) };
    specs.push(heads_of(64, window));
    // More rows than are split over blocks: tiles of several sequences, some behind a long prefix.
    let many = [(31, 1), (200, 90), (0, 70), (63, 65), (3, 1)];
    let many = AttentionSpec { heads: 16, padding: 2, sinks: true, ..base(&many) };
    let masked = |mask| AttentionSpec { mask, ..many.clone() };
    specs.extend([
        heads_of(64, many.clone()),
        heads_of(64, masked(Mask::Window(128))),
        heads_of(64, masked(Mask::Window(7))),
        heads_of(128, masked(Mask::Causal)),
        heads_of(128, masked(Mask::Chunk(24))),
        heads_of(64, AttentionSpec { block_size: 4, heads: 10, ..many.clone() }),
        AttentionSpec { v_dim: 40, k_dim: 56, heads: 3, kv_heads: 3, ..many.clone() },
        // Heads whose rows begin anywhere.
        heads_of(33, base(&mixed)),
        AttentionSpec { v_dim: 65, k_dim: 97, heads: 6, kv_heads: 2, ..many.clone() },
        heads_of(96, AttentionSpec { heads: 6, ..many.clone() }),
        heads_of(256, AttentionSpec { heads: 4, ..many.clone() }),
        heads_of(64, AttentionSpec { heads: 200, kv_heads: 1, ..base(&[(40, 66)]) }),
    ]);
    // The longest contexts: a token's, and a chunk of more rows than are split. f16 adds nothing to bf16 there, nor
    // to a token in f32 a chunk.
    let longest = |before, rows| {
        let spec = AttentionSpec { kv_heads: 1, block_size: 64, ..base(&[(before, rows)]) };
        heads_of(64, AttentionSpec { sinks: true, ..spec })
    };
    if dtype != DType::F16 {
        specs.push(AttentionSpec { heads: 8, ..longest((1 << 17) - 1, 1) });
    }
    if dtype == DType::BF16 {
        specs.push(AttentionSpec { heads: 1, ..longest((1 << 17) - 72, 72) });
    }
    specs
}

/// All cases.
pub fn cases<B: Backend>(caps: &Caps) -> Vec<Case<B>> {
    let specs = caps.dtypes.iter().flat_map(|&dtype| specs(dtype));
    let make = |spec: AttentionSpec| {
        case(spec.name(), move |rng, caps| HostAttention::random(rng, caps, spec.clone()))
    };
    specs.map(make).collect()
}
