//! Cases of `rope`: q and k as columns of one fused tensor, with and without a cache that k and v go to.

use amphora_hal::ops::{KvStore, Rope, RopePairing};
use amphora_hal::{Backend, Caps, DType, OpBounds, OpKey, OpKind, PlanLimits, Result};

use super::near;
use crate::compare::Want;
use crate::harness::{ByRow, Case, Expect, HostOp, Launch, case};
use crate::host::HostTensor;
use crate::oracle::{rope, rows};
use crate::rig::Rig;
use crate::rng::Rng;
use crate::step::{BLOCK_SIZE, Ragged, Step, rows_bucket};

const POSITIONS: usize = 64;

/// Sizes and variants of a call.
#[derive(Debug, Clone, Copy)]
pub struct RopeSpec {
    /// For each sequence (first position, rows).
    pub rows: &'static [(usize, usize)],
    /// Rows of the bucket.
    pub bucket: usize,
    /// Heads of q.
    pub heads: usize,
    /// Heads of k.
    pub kv_heads: usize,
    /// Width of a head.
    pub dim: usize,
    /// Elements that turn.
    pub rotary: usize,
    /// Which elements pair.
    pub pairing: RopePairing,
    /// With a scale of q by position.
    pub q_scale: bool,
    /// With a cache.
    pub stored: bool,
    /// Compute type.
    pub dtype: DType,
}

/// One call; the fused tensor is q, k, then v, which must not change.
#[derive(Debug, Clone)]
pub struct HostRope {
    spec: RopeSpec,
    steps: Vec<Step>,
    qkv: HostTensor,
    table: Vec<f64>,
    q_scale: Option<Vec<f64>>,
    /// Of keys, of values.
    caches: Option<[HostTensor; 2]>,
}

impl HostRope {
    /// Random operands.
    pub fn random(rng: &mut Rng, caps: &Caps, spec: RopeSpec) -> Self {
        let bucket = rows_bucket(spec.bucket);
        let limits = PlanLimits {
            sequences: bucket.sequences,
            tokens: bucket.tokens,
            blocks_per_sequence: POSITIONS / BLOCK_SIZE,
            block_size: BLOCK_SIZE,
            kv_blocks: spec.rows.len() * POSITIONS / BLOCK_SIZE,
            vocab: 9,
            positions: POSITIONS,
            slots: 0,
            tile_rows: caps.tile_rows,
            edits: 0,
        };
        let mut step = |sequences| Step::random(rng, &Ragged { sequences, bucket, limits });
        let steps = vec![step(spec.rows.to_vec()), step(vec![(POSITIONS - 1, 1)])];
        let width = (spec.heads + 2 * spec.kv_heads) * spec.dim;
        let angles = (0..POSITIONS).flat_map(|p| {
            let pairs = spec.rotary / 2;
            let angle = move |i: usize| p as f64 * 100f64.powf(-(i as f64) / pairs as f64);
            let cos = (0..pairs).map(move |i| 1.25 * angle(i).cos());
            cos.chain((0..pairs).map(move |i| 1.25 * angle(i).sin()))
        });
        let cache = [limits.kv_blocks, BLOCK_SIZE, spec.kv_heads, spec.dim];
        let caches = spec.stored.then(|| {
            [(); 2].map(|()| {
                let values = rng.normals(cache.iter().product(), 1.0, spec.dtype);
                HostTensor::real(&cache, spec.dtype, &values)
            })
        });
        HostRope {
            spec,
            caches,
            steps,
            table: angles.map(|v| f64::from(v as f32)).collect(),
            qkv: HostTensor::real(
                &[bucket.tokens, width],
                spec.dtype,
                &rng.normals(bucket.tokens * width, 1.0, spec.dtype),
            ),
            q_scale: spec.q_scale.then(|| rng.normals(POSITIONS, 1.0, DType::F32)),
        }
    }
}

impl HostOp for HostRope {
    fn keys(&self) -> Vec<OpKey> {
        vec![OpKey::new(OpKind::Rope, self.spec.dtype).head_dim(self.spec.dim)]
    }

    fn bounds(&self) -> Vec<OpBounds> {
        let RopeSpec { heads, dim, .. } = self.spec;
        let tokens = self.qkv.dims[0];
        vec![OpBounds { op: Some(OpKind::Rope), tokens, k: dim, n: heads, ..OpBounds::default() }]
    }

    fn steps(&self) -> &[Step] {
        &self.steps
    }

    fn place<B: Backend>(&self, rig: &mut Rig<B>) -> Result<Launch<B>> {
        let RopeSpec { heads, kv_heads, dim, pairing, rotary, .. } = self.spec;
        let qkv = rig.tensor("qkv", &self.qkv)?;
        let mut q = qkv.narrow(1, 0, heads * dim)?.split_last(dim)?;
        let mut k = qkv.narrow(1, heads * dim, kv_heads * dim)?.split_last(dim)?;
        let table = HostTensor::real(&[POSITIONS, rotary], DType::F32, &self.table);
        let table = rig.tensor("table", &table)?;
        let q_scale = match &self.q_scale {
            Some(scale) => {
                Some(rig.tensor("q_scale", &HostTensor::real(&[POSITIONS], DType::F32, scale))?)
            }
            None => None,
        };
        let v = qkv.narrow(1, (heads + kv_heads) * dim, kv_heads * dim)?.split_last(dim)?;
        let mut caches = match &self.caches {
            Some([k, v]) => Some([rig.tensor("k_cache", k)?, rig.tensor("v_cache", v)?]),
            None => None,
        };
        Ok(Box::new(move |cx, plan| {
            let store =
                caches.as_mut().map(|[k_cache, v_cache]| KvStore { v: &v, plan, k_cache, v_cache });
            Rope {
                q: &mut q,
                k: &mut k,
                position: plan.position(),
                table: &table,
                pairing,
                q_scale: q_scale.as_ref(),
                store,
            }
            .run(cx)
        }))
    }

    fn expect(&self, step: usize) -> Vec<(&'static str, Expect)> {
        let RopeSpec { heads, kv_heads, dim, rotary, pairing, .. } = self.spec;
        let position = self.steps[step].positions();
        let values = self.qkv.values();
        let pitch = self.qkv.dims[1];
        let part = |start: usize, heads: usize, scale: Option<&[f64]>| {
            let rows = values.chunks(pitch);
            let x: Vec<f64> =
                rows.flat_map(|row| row[start..start + heads * dim].to_vec()).collect();
            let table = &self.table;
            rope::Rope { dim, heads, rotary, position: &position, table, pairing, scale }.turn(&x)
        };
        let q = near(&part(0, heads, self.q_scale.as_deref()));
        let turned = part(heads * dim, kv_heads, None);
        let k = near(&turned);
        let mut wants = Vec::new();
        for (q, k) in q.chunks(heads * dim).zip(k.chunks(kv_heads * dim)) {
            wants.extend_from_slice(q);
            wants.extend_from_slice(k);
            wants.extend(std::iter::repeat_n(Want::Same, kv_heads * dim));
        }
        let mut expected = vec![("qkv", Expect::Elements(wants))];
        if let Some([k_cache, v_cache]) = &self.caches {
            let width = kv_heads * dim;
            let rows = values.chunks(pitch);
            let v: Vec<f64> = rows.flat_map(|row| row[pitch - width..].to_vec()).collect();
            let index = self.steps[step].kv_index();
            let stored = |new: &[f64], cache: &HostTensor| {
                let after = rows::kv_write(&cache.values(), new, &index, width);
                let written = |i: usize| index.contains(&((i / width) as i32));
                let want = |(i, value): (usize, &f64)| match written(i) {
                    true => near(&[*value])[0],
                    false => Want::Same,
                };
                Expect::Elements(after.iter().enumerate().map(want).collect())
            };
            expected.push(("k_cache", stored(&turned, k_cache)));
            expected.push(("v_cache", stored(&v, v_cache)));
        }
        expected
    }
}

impl ByRow for HostRope {
    const OUTPUTS: &'static [&'static str] = &["qkv"];

    fn rows(&self) -> usize {
        self.steps[0].rows()
    }

    fn of_rows(&self, rows: &[usize]) -> Self {
        let steps = vec![self.steps[0].of_single_rows(rows)];
        HostRope { qkv: self.qkv.of_rows(rows), steps, ..self.clone() }
    }
}

/// All cases.
pub fn cases<B: Backend>(caps: &Caps) -> Vec<Case<B>> {
    let mut list = Vec::new();
    for &dtype in caps.dtypes {
        let base = RopeSpec {
            rows: &[(0, 1)],
            bucket: 1,
            heads: 1,
            kv_heads: 1,
            dim: 16,
            rotary: 16,
            pairing: RopePairing::Half,
            q_scale: false,
            stored: false,
            dtype,
        };
        let ragged: &[(usize, usize)] = &[(60, 1), (0, 5), (17, 1), (3, 9)];
        let specs = [
            base,
            RopeSpec {
                rows: ragged,
                bucket: 16,
                heads: 8,
                kv_heads: 2,
                dim: 64,
                rotary: 64,
                ..base
            },
            RopeSpec { rows: ragged, bucket: 21, heads: 5, dim: 80, rotary: 80, ..base },
            RopeSpec {
                rows: &[(0, 40), (3, 50)],
                bucket: 101,
                heads: 8,
                kv_heads: 2,
                dim: 64,
                rotary: 64,
                q_scale: true,
                ..base
            },
            RopeSpec { rows: &[(3, 50)], bucket: 66, heads: 5, dim: 128, rotary: 128, ..base },
            RopeSpec {
                rows: ragged,
                bucket: 16,
                heads: 4,
                kv_heads: 2,
                dim: 80,
                rotary: 32,
                ..base
            },
            RopeSpec {
                rows: ragged,
                bucket: 16,
                heads: 3,
                pairing: RopePairing::Interleaved,
                ..base
            },
            RopeSpec {
                rows: ragged,
                bucket: 16,
                heads: 3,
                rotary: 6,
                pairing: RopePairing::Interleaved,
                ..base
            },
            RopeSpec {
                rows: ragged,
                bucket: 16,
                heads: 4,
                kv_heads: 2,
                dim: 64,
                rotary: 64,
                q_scale: true,
                ..base
            },
        ];
        let stored = specs.map(|spec| RopeSpec { stored: true, ..spec });
        for spec in specs.into_iter().chain(stored) {
            let RopeSpec { bucket, heads, kv_heads, dim, rotary, pairing, .. } = spec;
            let scale = if spec.q_scale { ",q_scale" } else { "" };
            let stored = if spec.stored { ",stored" } else { "" };
            let name = format!(
                "rope/{dtype}/t={bucket},h={heads}/{kv_heads},d={dim},rotary={rotary},{pairing:?}{scale}{stored}"
            );
            list.push(case(name.to_lowercase(), move |rng, caps| {
                HostRope::random(rng, caps, spec)
            }));
        }
    }
    list
}
