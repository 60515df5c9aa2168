//! The rules that a request must keep, held before it is accepted.

use crate::request::{Request, SamplingParams, Want};

/// A rule that a request breaks.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // The messages say what each field is.
pub enum RequestError {
    #[error("the prompt is empty: at least one token is expected")]
    EmptyPrompt,
    #[error(
        "token {token} at position {position} of the prompt is outside the vocabulary of {vocab}"
    )]
    TokenOutOfVocabulary { position: usize, token: u32, vocab: usize },
    #[error(
        "{prompt} prompt tokens and {new} new tokens are more than the context of {limit} tokens"
    )]
    TooLong { prompt: usize, new: usize, limit: usize },
    #[error(
        "{prompt} prompt tokens and {new} new tokens need {blocks} cache blocks, there are {pool}"
    )]
    NeverFits { prompt: usize, new: usize, blocks: usize, pool: usize },
    #[error("temperature is {0}: a number from 0 up is expected")]
    Temperature(f32),
    #[error("top_p is {0}: a number above 0 and at most 1 is expected")]
    TopP(f32),
    #[error("a stop string is empty")]
    EmptyStopString,
    #[error("stop strings need text, and the request has no detokenizer")]
    StopStringsWithoutText,
    #[error("prompt logits are wanted, and the engine was started without them")]
    PromptLogitsOff,
    #[error("there is no adapter `{0}`")]
    UnknownAdapter(String),
}

/// The bounds a request is held against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestLimits {
    /// Token ids are below it.
    pub vocab: usize,
    /// Most tokens of prompt and answer together.
    pub max_model_len: usize,
    /// Positions in a cache block.
    pub block_size: usize,
    /// Blocks of the cache.
    pub kv_blocks: usize,
    /// Whether prompt logits can be had.
    pub prompt_logits: Want,
}

impl RequestLimits {
    /// Holds a request against every rule that needs no look at the engine's state.
    pub fn check(&self, request: &Request) -> Result<(), RequestError> {
        let (prompt, new) = (request.prompt.len(), request.max_new_tokens);
        if prompt == 0 {
            return Err(RequestError::EmptyPrompt);
        }
        let vocab = self.vocab;
        let outside = |&(_, &token): &(usize, &u32)| token as usize >= vocab;
        if let Some((position, &token)) = request.prompt.iter().enumerate().find(outside) {
            return Err(RequestError::TokenOutOfVocabulary { position, token, vocab });
        }
        let total = prompt.saturating_add(new);
        if total > self.max_model_len {
            return Err(RequestError::TooLong { prompt, new, limit: self.max_model_len });
        }
        let blocks = total.div_ceil(self.block_size);
        if blocks > self.kv_blocks {
            return Err(RequestError::NeverFits { prompt, new, blocks, pool: self.kv_blocks });
        }
        let SamplingParams { temperature, top_p, .. } = request.sampling;
        if !(temperature.is_finite() && temperature >= 0.0) {
            return Err(RequestError::Temperature(temperature));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(RequestError::TopP(top_p));
        }
        if request.stop.strings.iter().any(String::is_empty) {
            return Err(RequestError::EmptyStopString);
        }
        if !request.stop.strings.is_empty() && request.detokenizer.is_none() {
            return Err(RequestError::StopStringsWithoutText);
        }
        if request.prompt_logits == Want::Yes && self.prompt_logits == Want::No {
            return Err(RequestError::PromptLogitsOff);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Delivery, EosRule, StopRules};

    fn request() -> Request {
        Request {
            prompt: vec![1, 2, 3],
            adapter: None,
            sampling: SamplingParams::default(),
            max_new_tokens: 5,
            stop: StopRules::default(),
            logprobs: Want::No,
            prompt_logits: Want::No,
            detokenizer: None,
            sink: Box::new(|_| Delivery::Ok),
        }
    }

    const LIMITS: RequestLimits = RequestLimits {
        vocab: 10,
        max_model_len: 20,
        block_size: 4,
        kv_blocks: 4,
        prompt_logits: Want::No,
    };

    fn refused(change: impl FnOnce(&mut Request)) -> RequestError {
        let mut request = request();
        change(&mut request);
        LIMITS.check(&request).unwrap_err()
    }

    #[test]
    fn each_broken_rule_is_named() {
        assert_eq!(LIMITS.check(&request()), Ok(()));
        assert_eq!(refused(|r| r.prompt.clear()), RequestError::EmptyPrompt);
        assert_eq!(
            refused(|r| r.prompt[1] = 10),
            RequestError::TokenOutOfVocabulary { position: 1, token: 10, vocab: 10 }
        );
        let long = refused(|r| r.max_new_tokens = 18);
        assert_eq!(long, RequestError::TooLong { prompt: 3, new: 18, limit: 20 });
        refused(|r| r.max_new_tokens = usize::MAX);
        let blocks = refused(|r| r.max_new_tokens = 14);
        assert_eq!(blocks, RequestError::NeverFits { prompt: 3, new: 14, blocks: 5, pool: 4 });
        for wrong in [-0.1, f32::NAN, f32::INFINITY] {
            assert!(matches!(
                refused(|r| r.sampling.temperature = wrong),
                RequestError::Temperature(_)
            ));
        }
        for wrong in [0.0, -1.0, 1.01, f32::NAN] {
            assert!(matches!(refused(|r| r.sampling.top_p = wrong), RequestError::TopP(_)));
        }
        assert_eq!(
            refused(|r| r.stop.strings = vec![String::new()]),
            RequestError::EmptyStopString
        );
        assert_eq!(
            refused(|r| r.stop.strings = vec!["x".into()]),
            RequestError::StopStringsWithoutText
        );
        assert_eq!(refused(|r| r.prompt_logits = Want::Yes), RequestError::PromptLogitsOff);
    }

    #[test]
    fn end_of_sequence_tokens_can_be_ignored_and_stop_tokens_cannot() {
        let mut rules = StopRules { eos: vec![2], token_ids: vec![7], ..StopRules::default() };
        assert!(rules.is_stop(2) && rules.is_stop(7) && !rules.is_stop(3));
        rules.eos_rule = EosRule::Ignore;
        assert!(!rules.is_stop(2) && rules.is_stop(7));
    }
}
