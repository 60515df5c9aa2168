//! A batch of the scheduler → calls of the plan builder, which holds every index against its bound.

use amphora_hal::{
    Error, LogitRows, PlanBuilder, PlanLimits, Result, SampleParams, SequencePlan, Tokens,
};

use crate::buckets::{Buckets, Need};
use crate::scheduler::{Batch, Chunk, Scheduler, Task, TokenSource};

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
        let logit_chunks = batch.chunks.iter().filter(|chunk| chunk.logits);
        let bucket = self.buckets.fit(Need {
            tokens: batch.tokens(),
            sequences: batch.chunks.len(),
            extra_logit_rows: logit_chunks.map(|chunk| chunk.tokens).sum(),
            sampled: batch.sampled(),
        });
        let mut builder = PlanBuilder::new(&self.limits, bucket)?;
        for chunk in &batch.chunks {
            let sequence = scheduler.sequence(chunk.seq).ok_or_else(|| {
                Error::invalid("plan", format!("{:?} has no sequence", chunk.seq))
            })?;
            builder.push(SequencePlan {
                sequence: chunk.seq.0,
                slot: chunk.adapter,
                first_position: chunk.first,
                tokens: tokens(chunk, &sequence.task),
                blocks: sequence.table.blocks(),
                copy: None,
                sample: chunk.sample.then(|| sampling(&sequence.task)),
                edits: &[],
                logprobs: None,
                logits: if chunk.logits { LogitRows::All } else { LogitRows::None },
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
