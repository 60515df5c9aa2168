//! `out = x·Wᵀ + bias`.

/// A matrix of `n` outputs and `k` inputs, k innermost.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// `[n, k]`.
    pub data: &'a [f64],
}

impl Matrix<'_> {
    /// `W·x` for one row.
    pub fn times(&self, x: &[f64]) -> Vec<f64> {
        assert_eq!((x.len(), self.data.len()), (self.k, self.n * self.k));
        let mut out = Vec::new();
        for n in 0..self.n {
            let row = &self.data[n * self.k..(n + 1) * self.k];
            out.push(row.iter().zip(x).map(|(w, x)| w * x).sum());
        }
        out
    }
}

/// `x` is `[tokens, k]`, `bias` `[n]`.
pub fn linear(x: &[f64], weight: Matrix<'_>, bias: Option<&[f64]>) -> Vec<f64> {
    let mut out = Vec::new();
    for row in x.chunks(weight.k) {
        for (n, product) in weight.times(row).into_iter().enumerate() {
            out.push(product + bias.map_or(0.0, |bias| bias[n]));
        }
    }
    out
}
