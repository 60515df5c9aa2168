//! Cases of `kv_write`: rows into a cache that holds something already.

use amphora_hal::ops::KvWrite;
use amphora_hal::{Backend, Bucket, Caps, DType, OpBounds, OpKey, OpKind, PlanLimits, Result};

use crate::compare::Want;
use crate::harness::{Case, Expect, HostOp, Launch, case};
use crate::host::HostTensor;
use crate::oracle::rows;
use crate::rig::Rig;
use crate::rng::Rng;
use crate::step::{Ragged, Step};

#[derive(Debug, Clone, Copy)]
struct Spec {
    rows: &'static [(usize, usize)],
    padding: usize,
    kv_heads: usize,
    k_dim: usize,
    v_dim: usize,
    block_size: usize,
    dtype: DType,
}

/// One call; k and v are columns of one fused tensor.
struct HostKvWrite {
    spec: Spec,
    steps: Vec<Step>,
    kv: HostTensor,
    caches: [HostTensor; 2],
}

/// Columns in front of k, as q is.
const FRONT: usize = 24;

impl HostKvWrite {
    fn random(rng: &mut Rng, caps: &Caps, spec: Spec) -> Self {
        let Spec { kv_heads, k_dim, v_dim, block_size, dtype, .. } = spec;
        let tokens = spec.rows.iter().map(|(_, rows)| rows).sum::<usize>() + spec.padding;
        let sequences = spec.rows.len() + usize::from(spec.padding > 0);
        let bucket = Bucket { tokens, sequences, logit_rows: sequences };
        let limits = PlanLimits {
            sequences,
            tokens,
            blocks_per_sequence: 40usize.div_ceil(block_size),
            block_size,
            kv_blocks: sequences * 40usize.div_ceil(block_size) + 1,
            vocab: 9,
            positions: 40,
            slots: 0,
            tile_rows: caps.tile_rows,
            edits: 0,
        };
        let mut step = |sequences| Step::random(rng, &Ragged { sequences, bucket, limits });
        let steps = vec![step(spec.rows.to_vec()), step(vec![(7, 1)])];
        let mut random = |dims: &[usize]| {
            HostTensor::real(dims, dtype, &rng.normals(dims.iter().product(), 1.0, dtype))
        };
        let cache = |dim| [limits.kv_blocks, block_size, kv_heads, dim];
        HostKvWrite {
            spec,
            steps,
            kv: random(&[tokens, FRONT + kv_heads * (k_dim + v_dim)]),
            caches: [random(&cache(k_dim)), random(&cache(v_dim))],
        }
    }
}

impl HostOp for HostKvWrite {
    fn keys(&self) -> Vec<OpKey> {
        vec![OpKey::new(OpKind::KvWrite, self.spec.dtype).head_dim(self.spec.k_dim)]
    }

    fn bounds(&self) -> Vec<OpBounds> {
        let Spec { kv_heads, k_dim, .. } = self.spec;
        let tokens = self.kv.dims[0];
        let op = Some(OpKind::KvWrite);
        vec![OpBounds { op, tokens, k: k_dim, n: kv_heads, ..OpBounds::default() }]
    }

    fn steps(&self) -> &[Step] {
        &self.steps
    }

    fn place<B: Backend>(&self, rig: &mut Rig<B>) -> Result<Launch<B>> {
        let Spec { kv_heads, k_dim, v_dim, .. } = self.spec;
        let kv = rig.tensor("kv", &self.kv)?;
        let k = kv.narrow(1, FRONT, kv_heads * k_dim)?.split_last(k_dim)?;
        let v = kv.narrow(1, FRONT + kv_heads * k_dim, kv_heads * v_dim)?.split_last(v_dim)?;
        let mut k_cache = rig.tensor("k_cache", &self.caches[0])?;
        let mut v_cache = rig.tensor("v_cache", &self.caches[1])?;
        Ok(Box::new(move |cx, plan| {
            KvWrite { k: &k, v: &v, plan, k_cache: &mut k_cache, v_cache: &mut v_cache }.run(cx)
        }))
    }

    fn expect(&self, step: usize) -> Vec<(&'static str, Expect)> {
        let Spec { kv_heads, k_dim, v_dim, .. } = self.spec;
        let index = self.steps[step].kv_index();
        let values = self.kv.values();
        let part = |start: usize, dim: usize, cache: &HostTensor| {
            let width = kv_heads * dim;
            let new: Vec<f64> = values
                .chunks(self.kv.dims[1])
                .flat_map(|row| row[start..start + width].to_vec())
                .collect();
            let before = cache.values();
            let after = rows::kv_write(&before, &new, &index, width);
            let places: Vec<usize> =
                index.iter().filter_map(|&place| usize::try_from(place).ok()).collect();
            let wants = after.iter().enumerate().map(|(i, &value)| {
                if places.contains(&(i / width)) { Want::Near(value) } else { Want::Same }
            });
            Expect::Elements(wants.collect())
        };
        vec![
            ("k_cache", part(FRONT, k_dim, &self.caches[0])),
            ("v_cache", part(FRONT + kv_heads * k_dim, v_dim, &self.caches[1])),
        ]
    }
}

/// All cases.
pub fn cases<B: Backend>(caps: &Caps) -> Vec<Case<B>> {
    let mut list = Vec::new();
    for &dtype in caps.dtypes {
        let base = Spec {
            rows: &[(0, 1)],
            padding: 0,
            kv_heads: 1,
            k_dim: 16,
            v_dim: 16,
            block_size: 16,
            dtype,
        };
        let ragged: &[(usize, usize)] = &[(31, 1), (0, 17), (14, 4)];
        for spec in [
            base,
            Spec { padding: 7, ..base },
            Spec { rows: ragged, padding: 10, kv_heads: 2, k_dim: 64, v_dim: 64, ..base },
            Spec { rows: ragged, kv_heads: 3, k_dim: 80, v_dim: 80, ..base },
            Spec { rows: ragged, padding: 2, kv_heads: 2, v_dim: 8, ..base },
            Spec { rows: ragged, padding: 1, kv_heads: 2, block_size: 4, ..base },
        ] {
            let Spec { kv_heads, k_dim, v_dim, block_size, padding, .. } = spec;
            let rows: usize = spec.rows.iter().map(|(_, rows)| rows).sum();
            let name = format!(
                "kv_write/{dtype}/t={rows}+{padding},h={kv_heads},d={k_dim}/{v_dim},block={block_size}"
            );
            list.push(case(name, move |rng, caps| HostKvWrite::random(rng, caps, spec)));
        }
    }
    list
}
