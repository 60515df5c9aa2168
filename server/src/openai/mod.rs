//! The wire types of OpenAI's completions and chat APIs: what is read, what is refused by name, and
//! what is written back, whole or as a stream.
//!
//! A request is read field by field from its JSON, not through derived types: every field is either
//! applied, known to change no answer, or refused with 400 and its name. Nothing is ignored silently.

mod error;
mod fields;
mod logprobs;
mod reply;
mod request;

pub use error::ApiError;
pub use fields::Fields;
pub use logprobs::{Entry, Likely, Ranked, TokenText};
pub use reply::{Choice, Chunks, Envelope, Kind, Model, ModelList, Usage, whole};
pub use request::{ChatRequest, CompletionRequest, Prompt, Sampling, Shared};

#[cfg(test)]
mod tests;
