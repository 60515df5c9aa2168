//! Both expert projections: `out[t] = Σ_j w_j · expert_j(x[t])`, with the deltas of (expert, slot).

use amphora_hal::ops::{Activation, WeightOn};

use super::linear::Matrix;
use super::lora_linear::Delta;
use super::swiglu::swiglu;

/// The experts of one layer.
pub struct Experts<'a> {
    /// Width outside.
    pub hidden: usize,
    /// Width between the products, after the activation.
    pub inner: usize,
    /// `[experts, 2 · inner, hidden]`.
    pub gate_up: &'a [f64],
    /// `[experts, 2 · inner]`.
    pub gate_up_bias: Option<&'a [f64]>,
    /// `[experts, hidden, inner]`.
    pub down: &'a [f64],
    /// `[experts, hidden]`.
    pub down_bias: Option<&'a [f64]>,
    /// Between the two.
    pub activation: Activation,
    /// Where routing weights multiply.
    pub weight_on: WeightOn,
    /// Deltas of gate_up.
    pub gate_up_deltas: &'a [Delta],
    /// Deltas of down.
    pub down_deltas: &'a [Delta],
    /// Rounding to the compute type of what becomes an operand: the activation's result, and a
    /// weighted input.
    pub round: &'a dyn Fn(f64) -> f64,
    /// How far off, relative, an activation's result may be before it is rounded; 0 asks for no ties.
    pub unsure: f64,
}

/// What a token becomes.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// The sums of its experts.
    pub out: Vec<f64>,
    /// What each may be off by, as an activation's result so near a tie may be rounded to either side.
    pub ties: Vec<f64>,
}

impl Experts<'_> {
    /// Expert `e` on one row of adapter `slot`.
    fn expert(&self, e: usize, x: &[f64], slot: Option<usize>) -> Token {
        let (hidden, inner) = (self.hidden, self.inner);
        let product =
            |data: &[f64], n: usize, bias: Option<&[f64]>, deltas: &[Delta], x: &[f64]| {
                let k = x.len();
                let data = &data[e * n * k..(e + 1) * n * k];
                let mut out = Matrix { n, k, data }.times(x);
                if let Some(bias) = bias {
                    out.iter_mut().zip(&bias[e * n..(e + 1) * n]).for_each(|(o, b)| *o += b);
                }
                let own = |delta: &&Delta| Some(delta.slot) == slot && delta.expert == e;
                deltas.iter().filter(own).for_each(|delta| delta.add(x, &mut out));
                out
            };
        let both = product(self.gate_up, 2 * inner, self.gate_up_bias, self.gate_up_deltas, x);
        let exact = swiglu(self.activation, &both, inner);
        let between: Vec<f64> = exact.iter().map(|&value| (self.round)(value)).collect();
        let out = product(self.down, hidden, self.down_bias, self.down_deltas, &between);
        let mut ties = vec![0.0; hidden];
        for (i, &value) in exact.iter().enumerate() {
            let near = |sign: f64| (self.round)(value * (1.0 + sign * self.unsure));
            let apart = (near(1.0) - near(-1.0)).abs();
            if apart > 0.0 {
                let mut one = vec![0.0; inner];
                one[i] = apart;
                let moved = product(self.down, hidden, None, self.down_deltas, &one);
                ties.iter_mut().zip(moved).for_each(|(tie, moved)| *tie += moved.abs());
            }
        }
        Token { out, ties }
    }

    /// One token: `experts` and `weights` are its own, in order of choice.
    pub fn token(
        &self,
        x: &[f64],
        experts: &[usize],
        weights: &[f64],
        slot: Option<usize>,
    ) -> Token {
        let zeros = vec![0.0; self.hidden];
        let mut token = Token { out: zeros.clone(), ties: zeros };
        for (&e, &weight) in experts.iter().zip(weights) {
            let (x, on_output) = match self.weight_on {
                WeightOn::Input => {
                    (x.iter().map(|v| (self.round)(v * weight)).collect::<Vec<_>>(), 1.0)
                }
                WeightOn::Output => (x.to_vec(), weight),
            };
            let Token { out, ties } = self.expert(e, &x, slot);
            token.out.iter_mut().zip(out).for_each(|(to, value)| *to += on_output * value);
            token.ties.iter_mut().zip(ties).for_each(|(to, tie)| *to += on_output.abs() * tie);
        }
        token
    }
}

#[cfg(test)]
mod tests {
    use amphora_hal::DType;

    use super::*;
    use crate::host::round;

    /// One expert of one activation, `silu(1) · up`, whose result is `result`; down is 3, its delta 2.
    fn of_one(result: f64, unsure: f64) -> Token {
        let (round, up) = (|value| round(DType::F16, value), result * (1.0 + (-1f64).exp()));
        let delta = |slot| Delta {
            slot,
            expert: 0,
            out_offset: 0,
            out_stride: 1,
            scale: 2.0,
            rank: 1,
            a: vec![1.0],
            b: vec![1.0],
        };
        let layer = Experts {
            hidden: 1,
            inner: 1,
            gate_up: &[1.0, up],
            gate_up_bias: None,
            down: &[3.0],
            down_bias: Some(&[7.0]),
            activation: Activation::Swiglu,
            weight_on: WeightOn::Output,
            gate_up_deltas: &[],
            down_deltas: &[delta(1), delta(2)],
            round: &round,
            unsure,
        };
        layer.token(&[1.0], &[0], &[0.5], Some(1))
    }

    /// As an H200 answered: 2.32519536, of which f16 has 2.32421875 and 2.326171875, became the lower.
    #[test]
    fn a_tie_may_fall_to_either_side() {
        let (lower, upper) = (2.324_218_75, 2.326_171_875);
        let token = of_one(2.325_195_361_4, 1e-5);
        assert_eq!(token.out, [0.5 * (5.0 * upper + 7.0)]);
        assert_eq!(token.ties, [0.5 * 5.0 * (upper - lower)]);
        assert_eq!(of_one(2.325_195_361_4, 0.0).ties, [0.0]);
        assert_eq!(of_one(2.325, 1e-5).ties, [0.0], "no tie is near");
    }
}
