//! Choice of experts, their weights, and the order of the pairs by (expert, slot).

use amphora_hal::ops::{ExpertGroups, RouteScore};

/// How logits become a choice.
#[derive(Debug)]
pub struct Route<'a> {
    /// Experts of a layer.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Logits to weights.
    pub score: RouteScore,
    /// `[experts]`, added for the choice alone.
    pub correction: Option<&'a [f64]>,
    /// Choice by groups.
    pub groups: Option<ExpertGroups>,
    /// Divide the chosen weights by their sum.
    pub renorm: bool,
    /// Multiplies the weights at the end.
    pub scale: f64,
}

/// The choice of one token.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// In order of choice.
    pub experts: Vec<usize>,
    /// Of these experts.
    pub weights: Vec<f64>,
    /// The smallest difference that decided anything: below it, f32 may choose otherwise.
    /// Exact ties, which are decided by the lower index, do not count.
    pub margin: f64,
}

/// What is no number counts as −∞.
fn ordered(value: f64) -> f64 {
    if value.is_nan() { f64::NEG_INFINITY } else { value }
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f64::MIN, f64::max);
    let total: f64 = logits.iter().map(|l| (l - most).exp()).sum();
    logits.iter().map(|l| (l - most).exp() / total).collect()
}

/// Indices by descending value, ties to the lower, and the smallest gap that put one before another
/// among the first `keep`.
fn ranked(values: &[f64], keep: usize) -> (Vec<usize>, f64) {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    let gaps = order.windows(2).take(keep).map(|w| values[w[0]] - values[w[1]]);
    let margin = gaps.filter(|&gap| gap > 0.0).fold(f64::MAX, f64::min);
    (order, margin)
}

impl Route<'_> {
    /// One token's `[experts]` logits.
    pub fn choose(&self, logits: &[f64]) -> Choice {
        let logits: Vec<f64> = logits.iter().map(|&logit| ordered(logit)).collect();
        let scores = match self.score {
            RouteScore::SoftmaxTopk => logits.clone(),
            RouteScore::Softmax => softmax(&logits),
            RouteScore::Sigmoid => logits.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect(),
        };
        let mut choosing = match self.score {
            _ if self.correction.is_some() || self.groups.is_some() => scores.clone(),
            RouteScore::SoftmaxTopk => logits,
            // Of both zeros an exponential makes the same.
            RouteScore::Softmax | RouteScore::Sigmoid => logits.iter().map(|l| l + 0.0).collect(),
        };
        for (value, correction) in choosing.iter_mut().zip(self.correction.unwrap_or(&[])) {
            *value += correction;
        }
        choosing.iter_mut().for_each(|value| *value = ordered(*value));
        let mut margin = f64::MAX;
        if let Some(ExpertGroups { groups, keep, best }) = self.groups {
            let size = self.experts / groups;
            let group_scores: Vec<f64> = choosing
                .chunks(size)
                .map(|group| {
                    let (order, _) = ranked(group, 0);
                    ordered(order[..best].iter().map(|&e| group[e]).sum())
                })
                .collect();
            let (order, gap) = ranked(&group_scores, keep);
            // The order among the kept does not matter, but a gap there is rarely small either.
            margin = margin.min(gap);
            for &group in &order[keep..] {
                choosing[group * size..(group + 1) * size].fill(f64::NEG_INFINITY);
            }
        }
        let (order, gap) = ranked(&choosing, self.top_k);
        let experts = order[..self.top_k].to_vec();
        let mut weights: Vec<f64> = experts.iter().map(|&e| scores[e]).collect();
        if self.score == RouteScore::SoftmaxTopk {
            weights = softmax(&weights);
        }
        if self.renorm {
            let total: f64 = weights.iter().sum();
            weights.iter_mut().for_each(|w| *w /= total);
        }
        weights.iter_mut().for_each(|w| *w *= self.scale);
        Choice { experts, weights, margin: margin.min(gap) }
    }
}

/// Pair indices t · top_k + j, stably sorted by (expert, slot), no slot last within an expert.
/// `experts` is `[tokens, top_k]` with `None` in padding rows, whose pairs are left out.
pub fn sorted_pairs(
    experts: &[Option<usize>],
    slots: &[Option<usize>],
    top_k: usize,
) -> Vec<usize> {
    let mut pairs: Vec<usize> = (0..experts.len()).filter(|&p| experts[p].is_some()).collect();
    pairs.sort_by_key(|&pair| (experts[pair], slots[pair / top_k].unwrap_or(usize::MAX)));
    pairs
}
