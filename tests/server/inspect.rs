//! `amphora inspect`: what folders hold, and all that speaks against them.

use std::path::{Path, PathBuf};

use amphora_tests::{golden, peft};
use serde_json::Value;

use crate::binary::{Ended, root, run};

/// The report of `inspect --json`, and whether the folder was accepted by the exit code.
fn inspect(args: &[&str]) -> (Value, bool) {
    let ended = run(&[&["inspect", "--json"], args].concat());
    let code = ended.status.code();
    assert!(matches!(code, Some(0 | 1)), "{ended:?}");
    let report: Value = serde_json::from_str(&ended.out).unwrap_or_else(|_| panic!("{ended:?}"));
    let accepted = code == Some(0);
    assert_eq!(accepted, report["verdict"] != "refused", "{report}");
    assert_eq!(accepted, report["reasons"].as_array().unwrap().is_empty(), "{report}");
    (report, accepted)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn reasons(report: &Value) -> String {
    let reasons = report["reasons"].as_array().unwrap();
    let messages = reasons.iter().map(|reason| reason["message"].as_str().unwrap());
    messages.collect::<Vec<_>>().join("\n")
}

fn model(name: &str) -> PathBuf {
    golden::folder().join("models").join(name)
}

/// A copy of a stored model that a test breaks, removed at the end.
pub struct Copy(pub PathBuf);

impl Copy {
    pub fn of(name: &str, label: &str) -> Self {
        let folder =
            std::env::temp_dir().join(format!("amphora-inspect-{label}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for entry in std::fs::read_dir(model(name)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
        }
        Copy(folder)
    }

    pub fn edit(&self, file: &str, edit: impl FnOnce(&mut Value)) {
        let path = self.0.join(file);
        let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        edit(&mut json);
        std::fs::write(path, json.to_string()).unwrap();
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        // A folder left behind in the temporary place harms nobody.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn every_model_that_loads_is_accepted_with_its_facts() {
    for name in golden::MODELS {
        let (report, accepted) = inspect(&[text(&model(name))]);
        assert!(accepted, "{report}");
        assert_eq!(report["kind"], "model");
        let config: Value =
            serde_json::from_slice(&std::fs::read(model(name).join("config.json")).unwrap())
                .unwrap();
        assert_eq!(report["config"]["architecture"], config["model_type"], "{name}");
        assert_eq!(report["config"]["layers"], config["num_hidden_layers"], "{name}");
        let weights = &report["memory"]["weights"];
        let (f32, bf16) = (weights["f32"].as_u64().unwrap(), weights["bf16"].as_u64().unwrap());
        let parameters = report["files"]["parameters"].as_u64().unwrap();
        assert!(f32 >= 4 * parameters && bf16 >= 2 * parameters && bf16 < f32, "{report}");
    }
    let sparse = inspect(&[text(&model("qwen3_moe_sparse"))]).0;
    assert_eq!(sparse["config"]["expert_layers"], 1);
    // 2 · 4 layers · 2 heads of 16 · 4 bytes.
    assert_eq!(sparse["memory"]["kv_per_1000_tokens"]["f32"], 1_024_000);
    assert_eq!(inspect(&[text(&model("qwen3"))]).0["files"]["shards"], 3);
}

#[test]
fn every_adapter_that_loads_is_accepted_by_its_model() {
    for name in golden::MODELS {
        for adapter in golden::adapters(name).unwrap() {
            let folder = golden::folder().join("adapters").join(name).join(&adapter);
            let (report, accepted) = inspect(&[text(&folder), "--model", text(&model(name))]);
            assert!(accepted, "{report}");
            assert_eq!(
                (&report["kind"], &report["verdict"]),
                (&"adapter".into(), &"accepted".into())
            );
            let applied = &report["applied"];
            assert!(!applied["modules"].as_array().unwrap().is_empty(), "{report}");
            let device = &applied["memory"]["device"];
            assert!(device["f32"].as_u64() > device["bf16"].as_u64(), "{report}");
        }
    }
    let alt = golden::folder().join("adapters/qwen3_moe/experts_fused_alt_r4");
    let report = inspect(&[text(&alt), "--model", text(&model("qwen3_moe"))]).0;
    let layout = report["applied"]["layout"].to_string();
    assert!(layout.contains("down_proj: swapped (lora_A over outputs), by the tensors' shapes"));
    assert!(
        layout.contains("gate_up_proj: swapped (lora_A over outputs), by the shapes of the layer")
    );
    // Without a model nothing is said of what only a model tells.
    let (report, accepted) = inspect(&[text(&alt)]);
    assert!(accepted && report["applied"].is_null());
    assert_eq!((&report["verdict"], &report["file"]["tensors"]), (&"open".into(), &36.into()));
}

/// What `serve` would say of an adapter that its arena does not hold.
#[test]
fn an_adapter_larger_than_the_adapter_memory_is_refused() {
    let adapter = golden::folder().join("adapters/qwen3_moe/experts_fused_alt_r4");
    let with = |memory: &str| {
        let model = model("qwen3_moe");
        let args = [text(&adapter), "--model", text(&model), "--max-lora-rank", "8"];
        inspect(&[&args[..], &["--adapter-memory", memory]].concat())
    };
    assert!(with("1MiB").1);
    for (memory, why) in [("16KiB", "arena pages are needed"), ("1KiB", "at least a page")] {
        let (report, accepted) = with(memory);
        assert!(!accepted && report["reasons"][0]["category"] == "memory", "{report}");
        let told = reasons(&report);
        assert!(told.contains("--adapter-memory") && told.contains(why), "{told}");
    }
}

#[test]
fn every_bad_adapter_is_refused_by_its_model_for_its_reason() {
    let folder = golden::folder().join("bad_adapters");
    let index: serde_json::Map<String, Value> =
        serde_json::from_slice(&std::fs::read(folder.join("index.json")).unwrap()).unwrap();
    for (name, entry) in &index {
        let base = model(entry["model"].as_str().unwrap());
        let (report, accepted) = inspect(&[text(&folder.join(name)), "--model", text(&base)]);
        assert!(!accepted, "{name}: {report}");
        let reasons = report["reasons"].as_array().unwrap();
        let named = reasons.iter().any(|reason| reason["category"] == entry["category"]);
        assert!(named, "{name}: {report}");
    }
}

/// A parameter that is square in every layer, written by a version that wrote both ways: the operator's
/// word settles it, in `serve` as here, and only there.
#[test]
fn the_operator_says_how_square_parameters_lie_where_nothing_else_does() {
    let copy = Copy::of("gpt_oss_mxfp4", "square");
    for file in ["config.json", "model.safetensors"] {
        std::fs::remove_file(copy.0.join(file)).unwrap();
    }
    let config = |version: &str| {
        let text = serde_json::json!({
            "peft_type": "LORA", "r": 4, "lora_alpha": 8, "peft_version": version,
            "target_modules": [], "target_parameters": ["mlp.experts.down_proj"],
        });
        std::fs::write(copy.0.join("adapter_config.json"), text.to_string()).unwrap();
    };
    let tensor = |half: &str, shape: [usize; 2]| {
        let name = format!("base_model.model.model.layers.0.mlp.experts.lora_{half}.weight");
        (name, (shape.to_vec(), vec![0.5; shape[0] * shape[1]]))
    };
    let tensors = [tensor("A", [32, 64]), tensor("B", [64, 32])];
    std::fs::write(copy.0.join("adapter_model.safetensors"), peft::write(&tensors.into())).unwrap();

    let base = model("gpt_oss_mxfp4");
    let args = [text(&copy.0), "--model", text(&base)];
    config("0.19.0");
    let (report, accepted) = inspect(&args);
    assert!(!accepted && reasons(&report).contains("--adapter-orientation"), "{report}");
    let adapter = format!("a={}", text(&copy.0));
    let serve = ["serve", "--port", "0", "--model", text(&base), "--adapter", &adapter];
    run(&serve).assert_refused(&["--adapter-orientation natural"]);
    for way in ["natural", "swapped"] {
        let (report, accepted) = inspect(&[&args[..], &["--adapter-orientation", way]].concat());
        let layout = report["applied"]["layout"].to_string();
        assert!(accepted && layout.contains(&format!("down_proj: {way}")), "{report}");
        assert!(layout.contains("by the operator's word"), "{report}");
    }
    config("0.21.2");
    let (report, accepted) = inspect(&[&args[..], &["--adapter-orientation", "swapped"]].concat());
    let layout = report["applied"]["layout"].to_string();
    assert!(
        accepted && layout.contains("down_proj: natural (lora_A over inputs), by peft_version")
    );
}

#[test]
fn all_faults_of_a_model_are_told() {
    let copy = Copy::of("qwen3_moe", "faults");
    copy.edit("config.json", |config| {
        config["hidden_act"] = "gelu".into();
        config["num_experts_per_tok"] = 9.into();
    });
    copy.edit("generation_config.json", |config| config["top_p"] = 2.into());
    let (report, accepted) = inspect(&[text(&copy.0)]);
    let told = reasons(&report);
    assert!(!accepted);
    for part in ["`hidden_act` is \"gelu\"", "`num_experts_per_tok` is 9", "`top_p` is 2"] {
        assert!(told.contains(part), "{told}");
    }

    let copy = Copy::of("qwen3_moe", "tensors");
    let path = copy.0.join("model.safetensors");
    let mut tensors = peft::read(&path).unwrap();
    tensors.remove("model.norm.weight");
    tensors.remove("lm_head.weight");
    tensors.insert("model.layers.0.mlp.extra.weight".to_owned(), (vec![1], vec![0.0]));
    for layer in 0..3 {
        let name = format!("model.layers.{layer}.self_attn.q_norm.weight");
        tensors.insert(name, (vec![3], vec![0.0; 3]));
    }
    std::fs::write(path, peft::write(&tensors)).unwrap();
    let told = reasons(&inspect(&[text(&copy.0)]).0);
    for part in
        ["`model.norm.weight` is missing", "`lm_head.weight` is missing", "mlp.extra.weight"]
    {
        assert!(told.contains(part), "{told}");
    }
    assert_eq!(told.matches("q_norm.weight` has shape [3], expected [16]").count(), 3, "{told}");
}

#[test]
fn broken_files_of_a_model_are_refused_in_words() {
    for (label, file, bytes, words) in [
        ("empty", "model.safetensors", &b""[..], "0 bytes"),
        ("noise", "model.safetensors", &[0xff; 64], "expected at most 100 MB"),
        ("json", "config.json", b"{\"model_type\": ", "not a JSON object"),
        ("utf8", "config.json", &[0xff, 0xfe], "not UTF-8"),
        ("tokenizer", "tokenizer.json", b"{}", "tokenizer.json"),
    ] {
        let copy = Copy::of("llama", label);
        std::fs::write(copy.0.join(file), bytes).unwrap();
        let (report, accepted) = inspect(&[text(&copy.0)]);
        assert!(!accepted && reasons(&report).contains(words), "{label}: {report}");
    }
    let copy = Copy::of("llama", "short");
    let path = copy.0.join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    for length in [8, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        let (report, accepted) = inspect(&[text(&copy.0)]);
        assert!(!accepted && reasons(&report).contains("cut short"), "{length}: {report}");
    }
    let copy = Copy::of("qwen3", "shard");
    std::fs::remove_file(copy.0.join("model-00002-of-00003.safetensors")).unwrap();
    let told = reasons(&inspect(&[text(&copy.0)]).0);
    assert!(told.contains("model-00002-of-00003.safetensors"), "{told}");
    let copy = Copy::of("llama", "family");
    copy.edit("config.json", |config| config["model_type"] = "deepseek_v3".into());
    let told = reasons(&inspect(&[text(&copy.0)]).0);
    assert!(told.contains("deepseek_v3"), "{told}");
}

#[test]
fn people_read_lines_that_no_file_can_disturb() {
    let say = |args: &[&str]| -> Ended { run(&[&["inspect"], args].concat()) };
    let folder = golden::folder().join("adapters/qwen3_moe/per_expert_r4");
    let said = say(&[text(&folder), "--model", text(&model("qwen3_moe"))]);
    assert!(said.status.success(), "{said:?}");
    for part in ["accepted by", "layout     experts one by one", "rank 4, stored at 8, scale 1.5"] {
        assert!(said.out.contains(part), "{}", said.out);
    }
    // A tensor's name with what would move a terminal's cursor.
    let copy = Copy::of("qwen3_moe", "names");
    std::fs::remove_file(copy.0.join("config.json")).unwrap();
    std::fs::remove_file(copy.0.join("model.safetensors")).unwrap();
    std::fs::copy(folder.join("adapter_config.json"), copy.0.join("adapter_config.json")).unwrap();
    let tensors = [("evil\u{1b}[2J\nname".to_owned(), (vec![1], vec![0.0]))];
    let file = copy.0.join("adapter_model.safetensors");
    std::fs::write(file, peft::write(&tensors.into())).unwrap();
    let said = say(&[text(&copy.0)]);
    assert_eq!(said.status.code(), Some(1));
    assert!(said.out.contains("refused by every model"), "{}", said.out);
    assert!(said.out.contains("evil\\u{1b}[2J\\nname"), "{}", said.out);
    assert!(!said.out.contains('\u{1b}'));
}

#[test]
fn what_is_no_such_folder_is_refused_in_one_line() {
    let say = |args: &[&str]| -> Ended { run(&[&["inspect"], args].concat()) };
    say(&["no/such/folder"]).assert_refused(&["no/such/folder"]);
    say(&[text(&root().join("docs"))]).assert_refused(&["neither", "config.json"]);
    let adapter = golden::folder().join("adapters/llama/attn_r8");
    say(&[text(&adapter), "--model", "no/such"]).assert_refused(&["--model no/such", "not found"]);
    say(&[text(&adapter), "--backend", "tpu"]).assert_refused(&["tpu"]);
}

/// The largest configurations that are read at all, beside files of a small model: refused for their tensors
/// before anything of their size is made.
#[test]
fn sizes_beyond_all_memory_are_refused() {
    let most = |json: &mut Value, fields: &[(&str, usize)]| {
        for &(field, size) in fields {
            json[field] = size.into();
        }
        json.as_object_mut().unwrap().shift_remove("layer_types");
    };
    let wide = [
        ("num_hidden_layers", 1 << 14),
        ("hidden_size", 1 << 20),
        ("intermediate_size", 1 << 20),
        ("num_attention_heads", 1 << 14),
        ("num_key_value_heads", 1 << 14),
        ("head_dim", 1 << 14),
        ("vocab_size", 1 << 24),
        ("max_position_embeddings", 1 << 24),
    ];
    let experts = [("num_local_experts", 1 << 14), ("num_hidden_layers", 16)];
    for (name, fields) in [
        ("llama", &wide[..]),
        ("gpt_oss", &wide[..]),
        ("gpt_oss", &[&wide[1..], &experts].concat()),
    ] {
        let copy = Copy::of(name, "huge");
        copy.edit("config.json", |json| most(json, fields));
        let (report, accepted) = inspect(&[text(&copy.0)]);
        assert!(!accepted && reasons(&report).contains("has shape"), "{report}");
    }
}
