//! The layer in f64 for a few tokens, from the pattern that its weights are stretches of.

use amphora_hal::ops::Activation;
use amphora_hal::{DType, narrow, widen};

use amphora_benches::layers::{Error, Stretches};
use amphora_engine::measure::Pattern;
use amphora_engine::measure::experts::{Model, Part, blocks, seed};

/// The experts of a token and their weights.
fn choose(model: &Model, logits: &[f32]) -> Vec<(usize, f64)> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let chosen = &order[..model.top_k];
    let most = f64::from(logits[chosen[0]]);
    // Softmax over the chosen; over all and renormalised is the same.
    let parts: Vec<f64> = chosen.iter().map(|&e| (f64::from(logits[e]) - most).exp()).collect();
    let sum: f64 = parts.iter().sum();
    chosen.iter().zip(parts).map(|(&e, part)| (e, part / sum)).collect()
}

fn round(value: f64) -> f64 {
    let mut bytes = [0; 2];
    narrow(&[value as f32], DType::BF16, &mut bytes);
    widen(DType::BF16, &bytes).map_or(f64::NAN, |values| f64::from(values[0]))
}

fn activate(model: &Model, gate: f64, up: f64) -> f64 {
    match model.activation() {
        Activation::Swiglu => gate / (1.0 + (-gate).exp()) * up,
        Activation::ClampedInterleaved { limit, alpha } => {
            let (limit, alpha) = (f64::from(limit), f64::from(alpha));
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            (up + 1.0) * gate / (1.0 + (-alpha * gate).exp())
        }
    }
}

/// One call's operands.
pub struct Reference<'a> {
    pub model: Model,
    pub pattern: &'a Pattern,
    pub set: usize,
    /// `[tokens, experts]`.
    pub logits: &'a [f32],
    /// With the deltas.
    pub lora: bool,
}

impl Reference<'_> {
    fn stretches(&self, part: Part) -> Stretches<'_> {
        Stretches { pattern: self.pattern, seed: seed(self.set, part) }
    }

    /// Output `n` of an expert's matrix of `part`, with the delta of `(block B, element, shrunk)`.
    fn product(
        &self,
        (part, row): (Part, usize),
        x: &[f64],
        delta: Option<(usize, usize, &[f64])>,
    ) -> f64 {
        let base = self.stretches(part).dot(row * x.len(), x);
        base + delta.map_or(0.0, |(b, element, shrunk)| {
            self.stretches(Part::Arena).expand(b, element, shrunk)
        })
    }

    /// One expert's output for one token.
    fn expert(&self, x: &[f64], expert: usize, slot: Option<usize>) -> Vec<f64> {
        let Model { hidden, inner, gpt_oss, .. } = self.model;
        let slot = slot.filter(|_| self.lora);
        let at = slot.map(|slot| blocks(&self.model, slot, expert));
        let arena = self.stretches(Part::Arena);
        let shrunk = at.map(|at| [arena.shrink(at.a[0], x), arena.shrink(at.a[1], x)]);
        let of = |i: usize, up: usize| {
            let column = if gpt_oss { 2 * i + up } else { i + up * inner };
            let delta = at.zip(shrunk.as_ref()).map(|(at, s)| (at.b[up], i, s[up].as_slice()));
            self.product((Part::GateUp, expert * 2 * inner + column), x, delta)
        };
        let act: Vec<f64> =
            (0..inner).map(|i| round(activate(&self.model, of(i, 0), of(i, 1)))).collect();
        let shrunk = at.map(|at| arena.shrink(at.a[2], &act));
        let down = |n: usize| {
            let delta = at.zip(shrunk.as_ref()).map(|(at, s)| (at.b[2], n, s.as_slice()));
            self.product((Part::Down, expert * hidden + n), &act, delta)
        };
        (0..hidden).map(down).collect()
    }

    /// The root of the mean square error of row `token` of `out` over that of what it should be.
    pub fn error(&self, out: &[f32], token: usize, slot: Option<usize>) -> f64 {
        let Model { hidden, experts, .. } = self.model;
        let x = self.stretches(Part::X).row(token * hidden, hidden).collect::<Vec<_>>();
        let chosen = choose(&self.model, &self.logits[token * experts..(token + 1) * experts]);
        let outputs: Vec<Vec<f64>> = std::thread::scope(|scope| {
            let work: Vec<_> = chosen
                .iter()
                .map(|&(expert, _)| {
                    let x = &x;
                    scope.spawn(move || self.expert(x, expert, slot))
                })
                .collect();
            work.into_iter().map(|work| work.join().expect("no expert panics")).collect()
        });
        let mut error = Error::default();
        for n in 0..hidden {
            let want: f64 = chosen.iter().zip(&outputs).map(|((_, w), y)| w * y[n]).sum();
            error.add(f64::from(out[token * hidden + n]), want);
        }
        error.relative()
    }
}
