//! What an operator may set, and the bounds that follow from it and the model.

use amphora_hal::{DType, PlanLimits};
use amphora_model::adapter::Orientation;

use crate::buckets::{Buckets, Padding};
use crate::kv::PrefixCaching;
use crate::request::{RequestLimits, Want};
use crate::scheduler::SchedulerLimits;

/// How large the KV cache is. It never gets more blocks than all sequences at full length can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvSize {
    /// So many blocks.
    Blocks(usize),
    /// What fits in so many bytes.
    Bytes(usize),
}

/// Token rows that no step needs more of; sums of them cannot overflow.
const MAX_BATCH_TOKENS: usize = 1 << 20;

/// Rows of logits that no step needs more of: GPUs take no more blocks along the axis where these lie.
const MAX_LOGIT_ROWS: usize = 65535;

/// Edits that no step needs more of; a plan of so many is 256 MiB.
const MAX_LOGIT_EDITS: usize = 1 << 24;

/// Adapters on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdapterConfig {
    /// Adapters that can be on the device at once; a slot costs its table rows alone.
    pub slots: usize,
    /// Bytes of adapter memory on the device.
    pub arena_bytes: usize,
    /// Bytes of adapters in host memory, ready to be brought to the device. Beyond it those that nobody waits
    /// for are given up, and their files are read again when they are asked for. One that was loaded from no
    /// files stays.
    pub host_bytes: usize,
    /// Most rank; a limit that reserves nothing.
    pub max_rank: usize,
    /// Which way round square fused parameters lie where nothing in an adapter's files says so.
    pub orientation: Option<Orientation>,
    /// What factors are rounded to before they are stored in the compute type, which must hold all its
    /// values; `None` is the compute type.
    pub dtype: Option<DType>,
}

impl Default for AdapterConfig {
    fn default() -> Self {
        AdapterConfig {
            slots: 16,
            arena_bytes: 256 << 20,
            host_bytes: 2 << 30,
            max_rank: 256,
            orientation: None,
            dtype: None,
        }
    }
}

/// When a step is planned before the results of the one before it are seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LookAhead {
    /// While the device is busy with that one.
    #[default]
    WhileBusy,
    /// Always, so that a test sees on any device what a busy one does.
    Always,
}

/// How an engine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineConfig {
    /// Sequences that run at once.
    pub max_seqs: usize,
    /// Token rows of a step.
    pub max_batch_tokens: usize,
    /// Most tokens of prompt and answer; `None` is what the model was made for.
    pub max_model_len: Option<usize>,
    /// Positions in a cache block.
    pub block_size: usize,
    /// Size of the cache.
    pub kv: KvSize,
    /// Whether sequences that begin alike share blocks.
    pub prefix_caching: PrefixCaching,
    /// Most prompt tokens of one sequence in a step; `None` is the step's bound.
    pub chunk: Option<usize>,
    /// `None` runs without adapters.
    pub adapters: Option<AdapterConfig>,
    /// Rows of prompt logits in a step; 0 is without them.
    pub prompt_logit_rows: usize,
    /// Rows of prompt logits in a step that log-probabilities are made of, at most its tokens; 0 is
    /// without them.
    pub prompt_logprob_rows: usize,
    /// Tokens of a step whose logits bias and penalties may change, all its sequences together.
    pub logit_edits: usize,
    /// Later requests that may pass one whose adapter is coming.
    pub max_overtakes: usize,
    /// How steps are padded.
    pub padding: Padding,
    /// When steps are planned ahead.
    pub look_ahead: LookAhead,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            max_seqs: 32,
            max_batch_tokens: 512,
            max_model_len: None,
            block_size: 16,
            kv: KvSize::Bytes(256 << 20),
            prefix_caching: PrefixCaching::On,
            chunk: None,
            adapters: Some(AdapterConfig::default()),
            prompt_logit_rows: 0,
            prompt_logprob_rows: 32,
            // 4 MiB, and more than any vocabulary: so no length of an answer is refused for its penalties.
            logit_edits: 1 << 18,
            max_overtakes: 8,
            padding: Padding::Auto,
            look_ahead: LookAhead::WhileBusy,
        }
    }
}

/// A setting that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}: {expected}")]
pub struct ConfigError {
    /// The setting.
    pub field: &'static str,
    /// What it was.
    pub value: usize,
    /// What it may be.
    pub expected: String,
}

/// Facts of the model and the device that bounds follow from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelFacts {
    /// Token ids.
    pub vocab: usize,
    /// Positions that the model was made for.
    pub max_positions: usize,
    /// Bytes of one position in the cache, all layers.
    pub kv_bytes_per_position: usize,
    /// Most rows of a tile.
    pub tile_rows: usize,
    /// Whether the device records graphs.
    pub graphs: bool,
    /// The largest rank that the device has blocks for.
    pub largest_rank: usize,
}

/// The bounds of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bounds {
    /// Of every plan.
    pub plan: PlanLimits,
    /// Of every batch.
    pub scheduler: SchedulerLimits,
    /// Of every request.
    pub request: RequestLimits,
    /// Padded sizes of steps.
    pub buckets: Buckets,
}

impl Bounds {
    /// Most rows of logits in a step.
    pub fn logit_rows(&self) -> usize {
        let beside = self.scheduler.prompt_logit_rows + self.scheduler.prompt_logprob_rows;
        self.plan.sequences + beside.min(self.plan.tokens)
    }
}

impl EngineConfig {
    /// Holds the settings against each other and against the model.
    pub fn bounds(&self, model: &ModelFacts) -> Result<Bounds, ConfigError> {
        let max_model_len = self.max_model_len.unwrap_or(model.max_positions);
        let chunk = self.chunk.unwrap_or(self.max_batch_tokens);
        let slots = self.adapters.map_or(0, |adapters| adapters.slots);
        let least = |field, value: usize, least: usize| {
            let expected = format!("at least {least} is expected");
            if value < least { Err(ConfigError { field, value, expected }) } else { Ok(()) }
        };
        let most = |field, value: usize, most: usize, why: &str| {
            let expected = format!("at most {most} is expected, {why}");
            if value > most { Err(ConfigError { field, value, expected }) } else { Ok(()) }
        };
        least("max_seqs", self.max_seqs, 1)?;
        least("block_size", self.block_size, 1)?;
        least("chunk", chunk, 1)?;
        least("max_batch_tokens", self.max_batch_tokens, self.max_seqs)?;
        let why = "more than any device computes at once";
        most("max_batch_tokens", self.max_batch_tokens, MAX_BATCH_TOKENS, why)?;
        let why = "more than any device changes at once";
        most("logit_edits", self.logit_edits, MAX_LOGIT_EDITS, why)?;
        least("max_model_len", max_model_len, 1)?;
        most("max_model_len", max_model_len, model.max_positions, "as the model was made for")?;
        most(
            "prompt_logit_rows",
            self.prompt_logit_rows,
            self.max_batch_tokens,
            "a step's tokens",
        )?;
        if let Some(adapters) = self.adapters {
            least("adapters.slots", adapters.slots, 1)?;
            most("adapters.slots", adapters.slots, i16::MAX as usize, "the table's limit")?;
            least("adapters.max_rank", adapters.max_rank, 1)?;
            let why = "the device's largest rank class";
            most("adapters.max_rank", adapters.max_rank, model.largest_rank, why)?;
        }
        let blocks_per_sequence = max_model_len.div_ceil(self.block_size);
        let kv_blocks = match self.kv {
            KvSize::Blocks(blocks) => blocks,
            KvSize::Bytes(bytes) => bytes / (model.kv_bytes_per_position * self.block_size).max(1),
        };
        least("kv blocks", kv_blocks, 1)?;
        let kv_blocks = kv_blocks.min(self.max_seqs.saturating_mul(blocks_per_sequence));
        let padded = match self.padding {
            Padding::Auto => model.graphs,
            Padding::Always => true,
            Padding::Never => false,
        };
        let bounds = Bounds {
            plan: PlanLimits {
                sequences: self.max_seqs,
                tokens: self.max_batch_tokens,
                blocks_per_sequence,
                block_size: self.block_size,
                kv_blocks,
                vocab: model.vocab,
                positions: max_model_len,
                slots,
                tile_rows: model.tile_rows,
                edits: self.logit_edits,
            },
            scheduler: SchedulerLimits {
                max_seqs: self.max_seqs,
                max_batch_tokens: self.max_batch_tokens,
                chunk,
                prompt_logit_rows: self.prompt_logit_rows,
                prompt_logprob_rows: self.prompt_logprob_rows.min(self.max_batch_tokens),
                edits: self.logit_edits,
                max_overtakes: self.max_overtakes,
            },
            request: RequestLimits {
                vocab: model.vocab,
                max_model_len,
                block_size: self.block_size,
                kv_blocks,
                prompt_logits: if self.prompt_logit_rows > 0 { Want::Yes } else { Want::No },
                prompt_logprobs: if self.prompt_logprob_rows > 0 { Want::Yes } else { Want::No },
                edits: self.logit_edits,
            },
            buckets: if padded {
                Buckets::padded(self.max_seqs, self.max_batch_tokens)
            } else {
                Buckets::exact(self.max_seqs)
            },
        };
        let why = "more than any device draws from at once";
        most("max_seqs and rows of prompts' logits", bounds.logit_rows(), MAX_LOGIT_ROWS, why)?;
        Ok(bounds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Delivery, Request, SamplingParams};

    const MODEL: ModelFacts = ModelFacts {
        vocab: 100,
        max_positions: 64,
        kv_bytes_per_position: 10,
        tile_rows: 16,
        graphs: false,
        largest_rank: 256,
    };

    #[test]
    fn the_cache_is_not_larger_than_sequences_can_use() {
        let config = EngineConfig { max_seqs: 2, kv: KvSize::Bytes(1 << 20), ..Default::default() };
        assert_eq!(config.bounds(&MODEL).unwrap().plan.kv_blocks, 2 * 4);
        let small = EngineConfig { kv: KvSize::Bytes(16 * 10 * 3 + 1), ..config };
        assert_eq!(small.bounds(&MODEL).unwrap().plan.kv_blocks, 3);
    }

    #[test]
    fn an_answer_with_penalties_may_be_as_long_as_any() {
        let facts = ModelFacts { vocab: 201_088, max_positions: 131_072, ..MODEL };
        let settings = EngineConfig { kv: KvSize::Blocks(1 << 14), ..EngineConfig::default() };
        let limits = settings.bounds(&facts).unwrap().request;
        let sampling = SamplingParams { presence_penalty: 1.5, ..SamplingParams::default() };
        let (new, prompt) = (limits.context() - 4, vec![7; 4]);
        let request = Request::new(prompt, Box::new(|_| Delivery::Ok));
        let request = Request { sampling, max_new_tokens: new, ..request };
        assert_eq!((limits.check(&request), new), (Ok(()), 131_068));
    }

    #[test]
    fn settings_that_cannot_be_are_named() {
        let sound = EngineConfig::default();
        let refused = |config: EngineConfig| config.bounds(&MODEL).unwrap_err().to_string();
        assert_eq!(
            refused(EngineConfig { max_batch_tokens: 8, ..sound }),
            "max_batch_tokens is 8: at least 32 is expected"
        );
        let refusal = refused(EngineConfig { max_batch_tokens: usize::MAX, ..sound });
        assert!(refusal.contains("at most 1048576"), "{refusal}");
        assert!(refused(EngineConfig { max_model_len: Some(65), ..sound }).contains("at most 64"));
        assert!(refused(EngineConfig { max_seqs: 0, ..sound }).starts_with("max_seqs"));
        assert!(refused(EngineConfig { kv: KvSize::Bytes(9), ..sound }).starts_with("kv blocks"));
        assert!(refused(EngineConfig { prompt_logit_rows: 513, ..sound }).contains("513"));
        let many = EngineConfig { max_batch_tokens: 1 << 17, ..sound };
        let refusal = refused(EngineConfig { max_seqs: 65_504, ..many });
        assert!(refusal.contains("65536: at most 65535"), "{refusal}");
        assert!(EngineConfig { max_seqs: 65_503, ..many }.bounds(&MODEL).is_ok());
        let refusal = refused(EngineConfig { prompt_logit_rows: 1 << 17, ..many });
        assert!(refusal.starts_with("max_seqs and rows of prompts' logits"), "{refusal}");
        let adapters = Some(AdapterConfig { slots: 0, ..AdapterConfig::default() });
        assert!(refused(EngineConfig { adapters, ..sound }).starts_with("adapters.slots"));
    }
}
