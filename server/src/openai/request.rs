//! Bodies of `/v1/chat/completions` and `/v1/completions`.
//!
//! Defaults: a value left out comes from the model's `generation_config.json` (where
//! `do_sample: false` means temperature 0), and else is OpenAI's: temperature 1, top_p 1, 16 tokens
//! for a completion and the rest of the context for a chat. `top_k`, `ignore_eos` and
//! `stop_token_ids` are extensions that other servers have too. A request that names no model is
//! answered by the base.

use serde_json::{Value, json};

use super::ApiError;
use super::fields::{Fields, Neutral, expected};

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
    ("n", Neutral::Number(1.0)),
    ("best_of", Neutral::Number(1.0)),
    ("top_logprobs", Neutral::Absent),
    ("logit_bias", Neutral::Empty),
    ("presence_penalty", Neutral::Number(0.0)),
    ("frequency_penalty", Neutral::Number(0.0)),
    ("repetition_penalty", Neutral::Number(1.0)),
    ("min_p", Neutral::Number(0.0)),
    ("min_tokens", Neutral::Number(0.0)),
    ("prompt_logprobs", Neutral::Absent),
    ("response_format", Neutral::Type("text")),
    ("skip_special_tokens", Neutral::Bool(true)),
    ("include_stop_str_in_output", Neutral::Bool(false)),
];

const NOT_BUILT_FOR_CHATS: &[(&str, Neutral)] = &[
    ("logprobs", Neutral::Bool(false)),
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

const NOT_BUILT_FOR_COMPLETIONS: &[(&str, Neutral)] =
    &[("logprobs", Neutral::Absent), ("suffix", Neutral::Empty), ("echo", Neutral::Bool(false))];

/// How tokens are drawn and when an answer ends; `None` is "not said".
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sampling {
    pub max_tokens: Option<usize>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    /// 0 for no limit.
    pub top_k: Option<u32>,
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
        Ok(Self { shared: Shared::take(fields)?, messages: Value::Array(messages) })
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
        Ok(Self { shared: Shared::take(fields)?, prompts })
    }
}

impl Shared {
    /// Takes all remaining fields.
    fn take(mut fields: Fields) -> Result<Self, ApiError> {
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
        let sampling = Sampling::take(&mut fields)?;
        fields.finish("")?;
        Ok(Self { model, sampling, stream, include_usage })
    }
}

impl Sampling {
    fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let older = fields.integer("max_tokens", 1)?;
        let newer = fields.integer("max_completion_tokens", 1)?;
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
        Ok(Self {
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
