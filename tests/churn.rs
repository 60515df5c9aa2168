//! Adapters of unlike ranks loaded, replaced, unloaded and asked for at once, with too little room for
//! them: every answer is, bit for bit, what its version of the adapter answers alone.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use amphora_backend_cpu::Cpu;
use amphora_engine::{
    AdapterConfig, AdapterKey, Delivery, EngineConfig, EosRule, Event, FinishReason, LookAhead,
    Request, RequestId, Shutdown, Sink, Started, StopRules,
};
use amphora_hal::{DType, Device, DeviceConfig};
use amphora_model::adapter::AdapterBase;
use amphora_model::{Config, ModelFiles};
use amphora_tests::rng::Rng;
use amphora_tests::seeded::adapter;
use amphora_tests::{golden, serving};

const RANKS: [usize; 7] = [1, 3, 8, 9, 17, 255, 256];

fn engine(slots: usize, arena_bytes: usize) -> Started {
    let settings = EngineConfig {
        max_seqs: 6,
        max_batch_tokens: 24,
        adapters: Some(AdapterConfig { slots, arena_bytes, ..AdapterConfig::default() }),
        look_ahead: LookAhead::Always,
        max_overtakes: 2,
        ..EngineConfig::default()
    };
    let device = Cpu::open(&DeviceConfig::default()).unwrap();
    serving::start(device, &golden::folder().join("models/gpt_oss"), DType::F32, &settings).unwrap()
}

type Answer = (Option<AdapterKey>, Vec<(u32, u32)>, Option<FinishReason>);

fn submit(
    started: &Started,
    prompt: &[u32],
    adapter: Option<&str>,
) -> (RequestId, Receiver<Event>) {
    let (sender, events) = channel();
    let sink: Sink = Box::new(move |event| match sender.send(event) {
        Ok(()) => Delivery::Ok,
        Err(_) => Delivery::Gone,
    });
    let id = started.handle.submit(Request {
        adapter: adapter.map(str::to_owned),
        max_new_tokens: 5,
        stop: StopRules { eos_rule: EosRule::Ignore, ..StopRules::default() },
        logprobs: Some(0),
        ..Request::new(prompt.to_vec(), sink)
    });
    (id.unwrap(), events)
}

/// `None` where the name was gone.
fn answer(events: &Receiver<Event>) -> Option<Answer> {
    let mut answer = (None, Vec::new(), None);
    loop {
        match events.recv_timeout(Duration::from_secs(60)).expect("every request ends") {
            Event::Started { adapter } => answer.0 = adapter,
            Event::Token { id, logprob, .. } => answer.1.push((id, logprob.unwrap().to_bits())),
            Event::Finished { reason, .. } => {
                answer.2 = Some(reason);
                return Some(answer);
            }
            Event::Failed { .. } => return None,
            Event::PromptLogits { .. } | Event::PromptLogprobs { .. } => {}
        }
    }
}

fn churn(slots: usize, arena_bytes: usize, seed: u64) {
    let files = ModelFiles::open(&golden::folder().join("models/gpt_oss")).unwrap();
    let base = AdapterBase::from(&Config::read(&files).unwrap());
    let factors: Vec<_> =
        RANKS.iter().enumerate().map(|(i, &rank)| adapter(&base, i as u64, rank)).collect();
    let prompts: Vec<Vec<u32>> = (0..4)
        .map(|p| (0..3 + 11 * p).map(|i| 5 + ((i * 37 + p * 91) % 390) as u32).collect())
        .collect();

    let alone = engine(1, 64 << 20);
    let mut expected = BTreeMap::new();
    for content in 0..=factors.len() {
        let name = factors.get(content).map(|factors| {
            alone.handle.load_factors("alone", factors).unwrap();
            "alone"
        });
        for (p, prompt) in prompts.iter().enumerate() {
            let (_, events) = submit(&alone, prompt, name);
            expected.insert((content, p), answer(&events).unwrap().1);
        }
    }
    alone.handle.shutdown(Shutdown::Drain);
    alone.thread.join().unwrap();
    let distinct: std::collections::BTreeSet<_> =
        expected.iter().filter(|((_, p), _)| *p == 0).map(|(_, answer)| answer).collect();
    assert_eq!(distinct.len(), factors.len() + 1, "the adapters answer unlike each other");

    let crowded = engine(slots, arena_bytes);
    let mut rng = Rng::new(seed, "churn");
    let mut contents = BTreeMap::new();
    let (mut asked, mut checked) = (Vec::new(), 0);
    let names = ["a", "b/c", "gpt_oss", "d"];
    for round in 0..150 {
        let name = names[rng.below(names.len())];
        match rng.below(10) {
            0 | 1 => {
                let content = rng.below(factors.len());
                // One that is too large for the arena is refused, and changes nothing.
                if let Ok(key) = crowded.handle.load_factors(name, &factors[content]) {
                    contents.insert(key, content);
                }
            }
            2 => drop(crowded.handle.unload_adapter(name)),
            _ => {
                let p = rng.below(prompts.len());
                let adapter = (rng.below(5) > 0).then_some(name);
                let (id, events) = submit(&crowded, &prompts[p], adapter);
                let cancelled = rng.below(8) == 0;
                if cancelled {
                    crowded.handle.cancel(id);
                }
                asked.push((p, adapter.is_some(), cancelled, events));
            }
        }
        if round % 40 == 39 {
            for (p, adapted, cancelled, events) in asked.drain(..) {
                let Some((key, tokens, reason)) = answer(&events) else {
                    assert!(adapted, "only a name can be gone");
                    continue;
                };
                assert_eq!(key.is_some(), adapted);
                let content = key.map_or(factors.len(), |key| contents[&key]);
                let want = &expected[&(content, p)];
                match reason {
                    Some(FinishReason::Length) => assert_eq!(&tokens, want),
                    _ => assert!(cancelled && want.starts_with(&tokens)),
                }
                checked += 1;
            }
        }
    }
    crowded.handle.shutdown(Shutdown::Now);
    crowded.thread.join().unwrap();
    for (_, _, _, events) in asked {
        answer(&events);
    }
    assert!(checked > 20, "{checked}");
}

#[test]
fn one_slot() {
    churn(1, 64 << 20, 1);
}

#[test]
fn three_slots_and_room_for_one_or_two() {
    churn(3, 9 << 20, 2);
}

#[test]
fn the_largest_never_fit() {
    churn(4, 2 << 20, 3);
}
