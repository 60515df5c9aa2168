//! Cases of `copy_blocks`: some blocks of both caches, the rest untouched.

use amphora_hal::ops::CopyBlocks;
use amphora_hal::{
    Backend, BlockCopy, Bucket, Caps, DType, OpBounds, OpKey, OpKind, PlanLimits, Result,
};

use crate::compare::Want;
use crate::harness::{Case, Expect, HostOp, Launch, case};
use crate::host::HostTensor;
use crate::oracle::rows;
use crate::rig::Rig;
use crate::rng::Rng;
use crate::step::{Step, StepSequence};

#[derive(Debug, Clone, Copy)]
struct Spec {
    /// Copies of the first step; the second has one less.
    copies: usize,
    /// Sequences without any.
    others: usize,
    block_size: usize,
    kv_heads: usize,
    k_dim: usize,
    v_dim: usize,
    dtype: DType,
}

/// One call.
struct HostCopyBlocks {
    steps: Vec<Step>,
    caches: [HostTensor; 2],
    spec: Spec,
}

impl HostCopyBlocks {
    fn random(rng: &mut Rng, caps: &Caps, spec: Spec) -> Self {
        let sequences = spec.copies + spec.others;
        let bucket = Bucket { tokens: sequences, sequences, logit_rows: sequences };
        let limits = PlanLimits {
            sequences,
            tokens: sequences,
            blocks_per_sequence: 1,
            block_size: spec.block_size,
            kv_blocks: 2 * sequences + 1,
            vocab: 9,
            positions: spec.block_size,
            slots: 0,
            tile_rows: caps.tile_rows,
            edits: 0,
        };
        let mut step = |copies: usize| {
            let blocks = rng.permutation(limits.kv_blocks);
            // Sources repeat, as those of answers that fork from one prompt do.
            let sources = &blocks[sequences..];
            let of = |number: usize| {
                let to = blocks[number] as u32;
                let from = sources[number / 2 % sources.len()] as u32;
                StepSequence {
                    number,
                    prompt: Some(vec![0]),
                    blocks: vec![to],
                    copy: (number < copies).then_some(BlockCopy { from, to }),
                    ..StepSequence::default()
                }
            };
            Step { limits, bucket, sequences: (0..sequences).map(of).collect() }
        };
        let steps = vec![step(spec.copies), step(spec.copies.saturating_sub(1))];
        let Spec { block_size, kv_heads, dtype, .. } = spec;
        let caches = [spec.k_dim, spec.v_dim].map(|dim| {
            let dims = [limits.kv_blocks, block_size, kv_heads, dim];
            HostTensor::real(&dims, dtype, &rng.normals(dims.iter().product(), 1.0, dtype))
        });
        HostCopyBlocks { steps, caches, spec }
    }
}

impl HostOp for HostCopyBlocks {
    fn keys(&self) -> Vec<OpKey> {
        vec![OpKey::new(OpKind::CopyBlocks, self.spec.dtype)]
    }

    fn bounds(&self) -> Vec<OpBounds> {
        let Spec { kv_heads: n, k_dim: k, .. } = self.spec;
        let tokens = self.steps[0].bucket.tokens;
        vec![OpBounds { op: Some(OpKind::CopyBlocks), tokens, k, n, ..OpBounds::default() }]
    }

    fn steps(&self) -> &[Step] {
        &self.steps
    }

    fn place<B: Backend>(&self, rig: &mut Rig<B>) -> Result<Launch<B>> {
        let mut k_cache = rig.tensor("k_cache", &self.caches[0])?;
        let mut v_cache = rig.tensor("v_cache", &self.caches[1])?;
        Ok(Box::new(move |cx, plan| {
            CopyBlocks { plan, k_cache: &mut k_cache, v_cache: &mut v_cache }.run(cx)
        }))
    }

    fn expect(&self, step: usize) -> Vec<(&'static str, Expect)> {
        let copies = self.steps[step].sequences.iter().filter_map(|sequence| sequence.copy);
        let pairs: Vec<(usize, usize)> =
            copies.map(|copy| (copy.from as usize, copy.to as usize)).collect();
        let after = |cache: &HostTensor| {
            let width = cache.dims[1..].iter().product();
            let values = rows::copy_blocks(&cache.values(), &pairs, width);
            let written = |i: usize| pairs.iter().any(|(_, to)| *to == i / width);
            let wants = values.iter().enumerate().map(|(i, &value)| match written(i) {
                true => Want::Near(value),
                false => Want::Same,
            });
            Expect::Elements(wants.collect())
        };
        vec![("k_cache", after(&self.caches[0])), ("v_cache", after(&self.caches[1]))]
    }
}

/// All cases.
pub fn cases<B: Backend>(caps: &Caps) -> Vec<Case<B>> {
    let mut list = Vec::new();
    for &dtype in caps.dtypes {
        let base =
            Spec { copies: 1, others: 0, block_size: 16, kv_heads: 2, k_dim: 64, v_dim: 64, dtype };
        for spec in [
            base,
            Spec { copies: 3, others: 2, ..base },
            Spec { copies: 5, others: 1, kv_heads: 1, v_dim: 24, ..base },
            // Blocks of an odd number of bytes for wide words.
            Spec { copies: 3, block_size: 1, kv_heads: 1, k_dim: 3, v_dim: 5, ..base },
            Spec { copies: 0, others: 3, ..base },
        ] {
            let Spec { copies, others, block_size, kv_heads, k_dim, v_dim, .. } = spec;
            let name = format!(
                "copy_blocks/{dtype}/c={copies}+{others},h={kv_heads},d={k_dim}/{v_dim},block={block_size}"
            );
            list.push(case(name, move |rng, caps| HostCopyBlocks::random(rng, caps, spec)));
        }
    }
    list
}
