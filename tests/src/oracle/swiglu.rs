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

/// What arithmetic in f32 may be off by beside its rounding: a sigmoid whose exponential leaves f32's range, or
/// is kept at its end, may be anything up to the smallest normal number, 2^-126, and is multiplied with the rest.
pub fn sigmoid_lost(activation: Activation, gate: f64, up: f64) -> f64 {
    let factor = match activation {
        Activation::Swiglu => gate * up,
        Activation::ClampedInterleaved { limit, .. } => {
            let limit = f64::from(limit);
            (up.clamp(-limit, limit) + 1.0) * gate.min(limit)
        }
    };
    factor.abs() * f64::from(f32::MIN_POSITIVE)
}

/// Gates and ups of rows of `[gate, up]`, each of 2 · `inner`.
pub fn pairs(activation: Activation, x: &[f64], inner: usize) -> Vec<(f64, f64)> {
    let mut out = Vec::new();
    for row in x.chunks(2 * inner) {
        for i in 0..inner {
            out.push(match activation {
                Activation::Swiglu => (row[i], row[inner + i]),
                Activation::ClampedInterleaved { .. } => (row[2 * i], row[2 * i + 1]),
            });
        }
    }
    out
}

/// Rows of `[gate, up]`, each of 2 · `inner`.
pub fn swiglu(activation: Activation, x: &[f64], inner: usize) -> Vec<f64> {
    pairs(activation, x, inner)
        .into_iter()
        .map(|(gate, up)| activate(activation, gate, up))
        .collect()
}
