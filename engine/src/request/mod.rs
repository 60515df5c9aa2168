//! What a client asks, what it is told, and the rules a request must keep.

mod rules;

use std::fmt;

use amphora_hal::ops::split_mix64;

use crate::adapters::ledger::AdapterKey;

pub use rules::{MAX_CHOICES, MAX_LOGPROBS, RequestError, RequestLimits};

/// Names a request; given by the engine, never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// How the next token is drawn. In this order: logits, bias and penalties, temperature, `min_p`, `top_k`,
/// `top_p`, draw. A greedy answer sees bias and penalties too.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Tokens to draw from; 0 is all.
    pub top_k: u32,
    /// Share of the probability to draw from, in (0, 1].
    pub top_p: f32,
    /// Least probability to draw from, as a share of the largest, in [0, 1]; 0 is off.
    pub min_p: f32,
    /// Divides the logits above 0, and multiplies those below, of tokens that the prompt or the answer has;
    /// above 0, and 1 is off.
    pub repetition_penalty: f32,
    /// Taken from the logits of tokens that the answer has; 0 is off.
    pub presence_penalty: f32,
    /// Taken from them once for each time that the answer has the token; 0 is off.
    pub frequency_penalty: f32,
    /// With it a draw depends on seed and position alone; without it the engine chooses one.
    pub seed: Option<u64>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
        }
    }
}

/// The seed of answer `choice` to a request with `seed`: answer 0 has the request's own, and answer i is the
/// one that a lone request with `choice_seed(seed, i)` gets.
pub fn choice_seed(seed: u64, choice: usize) -> u64 {
    if choice == 0 {
        return seed;
    }
    split_mix64(seed, choice as u64)
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
    /// Another one, for another answer to the same prompt; asked before the first token.
    fn fork(&self) -> Box<dyn Detokenize>;
}

/// Whether the client is still there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// The event was taken.
    Ok,
    /// Nobody listens any more: the request is cancelled.
    Gone,
}

/// Receives a request's events, those of all its answers, on the engine's thread; it must not block.
pub type Sink = Box<dyn FnMut(Event) -> Delivery + Send>;

/// One prompt to be answered, once or several times.
pub struct Request {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// Name of an adapter; `None` is the base model.
    pub adapter: Option<String>,
    /// Answers to the prompt, which is computed once; see [`choice_seed`] for how they differ.
    pub n: usize,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// What is added to the logits of some tokens, each named once.
    pub logit_bias: Vec<(u32, f32)>,
    /// Most tokens of an answer; 0 computes the prompt alone.
    pub max_new_tokens: usize,
    /// When to stop earlier.
    pub stop: StopRules,
    /// The log-probability of each token of an answer, and of so many of the likeliest at its place.
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt, as `Event::PromptLogprobs`.
    pub prompt_logprobs: Option<usize>,
    /// The logits of every prompt position, as `Event::PromptLogits`.
    pub prompt_logits: Want,
    /// Makes text; without it events have ids only.
    pub detokenizer: Option<Box<dyn Detokenize>>,
    /// Where events go.
    pub sink: Sink,
}

impl Request {
    /// The base model's one greedy answer of 16 tokens, as ids.
    pub fn new(prompt: Vec<u32>, sink: Sink) -> Self {
        Request {
            prompt,
            adapter: None,
            n: 1,
            sampling: SamplingParams::default(),
            logit_bias: Vec::new(),
            max_new_tokens: 16,
            stop: StopRules::default(),
            logprobs: None,
            prompt_logprobs: None,
            prompt_logits: Want::No,
            detokenizer: None,
            sink,
        }
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("prompt_tokens", &self.prompt.len())
            .field("adapter", &self.adapter)
            .field("n", &self.n)
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

/// What a request took, all of its answers together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the prompt, counted once.
    pub prompt: usize,
    /// Tokens of the answers, stop tokens included.
    pub completion: usize,
    /// Prompt tokens whose keys and values were already there.
    pub cached: usize,
}

/// A token that could have been at some place, and the logarithm of its probability there: the softmax of
/// the model's own logits, before bias, penalties and temperature.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// Token id.
    pub id: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// A token of the prompt, and what the model would have said in its place.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptLogprob {
    /// The prompt's token.
    pub token: TokenLogprob,
    /// Its place among all tokens by likelihood; 1 is the likeliest.
    pub rank: u32,
    /// The likeliest, the first of them first.
    pub top: Vec<TokenLogprob>,
}

/// What a client is told. A request gets any number of events, one `Finished` for each of its answers, and
/// nothing after the last of those; or a `Failed`, and nothing after that.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The request was accepted and will use this version of its adapter.
    Started {
        /// The pinned version; `None` for the base model.
        adapter: Option<AdapterKey>,
    },
    /// The next token of an answer. `text` is final; it may be empty while text is held back.
    Token {
        /// The answer, below `Request::n`.
        choice: usize,
        /// Token id.
        id: u32,
        /// If asked for.
        logprob: Option<f32>,
        /// The likeliest tokens in its place, the first of them first; as many as were asked for.
        top: Vec<TokenLogprob>,
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
    /// Log-probabilities of consecutive prompt tokens; the first token of a prompt has none.
    PromptLogprobs {
        /// Position of the first of them.
        first_position: usize,
        /// One for each token.
        tokens: Vec<PromptLogprob>,
    },
    /// An answer is complete.
    Finished {
        /// The answer, below `Request::n`.
        choice: usize,
        /// Why.
        reason: FinishReason,
        /// What the request took up to here; all it took when this is its last answer.
        usage: Usage,
    },
    /// There is no answer, or none any more.
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
    /// Its adapter had to be read again, and its files are not as they were.
    #[error("adapter `{name}` cannot be read again: {reason}")]
    AdapterUnreadable {
        /// Its name.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// The device failed; the engine stops.
    #[error("the device failed: {0}")]
    Device(String),
    /// The engine was stopped before the answer was complete.
    #[error("the engine has stopped")]
    Stopped,
}
