//! Black-box tests: the binary `amphora` as its users meet it, on the command line and over HTTP.
//!
//! Every test starts the real binary as a process of its own, or shares one server that answers for
//! the demo model. Nothing here looks inside: what is asserted is what a client can see.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used)]

#[path = "server/binary.rs"]
mod binary;
#[path = "server/http.rs"]
mod http;
#[path = "server/questions.rs"]
mod questions;

#[path = "server/accuracy.rs"]
mod accuracy;
#[path = "server/commands.rs"]
mod commands;
#[path = "server/families.rs"]
mod families;
#[path = "server/inspect.rs"]
mod inspect;
#[path = "server/lifetime.rs"]
mod lifetime;
#[path = "server/models.rs"]
mod models;
#[path = "server/overhead.rs"]
mod overhead;
#[path = "server/refusals.rs"]
mod refusals;
#[path = "server/runtime_adapters.rs"]
mod runtime_adapters;
#[path = "server/sampling.rs"]
mod sampling;
#[path = "server/score.rs"]
mod score;
#[path = "server/streaming.rs"]
mod streaming;
