//! The step plan: everything the host knows about a step, in one block of bytes that goes up with
//! one copy and is read by every layer.
//!
//! [`PlanLayout`] fixes where each field lies for a bucket (padded sizes), so a graph recorded for
//! the bucket finds its inputs at the same addresses each time. [`PlanBuilder`] is the only way in:
//! it holds every token id, position, block id and slot against its bound. [`PlanView`] is the plan
//! twice: on the device, and the host's mirror.

mod builder;

use std::ops::Range;
use std::sync::Arc;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::segments::{SegmentTable, Segments, Tile};
use crate::tensor::{ALIGN, Index, Tensor};

pub use builder::{LogitRows, PlanBuilder, PlanSent, SampleParams, SequencePlan, Tokens};

/// Words of a sequence's sampling parameters; see [`SampleRow`].
pub const SAMPLE_WORDS: usize = size_of::<SampleRow>() / 4;

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

/// The fields of a plan, in the order they lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
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
}

const FIELDS: [Field; 13] = [
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
];

/// Offsets of a bucket's fields. Pure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanLayout {
    bucket: Bucket,
    offsets: [usize; FIELDS.len()],
    dims: [[usize; 2]; FIELDS.len()],
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
            Field::QStart => [sequences + 1, 1],
            Field::Context | Field::SampleSlot => [sequences, 1],
            Field::BlockTable => [sequences, limits.blocks_per_sequence],
            Field::LogitRow => [logit_rows, 1],
            Field::Sampling => [sequences, SAMPLE_WORDS],
        });
        let mut offsets = [0; FIELDS.len()];
        let mut bytes = 0;
        for (offset, [rows, width]) in offsets.iter_mut().zip(dims) {
            *offset = bytes;
            bytes = (bytes + rows * width * 4).next_multiple_of(ALIGN);
        }
        Ok(PlanLayout { bucket, offsets, dims, bytes })
    }

    /// Bytes of the plan: what one upload moves.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The padded sizes.
    pub fn bucket(&self) -> Bucket {
        self.bucket
    }

    fn index<D: Device>(
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
            Field::Tiles | Field::Sampling => isize::MIN..isize::MAX,
        }
    }
}

/// A sequence's sampling parameters as kernels read them, 8 words.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct SampleRow {
    /// 0: greedy.
    pub temperature: f32,
    /// 1: off.
    pub top_p: f32,
    /// 0: off.
    pub top_k: u32,
    /// The position that the sampled token will have.
    pub position: u32,
    /// Low half of the seed.
    pub seed_low: u32,
    /// High half of the seed.
    pub seed_high: u32,
    /// 1: the log-probability of the sampled token is wanted.
    pub logprob: u32,
    /// Always 0.
    pub reserved: u32,
}

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
    /// Its rows of logits asked for beside sampling.
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
}

impl HostPlan {
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
    kv_blocks: usize,
    block_size: usize,
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

    /// `[sequences, 8]`: words of [`SampleRow`], one for each row of results.
    pub fn sampling(&self) -> &Index<D> {
        &self.sampling
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
