//! Log-probabilities: of a token, and of the most likely.

use super::runnable;
use crate::checked::{Check, Checked};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::plan::{MOST_BEST, PlanView, TokenTable};
use crate::tensor::Tensor;

/// Words of a row of log-probabilities: the target's id, the bits of its f32 log-probability, its
/// rank; then id and bits of each of the [`MOST_BEST`] most likely tokens.
pub const LOGPROB_WORDS: usize = 3 + 2 * MOST_BEST;

/// For each row of logits that asks ([`PlanView::logprob_best`]): the log-probability and the rank of
/// its target, and the most likely tokens with theirs. Runs behind [`super::Sample`], in steps where
/// some row asks ([`crate::HostPlan::any_logprobs`]).
///
/// The target is the plan's, or the token just drawn for the row. Log-probabilities are those of the
/// raw logits' softmax over the whole vocabulary, in f32. Tokens are ordered as [`super::Sample`]
/// orders them; a token's rank is its place in that order, from 1 on. Of the most likely there are as
/// many as the row asks for, or all if the vocabulary has fewer; the words behind them, and rows that
/// do not ask, are left alone.
///
/// As in [`super::Sample`], a logit that is no number counts as −∞, and one that equals the largest has
/// the weight 1 even where both are infinite.
#[derive(Debug)]
pub struct Logprobs<'a, D: Device> {
    /// `[≥ logit_rows, vocab]` f32.
    pub logits: &'a Tensor<D>,
    /// What each row asks for.
    pub plan: &'a PlanView<D>,
    /// Where the tokens drawn are.
    pub table: &'a TokenTable<D>,
    /// `[logit_rows, LOGPROB_WORDS]` i32: see [`LOGPROB_WORDS`].
    pub out: &'a mut Tensor<D>,
}

impl<D: Device> Logprobs<'_, D> {
    /// # Errors
    /// A shape or type is another, or operands overlap.
    pub fn check(self) -> Result<Checked<Self>> {
        let check = Check::of("logprobs");
        let (target, best) = (self.plan.logprob_target(), self.plan.logprob_best());
        let asking = target.tensor().dims()[0];
        check.ndim("logits", self.logits, 2)?;
        let [rows, vocab] = [self.logits.dims()[0], self.logits.dims()[1]];
        check.f32_dense("logits", self.logits, &[rows, vocab])?;
        check.that(rows >= asking && vocab > 0, || {
            format!("logits are {}, {asking} rows may ask", self.logits.shape())
        })?;
        check.that(self.table.vocab() <= vocab, || {
            format!("logits of {vocab} tokens, a table of tokens below {}", self.table.vocab())
        })?;
        check.addresses_or_skips("logprob_target", target, vocab)?;
        let slots = self.plan.sample_slot();
        check.addresses_or_skips("sample_slot", slots, self.table.sequences())?;
        check.dims("out", self.out, &[asking, LOGPROB_WORDS])?;
        check.dtype("out", self.out, DType::I32)?;
        check.dense("out", self.out)?;
        check.disjoint(
            &[("out", self.out)],
            &[
                ("logits", self.logits),
                ("table", self.table.tensor()),
                ("logprob_target", target.tensor()),
                ("logprob_best", best.tensor()),
                ("sample_slot", slots.tensor()),
            ],
        )?;
        Ok(Checked::new(self))
    }
}
runnable!(Logprobs, logprobs);
