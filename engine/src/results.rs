//! What a step brought, read out of the bytes that came down.

use amphora_hal::ops::{LOGPROB_WORDS, RESULT_WORDS};
use amphora_hal::{HostPlan, MOST_BEST, SequenceMeta};

use crate::reply::Sampled;
use crate::request::{PromptLogprob, TokenLogprob};
use crate::scheduler::{Brought, Chunk, Rows};

/// Words of a row of log-probabilities before the most likely tokens: id, log-probability, rank.
const TARGET_WORDS: usize = LOGPROB_WORDS - 2 * MOST_BEST;

/// The bytes of one step's downloads.
#[derive(Debug, Clone, Copy)]
pub struct Downloads<'a> {
    /// Its plan.
    pub plan: &'a HostPlan,
    /// Token ids.
    pub vocab: usize,
    /// `[sampled, RESULT_WORDS]`.
    pub results: &'a [u8],
    /// `[rows beside those that sample, vocab]` f32; empty if none was wanted.
    pub logits: &'a [u8],
    /// `[logit rows, LOGPROB_WORDS]`; empty if none was wanted.
    pub logprobs: &'a [u8],
}

impl Downloads<'_> {
    /// What a chunk gets, planned as `sequence`.
    pub fn of(&self, chunk: &Chunk, sequence: &SequenceMeta) -> Brought {
        let mut brought = Brought {
            token: sequence.result.map(|row| self.token(row, chunk.top)),
            ..Brought::default()
        };
        match chunk.rows {
            Rows::None => {}
            Rows::Logits => {
                let rows = sequence.logits.start - self.plan.sampled
                    ..sequence.logits.end - self.plan.sampled;
                let row_bytes = self.vocab * 4;
                let words = &self.logits[rows.start * row_bytes..rows.end * row_bytes];
                brought.logits = words.chunks_exact(4).map(|word| float(word, 0)).collect();
            }
            Rows::Logprobs { best, .. } => {
                let rows = sequence.logits.clone();
                brought.logprobs = rows.map(|row| self.logprob(row, best)).collect();
            }
        }
        brought
    }

    fn token(&self, row: usize, best: usize) -> Sampled {
        let at = row * RESULT_WORDS * 4;
        let (id, logprob) = (word(self.results, at), float(self.results, at + 4));
        match best {
            0 => Sampled { id, logprob, top: Vec::new() },
            // Both say the same; this way a token has one value, wherever it is told.
            _ => {
                let PromptLogprob { token, top, .. } = self.logprob(row, best);
                Sampled { id, logprob: token.logprob, top }
            }
        }
    }

    fn logprob(&self, row: usize, best: usize) -> PromptLogprob {
        let row = &self.logprobs[row * LOGPROB_WORDS * 4..][..LOGPROB_WORDS * 4];
        let pair = |at: usize| TokenLogprob { id: word(row, at), logprob: float(row, at + 4) };
        PromptLogprob {
            token: pair(0),
            rank: word(row, 8),
            top: (0..best.min(self.vocab)).map(|i| pair((TARGET_WORDS + 2 * i) * 4)).collect(),
        }
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn float(bytes: &[u8], at: usize) -> f32 {
    f32::from_bits(word(bytes, at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::{SeqSlot, TokenSource};
    use amphora_hal::Bucket;

    #[test]
    fn each_chunk_gets_its_own_rows() {
        let meta =
            |result, logits| SequenceMeta { first_row: 0, rows: 2, context: 2, result, logits };
        let plan = HostPlan {
            bucket: Bucket { tokens: 6, sequences: 3, logit_rows: 5 },
            tokens: 6,
            sequences: vec![meta(Some(0), 1..1), meta(None, 1..3), meta(None, 3..5)],
            sampled: 1,
            logit_rows: 5,
            segments: 0,
            tiles: Vec::new(),
            copies: Vec::new(),
            edits: 0,
            logprob_rows: 3,
            raw_logit_rows: 2,
        };
        let bytes = |values: &[f32]| -> Vec<u8> {
            values.iter().flat_map(|value| value.to_ne_bytes()).collect()
        };
        let results = [7u32.to_ne_bytes(), (-0.5f32).to_ne_bytes()].concat();
        let logits = bytes(&[1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]);
        let mut words = vec![0u32; 5 * LOGPROB_WORDS];
        for row in [0, 3, 4] {
            let of = &mut words[row * LOGPROB_WORDS..][..LOGPROB_WORDS];
            let bits = |value: f32| value.to_bits();
            of[..5].copy_from_slice(&[7 + row as u32, bits(-0.5), 9, row as u32, bits(-0.25)]);
        }
        let logprobs: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let downloads = Downloads {
            plan: &plan,
            vocab: 2,
            results: &results,
            logits: &logits,
            logprobs: &logprobs,
        };
        let chunk = |top, rows| Chunk {
            seq: SeqSlot(0),
            first: 0,
            tokens: 2,
            source: TokenSource::Known,
            sample: top > 0,
            top,
            rows,
            copy: None,
            adapter: None,
        };
        let told = |id, logprob| TokenLogprob { id, logprob };
        let drawn = downloads.of(&chunk(1, Rows::None), &plan.sequences[0]);
        let token = Sampled { id: 7, logprob: -0.5, top: vec![told(0, -0.25)] };
        assert_eq!(drawn, Brought { token: Some(token), ..Brought::default() });
        let raw = downloads.of(&chunk(0, Rows::Logits), &plan.sequences[1]);
        assert_eq!(raw.logits, [1.0, 2.0, 3.0, 4.0]);
        let rows = Rows::Logprobs { rows: 2, best: 1 };
        let given = downloads.of(&chunk(0, rows), &plan.sequences[2]);
        let row = |row: u32| PromptLogprob {
            token: told(7 + row, -0.5),
            rank: 9,
            top: vec![told(row, -0.25)],
        };
        assert_eq!(given.logprobs, [row(3), row(4)]);
    }
}
