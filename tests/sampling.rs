//! What requests may ask of draws, against logits that the same engine tells: bias and penalties, and
//! log-probabilities of the drawn, of the likeliest and of the prompt.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used)]

use amphora_backend_cpu::Cpu;
use amphora_engine::{
    AdapterConfig, EngineConfig, SamplingParams, Shutdown, Started, TokenLogprob,
};
use amphora_hal::{DType, Device, DeviceConfig};
use amphora_tests::golden;
use amphora_tests::serving::{self, Ask};

const MODEL: &str = "gpt_oss";
/// f32 sums of exponentials over a few hundred tokens.
const TOLERANCE: f64 = 1e-5;

fn started() -> Started {
    let settings = EngineConfig {
        prompt_logit_rows: 64,
        prompt_logprob_rows: 5,
        adapters: Some(AdapterConfig { arena_bytes: 16 << 20, ..AdapterConfig::default() }),
        ..EngineConfig::default()
    };
    let device = Cpu::open(&DeviceConfig::default()).unwrap();
    let folder = golden::folder();
    let model = folder.join("models").join(MODEL);
    let started = serving::start(device, &model, DType::F32, &settings).unwrap();
    let names = ["attn_r8".to_owned()];
    serving::load_adapters(&started, &folder.join("adapters").join(MODEL), &names).unwrap();
    started
}

fn stop(started: Started) {
    started.handle.shutdown(Shutdown::Drain);
    started.thread.join().unwrap();
}

fn prompt() -> Vec<u32> {
    (0..23).map(|i| 7 + (i * 53) % 390).chain([60, 7, 60]).collect()
}

/// `[positions, vocab]` of a text.
fn logits(started: &Started, tokens: &[u32], adapter: Option<&str>) -> Vec<Vec<f32>> {
    let ask = Ask { prompt_logits: true, ..Ask::greedy(tokens, adapter, 0) };
    let answer = serving::ask_all(started, &[ask]).unwrap().remove(0);
    let vocab = answer.prompt_logits.len() / tokens.len();
    answer.prompt_logits.chunks(vocab).map(<[f32]>::to_vec).collect()
}

/// All tokens by descending log-probability, ties to the lower id, in f64.
fn ranked(row: &[f32]) -> Vec<(u32, f64)> {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|v| f64::from(v - most).exp()).sum();
    let of = |v: f32| f64::from(v - most) - sum.ln();
    let mut all: Vec<(u32, f64)> =
        row.iter().enumerate().map(|(id, &v)| (id as u32, of(v))).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all
}

fn near(got: &TokenLogprob, want: (u32, f64)) {
    assert_eq!(got.id, want.0);
    assert!((f64::from(got.logprob) - want.1).abs() <= TOLERANCE, "{got:?} for {want:?}");
}

#[test]
fn log_probabilities_are_those_of_the_logits() {
    let started = started();
    for adapter in [None, Some("attn_r8")] {
        let ask = Ask { top: 20, prompt_logprobs: Some(4), ..Ask::greedy(&prompt(), adapter, 6) };
        let answer = serving::ask_all(&started, &[ask]).unwrap().remove(0);
        let text: Vec<u32> = prompt().into_iter().chain(answer.ids.iter().copied()).collect();
        let rows: Vec<_> = logits(&started, &text, adapter).iter().map(|r| ranked(r)).collect();
        assert_eq!(answer.prompt_logprobs.len(), prompt().len() - 1);
        for (position, told) in answer.prompt_logprobs.iter().enumerate() {
            let row = &rows[position];
            let rank = row.iter().position(|(id, _)| *id == text[position + 1]).unwrap();
            near(&told.token, row[rank]);
            assert_eq!((told.rank as usize, told.top.len()), (rank + 1, 4));
            told.top.iter().zip(row).for_each(|(got, want)| near(got, *want));
        }
        for (i, id) in answer.ids.iter().enumerate() {
            let row = &rows[prompt().len() - 1 + i];
            near(&TokenLogprob { id: *id, logprob: answer.logprobs[i] }, row[0]);
            assert_eq!(answer.top[i].len(), 20);
            answer.top[i].iter().zip(row).for_each(|(got, want)| near(got, *want));
        }
    }
    stop(started);
}

/// Greedy answers, token by token, against the formula on the logits of the text so far.
#[test]
fn penalties_and_bias_act_on_logits_as_they_say() {
    let started = started();
    let plain = serving::ask_all(&started, &[Ask::greedy(&prompt(), None, 10)]).unwrap().remove(0);
    let bias = vec![(plain.ids[0], f32::NEG_INFINITY), (plain.ids[1], -1.5), (11, 0.75)];
    let base = SamplingParams::default();
    let kinds = [
        (SamplingParams { repetition_penalty: 1.8, ..base }, Vec::new()),
        (SamplingParams { presence_penalty: -6.0, ..base }, Vec::new()),
        (SamplingParams { frequency_penalty: -3.0, ..base }, Vec::new()),
        (base, bias.clone()),
        (SamplingParams { repetition_penalty: 0.7, frequency_penalty: -0.6, ..base }, bias),
    ];
    for (sampling, logit_bias) in kinds {
        let ask =
            Ask { sampling, logit_bias: logit_bias.clone(), ..Ask::greedy(&prompt(), None, 10) };
        let answer = serving::ask_all(&started, &[ask]).unwrap().remove(0);
        assert_ne!(answer.ids, plain.ids, "{sampling:?} {logit_bias:?} changes nothing");
        let text: Vec<u32> = prompt().into_iter().chain(answer.ids.iter().copied()).collect();
        let rows = logits(&started, &text, None);
        for (i, id) in answer.ids.iter().enumerate() {
            let mut row = rows[prompt().len() - 1 + i].clone();
            logit_bias.iter().for_each(|&(token, bias)| row[token as usize] += bias);
            let (before, drawn) = (&text[..prompt().len() + i], &answer.ids[..i]);
            for (token, logit) in row.iter_mut().enumerate() {
                if before.contains(&(token as u32)) {
                    let penalty = sampling.repetition_penalty;
                    *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
                }
                let count = drawn.iter().filter(|&&one| one == token as u32).count() as f32;
                *logit -= if count > 0.0 { sampling.presence_penalty } else { 0.0 };
                *logit -= sampling.frequency_penalty * count;
            }
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let likeliest = row.iter().position(|&logit| logit == most).unwrap();
            assert_eq!(*id as usize, likeliest, "token {i} under {sampling:?} {logit_bias:?}");
            let raw = ranked(&rows[prompt().len() - 1 + i]);
            let told = raw.into_iter().find(|(one, _)| one == id).unwrap();
            near(&TokenLogprob { id: *id, logprob: answer.logprobs[i] }, told);
        }
    }
    stop(started);
}

/// With min_p at 1 only the likeliest are left, whatever the temperature.
#[test]
fn min_p_of_one_is_greedy() {
    let started = started();
    let greedy = Ask::greedy(&prompt(), Some("attn_r8"), 12);
    let sampling =
        SamplingParams { temperature: 1.5, min_p: 1.0, seed: Some(5), ..SamplingParams::default() };
    let free = SamplingParams { min_p: 0.0, ..sampling };
    let asks =
        [greedy.clone(), Ask { sampling, ..greedy.clone() }, Ask { sampling: free, ..greedy }];
    let answers = serving::ask_all(&started, &asks).unwrap();
    assert_eq!(answers[0].ids, answers[1].ids);
    assert_ne!(answers[0].ids, answers[2].ids);
    stop(started);
}
