//! Attention's two loops: queries against keys, weights against values.
//!
//! Up to four queries that read the same keys pass together, so that a key's lanes are loaded once for all.
//! A score has 16 partial sums over the dimension, added in one tree; an output adds positions in order. So the
//! bits of a query depend on it and its positions alone.

use super::lanes::{Lanes, Widen};
use super::levels;

/// Most queries of a pass.
pub(crate) const QUERIES: usize = 4;

/// Keys (or values) of one head: the row of `data` at `at[i] · pitch + skip`, `dim` long, is position i's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keys<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) at: &'a [u32],
    pub(crate) pitch: usize,
    pub(crate) skip: usize,
    pub(crate) dim: usize,
}

impl<'a, T> Keys<'a, T> {
    #[inline(always)]
    fn row(&self, at: u32) -> &'a [T] {
        &self.data[at as usize * self.pitch + self.skip..][..self.dim]
    }
}

levels! {
    /// `out[m, i] = scale · q[m] · key i`, for each of up to [`QUERIES`] queries `[queries, dim]`.
    pub(crate) fn scores<V, T: Widen>(
        scale: f32,
        q: &[f32],
        keys: Keys<'_, T>,
        out: &mut [f32],
    ) {
        let count = keys.at.len();
        let queries = out.len() / count.max(1);
        assert!(q.len() == queries * keys.dim && out.len() == queries * count);
        match queries {
            1 => scores_of::<V, T, 1, 16>(scale, q, keys, out),
            2 => scores_of::<V, T, 2, 8>(scale, q, keys, out),
            4 => scores_of::<V, T, 4, 4>(scale, q, keys, out),
            _ => {
                for (q, out) in q.chunks(keys.dim.max(1)).zip(out.chunks_mut(count.max(1))) {
                    scores_of::<V, T, 1, 16>(scale, q, keys, out);
                }
            }
        }
    }
}

/// M queries by N keys in registers; M · N is 16.
#[inline(always)]
fn scores_of<V: Lanes, T: Widen, const M: usize, const N: usize>(
    scale: f32,
    q: &[f32],
    keys: Keys<'_, T>,
    out: &mut [f32],
) {
    let (dim, count) = (keys.dim, keys.at.len());
    let whole = dim - dim % V::LANES;
    for first in (0..count).step_by(N) {
        // Past the end the last key is taken again, and its scores are left.
        let rows: [&[T]; N] =
            std::array::from_fn(|n| keys.row(keys.at[(first + n).min(count - 1)]));
        let mut sums = [V::splat(0.0); 16];
        for i in (0..whole).step_by(V::LANES) {
            // SAFETY: LANES elements are left of each query and each key, all of `dim` elements.
            unsafe {
                let q: [V; M] = std::array::from_fn(|m| V::load_f32(q.as_ptr().add(m * dim + i)));
                for n in 0..N {
                    let key = T::lanes::<V>(rows[n].as_ptr().add(i));
                    for m in 0..M {
                        sums[m * N + n] = q[m].mul_add(key, sums[m * N + n]);
                    }
                }
            }
        }
        let mut sums = V::sums(sums);
        for i in whole..dim {
            for n in 0..N {
                for m in 0..M {
                    sums[m * N + n] += q[m * dim + i] * rows[n][i].wide();
                }
            }
        }
        for (out, sums) in out.chunks_mut(count).zip(sums.chunks(N)) {
            let to = out[first..].iter_mut().take(N);
            to.zip(sums).for_each(|(to, sum)| *to = scale * sum);
        }
    }
}

levels! {
    /// `sum[m] += Σ_i weights[m][i] · value i`, i in order, for each of up to [`QUERIES`] sums
    /// `[queries, dim]`.
    pub(crate) fn weigh<V, T: Widen>(weights: &[&[f32]], values: Keys<'_, T>, sum: &mut [f32]) {
        assert!(sum.len() == weights.len() * values.dim);
        assert!(weights.iter().all(|weights| weights.len() == values.at.len()));
        match weights.len() {
            1 => weigh_of::<V, T, 1>(weights, values, sum),
            2 => weigh_of::<V, T, 2>(weights, values, sum),
            4 => weigh_of::<V, T, 4>(weights, values, sum),
            _ => {
                for (weights, sum) in weights.iter().zip(sum.chunks_mut(values.dim.max(1))) {
                    weigh_of::<V, T, 1>(&[weights], values, sum);
                }
            }
        }
    }
}

#[inline(always)]
fn weigh_of<V: Lanes, T: Widen, const M: usize>(
    weights: &[&[f32]],
    values: Keys<'_, T>,
    sum: &mut [f32],
) {
    let mut from = 0;
    while from + 4 * V::LANES <= values.dim {
        weigh_part::<V, T, M, 4>(weights, values, sum, from);
        from += 4 * V::LANES;
    }
    while from + V::LANES <= values.dim {
        weigh_part::<V, T, M, 1>(weights, values, sum, from);
        from += V::LANES;
    }
    for i in from..values.dim {
        for (m, weights) in weights.iter().enumerate() {
            let sum = &mut sum[m * values.dim + i];
            for (position, weight) in values.at.iter().zip(*weights) {
                *sum += weight * values.row(*position)[i].wide();
            }
        }
    }
}

/// M sums of P vectors from dimension `from` on, in registers.
#[inline(always)]
fn weigh_part<V: Lanes, T: Widen, const M: usize, const P: usize>(
    weights: &[&[f32]],
    values: Keys<'_, T>,
    sum: &mut [f32],
    from: usize,
) {
    assert!(from + P * V::LANES <= values.dim && weights.len() == M);
    let at = |m: usize, p: usize| m * values.dim + from + p * V::LANES;
    let mut sums = [[V::splat(0.0); P]; M];
    for (m, sums) in sums.iter_mut().enumerate() {
        for (p, vector) in sums.iter_mut().enumerate() {
            // SAFETY: `sum` has M rows of `dim`, of which P vectors from `from` on are left (asserted here
            // and by the caller).
            *vector = unsafe { V::load_f32(sum.as_ptr().add(at(m, p))) };
        }
    }
    for (position, &row) in values.at.iter().enumerate() {
        let row = values.row(row);
        // SAFETY: the row has `dim` elements.
        let vectors: [V; P] = std::array::from_fn(|p| unsafe {
            // SAFETY: as above.
            T::lanes::<V>(row.as_ptr().add(from + p * V::LANES))
        });
        for (sums, weights) in sums.iter_mut().zip(weights) {
            let weight = V::splat(weights[position]);
            for (sum, vector) in sums.iter_mut().zip(vectors) {
                *sum = weight.mul_add(vector, *sum);
            }
        }
    }
    for (m, sums) in sums.into_iter().enumerate() {
        for (p, vector) in sums.into_iter().enumerate() {
            // SAFETY: as for the loads above.
            unsafe { vector.store(sum.as_mut_ptr().add(at(m, p))) };
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::{Level, noise};
    use super::*;

    fn hold<T: Widen>(level: Level) {
        for (dim, count) in [(1, 1), (15, 3), (16, 4), (64, 37), (72, 16), (80, 21)] {
            let data: Vec<T> = noise(2 * count * dim, 1).into_iter().map(T::from_f32).collect();
            let at: Vec<u32> = (0..count as u32).rev().collect();
            let keys = Keys { data: &data, at: &at, pitch: 2 * dim, skip: dim, dim };
            let q = noise(QUERIES * dim, 2);
            for queries in 1..=QUERIES {
                let mut out = vec![0.0; queries * count];
                scores(level, 0.5, &q[..queries * dim], keys, &mut out);
                let weights: Vec<&[f32]> = out.chunks(count).collect();
                let mut sum = noise(queries * dim, 5);
                weigh(level, &weights, keys, &mut sum);
                for m in 0..queries {
                    let (mut alone, one) = (vec![0.0; count], &q[m * dim..][..dim]);
                    scores(level, 0.5, one, keys, &mut alone);
                    assert_eq!(alone, weights[m], "{level:?} {dim} {count} {queries}");
                    let mut sum_alone = noise(queries * dim, 5)[m * dim..][..dim].to_vec();
                    weigh(level, &[weights[m]], keys, &mut sum_alone);
                    assert_eq!(sum_alone, sum[m * dim..][..dim]);
                    for (i, got) in alone.iter().enumerate() {
                        let terms = one.iter().zip(keys.row(at[i]));
                        let want: f64 =
                            terms.map(|(q, k)| f64::from(*q) * f64::from(k.to_f32())).sum();
                        assert!((f64::from(*got) - 0.5 * want).abs() < 1e-5);
                    }
                    for i in 0..dim {
                        let terms = weights[m].iter().enumerate();
                        let added: f64 = terms
                            .map(|(at, w)| {
                                f64::from(*w) * f64::from(keys.row(keys.at[at])[i].to_f32())
                            })
                            .sum();
                        let want = f64::from(noise(queries * dim, 5)[m * dim + i]) + added;
                        assert!((f64::from(sum[m * dim + i]) - want).abs() < 1e-4);
                    }
                }
            }
        }
    }

    /// However many queries pass together, each gets the bits it gets alone, near f64.
    #[test]
    fn a_query_does_not_depend_on_its_company() {
        for level in Level::all() {
            hold::<f32>(level);
            hold::<bf16>(level);
        }
    }

    levels! {
        fn trees<V>(values: &[f32]) -> [[f32; 16]; 2] {
            assert_eq!(values.len(), 256);
            // SAFETY: 16 lanes are left of 256 at each multiple of 16.
            let of: [V; 16] =
                std::array::from_fn(|i| unsafe { V::load_f32(values.as_ptr().add(16 * i)) });
            [V::sums(of), of.map(|lanes| lanes.sum())]
        }
    }

    #[test]
    fn sixteen_trees_are_sixteen_single_ones() {
        for level in Level::all() {
            let [together, alone] = trees(level, &noise(256, 8));
            assert_eq!(together, alone);
        }
    }
}
