//! A projection in f64 for some of its outputs, from the pattern that its weights are stretches of.

use amphora_benches::layers::{Error, Stretches};
use amphora_engine::measure::Pattern;
use amphora_engine::measure::dense::{Part, Shape, seed};

/// Outputs of a row that are looked at.
const LOOKED_AT: usize = 64;

/// The operands of the first copy.
#[derive(Debug, Clone, Copy)]
pub struct Reference<'a> {
    /// Its sizes.
    pub shape: &'a Shape,
    /// Where its numbers come from.
    pub pattern: &'a Pattern,
}

impl Reference<'_> {
    fn stretches(&self, part: Part) -> Stretches<'_> {
        Stretches { pattern: self.pattern, seed: seed(0, part) }
    }

    /// The root of the mean square error of outputs all over row `row` of `out`, `[rows, n]`, over that of
    /// what they should be with the deltas of `slot`.
    pub fn error(&self, out: &[f32], row: usize, slot: Option<usize>) -> f64 {
        let (k, n) = (self.shape.k, self.shape.n());
        let x: Vec<f64> = self.stretches(Part::X).row(row * k, k).collect();
        let arena = self.stretches(Part::Arena);
        let blocks = slot.map(|slot| self.shape.blocks(slot)).unwrap_or_default();
        let shrunk: Vec<Vec<f64>> = blocks.iter().map(|[a, _]| arena.shrink(*a, &x)).collect();
        let mut error = Error::default();
        let mut first = 0;
        for (i, len) in self.shape.slices.iter().enumerate() {
            let of = |element: usize| {
                let base = self.stretches(Part::Weight).dot((first + element) * k, &x);
                let block = blocks.get(i).map_or(0, |[_, b]| *b);
                base + shrunk.get(i).map_or(0.0, |s| arena.expand(block, element, s))
            };
            let last = len - 1;
            for element in (0..*len).step_by((n / LOOKED_AT).max(1)).chain([last]) {
                error.add(f64::from(out[row * n + first + element]), of(element));
            }
            first += len;
        }
        error.relative()
    }
}
