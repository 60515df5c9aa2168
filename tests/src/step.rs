//! Step plans as plain host values: what a case gives to hal's builder, and what the oracle reads
//! without it.

use amphora_hal::{
    BlockCopy, Bucket, LogitEdit, LogitRows, PlanBuilder, PlanLayout, PlanLimits, Result,
    SampleParams, SequencePlan, Slot, Tokens,
};

use crate::oracle::paged_attention::Sequence;
use crate::rng::Rng;

/// Positions of a block unless a case says otherwise.
pub const BLOCK_SIZE: usize = 16;

/// Rows that go through the head beside the sampled one.
#[derive(Debug, Clone, Default)]
pub enum StepLogits {
    /// None.
    #[default]
    None,
    /// Every row, for its logits.
    All,
    /// The first rows, for the log-probability of a token each and of the most likely.
    Targets(Vec<u32>, usize),
}

/// One sequence of a step.
#[derive(Debug, Clone, Default)]
pub struct StepSequence {
    /// Its entry in the token table.
    pub number: usize,
    /// Its adapter.
    pub slot: Option<usize>,
    /// Position of its first row.
    pub first: usize,
    /// Its prompt tokens, or `None`: the last sampled one.
    pub prompt: Option<Vec<u32>>,
    /// Its blocks from position 0 on.
    pub blocks: Vec<u32>,
    /// Draw a token after its last row.
    pub sample: Option<SampleParams>,
    /// What is known of tokens for that draw.
    pub edits: Vec<LogitEdit>,
    /// Log-probabilities of that draw: how many of the most likely tokens.
    pub logprobs: Option<usize>,
    /// Rows beside that.
    pub logits: StepLogits,
    /// A block copied before the step.
    pub copy: Option<BlockCopy>,
}

impl StepSequence {
    /// Rows of this step.
    pub fn rows(&self) -> usize {
        self.prompt.as_ref().map_or(1, Vec::len)
    }
}

/// A step.
#[derive(Debug, Clone)]
pub struct Step {
    /// Bounds.
    pub limits: PlanLimits,
    /// Padded sizes.
    pub bucket: Bucket,
    /// In row order.
    pub sequences: Vec<StepSequence>,
}

/// Sizes of a random step.
#[derive(Debug, Clone)]
pub struct Ragged {
    /// For each sequence (positions in the cache, rows of this step).
    pub sequences: Vec<(usize, usize)>,
    /// Padded sizes.
    pub bucket: Bucket,
    /// Bounds.
    pub limits: PlanLimits,
}

/// Bounds wide enough for `bucket`, with one block for each row unless a case widens them.
pub fn limits(bucket: Bucket, slots: usize, tile_rows: usize) -> PlanLimits {
    PlanLimits {
        sequences: bucket.sequences,
        tokens: bucket.tokens,
        blocks_per_sequence: 1,
        block_size: BLOCK_SIZE,
        kv_blocks: bucket.tokens,
        vocab: 100,
        positions: BLOCK_SIZE,
        slots,
        tile_rows,
        edits: 0,
    }
}

impl Step {
    /// Each row its own sequence at position 0, using the adapter that `slots` says; the rows from
    /// `slots.len()` on are padding.
    pub fn of_rows(slots: &[Option<usize>], bucket_tokens: usize, limits: PlanLimits) -> Self {
        let sequences = slots.iter().enumerate().map(|(i, &slot)| StepSequence {
            number: i,
            slot,
            first: 0,
            prompt: Some(vec![(i % limits.vocab) as u32]),
            blocks: vec![i as u32],
            ..StepSequence::default()
        });
        Step { limits, bucket: rows_bucket(bucket_tokens), sequences: sequences.collect() }
    }

    /// Sequences of the given sizes over blocks in random order, with random tokens, adapters and
    /// places in the token table; a single row comes from the table as often as not.
    pub fn random(rng: &mut Rng, ragged: &Ragged) -> Self {
        let limits = ragged.limits;
        let mut blocks = rng.permutation(limits.kv_blocks).into_iter();
        let numbers = rng.permutation(limits.sequences);
        let sequences = ragged.sequences.iter().zip(numbers).map(|(&(first, rows), number)| {
            let needed = (first + rows).div_ceil(limits.block_size);
            let ids = (0..rows).map(|_| rng.below(limits.vocab) as u32).collect();
            StepSequence {
                number,
                slot: (limits.slots > 0 && rng.below(3) > 0).then(|| rng.below(limits.slots)),
                first,
                prompt: (rows > 1 || rng.below(2) == 0).then_some(ids),
                blocks: blocks.by_ref().take(needed).map(|block| block as u32).collect(),
                ..StepSequence::default()
            }
        });
        Step { limits, bucket: ragged.bucket, sequences: sequences.collect() }
    }

    /// Some rows, each as a sequence of its own that is as far as the row was; the limits stay, so
    /// that caches do.
    #[must_use]
    pub fn of_single_rows(&self, rows: &[usize]) -> Self {
        let single = rows.iter().enumerate().map(|(number, &row)| {
            let mut end = 0;
            let of = self.sequences.iter().find(|sequence| {
                end += sequence.rows();
                row < end
            });
            let sequence = of.expect("the row is no padding");
            let at = row + sequence.rows() - end;
            StepSequence {
                number,
                first: sequence.first + at,
                prompt: Some(vec![0]),
                ..sequence.clone()
            }
        });
        let sequences = single.collect();
        let mut limits = self.limits;
        (limits.sequences, limits.tokens) = (rows.len(), rows.len());
        Step { limits, bucket: rows_bucket(rows.len()), sequences }
    }

    /// The same sequences through hal.
    ///
    /// # Errors
    /// hal refuses one: the case is wrong.
    pub fn builder(&self) -> Result<PlanBuilder> {
        let mut builder = PlanBuilder::new(&self.limits, self.bucket)?;
        for sequence in &self.sequences {
            builder.push(SequencePlan {
                sequence: sequence.number,
                slot: sequence.slot.map(|slot| Slot::new(slot as u16)),
                first_position: sequence.first,
                tokens: sequence.prompt.as_ref().map_or(Tokens::Last, |ids| Tokens::Prompt(ids)),
                blocks: &sequence.blocks,
                copy: sequence.copy,
                sample: sequence.sample,
                edits: &sequence.edits,
                logprobs: sequence.logprobs,
                logits: match &sequence.logits {
                    StepLogits::None => LogitRows::None,
                    StepLogits::All => LogitRows::All,
                    StepLogits::Targets(tokens, best) => LogitRows::Targets { tokens, best: *best },
                },
            })?;
        }
        Ok(builder)
    }

    /// Bytes of the plan.
    ///
    /// # Errors
    /// The bucket is larger than the limits.
    pub fn plan_bytes(&self) -> Result<usize> {
        Ok(PlanLayout::new(&self.limits, self.bucket)?.bytes())
    }

    /// One value for each row, then `padding` for the rest of the bucket.
    fn by_row<T: Copy>(&self, padding: T, of: impl Fn(&StepSequence, usize) -> T) -> Vec<T> {
        let mut out = Vec::new();
        for sequence in &self.sequences {
            for i in 0..sequence.rows() {
                out.push(of(sequence, i));
            }
        }
        out.resize(self.bucket.tokens, padding);
        out
    }

    /// Rows that are no padding.
    pub fn rows(&self) -> usize {
        self.sequences.iter().map(StepSequence::rows).sum()
    }

    /// Adapter of each row.
    pub fn slots(&self) -> Vec<Option<usize>> {
        self.by_row(None, |sequence, _| sequence.slot)
    }

    /// Position of each row.
    pub fn positions(&self) -> Vec<i32> {
        self.by_row(0, |sequence, i| (sequence.first + i) as i32)
    }

    /// Place in the cache of each row; −1 in padding.
    pub fn kv_index(&self) -> Vec<i32> {
        let size = self.limits.block_size;
        self.by_row(-1, |sequence, i| {
            let position = sequence.first + i;
            (sequence.blocks[position / size] as usize * size + position % size) as i32
        })
    }

    /// Prompt token of each row; 0 where there is none.
    pub fn prompt(&self) -> Vec<i32> {
        self.by_row(0, |sequence, i| sequence.prompt.as_ref().map_or(0, |ids| ids[i] as i32))
    }

    /// Where each row's token lies in the token table.
    pub fn token_index(&self) -> Vec<i32> {
        let prompts = self.limits.sequences;
        let mut row = 0;
        let mut out = Vec::new();
        for sequence in &self.sequences {
            for _ in 0..sequence.rows() {
                let from_prompt = sequence.prompt.is_some();
                out.push(if from_prompt { prompts + row } else { sequence.number } as i32);
                row += 1;
            }
        }
        out.resize(self.bucket.tokens, 0);
        out
    }

    /// Rows that go through the head: the last of each sampling sequence, then those asked for;
    /// padding repeats row 0.
    pub fn logit_rows(&self) -> Vec<i32> {
        let (mut sampled, mut asked, mut row) = (Vec::new(), Vec::new(), 0);
        for sequence in &self.sequences {
            let end = row + sequence.rows() as i32;
            if sequence.sample.is_some() {
                sampled.push(end - 1);
            }
            match &sequence.logits {
                StepLogits::None => {}
                StepLogits::All => asked.extend(row..end),
                StepLogits::Targets(tokens, _) => asked.extend(row..row + tokens.len() as i32),
            }
            row = end;
        }
        sampled.extend(asked);
        sampled.resize(self.bucket.logit_rows, 0);
        sampled
    }

    /// The sequences as the attention oracle takes them.
    pub fn attention_sequences(&self) -> Vec<Sequence> {
        let mut first_row = 0;
        self.sequences
            .iter()
            .map(|sequence| {
                let rows = sequence.rows();
                first_row += rows;
                Sequence {
                    first_row: first_row - rows,
                    rows,
                    context: sequence.first + rows,
                    blocks: sequence.blocks.iter().map(|&block| block as usize).collect(),
                }
            })
            .collect()
    }
}

/// A bucket of `tokens` rows that may each be a sequence.
pub fn rows_bucket(tokens: usize) -> Bucket {
    Bucket { tokens, sequences: tokens, logit_rows: tokens }
}
