//! What an engine would reserve and run, found without starting one.

use amphora_hal::{Backend, DType, Error, LoraTable, OpKey, Support};
use amphora_model::{Activations, Config, LoraSlices, op_keys, workspace};

use super::start::{facts, step_limits};
use crate::config::{ConfigError, EngineConfig};

/// What an engine of a model would take beside its weights, in bytes, and what a device lacks for it.
#[derive(Debug)]
pub struct Budget {
    /// Activations of the largest step.
    pub activations: usize,
    /// Workspace of its operators.
    pub workspace: usize,
    /// Keys and values of one position, in all layers.
    pub kv_per_position: usize,
    /// The table of adapters' blocks; 0 without adapters.
    pub adapter_table: usize,
    /// Operators that the device does not run.
    pub missing: Vec<Error>,
}

/// The budget of a model under `settings`.
///
/// # Errors
/// A setting that cannot be.
pub fn budget<B: Backend>(
    device: &B,
    config: &Config,
    dtype: DType,
    settings: &EngineConfig,
) -> Result<Budget, ConfigError> {
    let facts = facts(device, config, dtype);
    let bounds = settings.bounds(&facts)?;
    let limits = step_limits(&bounds, settings.adapters);
    let lacks = |key: OpKey| match device.supports(&key) {
        Support::Yes { .. } => None,
        Support::No { reason } => Some(Error::Unsupported { key, reason }),
    };
    let layout = LoraSlices::new(config).layout().clone();
    Ok(Budget {
        activations: Activations::<B>::bytes(config, &limits, dtype),
        workspace: workspace(device, config, &limits),
        kv_per_position: facts.kv_bytes_per_position,
        adapter_table: settings
            .adapters
            .map_or(0, |adapters| LoraTable::<B>::row_bytes(&layout, adapters.slots)),
        missing: op_keys(device, config, &limits, dtype).into_iter().filter_map(lacks).collect(),
    })
}
