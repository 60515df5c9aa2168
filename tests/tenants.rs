//! Cases that other servers got wrong, on the engine: tenants that replace their adapter, leave, hang up, or
//! have to wait for others. Each is named after its number in the list of cases.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use amphora_backend_cpu::Cpu;
use amphora_engine::{
    AdapterConfig, Delivery, EngineConfig, EosRule, Event, FinishReason, Request, RequestId,
    SamplingParams, Shutdown, Sink, Started, StopRules,
};
use amphora_hal::{DType, Device, DeviceConfig};
use amphora_model::adapter::{AdapterBase, AdapterFactors};
use amphora_model::source::Source;
use amphora_model::{Config, ModelFiles};
use amphora_tests::seeded::adapter;
use amphora_tests::serving::{self, Answer, Ask};
use amphora_tests::{golden, rng};

/// One at a time: one of them looks at the memory of the process.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn engine(settings: &EngineConfig) -> Started {
    let device = Cpu::open(&DeviceConfig::default()).unwrap();
    serving::start(device, &golden::folder().join("models/gpt_oss"), DType::F32, settings).unwrap()
}

fn settings(slots: usize) -> EngineConfig {
    let adapters = AdapterConfig { slots, arena_bytes: 64 << 20, ..AdapterConfig::default() };
    EngineConfig { block_size: 4, adapters: Some(adapters), ..EngineConfig::default() }
}

fn factors(seed: u64, rank: usize) -> AdapterFactors {
    let files = ModelFiles::open(&golden::folder().join("models/gpt_oss")).unwrap();
    adapter(&AdapterBase::from(&Config::read(&files).unwrap()), seed, rank)
}

fn stop(started: Started) {
    started.handle.shutdown(Shutdown::Drain);
    started.thread.join().unwrap();
}

fn prompt() -> Vec<u32> {
    let mut rng = rng::Rng::new(10, "tenants");
    (0..41).map(|_| rng.below(400) as u32).collect()
}

/// C10: another adapter under the same name used keys and values that the one before had computed.
#[test]
fn c10_a_replaced_adapter_finds_nothing_of_the_one_before() {
    let _alone = alone();
    let started = engine(&settings(2));
    let ask = |name: &str| {
        let asks = [Ask::greedy(&prompt(), Some(name), 12)];
        serving::ask_all(&started, &asks).unwrap().remove(0)
    };
    let cached = |answer: &Answer| answer.finished.unwrap().1.cached;
    let versions = [factors(1, 8), factors(2, 8)];
    let solo = [0, 1].map(|version| {
        let name = format!("solo{version}");
        started.handle.load_factors(&name, &versions[version]).unwrap();
        ask(&name)
    });
    assert_ne!(solo[0].ids, solo[1].ids, "the versions answer unlike each other");
    for version in [0, 1, 0] {
        started.handle.load_factors("x", &versions[version]).unwrap();
        let first = ask("x");
        assert_eq!((cached(&first), first.bits()), (0, solo[version].bits()));
        let again = ask("x");
        assert_eq!((cached(&again), again.bits()), (40, solo[version].bits()));
    }
    // The versions that are gone leave nothing behind.
    let blocks = |started: &Started| {
        started.handle.settle();
        started.handle.metrics().kv_blocks_cached
    };
    let before = blocks(&started);
    started.handle.unload_adapter("x").unwrap();
    assert!(blocks(&started) + 10 <= before, "an unloaded version keeps its blocks");
    stop(started);
}

/// C11: what was unloaded stayed on the device and in host memory.
#[test]
fn c11_what_is_unloaded_is_freed() {
    let _alone = alone();
    let started = engine(&settings(2));
    let factors = factors(3, 256);
    let mut bytes = 0;
    let mut settled = 0;
    for round in 0..200 {
        started.handle.load_factors("x", &factors).unwrap();
        if round % 10 == 0 {
            serving::ask_all(&started, &[Ask::greedy(&prompt(), Some("x"), 2)]).unwrap();
            bytes = bytes.max(started.handle.metrics().adapter_host_bytes);
        }
        started.handle.unload_adapter("x").unwrap();
        if round == 19 {
            started.handle.settle();
            settled = resident_bytes();
        }
    }
    started.handle.settle();
    let metrics = started.handle.metrics();
    assert_eq!((metrics.adapter_memory.block_bytes, metrics.adapter_host_bytes), (0, 0));
    assert_eq!(metrics.adapters_hot, 0);
    assert!(started.handle.adapters().is_empty());
    assert!(bytes > 4 << 20, "an adapter of {bytes} bytes shows nothing");
    let growth = resident_bytes().saturating_sub(settled);
    // The allocator may keep a few freed copies mapped, more or fewer at either reading; a leak keeps 180.
    assert!(growth < 4 * bytes, "{growth} bytes more after 180 rounds with an adapter of {bytes}");
    let gone = serving::ask_all(&started, &[Ask::greedy(&[1], Some("x"), 1)]);
    assert!(gone.unwrap_err().to_string().contains("there is no adapter `x`"));
    stop(started);
}

/// A copy of golden adapters that a test may change.
struct Folder(PathBuf);

impl Folder {
    fn of(names: &[&str]) -> Self {
        let path = std::env::temp_dir().join(format!("amphora-tenants-{}", std::process::id()));
        for name in names {
            let to = path.join(name);
            std::fs::create_dir_all(&to).unwrap();
            for entry in std::fs::read_dir(golden_adapter(name)).unwrap() {
                let file = entry.unwrap();
                std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
            }
        }
        Folder(path)
    }

    fn source(&self, name: &str) -> Source {
        Source::Folder(self.0.join(name))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn golden_adapter(name: &str) -> PathBuf {
    golden::folder().join("adapters/gpt_oss").join(name)
}

/// With no room in host memory adapters are read again from their files, answer as before, and fail by name
/// when the files are not what they were: never half of them, never another version.
#[test]
fn adapters_come_back_from_their_files_as_they_were_or_not_at_all() {
    const NAMES: [&str; 4] = ["attn_r8", "experts_fused_r4", "r20_rslora_pattern", "router_r4"];
    const WEIGHTS: &str = "adapter_model.safetensors";
    let _alone = alone();
    let folder = Folder::of(&NAMES);
    let mut solo = Vec::new();
    for host_bytes in [usize::MAX, 0] {
        let mut settings = settings(1);
        settings.adapters =
            settings.adapters.map(|adapters| AdapterConfig { host_bytes, ..adapters });
        let started = engine(&settings);
        for name in NAMES {
            started.handle.load_adapter(name, &folder.source(name)).unwrap();
        }
        let asks = NAMES.map(|name| Ask::greedy(&prompt(), Some(name), 6));
        let answers = serving::ask_all(&started, &asks).unwrap();
        if host_bytes > 0 {
            solo = answers;
            stop(started);
            continue;
        }
        for _ in 0..3 {
            for (answer, solo) in serving::ask_all(&started, &asks).unwrap().iter().zip(&solo) {
                assert_eq!(answer.bits(), solo.bits());
            }
        }
        started.handle.settle();
        let metrics = started.handle.metrics();
        assert!(metrics.adapter_reads >= 9, "{} reads", metrics.adapter_reads);
        assert_eq!(metrics.adapter_host_bytes, 0);

        let ask = |index: usize| serving::ask_all(&started, &asks[index..=index]);
        let file = folder.0.join(NAMES[0]).join(WEIGHTS);
        let whole = std::fs::read(&file).unwrap();
        let mut other = whole.clone();
        *other.last_mut().unwrap() ^= 1;
        for changed in [&other[..], &whole[..whole.len() / 2], &[]] {
            ask(1).unwrap();
            std::fs::write(&file, changed).unwrap();
            let error = ask(0).unwrap_err().to_string();
            assert!(error.contains("adapter `attn_r8` cannot be read again"), "{error}");
            assert_eq!(ask(2).unwrap()[0].bits(), solo[2].bits(), "others are served");
        }
        std::fs::remove_file(&file).unwrap();
        assert!(ask(0).is_err());
        std::fs::write(&file, &whole).unwrap();
        assert_eq!(ask(0).unwrap()[0].bits(), solo[0].bits());
        for name in NAMES {
            started.handle.unload_adapter(name).unwrap();
        }
        started.handle.settle();
        assert_eq!(started.handle.metrics().adapter_memory.block_bytes, 0);
        assert!(started.handle.adapters().is_empty());
        stop(started);
    }
}

/// One name, loaded anew by several while it is still being loaded, asked for, and taken away: whatever answers
/// is one whole version, and nothing stays behind.
#[test]
fn an_adapter_swapped_during_its_own_load_answers_as_one_version() {
    let _alone = alone();
    let started = engine(&settings(1));
    let versions = [7, 8, 9].map(|seed| factors(seed, 8 * seed as usize - 51));
    let ask = |name: &str| serving::ask_all(&started, &[Ask::greedy(&prompt(), Some(name), 4)]);
    let solo = versions.each_ref().map(|version| {
        started.handle.load_factors("solo", version).unwrap();
        ask("solo").unwrap().remove(0).bits()
    });
    started.handle.unload_adapter("solo").unwrap();
    assert!(solo[0] != solo[1] && solo[1] != solo[2], "the versions answer unlike each other");
    let over = AtomicBool::new(false);
    let asked = std::thread::scope(|scope| {
        for (index, version) in versions.iter().enumerate() {
            let (started, over) = (&started, &over);
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    started.handle.load_factors("x", version).unwrap();
                    if index == 0 {
                        let _ = started.handle.unload_adapter("x");
                    }
                }
            });
        }
        // A refusal takes no time, so a number of questions alone could all come before the first load.
        let began = Instant::now();
        let (mut answered, mut asked) = (0, Vec::new());
        while answered < 12 && began.elapsed() < Duration::from_secs(60) {
            asked.push(ask("x"));
            answered += usize::from(asked.last().is_some_and(Result::is_ok));
        }
        over.store(true, Ordering::Relaxed);
        asked
    });
    let mut answered = 0;
    for answers in asked {
        match answers {
            Ok(answers) => {
                answered += 1;
                assert!(solo.contains(&answers[0].bits()), "a mixture of versions");
            }
            Err(error) => {
                assert!(error.to_string().contains("there is no adapter `x`"), "{error}");
            }
        }
    }
    assert_eq!(answered, 12, "it was loaded all the time");
    for (version, solo) in versions.iter().zip(&solo) {
        started.handle.load_factors("x", version).unwrap();
        assert_eq!(ask("x").unwrap()[0].bits(), *solo, "the last one loaded");
    }
    started.handle.unload_adapter("x").unwrap();
    started.handle.settle();
    let metrics = started.handle.metrics();
    assert_eq!((metrics.adapter_memory.block_bytes, metrics.adapter_host_bytes), (0, 0));
    assert!(started.handle.adapters().is_empty());
    stop(started);
}

/// Resident bytes of this process.
fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

fn submit(started: &Started, request: Request) -> RequestId {
    let stop = StopRules { eos_rule: EosRule::Ignore, ..StopRules::default() };
    started.handle.submit(Request { stop, ..request }).unwrap()
}

/// C13: after requests with several answers an unload hung for ever.
#[test]
fn c13_several_answers_give_each_reference_back_once() {
    let _alone = alone();
    let started = engine(&EngineConfig { max_seqs: 8, ..settings(2) });
    started.handle.load_factors("a", &factors(4, 16)).unwrap();
    let (sender, events) = channel();
    let mut ids = Vec::new();
    for index in 0..3 {
        let sender = sender.clone();
        let sink: Sink = Box::new(move |event| {
            // The last client hangs up at its first token.
            if index == 2 && matches!(event, Event::Token { .. }) {
                return Delivery::Gone;
            }
            let _ = sender.send((index, event));
            Delivery::Ok
        });
        let request = Request {
            adapter: Some("a".into()),
            n: 16,
            max_new_tokens: 24,
            sampling: SamplingParams { temperature: 1.0, ..SamplingParams::default() },
            ..Request::new(prompt(), sink)
        };
        ids.push(submit(&started, request));
    }
    drop(sender);
    // Aborts the first in the midst of its answers.
    let mut ends = vec![Vec::new(); 3];
    let mut aborted = false;
    for (index, event) in &events {
        match event {
            Event::Token { choice, .. } if index == 0 && choice > 2 && !aborted => {
                started.handle.cancel(ids[0]);
                aborted = true;
            }
            Event::Finished { choice, reason, .. } => ends[index].push((choice, reason)),
            Event::Failed { error } => panic!("request {index}: {error}"),
            _ => {}
        }
    }
    assert!(aborted);
    for (index, ends) in ends.iter_mut().enumerate() {
        ends.sort_by_key(|(choice, _)| *choice);
        let choices: Vec<usize> = ends.iter().map(|(choice, _)| *choice).collect();
        assert_eq!(choices, (0..16).collect::<Vec<_>>(), "request {index}");
        let cancelled = ends.iter().any(|(_, reason)| *reason == FinishReason::Cancelled);
        assert_eq!(cancelled, index != 1, "request {index}");
    }
    let began = Instant::now();
    started.handle.unload_adapter("a").unwrap();
    started.handle.settle();
    assert!(began.elapsed() < Duration::from_secs(2));
    let metrics = started.handle.metrics();
    assert_eq!((metrics.adapter_memory.block_bytes, metrics.kv_blocks_used), (0, 0));
    assert!(started.handle.adapters().is_empty(), "a reference is left");
    serving::ask_all(&started, &[Ask::greedy(&prompt(), None, 2)]).unwrap();
    stop(started);
}

/// C14: a busy adapter kept the only slot. The bound: who waits for a slot sees the answers that were asked
/// before it, `max_overtakes` that pass it, and no more.
#[test]
fn c14_a_busy_adapter_cannot_keep_the_only_slot() {
    const OUTSTANDING: usize = 6;
    const OVERTAKES: usize = 3;
    let _alone = alone();
    let one_slot = EngineConfig { max_seqs: 4, max_overtakes: OVERTAKES, ..settings(1) };
    let started = engine(&one_slot);
    for (name, seed) in [("busy", 5), ("late", 6)] {
        started.handle.load_factors(name, &factors(seed, 8)).unwrap();
    }
    let (sender, events) = channel();
    let ask = |name: &'static str| {
        let sender = sender.clone();
        let sink: Sink = Box::new(move |event| {
            let _ = sender.send((name, event));
            Delivery::Ok
        });
        let adapter = Some(name.to_owned());
        submit(&started, Request { adapter, max_new_tokens: 5, ..Request::new(prompt(), sink) });
    };
    (0..OUTSTANDING).for_each(|_| ask("busy"));
    let (mut answers, mut asked_at) = (0, None);
    for (name, event) in &events {
        match event {
            Event::Finished { .. } if name == "busy" => {
                answers += 1;
                assert!(answers < 200, "the late one never ran");
                ask("busy");
                if answers == 20 {
                    asked_at = Some(answers);
                    ask("late");
                }
            }
            Event::Token { .. } if name == "late" => break,
            Event::Failed { error } => panic!("{name}: {error}"),
            _ => {}
        }
    }
    let passed = answers - asked_at.unwrap();
    assert!(passed <= OUTSTANDING + OVERTAKES, "{passed} answers came first");
    stop(started);
}
