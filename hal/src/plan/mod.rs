//! The step plan: everything the host knows about a step, in one block of bytes that goes up with
//! one copy and is read by every layer.
//!
//! [`PlanLayout`] fixes where each field lies for a bucket (padded sizes), so a graph recorded for
//! the bucket finds its inputs at the same addresses each time. [`PlanBuilder`] is the only way in:
//! it holds every token id, position, block id and slot against its bound. [`PlanView`] is the plan
//! twice: on the device, and the host's mirror.

mod builder;
mod layout;
mod sequence;

use std::sync::Arc;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::segments::{SegmentTable, Tile};
use crate::tensor::{Index, Tensor};

pub use builder::{PlanBuilder, PlanSent};
use layout::Field;
pub use layout::{Bucket, PlanLayout, PlanLimits};
pub use sequence::{
    BlockCopy, EDIT_WORDS, LogitEdit, LogitRows, MOST_BEST, SAMPLE_WORDS, SampleParams, SampleRow,
    SequencePlan, Tokens,
};

/// One sequence of the host's mirror.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceMeta {
    /// First row.
    pub first_row: usize,
    /// Rows.
    pub rows: usize,
    /// Positions that its last row sees.
    pub context: usize,
    /// Its row in the results, if it samples.
    pub result: Option<usize>,
    /// Its rows of logits asked for beside sampling, for their logits or for log-probabilities.
    pub logits: std::ops::Range<usize>,
}

/// What the host remembers of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPlan {
    /// The padded sizes.
    pub bucket: Bucket,
    /// Rows that are no padding.
    pub tokens: usize,
    /// The sequences, in row order.
    pub sequences: Vec<SequenceMeta>,
    /// Sequences that sample.
    pub sampled: usize,
    /// Rows of logits, sampled ones first.
    pub logit_rows: usize,
    /// Distinct adapter slots.
    pub segments: usize,
    /// The tiles of the dense projections.
    pub tiles: Vec<Tile>,
    /// Blocks copied before the step.
    pub copies: Vec<BlockCopy>,
    /// Edits of all sequences.
    pub edits: usize,
    /// Rows of logits whose log-probabilities are wanted.
    pub logprob_rows: usize,
    /// Rows of logits that come back themselves.
    pub raw_logit_rows: usize,
}

impl HostPlan {
    /// Whether [`crate::ops::CopyBlocks`] has anything to do.
    pub fn any_copies(&self) -> bool {
        !self.copies.is_empty()
    }

    /// Whether [`crate::ops::Logprobs`] has anything to do.
    pub fn any_logprobs(&self) -> bool {
        self.logprob_rows > 0
    }

    /// Whether logits themselves are wanted on the host.
    pub fn any_raw_logits(&self) -> bool {
        self.raw_logit_rows > 0
    }

    /// Whether any row has an adapter: if none has, the base operators run.
    pub fn any_lora(&self) -> bool {
        self.segments > 0
    }
}

/// Device bytes that plans are uploaded into; nothing else can write them.
#[derive(Debug)]
pub struct PlanArea<D: Device>(Tensor<D>);

impl<D: Device> PlanArea<D> {
    /// Takes dense bytes, at least [`PlanLayout::bytes`] of the largest bucket.
    ///
    /// # Errors
    /// `tensor` is not dense bytes.
    pub fn new(tensor: Tensor<D>) -> Result<Self> {
        if tensor.dtype() != DType::U8 || !tensor.shape().is_dense() {
            return Err(Error::invalid("plan area", format!("{}", tensor.shape())));
        }
        Ok(PlanArea(tensor))
    }
}

/// A plan on the device, and its mirror.
#[derive(Debug, Clone)]
pub struct PlanView<D: Device> {
    host: Arc<HostPlan>,
    token_index: Index<D>,
    prompt: Index<D>,
    position: Index<D>,
    kv_index: Index<D>,
    slot: Index<D>,
    segments: SegmentTable<D>,
    q_start: Index<D>,
    context: Index<D>,
    block_table: Index<D>,
    logit_row: Index<D>,
    sample_slot: Index<D>,
    sampling: Index<D>,
    copies: Index<D>,
    logprob_target: Index<D>,
    logprob_best: Index<D>,
    edit_start: Index<D>,
    edits: Index<D>,
    kv_blocks: usize,
    block_size: usize,
    vocab: usize,
}

impl<D: Device> PlanView<D> {
    fn new(
        limits: &PlanLimits,
        layout: &PlanLayout,
        area: &PlanArea<D>,
        host: HostPlan,
    ) -> Result<Self> {
        let index = |field| layout.index(limits, &area.0, field);
        Ok(PlanView {
            host: Arc::new(host),
            token_index: index(Field::TokenIndex)?,
            prompt: index(Field::Prompt)?,
            position: index(Field::Position)?,
            kv_index: index(Field::KvIndex)?,
            slot: index(Field::Slot)?,
            segments: SegmentTable {
                slot: index(Field::Slot)?,
                perm: index(Field::Perm)?,
                tiles: index(Field::Tiles)?,
                slots: limits.slots,
            },
            q_start: index(Field::QStart)?,
            context: index(Field::Context)?,
            block_table: index(Field::BlockTable)?,
            logit_row: index(Field::LogitRow)?,
            sample_slot: index(Field::SampleSlot)?,
            sampling: index(Field::Sampling)?,
            copies: index(Field::Copies)?,
            logprob_target: index(Field::LogprobTarget)?,
            logprob_best: index(Field::LogprobBest)?,
            edit_start: index(Field::EditStart)?,
            edits: index(Field::Edits)?,
            vocab: limits.vocab,
            kv_blocks: limits.kv_blocks,
            block_size: limits.block_size,
        })
    }

    /// The host's mirror.
    pub fn host(&self) -> &Arc<HostPlan> {
        &self.host
    }

    /// `[tokens]`: where each row's token id is found in the token table.
    pub fn token_index(&self) -> &Index<D> {
        &self.token_index
    }

    /// `[tokens]`: prompt token ids of this step; rows without one hold 0.
    pub fn prompt(&self) -> &Index<D> {
        &self.prompt
    }

    /// `[tokens]`: positions; 0 in padding rows.
    pub fn position(&self) -> &Index<D> {
        &self.position
    }

    /// `[tokens]`: block · block_size + offset where the row's k and v go; −1 marks padding.
    pub fn kv_index(&self) -> &Index<D> {
        &self.kv_index
    }

    /// `[tokens]`, the `lora_id_map`: adapter slots; −1 for none and in padding rows.
    pub fn slot(&self) -> &Index<D> {
        &self.slot
    }

    /// The tokens by adapter slot, for dense projections.
    pub fn segments(&self) -> &SegmentTable<D> {
        &self.segments
    }

    /// `[sequences + 1]`: first row of each sequence; padding sequences are empty.
    pub fn q_start(&self) -> &Index<D> {
        &self.q_start
    }

    /// `[sequences]`: positions that a sequence's last row sees, itself included.
    pub fn context(&self) -> &Index<D> {
        &self.context
    }

    /// `[sequences, blocks_per_sequence]`: KV blocks; 0 beyond a sequence's own.
    pub fn block_table(&self) -> &Index<D> {
        &self.block_table
    }

    /// `[logit_rows]`: rows that go through the head; padding repeats row 0.
    pub fn logit_row(&self) -> &Index<D> {
        &self.logit_row
    }

    /// `[sequences]`: for each row of results the sequence's entry in the token table; −1 marks
    /// padding.
    pub fn sample_slot(&self) -> &Index<D> {
        &self.sample_slot
    }

    /// `[sequences, 12]`: words of [`SampleRow`], one for each row of results.
    pub fn sampling(&self) -> &Index<D> {
        &self.sampling
    }

    /// `[sequences, 2]`: the block read and the block written of each [`BlockCopy`]; −1 in surplus rows.
    pub fn copies(&self) -> &Index<D> {
        &self.copies
    }

    /// `[logit_rows]`: the token whose log-probability is wanted; −1: the one drawn for this row.
    pub fn logprob_target(&self) -> &Index<D> {
        &self.logprob_target
    }

    /// `[logit_rows]`: how many of the most likely tokens are wanted; −1: nothing of this row.
    pub fn logprob_best(&self) -> &Index<D> {
        &self.logprob_best
    }

    /// `[sequences + 1]`: first edit of each row of results; rows without any are empty.
    pub fn edit_start(&self) -> &Index<D> {
        &self.edit_start
    }

    /// `[limits.edits, 4]`: words of [`LogitEdit`], by row of results, then by token. Only those that
    /// `edit_start` leads to are this plan's.
    pub fn edits(&self) -> &Index<D> {
        &self.edits
    }

    /// Token ids of this plan's edits and targets stay below it.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The blocks that this plan's ids stay below, and the positions of each.
    pub fn kv_shape(&self) -> (usize, usize) {
        (self.kv_blocks, self.block_size)
    }
}

/// The device's table of token ids: `[sequences]` last sampled tokens, then `[tokens]` prompt
/// tokens of the step at hand. Zeroed, so every entry is a token id from the start.
#[derive(Debug, Clone)]
pub struct TokenTable<D: Device> {
    index: Index<D>,
    sequences: usize,
}

impl<D: Device> TokenTable<D> {
    /// A table over zeroed memory: `tensor` is dense i32 `[sequences + tokens]`.
    ///
    /// # Errors
    /// The type or shape is another.
    pub fn new(tensor: Tensor<D>, limits: &PlanLimits) -> Result<Self> {
        let dims = [limits.sequences + limits.tokens];
        if tensor.dtype() != DType::I32 || tensor.dims() != dims || !tensor.shape().is_dense() {
            return Err(Error::invalid("token table", format!("{}", tensor.shape())));
        }
        let index = Index::new(tensor, 0..limits.vocab as isize);
        Ok(TokenTable { index, sequences: limits.sequences })
    }

    /// Token ids stay below it.
    pub fn vocab(&self) -> usize {
        self.index.values().end as usize
    }

    /// The ids.
    pub fn index(&self) -> &Index<D> {
        &self.index
    }

    /// Entries of sequences, in front of the prompt's.
    pub fn sequences(&self) -> usize {
        self.sequences
    }

    pub(crate) fn tensor(&self) -> &Tensor<D> {
        self.index.tensor()
    }
}
