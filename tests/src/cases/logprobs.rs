//! Cases of `logprobs`: rows of prompts with targets of the plan, rows that drew, rows that ask nothing.

use amphora_hal::ops::{LOGPROB_WORDS, Logprobs};
use amphora_hal::{
    Backend, Bucket, Caps, DType, MOST_BEST, OpBounds, OpKey, OpKind, PlanLimits, Result,
    SampleParams,
};

use crate::compare::Want;
use crate::harness::{Case, Expect, HostOp, Launch, case};
use crate::host::HostTensor;
use crate::oracle::sample::{by_logit, logprob};
use crate::rig::Rig;
use crate::rng::Rng;
use crate::step::{Step, StepLogits, StepSequence};

/// What the logits are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Values {
    /// Normal.
    Random,
    /// Few distinct ones.
    Ties,
    /// Infinite, no number, and zeros of either sign among them.
    Special,
}

#[derive(Debug, Clone, Copy)]
struct Spec {
    values: Values,
    /// Rows of each sequence: more than one is a prompt's chunk.
    rows: &'static [usize],
    /// Rows of logits of the bucket beyond them.
    padding: usize,
    vocab: usize,
}

/// One call.
struct HostLogprobs {
    steps: Vec<Step>,
    logits: HostTensor,
    table: Vec<i32>,
}

impl HostLogprobs {
    fn random(rng: &mut Rng, spec: Spec) -> Self {
        let Spec { vocab, .. } = spec;
        let tokens: usize = spec.rows.iter().sum();
        let sequences = spec.rows.len();
        let logit_rows = sequences + tokens;
        let bucket = Bucket { tokens: tokens + spec.padding, sequences, logit_rows };
        let limits = PlanLimits {
            sequences: sequences + 2,
            tokens: bucket.tokens,
            blocks_per_sequence: 1,
            block_size: 64,
            kv_blocks: 1,
            vocab,
            positions: 64,
            slots: 0,
            tile_rows: 1,
            edits: 0,
        };
        let mut values = rng.normals(logit_rows * vocab, 2.5, DType::F32);
        for value in &mut values {
            match spec.values {
                Values::Random => {}
                Values::Ties => *value = (*value / 2.0).round(),
                Values::Special => {
                    *value = rng.pick(&[0.0, -0.0, 1.0, f64::NAN, f64::NEG_INFINITY, *value]);
                }
            }
        }
        if spec.values == Values::Special {
            // A row with nothing above −∞, and one whose softmax is all on two tokens.
            values[..vocab].fill(f64::NAN);
            if logit_rows > 1 {
                values[vocab] = f64::INFINITY;
                values[2 * vocab - 1] = f64::INFINITY;
            }
        }
        let mut step = |rows: &[usize]| {
            let numbers = rng.permutation(limits.sequences);
            let of = |(number, &rows): (usize, &usize)| {
                let asking = rows - rng.below(2).min(rows - 1);
                let mut ids = |n| (0..n).map(|_| rng.below(vocab) as u32).collect::<Vec<_>>();
                let (prompt, targets) = (ids(rows), ids(asking));
                let best = |rng: &mut Rng| rng.pick(&[0, 1, 5, MOST_BEST]);
                let sample = (rng.below(4) > 0).then_some(SampleParams::GREEDY);
                StepSequence {
                    number,
                    prompt: Some(prompt),
                    blocks: vec![0],
                    sample,
                    logprobs: (sample.is_some() && rng.below(4) > 0).then(|| best(rng)),
                    logits: match rng.below(4) {
                        0 => StepLogits::None,
                        1 => StepLogits::All,
                        _ => StepLogits::Targets(targets, best(rng)),
                    },
                    ..StepSequence::default()
                }
            };
            let sequences = numbers.into_iter().zip(rows).map(of).collect();
            Step { limits, bucket, sequences }
        };
        let steps = vec![step(spec.rows), step(&spec.rows[..1])];
        HostLogprobs {
            steps,
            logits: HostTensor::real(&[logit_rows, vocab], DType::F32, &values),
            table: (0..limits.sequences + limits.tokens).map(|_| rng.below(vocab) as i32).collect(),
        }
    }
}

impl HostOp for HostLogprobs {
    fn keys(&self) -> Vec<OpKey> {
        vec![OpKey::new(OpKind::Logprobs, DType::F32)]
    }

    fn bounds(&self) -> Vec<OpBounds> {
        let (tokens, k) = (self.logits.dims[0], self.logits.dims[1]);
        vec![OpBounds { op: Some(OpKind::Logprobs), tokens, k, ..OpBounds::default() }]
    }

    fn steps(&self) -> &[Step] {
        &self.steps
    }

    fn bytes(&self) -> usize {
        (1 << 17) + 2 * self.logits.bytes.len()
    }

    fn place<B: Backend>(&self, rig: &mut Rig<B>) -> Result<Launch<B>> {
        let logits = rig.tensor("logits", &self.logits)?;
        let table = rig.token_table(&self.table, &self.steps[0].limits)?;
        let dims = [self.logits.dims[0], LOGPROB_WORDS];
        let mut out = rig.poisoned("out", &dims, DType::I32)?;
        Ok(Box::new(move |cx, plan| {
            Logprobs { logits: &logits, plan, table: &table, out: &mut out }.run(cx)
        }))
    }

    fn expect(&self, step: usize) -> Vec<(&'static str, Expect)> {
        let step = &self.steps[step];
        // Rows that draw come first, then those asked for beside them: (target, how many best).
        let (mut asked, mut beside) = (Vec::new(), Vec::new());
        for sequence in &step.sequences {
            if sequence.sample.is_some() {
                let drawn = self.table[sequence.number] as usize;
                asked.push(sequence.logprobs.map(|best| (drawn, best)));
            }
            match &sequence.logits {
                StepLogits::None => {}
                StepLogits::All => beside.extend(vec![None; sequence.rows()]),
                StepLogits::Targets(tokens, best) => {
                    beside.extend(tokens.iter().map(|&token| Some((token as usize, *best))));
                }
            }
        }
        asked.extend(beside);
        asked.resize(step.bucket.logit_rows, None);
        let values = self.logits.values();
        let mut out = Vec::new();
        for (row, asked) in values.chunks(self.logits.dims[1]).zip(asked) {
            let start = out.len();
            if let Some((target, best)) = asked {
                let order = by_logit(row);
                let rank = order.iter().position(|&id| id == target).expect("one of all") + 1;
                out.push(Want::Int(target as i32));
                out.push(Want::Bits(logprob(row, target)));
                out.push(Want::Int(rank as i32));
                for &id in order.iter().take(best) {
                    out.push(Want::Int(id as i32));
                    out.push(Want::Bits(logprob(row, id)));
                }
            }
            out.resize(start + LOGPROB_WORDS, Want::Same);
        }
        vec![("out", Expect::Elements(out))]
    }
}

/// All cases.
pub fn cases<B: Backend>(_: &Caps) -> Vec<Case<B>> {
    let spec = |values, rows, padding, vocab| Spec { values, rows, padding, vocab };
    let specs = [
        spec(Values::Random, &[1], 0, 1),
        spec(Values::Random, &[1, 1, 1], 0, 50),
        spec(Values::Random, &[1, 7, 1, 3], 5, 300),
        spec(Values::Ties, &[2, 1, 5], 0, 33),
        spec(Values::Special, &[1, 4, 1], 2, 7),
        spec(Values::Special, &[1, 4, 1], 0, 90),
        spec(Values::Random, &[30, 1, 1, 1], 3, 1025),
        spec(Values::Random, &[1, 3], 0, 20_001),
        spec(Values::Ties, &[1, 2], 0, 17_000),
    ];
    let make = |spec: Spec| {
        let Spec { values, rows, padding, vocab } = spec;
        let (total, sequences) = (rows.iter().sum::<usize>(), rows.len());
        let name = format!("logprobs/f32/{values:?},s={sequences},t={total}+{padding},v={vocab}");
        case(name.to_lowercase(), move |rng, _| HostLogprobs::random(rng, spec))
    };
    specs.into_iter().map(make).collect()
}
