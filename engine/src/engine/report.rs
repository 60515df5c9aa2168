//! What the engine leaves behind for readers after each turn.

use std::collections::BTreeSet;

use amphora_hal::{Backend, HostPlan, Slot};

use super::Engine;
use crate::metrics::{Metrics, StepReport};
use crate::scheduler::Batch;

impl<B: Backend> Engine<B> {
    /// Keeps the report of the step with the most different adapters.
    pub(super) fn note_mix(&mut self, batch: &Batch, plan: &HostPlan, slots: &BTreeSet<Slot>) {
        let before = &self.most_mixed;
        if (slots.len(), batch.chunks.len()) < (before.adapters, before.sequences) {
            return;
        }
        let in_use = self.adapters.as_ref().map(|pool| pool.in_use(slots)).unwrap_or_default();
        self.most_mixed = StepReport {
            sequences: batch.chunks.len(),
            tokens: plan.tokens,
            bucket: plan.bucket.tokens,
            adapters: slots.len(),
            segments: plan.segments,
            tiles: plan.tiles.len(),
            rank_classes: in_use.classes.iter().map(|class| class.get()).collect(),
            adapter_bytes: in_use.bytes,
        };
    }

    /// Replaces the snapshot.
    pub(super) fn publish(&mut self) {
        let mut metrics = Metrics { most_mixed: self.most_mixed.clone(), ..Metrics::default() };
        self.scheduler.report(&mut metrics);
        metrics.finished.failed += self.refused;
        let mut changed = None;
        if let Some(pool) = &self.adapters {
            metrics.adapters_hot = pool.hot();
            metrics.adapter_memory = pool.report();
            metrics.adapter_host_bytes = pool.host_bytes();
            metrics.adapter_reads = pool.reads();
            // With many adapters the list costs more than a step's planning, and seldom changes.
            if self.published != pool.revision() {
                self.published = pool.revision();
                changed = Some(pool.list());
            }
        }
        let mut snapshot = self.shared.snapshot();
        snapshot.metrics = metrics;
        if let Some(adapters) = changed {
            snapshot.adapters = adapters;
        }
    }
}
