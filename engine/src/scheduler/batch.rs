//! What a step is: its bounds, its chunks, and what comes back for them.

use amphora_hal::{BlockCopy, Slot};

use super::SeqSlot;
use crate::reply::Sampled;
use crate::request::PromptLogprob;
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
    /// Rows of prompt logits in a step that log-probabilities are made of.
    pub prompt_logprob_rows: usize,
    /// Tokens whose logits bias and penalties change in a step; at least as many as any request asks.
    pub edits: usize,
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

/// What comes back for rows of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// Nothing.
    None,
    /// The logits of all rows of the chunk.
    Logits,
    /// Log-probabilities of the tokens that follow so many of its `rows`, from the first on, and of the
    /// `best` likeliest.
    Logprobs { rows: usize, best: usize },
}

impl Rows {
    /// Rows that go through the head.
    pub fn count(self, tokens: usize) -> usize {
        match self {
            Rows::None => 0,
            Rows::Logits => tokens,
            Rows::Logprobs { rows, .. } => rows,
        }
    }
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
    /// The likeliest tokens that are told beside the drawn one.
    pub top: usize,
    /// What is told of its rows beside that.
    pub rows: Rows,
    /// A block that is copied before: the sequence begins with another's tokens.
    pub copy: Option<BlockCopy>,
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

    /// Rows of logits beside those that draw.
    pub fn extra_rows(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.rows.count(chunk.tokens)).sum()
    }

    /// Chunks that draw a token.
    pub fn sampled(&self) -> usize {
        self.chunks.iter().filter(|chunk| chunk.sample).count()
    }
}

/// What came back from the device for a chunk.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Brought {
    /// The token drawn, if it draws.
    pub token: Option<Sampled>,
    /// `[tokens, vocab]`, if it wants logits.
    pub logits: Vec<f32>,
    /// For each row that wants them.
    pub logprobs: Vec<PromptLogprob>,
}

/// What came back from the device for a batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepResults {
    /// For each chunk.
    pub chunks: Vec<Brought>,
    /// Values of a row of logits.
    pub vocab: usize,
}
