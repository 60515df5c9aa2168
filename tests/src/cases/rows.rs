//! Cases of the operators that move rows: `write_tokens`, `embed`, `gather_rows`.

use amphora_hal::ops::{Embed, GatherRows, WriteTokens};
use amphora_hal::{
    Backend, Bucket, Caps, DType, OpBounds, OpKey, OpKind, PlanLimits, Result, SampleParams,
};

use super::{columns, near};
use crate::compare::Want;
use crate::harness::{Case, Expect, HostOp, Launch, case};
use crate::host::HostTensor;
use crate::oracle::rows;
use crate::rig::Rig;
use crate::rng::Rng;
use crate::step::{BLOCK_SIZE, Ragged, Step, StepLogits};

/// Sizes that the three share: rows and sequences of a bucket, and sequences in it.
struct Sizes {
    rows: &'static [usize],
    bucket: usize,
    width: usize,
}

static SIZES: [Sizes; 5] = [
    Sizes { rows: &[1], bucket: 1, width: 1 },
    Sizes { rows: &[1], bucket: 8, width: 7 },
    Sizes { rows: &[3, 1, 4], bucket: 8, width: 64 },
    Sizes { rows: &[1, 1, 17, 2], bucket: 32, width: 33 },
    Sizes { rows: &[70], bucket: 128, width: 80 },
];

impl Sizes {
    fn name(&self) -> String {
        let rows: usize = self.rows.iter().sum();
        format!("t={rows}of{},s={},w={}", self.bucket, self.rows.len(), self.width)
    }

    fn bucket(&self) -> Bucket {
        let sequences = self.rows.len() + 2;
        let tokens = self.bucket.max(sequences);
        Bucket { tokens, sequences, logit_rows: sequences + tokens / 2 }
    }

    /// Two steps of one bucket.
    fn steps(&self, rng: &mut Rng, caps: &Caps) -> Vec<Step> {
        let bucket = self.bucket();
        let limits = PlanLimits {
            sequences: bucket.sequences + 1,
            tokens: bucket.tokens + 3,
            blocks_per_sequence: 6,
            block_size: BLOCK_SIZE,
            kv_blocks: 6 * bucket.sequences,
            vocab: 50,
            positions: 96,
            slots: 2,
            tile_rows: caps.tile_rows,
            edits: 0,
        };
        let shapes: [Vec<(usize, usize)>; 2] =
            [self.rows.iter().map(|&rows| (3, rows)).collect(), vec![(0, 1)]];
        let steps = shapes.into_iter().map(|sequences| {
            let mut step = Step::random(rng, &Ragged { sequences, bucket, limits });
            for (i, sequence) in step.sequences.iter_mut().enumerate() {
                sequence.sample = (i % 2 == 0).then_some(SampleParams::GREEDY);
                if i == 0 && sequence.rows() <= bucket.tokens / 2 {
                    sequence.logits = StepLogits::All;
                }
            }
            step
        });
        steps.collect()
    }
}

/// A token table that holds tokens already.
fn table(rng: &mut Rng, limits: &PlanLimits) -> Vec<i32> {
    (0..limits.sequences + limits.tokens).map(|_| rng.below(limits.vocab) as i32).collect()
}

fn bounds(op: OpKind, tokens: usize, k: usize) -> Vec<OpBounds> {
    vec![OpBounds { op: Some(op), tokens, k, n: k, ..OpBounds::default() }]
}

/// Prompt tokens into the token table.
struct HostWriteTokens {
    steps: Vec<Step>,
    table: Vec<i32>,
    dtype: DType,
}

impl HostOp for HostWriteTokens {
    fn keys(&self) -> Vec<OpKey> {
        vec![OpKey::new(OpKind::WriteTokens, self.dtype)]
    }

    fn bounds(&self) -> Vec<OpBounds> {
        bounds(OpKind::WriteTokens, self.steps[0].bucket.tokens, 0)
    }

    fn steps(&self) -> &[Step] {
        &self.steps
    }

    fn place<B: Backend>(&self, rig: &mut Rig<B>) -> Result<Launch<B>> {
        let mut table = rig.token_table(&self.table, &self.steps[0].limits)?;
        Ok(Box::new(move |cx, plan| {
            WriteTokens { prompt: plan.prompt(), table: &mut table }.run(cx)
        }))
    }

    fn expect(&self, step: usize) -> Vec<(&'static str, Expect)> {
        let step = &self.steps[step];
        let out = rows::write_tokens(&self.table, step.limits.sequences, &step.prompt());
        vec![("table", Expect::Elements(out.into_iter().map(Want::Int).collect()))]
    }
}

/// Token ids to embeddings, into columns of a wider tensor.
struct HostEmbed {
    steps: Vec<Step>,
    table: Vec<i32>,
    weight: HostTensor,
    dtype: DType,
}

impl HostEmbed {
    fn pitch(&self) -> usize {
        self.weight.dims[1] + 8
    }
}

impl HostOp for HostEmbed {
    fn keys(&self) -> Vec<OpKey> {
        vec![OpKey::new(OpKind::Embed, self.dtype)]
    }

    fn bounds(&self) -> Vec<OpBounds> {
        bounds(OpKind::Embed, self.steps[0].bucket.tokens, self.weight.dims[1])
    }

    fn steps(&self) -> &[Step] {
        &self.steps
    }

    fn place<B: Backend>(&self, rig: &mut Rig<B>) -> Result<Launch<B>> {
        let table = rig.token_table(&self.table, &self.steps[0].limits)?;
        let weight = rig.tensor("weight", &self.weight)?;
        let dims = [self.steps[0].bucket.tokens, self.pitch()];
        let mut out = rig.poisoned("out", &dims, self.dtype)?.narrow(1, 8, self.weight.dims[1])?;
        Ok(Box::new(move |cx, plan| {
            Embed { index: plan.token_index(), table: &table, weight: &weight, out: &mut out }
                .run(cx)
        }))
    }

    fn expect(&self, step: usize) -> Vec<(&'static str, Expect)> {
        let hidden = self.weight.dims[1];
        let index = self.steps[step].token_index();
        let out = near(&rows::embed(&index, &self.table, &self.weight.values(), hidden));
        vec![("out", Expect::Elements(columns(&out, hidden, 8, self.pitch())))]
    }
}

/// Rows that go through the head, out of a wider tensor.
struct HostGatherRows {
    steps: Vec<Step>,
    x: HostTensor,
    width: usize,
}

impl HostOp for HostGatherRows {
    fn keys(&self) -> Vec<OpKey> {
        vec![OpKey::new(OpKind::GatherRows, self.x.dtype)]
    }

    fn bounds(&self) -> Vec<OpBounds> {
        bounds(OpKind::GatherRows, self.steps[0].bucket.tokens, self.width)
    }

    fn steps(&self) -> &[Step] {
        &self.steps
    }

    fn place<B: Backend>(&self, rig: &mut Rig<B>) -> Result<Launch<B>> {
        let x = rig.tensor("x", &self.x)?.narrow(1, 0, self.width)?;
        let dims = [self.steps[0].bucket.logit_rows, self.width];
        let mut out = rig.poisoned("out", &dims, self.x.dtype)?;
        Ok(Box::new(move |cx, plan| {
            GatherRows { x: &x, rows: plan.logit_row(), out: &mut out }.run(cx)
        }))
    }

    fn expect(&self, step: usize) -> Vec<(&'static str, Expect)> {
        let pitch = self.x.dims[1];
        let rows = rows::gather_rows(&self.x.values(), &self.steps[step].logit_rows(), pitch);
        let front = rows.chunks(pitch).flat_map(|row| near(&row[..self.width]));
        vec![("out", Expect::Elements(front.collect()))]
    }
}

/// All cases of the three.
pub fn cases<B: Backend>(caps: &Caps) -> Vec<Case<B>> {
    let mut list = Vec::new();
    for sizes in &SIZES {
        for &dtype in caps.dtypes {
            list.push(case(format!("write_tokens/{dtype}/{}", sizes.name()), move |rng, caps| {
                let steps = sizes.steps(rng, caps);
                HostWriteTokens { table: table(rng, &steps[0].limits), steps, dtype }
            }));
            list.push(case(format!("embed/{dtype}/{}", sizes.name()), move |rng, caps| {
                let steps = sizes.steps(rng, caps);
                let vocab = steps[0].limits.vocab;
                let values = rng.normals(vocab * sizes.width, 1.0, dtype);
                HostEmbed {
                    table: table(rng, &steps[0].limits),
                    weight: HostTensor::real(&[vocab, sizes.width], dtype, &values),
                    steps,
                    dtype,
                }
            }));
            list.push(case(format!("gather_rows/{dtype}/{}", sizes.name()), move |rng, caps| {
                let steps = sizes.steps(rng, caps);
                let dims = [steps[0].bucket.tokens, sizes.width + 3];
                let values = rng.normals(dims[0] * dims[1], 1.0, dtype);
                HostGatherRows {
                    x: HostTensor::real(&dims, dtype, &values),
                    width: sizes.width,
                    steps,
                }
            }));
        }
    }
    list
}
