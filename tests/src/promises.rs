//! Promises of a step, asserted from the device's counters on every backend that runs a whole model.

use std::collections::BTreeSet;
use std::time::Duration;

use amphora_engine::{AdapterConfig, EngineConfig, KvSize, Profiling, SamplingParams, Shutdown};
use amphora_hal::{Backend, DType, OpKind};

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
    started.handle.shutdown(Shutdown::Drain);
    started.thread.join().expect("a clean end");
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
