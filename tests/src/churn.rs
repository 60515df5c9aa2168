//! Adapters of unlike ranks loaded, replaced, unloaded and asked for at once, with too little room for them: every
//! answer is what its version of the adapter answers alone. On a device that works beside the host, blocks are
//! taken and given while steps are under way. One adapter overflows, and leaves what is no number in its blocks of
//! the cache, which others get.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use amphora_engine::{
    AdapterConfig, AdapterKey, Delivery, EngineConfig, EosRule, Event, FinishReason, KvSize,
    LookAhead, Request, RequestId, Shutdown, Sink, Started, StopRules,
};
use amphora_hal::{Backend, DType};
use amphora_model::adapter::{AdapterBase, AdapterFactors};
use amphora_model::{Config, ModelFiles};

use crate::golden::hold::BatchBits;
use crate::golden::{self, F32_TOLERANCE};
use crate::rng::Rng;
use crate::seeded::adapter;
use crate::serving;

const RANKS: [usize; 7] = [1, 3, 8, 9, 17, 255, 256];

/// Tokens of an answer.
const ANSWER: usize = 5;

/// Rank of the adapter whose numbers are finite and whose deltas are not.
const OVERFLOWING: usize = 16;

/// Blocks of the cache: of four requests, so that they are taken from one for another.
const KV_BLOCKS: usize = 12;

/// How little room there is, and what is done in it.
#[derive(Debug, Clone, Copy)]
pub struct Churn {
    /// Adapters on the device.
    pub slots: usize,
    /// Bytes for them.
    pub arena_bytes: usize,
    /// Of what is done.
    pub seed: u64,
    /// Whether an answer's bits may depend on its batch.
    pub bits: BatchBits,
}

fn engine<B: Backend>(device: B, slots: usize, arena_bytes: usize) -> Started {
    let settings = EngineConfig {
        max_seqs: 6,
        max_batch_tokens: 24,
        adapters: Some(AdapterConfig { slots, arena_bytes, ..AdapterConfig::default() }),
        kv: KvSize::Blocks(KV_BLOCKS),
        look_ahead: LookAhead::Always,
        max_overtakes: 2,
        ..EngineConfig::default()
    };
    let model = golden::folder().join("models/gpt_oss");
    serving::start(device, &model, DType::F32, &settings).expect("it starts")
}

/// A token, its log-probability, and how much less likely the next one was.
type Drawn = (u32, f32, f32);

/// The version, its tokens, and why they ended.
type Answer = (Option<AdapterKey>, Vec<Drawn>, Option<FinishReason>);

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
        max_new_tokens: ANSWER,
        stop: StopRules { eos_rule: EosRule::Ignore, ..StopRules::default() },
        logprobs: Some(2),
        ..Request::new(prompt.to_vec(), sink)
    });
    (id.expect("it runs"), events)
}

/// `None` where the name was gone.
fn answer(events: &Receiver<Event>) -> Option<Answer> {
    let mut answer = (None, Vec::new(), None);
    loop {
        match events.recv_timeout(Duration::from_secs(60)).expect("every request ends") {
            Event::Started { adapter } => answer.0 = adapter,
            Event::Token { id, logprob, top, .. } => {
                let gap = top[0].logprob - top[1].logprob;
                answer.1.push((id, logprob.expect("it was asked for"), gap));
            }
            Event::Finished { reason, .. } => {
                answer.2 = Some(reason);
                return Some(answer);
            }
            Event::Failed { .. } => return None,
            Event::PromptLogits { .. } | Event::PromptLogprobs { .. } => {}
        }
    }
}

/// Whether these tokens are the first of those, as two answers of one version are.
fn begins(got: &[Drawn], want: &[Drawn], bits: BatchBits) -> bool {
    let alike = |a: f32, b: f32| match bits {
        BatchBits::Same => a.to_bits() == b.to_bits(),
        BatchBits::Near => (a - b).abs() <= F32_TOLERANCE,
    };
    let same = |(got, want): (&Drawn, &Drawn)| got.0 == want.0 && alike(got.1, want.1);
    got.len() <= want.len() && got.iter().zip(want).all(same)
}

/// What each adapter, and none, answers to each prompt alone.
type Expected = BTreeMap<(Option<usize>, usize), Vec<Drawn>>;

fn solo<B: Backend>(device: B, factors: &[AdapterFactors], prompts: &[Vec<u32>]) -> Expected {
    let alone = engine(device, 1, 64 << 20);
    let mut expected = BTreeMap::new();
    let contents = || (0..factors.len()).map(Some).chain([None]);
    for content in contents() {
        let name = content.map(|content| {
            alone.handle.load_factors("alone", &factors[content]).expect("there is room");
            "alone"
        });
        for (p, prompt) in prompts.iter().enumerate() {
            let (_, events) = submit(&alone, prompt, name);
            expected.insert((content, p), answer(&events).expect("it is there").1);
        }
    }
    alone.handle.shutdown(Shutdown::Drain);
    alone.thread.join().expect("a sound device");
    for ((content, p), answer) in &expected {
        let alike = |of: &Option<usize>| begins(&expected[&(*of, *p)], answer, BatchBits::Near);
        let alike = contents().filter(|of| of != content).find(alike);
        assert_eq!(alike, None, "answers as {content:?} does to prompt {p}");
    }
    let nearest = expected.values().flatten().map(|drawn| drawn.2).fold(f32::MAX, f32::min);
    assert!(nearest > 2.0 * F32_TOLERANCE, "no choice is a near one: {nearest}");
    expected
}

/// An adapter of finite numbers whose deltas leave f32.
fn overflowing(base: &AdapterBase) -> AdapterFactors {
    let mut factors = adapter(base, RANKS.len() as u64, OVERFLOWING);
    let shrinks = factors.shrinks.iter_mut();
    for matrix in shrinks.chain(factors.modules.iter_mut().map(|module| &mut module.b)) {
        matrix.data.iter_mut().for_each(|value| *value *= 1e21);
    }
    factors
}

/// Loads, replaces, unloads, asks and cancels.
///
/// # Panics
/// An answer is not its version's, or something fails: this is a test's body.
pub fn answers_are_their_versions<B: Backend>(open: impl Fn() -> B, churn: Churn) {
    let files = ModelFiles::open(&golden::folder().join("models/gpt_oss")).expect("stored");
    let base = AdapterBase::from(&Config::read(&files).expect("sound"));
    let mut factors: Vec<_> =
        RANKS.iter().enumerate().map(|(i, &rank)| adapter(&base, i as u64, rank)).collect();
    let prompts: Vec<Vec<u32>> = (0..4)
        .map(|p| (0..3 + 11 * p).map(|i| 5 + ((i * 37 + p * 91) % 390) as u32).collect())
        .collect();
    let expected = solo(open(), &factors, &prompts);
    factors.push(overflowing(&base));

    let crowded = engine(open(), churn.slots, churn.arena_bytes);
    let mut rng = Rng::new(churn.seed, "churn");
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
                let ended = reason == Some(FinishReason::Length) && tokens.len() == ANSWER;
                assert!(ended || cancelled, "{reason:?} after {} tokens", tokens.len());
                let content = key.map(|key| contents[&key]);
                let right = match expected.get(&(content, p)) {
                    Some(want) => begins(&tokens, want, churn.bits),
                    // A row of logits without numbers gives token 0.
                    None => tokens.iter().all(|drawn| drawn.0 == 0),
                };
                assert!(right, "{content:?}, {p}: {tokens:?}");
                checked += 1;
            }
        }
    }
    crowded.handle.shutdown(Shutdown::Now);
    crowded.thread.join().expect("a sound device");
    for (_, _, _, events) in asked {
        answer(&events);
    }
    assert!(checked > 20, "{checked}");
}
