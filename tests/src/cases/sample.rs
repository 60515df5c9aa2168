//! Cases of `sample`: each draw exactly, and their shares over many positions.

use amphora_hal::ops::{RESULT_WORDS, Sample};
use amphora_hal::{
    Backend, Bucket, Caps, DType, OpBounds, OpKey, OpKind, PlanLimits, Result, SampleParams,
};

use crate::compare::Want;
use crate::harness::{ByRow, Case, Expect, Failure, HostOp, Launch, case, output};
use crate::host::HostTensor;
use crate::oracle::sample::{Draw, kept, logprob, pick, uniform};
use crate::rig::Rig;
use crate::rng::Rng;
use crate::step::{Step, StepSequence};

/// A distance in f64 below which f32 may draw the neighbour; such draws are made again.
const MARGIN: f64 = 1e-5;

/// Positions of a sequence; one block holds them all, since nothing here reads the cache.
const POSITIONS: usize = 1 << 16;

/// How tokens are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The most likely.
    Greedy,
    /// Equal logits: the lower id wins, and comes first where k are kept.
    Ties,
    /// Of the whole softmax.
    Temperature,
    /// Of the k most likely.
    TopK,
    /// Of the most likely by share.
    TopP,
    /// By k, then by share.
    Both,
    /// Every way in one batch, some sequences not sampling.
    Mixed,
}

/// Sizes and variants of a call.
#[derive(Debug, Clone, Copy)]
pub struct SampleSpec {
    /// How tokens are drawn.
    pub kind: Kind,
    /// Sequences.
    pub sequences: usize,
    /// Sequences of the bucket beyond them.
    pub padding: usize,
    /// Token ids.
    pub vocab: usize,
}

/// One call.
#[derive(Debug, Clone)]
pub struct HostSample {
    steps: Vec<Step>,
    logits: HostTensor,
    table: Vec<i32>,
}

fn draw_of(params: &SampleParams) -> Draw {
    Draw {
        temperature: f64::from(params.temperature),
        top_k: params.top_k as usize,
        top_p: f64::from(params.top_p),
    }
}

/// The oracle's token, and how far the draw is from any other.
fn drawn(logits: &[f64], params: &SampleParams, position: usize) -> (usize, f64) {
    let (kept, margin) = kept(logits, draw_of(params));
    let (token, border) = pick(&kept, uniform(params.seed, position as u32));
    (token, margin.min(border))
}

fn random_params(rng: &mut Rng, kind: Kind) -> SampleParams {
    let kind = match kind {
        Kind::Mixed => {
            rng.pick(&[Kind::Greedy, Kind::Temperature, Kind::TopK, Kind::TopP, Kind::Both])
        }
        other => other,
    };
    let hot = rng.pick(&[0.3f32, 0.7, 1.0, 1.7]);
    let top_k = rng.pick(&[1u32, 2, 5, 40, 100_000]);
    let top_p = rng.pick(&[0.1f32, 0.5, 0.9, 0.999]);
    let (temperature, top_k, top_p) = match kind {
        Kind::Greedy | Kind::Mixed => (0.0, top_k, top_p),
        Kind::Ties => (rng.pick(&[0.0, 1.0]), rng.pick(&[0, 2, 3]), 1.0),
        Kind::Temperature => (hot, 0, 1.0),
        Kind::TopK => (hot, top_k, 1.0),
        Kind::TopP => (hot, 0, top_p),
        Kind::Both => (hot, top_k, top_p),
    };
    let (seed, logprob) = (rng.bits(), rng.below(2) == 0);
    SampleParams { temperature, top_k, top_p, seed, logprob }
}

/// Bounds of a step that only samples.
fn limits(bucket: Bucket, vocab: usize) -> PlanLimits {
    PlanLimits {
        sequences: bucket.sequences + 3,
        tokens: bucket.tokens,
        blocks_per_sequence: 1,
        block_size: POSITIONS,
        kv_blocks: 1,
        vocab,
        positions: POSITIONS,
        slots: 0,
        tile_rows: 1,
    }
}

fn sequence(number: usize, position: usize, sample: Option<SampleParams>) -> StepSequence {
    StepSequence {
        number,
        slot: None,
        first: position - 1,
        prompt: None,
        blocks: vec![0],
        sample,
        all_logits: false,
    }
}

impl HostSample {
    /// Random operands.
    pub fn random(rng: &mut Rng, spec: SampleSpec) -> Self {
        let SampleSpec { kind, sequences, padding, vocab } = spec;
        let total = sequences + padding;
        let bucket = Bucket { tokens: total, sequences: total, logit_rows: total + 2.min(total) };
        let limits = limits(bucket, vocab);
        let mut values = rng.normals(bucket.logit_rows * vocab, 2.0, DType::F32);
        if kind == Kind::Ties {
            values.iter_mut().for_each(|v| *v = (*v / 2.0).round());
        }
        let mut step = |sequences: usize| {
            let numbers = rng.permutation(limits.sequences);
            let mut row = 0;
            let of = |number: usize| {
                if kind == Kind::Mixed && rng.below(4) == 0 {
                    return sequence(number, 1, None);
                }
                let logits = &values[row * vocab..(row + 1) * vocab];
                row += 1;
                loop {
                    let params = random_params(rng, kind);
                    let position = 1 + rng.below(POSITIONS - 1);
                    if drawn(logits, &params, position).1 > MARGIN {
                        return sequence(number, position, Some(params));
                    }
                }
            };
            let sequences = numbers.into_iter().take(sequences).map(of).collect();
            Step { limits, bucket, sequences }
        };
        let steps = vec![step(sequences), step(sequences.div_ceil(2))];
        HostSample {
            steps,
            logits: HostTensor::real(&[bucket.logit_rows, vocab], DType::F32, &values),
            table: (0..limits.sequences + limits.tokens).map(|_| rng.below(vocab) as i32).collect(),
        }
    }
}

impl HostOp for HostSample {
    fn keys(&self) -> Vec<OpKey> {
        vec![OpKey::new(OpKind::Sample, DType::F32)]
    }

    fn bounds(&self) -> Vec<OpBounds> {
        let (tokens, k) = (self.steps[0].bucket.sequences, self.logits.dims[1]);
        vec![OpBounds { op: Some(OpKind::Sample), tokens, k, ..OpBounds::default() }]
    }

    fn steps(&self) -> &[Step] {
        &self.steps
    }

    fn bytes(&self) -> usize {
        (1 << 17) + 2 * self.logits.bytes.len()
    }

    fn place<B: Backend>(&self, rig: &mut Rig<B>) -> Result<Launch<B>> {
        let logits = rig.tensor("logits", &self.logits)?;
        let mut table = rig.token_table(&self.table, &self.steps[0].limits)?;
        let dims = [self.steps[0].bucket.sequences, RESULT_WORDS];
        let mut result = rig.poisoned("result", &dims, DType::I32)?;
        Ok(Box::new(move |cx, plan| {
            Sample { logits: &logits, plan, table: &mut table, result: &mut result }.run(cx)
        }))
    }

    fn expect(&self, step: usize) -> Vec<(&'static str, Expect)> {
        let step = &self.steps[step];
        let values = self.logits.values();
        let mut table = vec![Want::Same; self.table.len()];
        let mut result = Vec::new();
        let mut rows = values.chunks(self.logits.dims[1]);
        for sequence in &step.sequences {
            let Some(params) = &sequence.sample else { continue };
            let logits = rows.next().expect("a row for each that samples");
            let (token, _) = drawn(logits, params, sequence.first + 1);
            table[sequence.number] = Want::Int(token as i32);
            result.push(Want::Int(token as i32));
            result.push(match params.logprob {
                true => Want::Bits(logprob(logits, token)),
                false => Want::Int(0),
            });
        }
        result.resize(step.bucket.sequences * RESULT_WORDS, Want::Same);
        vec![("table", Expect::Elements(table)), ("result", Expect::Elements(result))]
    }
}

/// A row is a sequence that samples.
impl ByRow for HostSample {
    const OUTPUTS: &'static [&'static str] = &["result"];

    fn rows(&self) -> usize {
        self.steps[0].sequences.iter().filter(|sequence| sequence.sample.is_some()).count()
    }

    fn of_rows(&self, rows: &[usize]) -> Self {
        let all = &self.steps[0];
        let sampling: Vec<_> = all.sequences.iter().filter(|s| s.sample.is_some()).collect();
        let bucket = Bucket { tokens: rows.len(), sequences: rows.len(), logit_rows: rows.len() };
        let sequences = rows.iter().map(|&row| sampling[row].clone()).collect();
        let logits = self.logits.of_rows(rows);
        HostSample {
            steps: vec![Step { bucket, sequences, limits: all.limits }],
            logits,
            ..self.clone()
        }
    }
}

/// Four thousand draws at as many positions fall on each token as often as its share says, within
/// four deviations. Seeds are fixed: a bound in deviations fails now and then by right.
fn shares<B: Backend>(device: &B, _seed: u64) -> std::result::Result<(), Failure> {
    const SEQUENCES: usize = 250;
    const ROUNDS: usize = 16;
    let logits = [1.0, -0.5, 0.25, 2.0, 0.0, -3.0, 1.5];
    let params = SampleParams { temperature: 1.3, top_k: 6, top_p: 0.95, seed: 77, logprob: false };
    let bucket = Bucket { tokens: SEQUENCES, sequences: SEQUENCES, logit_rows: SEQUENCES };
    let limits = limits(bucket, logits.len());
    let mut counts = vec![0usize; logits.len()];
    for round in 0..ROUNDS {
        let of = |i: usize| sequence(i, 1 + round * SEQUENCES + i, Some(params));
        let op = HostSample {
            steps: vec![Step { limits, bucket, sequences: (0..SEQUENCES).map(of).collect() }],
            logits: HostTensor::real(
                &[SEQUENCES, logits.len()],
                DType::F32,
                &logits.repeat(SEQUENCES),
            ),
            table: vec![0; limits.sequences + limits.tokens],
        };
        let result = output(device, &op, "result")?.to_ints();
        result.chunks(RESULT_WORDS).for_each(|row| counts[row[0] as usize] += 1);
    }
    let draws = (SEQUENCES * ROUNDS) as f64;
    let (kept, _) = kept(&logits, draw_of(&params));
    for (token, &count) in counts.iter().enumerate() {
        let share = kept.iter().find(|(t, _)| *t == token).map_or(0.0, |(_, share)| *share);
        let deviation = (draws * share * (1.0 - share)).sqrt();
        if (count as f64 - draws * share).abs() > 4.0 * deviation {
            let what = format!("token {token} was drawn {count} times, its share is {share:.4}");
            return Err(Failure::Wrong(what));
        }
    }
    Ok(())
}

/// All cases.
pub fn cases<B: Backend>(_: &Caps) -> Vec<Case<B>> {
    let spec = |kind, sequences, padding, vocab| SampleSpec { kind, sequences, padding, vocab };
    let specs = [
        spec(Kind::Greedy, 1, 0, 1),
        spec(Kind::Greedy, 1, 0, 50),
        spec(Kind::Greedy, 7, 3, 1001),
        spec(Kind::Ties, 9, 0, 33),
        spec(Kind::Temperature, 5, 0, 2),
        spec(Kind::Temperature, 9, 7, 50),
        spec(Kind::TopK, 9, 0, 70),
        spec(Kind::TopP, 9, 0, 70),
        spec(Kind::Both, 16, 0, 300),
        spec(Kind::Mixed, 33, 31, 257),
        spec(Kind::Mixed, 4, 0, 5000),
    ];
    let make = |spec: SampleSpec| {
        let SampleSpec { kind, sequences, padding, vocab } = spec;
        let name = format!("sample/f32/{kind:?},s={sequences}+{padding},v={vocab}").to_lowercase();
        case(name, move |rng, _| HostSample::random(rng, spec))
    };
    let mut list: Vec<Case<B>> = specs.into_iter().map(make).collect();
    list.push(Case { name: "sample/f32/shares".to_owned(), run: Box::new(shares) });
    list
}
