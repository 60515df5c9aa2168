//! Adapters that other servers got wrong, and those that must be refused: on real engines, against what
//! PEFT gives, or against the model with the adapter merged into its weights.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use amphora_backend_cpu::Cpu;
use amphora_engine::{AdapterConfig, EngineConfig, KvSize, Shutdown, Started};
use amphora_hal::{DType, Device, DeviceConfig};
use amphora_model::ModelFiles;
use amphora_model::source::Source;
use amphora_tests::golden::{self, F32_TOLERANCE, PROMPTS, Run, worst};
use amphora_tests::peft::{self, Adapter};
use amphora_tests::promises::random_asks;
use amphora_tests::rng::Rng;
use amphora_tests::serving::{self, Answer, Ask};

/// Tokens of an answer.
const GREEDY: usize = 12;

fn model_folder(model: &str) -> PathBuf {
    golden::folder().join("models").join(model)
}

fn started(source: Source, max_rank: usize) -> Started {
    let settings = EngineConfig {
        max_seqs: 64,
        kv: KvSize::Bytes(32 << 20),
        prompt_logit_rows: 128,
        adapters: Some(AdapterConfig {
            arena_bytes: 32 << 20,
            max_rank,
            ..AdapterConfig::default()
        }),
        ..EngineConfig::default()
    };
    let files = ModelFiles::from_source(source).unwrap();
    let device = Cpu::open(&DeviceConfig::default()).unwrap();
    serving::start_files(device, &files, DType::F32, &settings).unwrap()
}

fn stop(started: Started) {
    started.handle.shutdown(Shutdown::Drain);
    started.thread.join().unwrap();
}

/// Every stored prompt of `model`, through `adapter`.
fn asks(model: &str, adapter: Option<&str>) -> Vec<Ask> {
    let base = Run::read(model, None).unwrap();
    let prompts = PROMPTS.map(|name| base.prompt(name).unwrap().tokens);
    let ask =
        |tokens: &Vec<u32>| Ask { prompt_logits: true, ..Ask::greedy(tokens, adapter, GREEDY) };
    prompts.iter().map(ask).collect()
}

/// The largest difference between logits, and whether the same tokens were chosen.
fn distance(got: &[Answer], want: &[Answer]) -> (f32, bool) {
    let off = got.iter().zip(want).map(|(g, w)| worst(&g.prompt_logits, &w.prompt_logits).0);
    (off.fold(0.0, f32::max), got.iter().zip(want).all(|(g, w)| g.ids == w.ids))
}

fn assert_equal(what: &str, got: &[Answer], want: &[Answer]) {
    let (off, same) = distance(got, want);
    assert!(off <= F32_TOLERANCE, "{what}: a logit is off by {off}");
    assert!(same, "{what}: another token was chosen");
}

/// What the model with `adapter` merged into it answers.
fn merged(model: &str, adapter: &Adapter) -> Vec<Answer> {
    let engine = started(adapter.merged_into(&model_folder(model)).unwrap(), 8);
    let answers = serving::ask_all(&engine, &asks(model, None)).unwrap();
    stop(engine);
    answers
}

/// Fused experts: A of expert e is its rows e·r.., and B of expert e every E-th column from e on. With
/// the columns of B the other way round, the answer is another one, so equality means something.
#[test]
fn c01_fused_experts_take_their_own_columns_of_b() {
    let (model, name, rank, experts) = ("gpt_oss", "experts_fused_r4", 4, 8);
    let folder = golden::folder().join("adapters").join(model).join(name);
    let mut swapped = peft::read(&folder.join("adapter_model.safetensors")).unwrap();
    for (name, (shape, values)) in &mut swapped {
        if name.contains("experts") && name.ends_with("lora_B.weight") {
            assert_eq!(shape[1], rank * experts);
            for row in values.chunks_mut(rank * experts) {
                let stored = row.to_vec();
                for (i, value) in row.iter_mut().enumerate() {
                    let (expert, j) = (i / rank, i % rank);
                    *value = stored[j * experts + expert];
                }
            }
        }
    }
    let config = std::fs::read(folder.join("adapter_config.json")).unwrap();
    let files = [
        ("adapter_config.json".to_owned(), config.into()),
        ("adapter_model.safetensors".to_owned(), peft::write(&swapped).into()),
    ];
    let swapped = Source::Memory { name: "swapped".to_owned(), files: files.into() };

    let engine = started(Source::Folder(model_folder(model)), 8);
    engine.handle.load_adapter("stored", &Source::Folder(folder)).unwrap();
    engine.handle.load_adapter("swapped", &swapped).unwrap();
    let run = Run::read(model, Some(name)).unwrap();
    let stored = serving::ask_all(&engine, &asks(model, Some("stored"))).unwrap();
    let other = serving::ask_all(&engine, &asks(model, Some("swapped"))).unwrap();
    stop(engine);
    for (i, name) in PROMPTS.iter().enumerate() {
        let want = run.prompt(name).unwrap();
        let off = |answer: &Answer| {
            worst(&answer.prompt_logits[want.logits_start * want.vocab..], &want.logits).0
        };
        assert!(off(&stored[i]) <= F32_TOLERANCE, "{name}: off by {}", off(&stored[i]));
        assert_eq!(stored[i].ids, want.greedy_ids[..GREEDY], "{name}");
        assert!(off(&other[i]) > 10.0 * F32_TOLERANCE, "{name}: swapped axes change nothing");
    }
}

/// One side of the experts alone, and of some experts alone, acts, and the other side adds nothing.
#[test]
fn c05_one_sided_adapters_of_some_experts_act() {
    let model = "qwen3_moe";
    let weights = peft::read(&model_folder(model).join("model.safetensors")).unwrap();
    let engine = started(Source::Folder(model_folder(model)), 8);
    let base = serving::ask_all(&engine, &asks(model, None)).unwrap();
    for sides in [&["down_proj"][..], &["gate_proj"], &["up_proj"], &["gate_proj", "up_proj"]] {
        let modules: Vec<String> = (0..3)
            .flat_map(|layer| [1, 5].map(|expert| (layer, expert)))
            .flat_map(|(layer, expert)| {
                let path = format!("model.layers.{layer}.mlp.experts.{expert}");
                sides.iter().map(move |side| format!("{path}.{side}"))
            })
            .collect();
        let adapter = Adapter::random(&weights, &modules, 4, 5).unwrap();
        engine.handle.load_adapter("one", &adapter.source("one")).unwrap();
        let got = serving::ask_all(&engine, &asks(model, Some("one"))).unwrap();
        assert_equal(&format!("{sides:?}"), &got, &merged(model, &adapter));
        let (off, _) = distance(&got, &base);
        assert!(off > 10.0 * F32_TOLERANCE, "{sides:?}: the adapter changes nothing");
    }
    stop(engine);
}

/// Ranks below the limit, in classes that pad them or not, on attention and experts, alone and in one
/// batch: each is its own merged model.
#[test]
fn c06_ranks_below_the_limit_are_exact_alone_and_mixed() {
    let model = "qwen3_moe";
    let weights = peft::read(&model_folder(model).join("model.safetensors")).unwrap();
    let modules: Vec<String> = weights
        .keys()
        .filter_map(|name| name.strip_suffix(".weight"))
        .filter(|path| path.ends_with("_proj"))
        .map(str::to_owned)
        .collect();
    assert_eq!(modules.len(), 3 * (4 + 3 * 8));
    let engine = started(Source::Folder(model_folder(model)), 32);
    let (mut mixed, mut alone, mut wants) = (Vec::new(), Vec::new(), Vec::new());
    for rank in [1, 3, 8, 32] {
        let name = format!("r{rank}");
        let adapter = Adapter::random(&weights, &modules, rank, rank as u64).unwrap();
        engine.handle.load_adapter(&name, &adapter.source(&name)).unwrap();
        let asks = asks(model, Some(&name));
        alone.extend(serving::ask_all(&engine, &asks).unwrap());
        wants.extend(merged(model, &adapter));
        mixed.extend(asks);
    }
    assert_equal("alone", &alone, &wants);
    assert_equal("mixed", &serving::ask_all(&engine, &mixed).unwrap(), &wants);
    stop(engine);
}

/// C03 in the library: names of no module of the model are refused with their number and examples, and
/// nothing is known of the adapter afterwards.
#[test]
fn c03_names_that_match_nothing_are_refused_with_count_and_examples() {
    let engine = started(Source::Folder(model_folder("qwen3_moe")), 8);
    let folder = golden::folder().join("adapters/qwen3_moe/attn_r8");
    engine.handle.load_adapter("good", &Source::Folder(folder.clone())).unwrap();
    let good = serving::ask_all(&engine, &asks("qwen3_moe", Some("good"))).unwrap();
    let tensors = peft::read(&folder.join("adapter_model.safetensors")).unwrap();
    let renamed = tensors.into_iter().map(|(name, tensor)| {
        (name.replace("model.layers", "model.language_model.layers"), tensor)
    });
    let adapter = Adapter { rank: 8, alpha: 16.0, tensors: renamed.collect() };
    let error = engine.handle.load_adapter("bad", &adapter.source("bad")).unwrap_err().to_string();
    for told in ["24 of 24 tensors match no module", "model.language_model.layers.0.self_attn"] {
        assert!(error.contains(told), "{error}");
    }
    engine.handle.settle();
    assert!(!engine.handle.has_adapter("bad"));
    assert_eq!(engine.handle.adapters().len(), 1);
    let again = serving::ask_all(&engine, &asks("qwen3_moe", Some("good"))).unwrap();
    for (a, b) in good.iter().zip(&again) {
        assert_eq!(a.bits(), b.bits());
    }
    stop(engine);
}

/// Bad adapters that are refused for `model`: those made for it, and for gpt_oss the same faults as
/// others have on qwen3_moe.
fn bad_adapters(model: &str) -> Vec<PathBuf> {
    let folder = golden::folder().join("bad_adapters");
    let text = std::fs::read_to_string(folder.join("index.json")).unwrap();
    let index: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text).unwrap();
    assert_eq!(index.len(), 37);
    let made_for = index.iter().filter(|(_, entry)| entry["model"] == model);
    let mut bad: Vec<PathBuf> = made_for.map(|(name, _)| folder.join(name)).collect();
    if model == "gpt_oss" {
        let entries = std::fs::read_dir(golden::folder().join("bad_adapters_gpt_oss")).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        bad.extend(paths.filter(|path| path.is_dir()));
    }
    bad
}

/// A refused adapter disturbs nobody: running requests end as they would, the list is unchanged.
#[test]
fn refused_adapters_leave_running_requests_alone() {
    for (model, count) in [("gpt_oss", 37), ("qwen3_moe", 29)] {
        let bad = bad_adapters(model);
        assert_eq!(bad.len(), count, "{model}");
        let engine = started(Source::Folder(model_folder(model)), 256);
        let names = golden::adapters(model).unwrap();
        let folder = golden::folder().join("adapters").join(model);
        serving::load_adapters(&engine, &folder, &names).unwrap();
        let asks = random_asks(&mut Rng::new(21, "adapters"), &names, 14);
        let calm = serving::ask_all(&engine, &asks).unwrap();
        let handle = engine.handle.clone();
        let loader = std::thread::spawn(move || {
            for folder in &bad {
                let loaded = handle.load_adapter("bad", &Source::Folder(folder.clone()));
                assert!(loaded.is_err(), "{} was accepted", folder.display());
            }
        });
        let mut done = false;
        while !done {
            done = loader.is_finished();
            let disturbed = serving::ask_all(&engine, &asks).unwrap();
            for (a, b) in calm.iter().zip(&disturbed) {
                assert_eq!(a.bits(), b.bits());
            }
        }
        loader.join().unwrap();
        engine.handle.settle();
        assert!(!engine.handle.has_adapter("bad"));
        assert_eq!(engine.handle.adapters().len(), names.len());
        stop(engine);
    }
}
