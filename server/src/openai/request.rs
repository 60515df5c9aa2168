//! Bodies of `/v1/chat/completions` and `/v1/completions`.
//!
//! Defaults: a value left out comes from the model's `generation_config.json` (where
//! `do_sample: false` means temperature 0), and else is OpenAI's: temperature 1, top_p 1, 16 tokens
//! for a completion and the rest of the context for a chat. A request that names no model is
//! answered by the base. Extensions that other servers have too: `top_k`, `min_p`,
//! `repetition_penalty`, `prompt_logprobs`, `ignore_eos` and `stop_token_ids`.

use std::collections::HashSet;

use amphora_engine::{MAX_CHOICES, MAX_LOGPROBS};
use serde_json::{Value, json};

use super::fields::{Fields, Neutral, expected};
use super::{ApiError, Kind};

/// Most stop strings of one request, as in OpenAI's API.
const MAX_STOPS: usize = 4;

/// Fields that change no answer: accounting, caching hints, abuse tracking.
const HARMLESS: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "parallel_tool_calls",
];

/// Fields of both APIs that are not built yet, and the value that changes nothing.
const NOT_BUILT: &[(&str, Neutral)] = &[
    ("min_tokens", Neutral::Number(0.0)),
    ("response_format", Neutral::Type("text")),
    ("skip_special_tokens", Neutral::Bool(true)),
    ("include_stop_str_in_output", Neutral::Bool(false)),
];

const NOT_BUILT_FOR_CHATS: &[(&str, Neutral)] = &[
    ("tools", Neutral::Empty),
    ("tool_choice", Neutral::Text("none")),
    ("functions", Neutral::Empty),
    ("function_call", Neutral::Text("none")),
    ("audio", Neutral::Absent),
    ("modalities", Neutral::Only("text")),
    ("web_search_options", Neutral::Absent),
    ("reasoning_effort", Neutral::Absent),
    ("verbosity", Neutral::Absent),
    ("add_generation_prompt", Neutral::Bool(true)),
    ("continue_final_message", Neutral::Bool(false)),
    ("chat_template", Neutral::Absent),
    ("chat_template_kwargs", Neutral::Empty),
    ("documents", Neutral::Empty),
];

const NOT_BUILT_FOR_COMPLETIONS: &[(&str, Neutral)] = &[("suffix", Neutral::Empty)];

/// How tokens are drawn and when an answer ends; `None` is "not said".
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sampling {
    /// Answers to each prompt.
    pub n: Option<usize>,
    pub max_tokens: Option<usize>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    /// 0 for no limit.
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    /// Token ids, each once, and what is added to their logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// The log-probability of each token, and of so many of the likeliest.
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt.
    pub prompt_logprobs: Option<usize>,
    pub seed: Option<u64>,
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<u32>,
    pub ignore_eos: bool,
}

/// What both kinds of request have.
#[derive(Debug, Clone, PartialEq)]
pub struct Shared {
    /// The base or an adapter; `None` is the base.
    pub model: Option<String>,
    pub sampling: Sampling,
    pub stream: bool,
    /// Whether a stream ends with a chunk of usage.
    pub include_usage: bool,
}

/// A body of `/v1/chat/completions`.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    pub shared: Shared,
    /// Messages for the template: objects with `role`, `content` as text, and maybe `name`.
    pub messages: Value,
}

/// One prompt of a completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// A body of `/v1/completions`; each prompt makes one choice.
#[derive(Debug, Clone, PartialEq)]
pub struct CompletionRequest {
    pub shared: Shared,
    pub prompts: Vec<Prompt>,
    /// Whether each text begins with its prompt.
    pub echo: bool,
}

impl ChatRequest {
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        fields.refuse(NOT_BUILT_FOR_CHATS)?;
        let messages = match fields.take("messages") {
            Some(Value::Array(list)) if !list.is_empty() => {
                list.into_iter().enumerate().map(|(i, value)| message(i, value)).collect()
            }
            Some(other) => Err(expected("messages", "a list of at least one message", &other)),
            None => Err(ApiError::invalid("messages", "'messages' is missing")),
        }?;
        let likeliest = fields.integer_within("top_logprobs", 0, MAX_LOGPROBS)?;
        let logprobs = match (fields.boolean("logprobs")?.unwrap_or(false), likeliest) {
            (true, likeliest) => Some(likeliest.unwrap_or(0)),
            (false, None | Some(0)) => None,
            (false, Some(_)) => {
                let message = "'top_logprobs' needs 'logprobs': true";
                return Err(ApiError::invalid("top_logprobs", message));
            }
        };
        let shared = Shared::take(fields, Kind::Chat, logprobs)?;
        Ok(Self { shared, messages: Value::Array(messages) })
    }
}

impl CompletionRequest {
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        fields.refuse(NOT_BUILT_FOR_COMPLETIONS)?;
        let prompts = match fields.take("prompt") {
            Some(value) => prompts(value),
            None => Err(ApiError::invalid("prompt", "'prompt' is missing")),
        }?;
        let echo = fields.boolean("echo")?.unwrap_or(false);
        let logprobs = fields.integer_within("logprobs", 0, MAX_LOGPROBS)?;
        let shared = Shared::take(fields, Kind::Completion, logprobs)?;
        if echo && logprobs.is_some() && shared.stream {
            let message = "'echo' with 'logprobs' is not streamed; leave one of them out";
            return Err(ApiError::invalid("echo", message));
        }
        Ok(Self { shared, prompts, echo })
    }
}

impl Shared {
    /// Takes all remaining fields.
    fn take(mut fields: Fields, kind: Kind, logprobs: Option<usize>) -> Result<Self, ApiError> {
        fields.ignore(HARMLESS);
        fields.refuse(NOT_BUILT)?;
        let model = fields.text("model")?.filter(|name| !name.is_empty());
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let include_usage = match fields.take("stream_options") {
            None => false,
            Some(value) => {
                let mut options = Fields::of("stream_options", value)?;
                // Padding against traffic analysis: never sent here, so asking for none is no change.
                options.ignore(&["include_obfuscation"]);
                let include_usage = options.boolean("include_usage")?.unwrap_or(false);
                options.finish("stream_options.")?;
                include_usage
            }
        };
        let sampling = Sampling { logprobs, ..Sampling::take(&mut fields, kind)? };
        if stream && sampling.prompt_logprobs.is_some() {
            let message = "'prompt_logprobs' are not streamed; leave out 'stream'";
            return Err(ApiError::invalid("prompt_logprobs", message));
        }
        fields.finish("")?;
        Ok(Self { model, sampling, stream, include_usage })
    }
}

impl Sampling {
    fn take(fields: &mut Fields, kind: Kind) -> Result<Self, ApiError> {
        // A completion of no tokens is how its prompt alone is scored.
        let least = if kind == Kind::Completion { 0 } else { 1 };
        let older = fields.integer("max_tokens", least)?;
        let newer = fields.integer("max_completion_tokens", least)?;
        if let (Some(older), Some(newer)) = (older, newer)
            && older != newer
        {
            return Err(ApiError::invalid(
                "max_tokens",
                "'max_tokens' and 'max_completion_tokens' differ; send one of them",
            ));
        }
        let stop = fields.texts("stop")?;
        if stop.len() > MAX_STOPS || stop.iter().any(String::is_empty) {
            return Err(ApiError::invalid(
                "stop",
                format!("'stop' must be at most {MAX_STOPS} strings, none of them empty"),
            ));
        }
        let stop_token_ids = match fields.take("stop_token_ids") {
            None => Vec::new(),
            Some(value) => serde_json::from_value(value.clone())
                .map_err(|_| expected("stop_token_ids", "a list of token ids", &value))?,
        };
        let n = fields.integer_within("n", 1, MAX_CHOICES)?;
        // Answers that are drawn and not returned have no use here: all are as good as the best.
        let best_of = fields.integer("best_of", 1)?;
        if best_of.is_some_and(|best_of| usize::try_from(best_of) != Ok(n.unwrap_or(1))) {
            return Err(ApiError::unsupported("best_of", "leave it out or send the value of 'n'"));
        }
        Ok(Self {
            n,
            min_p: fields.number("min_p", 0.0, 1.0)?.map(|value| value as f32),
            repetition_penalty: repetition_penalty(fields)?,
            presence_penalty: fields
                .number("presence_penalty", -2.0, 2.0)?
                .map(|value| value as f32),
            frequency_penalty: fields
                .number("frequency_penalty", -2.0, 2.0)?
                .map(|value| value as f32),
            logit_bias: logit_bias(fields)?,
            logprobs: None,
            prompt_logprobs: fields.integer_within("prompt_logprobs", 0, MAX_LOGPROBS)?,
            max_tokens: newer.or(older).map(|tokens| usize::try_from(tokens).unwrap_or(usize::MAX)),
            temperature: fields.number("temperature", 0.0, 2.0)?.map(|value| value as f32),
            top_p: top_p(fields)?,
            top_k: top_k(fields)?,
            // A negative seed is as good as any: its bits are the seed.
            seed: fields.integer("seed", i64::MIN)?.map(i64::cast_unsigned),
            stop,
            stop_token_ids,
            ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        })
    }
}

fn top_p(fields: &mut Fields) -> Result<Option<f32>, ApiError> {
    // What f32 cannot tell from 0 is 0.
    match fields.number("top_p", 0.0, 1.0)?.map(|value| value as f32) {
        Some(0.0) => {
            let message = "'top_p' must be above 0; for the likeliest token send temperature 0";
            Err(ApiError::invalid("top_p", message))
        }
        other => Ok(other),
    }
}

/// What f32 cannot tell from 0 is 0, and would divide by it.
fn repetition_penalty(fields: &mut Fields) -> Result<Option<f32>, ApiError> {
    match fields.number("repetition_penalty", 0.0, 1e6)?.map(|value| value as f32) {
        Some(0.0) => {
            let message = "'repetition_penalty' must be above 0; 1 changes nothing";
            Err(ApiError::invalid("repetition_penalty", message))
        }
        other => Ok(other),
    }
}

/// An object of token ids, written as texts, and values from −100 to 100.
fn logit_bias(fields: &mut Fields) -> Result<Vec<(u32, f32)>, ApiError> {
    const WHAT: &str = "an object of token ids and values from -100 to 100";
    let Some(value) = fields.take("logit_bias") else { return Ok(Vec::new()) };
    let refuse = || expected("logit_bias", WHAT, &value);
    let entries = value.as_object().ok_or_else(refuse)?;
    let mut biases = Vec::with_capacity(entries.len());
    let mut seen = HashSet::with_capacity(entries.len());
    for (id, bias) in entries {
        let id: u32 = id.parse().map_err(|_| refuse())?;
        let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        let bias = bias.ok_or_else(refuse)? as f32;
        // "7" and "07" are one token.
        if !seen.insert(id) {
            let message = format!("'logit_bias' names token {id} twice");
            return Err(ApiError::invalid("logit_bias", message));
        }
        biases.push((id, bias));
    }
    Ok(biases)
}

/// 0 and −1 both mean no limit, as other servers have it.
fn top_k(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let top_k = fields.integer("top_k", -1)?;
    Ok(top_k.map(|value| u32::try_from(value.max(0)).unwrap_or(u32::MAX)))
}

/// One message for the template; content parts are joined by newlines.
fn message(index: usize, value: Value) -> Result<Value, ApiError> {
    let path = format!("messages[{index}]");
    let mut fields = Fields::of(&path, value)?;
    let field = |name: &str| format!("{path}.{name}");
    let role = match fields.take("role") {
        Some(Value::String(role)) => role,
        Some(other) => return Err(expected(&field("role"), "a string", &other)),
        None => {
            return Err(ApiError::invalid(field("role"), format!("'{path}.role' is missing")));
        }
    };
    let content = match fields.take("content") {
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => content_parts(&field("content"), parts)?,
        Some(other) => {
            return Err(expected(&field("content"), "a string or a list of text parts", &other));
        }
        None => {
            let message = format!("'{path}.content' is missing");
            return Err(ApiError::invalid(field("content"), message));
        }
    };
    for name in ["tool_calls", "tool_call_id", "function_call", "audio", "refusal"] {
        if let Some(value) = fields.take(name)
            && !Neutral::Empty.accepts(&value)
        {
            return Err(ApiError::unsupported(field(name), "leave it out"));
        }
    }
    // Written by our own replies' clients when they send a message back.
    fields.ignore(&["annotations"]);
    let mut message = json!({"role": role, "content": content});
    if let Some(name) = fields.take("name") {
        message["name"] = name;
    }
    fields.finish(&format!("{path}."))?;
    Ok(message)
}

fn content_parts(path: &str, parts: Vec<Value>) -> Result<String, ApiError> {
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.into_iter().enumerate() {
        match (part["type"].as_str(), part["text"].as_str()) {
            (Some("text"), Some(text)) => texts.push(text.to_owned()),
            (Some("text"), None) | (None, _) => {
                let path = format!("{path}[{index}]");
                return Err(expected(&path, "an object with 'type' and 'text'", &part));
            }
            (Some(_), _) => {
                let path = format!("{path}[{index}].type");
                return Err(ApiError::unsupported(
                    path,
                    "this server reads parts of type \"text\"",
                ));
            }
        }
    }
    Ok(texts.join("\n"))
}

/// A string, token ids, or a list of either.
fn prompts(value: Value) -> Result<Vec<Prompt>, ApiError> {
    const WHAT: &str = "a string, a list of token ids, or a list of strings or of such lists";
    let refuse = |value: &Value| expected("prompt", WHAT, value);
    let tokens = |value: &Value| -> Option<Prompt> {
        serde_json::from_value(value.clone())
            .ok()
            .filter(|ids: &Vec<u32>| !ids.is_empty())
            .map(Prompt::Tokens)
    };
    match &value {
        Value::String(text) => Ok(vec![Prompt::Text(text.clone())]),
        Value::Array(list) if list.is_empty() => Err(refuse(&value)),
        Value::Array(list) if list[0].is_number() => match tokens(&value) {
            Some(prompt) => Ok(vec![prompt]),
            None => Err(refuse(&value)),
        },
        Value::Array(list) => list
            .iter()
            .map(|entry| match entry {
                Value::String(text) => Ok(Prompt::Text(text.clone())),
                other => tokens(other).ok_or_else(|| refuse(other)),
            })
            .collect(),
        other => Err(refuse(other)),
    }
}
