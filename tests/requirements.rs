//! What each family asks of a device before anything is loaded.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used)]

use amphora_backend_cpu::Cpu;
use amphora_hal::{Caps, DType, Device, DeviceConfig, OpKind};
use amphora_model::{Config, ModelFiles, StepLimits, op_keys};
use amphora_tests::golden;

fn operators(model: &str, slots: usize) -> Vec<OpKind> {
    let device = Cpu::open(&DeviceConfig::default()).unwrap();
    let files = ModelFiles::open(&golden::folder().join("models").join(model)).unwrap();
    let config = Config::read(&files).unwrap();
    let Caps { tile_rows, .. } = *device.caps();
    let limits = StepLimits {
        tokens: 64,
        sequences: 4,
        logit_rows: 4,
        context: 64,
        slots,
        max_rank: 16,
        tile_rows,
    };
    op_keys(&device, &config, &limits, DType::F32).iter().map(|key| key.op).collect()
}

/// A device without an operator that a model never runs must not be refused for it.
#[test]
fn a_model_asks_for_the_operators_of_its_layers_alone() {
    use OpKind::{FusedMoe, FusedMoeLora, LoraLinear, MoeRoute, Swiglu};
    let all = [FusedMoe, FusedMoeLora, LoraLinear, MoeRoute, Swiglu];
    for (model, experts, dense) in [
        ("gpt_oss", true, false),
        ("qwen3_moe", true, false),
        ("qwen3_moe_sparse", true, true),
        ("mixtral", true, false),
        ("llama", false, true),
        ("qwen3", false, true),
    ] {
        for slots in [0, 2] {
            let asked = operators(model, slots);
            let wanted = [experts, experts && slots > 0, slots > 0, experts, dense];
            assert_eq!(all.map(|op| asked.contains(&op)), wanted, "{model}, {slots} slots");
        }
    }
}
