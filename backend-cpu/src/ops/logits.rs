//! A row of logits: its largest, its softmax, and the first of its order without sorting the rest.
//!
//! Tokens are ordered by (logit descending, id ascending); a logit that is no number counts as −∞, and
//! −0 equals +0. A *key* is a token with its logit as one integer, ascending in that order.

use crate::simd::{Level, widest};

/// Logits looked at together: small enough for the first cache, large enough to skip many at once.
const BLOCK: usize = 512;

/// Lanes that a maximum is kept in.
const LANES: usize = 16;

/// What a logit counts as.
#[inline(always)]
pub(super) fn number(logit: f32) -> f32 {
    // The sum turns −0 into +0.
    if logit.is_nan() { f32::NEG_INFINITY } else { logit + 0.0 }
}

/// The key of a token.
#[inline(always)]
pub(super) fn key(logit: f32, id: usize) -> u64 {
    let bits = number(logit).to_bits();
    let descending = if bits >> 31 == 1 { bits } else { !(bits | 1 << 31) };
    u64::from(descending) << 32 | id as u64
}

/// The token of a key.
pub(super) fn id_of(key: u64) -> usize {
    (key & u64::from(u32::MAX)) as usize
}

/// The logit of a key.
#[inline(always)]
pub(super) fn logit_of(key: u64) -> f32 {
    let descending = (key >> 32) as u32;
    f32::from_bits(if descending >> 31 == 1 { descending } else { !descending & !(1 << 31) })
}

/// −∞ if there is no number.
#[inline(always)]
fn largest(block: &[f32]) -> f32 {
    // A comparison with what is no number is false, so it never gets in.
    let larger = |most: f32, logit: f32| if logit > most { logit } else { most };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = block.chunks_exact(LANES);
    let rest =
        chunks.remainder().iter().fold(f32::NEG_INFINITY, |most, &logit| larger(most, logit));
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(most, &logit)| *most = larger(*most, logit));
    }
    lanes.into_iter().fold(rest, larger)
}

/// e^x for x up to 0, within three units in the last place; 0 below −87, where it leaves the normal
/// numbers. Without a branch or a call, so that lanes can do it side by side.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2; e^r = 1 + r + r²·q(r), where q interpolates at the five Chebyshev
/// nodes of that range (relative error 1.1e-8).
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Adding it leaves an integer in the last bits of the mantissa: rounding to nearest.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, the first of few bits, so that n times it is exact.
    const LN_2: [f32; 2] = [355.0 / 512.0, -2.121_944_4e-4];
    let clamped = if x > -87.0 { x } else { -87.0 };
    let n = clamped * std::f32::consts::LOG2_E + ROUND;
    let power = f32::from_bits((n.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    let n = n - ROUND;
    let r = clamped - n * LN_2[0] - n * LN_2[1];
    let q = (1.392_618_4e-3 * r + 8.363_179e-3) * r + 4.166_655_6e-2;
    let q = (q * r + 1.666_657_6e-1) * r + 0.5;
    let e = q * (r * r) + r + 1.0;
    if x > -87.0 { e * power } else { 0.0 }
}

/// What the tokens of a row weigh together that weigh at least `least` each.
pub(super) fn mass(level: Level, row: &[f32], scale: Scale, least: f32) -> f64 {
    widest(level, || row_mass(row, scale, least))
}

#[inline(always)]
fn row_mass(row: &[f32], scale: Scale, least: f32) -> f64 {
    row.chunks(BLOCK).map(|block| block_mass(block, scale, least)).sum()
}

/// What weights are relative to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scale {
    /// The largest logit.
    pub(super) largest: f32,
    /// Divides the distance from it.
    pub(super) temperature: f32,
}

impl Scale {
    /// What a logit weighs in a softmax, relative to the largest's 1.
    #[inline(always)]
    pub(super) fn weight(self, logit: f32) -> f32 {
        let logit = number(logit);
        let lower = exp((logit - self.largest) / self.temperature);
        if logit == self.largest { 1.0 } else { lower }
    }
}

/// What the tokens of `keys` weigh together.
pub(super) fn keys_mass(level: Level, keys: &[u64], scale: Scale) -> f64 {
    widest(level, || keys_mass_with(keys, scale))
}

#[inline(always)]
fn keys_mass_with(keys: &[u64], scale: Scale) -> f64 {
    keys.chunks(BLOCK).map(|keys| sum(keys, |&key| scale.weight(logit_of(key)))).sum()
}

/// The keys of the tokens that weigh something, and at least `least`, in the front of `keys`, which is as
/// long as the row; gives how many.
pub(super) fn keep(level: Level, row: &[f32], scale: Scale, least: f32, keys: &mut [u64]) -> usize {
    widest(level, || keep_with(row, scale, least, keys))
}

#[inline(always)]
fn keep_with(row: &[f32], scale: Scale, least: f32, keys: &mut [u64]) -> usize {
    let mut weights = [0.0; BLOCK];
    let mut len = 0;
    for (block, logits) in row.chunks(BLOCK).enumerate() {
        weights.iter_mut().zip(logits).for_each(|(to, &logit)| *to = scale.weight(logit));
        for (i, (&logit, &weight)) in logits.iter().zip(&weights).enumerate() {
            // Written in any case and counted if kept: there is no branch to foretell.
            keys[len] = key(logit, block * BLOCK + i);
            len += usize::from(weight > 0.0 && weight >= least);
        }
    }
    len
}

#[inline(always)]
fn block_mass(block: &[f32], scale: Scale, least: f32) -> f64 {
    sum(block, |&logit| {
        let weight = scale.weight(logit);
        if weight >= least { weight } else { 0.0 }
    })
}

/// Sums of f32 in lanes, and of these in f64: for blocks.
#[inline(always)]
fn sum<T>(block: &[T], weight: impl Fn(&T) -> f32) -> f64 {
    let mut lanes = [0.0f32; LANES];
    let chunks = block.chunks_exact(LANES);
    let rest: f64 = chunks.remainder().iter().map(|of| f64::from(weight(of))).sum();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(sum, of)| *sum += weight(of));
    }
    lanes.into_iter().map(f64::from).sum::<f64>() + rest
}

/// The first token of the order, and its logit; token 0 where none is above −∞. One pass.
pub(super) fn first(level: Level, row: &[f32]) -> (usize, f32) {
    let (most, start) = widest(level, || first_block(row));
    let within = row[start..].iter().position(|&logit| logit == most);
    (start + within.filter(|_| most > f32::NEG_INFINITY).unwrap_or(0), most)
}

/// The largest of a row, and where the first block that has it starts.
#[inline(always)]
fn first_block(row: &[f32]) -> (f32, usize) {
    let (mut most, mut start) = (f32::NEG_INFINITY, 0);
    for (block, logits) in row.chunks(BLOCK).enumerate() {
        let here = largest(logits);
        if here > most {
            (most, start) = (here, block * BLOCK);
        }
    }
    (most, start)
}

/// The keys of the first `n` tokens, in order, in the front of `keys`, which is as long as the row.
pub(super) fn first_n<'k>(row: &[f32], n: usize, keys: &'k mut [u64]) -> &'k [u64] {
    let n = n.min(row.len());
    if n == 0 {
        return &[];
    }
    // Candidates gather behind the best n so far, and are cut back when the room is used up.
    let room = (2 * n).max(n + BLOCK).min(row.len());
    let (mut len, mut worst) = (0, None);
    for (block, logits) in row.chunks(BLOCK).enumerate() {
        if worst.is_some_and(|worst| largest(logits) < logit_of(worst)) {
            continue;
        }
        if len + logits.len() > room {
            keys[..len].select_nth_unstable(n - 1);
            (len, worst) = (n, Some(keys[n - 1]));
        }
        for (i, &logit) in logits.iter().enumerate() {
            let key = key(logit, block * BLOCK + i);
            if worst.is_none_or(|worst| key < worst) {
                keys[len] = key;
                len += 1;
            }
        }
    }
    if len > n {
        keys[..len].select_nth_unstable(n - 1);
    }
    keys[..n].sort_unstable();
    &keys[..n]
}

/// The softmax of a row over the whole vocabulary.
#[derive(Debug, Clone, Copy)]
pub(super) struct Softmax {
    largest: f32,
    /// Weights relative to the largest's 1.
    total: f64,
}

impl Softmax {
    const EMPTY: Softmax = Softmax { largest: f32::NEG_INFINITY, total: 0.0 };

    pub(super) fn of(level: Level, row: &[f32]) -> Self {
        widest(level, || Softmax::EMPTY.over(row))
    }

    #[inline(always)]
    fn over(mut self, row: &[f32]) -> Self {
        row.chunks(BLOCK).for_each(|block| self.add(block, largest(block)));
        self
    }

    /// Adds a block whose largest is known.
    #[inline(always)]
    fn add(&mut self, block: &[f32], largest: f32) {
        if largest > self.largest {
            self.total *= f64::from(Scale { largest, temperature: 1.0 }.weight(self.largest));
            self.largest = largest;
        }
        self.total += block_mass(block, Scale { largest: self.largest, temperature: 1.0 }, 0.0);
    }

    /// The log-probability of a token with this logit.
    pub(super) fn log(&self, logit: f32) -> f32 {
        let logit = number(logit);
        let above = if logit == self.largest { 0.0 } else { f64::from(logit - self.largest) };
        (above - self.total.ln()) as f32
    }
}

/// What one pass finds about a row.
#[derive(Debug)]
pub(super) struct Survey {
    /// The softmax.
    pub(super) softmax: Softmax,
    /// The target's place in the order, from 1 on.
    pub(super) rank: usize,
    /// Tokens in `best`.
    pub(super) found: usize,
}

/// The softmax of a row, the rank of `target`, and the keys of the first `best.len()` tokens.
pub(super) fn survey(level: Level, row: &[f32], target: usize, best: &mut [u64]) -> Survey {
    widest(level, || look(row, target, best))
}

#[inline(always)]
fn look(row: &[f32], target: usize, best: &mut [u64]) -> Survey {
    let (mut softmax, mut before, mut found) = (Softmax::EMPTY, 0, 0);
    let wanted = number(row[target]);
    for (block, logits) in row.chunks(BLOCK).enumerate() {
        let (most, start) = (largest(logits), block * BLOCK);
        softmax.add(logits, most);
        before += logits.iter().map(|&logit| u32::from(number(logit) > wanted)).sum::<u32>();
        let lower = &logits[..target.saturating_sub(start).min(logits.len())];
        before += lower.iter().map(|&logit| u32::from(number(logit) == wanted)).sum::<u32>();
        let full = found == best.len();
        if best.is_empty() || full && most < logit_of(best[found - 1]) {
            continue;
        }
        for (i, &logit) in logits.iter().enumerate() {
            let key = key(logit, start + i);
            if found < best.len() {
                found += 1;
            } else if key >= best[found - 1] {
                continue;
            }
            // The last place is free, or its key falls out.
            let at = best[..found - 1].partition_point(|&better| better < key);
            best.copy_within(at..found - 1, at + 1);
            best[at] = key;
        }
    }
    Survey { softmax, rank: before as usize + 1, found }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of few distinct values, so that there are ties, with all that is special.
    fn rows() -> Vec<Vec<f32>> {
        let special = [0.0, -0.0, f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.5, -1.5];
        let mut state = 1u64;
        let mut below = |n: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % n
        };
        let mut rows = vec![vec![f32::NAN; 3], vec![f32::NEG_INFINITY; 700], vec![-0.0, 0.0]];
        for len in [1, 2, 15, 16, 17, 511, 512, 513, 3000] {
            rows.push((0..len).map(|_| special[below(special.len())]).collect());
            rows.push((0..len).map(|_| (below(2000) as f32 - 1000.0) / 64.0).collect());
        }
        rows
    }

    fn order(row: &[f32]) -> Vec<usize> {
        let counts = |id: usize| if row[id].is_nan() { f32::NEG_INFINITY } else { row[id] };
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| counts(b).partial_cmp(&counts(a)).expect("numbers"));
        order
    }

    #[test]
    fn the_first_tokens_are_those_of_a_stable_sort() {
        for row in rows() {
            let wanted = order(&row);
            let above = row.iter().any(|logit| *logit > f32::NEG_INFINITY);
            assert_eq!(first(Level::detect(), &row).0, if above { wanted[0] } else { 0 });
            for n in [1, 2, 16, 17, 600, row.len()] {
                let mut keys = vec![0; row.len()];
                let got: Vec<usize> =
                    first_n(&row, n, &mut keys).iter().map(|key| id_of(*key)).collect();
                assert_eq!(got, wanted[..n.min(row.len())], "{n} of {}", row.len());
            }
        }
    }

    #[test]
    fn weights_are_those_of_the_exponential() {
        let worst = (0..870_000).map(|i| {
            let x = i as f32 * -1e-4;
            (f64::from(exp(x)) / f64::from(x).exp() - 1.0).abs()
        });
        assert!(worst.fold(0.0, f64::max) < 3.0 * f64::from(f32::EPSILON));
        assert_eq!((exp(0.0), exp(-88.0), exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
        for level in [Level::Portable, Level::detect()] {
            for row in rows() {
                let scale = Scale { largest: first(level, &row).1, temperature: 0.7 };
                let plain: f64 = row
                    .iter()
                    .map(|&logit| f64::from(scale.weight(logit)))
                    .filter(|weight| *weight >= 0.125)
                    .sum();
                let got = mass(level, &row, scale, 0.125);
                assert!((got - plain).abs() <= 1e-6 * plain, "{got} {plain}");
                assert_eq!(got.to_bits(), mass(Level::Portable, &row, scale, 0.125).to_bits());
                let mut keys = vec![0; row.len()];
                let len = keep(level, &row, scale, 0.125, &mut keys);
                let kept = row.iter().filter(|&&logit| scale.weight(logit) >= 0.125);
                assert_eq!(len, kept.count());
                let again = keys_mass(level, &keys[..len], scale);
                assert!((again - plain).abs() <= 1e-6 * plain, "{again} {plain}");
            }
        }
    }

    #[test]
    fn keys_hold_logits() {
        for logit in [0.0, 1.5, -1.5, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE] {
            assert_eq!((logit_of(key(logit, 7)), id_of(key(logit, 7))), (logit, 7));
        }
        assert_eq!(logit_of(key(f32::NAN, 0)), f32::NEG_INFINITY);
        assert_eq!(key(-0.0, 3), key(0.0, 3));
    }

    #[test]
    fn a_survey_agrees_with_a_sort_and_with_the_softmax() {
        for row in rows() {
            let wanted = order(&row);
            for target in [0, row.len() / 2, row.len() - 1] {
                for n in [0, 1, 20] {
                    let mut best = vec![0; n];
                    let Survey { softmax, rank, found } =
                        survey(Level::detect(), &row, target, &mut best);
                    assert_eq!(wanted[rank - 1], target);
                    assert_eq!(found, n.min(row.len()));
                    let ids: Vec<usize> = best[..found].iter().map(|key| id_of(*key)).collect();
                    assert_eq!(ids, wanted[..found]);
                    let again = Softmax::of(Level::detect(), &row).log(row[target]);
                    assert_eq!(softmax.log(row[target]).to_bits(), again.to_bits());
                }
            }
        }
    }
}
