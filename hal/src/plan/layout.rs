//! Where the fields of a plan lie: bounds, padded sizes, offsets.

use std::ops::Range;

use super::sequence::{EDIT_WORDS, MOST_BEST, SAMPLE_WORDS};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::segments::{Segments, Tile};
use crate::tensor::{ALIGN, Index, Tensor};

/// Bounds that hold for every plan of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanLimits {
    /// Sequences in flight; also the sequence entries of the token table.
    pub sequences: usize,
    /// Rows of a step.
    pub tokens: usize,
    /// KV blocks of one sequence.
    pub blocks_per_sequence: usize,
    /// Positions of one KV block.
    pub block_size: usize,
    /// KV blocks in the cache.
    pub kv_blocks: usize,
    /// Token ids.
    pub vocab: usize,
    /// Positions that the rotary table has.
    pub positions: usize,
    /// Adapter slots; 0 when adapters are off.
    pub slots: usize,
    /// Most rows of a tile, from [`crate::Caps`].
    pub tile_rows: usize,
    /// Most [`LogitEdit`](super::LogitEdit)s of a step, over all its sequences.
    pub edits: usize,
}

impl PlanLimits {
    /// Every index fits the plan's i32, and no divisor is 0.
    fn check(&self) -> Result<()> {
        let most = i32::MAX as usize;
        let fits = [
            self.sequences.checked_add(self.tokens),
            self.kv_blocks.checked_mul(self.block_size),
            Some(self.vocab),
            Some(self.positions),
            Some(self.edits),
        ];
        let sound = fits.iter().all(|value| value.is_some_and(|value| value <= most))
            && self.tile_rows > 0
            && self.slots <= i16::MAX as usize;
        if sound { Ok(()) } else { Err(Error::invalid("plan", format!("{self:?}"))) }
    }
}

/// The padded sizes of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Bucket {
    /// Rows.
    pub tokens: usize,
    /// Sequences.
    pub sequences: usize,
    /// Rows of logits: one for each sequence that samples, then those asked for beside them.
    pub logit_rows: usize,
}

/// The fields of a plan, in the order they lie. The edits come last: of these alone a plan uses
/// fewer than there is room for, and only what it uses is uploaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Field {
    TokenIndex,
    Prompt,
    Position,
    KvIndex,
    Slot,
    Perm,
    Tiles,
    QStart,
    Context,
    BlockTable,
    LogitRow,
    SampleSlot,
    Sampling,
    Copies,
    LogprobTarget,
    LogprobBest,
    EditStart,
    Edits,
}

const FIELDS: [Field; 18] = [
    Field::TokenIndex,
    Field::Prompt,
    Field::Position,
    Field::KvIndex,
    Field::Slot,
    Field::Perm,
    Field::Tiles,
    Field::QStart,
    Field::Context,
    Field::BlockTable,
    Field::LogitRow,
    Field::SampleSlot,
    Field::Sampling,
    Field::Copies,
    Field::LogprobTarget,
    Field::LogprobBest,
    Field::EditStart,
    Field::Edits,
];

/// Offsets of a bucket's fields. Pure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanLayout {
    bucket: Bucket,
    pub(super) offsets: [usize; FIELDS.len()],
    pub(super) dims: [[usize; 2]; FIELDS.len()],
    bytes: usize,
}

impl PlanLayout {
    /// The layout of `bucket` within `limits`.
    ///
    /// # Errors
    /// The bucket is larger than the limits.
    pub fn new(limits: &PlanLimits, bucket: Bucket) -> Result<Self> {
        limits.check()?;
        let Bucket { tokens, sequences, logit_rows } = bucket;
        if tokens > limits.tokens
            || sequences > limits.sequences
            || logit_rows < sequences
            || logit_rows > sequences + tokens
        {
            return Err(Error::invalid("plan", format!("{bucket:?} within {limits:?}")));
        }
        let tiles = Segments::bound(tokens, limits.slots, limits.tile_rows);
        let dims = FIELDS.map(|field| match field {
            Field::TokenIndex
            | Field::Prompt
            | Field::Position
            | Field::KvIndex
            | Field::Slot
            | Field::Perm => [tokens, 1],
            Field::Tiles => [tiles, size_of::<Tile>() / 4],
            Field::QStart | Field::EditStart => [sequences + 1, 1],
            Field::Context | Field::SampleSlot => [sequences, 1],
            Field::BlockTable => [sequences, limits.blocks_per_sequence],
            Field::LogitRow | Field::LogprobTarget | Field::LogprobBest => [logit_rows, 1],
            Field::Sampling => [sequences, SAMPLE_WORDS],
            Field::Copies => [sequences, 2],
            Field::Edits => [limits.edits, EDIT_WORDS],
        });
        let mut offsets = [0; FIELDS.len()];
        let mut bytes = 0;
        for (offset, [rows, width]) in offsets.iter_mut().zip(dims) {
            *offset = bytes;
            bytes = (bytes + rows * width * 4).next_multiple_of(ALIGN);
        }
        Ok(PlanLayout { bucket, offsets, dims, bytes })
    }

    /// Bytes of the plan with as many edits as there may be: the most that one upload moves.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of a plan with so many edits: what its upload moves.
    pub(super) fn used_bytes(&self, edits: usize) -> usize {
        self.offsets[Field::Edits as usize] + edits * EDIT_WORDS * 4
    }

    /// The padded sizes.
    pub fn bucket(&self) -> Bucket {
        self.bucket
    }

    pub(super) fn index<D: Device>(
        &self,
        limits: &PlanLimits,
        area: &Tensor<D>,
        field: Field,
    ) -> Result<Index<D>> {
        let at = field as usize;
        let [rows, width] = self.dims[at];
        let dims: &[usize] = if width == 1 { &[rows] } else { &[rows, width] };
        let offset = area.offset() + self.offsets[at];
        let tensor = Tensor::new(area.buffer().clone(), offset, dims, DType::I32)?;
        Ok(Index::new(tensor, self.values(limits, field)))
    }

    /// What the values of a field lie in, padding included.
    fn values(&self, limits: &PlanLimits, field: Field) -> Range<isize> {
        let below = |start: isize, end: usize| start..end as isize;
        let Bucket { tokens, sequences, logit_rows } = self.bucket;
        match field {
            Field::TokenIndex => below(0, limits.sequences + limits.tokens),
            Field::Prompt => below(0, limits.vocab),
            Field::Position => below(0, limits.positions),
            Field::KvIndex => below(-1, limits.kv_blocks * limits.block_size),
            Field::Slot => below(-1, limits.slots),
            Field::Perm => below(0, tokens),
            Field::QStart => below(0, tokens + 1),
            Field::Context => below(0, limits.positions + 1),
            Field::BlockTable => below(0, limits.kv_blocks),
            // Padding repeats row 0, in a bucket without rows too.
            Field::LogitRow if logit_rows > 0 => below(0, tokens.max(1)),
            Field::LogitRow => below(0, 0),
            Field::SampleSlot if sequences > 0 => below(-1, limits.sequences),
            Field::SampleSlot => below(0, 0),
            Field::Copies => below(-1, limits.kv_blocks),
            Field::LogprobTarget => below(-1, limits.vocab),
            Field::LogprobBest => below(-1, MOST_BEST + 1),
            Field::EditStart => below(0, limits.edits + 1),
            Field::Tiles | Field::Sampling | Field::Edits => isize::MIN..isize::MAX,
        }
    }
}
