//! Cases of `sample`: each draw exactly, and their shares over many positions.

use amphora_hal::ops::{RESULT_WORDS, Sample};
use amphora_hal::{
    Backend, Bucket, Caps, DType, LogitEdit, OpBounds, OpKey, OpKind, PlanLimits, Result,
    SampleParams,
};

use crate::compare::Want;
use crate::harness::{ByRow, Case, Expect, Failure, HostOp, Launch, case, output};
use crate::host::HostTensor;
use crate::oracle::sample::{
    Draw, Edit, Penalties, by_logit, edited, kept, logprob, pick, uniform,
};
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
    /// Of those with a share of the largest's probability, then by all else.
    MinP,
    /// The most likely of edited logits.
    Edits,
    /// By all there is, of edited logits.
    All,
    /// Logits that are infinite, no number, or a zero of either sign.
    Special,
    /// Every way in one batch, some sequences not sampling.
    Mixed,
}

/// Edits of one sequence.
const MOST_EDITS: usize = 200;

/// Rows of special values: all of them, few of them, or none above −∞.
fn special(rng: &mut Rng, values: &mut [f64], vocab: usize) {
    let low = [f64::NAN, f64::NEG_INFINITY];
    let zeros = [0.0, -0.0, -1.0];
    for (row, logits) in values.chunks_mut(vocab).enumerate() {
        for logit in logits {
            *logit = match row % 4 {
                0 => rng.pick(&low),
                1 => f64::NAN,
                2 if rng.below(5) == 0 => f64::INFINITY,
                _ if rng.below(3) == 0 => rng.pick(&low),
                _ => rng.pick(&zeros),
            };
        }
    }
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
        min_p: f64::from(params.min_p),
    }
}

/// The oracle's token, and how far the draw is from any other.
fn drawn(raw: &[f64], sequence: &StepSequence) -> (usize, f64) {
    let params = sequence.sample.expect("the sequence draws");
    let of = |edit: &LogitEdit| Edit {
        token: edit.token as usize,
        occurs: edit.flags == LogitEdit::OCCURS,
        count: edit.output_count as usize,
        bias: f64::from(edit.bias),
    };
    let edits: Vec<Edit> = sequence.edits.iter().map(of).collect();
    let penalties = Penalties {
        repetition: f64::from(params.repetition),
        presence: f64::from(params.presence),
        frequency: f64::from(params.frequency),
    };
    let logits = edited(raw, &edits, penalties);
    let (kept, margin) = kept(&logits, draw_of(&params));
    let (token, border) = pick(&kept, uniform(params.seed, sequence.first as u32 + 1));
    let margin = margin.min(border);
    if edits.is_empty() {
        return (token, margin);
    }
    // An edited logit is rounded, so it may change places with one that is near: at the border of
    // top-k, or where the draw falls.
    let order = by_logit(&logits);
    let apart = |at: usize| match order.get(at + 1) {
        Some(&next) => (logits[order[at]] - logits[next]).abs(),
        None => f64::MAX,
    };
    let at = order.iter().position(|&of| of == token).expect("the token is one of all");
    let borders = [Some(at), at.checked_sub(1), (params.top_k as usize).checked_sub(1)];
    (token, borders.into_iter().flatten().map(apart).fold(margin, f64::min))
}

/// Edits of about an eighth of the vocabulary, at most `most`; some ban a token.
fn random_edits(rng: &mut Rng, vocab: usize, most: usize) -> Vec<LogitEdit> {
    let mut tokens = rng.permutation(vocab);
    tokens.truncate(vocab.div_ceil(8).min(most));
    tokens.sort_unstable();
    let mut of = |token: usize| {
        let output_count = rng.pick(&[0, 0, 1, 2, 7]);
        let occurs = output_count > 0 || rng.below(2) == 0;
        let bias = rng.pick(&[0.0, 0.0, 1.25, -3.5, 20.0, f32::NEG_INFINITY]);
        LogitEdit { token: token as u32, output_count, flags: u32::from(occurs), bias }
    };
    tokens.into_iter().map(&mut of).collect()
}

fn random_params(rng: &mut Rng, kind: Kind) -> SampleParams {
    let hot = rng.pick(&[0.3f32, 0.7, 1.0, 1.7]);
    let top_k = rng.pick(&[1u32, 2, 5, 40, 700, 100_000]);
    let top_p = rng.pick(&[0.1f32, 0.5, 0.9, 0.999]);
    let min_p = rng.pick(&[0.01f32, 0.1, 0.5, 1.0]);
    let (temperature, top_k, top_p, min_p) = match kind {
        Kind::Greedy | Kind::Edits | Kind::Mixed => (0.0, top_k, top_p, min_p),
        Kind::Ties => (rng.pick(&[0.0, 1.0]), rng.pick(&[0, 2, 3]), 1.0, 0.0),
        Kind::Special => (rng.pick(&[0.0, 1.0]), rng.pick(&[0, 2]), rng.pick(&[0.7, 1.0]), 0.0),
        Kind::Temperature => (hot, 0, 1.0, 0.0),
        Kind::TopK => (hot, top_k, 1.0, 0.0),
        Kind::TopP => (hot, 0, top_p, 0.0),
        Kind::Both => (hot, top_k, top_p, 0.0),
        Kind::MinP => (hot, rng.pick(&[0, 3, 40]), rng.pick(&[0.5, 1.0]), min_p),
        Kind::All => (hot, top_k, top_p, rng.pick(&[0.0, 0.01])),
    };
    SampleParams {
        temperature,
        top_k,
        top_p,
        min_p,
        repetition: rng.pick(&[1.0, 1.3, 0.8]),
        presence: rng.pick(&[0.0, 0.6, -0.4]),
        frequency: rng.pick(&[0.0, 0.25]),
        seed: rng.bits(),
        logprob: rng.below(2) == 0,
    }
}

/// A sequence that draws from `raw` so that f32 must draw what the oracle does.
fn random_draw(rng: &mut Rng, kind: Kind, raw: &[f64], most_edits: usize) -> StepSequence {
    let of_mixed = [
        Kind::Greedy,
        Kind::Temperature,
        Kind::TopK,
        Kind::TopP,
        Kind::Both,
        Kind::MinP,
        Kind::Edits,
        Kind::All,
    ];
    loop {
        let kind = if kind == Kind::Mixed { rng.pick(&of_mixed) } else { kind };
        let params = random_params(rng, kind);
        let mut sequence = sequence(0, 1 + rng.below(POSITIONS - 1), Some(params));
        if matches!(kind, Kind::Edits | Kind::All) {
            sequence.edits = random_edits(rng, raw.len(), most_edits);
        }
        if drawn(raw, &sequence).1 > MARGIN {
            return sequence;
        }
    }
}

/// Bounds of a step that only samples.
fn limits(bucket: Bucket, vocab: usize, edits: usize) -> PlanLimits {
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
        edits,
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
        ..StepSequence::default()
    }
}

impl HostSample {
    /// Random operands.
    pub fn random(rng: &mut Rng, spec: SampleSpec) -> Self {
        let SampleSpec { kind, sequences, padding, vocab } = spec;
        let total = sequences + padding;
        let bucket = Bucket { tokens: total, sequences: total, logit_rows: total + 2.min(total) };
        let most_edits = vocab.div_ceil(8).min(MOST_EDITS);
        let limits = limits(bucket, vocab, total * most_edits);
        let mut values = rng.normals(bucket.logit_rows * vocab, 2.0, DType::F32);
        match kind {
            Kind::Ties => values.iter_mut().for_each(|v| *v = (*v / 2.0).round()),
            Kind::Special => special(rng, &mut values, vocab),
            _ => {}
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
                StepSequence { number, ..random_draw(rng, kind, logits, most_edits) }
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
            let (token, _) = drawn(logits, sequence);
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
    let params = SampleParams {
        temperature: 1.3,
        top_k: 6,
        top_p: 0.95,
        min_p: 0.02,
        seed: 77,
        ..SampleParams::GREEDY
    };
    let bucket = Bucket { tokens: SEQUENCES, sequences: SEQUENCES, logit_rows: SEQUENCES };
    let limits = limits(bucket, logits.len(), 0);
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

/// Edits that say nothing (tokens that do not occur, no bias; tokens that occur, penalties that are off)
/// change no draw and no log-probability.
fn idle_edits<B: Backend>(device: &B, seed: u64) -> std::result::Result<(), Failure> {
    let mut rng = Rng::new(seed, "idle_edits");
    let spec = SampleSpec { kind: Kind::Mixed, sequences: 24, padding: 0, vocab: 400 };
    let mut plain = HostSample::random(&mut rng, spec);
    let sequences = &mut plain.steps[0].sequences;
    sequences.iter_mut().for_each(|sequence| sequence.edits.clear());
    let mut edited = plain.clone();
    for sequence in &mut edited.steps[0].sequences {
        let Some(params) = &mut sequence.sample else { continue };
        (params.repetition, params.presence, params.frequency) = (1.0, 0.0, 0.0);
        sequence.edits = random_edits(&mut rng, spec.vocab, MOST_EDITS);
        sequence.edits.iter_mut().for_each(|edit| edit.bias = 0.0);
    }
    let (want, got) = (output(device, &plain, "result")?, output(device, &edited, "result")?);
    if want != got {
        return Err(Failure::Wrong("an edit that says nothing changed a result".to_owned()));
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
        spec(Kind::MinP, 16, 0, 300),
        spec(Kind::Edits, 9, 2, 100),
        spec(Kind::All, 16, 0, 300),
        spec(Kind::Special, 12, 1, 3),
        spec(Kind::Special, 8, 0, 40),
        spec(Kind::Mixed, 33, 31, 257),
        spec(Kind::Mixed, 200, 0, 600),
        spec(Kind::Mixed, 4, 0, 5000),
        spec(Kind::Both, 6, 0, 5000),
        spec(Kind::Temperature, 3, 0, 20_000),
        spec(Kind::Mixed, 6, 1, 20_001),
        spec(Kind::Special, 4, 0, 17_000),
    ];
    let make = |spec: SampleSpec| {
        let SampleSpec { kind, sequences, padding, vocab } = spec;
        let name = format!("sample/f32/{kind:?},s={sequences}+{padding},v={vocab}").to_lowercase();
        case(name, move |rng, _| HostSample::random(rng, spec))
    };
    let mut list: Vec<Case<B>> = specs.into_iter().map(make).collect();
    list.push(Case { name: "sample/f32/shares".to_owned(), run: Box::new(shares) });
    list.push(Case { name: "sample/f32/idle_edits".to_owned(), run: Box::new(idle_edits) });
    list
}
