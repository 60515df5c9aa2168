//! Configurations of the families beside gpt_oss, from the stored models' own files.

use super::*;

type Object = Map<String, Value>;

fn stored(model: &str) -> Object {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = root.join("../tests/golden/models").join(model).join("config.json");
    let text = std::fs::read_to_string(path).expect("a stored model");
    serde_json::from_str(&text).expect("an object")
}

fn with(model: &str, edit: impl FnOnce(&mut Object)) -> std::result::Result<Config, ConfigError> {
    let mut object = stored(model);
    edit(&mut object);
    parse(&Value::Object(object).to_string())
}

fn sound(model: &str) -> Config {
    with(model, |_| ()).expect("a stored model is sound")
}

/// As transformers 5 saves the same model.
fn restyle(object: &mut Object) {
    let theta = object.remove("rope_theta").expect("there");
    let mut rope = match object.remove("rope_scaling") {
        Some(Value::Object(scaling)) => scaling,
        _ => serde_json::Map::from_iter([("rope_type".to_owned(), "default".into())]),
    };
    rope.insert("rope_theta".to_owned(), theta);
    object.insert("rope_parameters".to_owned(), rope.into());
    for (old, new) in [("torch_dtype", "dtype"), ("num_experts", "num_local_experts")] {
        if let Some(value) = object.remove(old) {
            object.insert(new.to_owned(), value);
        }
    }
}

#[test]
fn both_styles_of_each_family_give_the_same_config() {
    for model in ["qwen3_moe", "qwen3_moe_sparse", "mixtral", "llama", "qwen3"] {
        assert_eq!(with(model, restyle).expect(model), sound(model));
    }
}

#[test]
fn stored_models_are_what_their_files_say() {
    let qwen = sound("qwen3_moe");
    assert_eq!(qwen.mlps, [MlpKind::Experts; 3]);
    assert_eq!((qwen.experts, qwen.top_k, qwen.intermediate), (8, 2, 24));
    assert_eq!((qwen.head_dim, qwen.hidden / qwen.heads, qwen.dense_intermediate), (16, 8, 0));
    assert!(qwen.renorm_top_k && !qwen.tied_embeddings && !qwen.attention_bias);
    assert_eq!(qwen.activation, Activation::Swiglu);
    assert_eq!(qwen.rope, RopeConfig { theta: 1e6, scaling: RopeScaling::None });

    let sparse = sound("qwen3_moe_sparse");
    let [dense, experts] = [MlpKind::Dense, MlpKind::Experts];
    assert_eq!(sparse.mlps, [dense, dense, dense, experts]);
    assert_eq!((sparse.top_k, sparse.intermediate, sparse.dense_intermediate), (3, 24, 64));
    assert!(!sparse.renorm_top_k && sparse.tied_embeddings);

    let mixtral = sound("mixtral");
    assert_eq!((mixtral.experts, mixtral.intermediate, mixtral.head_dim), (6, 48, 16));

    let llama = sound("llama");
    assert_eq!((llama.experts, llama.top_k, llama.dense_intermediate), (0, 0, 96));
    assert_eq!(llama.eos, [1, 4]);
    let scaling = Llama3Scaling {
        factor: 8.0,
        original_positions: 64,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
    };
    let scaling = RopeScaling::Llama3(scaling);
    assert_eq!(llama.rope, RopeConfig { theta: 500_000.0, scaling });

    let qwen3 = sound("qwen3");
    assert_eq!((qwen3.vocab, qwen3.kv_heads, qwen3.dense_intermediate), (416, 1, 80));
}

#[test]
fn windows_are_those_of_the_family() {
    let windows = |model: &str, fields: &[(&str, Value)]| {
        let set = |object: &mut Object| {
            object.extend(fields.iter().map(|(field, value)| ((*field).to_owned(), value.clone())));
        };
        with(model, set).expect("sound").windows
    };
    let sliding = [("sliding_window", 8.into()), ("use_sliding_window", true.into())];
    assert_eq!(windows("qwen3_moe", &sliding), [Some(8); 3]);
    assert_eq!(windows("qwen3_moe", &sliding[..1]), [None; 3]);
    assert_eq!(windows("mixtral", &sliding[..1]), [Some(8); 2]);
    assert_eq!(windows("llama", &sliding), [None; 3]);
    let late = [&sliding[..], &[("max_window_layers", 2.into())]].concat();
    assert_eq!(windows("qwen3", &late), [None, None, Some(8)]);
    let types = serde_json::json!(["sliding_attention", "full_attention", "full_attention"]);
    let listed = [&late[..], &[("layer_types", types)]].concat();
    assert_eq!(windows("qwen3", &listed), [Some(8), None, None]);
}

#[test]
fn absent_fields_of_each_family_take_the_defaults_of_transformers() {
    let without = |model: &str, fields: &[&str]| {
        with(model, |object| fields.iter().for_each(|field| drop(object.remove(*field))))
            .expect("sound")
    };
    let sparse = without(
        "qwen3_moe_sparse",
        &["decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "rms_norm_eps", "rope_theta"],
    );
    assert_eq!(sparse.mlps, [MlpKind::Experts; 4]);
    assert_eq!((sparse.rms_eps, sparse.rope.theta, sparse.renorm_top_k), (1e-6, 1e4, false));
    let mixtral = without("mixtral", &["rms_norm_eps", "rope_theta", "max_position_embeddings"]);
    assert_eq!((mixtral.rms_eps, mixtral.rope.theta), (1e-5, 1e6));
    assert_eq!(mixtral.max_positions, 131_072);
    let llama = without("llama", &["head_dim", "tie_word_embeddings", "rope_theta"]);
    assert_eq!((llama.head_dim, llama.tied_embeddings, llama.rope.theta), (16, false, 1e4));
    assert_eq!(without("llama", &["num_key_value_heads"]).kv_heads, 4);
    assert_eq!(without("qwen3", &["head_dim"]).head_dim, 128);
}

#[test]
fn refusals_of_each_family_name_the_field() {
    let cases = [
        ("qwen3_moe", "decoder_sparse_step", 0.into(), "is 0, expected a whole number in 1..="),
        ("qwen3_moe", "mlp_only_layers", 1.into(), "is 1, expected a list of layers"),
        (
            "qwen3_moe",
            "mlp_only_layers",
            serde_json::json!([-1]),
            "is -1, expected whole numbers, each a layer",
        ),
        ("qwen3_moe", "num_local_experts", 4.into(), "`num_experts` is 8, expected num_local_exp"),
        ("qwen3_moe", "moe_intermediate_size", Value::Null, "`moe_intermediate_size` is missing"),
        ("qwen3_moe_sparse", "intermediate_size", Value::Null, "`intermediate_size` is missing"),
        ("qwen3_moe", "norm_topk_prob", 1.into(), "`norm_topk_prob` is 1, expected true or false"),
        ("mixtral", "num_local_experts", Value::Null, "`num_local_experts` is missing"),
        ("mixtral", "num_experts_per_tok", 7.into(), "is 7, expected a whole number in 1..=6"),
        ("mixtral", "hidden_size", 66.into(), "`head_dim` is missing, expected a whole number"),
        (
            "qwen3_moe",
            "quantization_config",
            serde_json::json!({"quant_method": "fp8"}),
            "`quantization_config.quant_method` is \"fp8\", expected no quantization_config, as \
             qwen3_moe is read in floating point",
        ),
        (
            "mixtral",
            "quantization_config",
            serde_json::json!({"quant_method": "mxfp4"}),
            "`quantization_config.quant_method` is \"mxfp4\", expected no quantization_config",
        ),
        ("llama", "hidden_act", "gelu".into(), "`hidden_act` is \"gelu\", expected silu"),
        (
            "llama",
            "rope_scaling",
            serde_json::json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}),
            "`rope_scaling.original_max_position_embeddings` is missing",
        ),
        (
            "llama",
            "rope_scaling",
            serde_json::json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
            "`rope_scaling.high_freq_factor` is 4.0, expected more than low_freq_factor (4)",
        ),
    ];
    for (model, field, value, expected) in cases {
        let refused = with(model, |object| drop(object.insert(field.to_owned(), value)));
        let message = refused.expect_err(expected).to_string();
        assert!(message.contains(expected), "{message}\n  should contain: {expected}");
    }
}
