//! Configurations of both styles, and those that are refused.

use amphora_hal::DType;
use serde_json::{Map, Value};

use super::*;

#[path = "tests/families.rs"]
mod families;

const HUB: &str = r#"{
  "model_type": "gpt_oss", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
  "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 400, "num_local_experts": 8,
  "num_experts_per_tok": 2, "experts_per_token": 2, "intermediate_size": 48, "sliding_window": 16,
  "swiglu_limit": 1.25, "rms_norm_eps": 1e-05, "max_position_embeddings": 256,
  "torch_dtype": "float32", "eos_token_id": 1, "pad_token_id": 2, "rope_theta": 150000,
  "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
  "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 32, "truncate": false}
}"#;

fn edited(edit: impl FnOnce(&mut Map<String, Value>)) -> String {
    let mut value: Map<String, Value> = serde_json::from_str(HUB).expect("the constant is JSON");
    edit(&mut value);
    Value::Object(value).to_string()
}

fn set(field: &'static str, value: Value) -> String {
    edited(|map| {
        map.insert(field.to_owned(), value);
    })
}

fn parse(text: &str) -> std::result::Result<Config, ConfigError> {
    Config::parse("m", text, None)
}

#[test]
fn both_styles_give_the_same_config() {
    let hub = parse(HUB).expect("sound");
    let five = edited(|map| {
        let mut rope = map.remove("rope_scaling").expect("there");
        rope["rope_theta"] = map.remove("rope_theta").expect("there");
        map.insert("rope_parameters".to_owned(), rope);
        let dtype = map.remove("torch_dtype").expect("there");
        map.insert("dtype".to_owned(), dtype);
    });
    assert_eq!(parse(&five).expect("sound"), hub);
    let older = edited(|map| {
        let scaling = map["rope_scaling"].as_object_mut().expect("an object");
        let kind = scaling.remove("rope_type").expect("there");
        scaling.insert("type".to_owned(), kind);
    });
    assert_eq!(parse(&older).expect("sound"), hub);
    assert_eq!(hub.windows, [Some(16), None, Some(16)]);
    assert_eq!(hub.activation, Activation::ClampedInterleaved { limit: 1.25, alpha: 1.702 });
    assert!(hub.attention_bias);
    assert_eq!(hub.stored_dtype, Some(DType::F32));
    let RopeScaling::Yarn(yarn) = hub.rope.scaling else { panic!("{:?}", hub.rope) };
    assert!((yarn.attention_factor - 1.207_944_154_167_983_6).abs() < 1e-12);
}

#[test]
fn absent_fields_take_the_defaults_of_transformers() {
    let text = edited(|map| {
        for field in [
            "layer_types",
            "rope_scaling",
            "rope_theta",
            "sliding_window",
            "swiglu_limit",
            "max_position_embeddings",
            "experts_per_token",
        ] {
            map.remove(field);
        }
    });
    let config = parse(&text).expect("sound");
    assert_eq!(config.windows, [Some(128), None, Some(128)]);
    assert_eq!(config.activation, Activation::ClampedInterleaved { limit: 7.0, alpha: 1.702 });
    assert_eq!(config.max_positions, 131_072);
    assert_eq!(config.rope.theta, 150_000.0);
    assert!(matches!(
        config.rope.scaling,
        RopeScaling::Yarn(YarnScaling {
            factor: 32.0,
            original_positions: 4096,
            truncate: false,
            ..
        })
    ));
}

#[test]
fn generation_config_wins() {
    let generation = r#"{"eos_token_id": [1, 4], "bos_token_id": 0, "do_sample": true,
        "temperature": 0.7, "top_k": 20, "top_p": 0.8}"#;
    let config = Config::parse("m", HUB, Some(generation)).expect("sound");
    assert_eq!((config.eos, config.bos, config.pad), (vec![1, 4], Some(0), Some(2)));
    assert_eq!(config.generation.top_k, Some(20));
    let silent = Config::parse("m", HUB, Some("{}")).expect("sound");
    assert_eq!(silent.eos, [1]);
}

#[test]
fn refusals_name_file_field_found_and_expected() {
    let mut quantized: Map<String, Value> = Map::new();
    quantized.insert("quant_method".to_owned(), "gptq".into());
    let cases = [
        (
            set("model_type", "qwen2_moe".into()),
            "m/config.json: model_type `qwen2_moe` is not supported; supported: gpt_oss, qwen3_moe, \
             mixtral, llama, qwen3",
        ),
        (set("model_type", "deepseek_v2".into()), "`deepseek_v2` is not supported yet; supported"),
        (set("model_type", "deepseek_v3".into()), "`deepseek_v3` is not supported yet; supported"),
        (set("model_type", "llama4".into()), "`llama4` is not supported yet; supported"),
        (
            set("hidden_size", 0.into()),
            "m/config.json: field `hidden_size` is 0, expected a whole number in 1..=1048576",
        ),
        (set("hidden_size", "64".into()), "field `hidden_size` is \"64\""),
        (set("hidden_size", 1e18.into()), "expected a whole number"),
        (set("hidden_size", Value::Null), "field `hidden_size` is missing"),
        (set("num_key_value_heads", 3.into()), "a divisor of num_attention_heads (8)"),
        (set("head_dim", 15.into()), "an even number"),
        (
            edited(|map| {
                map.insert("num_hidden_layers".to_owned(), 99.into());
                map.insert("num_local_experts".to_owned(), 16_384.into());
                map.remove("layer_types");
            }),
            "field `num_local_experts` is 16384, expected at most 2647 in each of 99 layers",
        ),
        (set("num_experts_per_tok", 9.into()), "1..=8"),
        (set("experts_per_token", 3.into()), "num_experts_per_tok (2)"),
        (set("layer_types", Value::from(vec!["full_attention"])), "a list of 3 layer types"),
        (
            set("layer_types", Value::from(vec!["full_attention", "x", "x"])),
            "field `layer_types` is \"x\"",
        ),
        (set("sliding_window", Value::Null), "as layers are sliding_attention"),
        (set("sliding_window", 0.into()), "field `sliding_window` is 0"),
        (set("rms_norm_eps", Value::from(-1.0)), "a positive number"),
        // Positive, but 0 as the f32 that norms compute with.
        (set("rms_norm_eps", Value::from(1e-60)), "a positive number"),
        (set("rope_theta", 1.into()), "field `rope_theta` is 1.0, expected more than 1"),
        (
            set("rope_scaling", serde_json::json!({"rope_type": "yarn", "factor": 1e-38})),
            "field `rope_scaling.factor` is 1e-38, expected a number of at least 1",
        ),
        (
            // 0.1 · m · ln 22026.465794806718 + 1 is 0 at m = −1.
            set(
                "rope_scaling",
                serde_json::json!({
                    "rope_type": "yarn", "factor": 22026.465794806718, "mscale": 1.0,
                    "mscale_all_dim": -1.0
                }),
            ),
            "a value with which the attention factor is a positive number",
        ),
        (
            set("rope_scaling", serde_json::json!({"rope_type": "longrope"})),
            "field `rope_scaling.rope_type` is \"longrope\", expected yarn, llama3 or default",
        ),
        (
            set("rope_scaling", serde_json::json!({"full_attention": {}})),
            "one set of parameters for all layers",
        ),
        (
            set("partial_rotary_factor", Value::from(0.5)),
            "field `partial_rotary_factor` is 0.5, expected 1",
        ),
        (set("hidden_act", "gelu".into()), "expected silu"),
        (
            set("quantization_config", Value::Object(quantized)),
            "field `quantization_config.quant_method` is \"gptq\", expected mxfp4",
        ),
        (set("eos_token_id", 400.into()), "0..=399"),
        (set("eos_token_id", serde_json::json!([1, 400])), "0..=399"),
        (set("torch_dtype", "float8".into()), "float32, float16 or bfloat16"),
        ("[]".to_owned(), "m/config.json: not a JSON object"),
        ("{".to_owned(), "not a JSON object"),
    ];
    for (text, expected) in cases {
        let message = parse(&text).expect_err(expected).to_string();
        assert!(message.contains(expected), "{message}\n  should contain: {expected}");
        assert!(!message.contains('\n'), "{message}");
    }
}

/// Numbers that are fields' values on their own, and together none: a table of positions must have
/// no NaN.
#[test]
fn rotary_tables_of_extreme_files_are_finite() {
    for scaling in [
        serde_json::json!({"rope_type": "yarn", "factor": 1e38}),
        serde_json::json!({"rope_type": "yarn", "factor": 8.0, "beta_fast": 5e-324}),
        serde_json::json!({"rope_type": "yarn", "factor": 8.0, "beta_fast": 3e38, "beta_slow": 3e38}),
        serde_json::json!({"rope_type": "yarn", "original_max_position_embeddings": u64::MAX >> 1}),
        serde_json::json!({"rope_type": "default", "rope_theta": 1.0000000000000002}),
        serde_json::json!({"rope_type": "default", "rope_theta": 3e38}),
        serde_json::json!({"rope_type": "llama3", "factor": 1e38, "low_freq_factor": 1e-38,
            "high_freq_factor": 3e38, "original_max_position_embeddings": u64::MAX >> 1}),
        serde_json::json!({"rope_type": "llama3", "factor": 1.0, "low_freq_factor": 1.0,
            "high_freq_factor": 1.0000002, "original_max_position_embeddings": 1}),
    ] {
        let config = parse(&set("rope_scaling", scaling.clone())).expect("sound");
        let table = crate::rope_table(&config.rope, config.head_dim, config.max_positions);
        assert!(table.iter().all(|x| x.is_finite()), "{scaling}");
    }
}

#[test]
fn a_share_that_no_request_could_have_is_refused_at_load() {
    let parse = |text: &str| Config::parse("m", HUB, Some(text));
    assert_eq!(parse(r#"{"top_p": 0.5}"#).expect("sound").generation.top_p, Some(0.5));
    for text in [r#"{"top_p": 0}"#, r#"{"top_p": 1.5}"#] {
        let message = parse(text).expect_err(text).to_string();
        assert!(
            message.contains("`top_p`") && message.contains("above 0 and at most 1"),
            "{message}"
        );
    }
    for (text, field) in [
        (r#"{"min_p": 1.5}"#, "`min_p`"),
        (r#"{"min_p": -0.1}"#, "`min_p`"),
        (r#"{"repetition_penalty": 0}"#, "`repetition_penalty`"),
    ] {
        let message = parse(text).expect_err(text).to_string();
        assert!(message.contains(field), "{message}");
    }
}
