//! The stored adapters, good and bad, and small ones made here.

use std::path::{Path, PathBuf};

use super::*;
use crate::config::{Architecture, Config, MlpKind};
use crate::tests::MODELS;

mod handmade;
mod refusals;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn golden() -> PathBuf {
    root().join("tests/golden")
}

fn base_of(model: &Path) -> AdapterBase {
    let text = std::fs::read_to_string(model.join("config.json")).expect("a stored model");
    let config = Config::parse("model", &text, None).expect("sound");
    AdapterBase::from(&config)
}

fn folders(of: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(of)
        .expect("stored adapters")
        .map(|entry| entry.expect("readable").path())
        .filter(|path| path.is_dir())
        .collect();
    found.sort();
    found
}

fn open(folder: &Path, base: &AdapterBase) -> Result<AdapterFactors, AdapterRefused> {
    AdapterFactors::open(folder, base, &AdapterOptions::default())
}

#[test]
fn every_golden_adapter_loads() {
    let mut count = 0;
    for model in MODELS {
        let base = base_of(&golden().join("models").join(model));
        for folder in folders(&golden().join("adapters").join(model)) {
            let factors = open(&folder, &base).expect("a good adapter");
            assert!(factors.notes.is_empty(), "{}: {:?}", folder.display(), factors.notes);
            for module in &factors.modules {
                let (inputs, outputs) = base.dims(module.layer, module.target).expect("there");
                let a = factors.a(module);
                assert_eq!((a.rows, a.cols), (module.rank, inputs));
                assert_eq!((module.b.rows, module.b.cols), (outputs, module.rank));
                assert_eq!(a.data.len(), a.rows * a.cols);
                assert_eq!(module.b.data.len(), module.b.rows * module.b.cols);
            }
            count += 1;
        }
    }
    assert_eq!(count, 29);
}

#[test]
fn golden_ranks_and_scales_are_as_written() {
    let base = base_of(&golden().join("models/gpt_oss"));
    let factors =
        open(&golden().join("adapters/gpt_oss/r20_rslora_pattern"), &base).expect("a good adapter");
    let of = |layer, target| {
        let module = factors
            .modules
            .iter()
            .find(|m| (m.layer, m.target) == (layer, target))
            .expect("adapted");
        (module.rank, module.scale)
    };
    let rs = |alpha: f64, rank: f64| (alpha / rank.sqrt()) as f32;
    assert_eq!(of(0, Target::Q), (20, rs(24.0, 20.0)));
    assert_eq!(of(1, Target::Q), (12, rs(7.0, 12.0)));
    assert_eq!(of(0, Target::O), (5, rs(11.0, 5.0)));
    assert_eq!(of(2, Target::O), (5, rs(24.0, 5.0)));
    assert_eq!(of(1, Target::Down), (5, rs(24.0, 5.0)));
    assert!(!factors.modules.iter().any(|m| m.target == Target::Gate));
    let bf16 = open(&golden().join("adapters/gpt_oss/gate_up_only_r5_bf16"), &base)
        .expect("a good adapter");
    assert_eq!((bf16.dtype, bf16.max_rank()), (DType::BF16, 5));
}

/// The other orientation in the file gives the same kind of factors, told by the shapes.
#[test]
fn every_demo_adapter_loads() {
    let demo = root().join("assets/demo-model");
    let base = base_of(&demo);
    let mut square = 0;
    for folder in folders(&demo.join("adapters")) {
        let factors = open(&folder, &base).expect("a good adapter");
        square += usize::from(!factors.notes.is_empty());
        assert_eq!(factors.dtype, DType::BF16);
        let stored: usize = {
            let shrinks: usize = factors.shrinks.iter().map(|a| a.data.len()).sum();
            let expands: usize = factors.modules.iter().map(|m| m.b.data.len()).sum();
            2 * (shrinks + expands)
        };
        assert!(stored <= factors.file_bytes, "each number of the file is kept once");
    }
    assert_eq!(square, 2, "json and sql adapt the square down_proj alone");
}

fn category(name: &str) -> Category {
    match name {
        "config" => Category::Config,
        "corrupt_file" => Category::CorruptFile,
        "dtype" => Category::DType,
        "missing_file" => Category::MissingFile,
        "missing_tensor" => Category::MissingTensor,
        "non_finite" => Category::NonFinite,
        "rank_limit" => Category::RankLimit,
        "shape" => Category::Shape,
        "unknown_target" => Category::UnknownTarget,
        "unsupported" => Category::Unsupported,
        other => panic!("{other}"),
    }
}

/// Each is refused by the model it was made for, for the reason that the index names and with a message
/// of its own.
#[test]
fn every_bad_adapter_is_refused_for_its_reason() {
    let text =
        std::fs::read_to_string(golden().join("bad_adapters/index.json")).expect("the index");
    let index: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(&text).expect("JSON");
    assert_eq!(index.len(), 37);
    let mut messages = std::collections::BTreeSet::new();
    for (name, entry) in &index {
        let folder = golden().join("bad_adapters").join(name);
        let model = entry["model"].as_str().expect("a model");
        let refused =
            open(&folder, &base_of(&golden().join("models").join(model))).expect_err(name);
        let expected = category(entry["category"].as_str().expect("a category"));
        let categories: Vec<Category> =
            refused.reasons.iter().map(|r| r.reason.category()).collect();
        assert!(categories.contains(&expected), "{name}: {refused}");
        // Some have more than one fault: the tensors of a bias, and the field that asks for it.
        if !matches!(name.as_str(), "bias_all" | "other_base_model" | "one_dimensional") {
            assert!(categories.iter().all(|c| *c == expected), "{name}: {refused}");
        }
        let message = refused.to_string();
        assert!(!message.contains('\n'), "{message}");
        let words = message.replace(&folder.display().to_string(), "");
        println!("{name}: {words}");
        assert!(messages.insert(words), "{name} has the message of another");
    }
}

/// What is wrong with an adapter alone is found without a base; what is wrong with it for a base is not.
#[test]
fn a_survey_needs_no_base() {
    let options = AdapterOptions::default();
    for model in MODELS {
        for folder in folders(&golden().join("adapters").join(model)) {
            let (survey, refused) = survey(&Source::Folder(folder.clone()), &options);
            assert!(refused.is_none(), "{}: {refused:?}", folder.display());
            let pairs: usize = survey.modules.values().map(|m| m.pairs).sum();
            assert_eq!((2 * pairs, survey.dtypes.len()), (survey.tensors, 1));
        }
    }
    let for_a_base_alone = [
        "expert_out_of_range",
        "fused_bad_parameter",
        "fused_wrong_out",
        "layer_out_of_range",
        "other_base_model",
        "rank_mismatch_config",
        "rank_over_limit",
        "unknown_module",
        "wrong_in_dim",
        "wrong_out_dim",
    ];
    for folder in folders(&golden().join("bad_adapters")) {
        let name = folder.file_name().expect("a name").to_string_lossy().into_owned();
        let (_, refused) = survey(&Source::Folder(folder), &options);
        assert_eq!(refused.is_none(), for_a_base_alone.contains(&&*name), "{name}: {refused:?}");
    }
    let experts = golden().join("adapters/qwen3_moe/per_expert_r4");
    let (survey, _) = survey(&Source::Folder(experts), &options);
    let gate = &survey.modules["mlp.experts.*.gate_proj"];
    assert_eq!((gate.pairs, gate.layers), (24, 3));
    assert_eq!(gate.a.iter().next(), Some(&vec![4, 48]));
}
