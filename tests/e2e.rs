//! Many tenants on one engine: what a step costs, and that nobody's answer depends on who else is
//! there, whatever the pressure on slots and cache.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::sync::mpsc::channel;

use amphora_backend_cpu::Cpu;
use amphora_engine::{
    AdapterConfig, Delivery, EngineConfig, Event, FinishReason, KvSize, Request, Shutdown, Sink,
    Started,
};
use amphora_hal::{DType, Device, DeviceConfig};
use amphora_model::source::Source;
use amphora_tests::golden;
use amphora_tests::promises::{Launches, a_request_repeats_bit_for_bit, random_asks};
use amphora_tests::rng::Rng;
use amphora_tests::serving::{self, Answer, Ask};

const MODEL: &str = "gpt_oss";

fn model_folder() -> PathBuf {
    golden::folder().join("models").join(MODEL)
}

fn adapter_folder() -> PathBuf {
    golden::folder().join("adapters").join(MODEL)
}

fn device() -> Cpu {
    Cpu::open(&DeviceConfig::default()).expect("the CPU opens")
}

fn settings() -> EngineConfig {
    EngineConfig {
        max_seqs: 64,
        kv: KvSize::Bytes(32 << 20),
        adapters: Some(AdapterConfig { arena_bytes: 16 << 20, ..AdapterConfig::default() }),
        ..EngineConfig::default()
    }
}

fn started(settings: &EngineConfig) -> Started {
    serving::start(device(), &model_folder(), DType::F32, settings).expect("a golden model")
}

fn load_all(started: &Started) -> Vec<String> {
    let names = golden::adapters(MODEL).expect("golden adapters");
    serving::load_adapters(started, &adapter_folder(), &names).expect("sound adapters");
    names
}

fn stop(started: Started) {
    started.handle.shutdown(Shutdown::Drain);
    started.thread.join().expect("a clean end");
}

/// A step crosses once each way, launches each operator once, and allocates and waits for nothing.
#[test]
fn a_step_crosses_once_each_way_and_allocates_nothing() {
    // Token table, embedding, nine operators in each of three layers, last norm, rows, head, draw.
    amphora_tests::promises::a_step_crosses_once(device(), Launches::Eager(2 + 9 * 3 + 4));
}

#[test]
fn profiled_steps_answer_alike() {
    amphora_tests::promises::a_profiled_step_answers_alike(device());
}

#[test]
fn nothing_is_made_after_ready() {
    let contexts = amphora_tests::promises::Contexts { count: 20, longest: 200 };
    amphora_tests::promises::nothing_is_made_after_ready(device(), DType::F32, contexts);
}

/// One operator is one launch here.
#[test]
fn a_layer_of_experts_takes_one_launch() {
    use amphora_tests::promises::{ExpertLaunches, experts_take_few_launches};

    let most = ExpertLaunches { decode: 1, prompt: 1, prompt_with_adapters: 1 };
    experts_take_few_launches(device(), DType::F32, most);
}

#[test]
fn requests_repeat_bit_for_bit() {
    for (model, dtype) in [("gpt_oss", DType::F32), ("gpt_oss_bf16", DType::BF16)] {
        a_request_repeats_bit_for_bit(device, model, dtype);
    }
}

/// C08, the law of the base row over whole answers: the same bits with adapters off, on with none loaded,
/// and with the others' adapters busy in the same batch.
#[test]
fn c08_base_answers_have_the_same_bits_with_adapters_off_on_and_busy() {
    let with_logits = EngineConfig { prompt_logit_rows: 64, ..settings() };
    let asks: Vec<Ask> = random_asks(&mut Rng::new(11, "e2e"), &[], 8)
        .into_iter()
        .map(|ask| Ask { prompt_logits: true, ..ask })
        .collect();
    let off = started(&EngineConfig { adapters: None, ..with_logits });
    let without = serving::ask_all(&off, &asks).unwrap();
    stop(off);

    let on = started(&with_logits);
    let idle = serving::ask_all(&on, &asks).unwrap();
    let names = load_all(&on);
    let busy_asks: Vec<Ask> = asks
        .iter()
        .cloned()
        .chain(
            random_asks(&mut Rng::new(12, "e2e"), &names, 24)
                .into_iter()
                .filter(|a| a.adapter.is_some()),
        )
        .collect();
    let busy = serving::ask_all(&on, &busy_asks).unwrap();
    assert!(on.handle.metrics().most_mixed.adapters >= 4, "four adapters were busy beside them");
    stop(on);
    for (i, want) in without.iter().enumerate() {
        assert_eq!(want.bits(), idle[i].bits(), "request {i}: adapters on, none loaded");
        assert_eq!(want.bits(), busy[i].bits(), "request {i}: others' adapters busy");
    }
}

/// Two slots for six adapters and a cache a third of what is wanted: every answer equals the one that
/// its request gets alone, twice, in another order.
#[test]
fn answers_under_pressure_equal_their_solo_answers() {
    let roomy = started(&settings());
    let names = load_all(&roomy);
    let asks = random_asks(&mut Rng::new(3, "e2e"), &names, 70);
    let solo: Vec<Answer> = asks
        .iter()
        .map(|ask| serving::ask_all(&roomy, std::slice::from_ref(ask)).unwrap().remove(0))
        .collect();
    stop(roomy);

    let blocks: usize = asks.iter().map(|a| (a.prompt.len() + a.max_new_tokens).div_ceil(16)).sum();
    let tight = started(&EngineConfig {
        kv: KvSize::Blocks(blocks * 64 / asks.len() / 3),
        max_batch_tokens: 96,
        adapters: Some(AdapterConfig {
            slots: 2,
            arena_bytes: 16 << 20,
            max_rank: 64,
            ..AdapterConfig::default()
        }),
        ..settings()
    });
    load_all(&tight);
    let mut rng = Rng::new(4, "e2e");
    let mut order: Vec<usize> = (0..asks.len()).collect();
    for round in 0..2 {
        let shuffle = rng.permutation(order.len());
        order = shuffle.iter().map(|&i| order[i]).collect();
        let shuffled: Vec<Ask> = order.iter().map(|&i| asks[i].clone()).collect();
        let answers = serving::ask_all(&tight, &shuffled).unwrap();
        for (&i, answer) in order.iter().zip(&answers) {
            let adapter = asks[i].adapter.clone();
            assert_eq!(answer.bits(), solo[i].bits(), "round {round}, request {i} of {adapter:?}");
        }
    }
    tight.handle.settle();
    let metrics = tight.handle.metrics();
    assert_eq!((metrics.running, metrics.waiting, metrics.kv_blocks_used), (0, 0, 0));
    stop(tight);
}

/// A new version under an old name answers as itself, at once and after going back.
#[test]
fn a_name_answers_with_the_version_it_has() {
    let started = started(&settings());
    let prompt: Vec<u32> = (10..40).collect();
    let load = |name: &str, folder: &str| {
        let source = Source::Folder(adapter_folder().join(folder));
        started.handle.load_adapter(name, &source).unwrap();
    };
    let ask = |name| serving::ask_all(&started, &[Ask::greedy(&prompt, Some(name), 12)]).unwrap();
    load("first", "attn_r8");
    load("second", "experts_fused_r4");
    let (first, second) = (ask("first"), ask("second"));
    assert_ne!(first, second, "the two adapters must differ for this test to mean anything");
    for (folder, want) in [("attn_r8", &first), ("experts_fused_r4", &second), ("attn_r8", &first)]
    {
        load("tenant", folder);
        assert_eq!(ask("tenant")[0].bits(), want[0].bits(), "after loading {folder}");
    }
    started.handle.unload_adapter("tenant").unwrap();
    let gone = serving::ask_all(&started, &[Ask::greedy(&prompt, Some("tenant"), 1)]);
    assert!(gone.is_err(), "an unloaded name must not answer");
    stop(started);
}

/// Clients that go away and requests that are cancelled give back what they held, and the others'
/// answers stay what they are alone.
#[test]
fn cancelled_and_vanished_requests_give_everything_back() {
    let started = started(&settings());
    let names = load_all(&started);
    let asks = random_asks(&mut Rng::new(31, "e2e"), &names, 30);
    let solo: Vec<Answer> = asks
        .iter()
        .map(|ask| serving::ask_all(&started, std::slice::from_ref(ask)).unwrap().remove(0))
        .collect();
    let (sender, events) = channel();
    for (index, ask) in asks.iter().enumerate() {
        let sender = sender.clone();
        let mut tokens = 0;
        let sink: Sink = Box::new(move |event| {
            tokens += usize::from(matches!(event, Event::Token { .. }));
            // Every fifth client hangs up at its second token.
            if index % 5 == 4 && tokens >= 2 {
                return Delivery::Gone;
            }
            match sender.send((index, event)) {
                Ok(()) => Delivery::Ok,
                Err(_) => Delivery::Gone,
            }
        });
        let request = Request {
            adapter: ask.adapter.clone(),
            sampling: ask.sampling,
            max_new_tokens: ask.max_new_tokens,
            ..Request::new(ask.prompt.clone(), sink)
        };
        let id = started.handle.submit(request).unwrap();
        if index % 5 == 2 {
            started.handle.cancel(id);
        }
    }
    drop(sender);
    let mut answers = vec![(Vec::new(), None); asks.len()];
    for (index, event) in events {
        match event {
            Event::Token { id, .. } => answers[index].0.push(id),
            Event::Finished { reason, .. } => {
                assert_eq!(answers[index].1, None, "request {index} ended twice");
                answers[index].1 = Some(reason);
            }
            Event::Failed { error } => panic!("request {index}: {error}"),
            Event::Started { .. } | Event::PromptLogits { .. } | Event::PromptLogprobs { .. } => {}
        }
    }
    for (index, (ids, reason)) in answers.iter().enumerate() {
        assert!(solo[index].ids.starts_with(ids), "request {index} went another way");
        match index % 5 {
            0 | 1 | 3 => assert_eq!(
                (ids, *reason),
                (&solo[index].ids, Some(FinishReason::Length)),
                "request {index}"
            ),
            2 => assert!(reason.is_some(), "request {index} was cancelled and never told"),
            _ => {}
        }
    }
    started.handle.settle();
    let metrics = started.handle.metrics();
    assert_eq!((metrics.running, metrics.waiting, metrics.kv_blocks_used), (0, 0, 0));
    for name in names {
        started.handle.unload_adapter(&name).unwrap();
    }
    started.handle.settle();
    assert_eq!(started.handle.metrics().adapter_memory.block_bytes, 0, "a reference leaked");
    stop(started);
}

/// C19: the demo's six adapters together cost at most 1.3 times their numbers in the compute type.
#[test]
fn c19_an_adapter_costs_its_own_bytes() {
    let demo = golden::folder().join("../../assets/demo-model");
    let started = serving::start(device(), &demo, DType::F32, &settings()).unwrap();
    let names = ["pirate", "json", "sql", "spanish", "math", "reverse"].map(str::to_owned);
    serving::load_adapters(&started, &demo.join("adapters"), &names).unwrap();
    // Bytes on the device are those of adapters that are used.
    let asks: Vec<Ask> = names.iter().map(|name| Ask::greedy(&[1, 4], Some(name), 2)).collect();
    serving::ask_all(&started, &asks).unwrap();
    started.handle.settle();
    let mut numbers = 0;
    for name in &names {
        let path = demo.join("adapters").join(name).join("adapter_model.safetensors");
        let bytes = std::fs::read(path).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        numbers += tensors.iter().map(|(_, t)| t.shape().iter().product::<usize>()).sum::<usize>();
    }
    let memory = started.handle.metrics().adapter_memory;
    let share = |bytes: usize| bytes as f64 / (numbers * 4) as f64;
    assert!(share(memory.block_bytes) <= 1.3, "blocks cost {:.3}", share(memory.block_bytes));
    assert!(share(memory.page_bytes) <= 1.3, "pages cost {:.3}", share(memory.page_bytes));
    assert!(memory.block_bytes >= numbers * 4, "less than the numbers cannot be");
    stop(started);
}

/// A device that holds the weights and not the cache: the start says what it wanted of each pool, and
/// how much cache would have fitted.
#[test]
fn a_start_without_room_tells_its_budget() {
    let config = DeviceConfig { memory_limit: Some(24 << 20), ..DeviceConfig::default() };
    let device = Cpu::open(&config).unwrap();
    let error = serving::start(device, &model_folder(), DType::F32, &settings())
        .expect_err("24 MiB hold no cache of that size")
        .to_string();
    for part in ["weights ", "adapters ", "KV cache ", "scratch ", "that may be used"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    assert!(error.starts_with("out of memory in pool"), "{error}");
}

/// Answers are counted, whether the scheduler saw their request or not.
#[test]
fn every_answer_of_a_refused_request_has_failed() {
    let started = started(&settings());
    let ask = Ask { n: 3, ..Ask::greedy(&[1, 2], Some("ghost"), 4) };
    let error = serving::ask_choices(&started, &[ask]).expect_err("there is no such adapter");
    assert!(format!("{error:#}").contains("ghost"), "{error:#}");
    started.handle.settle();
    assert_eq!(started.handle.metrics().finished.failed, 3);
    stop(started);
}
