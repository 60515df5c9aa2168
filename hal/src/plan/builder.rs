//! `PlanBuilder`: a step's sequences, checked and written into the bytes of a plan.

use std::collections::BTreeSet;

use super::layout::Field;
use super::{
    BlockCopy, Bucket, HostPlan, LogitEdit, LogitRows, PlanArea, PlanLayout, PlanLimits, PlanView,
    SampleRow, SequenceMeta, SequencePlan, Tokens,
};
use crate::device::{Device, HostBytes};
use crate::error::{Error, Result};
use crate::lora::Slot;
use crate::segments::Segments;
use crate::transfer::{InFlight, Returned, Span};

/// What uploading a plan gives: the view and the buffer in flight, or the buffer back.
pub type PlanSent<D> =
    std::result::Result<(PlanView<D>, InFlight<D>), Returned<<D as Device>::Host>>;

/// Collects the sequences of a step.
#[derive(Debug)]
pub struct PlanBuilder {
    limits: PlanLimits,
    layout: PlanLayout,
    host: HostPlan,
    token_index: Vec<i32>,
    prompt: Vec<i32>,
    position: Vec<i32>,
    kv_index: Vec<i32>,
    slots: Vec<Option<Slot>>,
    block_table: Vec<i32>,
    sampled: Vec<Sampled>,
    extra_logits: Vec<Extra>,
    edits: Vec<LogitEdit>,
    seen: BTreeSet<usize>,
    copied: BTreeSet<u32>,
}

/// A row that draws.
#[derive(Debug)]
struct Sampled {
    /// The sequence's entry in the token table.
    entry: i32,
    row: i32,
    params: SampleRow,
    /// As [`PlanView::logprob_best`].
    best: i32,
    /// Behind its edits.
    edit_end: i32,
}

/// A row that goes through the head beside those.
#[derive(Debug)]
struct Extra {
    row: i32,
    /// As [`PlanView::logprob_target`].
    target: i32,
    /// As [`PlanView::logprob_best`].
    best: i32,
}

impl PlanBuilder {
    /// An empty plan of `bucket`.
    ///
    /// # Errors
    /// The bucket is larger than the limits.
    pub fn new(limits: &PlanLimits, bucket: Bucket) -> Result<Self> {
        Ok(PlanBuilder {
            limits: *limits,
            layout: PlanLayout::new(limits, bucket)?,
            host: HostPlan {
                bucket,
                tokens: 0,
                sequences: Vec::new(),
                sampled: 0,
                logit_rows: 0,
                segments: 0,
                tiles: Vec::new(),
                copies: Vec::new(),
                edits: 0,
                logprob_rows: 0,
                raw_logit_rows: 0,
            },
            token_index: Vec::with_capacity(bucket.tokens),
            prompt: Vec::with_capacity(bucket.tokens),
            position: Vec::with_capacity(bucket.tokens),
            kv_index: Vec::with_capacity(bucket.tokens),
            slots: Vec::with_capacity(bucket.tokens),
            block_table: vec![0; bucket.sequences * limits.blocks_per_sequence],
            sampled: Vec::new(),
            extra_logits: Vec::new(),
            edits: Vec::new(),
            seen: BTreeSet::new(),
            copied: BTreeSet::new(),
        })
    }

    /// Adds a sequence behind the ones there are.
    ///
    /// # Errors
    /// A value leaves its bound, the sequence is there already, or the bucket is full.
    pub fn push(&mut self, sequence: SequencePlan<'_>) -> Result<()> {
        self.check(&sequence)?;
        let first_row = self.token_index.len();
        let rows = sequence.rows();
        let size = self.limits.block_size;
        for i in 0..rows {
            let (index, prompt) = match sequence.tokens {
                Tokens::Prompt(ids) => (self.limits.sequences + first_row + i, ids[i] as i32),
                Tokens::Last => (sequence.sequence, 0),
            };
            let position = sequence.first_position + i;
            let block = sequence.blocks[position / size] as usize;
            self.token_index.push(index as i32);
            self.prompt.push(prompt);
            self.position.push(position as i32);
            self.kv_index.push((block * size + position % size) as i32);
            self.slots.push(sequence.slot);
        }
        let context = sequence.first_position + rows;
        let table = self.host.sequences.len() * self.limits.blocks_per_sequence;
        for (to, &block) in self.block_table[table..].iter_mut().zip(sequence.blocks) {
            *to = block as i32;
        }
        let best = sequence.logprobs.map_or(-1, |best| best as i32);
        let result = sequence.sample.map(|params| {
            self.edits.extend_from_slice(sequence.edits);
            self.sampled.push(Sampled {
                entry: sequence.sequence as i32,
                row: (first_row + rows - 1) as i32,
                params: params.row(context),
                best,
                edit_end: self.edits.len() as i32,
            });
            self.sampled.len() - 1
        });
        self.host.logprob_rows += usize::from(sequence.logprobs.is_some());
        let logits_from = self.extra_logits.len();
        match sequence.logits {
            LogitRows::None => {}
            LogitRows::All => {
                let asked = (first_row..first_row + rows).map(|row| Extra {
                    row: row as i32,
                    target: 0,
                    best: -1,
                });
                self.extra_logits.extend(asked);
                self.host.raw_logit_rows += rows;
            }
            LogitRows::Targets { tokens, best } => {
                let asked = (first_row..).zip(tokens).map(|(row, &target)| Extra {
                    row: row as i32,
                    target: target as i32,
                    best: best as i32,
                });
                self.extra_logits.extend(asked);
                self.host.logprob_rows += tokens.len();
            }
        }
        if let Some(copy) = sequence.copy {
            self.host.copies.push(copy);
            self.copied.extend([copy.from, copy.to]);
        }
        let logits = logits_from..self.extra_logits.len();
        self.host.sequences.push(SequenceMeta { first_row, rows, context, result, logits });
        self.host.tokens += rows;
        self.seen.insert(sequence.sequence);
        Ok(())
    }

    fn check(&self, sequence: &SequencePlan<'_>) -> Result<()> {
        let (limits, bucket) = (&self.limits, self.host.bucket);
        let rows = sequence.rows();
        let end = sequence.first_position.saturating_add(rows);
        let ids_in_range = match sequence.tokens {
            Tokens::Prompt(ids) => ids.iter().all(|&id| (id as usize) < limits.vocab),
            Tokens::Last => true,
        };
        let extra = match sequence.logits {
            LogitRows::None => 0,
            LogitRows::All => rows,
            LogitRows::Targets { tokens, .. } => tokens.len(),
        };
        let logit_rows = self.sampled.len()
            + usize::from(sequence.sample.is_some())
            + self.extra_logits.len()
            + extra;
        let rules = [
            (rows > 0, "it has no token"),
            (ids_in_range, "a token id leaves the vocabulary"),
            (end <= limits.positions, "a position leaves the rotary table"),
            (sequence.sequence < limits.sequences, "its number leaves the token table"),
            (!self.seen.contains(&sequence.sequence), "its number is taken in this step"),
            (
                sequence.slot.is_none_or(|slot| slot.index() < limits.slots),
                "its adapter slot leaves the table",
            ),
            (
                sequence.blocks.len() <= limits.blocks_per_sequence
                    && end <= sequence.blocks.len() * limits.block_size,
                "its blocks do not cover its positions",
            ),
            (
                sequence.blocks.iter().all(|&block| (block as usize) < limits.kv_blocks),
                "a block leaves the cache",
            ),
            (self.host.tokens + rows <= bucket.tokens, "the bucket has no row left"),
            (self.host.sequences.len() < bucket.sequences, "the bucket has no sequence left"),
            (logit_rows <= bucket.logit_rows, "the bucket has no row of logits left"),
            (sequence.sample.is_none_or(|params| params.is_sound()), "its sampling is unsound"),
            (sequence.edits_are_sound(limits.vocab), "its edits are unsound or out of order"),
            (
                self.edits.len() + sequence.edits.len() <= limits.edits,
                "the plan has no room for its edits",
            ),
            (sequence.logprobs_are_sound(limits.vocab), "its log-probabilities cannot be given"),
            (
                sequence.copy.is_none_or(|copy| self.may_copy(copy, sequence.blocks)),
                "its copied block is another's or leaves the cache",
            ),
        ];
        match rules.iter().find(|(holds, _)| !holds) {
            None => Ok(()),
            Some((_, what)) => Err(Error::invalid(
                "plan",
                format!(
                    "sequence {} at {}+{rows} in {bucket:?}: {what}",
                    sequence.sequence, sequence.first_position
                ),
            )),
        }
    }

    /// Whether `copy` is into one of its own `blocks`, and independent of the step's other copies, as
    /// they run at once. Any number of sequences may copy the same block.
    fn may_copy(&self, copy: BlockCopy, blocks: &[u32]) -> bool {
        let BlockCopy { from, to } = copy;
        let written = |block| self.host.copies.iter().any(|other| other.to == block);
        (from as usize) < self.limits.kv_blocks
            && blocks.contains(&to)
            && from != to
            && !self.copied.contains(&to)
            && !written(from)
    }

    /// Writes the plan into `host`, uploads it with one copy, and gives the view of it.
    ///
    /// `host` is at least [`PlanLayout::bytes`] long.
    ///
    /// # Errors
    /// The buffer or the area is too small, or the device refuses; the buffer comes back.
    pub fn upload<D: Device>(
        self,
        device: &D,
        stream: &mut D::Stream,
        mut host: D::Host,
        area: &PlanArea<D>,
    ) -> PlanSent<D> {
        let (limits, layout) = (self.limits, self.layout.clone());
        let Some(bytes) = host.bytes_mut().get_mut(..layout.bytes()) else {
            let error =
                Error::invalid("plan", format!("{} bytes in a smaller buffer", layout.bytes()));
            return Err(Returned { host, error });
        };
        let mirror = self.write(bytes);
        let view = match PlanView::new(&limits, &layout, area, mirror) {
            Ok(view) => view,
            Err(error) => return Err(Returned { host, error }),
        };
        let span = Span::front(layout.used_bytes(view.host().edits));
        let sent = device.upload(stream, host, &[span], &mut area.0.clone())?;
        Ok((view, sent))
    }

    /// Fills the used front of `bytes`, padding included, and gives the mirror.
    fn write(mut self, bytes: &mut [u8]) -> HostPlan {
        let layout = self.layout.clone();
        bytes[..layout.used_bytes(self.edits.len())].fill(0);
        let Bucket { tokens, sequences, logit_rows } = layout.bucket();
        let mut put = |field: Field, values: &mut dyn Iterator<Item = i32>| {
            let at = layout.offsets[field as usize];
            let [rows, width] = layout.dims[field as usize];
            let words = bytes[at..at + rows * width * 4].chunks_exact_mut(4);
            words.zip(values).for_each(|(to, value)| to.copy_from_slice(&value.to_ne_bytes()));
        };
        let padded = |values: &[i32], fill: i32, len: usize| {
            values.iter().copied().chain(std::iter::repeat(fill)).take(len).collect::<Vec<_>>()
        };
        put(Field::TokenIndex, &mut self.token_index.iter().copied());
        put(Field::Prompt, &mut self.prompt.iter().copied());
        put(Field::Position, &mut self.position.iter().copied());
        put(Field::KvIndex, &mut padded(&self.kv_index, -1, tokens).into_iter());
        self.slots.resize(tokens, None);
        let number = |slot: &Option<Slot>| slot.map_or(-1, |slot| slot.index() as i32);
        put(Field::Slot, &mut self.slots.iter().map(number));
        let segments = Segments::build(&self.slots, self.limits.tile_rows);
        put(Field::Perm, &mut segments.perm.iter().copied());
        let tile_words = segments.tiles.iter().flat_map(|t| [t.slot, t.first, t.rows]);
        put(Field::Tiles, &mut tile_words.into_iter());
        let starts: Vec<i32> = self.host.sequences.iter().map(|s| s.first_row as i32).collect();
        let end = self.host.tokens as i32;
        put(Field::QStart, &mut padded(&starts, end, sequences + 1).into_iter());
        put(Field::Context, &mut self.host.sequences.iter().map(|s| s.context as i32));
        put(Field::BlockTable, &mut self.block_table.iter().copied());
        let entries: Vec<i32> = self.sampled.iter().map(|row| row.entry).collect();
        put(Field::SampleSlot, &mut padded(&entries, -1, sequences).into_iter());
        let params: Vec<SampleRow> = self.sampled.iter().map(|row| row.params).collect();
        put(Field::Sampling, &mut bytemuck::cast_slice::<_, i32>(&params).iter().copied());
        let mut by_logit_row =
            |field, fill, sampled: fn(&Sampled) -> i32, extra: fn(&Extra) -> i32| {
                let of =
                    self.sampled.iter().map(sampled).chain(self.extra_logits.iter().map(extra));
                let values: Vec<i32> = of.collect();
                put(field, &mut padded(&values, fill, logit_rows).into_iter());
            };
        by_logit_row(Field::LogitRow, 0, |row| row.row, |extra| extra.row);
        by_logit_row(Field::LogprobTarget, 0, |_| -1, |extra| extra.target);
        by_logit_row(Field::LogprobBest, -1, |row| row.best, |extra| extra.best);
        let copies = self.host.copies.iter().flat_map(|copy| [copy.from as i32, copy.to as i32]);
        put(Field::Copies, &mut padded(&copies.collect::<Vec<_>>(), -1, 2 * sequences).into_iter());
        let edit_ends = self.sampled.iter().map(|row| row.edit_end);
        let edit_starts: Vec<i32> = std::iter::once(0).chain(edit_ends).collect();
        let edits = self.edits.len();
        put(Field::EditStart, &mut padded(&edit_starts, edits as i32, sequences + 1).into_iter());
        put(Field::Edits, &mut bytemuck::cast_slice::<_, i32>(&self.edits).iter().copied());

        let sampled = self.sampled.len();
        for sequence in &mut self.host.sequences {
            sequence.logits.start += sampled;
            sequence.logits.end += sampled;
        }
        self.host.sampled = sampled;
        self.host.logit_rows = sampled + self.extra_logits.len();
        self.host.edits = edits;
        self.host.segments = segments.segments;
        self.host.tiles = segments.tiles;
        self.host
    }
}

#[cfg(test)]
mod tests;
