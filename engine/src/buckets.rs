//! Padded sizes of steps. A recorded graph serves one bucket, so a device with graphs wants few of them;
//! a device without them computes exactly the rows there are.

use amphora_hal::Bucket;

/// How steps are padded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Padding {
    /// To buckets where the device records graphs, else not at all.
    #[default]
    Auto,
    /// To buckets on any device.
    Always,
    /// Not at all; steps are not replayed.
    Never,
}

/// What a step needs.
#[derive(Debug, Clone, Copy)]
pub struct Need {
    /// Token rows.
    pub tokens: usize,
    /// Sequences.
    pub sequences: usize,
    /// Sequences that draw a token.
    pub sampled: usize,
    /// Logit rows beside those.
    pub extra_logit_rows: usize,
}

/// The padded sizes of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buckets {
    /// Ascending token counts; empty when steps are not padded.
    tokens: Vec<usize>,
    max_seqs: usize,
}

impl Buckets {
    /// Powers of two up to `max_batch_tokens`, with halves between, of larger ones quarters and eighths: there
    /// a row that is padding costs what a row costs, where few rows cost what the weights do.
    pub fn padded(max_seqs: usize, max_batch_tokens: usize) -> Self {
        let mut tokens: Vec<usize> = [1, 2, 4, 8].into();
        let mut size = 16;
        while size <= max_batch_tokens {
            let parts = match size {
                ..128 => 2,
                128..512 => 4,
                _ => 8,
            };
            tokens.extend((0..parts).map(|part| size + size / parts * part));
            size *= 2;
        }
        tokens.retain(|&tokens| tokens < max_batch_tokens);
        tokens.push(max_batch_tokens);
        Buckets { tokens, max_seqs }
    }

    /// Every step as large as it is.
    pub fn exact(max_seqs: usize) -> Self {
        Buckets { tokens: Vec::new(), max_seqs }
    }

    /// The bucket of a step. For one without extra logits it depends on the token count alone.
    pub fn fit(&self, need: Need) -> Bucket {
        match self.tokens.iter().find(|&&tokens| tokens >= need.tokens) {
            Some(&tokens) => self.of(tokens, need.extra_logit_rows),
            None => Bucket {
                tokens: need.tokens,
                sequences: need.sequences,
                logit_rows: need.sequences.max(need.sampled + need.extra_logit_rows),
            },
        }
    }

    /// The buckets that graphs are recorded for.
    pub fn recorded(&self) -> impl Iterator<Item = Bucket> {
        self.tokens.iter().map(|&tokens| self.of(tokens, 0))
    }

    fn of(&self, tokens: usize, extra_logit_rows: usize) -> Bucket {
        let sequences = self.max_seqs.min(tokens);
        Bucket { tokens, sequences, logit_rows: sequences + extra_logit_rows }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(tokens: usize, sequences: usize, extra: usize) -> Need {
        Need { tokens, sequences, sampled: sequences, extra_logit_rows: extra }
    }

    #[test]
    fn a_bucket_holds_the_step_and_is_not_twice_as_large() {
        let buckets = Buckets::padded(32, 500);
        for tokens in 1..=500 {
            let bucket = buckets.fit(need(tokens, tokens.min(32), 0));
            assert!(bucket.tokens >= tokens && bucket.tokens < 2 * tokens.max(2));
            assert!(bucket.sequences >= tokens.min(32) && bucket.sequences <= bucket.tokens);
            assert!(buckets.recorded().any(|recorded| recorded == bucket));
        }
        assert_eq!(buckets.recorded().last().map(|bucket| bucket.tokens), Some(500));
    }

    #[test]
    fn a_long_step_has_little_padding() {
        let buckets = Buckets::padded(32, 8192);
        let fit = |tokens| buckets.fit(need(tokens, 1, 0)).tokens;
        assert!((128..512).all(|tokens| fit(tokens) <= tokens + tokens / 4));
        assert!((512..=8192).all(|tokens| fit(tokens) <= tokens + tokens / 8));
        assert_eq!((fit(1600), fit(200), fit(33)), (1664, 224, 48));
        assert_eq!(buckets.recorded().count(), 4 + 3 * 2 + 2 * 4 + 4 * 8 + 1);
    }

    #[test]
    fn extra_logits_get_rows_behind_those_that_sample() {
        let bucket = Buckets::padded(4, 64).fit(need(9, 2, 5));
        assert_eq!((bucket.tokens, bucket.sequences, bucket.logit_rows), (16, 4, 9));
        let exact = Buckets::exact(4).fit(need(9, 2, 5));
        assert_eq!((exact.tokens, exact.sequences, exact.logit_rows), (9, 2, 7));
    }

    #[test]
    fn a_step_that_samples_nothing_still_has_a_row_for_each_sequence() {
        let unsampled = Need { sampled: 0, ..need(6, 2, 0) };
        assert_eq!(Buckets::exact(4).fit(unsampled).logit_rows, 2);
    }
}
