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
}

impl Experts<'_> {
    /// Expert `e` on one row of adapter `slot`.
    fn expert(&self, e: usize, x: &[f64], slot: Option<usize>) -> Vec<f64> {
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
        let between: Vec<f64> =
            swiglu(self.activation, &both, inner).into_iter().map(self.round).collect();
        product(self.down, hidden, self.down_bias, self.down_deltas, &between)
    }

    /// One token: `experts` and `weights` are its own, in order of choice.
    pub fn token(
        &self,
        x: &[f64],
        experts: &[usize],
        weights: &[f64],
        slot: Option<usize>,
    ) -> Vec<f64> {
        let mut out = vec![0.0; self.hidden];
        for (&e, &weight) in experts.iter().zip(weights) {
            let (x, on_output) = match self.weight_on {
                WeightOn::Input => {
                    (x.iter().map(|v| (self.round)(v * weight)).collect::<Vec<_>>(), 1.0)
                }
                WeightOn::Output => (x.to_vec(), weight),
            };
            for (to, value) in out.iter_mut().zip(self.expert(e, &x, slot)) {
                *to += on_output * value;
            }
        }
        out
    }
}
