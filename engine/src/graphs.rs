//! Recorded graphs, one for each bucket with and without adapters. Shapes that are not recorded run
//! eagerly, on the same code.

use std::collections::HashMap;

use amphora_hal::{
    Bucket, Device, LogitRows, PlanBuilder, PlanLimits, Result, SampleParams, SequencePlan, Slot,
    Tokens,
};

/// What a graph was recorded for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GraphKey {
    /// Padded sizes.
    pub bucket: Bucket,
    /// Whether any row has an adapter.
    pub any_lora: bool,
}

/// The graphs of an engine; empty where the device records none.
pub struct Graphs<D: Device> {
    recorded: HashMap<GraphKey, D::Graph>,
}

impl<D: Device> Default for Graphs<D> {
    fn default() -> Self {
        Graphs { recorded: HashMap::new() }
    }
}

impl<D: Device> Graphs<D> {
    /// The graph to replay, if there is one.
    pub fn get(&self, key: &GraphKey) -> Option<&D::Graph> {
        self.recorded.get(key)
    }

    /// Keeps a graph.
    pub fn insert(&mut self, key: GraphKey, graph: D::Graph) {
        self.recorded.insert(key, graph);
    }
}

/// A plan to warm up with: one token of one sequence, the rest padding. It writes the first position of
/// the first cache block before any sequence has it. The adapter slot's table rows are still zero.
///
/// # Errors
/// The bucket is outside the limits.
pub fn warm_up_plan(limits: &PlanLimits, key: GraphKey) -> Result<PlanBuilder> {
    let mut plan = PlanBuilder::new(limits, key.bucket)?;
    plan.push(SequencePlan {
        sequence: 0,
        slot: key.any_lora.then_some(Slot::new(0)),
        first_position: 0,
        tokens: Tokens::Prompt(&[0]),
        blocks: &[0],
        copy: None,
        sample: Some(SampleParams::GREEDY),
        edits: &[],
        logprobs: None,
        logits: LogitRows::None,
    })?;
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buckets::Buckets;

    #[test]
    fn every_recorded_bucket_has_a_plan() {
        let limits = PlanLimits {
            sequences: 4,
            tokens: 20,
            blocks_per_sequence: 2,
            block_size: 16,
            kv_blocks: 3,
            vocab: 10,
            positions: 32,
            slots: 1,
            tile_rows: 16,
            edits: 0,
        };
        for bucket in Buckets::padded(4, 20).recorded() {
            for any_lora in [false, true] {
                assert!(warm_up_plan(&limits, GraphKey { bucket, any_lora }).is_ok());
            }
        }
    }
}
