//! Scheduler, paged KV cache, adapter store and the loop that runs a model in steps.
//!
//! The host plans a step, the device executes it. What plans (`scheduler`, `kv`, `adapters::ledger`,
//! `adapters::pages`, `reply`) carries no device type and is tested without one.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod adapters;
pub mod buckets;
pub mod config;
mod engine;
mod executor;
mod graphs;
mod handle;
pub mod kv;
pub mod measure;
pub mod metrics;
pub mod plan;
mod profiling;
pub mod reply;
pub mod request;
mod results;
pub mod scheduler;
pub mod step;
pub mod stop;

pub use adapters::ledger::{AdapterKey, AdapterStatus, Place};
pub use adapters::name::{NameError, check_name};
pub use buckets::Padding;
pub use config::{AdapterConfig, ConfigError, EngineConfig, KvSize, LookAhead};
pub use engine::{
    Budget, EngineError, EngineThread, ModelSource, NoRoom, StartReport, Started, arena_pages,
    budget, start,
};
pub use handle::{EngineHandle, LoadError, Loaded, Shutdown, SubmitError, UnloadError};
pub use kv::{PrefixCaching, PrefixReport};
pub use metrics::{Metrics, StepReport};
pub use profiling::{Profiling, StepProfile};
pub use request::{
    Delivery, Detokenize, EosRule, Event, Failure, FinishReason, MAX_CHOICES, MAX_LOGPROBS,
    PromptLogprob, Request, RequestError, RequestId, RequestLimits, SamplingParams, Sink,
    StopRules, TokenLogprob, Usage, Want, choice_seed,
};

#[cfg(test)]
mod testing;
