//! Amphora's side of `versus.py`: one engine, asked by lines of JSON on stdin, answering each with its
//! times on stdout.
//!
//! `amphora-versus MODEL f32|bf16 THREADS [NAME=ADAPTER]...`, then lines like
//! `{"prompts": [[1, 2]], "adapters": ["a"], "new": 64}`. Prefill ends when every prompt has its first
//! token; decode is the rest.

use std::io::{BufRead, Write};
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use amphora_backend_cpu::Cpu;
use amphora_engine::{
    Delivery, EngineConfig, EosRule, Event, KvSize, PrefixCaching, Request, Started, StopRules,
};
use amphora_hal::{DType, Device, DeviceConfig};
use amphora_model::source::Source;
use amphora_tests::serving;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

/// One measurement: prompts put to the engine at once.
#[derive(Debug, Deserialize)]
struct Work {
    prompts: Vec<Vec<u32>>,
    /// For each prompt; `null` is the base.
    adapters: Vec<Option<String>>,
    /// Tokens of each answer.
    new: usize,
}

/// Its times, in seconds: of the clock, and of all threads on processors.
#[derive(Debug, Serialize)]
struct Times {
    prefill: f64,
    decode: f64,
    prefill_cpu: f64,
    decode_cpu: f64,
    /// Tokens that came after prefill.
    decoded: usize,
    /// First answer, so that a reader can see that work was done.
    ids: Vec<u32>,
}

/// Time that this process's threads ran. Nothing where the system does not say.
fn cpu_time() -> Duration {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return Duration::ZERO };
    let nanoseconds = tasks.filter_map(|task| {
        let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(nanoseconds.sum())
}

fn measure(started: &Started, work: &Work) -> Result<Times> {
    ensure!(work.prompts.len() == work.adapters.len(), "one adapter for each prompt");
    let (sender, events) = channel();
    let (begin, cpu_begin) = (Instant::now(), cpu_time());
    for (index, (prompt, adapter)) in work.prompts.iter().zip(&work.adapters).enumerate() {
        let sender = sender.clone();
        let sink = Box::new(move |event| match sender.send((index, Instant::now(), event)) {
            Ok(()) => Delivery::Ok,
            Err(_) => Delivery::Gone,
        });
        started.handle.submit(Request {
            adapter: adapter.clone(),
            max_new_tokens: work.new,
            stop: StopRules { eos_rule: EosRule::Ignore, ..StopRules::default() },
            ..Request::new(prompt.clone(), sink)
        })?;
    }
    drop(sender);
    let mut waiting: Vec<bool> = vec![true; work.prompts.len()];
    let (mut first, mut cpu_first, mut end) = (begin, cpu_begin, begin);
    let (mut decoded, mut ids) = (0, Vec::new());
    while let Ok((index, at, event)) = events.recv() {
        match event {
            Event::Token { id, .. } => {
                if waiting.iter().any(|waits| *waits) {
                    waiting[index] = false;
                    first = at;
                    cpu_first = cpu_time();
                } else {
                    decoded += 1;
                }
                end = at;
                if index == 0 {
                    ids.push(id);
                }
            }
            Event::Failed { error } => bail!("prompt {index}: {error}"),
            _ => {}
        }
    }
    Ok(Times {
        prefill: (first - begin).as_secs_f64(),
        decode: (end - first).as_secs_f64(),
        prefill_cpu: (cpu_first - cpu_begin).as_secs_f64(),
        decode_cpu: (cpu_time() - cpu_first).as_secs_f64(),
        decoded,
        ids,
    })
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut next = |what| arguments.next().with_context(|| format!("{what} is missing"));
    let (model, dtype, threads) = (next("the model")?, next("the type")?, next("threads")?);
    let dtype = match dtype.as_str() {
        "f32" => DType::F32,
        "bf16" => DType::BF16,
        _ => bail!("{dtype}: f32 or bf16 is expected"),
    };
    let threads = Some(threads.parse().context("threads")?);
    let device = Cpu::open(&DeviceConfig { threads, ..DeviceConfig::default() })?;
    // Eight prompts of 256 fit in one step, as they do in the other side's batch.
    let settings = EngineConfig {
        max_batch_tokens: 2048,
        max_model_len: Some(512),
        kv: KvSize::Blocks(8 * 32),
        // Every round computes its prompts.
        prefix_caching: PrefixCaching::Off,
        ..EngineConfig::default()
    };
    let started = serving::start(device, Path::new(&model), dtype, &settings)?;
    for argument in arguments {
        let (name, folder) = argument.split_once('=').context("NAME=ADAPTER is expected")?;
        started.handle.load_adapter(name, &Source::Folder(folder.into()))?;
    }
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let times = measure(&started, &serde_json::from_str(&line?)?)?;
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(&times)?)?;
        out.flush()?;
    }
    Ok(())
}
