//! An answer being made: what was asked and drawn of it, whether it waits or runs; and what it holds and
//! how far it is planned while it runs.

use std::sync::Arc;

use amphora_hal::{LogitEdit, Slot};

use super::batch::Rows;
use super::history::History;
use crate::adapters::ledger::{Hold, Pin};
use crate::kv::{BlockTable, Generation, PendingCopy};
use crate::reply::{Reply, Spec};
use crate::request::{RequestId, Want, choice_seed};

/// A stable small number of a running sequence: its entry in the device's token table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqSlot(pub usize);

/// Order of arrival: of requests, and of the answers of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ticket {
    pub request: u64,
    pub choice: usize,
}

/// One answer, from the moment it is asked until it ends.
#[derive(Debug)]
pub struct Task {
    /// Its request.
    pub id: RequestId,
    /// What was asked.
    pub spec: Arc<Spec>,
    pub(super) ticket: Ticket,
    /// The prompt, then what was drawn and told.
    pub(super) tokens: Vec<u32>,
    /// What penalties act on.
    pub(super) history: History,
    /// Prompt positions that were told, of those of `rows`.
    pub(super) told_rows: usize,
    /// Whether it ran before: what it finds in the cache then may be its own.
    pub(super) ran: bool,
    /// Keeps its adapter's version alive.
    pub(super) pin: Option<Pin>,
    /// `None` once the client has been told the end.
    pub(super) reply: Option<Reply>,
    /// Answers to the same prompt that begin when it is computed.
    pub(super) siblings: Vec<Reply>,
}

impl Task {
    /// The prompt, then what was drawn and told.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// With a token's position it decides the draw.
    pub fn seed(&self) -> u64 {
        choice_seed(self.spec.seed, self.ticket.choice)
    }

    pub(super) fn generation(&self) -> Generation {
        Generation::of(self.pin.as_ref())
    }

    pub(super) fn drawn(&self) -> usize {
        self.tokens.len() - self.spec.prompt.len()
    }

    /// Positions from the first that need not be computed where the cache has them: those whose logits
    /// nobody waits for, and never the last token's, from which the next is drawn.
    pub(super) fn skippable(&self) -> usize {
        let last = self.tokens.len() - 1;
        if self.wants_rows() { last.min(self.told_rows) } else { last }
    }

    /// Whether something of prompt positions is still to be told.
    pub(super) fn wants_rows(&self) -> bool {
        self.told_rows < self.rows_end()
    }

    /// Positions of the prompt, from the first, whose rows are told: all for their logits, and all but the
    /// last for the log-probabilities of the tokens that follow.
    pub(super) fn rows_end(&self) -> usize {
        let prompt = self.spec.prompt.len();
        match (self.spec.prompt_logits, self.spec.prompt_logprobs) {
            (Want::Yes, _) => prompt,
            (Want::No, Some(_)) => prompt - 1,
            (Want::No, None) => 0,
        }
    }

    /// What is told of so many rows, some of which may be behind those that are told.
    fn rows(&self, rows: usize) -> Rows {
        match self.spec.prompt_logits {
            Want::Yes => Rows::Logits,
            Want::No => Rows::Logprobs { rows, best: self.spec.prompt_logprobs.unwrap_or(0) },
        }
    }

    /// How many edits its next draw has.
    pub(super) fn edit_count(&self) -> usize {
        self.history.count(&self.spec)
    }

    /// Edits of logits for its next draw.
    pub fn edits(&self) -> Vec<LogitEdit> {
        self.history.edits(&self.spec)
    }
}

/// Whether a sequence goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// It does, until its answer ends.
    Runs,
    /// Its blocks were taken; it goes back to those that wait when no step has it any more.
    Preempted,
}

/// A running sequence.
#[derive(Debug)]
pub struct Sequence {
    /// Its answer.
    pub task: Task,
    /// Its cache blocks; empty once it has ended or was preempted.
    pub table: BlockTable,
    /// Keeps its adapter in its slot.
    pub(super) hold: Option<Hold>,
    /// What its first step copies.
    pub(super) copy: Option<PendingCopy>,
    /// Tokens that were known when it was admitted: their ids go to the device, later ones are there.
    pub(super) fed: usize,
    /// Positions that planned steps compute.
    pub(super) planned: usize,
    /// Tokens of the answer that planned steps draw; their values need not be known yet.
    pub(super) planned_outputs: usize,
    /// Steps planned with it and not committed.
    pub(super) in_flight: usize,
    pub(super) state: State,
}

/// What the next step is to do for a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Compute the last drawn token and draw the next.
    Decode,
    /// Compute so many tokens whose ids the host knows.
    Known(usize),
    /// Nothing now: the answer's length is planned, the sequence is over, or its penalties wait for the
    /// token that is being drawn.
    Nothing,
}

impl Sequence {
    /// The slot of its adapter.
    pub fn adapter_slot(&self) -> Option<Slot> {
        self.hold.as_ref().map(|hold| hold.slot)
    }

    /// Whether it holds blocks and may be asked for them.
    pub(super) fn runs(&self) -> bool {
        self.state == State::Runs && self.task.reply.is_some()
    }

    pub(super) fn wanted(&self) -> Wanted {
        if !self.runs() {
            Wanted::Nothing
        } else if self.planned < self.fed {
            Wanted::Known(self.fed - self.planned)
        } else if self.planned_outputs < self.task.spec.max_new_tokens
            && (!self.task.history.matters() || self.planned_outputs == self.task.drawn())
        {
            Wanted::Decode
        } else {
            Wanted::Nothing
        }
    }

    /// Tokens from `planned` on that one chunk can have, at most `tokens`, and what is told of them: rows
    /// that are told are not mixed with rows that were, and there are at most `left` of them.
    pub(super) fn stretch(&self, tokens: usize, left: &RowsLeft) -> (usize, Rows) {
        let (task, first) = (&self.task, self.planned);
        if !task.wants_rows() || first >= task.rows_end() {
            return (tokens, Rows::None);
        }
        if first < task.told_rows {
            return (tokens.min(task.told_rows - first), Rows::None);
        }
        let tokens = tokens.min(task.spec.prompt.len() - first);
        let (tokens, rows) = match task.spec.prompt_logits {
            Want::Yes => (tokens.min(left.logits), 0),
            Want::No => {
                let rows = tokens.min(task.rows_end() - first).min(left.logprobs);
                // The last token of a prompt needs no row.
                let last = usize::from(first + rows == task.rows_end());
                (tokens.min(rows + last), rows)
            }
        };
        (tokens, task.rows(rows))
    }
}

/// What is left of a step's rows of prompt logits.
#[derive(Debug)]
pub(super) struct RowsLeft {
    pub logits: usize,
    pub logprobs: usize,
}

impl RowsLeft {
    /// Takes what a chunk has.
    pub fn take(&mut self, rows: Rows, tokens: usize) {
        match rows {
            Rows::None => {}
            Rows::Logits => self.logits -= tokens,
            Rows::Logprobs { rows, .. } => self.logprobs -= rows,
        }
    }
}
