//! The activation of an MLP: `silu(gate) · up`, or gpt_oss's clamped form.

use amphora_hal::ops::Activation;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `silu(gate) · up`, or gpt_oss's clamped form.
pub fn activate(activation: Activation, gate: f64, up: f64) -> f64 {
    match activation {
        Activation::Swiglu => gate * sigmoid(gate) * up,
        Activation::ClampedInterleaved { limit, alpha } => {
            let (limit, alpha) = (f64::from(limit), f64::from(alpha));
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            (up + 1.0) * gate * sigmoid(alpha * gate)
        }
    }
}

/// Rows of `[gate, up]`, each of 2 · `inner`.
pub fn swiglu(activation: Activation, x: &[f64], inner: usize) -> Vec<f64> {
    let mut out = Vec::new();
    for row in x.chunks(2 * inner) {
        for i in 0..inner {
            let (gate, up) = match activation {
                Activation::Swiglu => (row[i], row[inner + i]),
                Activation::ClampedInterleaved { .. } => (row[2 * i], row[2 * i + 1]),
            };
            out.push(activate(activation, gate, up));
        }
    }
    out
}
