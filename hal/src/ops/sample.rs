//! Drawing the next token of each sequence.

use super::runnable;
use crate::checked::{Check, Checked};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::plan::{PlanView, TokenTable};
use crate::tensor::Tensor;

/// Words of a result row: the token id, and the bits of its f32 log-probability.
pub const RESULT_WORDS: usize = 2;

/// Draws a token for each sampling sequence of the plan, into the token table and the results.
///
/// Tokens are ordered by (logit descending, id ascending). A logit that is no number counts as −∞, and
/// −0 equals +0; so it is in every operator that orders logits. A row without a logit above −∞ gives
/// token 0, whatever its parameters; otherwise no token at −∞ is drawn.
///
/// A row's logits become, in this order:
/// 1. *Edits* ([`crate::LogitEdit`], by token): `l = raw + bias`; if the token occurs, `l / r` where
///    l > 0 and `l · r` elsewhere, with r = repetition (Keskar et al. 2019, arXiv 1909.05858); then
///    `− presence` if the output has it, and `− frequency · output_count`. In f32, in this order.
/// 2. With temperature 0 the first token of the order is taken. Otherwise logits are divided by the
///    temperature.
/// 3. *min_p*: kept are the tokens whose probability is at least min_p times the largest.
/// 4. *top_k*: of these the first `top_k` (all if 0).
/// 5. *top_p*: of these the shortest prefix whose share of their softmax reaches `top_p`.
/// 6. The draw is the first token whose running share of the kept mass exceeds u. u in [0, 1) is a
///    function of seed and position alone (see [`Sample::uniform`]), so a draw depends on neither batch
///    nor backend.
///
/// A token's weight in a softmax is `exp((l − largest) / temperature)`, and 1 where l equals the
/// largest, also if both are infinite.
///
/// The log-probability, where asked for, is that of the raw logits' softmax over the whole vocabulary;
/// otherwise 0.
#[derive(Debug)]
pub struct Sample<'a, D: Device> {
    /// `[≥ sequences, vocab]` f32, one row for each row of results in front.
    pub logits: &'a Tensor<D>,
    /// Parameters and token table entries.
    pub plan: &'a PlanView<D>,
    /// Where the next step finds the token.
    pub table: &'a mut TokenTable<D>,
    /// `[sequences, 2]` i32: see [`RESULT_WORDS`]; padding rows are left alone.
    pub result: &'a mut Tensor<D>,
}

impl<D: Device> Sample<'_, D> {
    /// # Errors
    /// A shape or type is another, or operands overlap.
    pub fn check(self) -> Result<Checked<Self>> {
        let check = Check::of("sample");
        let sequences = self.plan.sample_slot().tensor().dims()[0];
        check.ndim("logits", self.logits, 2)?;
        let [rows, vocab] = [self.logits.dims()[0], self.logits.dims()[1]];
        check.f32_dense("logits", self.logits, &[rows, vocab])?;
        check.that(rows >= sequences && vocab > 0, || {
            format!("logits are {}, {sequences} sequences sample", self.logits.shape())
        })?;
        check.that(vocab <= self.table.vocab(), || {
            format!("logits of {vocab} tokens, a table of tokens below {}", self.table.vocab())
        })?;
        let (starts, edits) = (self.plan.edit_start(), self.plan.edits());
        let room = edits.tensor().dims()[0];
        check.that(room == 0 || self.plan.vocab() <= vocab, || {
            format!("logits of {vocab} tokens, edits of tokens below {}", self.plan.vocab())
        })?;
        check.addresses("edit_start", starts, room + 1)?;
        check.addresses_or_skips("sample_slot", self.plan.sample_slot(), self.table.sequences())?;
        check.dims("result", self.result, &[sequences, RESULT_WORDS])?;
        check.dtype("result", self.result, DType::I32)?;
        check.dense("result", self.result)?;
        check.disjoint(
            &[("result", self.result), ("table", self.table.tensor())],
            &[
                ("logits", self.logits),
                ("sampling", self.plan.sampling().tensor()),
                ("sample_slot", self.plan.sample_slot().tensor()),
                ("edit_start", starts.tensor()),
                ("edits", edits.tensor()),
            ],
        )?;
        Ok(Checked::new(self))
    }

    /// The u of a draw: [`split_mix64`] over the seed and the position, its upper 24 bits as a fraction.
    pub fn uniform(seed: u64, position: u32) -> f32 {
        let z = split_mix64(seed, 1);
        let z = split_mix64(z, u64::from(position) + 1);
        (z >> 40) as f32 / (1u64 << 24) as f32
    }
}
runnable!(Sample, sample);

/// The `index`-th number, from 1, of the generator SplitMix64 (Steele, Lea and Flood 2014) that starts at
/// `seed`: what the draws, the seeds of parallel answers, and made prompts come from.
pub fn split_mix64(seed: u64, index: u64) -> u64 {
    let z = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
