//! `out = x / sqrt(mean(x²) + eps) · weight`, row by row.

/// Rows as wide as `weight`.
pub fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let mut out = Vec::new();
    for row in x.chunks(weight.len()) {
        let mean_square = row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64;
        for (v, w) in row.iter().zip(weight) {
            out.push(v / (mean_square + eps).sqrt() * w);
        }
    }
    out
}
