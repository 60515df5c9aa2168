//! The rules that a request must keep, held before it is accepted.

use std::collections::BTreeSet;

use crate::request::{Request, SamplingParams, Want};
use crate::scheduler::most_edits;

/// Most of the likeliest tokens that are told beside a token.
pub const MAX_LOGPROBS: usize = 20;

/// Most answers to one prompt.
pub const MAX_CHOICES: usize = 128;

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
    NeverFits { prompt: usize, new: usize, blocks: usize, pool: usize, block_size: usize },
    #[error("temperature is {0}: a number from 0 up is expected")]
    Temperature(f32),
    #[error("top_p is {0}: a number above 0 and at most 1 is expected")]
    TopP(f32),
    #[error("min_p is {0}: a number from 0 to 1 is expected")]
    MinP(f32),
    #[error("repetition_penalty is {0}: a number above 0 is expected")]
    RepetitionPenalty(f32),
    #[error("presence_penalty is {0}: a finite number is expected")]
    PresencePenalty(f32),
    #[error("frequency_penalty is {0}: a finite number is expected")]
    FrequencyPenalty(f32),
    #[error("logit_bias of token {token} is {bias}: a finite number, or −∞, is expected")]
    LogitBias { token: u32, bias: f32 },
    #[error("logit_bias names token {token}, which is outside the vocabulary of {vocab}")]
    LogitBiasOutOfVocabulary { token: u32, vocab: usize },
    #[error("logit_bias names token {0} twice")]
    LogitBiasTwice(u32),
    #[error("n is {n}: a number from 1 to {most} is expected")]
    Choices { n: usize, most: usize },
    #[error("{field} asks for the {asked} likeliest tokens: at most {MAX_LOGPROBS} are told")]
    Logprobs { field: &'static str, asked: usize },
    #[error(
        "penalties and bias of this request touch up to {edits} tokens: at most {most} can be touched"
    )]
    Edits { edits: usize, most: usize },
    #[error("prompt_logprobs are wanted, and the engine was started without rows for them")]
    PromptLogprobsOff,
    #[error("prompt_logprobs and prompt logits are wanted: one of them can be had")]
    PromptLogprobsAndLogits,
    #[error("a stop string is empty")]
    EmptyStopString,
    #[error("stop strings need text, and the request has no detokenizer")]
    StopStringsWithoutText,
    #[error("prompt logits are wanted, and the engine was started without them")]
    PromptLogitsOff,
    #[error("there is no adapter `{0}`")]
    UnknownAdapter(String),
}

impl RequestError {
    /// Whether the prompt leaves no room for a single new token, so that no lower `max_new_tokens` would
    /// help.
    pub fn is_prompt_alone(&self) -> bool {
        match *self {
            RequestError::TooLong { prompt, limit, .. } => prompt >= limit,
            RequestError::NeverFits { prompt, pool, block_size, .. } => {
                prompt >= pool.saturating_mul(block_size)
            }
            _ => false,
        }
    }

    /// The field of [`Request`] or [`SamplingParams`] that is at fault.
    pub fn field(&self) -> &'static str {
        match self {
            RequestError::EmptyPrompt
            | RequestError::TokenOutOfVocabulary { .. }
            | RequestError::TooLong { .. }
            | RequestError::NeverFits { .. } => "prompt",
            RequestError::Temperature(_) => "temperature",
            RequestError::TopP(_) => "top_p",
            RequestError::MinP(_) => "min_p",
            RequestError::RepetitionPenalty(_) => "repetition_penalty",
            RequestError::PresencePenalty(_) => "presence_penalty",
            RequestError::FrequencyPenalty(_) => "frequency_penalty",
            RequestError::LogitBias { .. }
            | RequestError::LogitBiasOutOfVocabulary { .. }
            | RequestError::LogitBiasTwice(_) => "logit_bias",
            RequestError::Choices { .. } => "n",
            RequestError::Edits { .. } => "logit_bias",
            RequestError::Logprobs { field, .. } => field,
            RequestError::PromptLogprobsOff | RequestError::PromptLogprobsAndLogits => {
                "prompt_logprobs"
            }
            RequestError::EmptyStopString | RequestError::StopStringsWithoutText => "stop",
            RequestError::PromptLogitsOff => "prompt_logits",
            RequestError::UnknownAdapter(_) => "adapter",
        }
    }
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
    /// Whether log-probabilities of the prompt can be had.
    pub prompt_logprobs: Want,
    /// Tokens whose logits a request may have changed.
    pub edits: usize,
}

impl RequestLimits {
    /// Most tokens of prompt and answer that any request may have: what the model is run for, or the whole
    /// cache where that is less.
    pub fn context(&self) -> usize {
        self.max_model_len.min(self.kv_blocks.saturating_mul(self.block_size))
    }

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
            let (pool, block_size) = (self.kv_blocks, self.block_size);
            return Err(RequestError::NeverFits { prompt, new, blocks, pool, block_size });
        }
        request.sampling.check()?;
        check_bias(&request.logit_bias, vocab)?;
        if !(1..=MAX_CHOICES).contains(&request.n) {
            return Err(RequestError::Choices { n: request.n, most: MAX_CHOICES });
        }
        let asked = [("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)];
        for (field, asked) in asked.into_iter().filter_map(|(field, n)| Some((field, n?))) {
            if asked > MAX_LOGPROBS {
                return Err(RequestError::Logprobs { field, asked });
            }
        }
        self.check_rows(request)?;
        self.check_edits(request)?;
        if request.stop.strings.iter().any(String::is_empty) {
            return Err(RequestError::EmptyStopString);
        }
        if !request.stop.strings.is_empty() && request.detokenizer.is_none() {
            return Err(RequestError::StopStringsWithoutText);
        }
        Ok(())
    }

    fn check_rows(&self, request: &Request) -> Result<(), RequestError> {
        let (logits, logprobs) = (request.prompt_logits, request.prompt_logprobs);
        if logits == Want::Yes && self.prompt_logits == Want::No {
            return Err(RequestError::PromptLogitsOff);
        }
        if logprobs.is_some() && self.prompt_logprobs == Want::No {
            return Err(RequestError::PromptLogprobsOff);
        }
        if logprobs.is_some() && logits == Want::Yes {
            return Err(RequestError::PromptLogprobsAndLogits);
        }
        Ok(())
    }

    fn check_edits(&self, request: &Request) -> Result<(), RequestError> {
        let others = (request.max_new_tokens, request.logit_bias.len());
        let edits = most_edits(&request.sampling, &request.prompt, others).min(self.vocab);
        match edits > self.edits {
            true => Err(RequestError::Edits { edits, most: self.edits }),
            false => Ok(()),
        }
    }
}

impl SamplingParams {
    fn check(&self) -> Result<(), RequestError> {
        let Self { temperature, top_p, min_p, .. } = *self;
        let rules = [
            (temperature.is_finite() && temperature >= 0.0, RequestError::Temperature(temperature)),
            (top_p > 0.0 && top_p <= 1.0, RequestError::TopP(top_p)),
            ((0.0..=1.0).contains(&min_p), RequestError::MinP(min_p)),
            (
                self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0,
                RequestError::RepetitionPenalty(self.repetition_penalty),
            ),
            (
                self.presence_penalty.is_finite(),
                RequestError::PresencePenalty(self.presence_penalty),
            ),
            (
                self.frequency_penalty.is_finite(),
                RequestError::FrequencyPenalty(self.frequency_penalty),
            ),
        ];
        match rules.into_iter().find(|(holds, _)| !holds) {
            Some((_, broken)) => Err(broken),
            None => Ok(()),
        }
    }
}

fn check_bias(logit_bias: &[(u32, f32)], vocab: usize) -> Result<(), RequestError> {
    let mut seen = BTreeSet::new();
    for &(token, bias) in logit_bias {
        if token as usize >= vocab {
            return Err(RequestError::LogitBiasOutOfVocabulary { token, vocab });
        }
        if !(bias.is_finite() || bias == f32::NEG_INFINITY) {
            return Err(RequestError::LogitBias { token, bias });
        }
        if !seen.insert(token) {
            return Err(RequestError::LogitBiasTwice(token));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Delivery, EosRule, StopRules};

    fn request() -> Request {
        Request { max_new_tokens: 5, ..Request::new(vec![1, 2, 3], Box::new(|_| Delivery::Ok)) }
    }

    const LIMITS: RequestLimits = RequestLimits {
        vocab: 10,
        max_model_len: 20,
        block_size: 4,
        kv_blocks: 4,
        prompt_logits: Want::No,
        prompt_logprobs: Want::Yes,
        edits: 7,
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
        assert_eq!(
            blocks,
            RequestError::NeverFits { prompt: 3, new: 14, blocks: 5, pool: 4, block_size: 4 }
        );
        assert!(!blocks.is_prompt_alone());
        let prompt_alone = refused(|r| (r.prompt, r.max_new_tokens) = (vec![1; 16], 1));
        assert!(prompt_alone.is_prompt_alone(), "{prompt_alone}");
        for wrong in [-0.1, f32::NAN, f32::INFINITY] {
            assert!(matches!(
                refused(|r| r.sampling.temperature = wrong),
                RequestError::Temperature(_)
            ));
        }
        for wrong in [0.0, -1.0, 1.01, f32::NAN] {
            assert!(matches!(refused(|r| r.sampling.top_p = wrong), RequestError::TopP(_)));
        }
        for wrong in [-0.1, 1.1, f32::NAN] {
            assert_eq!(refused(|r| r.sampling.min_p = wrong).field(), "min_p");
        }
        for wrong in [0.0, -1.0, f32::INFINITY, f32::NAN] {
            let error = refused(|r| r.sampling.repetition_penalty = wrong);
            assert_eq!(error.field(), "repetition_penalty");
        }
        let error = refused(|r| r.sampling.presence_penalty = f32::NAN);
        assert_eq!(error.field(), "presence_penalty");
        let error = refused(|r| r.sampling.frequency_penalty = f32::INFINITY);
        assert_eq!(error.field(), "frequency_penalty");
        for wrong in [vec![(10, 1.0)], vec![(1, f32::NAN)], vec![(1, 1.0), (1, 2.0)]] {
            assert_eq!(refused(|r| r.logit_bias = wrong).field(), "logit_bias");
        }
        for wrong in [0, MAX_CHOICES + 1] {
            assert_eq!(refused(|r| r.n = wrong).field(), "n");
        }
        let wrong = Some(MAX_LOGPROBS + 1);
        assert_eq!(refused(|r| r.logprobs = wrong).field(), "logprobs");
        assert_eq!(refused(|r| r.prompt_logprobs = wrong).field(), "prompt_logprobs");
        assert_eq!(
            refused(|r| r.stop.strings = vec![String::new()]),
            RequestError::EmptyStopString
        );
        assert_eq!(
            refused(|r| r.stop.strings = vec!["x".into()]),
            RequestError::StopStringsWithoutText
        );
        assert_eq!(refused(|r| r.prompt_logits = Want::Yes), RequestError::PromptLogitsOff);
        let edits = refused(|r| r.sampling.repetition_penalty = 1.1);
        assert_eq!(edits, RequestError::Edits { edits: 8, most: 7 });
        let mut request = request();
        (request.prompt_logprobs, request.prompt_logits) = (Some(1), Want::Yes);
        let without = RequestLimits { prompt_logprobs: Want::No, ..LIMITS };
        let with = RequestLimits { prompt_logits: Want::Yes, ..LIMITS };
        assert_eq!(with.check(&request), Err(RequestError::PromptLogprobsAndLogits));
        request.prompt_logits = Want::No;
        assert_eq!(without.check(&request), Err(RequestError::PromptLogprobsOff));
        assert_eq!(LIMITS.check(&request), Ok(()));
    }

    #[test]
    fn end_of_sequence_tokens_can_be_ignored_and_stop_tokens_cannot() {
        let mut rules = StopRules { eos: vec![2], token_ids: vec![7], ..StopRules::default() };
        assert!(rules.is_stop(2) && rules.is_stop(7) && !rules.is_stop(3));
        rules.eos_rule = EosRule::Ignore;
        assert!(!rules.is_stop(2) && rules.is_stop(7));
    }
}
