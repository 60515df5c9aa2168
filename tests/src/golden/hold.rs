//! Holding a backend's engine against the stored sets: base and every adapter, every prompt.

use amphora_engine::{AdapterConfig, EngineConfig, KvSize, PrefixCaching, Shutdown, Started};
use amphora_hal::{Backend, DType, DeviceConfig};
use anyhow::{Context, Result, ensure};

use super::{
    F32_TOLERANCE, PROMPTS, Prompt, Run, adapters, divergence, folder, log_softmax, worst,
};
use crate::serving::{self, Answer, Ask};

/// Whether a row's bits may depend on its batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchBits {
    /// Alone, mixed and chunked give the same bits: the CPU's law.
    Same,
    /// Each is within the tolerance of what is stored.
    Near,
}

/// Of the golden README: as many greedy tokens are stored.
const GREEDY: usize = 24;

/// Positions of a cache block where blocks are to be taken and found again in short prompts.
const SMALL_BLOCK: usize = 4;

fn started<B: Backend>(
    config: &DeviceConfig,
    model: &str,
    dtype: DType,
    chunk: Option<usize>,
    adapters: &[String],
) -> Result<Started> {
    started_with::<B>(config, model, dtype, &settings(chunk), adapters)
}

fn settings(chunk: Option<usize>) -> EngineConfig {
    EngineConfig {
        max_seqs: 64,
        chunk,
        kv: KvSize::Bytes(32 << 20),
        prompt_logit_rows: 128,
        adapters: Some(AdapterConfig { arena_bytes: 16 << 20, ..AdapterConfig::default() }),
        ..EngineConfig::default()
    }
}

fn started_with<B: Backend>(
    config: &DeviceConfig,
    model: &str,
    dtype: DType,
    settings: &EngineConfig,
    adapters: &[String],
) -> Result<Started> {
    let device = B::open(config)?;
    let folder = folder();
    let started = serving::start(device, &folder.join("models").join(model), dtype, settings)?;
    serving::load_adapters(&started, &folder.join("adapters").join(model), adapters)?;
    Ok(started)
}

fn stop(started: Started) -> Result<()> {
    started.handle.shutdown(Shutdown::Drain);
    Ok(started.thread.join()?)
}

/// Every prompt of the base and of each of `adapters`, with what is stored of it.
fn cases(model: &str, adapters: &[String]) -> Result<Vec<(String, Ask, Prompt)>> {
    let mut cases = Vec::new();
    let names = std::iter::once(None).chain(adapters.iter().map(|name| Some(name.as_str())));
    for run in names.map(|name| Run::read(model, name)) {
        let run = run?;
        for name in PROMPTS {
            let prompt = run.prompt(name)?;
            let ask = Ask {
                prompt_logits: true,
                ..Ask::greedy(&prompt.tokens, run.adapter.as_deref(), GREEDY)
            };
            let adapter = run.adapter.as_deref().unwrap_or("base");
            cases.push((format!("{model}/{adapter}/{name}"), ask, prompt));
        }
    }
    Ok(cases)
}

/// The f32 rule of the golden README.
fn check_f32(name: &str, answer: &Answer, want: &Prompt) -> Result<()> {
    let got = &answer.prompt_logits[want.logits_start * want.vocab..];
    let (off, at) = worst(got, &want.logits);
    ensure!(off <= F32_TOLERANCE, "{name}: logit {at} is off by {off}");
    check_greedy(name, answer, want)
}

fn check_greedy(name: &str, answer: &Answer, want: &Prompt) -> Result<()> {
    ensure!(answer.ids == want.greedy_ids, "{name}: {:?} for {:?}", answer.ids, want.greedy_ids);
    let (off, at) = worst(&answer.logprobs, &want.greedy_logprobs);
    ensure!(off <= F32_TOLERANCE, "{name}: log-probability {at} is off by {off}");
    Ok(())
}

/// Holds one model's set in f32, base and every adapter: mixed in each chunking against the stored
/// values, and alone against the bits of the mixed batch.
///
/// # Errors
/// The first difference, or the engine's own.
pub fn hold_f32<B: Backend>(config: &DeviceConfig, model: &str, bits: BatchBits) -> Result<()> {
    let adapters = &adapters(model)?;
    let cases = cases(model, adapters)?;
    let asks: Vec<Ask> = cases.iter().map(|(_, ask, _)| ask.clone()).collect();
    let mut whole: Option<Vec<Answer>> = None;
    for chunk in [None, Some(1), Some(3), Some(16)] {
        let started = started::<B>(config, model, DType::F32, chunk, adapters)?;
        let mixed = serving::ask_all(&started, &asks)?;
        for ((name, _, want), answer) in cases.iter().zip(&mixed) {
            check_f32(&format!("{name} in chunks of {chunk:?}"), answer, want)?;
        }
        for ((name, ask, want), mixed) in cases.iter().zip(&mixed) {
            let alone = serving::ask_all(&started, std::slice::from_ref(ask))?;
            check_f32(&format!("{name} alone, in chunks of {chunk:?}"), &alone[0], want)?;
            ensure!(
                bits == BatchBits::Near || alone[0].bits() == mixed.bits(),
                "{model} {:?}: alone and mixed differ by a bit, in chunks of {chunk:?}",
                ask.adapter
            );
        }
        match &whole {
            None => whole = Some(mixed),
            Some(whole) => {
                for ((name, _, _), (a, b)) in cases.iter().zip(whole.iter().zip(&mixed)) {
                    ensure!(
                        bits == BatchBits::Near || a.bits() == b.bits(),
                        "{name}: chunks of {chunk:?} change a bit"
                    );
                }
            }
        }
        stop(started)?;
    }
    Ok(())
}

/// The set in f32 with a cache so small that sequences lose their blocks on the way.
///
/// # Errors
/// As [`hold_f32`], or nothing was preempted.
pub fn hold_preempted<B: Backend>(config: &DeviceConfig, model: &str) -> Result<()> {
    let adapters = adapters(model)?;
    let cases = cases(model, &adapters)?;
    let asks: Vec<Ask> = cases.iter().map(|(_, ask, _)| ask.clone()).collect();
    let blocks = |ask: &Ask| (ask.prompt.len() + ask.max_new_tokens).div_ceil(SMALL_BLOCK);
    let most = asks.iter().map(blocks).max().context("no case")?;
    let settings = EngineConfig {
        block_size: SMALL_BLOCK,
        kv: KvSize::Blocks(most + most / 2),
        ..settings(Some(16))
    };
    let started = started_with::<B>(config, model, DType::F32, &settings, &adapters)?;
    let answers = serving::ask_all(&started, &asks)?;
    for ((name, _, want), answer) in cases.iter().zip(&answers) {
        check_f32(&format!("{name} with preemption"), answer, want)?;
    }
    started.handle.settle();
    ensure!(started.handle.metrics().preemptions > 0, "{model}: nothing was preempted");
    stop(started)
}

/// The greedy answers in f32 where the prompts' keys and values come from the cache.
///
/// # Errors
/// As [`hold_f32`], or not all that could come from the cache did.
pub fn hold_prefix_hits<B: Backend>(config: &DeviceConfig, model: &str) -> Result<()> {
    let adapters = adapters(model)?;
    let cases = cases(model, &adapters)?;
    let asks: Vec<Ask> =
        cases.iter().map(|(_, ask, _)| Ask { prompt_logits: false, ..ask.clone() }).collect();
    let settings = EngineConfig { block_size: SMALL_BLOCK, ..settings(None) };
    let started = started_with::<B>(config, model, DType::F32, &settings, &adapters)?;
    serving::ask_all(&started, &asks)?;
    let answers = serving::ask_all(&started, &asks)?;
    for ((name, ask, want), answer) in cases.iter().zip(&answers) {
        let (_, usage) = answer.finished.context("it ended")?;
        let most = (ask.prompt.len() - 1) / SMALL_BLOCK * SMALL_BLOCK;
        ensure!(usage.cached == most, "{name}: {usage:?} for {most} tokens in the cache");
        check_greedy(&format!("{name} from the cache"), answer, want)?;
    }
    stop(started)
}

/// Three greedy answers in f32 to each prompt, which share its blocks: each is the stored one.
///
/// # Errors
/// As [`hold_f32`].
pub fn hold_forks<B: Backend>(config: &DeviceConfig, model: &str) -> Result<()> {
    let adapters = adapters(model)?;
    let cases = cases(model, &adapters)?;
    let asks: Vec<Ask> =
        cases.iter().map(|(_, ask, _)| Ask { n: 3, prompt_logits: false, ..ask.clone() }).collect();
    // Without the prefix cache, so that what is shared is shared by forks.
    let settings = EngineConfig {
        block_size: SMALL_BLOCK,
        prefix_caching: PrefixCaching::Off,
        ..settings(None)
    };
    let started = started_with::<B>(config, model, DType::F32, &settings, &adapters)?;
    for ((name, _, want), answers) in cases.iter().zip(serving::ask_choices(&started, &asks)?) {
        for (choice, answer) in answers.iter().enumerate() {
            check_greedy(&format!("{name}, answer {choice}"), answer, want)?;
        }
    }
    stop(started)
}

/// Log-probabilities in f32 of the prompt's tokens, of the drawn and of the likeliest, against those of the
/// stored logits, as close as logits are. Where a device replays graphs, those of the answer come behind one.
///
/// # Errors
/// As [`hold_f32`].
pub fn hold_logprobs<B: Backend>(config: &DeviceConfig, model: &str) -> Result<()> {
    const TOP: usize = 5;
    let adapters = adapters(model)?;
    let cases = cases(model, &adapters)?;
    let told = |ask: &Ask| Ask {
        prompt_logits: false,
        prompt_logprobs: Some(TOP),
        top: TOP,
        ..ask.clone()
    };
    let asks: Vec<Ask> = cases.iter().map(|(_, ask, _)| told(ask)).collect();
    let started = started::<B>(config, model, DType::F32, None, &adapters)?;
    let near = |got: f32, want: f64| (f64::from(got) - want).abs() <= f64::from(F32_TOLERANCE);
    for ((name, ask, want), answer) in cases.iter().zip(serving::ask_all(&started, &asks)?) {
        ensure!(
            answer.prompt_logprobs.len() == ask.prompt.len() - 1,
            "{name}: positions are missing"
        );
        for (position, row) in (want.logits_start..).zip(want.logits.chunks(want.vocab)) {
            let of_row = log_softmax(row);
            let mut ranked = of_row.clone();
            ranked.sort_by(|a, b| b.total_cmp(a));
            let top = match answer.prompt_logprobs.get(position) {
                Some(told) => {
                    let token = told.token;
                    ensure!(
                        token.id == ask.prompt[position + 1],
                        "{name}: {token:?} at {position}"
                    );
                    ensure!(near(token.logprob, of_row[token.id as usize]), "{name}: {token:?}");
                    &told.top
                }
                // The last row is where the answer's first token is drawn.
                None => &answer.top[0],
            };
            ensure!(top.len() == TOP, "{name}: {} of {TOP} are told", top.len());
            for (one, best) in top.iter().zip(&ranked) {
                let sound = near(one.logprob, *best) && near(one.logprob, of_row[one.id as usize]);
                ensure!(sound, "{name}: {one:?} at {position}, {best} is there");
            }
        }
        check_greedy(name, &answer, want)?;
        for (i, top) in answer.top.iter().enumerate() {
            let drawn = (answer.ids[i], answer.logprobs[i]);
            ensure!((top[0].id, top[0].logprob) == drawn, "{name}: {:?} for {drawn:?}", top[0]);
        }
    }
    stop(started)
}

/// The stored mixed batch: another adapter for each sequence, as its file lists them.
///
/// # Errors
/// As [`hold_f32`].
pub fn hold_mixed_batch<B: Backend>(config: &DeviceConfig, model: &str) -> Result<()> {
    let path = folder().join("expected").join(model).join("mixed_batch.json");
    let batch: serde_json::Value = serde_json::from_slice(&std::fs::read(&path)?)?;
    let (mut asks, mut wants) = (Vec::new(), Vec::new());
    for sequence in batch["sequences"].as_array().context("sequences")? {
        let adapter = sequence["adapter"].as_str();
        let want =
            Run::read(model, adapter)?.prompt(sequence["prompt"].as_str().context("prompt")?)?;
        asks.push(Ask { prompt_logits: true, ..Ask::greedy(&want.tokens, adapter, GREEDY) });
        wants.push(want);
    }
    let started = started::<B>(config, model, DType::F32, None, &adapters(model)?)?;
    for (i, (answer, want)) in serving::ask_all(&started, &asks)?.iter().zip(&wants).enumerate() {
        check_f32(&format!("{model} mixed batch, sequence {i}"), answer, want)?;
    }
    stop(started)
}

/// The bf16 rule: teacher-forced, median KL at most 0.01, and the largest logit the same one at 85 %
/// of the positions of prompts of 7 tokens or more.
///
/// # Errors
/// As [`hold_f32`].
pub fn hold_bf16<B: Backend>(config: &DeviceConfig, model: &str) -> Result<()> {
    let adapters = adapters(model)?;
    let cases = cases(model, &adapters)?;
    let asks: Vec<Ask> = cases.iter().map(|(_, ask, _)| ask.clone()).collect();
    let started = started::<B>(config, model, DType::BF16, None, &adapters)?;
    let answers = serving::ask_all(&started, &asks)?;
    for ((name, _, want), answer) in cases.iter().zip(&answers) {
        let got = &answer.prompt_logits[want.logits_start * want.vocab..];
        let rows = divergence(got, &want.logits, want.vocab);
        let mut kls: Vec<f64> = rows.iter().map(|(kl, _)| *kl).collect();
        kls.sort_by(f64::total_cmp);
        let median = kls[kls.len() / 2];
        ensure!(median <= 0.01, "{name}: median KL {median}");
        if want.tokens.len() >= 7 {
            let same = rows.iter().filter(|(_, same)| *same).count();
            let share = same as f64 / rows.len() as f64;
            ensure!(share >= 0.85, "{name}: the largest logit agrees at {share:.3} of positions");
        }
    }
    stop(started)
}
