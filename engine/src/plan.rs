//! A batch of the scheduler → calls of the plan builder, which holds every index against its bound.

use amphora_hal::{
    Error, LogitRows, PlanBuilder, PlanLimits, Result, SampleParams, SequencePlan, Tokens,
};

use crate::buckets::{Buckets, Need};
use crate::scheduler::{Batch, Chunk, Rows, Scheduler, Task, TokenSource};

/// Plans the steps of one engine.
#[derive(Debug)]
pub struct Planner {
    limits: PlanLimits,
    buckets: Buckets,
}

impl Planner {
    /// A planner within `limits`, whose steps are padded to `buckets`.
    pub fn new(limits: PlanLimits, buckets: Buckets) -> Self {
        Planner { limits, buckets }
    }

    /// The bounds of every plan.
    pub fn limits(&self) -> &PlanLimits {
        &self.limits
    }

    /// The padded sizes.
    pub fn buckets(&self) -> &Buckets {
        &self.buckets
    }

    /// The plan of a batch that `scheduler` has just made.
    ///
    /// # Errors
    /// An index leaves its bound: a bug of the scheduler.
    pub fn build(&self, batch: &Batch, scheduler: &Scheduler) -> Result<PlanBuilder> {
        let bucket = self.buckets.fit(Need {
            tokens: batch.tokens(),
            sequences: batch.chunks.len(),
            extra_logit_rows: batch.extra_rows(),
            sampled: batch.sampled(),
        });
        let mut builder = PlanBuilder::new(&self.limits, bucket)?;
        for chunk in &batch.chunks {
            let sequence = scheduler.sequence(chunk.seq).ok_or_else(|| {
                Error::invalid("plan", format!("{:?} has no sequence", chunk.seq))
            })?;
            let task = &sequence.task;
            let edits = if chunk.sample { task.edits() } else { Vec::new() };
            builder.push(SequencePlan {
                sequence: chunk.seq.0,
                slot: chunk.adapter,
                first_position: chunk.first,
                tokens: tokens(chunk, task),
                blocks: sequence.table.blocks(),
                copy: chunk.copy,
                sample: chunk.sample.then(|| sampling(task)),
                edits: &edits,
                logprobs: (chunk.top > 0).then_some(chunk.top),
                logits: logit_rows(chunk, task),
            })?;
        }
        Ok(builder)
    }
}

fn tokens<'a>(chunk: &Chunk, task: &'a Task) -> Tokens<'a> {
    match chunk.source {
        TokenSource::LastSampled => Tokens::Last,
        TokenSource::Known => {
            Tokens::Prompt(&task.tokens()[chunk.first..chunk.first + chunk.tokens])
        }
    }
}

fn logit_rows<'a>(chunk: &Chunk, task: &'a Task) -> LogitRows<'a> {
    match chunk.rows {
        Rows::None | Rows::Logprobs { rows: 0, .. } => LogitRows::None,
        Rows::Logits => LogitRows::All,
        Rows::Logprobs { rows, best } => LogitRows::Targets {
            tokens: &task.tokens()[chunk.first + 1..chunk.first + 1 + rows],
            best,
        },
    }
}

fn sampling(task: &Task) -> SampleParams {
    let spec = &task.spec;
    SampleParams {
        temperature: spec.sampling.temperature,
        top_k: spec.sampling.top_k,
        top_p: spec.sampling.top_p,
        min_p: spec.sampling.min_p,
        repetition: spec.sampling.repetition_penalty,
        presence: spec.sampling.presence_penalty,
        frequency: spec.sampling.frequency_penalty,
        seed: task.seed(),
        logprob: spec.logprobs.is_some(),
    }
}
