//! A row of logits: its largest, its softmax, and the first of its order without sorting the rest.
//!
//! Tokens are ordered by (logit descending, id ascending); a logit that is no number counts as −∞, and
//! −0 equals +0. A *key* is a token with its logit as one integer, ascending in that order.

/// Logits looked at together: small enough for the first cache, large enough to skip many at once.
const BLOCK: usize = 512;

/// Lanes that a maximum is kept in.
const LANES: usize = 16;

/// What a logit counts as.
pub(super) fn number(logit: f32) -> f32 {
    // The sum turns −0 into +0.
    if logit.is_nan() { f32::NEG_INFINITY } else { logit + 0.0 }
}

fn key(logit: f32, id: usize) -> u64 {
    let bits = number(logit).to_bits();
    let descending = if bits >> 31 == 1 { bits } else { !(bits | 1 << 31) };
    u64::from(descending) << 32 | id as u64
}

/// The token of a key.
pub(super) fn id_of(key: u64) -> usize {
    (key & u64::from(u32::MAX)) as usize
}

/// The logit of a key.
pub(super) fn logit_of(key: u64) -> f32 {
    let descending = (key >> 32) as u32;
    f32::from_bits(if descending >> 31 == 1 { descending } else { !descending & !(1 << 31) })
}

/// −∞ if there is no number.
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

/// The first token of the order, and its logit; token 0 where none is above −∞. One pass.
pub(super) fn first(row: &[f32]) -> (usize, f32) {
    let (mut most, mut start) = (f32::NEG_INFINITY, 0);
    for (block, logits) in row.chunks(BLOCK).enumerate() {
        let here = largest(logits);
        if here > most {
            (most, start) = (here, block * BLOCK);
        }
    }
    let within = row[start..].iter().position(|&logit| logit == most);
    (start + within.filter(|_| most > f32::NEG_INFINITY).unwrap_or(0), most)
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

    pub(super) fn of(row: &[f32]) -> Self {
        let mut softmax = Softmax::EMPTY;
        row.chunks(BLOCK).for_each(|block| softmax.add(block, largest(block)));
        softmax
    }

    /// Adds a block whose largest is known.
    fn add(&mut self, block: &[f32], largest: f32) {
        if largest > self.largest {
            self.total *= weight(self.largest, largest, 1.0);
            self.largest = largest;
        }
        self.total += block.iter().map(|&logit| weight(logit, self.largest, 1.0)).sum::<f64>();
    }

    /// The log-probability of a token with this logit.
    pub(super) fn log(&self, logit: f32) -> f32 {
        let logit = number(logit);
        let above = if logit == self.largest { 0.0 } else { f64::from(logit - self.largest) };
        (above - self.total.ln()) as f32
    }
}

/// What a logit weighs in a softmax, relative to the largest's 1.
pub(super) fn weight(logit: f32, largest: f32, temperature: f32) -> f64 {
    let logit = number(logit);
    if logit == largest { 1.0 } else { f64::from(((logit - largest) / temperature).exp()) }
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
pub(super) fn survey(row: &[f32], target: usize, best: &mut [u64]) -> Survey {
    let (mut softmax, mut before, mut found) = (Softmax::EMPTY, 0, 0);
    let wanted = number(row[target]);
    for (block, logits) in row.chunks(BLOCK).enumerate() {
        let (most, start) = (largest(logits), block * BLOCK);
        softmax.add(logits, most);
        before += logits.iter().filter(|&&logit| number(logit) > wanted).count();
        let lower = &logits[..target.saturating_sub(start).min(logits.len())];
        before += lower.iter().filter(|&&logit| number(logit) == wanted).count();
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
    Survey { softmax, rank: before + 1, found }
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
            assert_eq!(first(&row).0, if above { wanted[0] } else { 0 });
            for n in [1, 2, 16, 17, 600, row.len()] {
                let mut keys = vec![0; row.len()];
                let got: Vec<usize> =
                    first_n(&row, n, &mut keys).iter().map(|key| id_of(*key)).collect();
                assert_eq!(got, wanted[..n.min(row.len())], "{n} of {}", row.len());
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
                    let Survey { softmax, rank, found } = survey(&row, target, &mut best);
                    assert_eq!(wanted[rank - 1], target);
                    assert_eq!(found, n.min(row.len()));
                    let ids: Vec<usize> = best[..found].iter().map(|key| id_of(*key)).collect();
                    assert_eq!(ids, wanted[..found]);
                    let again = Softmax::of(&row).log(row[target]);
                    assert_eq!(softmax.log(row[target]).to_bits(), again.to_bits());
                }
            }
        }
    }
}
