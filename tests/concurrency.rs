//! Concurrency changes nothing on the CPU: eight adapters × 20 prompts, 64 in flight, in any order, with too
//! few slots and a third of the cache, some drawn, some under penalties, some with several answers: every answer is, bit for bit, the one its request gets alone.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use amphora_backend_cpu::Cpu;
use amphora_engine::{
    AdapterConfig, EngineConfig, KvSize, LookAhead, PrefixCaching, SamplingParams, Shutdown,
    Started, choice_seed,
};
use amphora_hal::{DType, Device, DeviceConfig};
use amphora_model::adapter::AdapterBase;
use amphora_model::{Config, ModelFiles};
use amphora_tests::golden;
use amphora_tests::rng::Rng;
use amphora_tests::seeded::adapter;
use amphora_tests::serving::{self, Answer, Ask};

const RANKS: [usize; 8] = [1, 2, 5, 8, 13, 24, 48, 64];
const PROMPTS: usize = 20;
const IN_FLIGHT: usize = 64;
const BLOCK: usize = 4;

fn started(settings: &EngineConfig) -> Started {
    let folder = golden::folder().join("models/gpt_oss");
    let base = AdapterBase::from(&Config::read(&ModelFiles::open(&folder).unwrap()).unwrap());
    let device = Cpu::open(&DeviceConfig::default()).unwrap();
    let started = serving::start(device, &folder, DType::F32, settings).unwrap();
    for (i, rank) in RANKS.into_iter().enumerate() {
        let factors = adapter(&base, i as u64, rank);
        started.handle.load_factors(&format!("tenant{i}"), &factors).unwrap();
    }
    started
}

fn stop(started: Started) {
    started.handle.shutdown(Shutdown::Drain);
    started.thread.join().unwrap();
}

/// The same prompts for every adapter, all with one beginning or another, so that what a prefix was
/// computed with shows. Some greedy, some drawn, some with several answers.
fn asks() -> Vec<Ask> {
    let mut rng = Rng::new(41, "concurrency");
    let beginnings: Vec<Vec<u32>> =
        (0..3).map(|_| (0..13).map(|_| rng.below(400) as u32).collect()).collect();
    let mut asks = Vec::new();
    for prompt in 0..PROMPTS {
        let mut tokens = beginnings[prompt % 3][..1 + rng.below(13)].to_vec();
        tokens.extend((0..rng.below(14)).map(|_| rng.below(400) as u32));
        let new = 4 + rng.below(24);
        for tenant in 0..RANKS.len() {
            let mut ask = Ask::greedy(&tokens, Some(&format!("tenant{tenant}")), new);
            if prompt % 2 == 1 {
                ask.sampling = SamplingParams {
                    temperature: 0.9,
                    top_p: 0.95,
                    seed: Some((prompt * 100 + tenant) as u64),
                    ..SamplingParams::default()
                };
                ask.n = 1 + (prompt / 2 + tenant) % 3;
            }
            match prompt % 5 {
                0 => ask.sampling.frequency_penalty = 0.7,
                1 => ask.sampling.repetition_penalty = 1.3,
                2 => ask.logit_bias = vec![(tokens[0], f32::NEG_INFINITY), (tokens[0] ^ 1, 2.5)],
                3 => (ask.top, ask.prompt_logprobs) = (3, Some(2)),
                _ => ask.prompt_logits = tenant % 2 == 0,
            }
            asks.push(ask);
        }
    }
    asks
}

/// What each answer is where its request is alone, one answer at a time.
fn alone(asks: &[Ask]) -> Vec<Vec<Answer>> {
    let adapters = Some(AdapterConfig {
        slots: 8,
        arena_bytes: 64 << 20,
        max_rank: 64,
        ..AdapterConfig::default()
    });
    let started = started(&EngineConfig {
        adapters,
        prefix_caching: PrefixCaching::Off,
        prompt_logit_rows: 32,
        ..EngineConfig::default()
    });
    let answers = asks.iter().map(|ask| {
        let one = |choice| {
            let seed = ask.sampling.seed.map(|seed| choice_seed(seed, choice));
            let sampling = SamplingParams { seed, ..ask.sampling };
            let mut lone = Ask { n: 1, sampling, ..ask.clone() };
            if choice > 0 {
                // The prompt is told once.
                (lone.prompt_logits, lone.prompt_logprobs) = (false, None);
            }
            serving::ask_all(&started, &[lone]).unwrap().remove(0)
        };
        (0..ask.n).map(one).collect()
    });
    let answers = answers.collect();
    stop(started);
    answers
}

#[test]
fn every_answer_under_pressure_equals_its_solo_answer() {
    let asks = asks();
    let solo = alone(&asks);
    let different: BTreeSet<_> =
        solo.iter().take(RANKS.len()).map(|answers| answers[0].bits()).collect();
    assert_eq!(different.len(), RANKS.len(), "the adapters answer unlike each other");

    let blocks = |ask: &Ask| (ask.prompt.len() + ask.max_new_tokens).div_ceil(BLOCK);
    let wanted: usize = asks.iter().map(|ask| ask.n * blocks(ask)).sum();
    let sequences: usize = asks.iter().map(|ask| ask.n).sum();
    // A third, and less: with two slots fewer than 64 run at most times, how many is a matter of timing.
    let kv = KvSize::Blocks(wanted * IN_FLIGHT / sequences / 8);
    for (prefix_caching, look_ahead) in
        [(PrefixCaching::On, LookAhead::WhileBusy), (PrefixCaching::Off, LookAhead::Always)]
    {
        let tight = started(&EngineConfig {
            max_seqs: IN_FLIGHT,
            max_batch_tokens: 96,
            chunk: Some(7),
            block_size: BLOCK,
            prompt_logit_rows: 24,
            prompt_logprob_rows: 16,
            logit_edits: 256,
            kv,
            prefix_caching,
            look_ahead,
            // Else two slots would keep most of them waiting, and the cache would do.
            max_overtakes: IN_FLIGHT,
            adapters: Some(AdapterConfig {
                slots: 2,
                arena_bytes: 64 << 20,
                max_rank: 64,
                ..AdapterConfig::default()
            }),
            ..EngineConfig::default()
        });
        let mut rng = Rng::new(42, "concurrency");
        for round in 0..2 {
            let order = rng.permutation(asks.len());
            let shuffled: Vec<Ask> = order.iter().map(|&i| asks[i].clone()).collect();
            let answers = serving::ask_choices(&tight, &shuffled).unwrap();
            for (&i, answers) in order.iter().zip(&answers) {
                for (choice, (answer, want)) in answers.iter().zip(&solo[i]).enumerate() {
                    assert_eq!(
                        answer.bits(),
                        want.bits(),
                        "{prefix_caching:?}, round {round}, request {i}, answer {choice}"
                    );
                }
            }
        }
        tight.handle.settle();
        let metrics = tight.handle.metrics();
        assert_eq!((metrics.running, metrics.waiting, metrics.kv_blocks_used), (0, 0, 0));
        println!("{} preemptions, {:?}", metrics.preemptions, metrics.prefix);
        assert!(metrics.preemptions > 0, "the cache was never short");
        assert_eq!(metrics.prefix.hit_tokens > 0, prefix_caching == PrefixCaching::On);
        stop(tight);
    }
}
