//! Steps of a running engine, timed: where each one's time on the device goes.

use std::sync::mpsc::Sender;

use amphora_hal::{Backend, Detail, HostPlan, Profile, Result};

/// How profiled steps run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profiling {
    /// As they run otherwise: replayed where there is a graph; timed in whole.
    AsServed,
    /// Operator by operator, each piece timed.
    Parts,
}

/// Where the time of one step went.
#[derive(Debug, Clone)]
pub struct StepProfile {
    /// Token rows, without padding.
    pub tokens: usize,
    /// Sequences.
    pub sequences: usize,
    /// Whether any row had an adapter.
    pub any_lora: bool,
    /// Times of the forward pass and the draw; the plan's way in and the results' way out are not in it.
    pub profile: Profile,
}

/// Whom to tell; until then steps are not timed, and cost nothing for it.
#[derive(Debug)]
pub(crate) struct Profiler {
    pub how: Profiling,
    pub listener: Sender<StepProfile>,
}

impl Profiler {
    /// Runs a step and tells of it. `Err` is the step's; a listener who has gone is `Ok(false)`.
    pub fn time<B: Backend>(
        &self,
        device: &B,
        stream: &mut B::Stream,
        plan: &HostPlan,
        step: impl FnOnce(&mut B::Stream) -> Result<()>,
    ) -> Result<bool> {
        let detail = match self.how {
            Profiling::AsServed => Detail::Whole,
            Profiling::Parts => Detail::Parts,
        };
        let profile = device.profile(stream, detail, step)?;
        let (tokens, sequences) = (plan.tokens, plan.sequences.len());
        let told = StepProfile { tokens, sequences, any_lora: plan.any_lora(), profile };
        Ok(self.listener.send(told).is_ok())
    }
}
