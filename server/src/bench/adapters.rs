//! The adapters of a benchmark: one set of made factors, which each gets memory of its own for on the
//! device.

use amphora_engine::EngineHandle;
use amphora_hal::DType;
use amphora_model::adapter::AdapterFactors;
use amphora_model::{Config, LoraSlices, synthetic};
use anyhow::Context;

/// The factors that all adapters of a benchmark have.
pub struct MadeAdapters {
    factors: AdapterFactors,
    numbers: usize,
    blocks: usize,
}

impl MadeAdapters {
    /// Random factors of `rank`.
    pub fn new(config: &Config, slices: &LoraSlices, rank: usize) -> Self {
        let factors = synthetic::adapter(config, slices, rank);
        let of_shrinks: usize = factors.shrinks.iter().map(|a| a.data.len()).sum();
        let of_expands: usize = factors.modules.iter().map(|m| m.b.data.len()).sum();
        let blocks = factors.shrinks.len() + factors.modules.len();
        Self { factors, numbers: of_shrinks + of_expands, blocks }
    }

    /// Numbers of one adapter.
    pub fn numbers(&self) -> usize {
        self.numbers
    }

    /// Room for `count` of them: ranks are rounded up to a class, blocks to their unit, and a page
    /// may end with a block that does not fit.
    pub fn arena_bytes(&self, count: usize, dtype: DType) -> usize {
        const LARGEST_UNIT: usize = 256;
        let padded = 2 * self.numbers * dtype.size() + self.blocks * LARGEST_UNIT;
        count.saturating_mul(padded).saturating_add(64 << 20)
    }

    /// Loads one under each name, several at a time: packing is work of the caller's thread.
    pub fn load(&self, engine: &EngineHandle, names: &[String]) -> anyhow::Result<()> {
        std::thread::scope(|scope| {
            let loads: Vec<_> = names
                .iter()
                .map(|name| scope.spawn(move || engine.load_factors(name, &self.factors)))
                .collect();
            loads.into_iter().try_for_each(|load| {
                load.join().ok().context("a loading thread panicked")??;
                Ok(())
            })
        })
    }
}
