//! Rows of numbers: conversions, exponentials, norms, sums. Loops without branches, which the compiler turns
//! into the level's vectors; where a sum's order matters, it is written over lanes.

use amphora_hal::ops::{Activation, RopePairing};

use super::lanes::Widen;
use super::levels;

/// `eˣ` within 2 units in the last place; 0 below −87.3, the largest finite number's neighbourhood above
/// 88. A NaN stays one. By Cody and Waite: x = n·ln 2 + r, a polynomial in r, the exponent's bits.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Adding and subtracting it rounds to an integer, which its low bits then hold.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // A comparison with a NaN is false, so a NaN passes both.
    let x = if x > 88.0 { 88.0 } else { x };
    let bounded = if x < -87.3 { -87.3 } else { x };
    let shifted = bounded * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = bounded - n * LN_2_HIGH - n * LN_2_LOW;
    let p = 1.987_569_1e-4 * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let e = p * (r * r) + r + 1.0;
    let power = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    let value = e * f32::from_bits(power);
    if x < -87.3 { 0.0 } else { value }
}

levels! {
    /// `to = from`, widened.
    pub(crate) fn widen<_V, T: Widen>(from: &[T], to: &mut [f32]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = from.wide());
    }
}

levels! {
    /// `to = from`, rounded.
    pub(crate) fn narrow<_V, T: Widen>(from: &[f32], to: &mut [T]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = T::round(*from));
    }
}

/// The turn of one position, and what the turned head is scaled by.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turn<'a> {
    pub(crate) pairing: RopePairing,
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
    pub(crate) scale: f32,
}

levels! {
    /// Turns a head's pairs, rounded once.
    pub(crate) fn turn<_V, T: Widen>(turn: Turn<'_>, head: &mut [T]) {
        let Turn { pairing, cos, sin, scale } = turn;
        let half = cos.len();
        let (turned, rest) = head.split_at_mut(2 * half);
        let one = |x: &mut T, y: &mut T, cos: f32, sin: f32| {
            let (a, b) = (x.wide(), y.wide());
            *x = T::round((a * cos - b * sin) * scale);
            *y = T::round((b * cos + a * sin) * scale);
        };
        let angles = cos.iter().zip(sin);
        match pairing {
            RopePairing::Half => {
                let (xs, ys) = turned.split_at_mut(half);
                for ((x, y), (cos, sin)) in xs.iter_mut().zip(ys).zip(angles) {
                    one(x, y, *cos, *sin);
                }
            }
            RopePairing::Interleaved => {
                for (pair, (cos, sin)) in turned.chunks_exact_mut(2).zip(angles) {
                    let (x, y) = pair.split_at_mut(1);
                    one(&mut x[0], &mut y[0], *cos, *sin);
                }
            }
        }
        if scale != 1.0 {
            rest.iter_mut().for_each(|value| *value = T::round(value.wide() * scale));
        }
    }
}

levels! {
    /// `to = factor · to`, rounded.
    pub(crate) fn scale<_V, T: Widen>(factor: f32, to: &mut [T]) {
        to.iter_mut().for_each(|to| *to = T::round(to.wide() * factor));
    }
}

levels! {
    /// `to += from`, rounded.
    pub(crate) fn add<_V, T: Widen>(from: &[T], to: &mut [T]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = T::round(to.wide() + from.wide()));
    }
}

levels! {
    /// `to += factor · from`.
    pub(crate) fn add_scaled<_V>(factor: f32, from: &[f32], to: &mut [f32]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
    }
}

levels! {
    /// `v = exp(v − most)` for each of `values`, none of which is above `most`; gives their sum.
    pub(crate) fn exp_less<V>(most: f32, values: &mut [f32]) -> f32 {
        values.iter_mut().for_each(|value| *value = exp(*value - most));
        let whole = values.len() - values.len() % V::LANES;
        let (ones, mut sums) = (V::splat(1.0), V::splat(0.0));
        for i in (0..whole).step_by(V::LANES) {
            // SAFETY: LANES elements are left.
            sums = ones.mul_add(unsafe { V::load_f32(values.as_ptr().add(i)) }, sums);
        }
        values[whole..].iter().fold(sums.sum(), |sum, value| sum + value)
    }
}

levels! {
    /// `v = v / by` for each of `values`.
    pub(crate) fn divide<_V>(by: f32, values: &mut [f32]) {
        values.iter_mut().for_each(|value| *value /= by);
    }
}

levels! {
    /// The largest of `values` and `least`. NaNs are passed over.
    pub(crate) fn largest<_V>(least: f32, values: &[f32]) -> f32 {
        let mut best = [least; 16];
        let mut blocks = values.chunks_exact(16);
        for block in &mut blocks {
            for (best, value) in best.iter_mut().zip(block) {
                *best = if *value > *best { *value } else { *best };
            }
        }
        best.iter().chain(blocks.remainder()).fold(least, |most, value| most.max(*value))
    }
}

levels! {
    /// `x = x / √(mean of x² + ε) · weight`, rounded once.
    pub(crate) fn rms<V, T: Widen>(eps: f32, weight: &[f32], x: &mut [T]) {
        let whole = x.len() - x.len() % V::LANES;
        let mut sums = V::splat(0.0);
        for i in (0..whole).step_by(V::LANES) {
            // SAFETY: LANES elements are left.
            let values = unsafe { T::lanes::<V>(x.as_ptr().add(i)) };
            sums = values.mul_add(values, sums);
        }
        let squares = x[whole..].iter().fold(sums.sum(), |sum, v| sum + v.wide() * v.wide());
        let inverse = 1.0 / (squares / x.len() as f32 + eps).sqrt();
        for (x, w) in x.iter_mut().zip(weight) {
            *x = T::round(x.wide() * inverse * w);
        }
    }
}

levels! {
    /// The activation of a gate and up row, rounded once.
    pub(crate) fn activate<_V, T: Widen>(activation: Activation, gate_up: &[f32], out: &mut [T]) {
        match activation {
            Activation::Swiglu => {
                let (gate, up) = gate_up.split_at(out.len());
                for ((to, g), u) in out.iter_mut().zip(gate).zip(up) {
                    *to = T::round(g / (1.0 + exp(-g)) * u);
                }
            }
            Activation::ClampedInterleaved { limit, alpha } => {
                for (to, pair) in out.iter_mut().zip(gate_up.chunks_exact(2)) {
                    // A NaN passes each comparison.
                    let gate = if pair[0] > limit { limit } else { pair[0] };
                    let up = if pair[1] > limit { limit } else { pair[1] };
                    let up = if up < -limit { -limit } else { up };
                    *to = T::round((up + 1.0) * gate / (1.0 + exp(-alpha * gate)));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::{Level, noise};
    use super::*;

    #[test]
    fn exponentials_are_within_two_units() {
        for i in -88_000..88_000 {
            let x = i as f32 / 1000.0;
            let want = f64::from(x).exp();
            let unit = want as f32 * f32::EPSILON;
            let off = (f64::from(exp(x)) - want).abs() / f64::from(unit);
            assert!(off <= 2.0 || (x < -87.3 && exp(x) == 0.0), "{x}: {off}");
        }
        assert_eq!((exp(0.0), exp(f32::NEG_INFINITY)), (1.0, 0.0));
        assert!(exp(f32::NAN).is_nan() && exp(1000.0) > 1e38);
    }

    /// The bits are those of the type's own conversion, for every bf16 and around every tie.
    #[test]
    fn rounding_is_to_nearest_even() {
        for bits in 0..=u16::MAX {
            let value = bf16::from_bits(bits);
            if value.is_nan() {
                assert!(bf16::round(value.to_f32()).is_nan() && value.wide().is_nan());
                continue;
            }
            assert_eq!(value.wide().to_bits(), value.to_f32().to_bits());
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let between = f32::from_bits(u32::from(bits) << 16 | low);
                if !between.is_nan() {
                    assert_eq!(bf16::round(between).to_bits(), bf16::from_f32(between).to_bits());
                }
            }
        }
    }

    /// Each level, at lengths around its lanes, near f64.
    #[test]
    fn sums_and_norms_are_near_plain_ones() {
        for level in Level::all() {
            for len in [1, 15, 16, 17, 64, 200] {
                let x = noise(len, 3);
                let mut values = x.clone();
                let most = largest(level, f32::NEG_INFINITY, &x);
                assert_eq!(most, x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                let total = exp_less(level, most, &mut values);
                let plain: f64 = x.iter().map(|v| f64::from(v - most).exp()).sum();
                assert!((f64::from(total) / plain - 1.0).abs() < 1e-6, "{level:?} {len}");
                let (mut normed, weight) = (x.clone(), noise(len, 4));
                rms(level, 1e-5, &weight, &mut normed);
                let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / len as f64;
                for ((got, x), w) in normed.iter().zip(&x).zip(&weight) {
                    let want = f64::from(*x) / (mean + 1e-5).sqrt() * f64::from(*w);
                    assert!((f64::from(*got) - want).abs() < 1e-5);
                }
            }
        }
    }
}
