//! The conformance suite: one set of cases, an oracle that belongs to no backend, and laws.
//!
//! `conformance_<backend>.rs` runs [`suite`] on one backend. Each case is one operator call given
//! as host arrays ([`harness::HostOp`]); the harness puts it on the device between guard bytes,
//! runs it, and holds every byte of the memory against the oracle or against what was there before.

pub mod cases;
pub mod churn;
pub mod compare;
pub mod expectations;
pub mod fixtures;
pub mod golden;
pub mod harness;
pub mod host;
pub mod laws;
pub mod oracle;
pub mod packed;
pub mod peft;
pub mod promises;
pub mod rig;
pub mod rng;
pub mod seeded;
pub mod serving;
pub mod step;
mod suite;
pub mod swap;

pub use suite::{laws, suite, suite_and};
