//! A serving trace: requests of the demo model arrive by a Poisson process, each with an adapter drawn by
//! Zipf's law, and the engine answers them. Prints tokens per second, time to the first token and time between
//! tokens against the number of adapters.
//!
//! `cargo bench -p amphora-benches --bench trace [-- REQUESTS [PER_SECOND]]`. The trace follows from a seed; the n-th
//! request has the same prompt and the same length whatever the number of adapters.

use std::path::Path;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use amphora_backend_cpu::Cpu;
use amphora_engine::{
    AdapterConfig, Delivery, EngineConfig, EosRule, Event, PrefixCaching, Request, Shutdown,
    Started, StopRules,
};
use amphora_hal::{DType, Device, DeviceConfig};
use amphora_model::source::Source;
use amphora_tests::rng::Rng;
use amphora_tests::serving;
use anyhow::{Context, Result, bail};

/// Adapters that the trace is run with, one number after the other.
const ADAPTERS: [usize; 5] = [0, 1, 4, 16, 64];
const SEED: u64 = 20_261_130;
/// The demo's adapters; those of a trace take turns among them, each loaded as its own.
const FOLDERS: [&str; 6] = ["json", "math", "pirate", "reverse", "spanish", "sql"];

/// One request of a trace.
#[derive(Debug)]
struct Arrival {
    /// Since the trace began.
    at: Duration,
    prompt: Vec<u32>,
    new: usize,
    /// In [0, 1): which adapter, by [`zipf`].
    draw: f64,
}

fn trace(requests: usize, per_second: f64, vocab: usize) -> Vec<Arrival> {
    let mut rng = Rng::new(SEED, "trace");
    let mut at = 0.0;
    let arrivals = (0..requests).map(|_| {
        at -= rng.unit().ln() / per_second;
        let length = 32 + rng.below(225);
        Arrival {
            at: Duration::from_secs_f64(at),
            prompt: (0..length).map(|_| 3 + rng.below(vocab - 3) as u32).collect(),
            new: 16 + rng.below(49),
            draw: rng.unit(),
        }
    });
    arrivals.collect()
}

/// The rank that `draw` falls on among `count`, the n-th weighing 1/n; from 0.
fn zipf(count: usize, draw: f64) -> usize {
    let total: f64 = (1..=count).map(|n| 1.0 / n as f64).sum();
    let mut reached = 0.0;
    let found = (1..=count).position(|n| {
        reached += 1.0 / n as f64;
        draw * total < reached
    });
    found.unwrap_or(count - 1)
}

/// What a client saw.
#[derive(Debug, Default)]
struct Seen {
    first: Vec<Duration>,
    between: Vec<Duration>,
    tokens: usize,
    took: Duration,
    most_adapters: usize,
}

fn run(started: &Started, names: &[String], trace: &[Arrival]) -> Result<Seen> {
    let (sender, events) = channel();
    let begin = Instant::now();
    for (index, arrival) in trace.iter().enumerate() {
        std::thread::sleep((begin + arrival.at).saturating_duration_since(Instant::now()));
        let sender = sender.clone();
        let sink = Box::new(move |event| match sender.send((index, Instant::now(), event)) {
            Ok(()) => Delivery::Ok,
            Err(_) => Delivery::Gone,
        });
        started.handle.submit(Request {
            adapter: (!names.is_empty()).then(|| names[zipf(names.len(), arrival.draw)].clone()),
            max_new_tokens: arrival.new,
            stop: StopRules { eos_rule: EosRule::Ignore, ..StopRules::default() },
            ..Request::new(arrival.prompt.clone(), sink)
        })?;
    }
    drop(sender);
    let mut seen = Seen::default();
    let mut last: Vec<Option<Instant>> = vec![None; trace.len()];
    while let Ok((index, at, event)) = events.recv() {
        match event {
            Event::Token { .. } => {
                match last[index].replace(at) {
                    Some(before) => seen.between.push(at - before),
                    None => seen.first.push(at.saturating_duration_since(begin + trace[index].at)),
                }
                seen.tokens += 1;
                seen.took = seen.took.max(at - begin);
            }
            Event::Failed { error, .. } => bail!("request {index}: {error}"),
            _ => {}
        }
    }
    seen.most_adapters = started.handle.metrics().most_mixed.adapters;
    Ok(seen)
}

/// The share-th of `times`, in milliseconds.
fn percentile(times: &mut [Duration], share: f64) -> f64 {
    times.sort_unstable();
    let at = (share * (times.len().max(1) - 1) as f64).round() as usize;
    times.get(at).map_or(0.0, |time| 1e3 * time.as_secs_f64())
}

fn main() -> Result<()> {
    let numbers: Vec<f64> = std::env::args().filter_map(|text| text.parse().ok()).collect();
    let requests = numbers.first().map_or(300, |count| *count as usize);
    let per_second = numbers.get(1).copied().unwrap_or(60.0);
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo-model");
    println!(
        "{requests} requests, {per_second} a second; prompts of 32 to 256 tokens, answers of 16 to 64\n"
    );
    println!(
        "| adapters | most in a step | tokens/s | first token p50, p99, ms | between tokens p50, p99, ms |"
    );
    println!("|---|---|---|---|---|");
    for count in ADAPTERS {
        let device = Cpu::open(&DeviceConfig::default())?;
        let settings = EngineConfig {
            adapters: Some(AdapterConfig { slots: 64, ..AdapterConfig::default() }),
            prefix_caching: PrefixCaching::Off,
            ..EngineConfig::default()
        };
        let started = serving::start(device, &demo, DType::BF16, &settings)?;
        let names: Vec<String> = (0..count).map(|index| format!("tenant-{index}")).collect();
        for (index, name) in names.iter().enumerate() {
            let folder = demo.join("adapters").join(FOLDERS[index % FOLDERS.len()]);
            started.handle.load_adapter(name, &Source::Folder(folder)).context("the demo's own")?;
        }
        let trace = trace(requests, per_second, started.handle.limits().vocab);
        let mut seen = run(&started, &names, &trace)?;
        println!(
            "| {count} | {} | {:.0} | {:.1}, {:.1} | {:.2}, {:.2} |",
            seen.most_adapters,
            seen.tokens as f64 / seen.took.as_secs_f64(),
            percentile(&mut seen.first, 0.5),
            percentile(&mut seen.first, 0.99),
            percentile(&mut seen.between, 0.5),
            percentile(&mut seen.between, 0.99),
        );
        started.handle.shutdown(Shutdown::Drain);
        started.thread.join()?;
    }
    Ok(())
}
