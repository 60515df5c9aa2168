//! What is written back: whole answers, chunks of a stream, and the list of models.
//!
//! A stream's rules: the first chunk of each choice of a chat carries the role; chunks of text have
//! `finish_reason: null`; each choice has exactly one chunk with a reason, and that chunk has no
//! text; then, only if usage was asked for, one chunk without choices carries it (and all chunks
//! before it `usage: null`); then `data: [DONE]`. All chunks share `id`, `created` and `model`.

use serde::Serialize;
use serde_json::{Value, json};

use super::logprobs::{self, Entry, Ranked};

/// Which API an answer belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Chat,
    Completion,
}

/// What all parts of one answer share.
#[derive(Debug, Clone)]
pub struct Envelope {
    pub kind: Kind,
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The name that was asked: the base or the adapter.
    pub model: String,
}

/// Tokens read and written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    /// Prompt tokens whose keys and values were already there.
    pub cached_tokens: usize,
}

impl Usage {
    fn json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        })
    }
}

/// One finished choice of an answer that is not streamed.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    pub text: String,
    /// One for each token of the text, if asked for.
    pub logprobs: Option<Vec<Entry>>,
    /// One for each token of the prompt but the first, if asked for.
    pub prompt_logprobs: Option<Vec<Vec<Ranked>>>,
    pub finish_reason: &'static str,
}

/// The body of an answer that is not streamed.
pub fn whole(envelope: &Envelope, all: &[Choice], usage: Usage) -> Value {
    let (object, choices): (_, Vec<Value>) = match envelope.kind {
        Kind::Chat => ("chat.completion", all.iter().enumerate().map(chat_choice).collect()),
        Kind::Completion => {
            ("text_completion", all.iter().enumerate().map(completion_choice).collect())
        }
    };
    let mut body = json!({
        "id": envelope.id,
        "object": object,
        "created": envelope.created,
        "model": envelope.model,
        "choices": choices,
        "usage": usage.json(),
    });
    // A chat has one prompt, so its log-probabilities stand beside the choices.
    if envelope.kind == Kind::Chat
        && let Some(prompt) = all.first().and_then(|choice| choice.prompt_logprobs.as_ref())
    {
        body["prompt_logprobs"] = logprobs::prompt(prompt);
    }
    body
}

fn chat_choice((index, choice): (usize, &Choice)) -> Value {
    json!({
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": null},
        "logprobs": choice.logprobs.as_deref().map(logprobs::chat),
        "finish_reason": choice.finish_reason,
    })
}

fn completion_choice((index, choice): (usize, &Choice)) -> Value {
    let entries = choice.logprobs.as_deref();
    let mut value = json!({
        "index": index,
        "text": choice.text,
        "logprobs": entries.map(|entries| logprobs::completion(entries, &mut 0)),
        "finish_reason": choice.finish_reason,
    });
    if let Some(prompt) = &choice.prompt_logprobs {
        value["prompt_logprobs"] = logprobs::prompt(prompt);
    }
    value
}

/// Writes the chunks of one stream, each as the bytes of one server-sent event.
#[derive(Debug, Clone)]
pub struct Chunks {
    pub envelope: Envelope,
    pub include_usage: bool,
    /// For each choice, the characters of tokens whose log-probabilities are out.
    pub offsets: Vec<usize>,
}

impl Chunks {
    /// The first chunk of a choice, where the API has one.
    pub fn role(&self, index: usize) -> Option<String> {
        let delta = json!({"role": "assistant", "content": "", "refusal": null});
        match self.envelope.kind {
            Kind::Chat => Some(self.chunk(self.chat_delta(index, delta, None))),
            Kind::Completion => None,
        }
    }

    /// A piece of text, and the log-probabilities of the tokens it came with, if they are wanted.
    pub fn text(&mut self, index: usize, text: &str, entries: Option<&[Entry]>) -> String {
        let choice = match self.envelope.kind {
            Kind::Chat => {
                let mut choice = self.chat_delta(index, json!({"content": text}), None);
                choice["logprobs"] = entries.map_or(Value::Null, logprobs::chat);
                choice
            }
            Kind::Completion => {
                let mut choice = completion_delta(index, text, None);
                let offset = &mut self.offsets[index];
                let written = entries.map(|entries| logprobs::completion(entries, offset));
                choice["logprobs"] = written.unwrap_or(Value::Null);
                choice
            }
        };
        self.chunk(choice)
    }

    /// The end of a choice.
    pub fn finish(&self, index: usize, reason: &str) -> String {
        self.chunk(match self.envelope.kind {
            Kind::Chat => self.chat_delta(index, json!({}), Some(reason)),
            Kind::Completion => completion_delta(index, "", Some(reason)),
        })
    }

    /// The chunk of usage, if it was asked for, and the end of the stream.
    pub fn end(&self, usage: Usage) -> String {
        let mut out = String::new();
        if self.include_usage {
            out = event(&self.body(json!([]), Some(usage)));
        }
        out.push_str("data: [DONE]\n\n");
        out
    }

    /// An error in the middle of a stream, whose status has already been sent.
    pub fn error(&self, body: &Value) -> String {
        event(body)
    }

    fn chat_delta(&self, index: usize, delta: Value, reason: Option<&str>) -> Value {
        json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": reason})
    }

    fn chunk(&self, choice: Value) -> String {
        event(&self.body(json!([choice]), None))
    }

    fn body(&self, choices: Value, usage: Option<Usage>) -> Value {
        let object = match self.envelope.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Completion => "text_completion",
        };
        let mut body = json!({
            "id": self.envelope.id,
            "object": object,
            "created": self.envelope.created,
            "model": self.envelope.model,
            "choices": choices,
        });
        if self.include_usage {
            body["usage"] = usage.map_or(Value::Null, Usage::json);
        }
        body
    }
}

fn completion_delta(index: usize, text: &str, reason: Option<&str>) -> Value {
    json!({"index": index, "text": text, "logprobs": null, "finish_reason": reason})
}

/// One server-sent event. JSON has no raw newline, so it is one line.
fn event(body: &Value) -> String {
    format!("data: {body}\n\n")
}

/// One entry of `/v1/models`.
#[derive(Debug, Clone, Serialize)]
pub struct Model {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub owned_by: &'static str,
    /// The base an adapter belongs to; null for the base.
    pub parent: Option<String>,
    /// Tokens of prompt and answer together.
    pub max_model_len: usize,
}

/// The body of `/v1/models`.
#[derive(Debug, Clone, Serialize)]
pub struct ModelList {
    pub object: &'static str,
    pub data: Vec<Model>,
}
