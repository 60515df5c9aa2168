//! Drawing a token: greedy, or by temperature, min-p, top-k and top-p with a counter-based number, from
//! logits that were edited; and log-probabilities of raw logits.

/// How a token is drawn.
#[derive(Debug, Clone, Copy)]
pub struct Draw {
    /// 0 is greedy.
    pub temperature: f64,
    /// 0 keeps all.
    pub top_k: usize,
    /// 1 keeps all.
    pub top_p: f64,
    /// 0 keeps all.
    pub min_p: f64,
}

/// What is known of a token.
#[derive(Debug, Clone, Copy)]
pub struct Edit {
    /// The token.
    pub token: usize,
    /// Whether prompt or output have it.
    pub occurs: bool,
    /// How often the output has it.
    pub count: usize,
    /// Added to its logit.
    pub bias: f64,
}

/// What tokens that occur pay.
#[derive(Debug, Clone, Copy)]
pub struct Penalties {
    /// 1 is off.
    pub repetition: f64,
    /// 0 is off.
    pub presence: f64,
    /// 0 is off.
    pub frequency: f64,
}

/// The logits that are drawn from.
pub fn edited(raw: &[f64], edits: &[Edit], penalties: Penalties) -> Vec<f64> {
    let mut logits = raw.to_vec();
    for edit in edits {
        let logit = &mut logits[edit.token];
        *logit += edit.bias;
        if edit.occurs && *logit > 0.0 {
            *logit /= penalties.repetition;
        } else if edit.occurs {
            *logit *= penalties.repetition;
        }
        if edit.count > 0 {
            *logit -= penalties.presence + penalties.frequency * edit.count as f64;
        }
    }
    logits
}

/// What is no number counts as −∞.
fn number(logit: f64) -> f64 {
    if logit.is_nan() { f64::NEG_INFINITY } else { logit }
}

/// The largest number; −∞ if there is none.
fn largest(logits: &[f64]) -> f64 {
    logits.iter().copied().map(number).fold(f64::NEG_INFINITY, f64::max)
}

/// A token's weight in a softmax, relative to the largest's 1.
fn weight(logit: f64, most: f64, temperature: f64) -> f64 {
    let logit = number(logit);
    if logit == most { 1.0 } else { ((logit - most) / temperature).exp() }
}

/// Log-probability of `token` in the unscaled softmax.
pub fn logprob(logits: &[f64], token: usize) -> f64 {
    let most = largest(logits);
    let total: f64 = logits.iter().map(|&l| weight(l, most, 1.0)).sum();
    let logit = number(logits[token]);
    let above = if logit == most { 0.0 } else { logit - most };
    above - total.ln()
}

/// Tokens by descending logit, ties to the lower id; −0 ties with +0.
pub fn by_logit(logits: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| number(logits[b]).partial_cmp(&number(logits[a])).expect("numbers"));
    order
}

/// The tokens that may be drawn, by descending logit, with their shares; and the distance of
/// `min_p` from the nearest probability (as a share of the largest) and of `top_p` from the nearest
/// running share, below which f32 may keep one token more or less.
pub fn kept(logits: &[f64], draw: Draw) -> (Vec<(usize, f64)>, f64) {
    let most = largest(logits);
    if most == f64::NEG_INFINITY {
        return (vec![(0, 1.0)], f64::MAX);
    }
    let mut order = by_logit(logits);
    if draw.temperature == 0.0 {
        return (vec![(order[0], 1.0)], f64::MAX);
    }
    let weight = |token: &usize| weight(logits[*token], most, draw.temperature);
    let mut margin = f64::MAX;
    if draw.min_p > 0.0 {
        margin = order.iter().map(|t| (weight(t) - draw.min_p).abs()).fold(margin, f64::min);
        order.retain(|token| weight(token) >= draw.min_p);
    }
    if draw.top_k > 0 {
        order.truncate(draw.top_k);
    }
    let weights: Vec<f64> = order.iter().map(weight).collect();
    let total: f64 = weights.iter().sum();
    let (mut before, mut keep) = (0.0, 0);
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
    let last = || kept.iter().rev().find(|(_, share)| *share > 0.0).expect("shares add up to 1").0;
    (drawn.unwrap_or_else(last), margin)
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
