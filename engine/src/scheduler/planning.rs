//! One step: who computes what, who loses blocks for it, and which answers begin from a prompt that is
//! computed with it.

use std::collections::HashSet;

use super::admission::Waiting;
use super::history::History;
use super::sequence::RowsLeft;
use super::{Scheduler, SeqSlot, Sequence, State, Task, Wanted};
use crate::adapters::ledger::{AdapterKey, Residency};
use crate::kv::{BlockTable, PendingCopy};
use crate::scheduler::batch::{Batch, Chunk, TokenSource};
use crate::scheduler::sequence::Ticket;

/// A step while it is put together: what is left of its bounds, and what it has.
pub(super) struct Draft {
    pub tokens: usize,
    rows: RowsLeft,
    /// What nobody who runs has been granted.
    edits: usize,
    granted: HashSet<SeqSlot>,
    chunks: Vec<Chunk>,
    /// What its copies read: released when nothing is taken for this step any more.
    copies: Vec<PendingCopy>,
}

impl Scheduler {
    /// Plans the next step; `None` when nothing can be done now. Asks `residency` where adapters are
    /// and never waits for one.
    pub fn schedule(&mut self, residency: &dyn Fn(&AdapterKey) -> Residency) -> Option<Batch> {
        let mut draft = Draft {
            tokens: self.limits.max_batch_tokens,
            rows: RowsLeft {
                logits: self.limits.prompt_logit_rows,
                logprobs: self.limits.prompt_logprob_rows,
            },
            edits: self.limits.edits,
            granted: HashSet::new(),
            chunks: Vec::new(),
            copies: Vec::new(),
        };
        self.grant_edits(&mut draft);
        let (decodes, prompts): (Vec<SeqSlot>, Vec<SeqSlot>) =
            self.order.iter().partition(|slot| {
                self.sequence(**slot).is_some_and(|sequence| sequence.wanted() == Wanted::Decode)
            });
        for slot in decodes.into_iter().chain(prompts) {
            self.plan(slot, &mut draft);
        }
        self.admit(residency, &mut draft);
        draft.copies.into_iter().for_each(|copy| self.kv.copied(copy));
        if draft.chunks.is_empty() {
            return None;
        }
        for chunk in &draft.chunks {
            self.fork(chunk.seq);
        }
        self.last_planned = self.last_planned.next();
        Some(Batch { step: self.last_planned, chunks: draft.chunks })
    }

    /// Grants the step's edits by arrival. Prompts are planned behind decodes, so one that comes to its first
    /// token could otherwise be kept from it by later ones for ever.
    fn grant_edits(&self, draft: &mut Draft) {
        let wants = |(_, sequence): &(SeqSlot, &Sequence)| sequence.wanted() != Wanted::Nothing;
        for (slot, sequence) in self.running().filter(wants) {
            let Some(left) = draft.edits.checked_sub(sequence.task.edit_count()) else {
                draft.edits = 0;
                return;
            };
            draft.edits = left;
            draft.granted.insert(slot);
        }
    }

    /// Plans one sequence's part of the step.
    pub(super) fn plan(&mut self, slot: SeqSlot, draft: &mut Draft) {
        let Some(sequence) = self.sequence(slot) else { return };
        let (wanted, source) = match sequence.wanted() {
            Wanted::Nothing => return,
            Wanted::Decode => (1, TokenSource::LastSampled),
            Wanted::Known(left) => (left.min(self.limits.chunk), TokenSource::Known),
        };
        let (tokens, rows) = sequence.stretch(wanted.min(draft.tokens), &draft.rows);
        let sample = sequence.planned + tokens >= sequence.fed
            && sequence.planned_outputs < sequence.task.spec.max_new_tokens;
        let edits = match sample && !draft.granted.contains(&slot) {
            true => sequence.task.edit_count(),
            false => 0,
        };
        if tokens == 0 || edits > draft.edits || !self.make_room(slot, tokens) {
            return;
        }
        let Some(sequence) = self.slots[slot.0].as_mut() else { return };
        let first = sequence.planned;
        sequence.planned += tokens;
        sequence.in_flight += 1;
        sequence.planned_outputs += usize::from(sample);
        draft.tokens -= tokens;
        draft.rows.take(rows, tokens);
        draft.edits -= edits;
        let copy = sequence.copy.take();
        let adapter = sequence.adapter_slot();
        let blocks = copy.as_ref().map(PendingCopy::blocks);
        let top = if sample { sequence.task.spec.logprobs.unwrap_or(0) } else { 0 };
        draft.chunks.push(Chunk {
            seq: slot,
            first,
            tokens,
            source,
            sample,
            top,
            rows,
            copy: blocks,
            adapter,
        });
        draft.copies.extend(copy);
    }

    /// Sees to it that a sequence has blocks for its next tokens. Where there are none, the last to arrive
    /// loses its own, and if that is this one, it is not planned: `false`.
    ///
    /// The first to arrive always goes on: it loses its blocks to nobody, and alone it fits the pool. So
    /// every sequence comes to be the first, and ends.
    fn make_room(&mut self, slot: SeqSlot, tokens: usize) -> bool {
        loop {
            let Some(sequence) = self.slots[slot.0].as_mut() else { return false };
            let positions = sequence.planned + tokens;
            if self.kv.grow(&mut sequence.table, positions) {
                return true;
            }
            if self.drop_a_share() {
                continue;
            }
            let last = self.running().filter(|(_, sequence)| sequence.runs()).last();
            let Some((victim, _)) = last else { return false };
            self.preempt(victim);
            if victim == slot {
                return false;
            }
        }
    }

    /// Takes a sequence's blocks and adapter. Steps in flight with it still bring their tokens; then it
    /// waits, by its arrival, to compute all it has once more.
    fn preempt(&mut self, slot: SeqSlot) {
        let Some(sequence) = self.slots[slot.0].as_mut() else { return };
        self.preemptions += 1;
        sequence.state = State::Preempted;
        sequence.hold = None;
        self.kv.release(std::mem::take(&mut sequence.table));
        if let Some(copy) = sequence.copy.take() {
            self.kv.copied(copy);
        }
        self.leave(slot);
    }

    /// Begins the other answers to a prompt that is computed with the step at hand, each with the blocks
    /// it shares; they run from the next step on.
    fn fork(&mut self, slot: SeqSlot) {
        let Some(sequence) = self.slots[slot.0].as_mut() else { return };
        let task = &mut sequence.task;
        let prompt = task.spec.prompt.len();
        if sequence.planned < prompt || task.spec.max_new_tokens == 0 {
            return;
        }
        for reply in std::mem::take(&mut task.siblings) {
            let child = Task {
                id: task.id,
                spec: task.spec.clone(),
                ticket: Ticket { choice: reply.choice(), ..task.ticket },
                tokens: task.spec.prompt.clone(),
                history: History::of(&task.spec),
                told_rows: prompt,
                ran: false,
                pin: task.pin.clone(),
                reply: Some(reply),
                siblings: Vec::new(),
            };
            // The last token is computed by each: its own first token is drawn from there.
            let share: BlockTable = self.kv.share(&sequence.table, prompt - 1);
            let waiting = Waiting { task: child, overtaken: 0, fork: Some(share) };
            let at = self.waiting.partition_point(|one| one.task.ticket < waiting.task.ticket);
            self.waiting.insert(at, waiting);
        }
    }
}
