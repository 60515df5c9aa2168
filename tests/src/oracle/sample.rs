//! Drawing a token: greedy, or by temperature, top-k and top-p with a counter-based number.

/// How a token is drawn.
#[derive(Debug, Clone, Copy)]
pub struct Draw {
    /// 0 is greedy.
    pub temperature: f64,
    /// 0 keeps all.
    pub top_k: usize,
    /// 1 keeps all.
    pub top_p: f64,
}

/// Log-probability of `token` in the unscaled softmax.
pub fn logprob(logits: &[f64], token: usize) -> f64 {
    let most = logits.iter().copied().fold(f64::MIN, f64::max);
    let total: f64 = logits.iter().map(|l| (l - most).exp()).sum();
    logits[token] - most - total.ln()
}

/// Tokens by descending logit, ties to the lower id.
fn by_logit(logits: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    order
}

/// The tokens that may be drawn, by descending logit, with their shares; and the distance of
/// `top_p` from the nearest running share, below which f32 may keep one token more or less.
pub fn kept(logits: &[f64], draw: Draw) -> (Vec<(usize, f64)>, f64) {
    let mut order = by_logit(logits);
    if draw.temperature == 0.0 {
        return (vec![(order[0], 1.0)], f64::MAX);
    }
    if draw.top_k > 0 {
        order.truncate(draw.top_k);
    }
    let most = logits[order[0]] / draw.temperature;
    let weights: Vec<f64> =
        order.iter().map(|&token| (logits[token] / draw.temperature - most).exp()).collect();
    let total: f64 = weights.iter().sum();
    let (mut before, mut margin, mut keep) = (0.0, f64::MAX, 0);
    for weight in &weights {
        if draw.top_p < 1.0 {
            margin = margin.min((before - draw.top_p).abs());
            if before >= draw.top_p {
                break;
            }
        }
        before += weight / total;
        keep += 1;
    }
    if draw.top_p < 1.0 {
        margin = margin.min((before - draw.top_p).abs());
    }
    let mass: f64 = weights[..keep].iter().sum();
    let shares = weights[..keep].iter().map(|w| w / mass);
    (order.into_iter().zip(shares).collect(), margin)
}

/// The token that `u` draws, and the distance of `u` from the nearest border.
pub fn pick(kept: &[(usize, f64)], u: f64) -> (usize, f64) {
    let (mut running, mut margin, mut drawn) = (0.0, f64::MAX, None);
    for (i, &(token, share)) in kept.iter().enumerate() {
        running += share;
        if i + 1 < kept.len() {
            margin = margin.min((running - u).abs());
        }
        if running > u && drawn.is_none() {
            drawn = Some(token);
        }
    }
    // The last share may end below u by a rounding of the sum.
    (drawn.unwrap_or(kept[kept.len() - 1].0), margin)
}

/// A number in [0, 1): the SplitMix64 finaliser over the seed plus the golden increment, then over
/// that plus (position + 1) increments; the upper 24 bits as a fraction.
pub fn uniform(seed: u64, position: u32) -> f64 {
    const INCREMENT: u128 = 0x9e37_79b9_7f4a_7c15;
    let finalise = |z: u128| -> u128 {
        let low = |v: u128| v & u128::from(u64::MAX);
        let z = low((z ^ (z >> 30)) * 0xbf58_476d_1ce4_e5b9);
        let z = low((z ^ (z >> 27)) * 0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let modulus = 1u128 << 64;
    let first = finalise((u128::from(seed) + INCREMENT) % modulus);
    let second = finalise((first + (u128::from(position) + 1) * INCREMENT) % modulus);
    (second >> 40) as f64 / f64::from(1u32 << 24)
}
