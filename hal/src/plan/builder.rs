//! `PlanBuilder`: a step's sequences, checked and written into the bytes of a plan.

use std::collections::BTreeSet;

use super::{Bucket, Field, HostPlan, PlanArea, PlanLayout, PlanLimits, PlanView, SampleRow};
use crate::device::{Device, HostBytes};
use crate::error::{Error, Result};
use crate::lora::Slot;
use crate::plan::SequenceMeta;
use crate::segments::Segments;
use crate::transfer::{InFlight, Returned, Span};

/// Where a sequence's tokens of this step come from.
#[derive(Debug, Clone, Copy)]
pub enum Tokens<'a> {
    /// These ids, known on the host.
    Prompt(&'a [u32]),
    /// One token: the last one sampled, known on the device alone.
    Last,
}

/// How the next token is drawn; see [`crate::ops::Sample`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampleParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k most likely; 0 keeps all.
    pub top_k: u32,
    /// Keep the most likely until their share reaches p; 1 keeps all.
    pub top_p: f32,
    /// With the token's position it decides the draw.
    pub seed: u64,
    /// Whether the log-probability of the sampled token is wanted.
    pub logprob: bool,
}

impl SampleParams {
    /// The most likely token.
    pub const GREEDY: SampleParams =
        SampleParams { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0, logprob: false };
}

/// Which logits of a sequence come back beside sampling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// None.
    None,
    /// Those of every row of this step.
    All,
}

/// What one sequence does in a step.
#[derive(Debug, Clone, Copy)]
pub struct SequencePlan<'a> {
    /// Its entry in the token table.
    pub sequence: usize,
    /// Its adapter.
    pub slot: Option<Slot>,
    /// Position of its first token of this step; what lies before is in the cache.
    pub first_position: usize,
    /// Its tokens.
    pub tokens: Tokens<'a>,
    /// Its KV blocks from position 0 on, enough for the tokens of this step.
    pub blocks: &'a [u32],
    /// Draw a token after the last of this step.
    pub sample: Option<SampleParams>,
    /// Logits wanted beside that.
    pub logits: LogitRows,
}

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
    sampled: Vec<(i32, i32, SampleRow)>,
    extra_logits: Vec<i32>,
    seen: BTreeSet<usize>,
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
            },
            token_index: Vec::with_capacity(bucket.tokens),
            prompt: Vec::with_capacity(bucket.tokens),
            position: Vec::with_capacity(bucket.tokens),
            kv_index: Vec::with_capacity(bucket.tokens),
            slots: Vec::with_capacity(bucket.tokens),
            block_table: vec![0; bucket.sequences * limits.blocks_per_sequence],
            sampled: Vec::new(),
            extra_logits: Vec::new(),
            seen: BTreeSet::new(),
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
        let result = sequence.sample.map(|params| {
            let last_row = (first_row + rows - 1) as i32;
            self.sampled.push((sequence.sequence as i32, last_row, params.row(context)));
            self.sampled.len() - 1
        });
        let logits_from = self.extra_logits.len();
        if sequence.logits == LogitRows::All {
            self.extra_logits.extend((first_row..first_row + rows).map(|row| row as i32));
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
        let extra = if sequence.logits == LogitRows::All { rows } else { 0 };
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
        let span = Span::front(layout.bytes());
        let sent = device.upload(stream, host, &[span], &mut area.0.clone())?;
        Ok((view, sent))
    }

    /// Fills `bytes`, padding included, and gives the mirror.
    fn write(mut self, bytes: &mut [u8]) -> HostPlan {
        bytes.fill(0);
        let layout = self.layout.clone();
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
        let slots: Vec<i32> = self.sampled.iter().map(|(slot, _, _)| *slot).collect();
        put(Field::SampleSlot, &mut padded(&slots, -1, sequences).into_iter());
        let rows = self.sampled.iter().map(|(_, row, _)| *row);
        let logit_row: Vec<i32> = rows.chain(self.extra_logits.iter().copied()).collect();
        put(Field::LogitRow, &mut padded(&logit_row, 0, logit_rows).into_iter());
        let sampling: Vec<SampleRow> = self.sampled.iter().map(|(_, _, row)| *row).collect();
        put(Field::Sampling, &mut bytemuck::cast_slice::<_, i32>(&sampling).iter().copied());

        let sampled = self.sampled.len();
        for sequence in &mut self.host.sequences {
            sequence.logits.start += sampled;
            sequence.logits.end += sampled;
        }
        self.host.sampled = sampled;
        self.host.logit_rows = logit_row.len();
        self.host.segments = segments.segments;
        self.host.tiles = segments.tiles;
        self.host
    }
}

impl SequencePlan<'_> {
    fn rows(&self) -> usize {
        match self.tokens {
            Tokens::Prompt(ids) => ids.len(),
            Tokens::Last => 1,
        }
    }
}

impl SampleParams {
    fn is_sound(&self) -> bool {
        self.temperature.is_finite()
            && self.temperature >= 0.0
            && self.top_p > 0.0
            && self.top_p <= 1.0
    }

    fn row(&self, position: usize) -> SampleRow {
        SampleRow {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            position: position as u32,
            seed_low: self.seed as u32,
            seed_high: (self.seed >> 32) as u32,
            logprob: u32::from(self.logprob),
            reserved: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: PlanLimits = PlanLimits {
        sequences: 4,
        tokens: 8,
        blocks_per_sequence: 3,
        block_size: 4,
        kv_blocks: 10,
        vocab: 100,
        positions: 12,
        slots: 2,
        tile_rows: 2,
    };
    const BUCKET: Bucket = Bucket { tokens: 8, sequences: 4, logit_rows: 6 };

    fn prompt<'a>(ids: &'a [u32], blocks: &'a [u32]) -> SequencePlan<'a> {
        SequencePlan {
            sequence: 2,
            slot: Some(Slot::new(1)),
            first_position: 3,
            tokens: Tokens::Prompt(ids),
            blocks,
            sample: Some(SampleParams::GREEDY),
            logits: LogitRows::None,
        }
    }

    fn words(builder: PlanBuilder, field: Field) -> Vec<i32> {
        let layout = builder.layout.clone();
        let mut bytes = vec![7; layout.bytes()];
        builder.write(&mut bytes);
        let at = layout.offsets[field as usize];
        let [rows, width] = layout.dims[field as usize];
        let words = bytes[at..at + rows * width * 4].chunks_exact(4);
        words.map(|w| i32::from_ne_bytes([w[0], w[1], w[2], w[3]])).collect()
    }

    fn built() -> PlanBuilder {
        let mut builder = PlanBuilder::new(&LIMITS, BUCKET).expect("within limits");
        let last = SequencePlan {
            sequence: 0,
            slot: None,
            first_position: 5,
            tokens: Tokens::Last,
            ..prompt(&[], &[9, 8])
        };
        builder.push(last).expect("sound");
        builder.push(prompt(&[50, 60], &[4, 5])).expect("sound");
        builder
    }

    #[test]
    fn every_field_is_written_and_padded() {
        assert_eq!(words(built(), Field::TokenIndex), [0, 5, 6, 0, 0, 0, 0, 0]);
        assert_eq!(words(built(), Field::Prompt), [0, 50, 60, 0, 0, 0, 0, 0]);
        assert_eq!(words(built(), Field::Position), [5, 3, 4, 0, 0, 0, 0, 0]);
        assert_eq!(words(built(), Field::KvIndex), [33, 19, 20, -1, -1, -1, -1, -1]);
        assert_eq!(words(built(), Field::Slot), [-1, 1, 1, -1, -1, -1, -1, -1]);
        assert_eq!(words(built(), Field::Perm), [1, 2, 0, 3, 4, 5, 6, 7]);
        assert_eq!(words(built(), Field::Tiles)[..6], [1, 0, 2, 0, 0, 0]);
        assert_eq!(words(built(), Field::QStart), [0, 1, 3, 3, 3]);
        assert_eq!(words(built(), Field::Context), [6, 5, 0, 0]);
        assert_eq!(words(built(), Field::BlockTable)[..6], [9, 8, 0, 4, 5, 0]);
        assert_eq!(words(built(), Field::LogitRow), [0, 2, 0, 0, 0, 0]);
        assert_eq!(words(built(), Field::SampleSlot), [0, 2, -1, -1]);
        assert_eq!(words(built(), Field::Sampling)[8 + 3], 5, "the sampled token's position");
    }

    #[test]
    fn asked_logits_follow_the_sampled_ones() {
        let mut builder = PlanBuilder::new(&LIMITS, BUCKET).expect("within limits");
        let all = SequencePlan { logits: LogitRows::All, ..prompt(&[1, 2, 3], &[4, 5]) };
        builder.push(all).expect("sound");
        let last = SequencePlan { sequence: 1, tokens: Tokens::Last, ..prompt(&[], &[1]) };
        builder.push(last).expect("sound");
        let mut bytes = vec![0; builder.layout.bytes()];
        let host = builder.write(&mut bytes);
        assert_eq!((host.sampled, host.logit_rows), (2, 5));
        assert_eq!(host.sequences[0].logits, 2..5);
        assert_eq!((host.sequences[1].result, host.sequences[1].logits.len()), (Some(1), 0));
    }

    #[test]
    fn values_out_of_bounds_are_refused() {
        let blocks = [4, 5];
        let sound = || prompt(&[1, 2], &blocks);
        let refused = |sequence: SequencePlan<'_>| {
            let mut builder = PlanBuilder::new(&LIMITS, BUCKET).expect("within limits");
            builder.push(sequence).expect_err("out of bounds").to_string()
        };
        assert!(refused(prompt(&[100], &blocks)).contains("vocabulary"));
        assert!(refused(prompt(&[], &blocks)).contains("no token"));
        assert!(refused(prompt(&[1], &[10])).contains("block leaves"));
        assert!(refused(prompt(&[1, 2], &[1])).contains("cover"));
        assert!(refused(SequencePlan { sequence: 4, ..sound() }).contains("token table"));
        assert!(refused(SequencePlan { slot: Some(Slot::new(2)), ..sound() }).contains("slot"));
        assert!(refused(SequencePlan { first_position: 11, ..sound() }).contains("rotary"));
        let unsound = SampleParams { top_p: f32::NAN, ..SampleParams::GREEDY };
        assert!(refused(SequencePlan { sample: Some(unsound), ..sound() }).contains("sampling"));
        let mut builder = built();
        assert!(builder.push(sound()).expect_err("twice").to_string().contains("taken"));
        let long = SequencePlan { sequence: 3, first_position: 0, ..prompt(&[1; 6], &blocks) };
        assert!(builder.push(long).expect_err("full").to_string().contains("no row left"));
        assert!(PlanLayout::new(&LIMITS, Bucket { tokens: 9, ..BUCKET }).is_err());
    }
}
