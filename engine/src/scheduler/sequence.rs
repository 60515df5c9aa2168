//! A sequence that runs: how far it is planned, how far it is computed, what it holds.

use amphora_hal::Slot;

use crate::adapters::ledger::{Hold, Pin};
use crate::kv::BlockTable;
use crate::reply::{Reply, Spec};
use crate::request::{RequestId, Want};

/// A stable small number of a running sequence: its entry in the device's token table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqSlot(pub usize);

/// The adapter a running sequence uses; dropping it gives both references back.
#[derive(Debug)]
pub struct HeldAdapter {
    /// Keeps the version alive.
    pub pin: Pin,
    /// Keeps it in its slot.
    pub hold: Hold,
}

/// A running sequence.
#[derive(Debug)]
pub struct Sequence {
    /// Its request.
    pub id: RequestId,
    /// What was asked.
    pub spec: Spec,
    /// Its cache blocks.
    pub table: BlockTable,
    /// Its adapter.
    pub adapter: Option<HeldAdapter>,
    /// Positions that planned steps compute.
    pub(super) planned: usize,
    /// Tokens of the answer that planned steps draw; their values need not be known yet.
    pub(super) planned_outputs: usize,
    /// Steps planned with it and not committed.
    pub(super) in_flight: usize,
    /// `None` once the client has been told the end.
    pub(super) reply: Option<Reply>,
}

/// What the next step is to do for a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Compute the last drawn token and draw the next.
    Decode,
    /// Compute so many tokens of the prompt.
    Prompt(usize),
    /// Nothing more; the answer's length is planned, or the sequence is over.
    Nothing,
}

impl Sequence {
    /// The slot of its adapter.
    pub fn adapter_slot(&self) -> Option<Slot> {
        self.adapter.as_ref().map(|adapter| adapter.hold.slot)
    }

    pub(super) fn wanted(&self) -> Wanted {
        let prompt = self.spec.prompt.len();
        if self.reply.is_none() {
            Wanted::Nothing
        } else if self.planned < prompt {
            Wanted::Prompt(prompt - self.planned)
        } else if self.planned_outputs < self.spec.max_new_tokens {
            Wanted::Decode
        } else {
            Wanted::Nothing
        }
    }

    pub(super) fn wants_prompt_logits(&self) -> bool {
        self.spec.prompt_logits == Want::Yes
    }
}
