//! Promises of a step, asserted from the device's counters on every backend that runs a whole model.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use amphora_engine::{
    AdapterConfig, EngineConfig, KvSize, PrefixCaching, Profiling, SamplingParams, Shutdown,
    Started,
};
use amphora_hal::{Backend, Bucket, DType, OpKind, Part, PlanLayout, PlanLimits};
use amphora_model::synthetic::{self, Spread};
use amphora_model::{Config, LoraSlices, ModelFiles};

use crate::golden;
use crate::rng::Rng;
use crate::serving::{self, Ask};

/// How a step's operators reach the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launches {
    /// So many operators, one at a time.
    Eager(u64),
    /// One recorded graph.
    Replay,
}

/// Random prompts for the base and each of `adapters` in turn; some greedy, some drawn with a seed.
pub fn random_asks(rng: &mut Rng, adapters: &[String], count: usize) -> Vec<Ask> {
    (0..count)
        .map(|i| {
            let tenant = i % (adapters.len() + 1);
            let adapter = tenant.checked_sub(1).map(|i| adapters[i].as_str());
            let prompt: Vec<u32> = (0..1 + rng.below(40)).map(|_| rng.below(400) as u32).collect();
            let mut ask = Ask::greedy(&prompt, adapter, 1 + rng.below(20));
            if i % 3 == 0 {
                ask.sampling = SamplingParams {
                    temperature: 0.8,
                    top_k: if i % 2 == 0 { 40 } else { 0 },
                    top_p: 0.95,
                    seed: Some(i as u64),
                    ..SamplingParams::default()
                };
            }
            ask
        })
        .collect()
}

/// One upload of the plan, one download of the results, one launch for each operator or one graph, no
/// allocation, and no wait beyond the one for the results. An adapter that becomes visible costs its
/// blocks and one range of rows, once, before.
///
/// # Panics
/// A promise is broken: this is a test's body.
pub fn a_step_crosses_once<B: Backend>(device: B, launches: Launches) {
    const MODEL: &str = "gpt_oss";
    let settings = EngineConfig {
        max_seqs: 64,
        kv: KvSize::Bytes(32 << 20),
        adapters: Some(AdapterConfig { arena_bytes: 16 << 20, ..AdapterConfig::default() }),
        ..EngineConfig::default()
    };
    let folder = golden::folder();
    let model = folder.join("models").join(MODEL);
    let started = serving::start(device.clone(), &model, DType::F32, &settings).expect("starts");
    let names = golden::adapters(MODEL).expect("golden adapters");
    serving::load_adapters(&started, &folder.join("adapters").join(MODEL), &names).expect("sound");
    let warm: Vec<Ask> = names.iter().map(|name| Ask::greedy(&[1, 2, 3], Some(name), 4)).collect();
    serving::ask_all(&started, &warm).expect("answers");
    started.handle.settle();

    let (before, steps) = (device.counters(), started.handle.metrics().steps);
    let asks = random_asks(&mut Rng::new(7, "promises"), &names, 20);
    serving::ask_all(&started, &asks).expect("answers");
    started.handle.settle();
    let spent = device.counters().since(&before);
    let steps = started.handle.metrics().steps - steps;

    assert!(steps > 10);
    assert_eq!(spent.uploads, steps);
    assert_eq!(spent.downloads, steps);
    let (eager, replays) = match launches {
        Launches::Eager(operators) => (steps * operators, 0),
        Launches::Replay => (0, steps),
    };
    assert_eq!((spent.launches, spent.replays), (eager, replays));
    assert_eq!(spent.allocations, 0);
    assert!(spent.waits <= 2 * steps, "{} waits in {steps} steps", spent.waits);
    if let Launches::Eager(_) = launches {
        assert_eq!(spent.waits, 0, "a device that runs at once is never waited for");
    }
    assert!(spent.download_bytes <= steps * 64 * 8, "results alone come back");
    let most = steps * largest_plan(&device, &model, &settings) as u64;
    assert!(spent.upload_bytes <= most, "{} bytes of plans go there", spent.upload_bytes);
    started.handle.shutdown(Shutdown::Drain);
    started.thread.join().expect("a clean end");
}

/// The same request, alone, has the same bits each time; one of the base those of an engine without adapters.
///
/// # Panics
/// A promise is broken: this is a test's body.
pub fn a_request_repeats_bit_for_bit<B: Backend>(open: impl Fn() -> B, model: &str, dtype: DType) {
    let folder = golden::folder();
    let names = golden::adapters(model).expect("golden adapters");
    let path = folder.join("models").join(model);
    let tokens: Vec<u32> = (0..45).map(|i| 1 + i * 7 % 390).collect();
    let settings = EngineConfig {
        kv: KvSize::Bytes(32 << 20),
        prefix_caching: PrefixCaching::Off,
        adapters: None,
        ..EngineConfig::default()
    };
    let ask = |started: &Started, adapter: Option<&str>| {
        let mut answers = serving::ask_all(started, &[Ask::greedy(&tokens, adapter, 9)]);
        answers.as_mut().expect("an answer").remove(0).bits()
    };
    let stop = |started: Started| {
        started.handle.shutdown(Shutdown::Drain);
        started.thread.join().expect("a clean end");
    };
    let started = serving::start(open(), &path, dtype, &settings).expect("starts");
    let base = ask(&started, None);
    stop(started);

    let adapters = Some(AdapterConfig { arena_bytes: 16 << 20, ..AdapterConfig::default() });
    let settings = EngineConfig { adapters, ..settings };
    let started = serving::start(open(), &path, dtype, &settings).expect("starts");
    serving::load_adapters(&started, &folder.join("adapters").join(model), &names).expect("sound");
    let first: Vec<_> = names.iter().map(|name| ask(&started, Some(name))).collect();
    assert!(first.iter().any(|bits| *bits != base), "no adapter does anything");
    for _ in 0..2 {
        assert_eq!(ask(&started, None), base, "{model} in {dtype}: the base");
        for (name, first) in names.iter().zip(&first) {
            assert_eq!(ask(&started, Some(name)), *first, "{model} in {dtype}: {name}");
        }
    }
    stop(started);
}

/// Bytes of the plan of the largest step that edits no logits.
fn largest_plan<B: Backend>(device: &B, model: &Path, settings: &EngineConfig) -> usize {
    let config = Config::read(&ModelFiles::open(model).expect("stored")).expect("sound");
    let &EngineConfig { max_seqs: sequences, max_batch_tokens: tokens, block_size, .. } = settings;
    let blocks_per_sequence = config.max_positions.div_ceil(block_size);
    let limits = PlanLimits {
        sequences,
        tokens,
        blocks_per_sequence,
        block_size,
        kv_blocks: sequences * blocks_per_sequence,
        vocab: config.vocab,
        positions: config.max_positions,
        slots: settings.adapters.map_or(0, |adapters| adapters.slots),
        tile_rows: device.caps().tile_rows,
        edits: 0,
    };
    let bucket = Bucket { tokens, sequences, logit_rows: sequences };
    PlanLayout::new(&limits, bucket).expect("within the limits").bytes()
}

/// Steps that are timed, in whole or in their pieces, give the answers of steps that are not; their pieces
/// name every operator and every layer, and take no more than the step.
///
/// # Panics
/// A promise is broken: this is a test's body.
pub fn a_profiled_step_answers_alike<B: Backend>(device: B) {
    let settings = EngineConfig { kv: KvSize::Bytes(32 << 20), ..EngineConfig::default() };
    let model = golden::folder().join("models").join("gpt_oss");
    let started = serving::start(device, &model, DType::F32, &settings).expect("starts");
    let answers = || -> Vec<Vec<u32>> {
        let asks: Vec<Ask> = (1..4).map(|i| Ask::greedy(&[i, 7, 9, 11 * i], None, 6)).collect();
        let answers = serving::ask_all(&started, &asks).expect("answers");
        answers.into_iter().map(|answer| answer.ids).collect()
    };
    let plain = answers();
    for how in [Profiling::AsServed, Profiling::Parts] {
        started.handle.settle();
        let steps = started.handle.metrics().steps;
        let profiles = started.handle.profile(how);
        assert_eq!(answers(), plain, "{how:?}");
        started.handle.settle();
        let told: Vec<_> = profiles.try_iter().collect();
        assert_eq!(told.len() as u64, started.handle.metrics().steps - steps, "{how:?}");
        for step in told {
            let parts = &step.profile.parts;
            assert!(step.profile.whole > Duration::ZERO && !step.any_lora, "{step:?}");
            if how == Profiling::AsServed {
                assert!(parts.is_empty(), "{step:?}");
                continue;
            }
            let operators: BTreeSet<OpKind> = parts.iter().map(|part| part.op).collect();
            for op in [OpKind::Embed, OpKind::PagedAttention, OpKind::FusedMoe, OpKind::Sample] {
                assert!(operators.contains(&op), "no {op:?}: {operators:?}");
            }
            let layers: BTreeSet<usize> = parts.iter().filter_map(|part| part.layer).collect();
            assert_eq!(layers, (0..3).collect(), "the layers of the model");
            let sum: Duration = parts.iter().map(|part| part.time).sum();
            // A device's clock is read in steps.
            assert!(sum <= step.profile.whole + Duration::from_micros(parts.len() as u64));
        }
    }
    let (before, _) = (answers(), started.handle.settle());
    assert_eq!(before, plain, "nobody listens any more");
    started.handle.shutdown(Shutdown::Drain);
    started.thread.join().expect("a clean end");
}

/// A made model of experts with one adapter on all it has, which takes long contexts.
fn made_model<B: Backend>(device: B, dtype: DType, length: usize) -> Started {
    let files = ModelFiles::synthetic("tiny-moe", Spread::Balanced).expect("a shape");
    let config = Config::read(&files).expect("sound");
    let settings = EngineConfig {
        max_seqs: 4,
        max_batch_tokens: length,
        max_model_len: Some(length + 8),
        kv: KvSize::Bytes(64 << 20),
        adapters: Some(AdapterConfig { arena_bytes: 64 << 20, ..AdapterConfig::default() }),
        ..EngineConfig::default()
    };
    let started = serving::start_files(device, &files, dtype, &settings).expect("starts");
    let factors = synthetic::adapter(&config, &LoraSlices::new(&config), 16);
    started.handle.load_factors("made", &factors).expect("it fits");
    started
}

/// A random prompt of so many tokens.
fn prompt(rng: &mut Rng, tokens: usize) -> Vec<u32> {
    (0..tokens).map(|_| rng.below(1024) as u32).collect()
}

/// The contexts that a promise is held on.
#[derive(Debug, Clone, Copy)]
pub struct Contexts {
    /// How many.
    pub count: usize,
    /// Most tokens of one.
    pub longest: usize,
}

/// Once ready, whatever the length of a context: nothing is compiled, no machine code loaded, no memory
/// allocated, with an adapter and without.
///
/// # Panics
/// A promise is broken: this is a test's body.
pub fn nothing_is_made_after_ready<B: Backend>(device: B, dtype: DType, contexts: Contexts) {
    let started = made_model(device.clone(), dtype, contexts.longest);
    let ready = device.counters();
    let mut rng = Rng::new(5, "contexts");
    for _ in 0..contexts.count {
        let length = 1 + rng.below(contexts.longest);
        let tokens = prompt(&mut rng, length);
        for adapter in [None, Some("made")] {
            serving::ask_all(&started, &[Ask::greedy(&tokens, adapter, 3)]).expect("an answer");
        }
    }
    started.handle.settle();
    let spent = device.counters().since(&ready);
    assert_eq!((spent.compilations, spent.modules, spent.allocations), (0, 0, 0));
    started.handle.shutdown(Shutdown::Drain);
    started.thread.join().expect("a clean end");
}

/// Most launches of one layer's experts, behind routing.
#[derive(Debug, Clone, Copy)]
pub struct ExpertLaunches {
    /// In a step of few tokens, with adapters and without.
    pub decode: usize,
    /// In a step of many, without adapters.
    pub prompt: usize,
    /// In a step of many, with adapters.
    pub prompt_with_adapters: usize,
}

/// Counts the launches that one layer's experts take behind routing.
///
/// # Panics
/// There are more than promised: this is a test's body.
pub fn experts_take_few_launches<B: Backend>(device: B, dtype: DType, most: ExpertLaunches) {
    let started = made_model(device, dtype, 512);
    let mut rng = Rng::new(6, "launches");
    let tokens = prompt(&mut rng, 300);
    for adapter in [None, Some("made")] {
        let profiles = started.handle.profile(Profiling::Parts);
        serving::ask_all(&started, &[Ask::greedy(&tokens, adapter, 4)]).expect("an answer");
        started.handle.settle();
        let steps: Vec<_> = profiles.try_iter().collect();
        assert_eq!(steps.len(), 4);
        for step in steps {
            assert_eq!(step.any_lora, adapter.is_some());
            // Where no row has an adapter, none of its operators runs, though there is one.
            let is_lora =
                |part: &Part| matches!(part.op, OpKind::LoraLinear | OpKind::FusedMoeLora);
            assert_eq!(step.profile.parts.iter().any(is_lora), adapter.is_some());
            let most = match (step.tokens, adapter) {
                (1, _) => most.decode,
                (_, None) => most.prompt,
                (_, Some(_)) => most.prompt_with_adapters,
            };
            for layer in 0..2 {
                let experts = |part: &&Part| {
                    matches!(part.op, OpKind::FusedMoe | OpKind::FusedMoeLora)
                        && part.layer == Some(layer)
                };
                let launches: Vec<&str> =
                    step.profile.parts.iter().filter(experts).map(|part| part.kernel).collect();
                let what = format!("{} tokens, layer {layer}: {launches:?}", step.tokens);
                assert!(!launches.is_empty() && launches.len() <= most, "{what}");
            }
        }
    }
    started.handle.shutdown(Shutdown::Drain);
    started.thread.join().expect("a clean end");
}
