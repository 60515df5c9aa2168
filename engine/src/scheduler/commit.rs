//! What a step brought, to the clients; and the end of sequences.

use super::admission::Waiting;
use super::{Scheduler, SeqSlot, State};
use crate::kv::Generation;
use crate::request::{Delivery, Event, FinishReason};
use crate::scheduler::batch::{Batch, Brought, Chunk, Rows, StepResults, TokenSource};

impl Scheduler {
    /// Takes the results of the oldest batch that is not committed, and tells the clients.
    pub fn commit(&mut self, batch: &Batch, results: StepResults) {
        assert_eq!(batch.step, self.last_committed.next(), "steps are committed in order");
        self.last_committed = batch.step;
        for (chunk, brought) in batch.chunks.iter().zip(results.chunks) {
            self.commit_chunk(chunk, brought, results.vocab);
        }
    }

    fn commit_chunk(&mut self, chunk: &Chunk, brought: Brought, vocab: usize) {
        let Some(sequence) = self.slots[chunk.seq.0].as_mut() else {
            return; // only after `fail_all`, which frees slots whatever is in flight
        };
        sequence.in_flight -= 1;
        if chunk.source == TokenSource::Known {
            self.prompt_tokens += chunk.tokens as u64;
        }
        let computed = chunk.first + chunk.tokens;
        let task = &mut sequence.task;
        let id = task.id;
        let mut end = None;
        if let Some(reply) = &mut task.reply {
            if sequence.state == State::Runs {
                let generation = Generation::of(task.pin.as_ref());
                self.kv.note(&mut sequence.table, generation, &task.tokens[..computed]);
            }
            let event = match chunk.rows {
                Rows::None | Rows::Logprobs { rows: 0, .. } => None,
                Rows::Logits => {
                    let rows = brought.logits;
                    Some(Event::PromptLogits { first_position: chunk.first, vocab, rows })
                }
                Rows::Logprobs { .. } => Some(Event::PromptLogprobs {
                    first_position: chunk.first + 1,
                    tokens: brought.logprobs,
                }),
            };
            if let Some(event) = event {
                task.told_rows = chunk.first + chunk.rows.count(chunk.tokens);
                let gone = reply.send(event) == Delivery::Gone;
                end = gone.then_some(FinishReason::Cancelled);
            }
            if let (None, Some(token)) = (end, brought.token) {
                self.tokens += 1;
                task.tokens.push(token.id);
                task.history.push(token.id);
                end = reply.token(token);
            }
            let prompt_alone = task.spec.max_new_tokens == 0;
            if prompt_alone && computed == task.spec.prompt.len() {
                end = end.or(Some(FinishReason::Length));
            }
        }
        match end {
            // Whoever hears one answer no more hears none.
            Some(FinishReason::Cancelled) => self.cancel(id),
            Some(reason) => self.finish(chunk.seq, reason),
            None => {}
        }
        self.leave(chunk.seq);
    }

    /// Tells the client the end and gives back what the sequence holds, but its slot, which stays until no
    /// step has it.
    pub(super) fn finish(&mut self, slot: SeqSlot, reason: FinishReason) {
        let Some(sequence) = self.slots[slot.0].as_mut() else { return };
        self.kv.release(std::mem::take(&mut sequence.table));
        if let Some(copy) = sequence.copy.take() {
            self.kv.copied(copy);
        }
        (sequence.hold, sequence.task.pin) = (None, None);
        let siblings = std::mem::take(&mut sequence.task.siblings);
        for reply in sequence.task.reply.take().into_iter().chain(siblings) {
            self.finished.count(reason);
            reply.finish(reason);
        }
    }

    /// Frees the slot of a sequence that no step has any more, if it is over or was preempted; the latter
    /// waits again.
    pub(super) fn leave(&mut self, slot: SeqSlot) {
        let done = |sequence: &super::Sequence| !sequence.runs() && sequence.in_flight == 0;
        if self.sequence(slot).is_some_and(done)
            && let Some(sequence) = self.slots[slot.0].take()
        {
            self.order.retain(|&other| other != slot);
            self.kv.release(sequence.table);
            if sequence.task.reply.is_some() {
                self.enqueue(Waiting { task: sequence.task, overtaken: 0, fork: None });
            }
        }
    }
}
