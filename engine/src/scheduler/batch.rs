//! What a step is: its bounds, its chunks, and what comes back for them.

use amphora_hal::Slot;

use super::SeqSlot;
use crate::reply::Sampled;
use crate::step::Step;

/// Bounds of every step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulerLimits {
    /// Sequences that run at once.
    pub max_seqs: usize,
    /// Token rows of a step; at least `max_seqs`, so that no running sequence starves.
    pub max_batch_tokens: usize,
    /// Known tokens of one sequence in a step.
    pub chunk: usize,
    /// Rows of prompt logits in a step.
    pub prompt_logit_rows: usize,
    /// Later requests that may pass one whose adapter is coming.
    pub max_overtakes: usize,
}

/// Where the tokens of a chunk come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenSource {
    /// The host: the prompt, and what a preempted sequence had drawn.
    Known,
    /// The device's token table: the token drawn last.
    LastSampled,
}

/// What a step computes for one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// The sequence.
    pub seq: SeqSlot,
    /// Position of the first token.
    pub first: usize,
    /// Tokens.
    pub tokens: usize,
    /// Where their ids come from.
    pub source: TokenSource,
    /// Whether the last row draws a token.
    pub sample: bool,
    /// Whether the logits of all its rows are wanted.
    pub logits: bool,
    /// Its adapter.
    pub adapter: Option<Slot>,
}

/// What a step computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Its number.
    pub step: Step,
    /// Chunks in row order; a sequence is in it once.
    pub chunks: Vec<Chunk>,
}

impl Batch {
    /// Token rows.
    pub fn tokens(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.tokens).sum()
    }

    /// Chunks that draw a token.
    pub fn sampled(&self) -> usize {
        self.chunks.iter().filter(|chunk| chunk.sample).count()
    }
}

/// What came back from the device for a batch.
#[derive(Debug, Clone, Copy)]
pub struct StepResults<'a> {
    /// A token for each chunk that samples, in their order.
    pub sampled: &'a [Sampled],
    /// Rows of the chunks that want logits, in their order.
    pub prompt_logits: &'a [f32],
    /// Values of such a row.
    pub vocab: usize,
}
