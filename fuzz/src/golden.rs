//! The stored model and adapters of `tests/golden`, compiled in so that an iteration reads no file.

use amphora_model::Config;
use amphora_model::adapter::AdapterBase;

/// `config.json` of the model that the adapters are for.
pub const MODEL_CONFIG: &str = include_str!("../../tests/golden/models/gpt_oss/config.json");

/// An adapter that loads.
#[derive(Debug, Clone, Copy)]
pub struct Golden {
    /// `adapter_config.json`.
    pub config: &'static str,
    /// `adapter_model.safetensors`.
    pub weights: &'static [u8],
}

macro_rules! golden {
    ($($name:literal),* $(,)?) => {
        &[$(Golden {
            config: include_str!(concat!(
                "../../tests/golden/adapters/gpt_oss/", $name, "/adapter_config.json"
            )),
            weights: include_bytes!(concat!(
                "../../tests/golden/adapters/gpt_oss/", $name, "/adapter_model.safetensors"
            )),
        },)*]
    };
}

/// One of each layout: Linears, the router, half an expert in bf16, fused experts either way round,
/// patterns.
pub const ADAPTERS: &[Golden] = golden!(
    "router_r4",
    "attn_r8",
    "gate_up_only_r5_bf16",
    "experts_fused_r4",
    "experts_fused_alt_r4",
    "r20_rslora_pattern",
);

/// The dimensions of that model.
pub fn base() -> AdapterBase {
    let config = Config::parse("golden", MODEL_CONFIG, None).expect("a stored model is sound");
    AdapterBase::from(&config)
}
