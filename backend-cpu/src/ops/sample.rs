//! Drawing tokens, and their log-probabilities.

use amphora_hal::ops::{Logprobs, Sample};
use amphora_hal::{LogitEdit, MOST_BEST, SampleRow};

use super::logits::{
    Scale, Softmax, first, first_n, id_of, keep, keys_mass, logit_of, mass, survey,
};
use crate::memory::RowsMut;
use crate::scratch::piece;
use crate::simd::Level;
use crate::{Cpu, CpuStream};

/// How much of the order a draw looks at first.
const PREFIX: usize = 256;

/// What a logit of a row costs, in multiply-adds: looking for the largest, and drawing.
const GREEDY_COST: usize = 1;
const DRAW_COST: usize = 32;

/// An edited row, and keys, for each thread.
pub(super) fn workspace(vocab: usize, threads: usize) -> usize {
    threads * (piece::<f32>(vocab) + piece::<u64>(vocab))
}

/// A row that draws.
struct Row<'a> {
    logits: &'a [f32],
    params: &'a SampleRow,
    edits: &'a [LogitEdit],
    result: RowsMut<'a, i32>,
}

pub(super) fn sample(device: &Cpu, s: &mut CpuStream, op: Sample<'_, Cpu>) {
    let (access, mut scratch) = device.launch(s);
    let level = device.0.level;
    let slots = access.slice::<i32>(op.plan.sample_slot().tensor());
    let params: &[SampleRow] =
        bytemuck::cast_slice(access.slice::<i32>(op.plan.sampling().tensor()));
    let edits: &[LogitEdit] = bytemuck::cast_slice(access.slice::<i32>(op.plan.edits().tensor()));
    let starts = access.slice::<i32>(op.plan.edit_start().tensor());
    let logits = access.read::<f32>(op.logits);
    let table = access.slice_mut::<i32>(op.table.index().tensor());
    let vocab = logits.width();

    let live = || (0..slots.len()).filter(|&row| slots[row] >= 0);
    let cost = |row: usize| if params[row].temperature == 0.0 { GREEDY_COST } else { DRAW_COST };
    let work: usize = live().map(|row| vocab * cost(row)).sum();
    let parts = device.0.threads.parts(work);
    let mut tasks: Vec<_> = (0..parts)
        .map(|_| (Vec::new(), scratch.take::<f32>(vocab), scratch.take::<u64>(vocab)))
        .collect();
    let mut result = access.write::<i32>(op.result);
    let mut results: Vec<_> = result.reborrow().each_row().into_iter().map(Some).collect();
    for (i, row) in live().enumerate() {
        tasks[i % parts].0.push(Row {
            logits: logits.row(row),
            params: &params[row],
            edits: &edits[starts[row] as usize..starts[row + 1] as usize],
            result: results[row].take().expect("each row is given once"),
        });
    }
    device.0.threads.run(tasks, |(rows, edited, keys)| {
        rows.into_iter().for_each(|row| row.run(level, edited, keys));
    });
    for row in live() {
        table[slots[row] as usize] = result.row(row)[0];
    }
}

impl Row<'_> {
    fn run(mut self, level: Level, edited: &mut [f32], keys: &mut [u64]) {
        let logits = if self.edits.is_empty() {
            self.logits
        } else {
            edited.copy_from_slice(self.logits);
            for of in self.edits {
                let logit = &mut edited[of.token as usize];
                *logit = edit(*logit, of, self.params);
            }
            edited
        };
        let token = draw(level, logits, self.params, keys);
        let logprob = match self.params.logprob {
            0 => 0.0,
            _ => Softmax::of(level, self.logits).log(self.logits[token]),
        };
        self.result.row(0).copy_from_slice(&[token as i32, logprob.to_bits() as i32]);
    }
}

/// The first step of [`Sample`].
fn edit(raw: f32, edit: &LogitEdit, params: &SampleRow) -> f32 {
    let logit = raw + edit.bias;
    if edit.flags & LogitEdit::OCCURS == 0 {
        return logit;
    }
    let logit = if logit > 0.0 { logit / params.repetition } else { logit * params.repetition };
    if edit.output_count == 0 {
        return logit;
    }
    logit - params.presence - params.frequency * edit.output_count as f32
}

fn draw(level: Level, logits: &[f32], params: &SampleRow, keys: &mut [u64]) -> usize {
    let (token, largest) = first(level, logits);
    if params.temperature == 0.0 || largest == f32::NEG_INFINITY {
        return token;
    }
    let seed = u64::from(params.seed_high) << 32 | u64::from(params.seed_low);
    let scale = Scale { largest, temperature: params.temperature };
    let u = f64::from(Sample::<Cpu>::uniform(seed, params.position));
    let draw = Draw { level, params, scale, u };
    let most = match params.top_k as usize {
        0 => logits.len(),
        k => k.min(logits.len()),
    };
    if most > PREFIX && most < logits.len() {
        return draw.whole(logits, keys);
    }
    let front = first_n(logits, PREFIX.min(most), keys);
    let kept = draw.kept(front);
    // Whether nothing behind the kept ones is kept.
    let closed = front.len() == most || kept.len() < front.len();
    let total = if closed {
        kept.iter().map(|&key| f64::from(scale.weight(logit_of(key)))).sum()
    } else {
        mass(level, logits, scale, params.min_p)
    };
    match draw.from(kept, total) {
        Some(token) => token,
        None if closed => kept.last().map_or(token, |&key| id_of(key)),
        None => draw.whole(logits, keys),
    }
}

/// One draw from a row with a logit above −∞.
struct Draw<'a> {
    level: Level,
    params: &'a SampleRow,
    scale: Scale,
    u: f64,
}

impl Draw<'_> {
    /// Whether a token of this weight is kept by min_p, and can be drawn at all.
    fn keeps(&self, weight: f32) -> bool {
        weight > 0.0 && weight >= self.params.min_p
    }

    /// The front of the order that min_p keeps; never nothing, as the first weighs 1.
    fn kept<'k>(&self, keys: &'k [u64]) -> &'k [u64] {
        &keys[..keys.partition_point(|&key| self.keeps(self.scale.weight(logit_of(key))))]
    }

    /// The token drawn, of tokens whose whole has the mass `total`; `None` if these do not reach
    /// that far, be it by rounding.
    fn from(&self, kept: &[u64], total: f64) -> Option<usize> {
        let mass = match self.params.top_p {
            p if p < 1.0 => self.reach(kept, |mass| mass >= f64::from(p) * total)?.1,
            _ => total,
        };
        self.reach(kept, |running| running > self.u * mass).map(|(token, _)| token)
    }

    /// The first token up to which the mass is enough, and that mass.
    fn reach(&self, kept: &[u64], enough: impl Fn(f64) -> bool) -> Option<(usize, f64)> {
        let mut mass = 0.0;
        for &key in kept {
            mass += f64::from(self.scale.weight(logit_of(key)));
            if enough(mass) {
                return Some((id_of(key), mass));
            }
        }
        None
    }

    /// The token drawn from all that is kept, by halves of the order instead of all of it.
    fn whole(&self, logits: &[f32], keys: &mut [u64]) -> usize {
        let len = keep(self.level, logits, self.scale, self.params.min_p, keys);
        let mut kept = &mut keys[..len];
        let most = self.params.top_k as usize;
        if most > 0 && most < len {
            kept.select_nth_unstable(most - 1);
            kept = &mut kept[..most];
        }
        let mut mass = self.mass(kept);
        if self.params.top_p < 1.0 {
            let reach = f64::from(self.params.top_p) * mass;
            let at = self.halve(kept, |mass| mass >= reach);
            kept = &mut kept[..=at];
            mass = self.mass(kept);
        }
        let at = self.halve(kept, |running| running > self.u * mass);
        id_of(kept[at])
    }

    fn mass(&self, keys: &[u64]) -> f64 {
        keys_mass(self.level, keys, self.scale)
    }

    /// The place in the order of the first token up to which the mass is enough, the last if rounding
    /// leaves even that below; `kept` is some token's, and becomes such that no key in front of the
    /// place comes behind it.
    fn halve(&self, kept: &mut [u64], enough: impl Fn(f64) -> bool) -> usize {
        let (mut start, mut end, mut front) = (0, kept.len(), 0.0);
        while end - start > PREFIX {
            let middle = (end - start) / 2;
            kept[start..end].select_nth_unstable(middle);
            let left = self.mass(&kept[start..start + middle]);
            if enough(front + left) {
                end = start + middle;
            } else {
                (start, front) = (start + middle, front + left);
            }
        }
        kept[start..end].sort_unstable();
        for (at, &key) in (start..end).zip(&kept[start..end]) {
            front += f64::from(self.scale.weight(logit_of(key)));
            if enough(front) {
                return at;
            }
        }
        end - 1
    }
}

/// What a logit costs a row that asks, in multiply-adds.
const SURVEY_COST: usize = 16;

pub(super) fn logprobs(device: &Cpu, s: &mut CpuStream, op: Logprobs<'_, Cpu>) {
    let (access, _) = device.launch(s);
    let slots = access.slice::<i32>(op.plan.sample_slot().tensor());
    let targets = access.slice::<i32>(op.plan.logprob_target().tensor());
    let bests = access.slice::<i32>(op.plan.logprob_best().tensor());
    let table = access.slice::<i32>(op.table.index().tensor());
    let logits = access.read::<f32>(op.logits);
    let asking = bests.iter().filter(|&&best| best >= 0).count();
    let parts = device.0.threads.parts(asking * logits.width() * SURVEY_COST);
    let mut tasks: Vec<Vec<_>> = Vec::new();
    tasks.resize_with(parts, Vec::new);
    let rows = access.write::<i32>(op.out).each_row().into_iter().enumerate();
    let asking = rows.filter(|(row, _)| bests[*row] >= 0);
    for (i, (row, out)) in asking.enumerate() {
        // −1 stands in rows that draw alone, which have an entry in the token table.
        let target = match targets[row] {
            -1 => table[slots[row] as usize],
            given => given,
        };
        tasks[i % parts].push((logits.row(row), target as usize, bests[row] as usize, out));
    }
    let level = device.0.level;
    device.0.threads.run(tasks, |rows| {
        for (row, target, best, mut out) in rows {
            let mut keys = [0; MOST_BEST];
            let found = survey(level, row, target, &mut keys[..best]);
            let bits = |logit: f32| found.softmax.log(logit).to_bits() as i32;
            let (of_target, of_best) = out.row(0).split_at_mut(3);
            of_target.copy_from_slice(&[target as i32, bits(row[target]), found.rank as i32]);
            for (to, &key) in of_best.chunks_exact_mut(2).zip(&keys[..found.found]) {
                to.copy_from_slice(&[id_of(key) as i32, bits(logit_of(key))]);
            }
        }
    });
}
