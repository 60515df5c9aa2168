//! Continuous batching: which tokens of which sequences the next step computes.
//!
//! There is no prefill and no decode phase. A sequence has tokens planned and tokens wanted, and a step
//! closes part of the gap under a token budget: first the running sequences that want one token, then
//! prompts in order of arrival, then requests that wait.
//!
//! *Looking ahead.* `schedule` needs no token value, so a step may be planned while the one before it
//! runs. A stop is then seen one step late, and the row computed past it is dropped. A sequence gives
//! its slot, blocks and adapter back when no uncommitted step has it.
//!
//! *Fairness.* Requests are admitted in order of arrival. One whose adapter is still coming is passed by
//! at most `max_overtakes` later ones; then its blocks are set aside and no later request that
//! uses an adapter is admitted before it, so that a slot drains for it.

mod admission;
mod batch;
mod sequence;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use admission::Waiting;
pub use batch::{Batch, Chunk, SchedulerLimits, StepResults, TokenSource};
use sequence::Wanted;
pub use sequence::{HeldAdapter, SeqSlot, Sequence};

use crate::adapters::ledger::{AdapterKey, Pin, Residency};
use crate::kv::KvBlocks;
use crate::metrics::{Finished, Metrics};
use crate::reply::{Reply, Sampled, Spec};
use crate::request::{Delivery, Event, Failure, FinishReason, RequestId};
use crate::step::Step;

/// What is left of a step's bounds.
struct Budget {
    tokens: usize,
    logit_rows: usize,
}

/// All requests that wait or run.
#[derive(Debug)]
pub struct Scheduler {
    limits: SchedulerLimits,
    kv: KvBlocks,
    waiting: VecDeque<Waiting>,
    slots: Vec<Option<Sequence>>,
    /// Running sequences in order of admission.
    order: Vec<SeqSlot>,
    last_planned: Step,
    last_committed: Step,
    prompt_tokens: u64,
    tokens: u64,
    finished: Finished,
}

impl Scheduler {
    /// An empty scheduler over a pool of cache blocks.
    pub fn new(limits: SchedulerLimits, kv: KvBlocks) -> Self {
        Scheduler {
            limits,
            kv,
            waiting: VecDeque::new(),
            slots: (0..limits.max_seqs).map(|_| None).collect(),
            order: Vec::new(),
            last_planned: Step::default(),
            last_committed: Step::default(),
            prompt_tokens: 0,
            tokens: 0,
            finished: Finished::default(),
        }
    }

    /// Takes a request in. Its worst case must fit the pool (`RequestLimits::check`), and its adapter
    /// is pinned.
    pub fn submit(&mut self, id: RequestId, spec: Spec, reply: Reply, pin: Option<Pin>) {
        self.waiting.push_back(Waiting { id, spec, reply, pin, overtaken: 0, room: None });
    }

    /// Ends a request early. Unknown and finished ones are left as they are.
    pub fn cancel(&mut self, id: RequestId) {
        if let Some(index) = self.waiting.iter().position(|waiting| waiting.id == id)
            && let Some(waiting) = self.waiting.remove(index)
        {
            let reply = self.forget(waiting);
            self.finished.count(FinishReason::Cancelled);
            reply.finish(FinishReason::Cancelled);
            return;
        }
        let running = self.running().find(|(_, sequence)| sequence.id == id).map(|(slot, _)| slot);
        if let Some(slot) = running {
            self.finish(slot, FinishReason::Cancelled);
            self.release_if_over(slot);
        }
    }

    /// Ends every request with `failure` and forgets the steps in flight: the device is gone.
    pub fn fail_all(&mut self, failure: &Failure) {
        while let Some(waiting) = self.waiting.pop_front() {
            let reply = self.forget(waiting);
            self.finished.failed += 1;
            reply.fail(failure.clone());
        }
        for slot in std::mem::take(&mut self.order) {
            let Some(mut sequence) = self.slots[slot.0].take() else {
                continue;
            };
            self.kv.release(sequence.table);
            if let Some(reply) = sequence.reply.take() {
                self.finished.failed += 1;
                reply.fail(failure.clone());
            }
        }
        self.last_committed = self.last_planned;
    }

    /// Whether no request waits or runs.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.order.is_empty()
    }

    /// The sequence in a slot that a planned batch names.
    pub fn sequence(&self, slot: SeqSlot) -> Option<&Sequence> {
        self.slots.get(slot.0)?.as_ref()
    }

    /// Adapters that waiting requests need, first come first.
    pub fn wanted_adapters(&self) -> Vec<AdapterKey> {
        let mut keys: Vec<AdapterKey> = Vec::new();
        for pin in self.waiting.iter().filter_map(|waiting| waiting.pin.as_ref()) {
            if !keys.contains(&pin.key) {
                keys.push(pin.key.clone());
            }
        }
        keys
    }

    /// The last step whose results were committed.
    pub fn last_committed(&self) -> Step {
        self.last_committed
    }

    /// Fills the scheduler's part of the metrics.
    pub fn report(&self, metrics: &mut Metrics) {
        metrics.steps = self.last_committed.0;
        metrics.prompt_tokens = self.prompt_tokens;
        metrics.tokens = self.tokens;
        metrics.running = self.order.len();
        metrics.waiting = self.waiting.len();
        metrics.kv_blocks_used = self.kv.used();
        metrics.kv_blocks_promised = self.kv.promised();
        metrics.kv_blocks_total = self.kv.total();
        metrics.finished = self.finished;
    }

    /// Plans the next step; `None` when nothing can be done now. Asks `residency` where adapters are
    /// and never waits for one.
    pub fn schedule(&mut self, residency: &dyn Fn(&AdapterKey) -> Residency) -> Option<Batch> {
        let mut budget = Budget {
            tokens: self.limits.max_batch_tokens,
            logit_rows: self.limits.prompt_logit_rows,
        };
        let mut chunks = Vec::new();
        let (decodes, prompts): (Vec<SeqSlot>, Vec<SeqSlot>) =
            self.order.iter().partition(|slot| {
                self.sequence(**slot).is_some_and(|sequence| sequence.wanted() == Wanted::Decode)
            });
        for slot in decodes.into_iter().chain(prompts) {
            chunks.extend(self.plan(slot, &mut budget));
        }
        self.admit(residency, &mut budget, &mut chunks);
        if chunks.is_empty() {
            return None;
        }
        self.last_planned = self.last_planned.next();
        Some(Batch { step: self.last_planned, chunks })
    }

    /// Takes the results of the oldest batch that is not committed, and tells the clients.
    pub fn commit(&mut self, batch: &Batch, results: StepResults<'_>) {
        assert_eq!(batch.step, self.last_committed.next(), "steps are committed in order");
        self.last_committed = batch.step;
        let (mut sampled, mut logits) = (results.sampled.iter(), results.prompt_logits);
        for chunk in &batch.chunks {
            let rows = if chunk.logits { chunk.tokens * results.vocab } else { 0 };
            let (rows, rest) = logits.split_at(rows);
            logits = rest;
            let token = if chunk.sample { sampled.next().copied() } else { None };
            self.commit_chunk(chunk, token, Rows { rows, vocab: results.vocab });
        }
    }

    fn running(&self) -> impl Iterator<Item = (SeqSlot, &Sequence)> {
        self.order.iter().filter_map(|&slot| Some((slot, self.sequence(slot)?)))
    }

    /// Plans one sequence's part of the step.
    fn plan(&mut self, slot: SeqSlot, budget: &mut Budget) -> Option<Chunk> {
        let sequence = self.slots[slot.0].as_mut()?;
        let wants_logits = sequence.wants_prompt_logits();
        let (tokens, source, logits) = match sequence.wanted() {
            Wanted::Nothing => return None,
            Wanted::Decode => (1, TokenSource::LastSampled, false),
            Wanted::Prompt(left) => {
                let rows = if wants_logits { budget.logit_rows } else { usize::MAX };
                (left.min(self.limits.chunk).min(rows), TokenSource::Prompt, wants_logits)
            }
        };
        let tokens = tokens.min(budget.tokens);
        if tokens == 0 {
            return None;
        }
        let first = sequence.planned;
        sequence.planned += tokens;
        sequence.in_flight += 1;
        let reached_prompt_end = sequence.planned >= sequence.spec.prompt.len();
        let sample = reached_prompt_end && sequence.planned_outputs < sequence.spec.max_new_tokens;
        sequence.planned_outputs += usize::from(sample);
        self.kv.grow(&mut sequence.table, sequence.planned);
        budget.tokens -= tokens;
        if logits {
            budget.logit_rows -= tokens;
        }
        let adapter = sequence.adapter_slot();
        Some(Chunk { seq: slot, first, tokens, source, sample, logits, adapter })
    }

    fn commit_chunk(&mut self, chunk: &Chunk, token: Option<Sampled>, logits: Rows<'_>) {
        let Some(sequence) = self.slots[chunk.seq.0].as_mut() else {
            return; // only after `fail_all`, which frees slots whatever is in flight
        };
        sequence.in_flight -= 1;
        if chunk.source == TokenSource::Prompt {
            self.prompt_tokens += chunk.tokens as u64;
        }
        if let Some(reply) = &mut sequence.reply {
            let mut end = None;
            if chunk.logits {
                let event = Event::PromptLogits {
                    first_position: chunk.first,
                    vocab: logits.vocab,
                    rows: logits.rows.to_vec(),
                };
                let gone = reply.send(event) == Delivery::Gone;
                end = gone.then_some(FinishReason::Cancelled);
            }
            if let (None, Some(token)) = (end, token) {
                self.tokens += 1;
                end = reply.token(token);
            }
            let prompt_alone = sequence.spec.max_new_tokens == 0;
            let computed = chunk.first + chunk.tokens;
            if prompt_alone && computed == sequence.spec.prompt.len() {
                end = end.or(Some(FinishReason::Length));
            }
            if let Some(reason) = end {
                self.finish(chunk.seq, reason);
            }
        }
        self.release_if_over(chunk.seq);
    }

    /// Tells the client the end; what the sequence holds stays until no step has it.
    fn finish(&mut self, slot: SeqSlot, reason: FinishReason) {
        let reply = self.slots[slot.0].as_mut().and_then(|sequence| sequence.reply.take());
        if let Some(reply) = reply {
            self.finished.count(reason);
            reply.finish(reason);
        }
    }

    fn release_if_over(&mut self, slot: SeqSlot) {
        let over = |sequence: &Sequence| sequence.reply.is_none() && sequence.in_flight == 0;
        if self.sequence(slot).is_some_and(over)
            && let Some(sequence) = self.slots[slot.0].take()
        {
            self.order.retain(|&other| other != slot);
            self.kv.release(sequence.table);
        }
    }
}

/// Logits of one chunk.
struct Rows<'a> {
    rows: &'a [f32],
    vocab: usize,
}
