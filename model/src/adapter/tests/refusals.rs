//! Refusals that the golden set of bad adapters does not have, and files made of faults.

use super::handmade::{Tensors, config, pair, safetensors, tiny, values, write};
use super::*;

/// What the golden set of bad adapters does not have.
#[test]
fn further_refusals() {
    let q = pair("0.self_attn.q_proj", [2, 4], [6, 2]);
    let fused = pair("0.mlp.experts", [6, 5], [4, 6]);
    let head = vec![
        ("base_model.model.lm_head.lora_A.weight".to_owned(), [2, 4], values(8, 1)),
        ("base_model.model.lm_head.lora_B.weight".to_owned(), [9, 2], values(18, 1)),
    ];
    let renamed: Tensors = q
        .iter()
        .map(|(name, shape, v)| {
            let name = name.replace("model.layers", "model.language_model.layers");
            (name, *shape, v.clone())
        })
        .collect();
    let down = serde_json::json!(["mlp.experts.down_proj"]);
    let both = serde_json::json!(["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]);
    let by_expert = pair("0.mlp.experts.1.down_proj", [2, 5], [4, 2]);
    let cases = [
        (serde_json::json!({}), renamed, "2 of 2 tensors match no module", Category::UnknownTarget),
        (serde_json::json!({}), head, "an adapted head", Category::Unsupported),
        (
            serde_json::json!({"target_modules": ["v_proj"]}),
            q.clone(),
            "does not target",
            Category::UnknownTarget,
        ),
        (serde_json::json!({}), fused.clone(), "does not target", Category::UnknownTarget),
        (
            serde_json::json!({"target_parameters": both}),
            fused.clone(),
            "`base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight` is missing",
            Category::MissingTensor,
        ),
        (
            serde_json::json!({"target_parameters": down, "target_modules": ["down_proj"]}),
            [fused.clone(), by_expert].concat(),
            "twice",
            Category::UnknownTarget,
        ),
        (
            serde_json::json!({"init_lora_weights": "pissa"}),
            q.clone(),
            "changes the base weights",
            Category::Unsupported,
        ),
        (
            serde_json::json!({"trainable_token_indices": [1]}),
            q.clone(),
            "trained token embeddings",
            Category::Unsupported,
        ),
        (
            serde_json::json!({"layer_replication": [[0, 1]]}),
            q.clone(),
            "replicated layers",
            Category::Unsupported,
        ),
        (
            serde_json::json!({"alora_invocation_tokens": [1]}),
            q.clone(),
            "activated LoRA",
            Category::Unsupported,
        ),
        (serde_json::json!({"use_qalora": true}), q.clone(), "QALoRA", Category::Unsupported),
        (
            serde_json::json!({"rank_pattern": {"(": 2}}),
            q.clone(),
            "field `rank_pattern` is \"(\", expected a regular expression",
            Category::Config,
        ),
        (
            serde_json::json!({"target_modules": "(?!lm_head).*"}),
            q.clone(),
            "field `target_modules` is \"(?!lm_head).*\", expected a regular expression without look",
            Category::Config,
        ),
        (
            serde_json::json!({"target_modules": "q_proj)|(?:v_proj"}),
            q.clone(),
            "field `target_modules`",
            Category::Config,
        ),
        (
            // Megabytes when compiled; a few hundred of them took minutes.
            serde_json::json!({"rank_pattern": {r"\w{1000}": 2}}),
            q.clone(),
            "a small regular expression",
            Category::Config,
        ),
        (
            serde_json::json!({"rank_pattern": {"q_proj": 0}}),
            q.clone(),
            "rank_pattern.q_proj",
            Category::Config,
        ),
        (serde_json::json!({"lora_alpha": 1e300}), q.clone(), "lora_alpha", Category::Config),
    ];
    for (edit, tensors, message, category) in cases {
        let folder = write("bad", &config(edit), &safetensors(&tensors));
        let refused = AdapterFactors::open(&folder.0, &tiny(), &AdapterOptions::default())
            .expect_err(message);
        assert!(refused.to_string().contains(message), "{refused}");
        assert!(refused.reasons.iter().any(|r| r.reason.category() == category), "{refused:?}");
    }
}

/// Thousands of patterns took minutes to compile and match; thousands of names take no time.
#[test]
fn many_keys_are_names_or_refused() {
    let open = |key: &dyn Fn(usize) -> String| {
        let keys = (0..4096).map(|i| (key(i), 2.into()));
        let keys: serde_json::Map<String, serde_json::Value> = keys.collect();
        let text = config(serde_json::json!({"rank_pattern": keys}));
        let folder =
            write("keys", &text, &safetensors(&pair("0.self_attn.q_proj", [2, 4], [6, 2])));
        AdapterFactors::open(&folder.0, &tiny(), &AdapterOptions::default())
    };
    open(&|i| format!(r"layers\.{i}\.self_attn\.q_proj")).expect("names");
    let refused = open(&|i| format!(".*a.*{i}.*b")).expect_err("patterns").to_string();
    assert!(refused.contains("field `rank_pattern` is \".*a.*64.*b\", expected at most 64 keys"));
}

/// Whatever a file is made of, its refusal is a text that somebody can read.
#[test]
fn messages_stay_short_whatever_names_are() {
    let long = "x".repeat(1 << 20);
    let q = pair("0.self_attn.q_proj", [2, 4], [6, 2]);
    let named = vec![(long.clone(), [1, 1], vec![0.0])];
    let patterns = serde_json::json!({long.clone(): 0, "(".repeat(1 << 18): 1});
    for (edit, tensors) in [
        (serde_json::json!({}), named),
        (serde_json::json!({"target_parameters": [long.clone()]}), q.clone()),
        (serde_json::json!({"rank_pattern": patterns}), q.clone()),
        (serde_json::json!({"bias": long.clone(), "peft_type": long.clone()}), q),
    ] {
        let folder = write("long", &config(edit), &safetensors(&tensors));
        let refused = AdapterFactors::open(&folder.0, &tiny(), &AdapterOptions::default());
        let message = refused.expect_err("refused").to_string();
        assert!(message.len() < 4000, "{} bytes", message.len());
    }
}

/// Seeded truncations, bit flips and byte changes: an answer or a refusal, never a panic.
#[test]
fn broken_files_never_panic() {
    let tensors =
        [pair("0.self_attn.q_proj", [2, 4], [6, 2]), pair("1.mlp.experts", [6, 5], [4, 6])]
            .concat();
    let text = config(serde_json::json!({"target_parameters": ["mlp.experts.down_proj"]}));
    let weights = safetensors(&tensors);
    let config_bytes = text.to_string().into_bytes();
    let folder = write("broken", &text, &weights);
    let mut state = 20_261_130u64;
    let mut next = |n: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as usize) % n
    };
    let (mut loaded, mut refused) = (0, 0);
    for round in 0..600 {
        let (file, mut bytes) = match round % 3 {
            0 => ("adapter_config.json", config_bytes.clone()),
            _ => ("adapter_model.safetensors", weights.clone()),
        };
        match next(3) {
            0 => bytes.truncate(next(bytes.len())),
            1 => {
                let at = next(bytes.len());
                bytes[at] ^= 1 << next(8);
            }
            _ => {
                // The header is where a change can do most.
                let at = next(bytes.len().min(700));
                bytes[at] = next(256) as u8;
            }
        }
        std::fs::write(folder.0.join(file), &bytes).expect("written");
        match AdapterFactors::open(&folder.0, &tiny(), &AdapterOptions::default()) {
            Ok(_) => loaded += 1,
            Err(error) => {
                assert!(!error.reasons.is_empty());
                refused += 1;
            }
        }
        std::fs::write(folder.0.join("adapter_config.json"), &config_bytes).expect("written");
        std::fs::write(folder.0.join("adapter_model.safetensors"), &weights).expect("written");
    }
    assert!(loaded > 0 && refused > 200, "{loaded} loaded, {refused} refused");
}

/// A folder with a fault of each kind, each of which is told, one word for each in the message.
#[test]
fn all_reasons_are_told_not_the_first() {
    let mut tensors = [
        pair("0.self_attn.q_proj", [2, 4], [6, 2]),
        pair("0.self_attn.v_proj", [2, 4], [3, 2]),
        pair("1.self_attn.v_proj", [2, 4], [3, 2]),
        pair("0.self_attn.k_proj", [2, 4], [2, 2]),
        pair("0.mlp.experts.7.down_proj", [2, 5], [4, 2]),
        pair("9.self_attn.q_proj", [2, 4], [6, 2]),
        pair("1.self_attn.o_proj", [5, 6], [4, 5]),
        pair("1.mlp.experts", [7, 5], [4, 7]),
        pair("1.mlp.shared_expert.up_proj", [2, 4], [4, 2]),
    ]
    .concat();
    tensors[0].2[3] = f32::NAN;
    tensors.retain(|(name, _, _)| !name.ends_with("k_proj.lora_B.weight"));
    let text = config(serde_json::json!({
        "use_dora": true, "bias": "all", "lora_alpha": "many", "target_modules": "((",
        "target_parameters": ["experts.down_proj", "experts.w9"],
        "rank_pattern": {"[": 2, "o_proj": 0}
    }));
    let folder = write("faults", &text, &safetensors(&tensors));
    let refused =
        AdapterFactors::open(&folder.0, &tiny(), &AdapterOptions::default()).expect_err("faults");
    let message = refused.to_string();
    for told in [
        "DoRA",
        "trained biases",
        "`lora_alpha` is \"many\"",
        "`target_modules` is \"((\"",
        "`experts.w9`, which is no parameter",
        "`rank_pattern` is \"[\"",
        "`rank_pattern.o_proj` is 0",
        "holds NaN at element 3",
        "shape [3, 2], expected [2, rank] (and 1 more like it: `base_model.model.model.layers.1.",
        "k_proj.lora_A.weight` is there without",
        "is for layer 9, but the model has 2",
        "is for expert 7, but the model has 3",
        "has rank 5, expected 2",
        "a multiple of the 3 experts",
        "2 of 17 tensors match no module",
    ] {
        assert!(message.contains(told), "{told} is not in: {message}");
    }
}
