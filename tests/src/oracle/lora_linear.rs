//! `out = x·Wᵀ + bias + Σ scale · B·(A·x)` over the deltas of the row's adapter.

use super::linear::{Matrix, linear};

/// What one adapter adds to one slice of a projection, of one expert where there are experts.
#[derive(Debug, Clone)]
pub struct Delta {
    /// The adapter.
    pub slot: usize,
    /// The expert; 0 for a dense projection.
    pub expert: usize,
    /// Output of the slice's first element.
    pub out_offset: usize,
    /// Outputs from one element to the next.
    pub out_stride: usize,
    /// Multiplies the delta.
    pub scale: f64,
    /// Rank.
    pub rank: usize,
    /// `[rank, k]`.
    pub a: Vec<f64>,
    /// `[len, rank]`.
    pub b: Vec<f64>,
}

impl Delta {
    /// Adds the delta for input `x` to one row of outputs.
    pub fn add(&self, x: &[f64], out: &mut [f64]) {
        let (rank, len) = (self.rank, self.b.len() / self.rank);
        let shrink = Matrix { n: rank, k: x.len(), data: &self.a };
        let expand = Matrix { n: len, k: rank, data: &self.b };
        for (i, value) in expand.times(&shrink.times(x)).into_iter().enumerate() {
            out[self.out_offset + i * self.out_stride] += self.scale * value;
        }
    }
}

/// `slots` has each row's adapter.
pub fn lora_linear(
    x: &[f64],
    weight: Matrix<'_>,
    bias: Option<&[f64]>,
    slots: &[Option<usize>],
    deltas: &[Delta],
) -> Vec<f64> {
    let mut out = linear(x, weight, bias);
    for (row, slot) in slots.iter().enumerate() {
        for delta in deltas.iter().filter(|delta| Some(delta.slot) == *slot) {
            let x = &x[row * weight.k..(row + 1) * weight.k];
            delta.add(x, &mut out[row * weight.n..(row + 1) * weight.n]);
        }
    }
    out
}
