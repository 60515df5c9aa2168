//! Continuous batching: which tokens of which sequences the next step computes.
//!
//! There is no prefill and no decode phase. A sequence has tokens planned and tokens wanted, and a step
//! closes part of the gap under a token budget: first the running sequences that want one token, then
//! prompts in order of arrival, then requests that wait.
//!
//! *Looking ahead.* `schedule` needs no token value, so a step may be planned while the one before it
//! runs. A stop is then seen one step late, and the row computed past it is dropped. A sequence keeps its
//! slot until no uncommitted step has it; its blocks and adapter it gives back with its end, as steps that
//! are planned later run later.
//!
//! *Room.* A sequence is admitted when there are blocks for the tokens it has, and takes more as it grows.
//! Where there are none left the last to arrive is *preempted*: it gives its blocks and adapter back, and
//! waits to compute its tokens, drawn ones included, once more. Draws depend on seed and position alone, so
//! its answer goes on as it would have.
//!
//! *Fairness.* Requests are admitted in order of arrival. One whose adapter is still coming is passed by
//! at most `max_overtakes` later ones; then no later request that uses an adapter is admitted before it, so
//! that a slot drains for it.
//!
//! *Several answers.* The first computes the prompt. The others begin when that is planned: full blocks are
//! shared, a partly filled one is copied, and each computes the last token to draw from there.
//!
//! *Penalties.* A sequence that has some is not planned ahead of its last token: what its next draw needs to
//! know of the tokens before is sent with the plan.

mod admission;
mod batch;
mod commit;
mod history;
mod planning;
mod sequence;
#[cfg(test)]
mod tests;

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use admission::Waiting;
pub use batch::{Batch, Brought, Chunk, Rows, SchedulerLimits, StepResults, TokenSource};
use history::History;
pub(crate) use history::most_edits;
pub use sequence::{SeqSlot, Sequence, Task};
use sequence::{State, Ticket, Wanted};

use crate::adapters::ledger::{AdapterKey, Pin};
use crate::kv::{Generation, KvBlocks};
use crate::metrics::{Finished, Metrics};
use crate::reply::{Reply, Spec};
use crate::request::{Failure, FinishReason, RequestId};
use crate::step::Step;

/// All requests that wait or run.
#[derive(Debug)]
pub struct Scheduler {
    limits: SchedulerLimits,
    kv: KvBlocks,
    /// In order of arrival.
    waiting: VecDeque<Waiting>,
    slots: Vec<Option<Sequence>>,
    /// Running sequences in order of arrival.
    order: Vec<SeqSlot>,
    arrived: u64,
    last_planned: Step,
    last_committed: Step,
    prompt_tokens: u64,
    tokens: u64,
    preemptions: u64,
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
            arrived: 0,
            last_planned: Step::default(),
            last_committed: Step::default(),
            prompt_tokens: 0,
            tokens: 0,
            preemptions: 0,
            finished: Finished::default(),
        }
    }

    /// Takes a request in: what it asks, and a reply for each answer. The worst case of one answer must fit
    /// the pool (`RequestLimits::check`), and its adapter is pinned.
    pub fn submit(&mut self, id: RequestId, spec: Spec, mut replies: Vec<Reply>, pin: Option<Pin>) {
        if replies.is_empty() {
            return;
        }
        let first = replies.remove(0);
        let ticket = Ticket { request: self.arrived, choice: 0 };
        self.arrived += 1;
        let task = Task {
            id,
            tokens: spec.prompt.clone(),
            history: History::of(&spec),
            spec: Arc::new(spec),
            ticket,
            told_rows: 0,
            ran: false,
            pin,
            reply: Some(first),
            siblings: replies,
        };
        self.enqueue(Waiting { task, overtaken: 0, fork: None });
    }

    /// Ends a request early, all its answers. Unknown and finished ones are left as they are.
    pub fn cancel(&mut self, id: RequestId) {
        for mut task in self.take_waiting(id) {
            for reply in task.reply.take().into_iter().chain(task.siblings) {
                self.finished.count(FinishReason::Cancelled);
                reply.finish(FinishReason::Cancelled);
            }
        }
        let running: Vec<SeqSlot> = self
            .running()
            .filter(|(_, sequence)| sequence.task.id == id)
            .map(|(slot, _)| slot)
            .collect();
        for slot in running {
            self.finish(slot, FinishReason::Cancelled);
            self.leave(slot);
        }
    }

    /// Gives up what the cache keeps of an adapter's version that nobody can ask for any more.
    pub fn forget(&mut self, key: &AdapterKey) {
        self.kv.forget(Generation(Some(key.version)));
    }

    /// Ends every request with `failure` and forgets the steps in flight: the device is gone.
    pub fn fail_all(&mut self, failure: &Failure) {
        while let Some(Waiting { mut task, fork, .. }) = self.waiting.pop_front() {
            if let Some(share) = fork {
                self.kv.release(share);
            }
            self.fail(&mut task, failure);
        }
        for slot in std::mem::take(&mut self.order) {
            let Some(mut sequence) = self.slots[slot.0].take() else {
                continue;
            };
            self.kv.release(sequence.table);
            if let Some(copy) = sequence.copy.take() {
                self.kv.copied(copy);
            }
            self.fail(&mut sequence.task, failure);
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
        let mut seen = HashSet::new();
        let pins = self.waiting.iter().filter_map(|waiting| waiting.task.pin.as_ref());
        pins.filter(|pin| seen.insert(pin.key.version)).map(|pin| pin.key.clone()).collect()
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
        metrics.kv_blocks_cached = self.kv.cached();
        metrics.kv_blocks_total = self.kv.total();
        metrics.preemptions = self.preemptions;
        metrics.prefix = self.kv.prefix_report();
        metrics.finished = self.finished;
    }

    fn running(&self) -> impl Iterator<Item = (SeqSlot, &Sequence)> {
        self.order.iter().filter_map(|&slot| Some((slot, self.sequence(slot)?)))
    }

    fn ticket(&self, slot: SeqSlot) -> Option<Ticket> {
        self.sequence(slot).map(|sequence| sequence.task.ticket)
    }

    fn fail(&mut self, task: &mut Task, failure: &Failure) {
        let siblings = std::mem::take(&mut task.siblings);
        for reply in task.reply.take().into_iter().chain(siblings) {
            self.finished.failed += 1;
            reply.fail(failure.clone());
        }
    }
}
