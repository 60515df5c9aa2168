//! What a client asks, what it is told, and the rules a request must keep.

mod rules;

use std::fmt;

use crate::adapters::ledger::AdapterKey;

pub use rules::{RequestError, RequestLimits};

/// Names a request; given by the engine, never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// How the next token is drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Tokens to draw from; 0 is all.
    pub top_k: u32,
    /// Share of the probability to draw from, in (0, 1].
    pub top_p: f32,
    /// With it a draw depends on seed and position alone; without it the engine chooses one.
    pub seed: Option<u64>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams { temperature: 0.0, top_k: 0, top_p: 1.0, seed: None }
    }
}

/// What the model's end-of-sequence tokens do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EosRule {
    /// They end the answer.
    #[default]
    Stop,
    /// They are tokens like any other.
    Ignore,
}

/// When an answer ends before its length.
#[derive(Debug, Clone, Default)]
pub struct StopRules {
    /// The model's end-of-sequence tokens.
    pub eos: Vec<u32>,
    /// What they do.
    pub eos_rule: EosRule,
    /// Further tokens that end the answer.
    pub token_ids: Vec<u32>,
    /// Texts that end the answer and are not shown; they need a detokenizer.
    pub strings: Vec<String>,
}

impl StopRules {
    /// Whether `token` ends the answer.
    pub fn is_stop(&self, token: u32) -> bool {
        self.token_ids.contains(&token)
            || (self.eos_rule == EosRule::Stop && self.eos.contains(&token))
    }
}

/// Whether a value is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Want {
    /// Leave it out.
    #[default]
    No,
    /// Tell it.
    Yes,
}

/// Turns tokens into text piece by piece. Implemented by whoever owns the tokenizer.
pub trait Detokenize: Send {
    /// Takes one more token and returns the text that became complete with it.
    fn push(&mut self, token: u32) -> String;
    /// The text that is left when no token follows.
    fn flush(&mut self) -> String;
}

/// Whether the client is still there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// The event was taken.
    Ok,
    /// Nobody listens any more: the request is cancelled.
    Gone,
}

/// Receives a request's events, on the engine's thread; it must not block.
pub type Sink = Box<dyn FnMut(Event) -> Delivery + Send>;

/// One prompt to be answered.
pub struct Request {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// Name of an adapter; `None` is the base model.
    pub adapter: Option<String>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Most tokens of the answer; 0 computes the prompt alone.
    pub max_new_tokens: usize,
    /// When to stop earlier.
    pub stop: StopRules,
    /// The log-probability of each token of the answer.
    pub logprobs: Want,
    /// The logits of every prompt position, as `Event::PromptLogits`.
    pub prompt_logits: Want,
    /// Makes text; without it events have ids only.
    pub detokenizer: Option<Box<dyn Detokenize>>,
    /// Where events go.
    pub sink: Sink,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("prompt_tokens", &self.prompt.len())
            .field("adapter", &self.adapter)
            .field("sampling", &self.sampling)
            .field("max_new_tokens", &self.max_new_tokens)
            .finish_non_exhaustive()
    }
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FinishReason {
    /// A stop token or stop string.
    Stop,
    /// `max_new_tokens`.
    Length,
    /// The client asked, or went away.
    Cancelled,
}

/// What a request took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens of the answer, stop token included.
    pub completion: usize,
    /// Prompt tokens whose keys and values were already there.
    pub cached: usize,
}

/// What a client is told. A request gets any number of events and exactly one that ends it:
/// `Finished` or `Failed`.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The request was accepted and will use this version of its adapter.
    Started {
        /// The pinned version; `None` for the base model.
        adapter: Option<AdapterKey>,
    },
    /// The next token of the answer. `text` is final; it may be empty while text is held back.
    Token {
        /// Token id.
        id: u32,
        /// If asked for.
        logprob: Option<f32>,
        /// Text that became certain with this token.
        text: String,
    },
    /// Logits of consecutive prompt positions.
    PromptLogits {
        /// Position of the first row.
        first_position: usize,
        /// Values of a row.
        vocab: usize,
        /// `[positions, vocab]`.
        rows: Vec<f32>,
    },
    /// The answer is complete.
    Finished {
        /// Why.
        reason: FinishReason,
        /// What it took.
        usage: Usage,
    },
    /// There is no answer.
    Failed {
        /// Why.
        error: Failure,
    },
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Failure {
    /// The request breaks a rule.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// Its adapter cannot be had any more.
    #[error("adapter `{name}` is not available")]
    AdapterUnavailable {
        /// Its name.
        name: String,
    },
    /// The device failed; the engine stops.
    #[error("the device failed: {0}")]
    Device(String),
    /// The engine was stopped before the answer was complete.
    #[error("the engine has stopped")]
    Stopped,
}
