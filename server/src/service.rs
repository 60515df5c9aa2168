//! A running engine with the names, the text and the defaults of its model: what `serve`,
//! `generate` and `demo` put requests to.

use std::sync::Arc;

use amphora_engine::{
    EngineHandle, EosRule, Failure, Request, RequestError, RequestId, SamplingParams, Sink,
    StopRules, SubmitError,
};
use amphora_model::config::GenerationDefaults;
use axum::http::StatusCode;

use crate::openai::{ApiError, Kind, Sampling};
use crate::text::{Render, Text, TextError};

/// Tokens of a completion that sets no limit, as in OpenAI's API.
const COMPLETION_TOKENS: usize = 16;

/// One model being served.
#[derive(Clone)]
pub struct Service {
    pub engine: EngineHandle,
    pub text: Arc<Text>,
    pub defaults: Defaults,
    /// The base's name in requests and replies; adapters are known to the engine alone.
    pub base: Arc<str>,
    /// The model's end-of-sequence tokens.
    pub eos: Vec<u32>,
    /// Most tokens of prompt and answer together.
    pub max_model_len: usize,
}

/// What a request gets where it says nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Defaults {
    pub temperature: f32,
    pub top_p: f32,
    /// 0 is no limit.
    pub top_k: u32,
    /// 0 is off.
    pub min_p: f32,
    /// 1 is off.
    pub repetition_penalty: f32,
    /// Length of an answer to a chat; `None` is what the context has room for.
    pub max_new_tokens: Option<usize>,
}

impl Defaults {
    /// What the model's files say, and else OpenAI's values: temperature 1 and no limits. A file
    /// that says `do_sample: false` means temperature 0.
    pub fn new(generation: &GenerationDefaults, max_new_tokens: Option<usize>) -> Self {
        let greedy = generation.do_sample == Some(false);
        let top_k = generation.top_k.unwrap_or(0);
        Self {
            temperature: if greedy { 0.0 } else { generation.temperature.unwrap_or(1.0) },
            top_p: generation.top_p.unwrap_or(1.0),
            top_k: u32::try_from(top_k).unwrap_or(0), // A limit above all tokens is none.
            min_p: generation.min_p.unwrap_or(0.0),
            repetition_penalty: generation.repetition_penalty.unwrap_or(1.0),
            max_new_tokens,
        }
    }
}

/// One prompt in tokens, and what is asked of it.
#[derive(Debug, Clone)]
pub struct Ask {
    pub kind: Kind,
    pub prompt: Vec<u32>,
    pub adapter: Option<String>,
    pub sampling: Sampling,
}

impl Service {
    /// The adapter that the field `model` names; `None` for the base, which may be left out.
    pub fn adapter(&self, model: Option<&str>) -> Result<Option<String>, ApiError> {
        match model {
            None => Ok(None),
            Some(name) if name == &*self.base => Ok(None),
            Some(name) if self.engine.has_adapter(name) => Ok(Some(name.to_owned())),
            Some(name) => Err(ApiError::unknown_model(name)),
        }
    }

    /// Names of the adapters that can be asked, sorted.
    pub fn adapters(&self) -> Vec<String> {
        let serving = self.engine.adapters().into_iter().filter(|status| !status.draining);
        let mut names: Vec<String> = serving.map(|status| status.key.name.to_string()).collect();
        names.sort_unstable();
        names
    }

    /// Tokens of a chat up to where the assistant begins.
    pub fn chat_prompt(&self, messages: &serde_json::Value) -> Result<Vec<u32>, TextError> {
        let render = Render { messages, tools: None, add_generation_prompt: true };
        let text = self.text.chat()?.render(&render)?;
        self.text.check_length(&text, self.max_model_len)?;
        self.text.encode_rendered(&text)
    }

    /// Tokens of a prompt that is answered as it stands.
    pub fn plain_prompt(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.text.check_length(text, self.max_model_len)?;
        self.text.encode_prompt(text)
    }

    /// Hands a prompt to the engine; its events go to `sink`.
    pub fn submit(&self, ask: Ask, sink: Sink) -> Result<RequestId, SubmitError> {
        self.engine.submit(self.request(ask, sink))
    }

    /// What ends an answer.
    pub fn stop_rules(&self, sampling: &Sampling) -> StopRules {
        StopRules {
            eos: self.eos.clone(),
            eos_rule: if sampling.ignore_eos { EosRule::Ignore } else { EosRule::Stop },
            token_ids: sampling.stop_token_ids.clone(),
            strings: sampling.stop.clone(),
        }
    }

    fn request(&self, ask: Ask, sink: Sink) -> Request {
        let Ask { kind, prompt, adapter, sampling } = ask;
        let (defaults, neutral) = (self.defaults, SamplingParams::default());
        let stop = self.stop_rules(&sampling);
        let room = self.max_model_len.saturating_sub(prompt.len()).max(1);
        let unsaid = match kind {
            Kind::Chat => defaults.max_new_tokens.unwrap_or(room),
            Kind::Completion => COMPLETION_TOKENS,
        };
        Request {
            adapter,
            max_new_tokens: sampling.max_tokens.unwrap_or(unsaid.min(room)),
            sampling: SamplingParams {
                temperature: sampling.temperature.unwrap_or(defaults.temperature),
                top_k: sampling.top_k.unwrap_or(defaults.top_k),
                top_p: sampling.top_p.unwrap_or(defaults.top_p),
                seed: sampling.seed,
                min_p: sampling.min_p.unwrap_or(defaults.min_p),
                repetition_penalty: sampling
                    .repetition_penalty
                    .unwrap_or(defaults.repetition_penalty),
                presence_penalty: sampling.presence_penalty.unwrap_or(neutral.presence_penalty),
                frequency_penalty: sampling.frequency_penalty.unwrap_or(neutral.frequency_penalty),
            },
            n: sampling.n.unwrap_or(1),
            logit_bias: sampling.logit_bias,
            logprobs: sampling.logprobs,
            prompt_logprobs: sampling.prompt_logprobs,
            stop,
            detokenizer: Some(Box::new(self.text.detokenizer())),
            ..Request::new(prompt, sink)
        }
    }
}

/// What a failure of the engine is over HTTP.
pub fn api_error(failure: &Failure) -> ApiError {
    let message = failure.to_string();
    match failure {
        Failure::Request(error) => request_error(error),
        // It was unloaded before the request came to run.
        Failure::AdapterUnavailable { name } => ApiError::unknown_model(name),
        // The reason names files of this machine: it is for the operator, not for the client.
        Failure::AdapterUnreadable { name, .. } => {
            eprintln!("{message}");
            let told = format!("adapter `{name}` cannot be read again");
            ApiError::status(StatusCode::INTERNAL_SERVER_ERROR, told)
        }
        Failure::Device(_) => ApiError::status(StatusCode::INTERNAL_SERVER_ERROR, message),
        Failure::Stopped => ApiError::status(StatusCode::SERVICE_UNAVAILABLE, message),
    }
}

/// What a request that was not taken is over HTTP.
pub fn submit_error(error: &SubmitError, kind: Kind) -> ApiError {
    match error {
        // Where the prompt alone is too long, no limit on the answer would help.
        SubmitError::Request(error) if error.is_prompt_alone() => {
            let field = match kind {
                Kind::Chat => "messages",
                Kind::Completion => "prompt",
            };
            ApiError::too_long(field, error.to_string())
        }
        SubmitError::Request(error) => request_error(error),
        SubmitError::Stopped => api_error(&Failure::Stopped),
    }
}

fn request_error(error: &RequestError) -> ApiError {
    let message = error.to_string();
    match error {
        RequestError::UnknownAdapter(name) => ApiError::unknown_model(name),
        RequestError::TooLong { .. } | RequestError::NeverFits { .. } => {
            ApiError::too_long("max_tokens", message)
        }
        RequestError::PromptLogitsOff => ApiError::malformed(message),
        other => ApiError::invalid(other.field(), message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The JSON of an error, as a client gets it.
    fn body(error: &ApiError) -> String {
        error.body().to_string()
    }

    #[test]
    fn a_prompt_that_alone_exceeds_the_cache_is_the_field_at_fault() {
        let error = |prompt| {
            let error =
                RequestError::NeverFits { prompt, new: 4, blocks: 5, pool: 4, block_size: 4 };
            body(&submit_error(&SubmitError::Request(error), Kind::Chat))
        };
        assert!(error(16).contains("messages"), "{}", error(16));
        assert!(error(15).contains("max_tokens"), "{}", error(15));
    }

    #[test]
    fn an_adapter_that_cannot_be_read_again_tells_no_path() {
        let (name, reason) = ("a".to_owned(), "/srv/adapters/a: gone".to_owned());
        let told = body(&api_error(&Failure::AdapterUnreadable { name, reason }));
        assert!(told.contains("adapter `a`") && !told.contains("/srv"), "{told}");
    }

    #[test]
    fn defaults_are_the_model_s_and_else_openai_s() {
        let plain = Defaults::new(&GenerationDefaults::default(), None);
        assert_eq!((plain.temperature, plain.top_p, plain.top_k), (1.0, 1.0, 0));
        assert_eq!((plain.min_p, plain.repetition_penalty), (0.0, 1.0));
        let sampled = GenerationDefaults {
            do_sample: Some(true),
            temperature: Some(0.7),
            top_k: Some(20),
            top_p: Some(0.8),
            min_p: Some(0.1),
            repetition_penalty: Some(1.05),
        };
        let defaults = Defaults::new(&sampled, Some(128));
        assert_eq!((defaults.temperature, defaults.top_p, defaults.top_k), (0.7, 0.8, 20));
        assert_eq!((defaults.min_p, defaults.repetition_penalty), (0.1, 1.05));
        let greedy = GenerationDefaults { do_sample: Some(false), ..sampled };
        assert_eq!(Defaults::new(&greedy, None).temperature, 0.0);
    }
}
