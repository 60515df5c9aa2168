//! What the engine counts: a snapshot that anyone may read.

use crate::adapters::pages::PagesReport;
use crate::kv::PrefixReport;
use crate::request::FinishReason;

/// Ends of answers by reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Finished {
    /// A stop token or string.
    pub stop: u64,
    /// Their length.
    pub length: u64,
    /// Cancelled or gone.
    pub cancelled: u64,
    /// Failed, refused ones included.
    pub failed: u64,
}

impl Finished {
    /// Counts one answer.
    pub fn count(&mut self, reason: FinishReason) {
        match reason {
            FinishReason::Stop => self.stop += 1,
            FinishReason::Length => self.length += 1,
            FinishReason::Cancelled => self.cancelled += 1,
        }
    }
}

/// What one step was.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StepReport {
    /// Sequences in it.
    pub sequences: usize,
    /// Token rows in it, padding not counted.
    pub tokens: usize,
    /// Rows the device computed.
    pub bucket: usize,
    /// Different adapters in it.
    pub adapters: usize,
    /// Runs of rows with one adapter, as dense projections see them.
    pub segments: usize,
    /// Tiles those are cut into.
    pub tiles: usize,
    /// Rank classes of these adapters' blocks, ascending.
    pub rank_classes: Vec<usize>,
    /// Bytes of these adapters' blocks.
    pub adapter_bytes: usize,
}

/// Totals since the start, and how things stand.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Metrics {
    /// Steps run.
    pub steps: u64,
    /// Tokens computed whose ids the host knew: those of prompts, and what preempted sequences compute again.
    pub prompt_tokens: u64,
    /// Tokens of answers.
    pub tokens: u64,
    /// Sequences that run.
    pub running: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// Cache blocks that sequences hold.
    pub kv_blocks_used: usize,
    /// Cache blocks that nobody holds and that are kept for sequences that begin alike.
    pub kv_blocks_cached: usize,
    /// Cache blocks.
    pub kv_blocks_total: usize,
    /// What the prefix cache found.
    pub prefix: PrefixReport,
    /// Times that a sequence lost its blocks to an earlier one.
    pub preemptions: u64,
    /// Adapter memory.
    pub adapter_memory: PagesReport,
    /// Adapters on the device.
    pub adapters_hot: usize,
    /// Bytes of adapter images in host memory.
    pub adapter_host_bytes: usize,
    /// Adapters read again from their files, as their image had been given up.
    pub adapter_reads: u64,
    /// Ends of answers.
    pub finished: Finished,
    /// The step with the most different adapters so far; the last of several.
    pub most_mixed: StepReport,
}
