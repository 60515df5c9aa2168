//! The stored models and adapters of `tests/golden`, compiled in so that an iteration reads no file.

use std::sync::LazyLock;

use amphora_model::Config;
use amphora_model::adapter::AdapterBase;

/// An adapter that loads on its model.
#[derive(Debug, Clone, Copy)]
pub struct Golden {
    /// Which of [`bases`].
    pub model: usize,
    /// `adapter_config.json`.
    pub config: &'static str,
    /// `adapter_model.safetensors`.
    pub weights: &'static [u8],
}

macro_rules! configs {
    ($($model:literal),* $(,)?) => {
        &[$(include_str!(concat!("../../tests/golden/models/", $model, "/config.json"))),*]
    };
}

/// `config.json` of each model: experts named and laid out in each way, dense layers among those with
/// experts, and none but dense layers.
const CONFIGS: &[&str] =
    configs!("gpt_oss", "qwen3_moe", "qwen3_moe_sparse", "mixtral", "llama", "qwen3");

macro_rules! golden {
    ($($model:literal $folder:literal),* $(,)?) => {
        &[$(Golden {
            model: $model,
            config: include_str!(concat!(
                "../../tests/golden/adapters/", $folder, "/adapter_config.json"
            )),
            weights: include_bytes!(concat!(
                "../../tests/golden/adapters/", $folder, "/adapter_model.safetensors"
            )),
        },)*]
    };
}

/// One of each layout: Linears, the router, half an expert in bf16, fused experts either way round,
/// experts one by one, dense MLPs, patterns.
pub const ADAPTERS: &[Golden] = golden!(
    0 "gpt_oss/router_r4",
    0 "gpt_oss/attn_r8",
    0 "gpt_oss/gate_up_only_r5_bf16",
    0 "gpt_oss/experts_fused_r4",
    0 "gpt_oss/experts_fused_alt_r4",
    0 "gpt_oss/r20_rslora_pattern",
    1 "qwen3_moe/experts_fused_alt_r4",
    1 "qwen3_moe/per_expert_rslora_r5",
    2 "qwen3_moe_sparse/per_expert_r4",
    3 "mixtral/per_expert_r4",
    3 "mixtral/experts_fused_r4",
    4 "llama/mlp_r4_bf16",
    5 "qwen3/all_r20_rslora_pattern",
);

/// What adapters can change in those models.
pub fn bases() -> &'static [AdapterBase] {
    static BASES: LazyLock<Vec<AdapterBase>> = LazyLock::new(|| {
        let parse = |text: &&str| {
            let config = Config::parse("golden", text, None).expect("a stored model is sound");
            AdapterBase::from(&config)
        };
        CONFIGS.iter().map(parse).collect()
    });
    &BASES
}
