//! Each architecture's description against the checkpoints it is for.

use amphora_hal::DType;

use safetensors::tensor::TensorView;

use super::*;
use crate::config::{MlpKind, Quantization};
use crate::source::Source;

const OPTIONS: LoadOptions = LoadOptions { dtype: DType::F32, positions: 64 };

/// Every golden model.
pub(crate) const MODELS: [&str; 8] = [
    "gpt_oss",
    "gpt_oss_bf16",
    "gpt_oss_mxfp4",
    "qwen3_moe",
    "qwen3_moe_sparse",
    "mixtral",
    "llama",
    "qwen3",
];

fn golden(model: &str) -> (ModelFiles, Config) {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = root.join("../tests/golden/models").join(model);
    let files = ModelFiles::open(&folder).expect("a stored model");
    let config = Config::read(&files).expect("sound");
    (files, config)
}

fn check(files: &ModelFiles, config: &Config) -> Result<LoadReport> {
    let items = describe(files, config, &OPTIONS);
    weights::check(&request(files, config, &items, OPTIONS))
}

/// A stored model with other tensors: `edit` gets each name, shape and bytes.
fn edited(model: &str, edit: impl Fn(&mut Vec<(String, Vec<usize>, Vec<u8>)>)) -> ModelFiles {
    let (files, _) = golden(model);
    let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = files
        .names()
        .filter_map(|name| {
            let tensor = files.tensor(name)?;
            Some((name.to_owned(), tensor.shape.to_vec(), tensor.bytes.to_vec()))
        })
        .collect();
    edit(&mut tensors);
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes);
        (name.as_str(), view.expect("whole elements"))
    });
    let file = safetensors::serialize(views, None).expect("named once");
    let files = vec![("model.safetensors".to_owned(), file.into())];
    ModelFiles::from_source(Source::Memory { name: "edited".to_owned(), files }).expect("sound")
}

#[test]
fn every_tensor_of_a_checkpoint_is_used_once() {
    for model in MODELS {
        let (files, config) = golden(model);
        let report = check(&files, &config).expect(model);
        assert_eq!(report.tensors, files.names().count(), "{model}");
        assert_eq!(report.file_bytes, files.tensor_bytes(), "{model}");
    }
}

#[test]
fn tensors_that_contradict_the_configuration_are_named() {
    let message = |model: &str, edit: fn(&mut Config)| {
        let (files, mut config) = golden(model);
        edit(&mut config);
        check(&files, &config).expect_err("contradicts").to_string()
    };
    for (model, edit, expected) in [
        (
            "gpt_oss",
            (|c| c.experts = 7) as fn(&mut Config),
            "`model.layers.0.mlp.router.weight` has shape [8, 64], expected [7, 64]",
        ),
        ("gpt_oss", |c| c.windows.truncate(2), "17 tensors play no part in gpt_oss"),
        ("gpt_oss", |c| c.windows.push(None), "`model.layers.3.input_layernorm.weight` is missing"),
        ("gpt_oss", |c| c.attention_bias = false, "12 tensors play no part"),
        ("gpt_oss", |c| c.tied_embeddings = true, "[\"lm_head.weight\"]"),
        (
            "qwen3_moe",
            |c| c.mlps[1] = MlpKind::Dense,
            "`model.layers.1.mlp.gate_proj.weight` is missing",
        ),
        ("qwen3_moe", |c| c.experts = 7, "mlp.gate.weight` has shape [8, 48], expected [7, 48]"),
        (
            "qwen3_moe",
            |c| c.intermediate = 25,
            "`model.layers.0.mlp.experts.0.gate_proj.weight` has shape [24, 48], expected [25, 48]",
        ),
        (
            "qwen3_moe_sparse",
            |c| c.tied_embeddings = false,
            "`lm_head.weight` is missing, expected shape [400, 48]",
        ),
        (
            "mixtral",
            |c| c.head_dim = 32,
            "`model.layers.0.self_attn.q_proj.weight` has shape [64, 64], expected [128, 64]",
        ),
        ("llama", |c| c.mlp_bias = true, "`model.layers.0.mlp.gate_proj.bias` is missing"),
        ("llama", |c| c.attention_bias = true, "self_attn.q_proj.bias` is missing"),
        ("qwen3", |c| c.vocab = 400, "`model.embed_tokens.weight` has shape [416, 48]"),
    ] {
        let message = message(model, edit);
        assert!(message.contains(expected), "{message}\n  should contain: {expected}");
    }
}

/// Blocks without `quantization_config` are no weights of the plain model.
#[test]
fn mxfp4_blocks_need_their_configuration() {
    let (files, mut config) = golden("gpt_oss_mxfp4");
    config.quantization = Quantization::None;
    let error = check(&files, &config).expect_err("contradicts").to_string();
    assert!(error.contains("mlp.experts.gate_up_proj` is missing"), "{error}");
}

#[test]
fn an_expert_unlike_the_others_of_its_layer_is_refused_by_name() {
    for (model, expert) in [
        ("qwen3_moe", "model.layers.1.mlp.experts.3.up_proj.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w3.weight"),
    ] {
        let (_, config) = golden(model);
        let files = edited(model, |tensors| {
            let found = tensors.iter_mut().find(|(name, ..)| name == expert).expect("there");
            found.1[0] -= 1;
            found.2.truncate(found.1[0] * found.1[1] * 4);
        });
        let (hidden, inner) = (config.hidden, config.intermediate);
        let expected = format!(
            "edited: expert tensor `{expert}` has shape [{}, {hidden}], others of its layer have \
             [{inner}, {hidden}]; experts of unlike shapes are not supported",
            inner - 1
        );
        assert_eq!(check(&files, &config).expect_err("unlike").to_string(), expected);
    }
}

/// Some writers store a tied head all the same.
#[test]
fn a_tied_head_may_be_stored_if_it_is_the_embedding() {
    let (_, config) = golden("llama");
    let stored = |change: u8| {
        edited("llama", |tensors| {
            let name = "model.embed_tokens.weight";
            let found = tensors.iter().find(|(n, ..)| n == name).expect("there").clone();
            let (_, shape, mut bytes) = found;
            bytes[0] ^= change;
            tensors.push(("lm_head.weight".to_owned(), shape, bytes));
        })
    };
    check(&stored(0), &config).expect("a copy");
    let error = check(&stored(1), &config).expect_err("another head").to_string();
    assert!(error.contains("1 tensors play no part in llama"), "{error}");
    assert!(error.contains("lm_head.weight"), "{error}");
}
