//! What a sequence does in a step, as the caller says it and as kernels read it.

use crate::lora::Slot;

/// Words of a sequence's sampling parameters; see [`SampleRow`].
pub const SAMPLE_WORDS: usize = size_of::<SampleRow>() / 4;

/// Words of a [`LogitEdit`].
pub const EDIT_WORDS: usize = size_of::<LogitEdit>() / 4;

/// Most tokens of the most likely that [`crate::ops::Logprobs`] gives for a row.
pub const MOST_BEST: usize = 20;

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
    /// Keep tokens whose probability is at least this share of the largest; 0 keeps all.
    pub min_p: f32,
    /// Divides (above 0) or multiplies (below) the logits of tokens that occur; 1 is off. This and
    /// the next two act on the tokens that [`SequencePlan::edits`] lists.
    pub repetition: f32,
    /// Subtracted from the logits of tokens that occur in the output.
    pub presence: f32,
    /// The same, once for each time.
    pub frequency: f32,
    /// With the token's position it decides the draw.
    pub seed: u64,
    /// Whether the log-probability of the sampled token is wanted.
    pub logprob: bool,
}

impl SampleParams {
    /// The most likely token.
    pub const GREEDY: SampleParams = SampleParams {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition: 1.0,
        presence: 0.0,
        frequency: 0.0,
        seed: 0,
        logprob: false,
    };
}

/// Which rows of a sequence go through the head beside the sampled one, and for what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows<'a> {
    /// None.
    None,
    /// Every row of this step, for its logits.
    All,
    /// The first rows of this step, for log-probabilities ([`crate::ops::Logprobs`]): of one target
    /// each (in a prompt the token that follows), and of the `best`.
    Targets {
        /// A token for each row from the first on; at most as many as there are rows.
        tokens: &'a [u32],
        /// How many of the most likely tokens beside; at most [`MOST_BEST`].
        best: usize,
    },
}

/// What is known of one token when its sequence's next one is drawn; see [`crate::ops::Sample`]. As
/// kernels read it, 4 words.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct LogitEdit {
    /// The token.
    pub token: u32,
    /// How often the output has it.
    pub output_count: u32,
    /// [`LogitEdit::OCCURS`], or 0.
    pub flags: u32,
    /// Added to the raw logit; −∞ bans the token.
    pub bias: f32,
}

impl LogitEdit {
    /// The prompt or the output has the token.
    pub const OCCURS: u32 = 1;

    fn is_sound(&self, vocab: usize) -> bool {
        (self.token as usize) < vocab
            && self.flags & !LogitEdit::OCCURS == 0
            && (self.output_count == 0 || self.flags == LogitEdit::OCCURS)
            && (self.bias.is_finite() || self.bias == f32::NEG_INFINITY)
    }
}

/// A whole KV block copied in every layer before a step writes: a sequence that forked takes its
/// own copy of the block that it shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block that is read.
    pub from: u32,
    /// The block that is written.
    pub to: u32,
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
    /// A block copied before the step: `to` is one of `blocks`. No other copy of the step reads or
    /// writes it.
    pub copy: Option<BlockCopy>,
    /// Draw a token after the last of this step.
    pub sample: Option<SampleParams>,
    /// What is known of tokens for that draw, by ascending token, none twice.
    pub edits: &'a [LogitEdit],
    /// Log-probabilities of the drawn token and of so many of the most likely, at most
    /// [`MOST_BEST`]; `None`: [`crate::ops::Logprobs`] leaves the row alone.
    pub logprobs: Option<usize>,
    /// Rows wanted beside that.
    pub logits: LogitRows<'a>,
}

/// A sequence's sampling parameters as kernels read them, 12 words.
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
    /// 0: off.
    pub min_p: f32,
    /// 1: off.
    pub repetition: f32,
    /// 0: off.
    pub presence: f32,
    /// 0: off.
    pub frequency: f32,
    /// Always 0.
    pub reserved: u32,
}

impl SequencePlan<'_> {
    pub(super) fn rows(&self) -> usize {
        match self.tokens {
            Tokens::Prompt(ids) => ids.len(),
            Tokens::Last => 1,
        }
    }

    /// Whether its edits are those of a draw, sound, ascending.
    pub(super) fn edits_are_sound(&self, vocab: usize) -> bool {
        (self.edits.is_empty() || self.sample.is_some())
            && self.edits.iter().all(|edit| edit.is_sound(vocab))
            && self.edits.windows(2).all(|pair| pair[0].token < pair[1].token)
    }

    /// Whether the log-probabilities it asks for exist.
    pub(super) fn logprobs_are_sound(&self, vocab: usize) -> bool {
        let drawn = self.logprobs.is_none_or(|best| best <= MOST_BEST && self.sample.is_some());
        let given = match self.logits {
            LogitRows::None | LogitRows::All => true,
            LogitRows::Targets { tokens, best } => {
                best <= MOST_BEST
                    && tokens.len() <= self.rows()
                    && tokens.iter().all(|&token| (token as usize) < vocab)
            }
        };
        drawn && given
    }
}

impl SampleParams {
    pub(super) fn is_sound(&self) -> bool {
        self.temperature.is_finite()
            && self.temperature >= 0.0
            && self.top_p > 0.0
            && self.top_p <= 1.0
            && (0.0..=1.0).contains(&self.min_p)
            && self.repetition > 0.0
            && [self.repetition, self.presence, self.frequency].iter().all(|v| v.is_finite())
    }

    pub(super) fn row(&self, position: usize) -> SampleRow {
        SampleRow {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            position: position as u32,
            seed_low: self.seed as u32,
            seed_high: (self.seed >> 32) as u32,
            logprob: u32::from(self.logprob),
            min_p: self.min_p,
            repetition: self.repetition,
            presence: self.presence,
            frequency: self.frequency,
            reserved: 0,
        }
    }
}
