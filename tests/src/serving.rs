//! Requests put to a real engine, and what came back, for end-to-end tests.

use std::sync::mpsc::{Receiver, channel};

use amphora_engine::{
    Delivery, EngineConfig, EosRule, Event, FinishReason, ModelSource, PromptLogprob, Request,
    SamplingParams, Sink, Started, StopRules, TokenLogprob, Usage, Want,
};
use amphora_hal::{Backend, DType};
use amphora_model::source::Source;
use amphora_model::{Config, ModelFiles};
use anyhow::{Context, Result, bail};

/// What one request asks.
#[derive(Debug, Clone)]
pub struct Ask {
    /// Token ids.
    pub prompt: Vec<u32>,
    /// `None` is the base.
    pub adapter: Option<String>,
    /// Answers.
    pub n: usize,
    /// Length of an answer; end-of-sequence tokens are ignored.
    pub max_new_tokens: usize,
    /// Logits of every prompt position.
    pub prompt_logits: bool,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// What is added to logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// The likeliest tokens that are told beside each of an answer.
    pub top: usize,
    /// And beside each of the prompt.
    pub prompt_logprobs: Option<usize>,
}

impl Ask {
    /// Greedy, without prompt logits.
    pub fn greedy(prompt: &[u32], adapter: Option<&str>, max_new_tokens: usize) -> Self {
        Ask {
            prompt: prompt.to_vec(),
            adapter: adapter.map(str::to_owned),
            n: 1,
            max_new_tokens,
            prompt_logits: false,
            sampling: SamplingParams::default(),
            logit_bias: Vec::new(),
            top: 0,
            prompt_logprobs: None,
        }
    }
}

/// A whole answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Their log-probabilities.
    pub logprobs: Vec<f32>,
    /// The likeliest in the place of each.
    pub top: Vec<Vec<TokenLogprob>>,
    /// `[prompt positions, vocab]`, if asked for.
    pub prompt_logits: Vec<f32>,
    /// Those of the prompt's tokens from the second on, if asked for.
    pub prompt_logprobs: Vec<PromptLogprob>,
    /// How it ended.
    pub finished: Option<(FinishReason, Usage)>,
}

impl Answer {
    /// Its bits: what "the same answer" means on the CPU.
    pub fn bits(&self) -> (Vec<u32>, Vec<u32>, Vec<u32>, Vec<u32>) {
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect();
        let pair = |told: &TokenLogprob| [told.id, told.logprob.to_bits()];
        let mut told: Vec<u32> = self.top.iter().flatten().flat_map(pair).collect();
        for one in &self.prompt_logprobs {
            told.extend(pair(&one.token));
            told.push(one.rank);
            told.extend(one.top.iter().flat_map(pair));
        }
        (self.ids.clone(), bits(&self.logprobs), bits(&self.prompt_logits), told)
    }
}

/// Starts an engine on a model folder.
///
/// # Errors
/// As the engine's start.
pub fn start<B: Backend>(
    device: B,
    folder: &std::path::Path,
    dtype: DType,
    settings: &EngineConfig,
) -> Result<Started> {
    start_files(device, &ModelFiles::open(folder)?, dtype, settings)
}

/// The same on files wherever they are.
///
/// # Errors
/// As the engine's start.
pub fn start_files<B: Backend>(
    device: B,
    files: &ModelFiles,
    dtype: DType,
    settings: &EngineConfig,
) -> Result<Started> {
    let config = Config::read(files)?;
    let model = ModelSource { files, config, dtype };
    Ok(amphora_engine::start(device, model, settings, &mut |_| {})?)
}

/// Loads adapter folders under the names of their folders.
///
/// # Errors
/// One is refused.
pub fn load_adapters(started: &Started, folder: &std::path::Path, names: &[String]) -> Result<()> {
    for name in names {
        let source = Source::Folder(folder.join(name));
        started.handle.load_adapter(name, &source).with_context(|| name.clone())?;
    }
    Ok(())
}

/// Puts all requests to the engine at once and waits for the one answer of each.
///
/// # Errors
/// A request is refused or fails, or asks for several answers.
pub fn ask_all(started: &Started, asks: &[Ask]) -> Result<Vec<Answer>> {
    anyhow::ensure!(asks.iter().all(|ask| ask.n == 1), "one answer each is expected");
    Ok(ask_choices(started, asks)?.into_iter().flatten().collect())
}

/// Puts all requests to the engine at once and waits for all answers of each.
///
/// # Errors
/// A request is refused or fails.
pub fn ask_choices(started: &Started, asks: &[Ask]) -> Result<Vec<Vec<Answer>>> {
    let (sender, events) = channel();
    for (index, ask) in asks.iter().enumerate() {
        let sender = sender.clone();
        let want = |wanted| if wanted { Want::Yes } else { Want::No };
        let sink: Sink = Box::new(move |event| match sender.send((index, event)) {
            Ok(()) => Delivery::Ok,
            Err(_) => Delivery::Gone,
        });
        started.handle.submit(Request {
            adapter: ask.adapter.clone(),
            n: ask.n,
            sampling: ask.sampling,
            max_new_tokens: ask.max_new_tokens,
            stop: StopRules { eos_rule: EosRule::Ignore, ..StopRules::default() },
            logit_bias: ask.logit_bias.clone(),
            logprobs: Some(ask.top),
            prompt_logprobs: ask.prompt_logprobs,
            prompt_logits: want(ask.prompt_logits),
            ..Request::new(ask.prompt.clone(), sink)
        })?;
    }
    drop(sender);
    collect(&events, asks)
}

fn collect(events: &Receiver<(usize, Event)>, asks: &[Ask]) -> Result<Vec<Vec<Answer>>> {
    let mut answers: Vec<Vec<Answer>> =
        asks.iter().map(|ask| vec![Answer::default(); ask.n]).collect();
    while let Ok((index, event)) = events.recv() {
        let answers = &mut answers[index];
        match event {
            Event::Started { .. } => {}
            Event::PromptLogprobs { first_position, tokens } => {
                let answer = &mut answers[0];
                anyhow::ensure!(
                    answer.prompt_logprobs.len() + 1 == first_position,
                    "log-probabilities of position {first_position} came out of turn"
                );
                answer.prompt_logprobs.extend(tokens);
            }
            Event::Token { choice, id, logprob, top, .. } => {
                let answer = &mut answers[choice];
                anyhow::ensure!(answer.finished.is_none(), "request {index} goes on past its end");
                answer.ids.push(id);
                answer.top.push(top);
                answer.logprobs.push(logprob.context("a log-probability was asked for")?);
            }
            Event::PromptLogits { first_position, vocab, rows } => {
                let answer = &mut answers[0];
                anyhow::ensure!(
                    answer.prompt_logits.len() == first_position * vocab,
                    "logits of position {first_position} came out of turn"
                );
                answer.prompt_logits.extend(rows);
            }
            Event::Finished { choice, reason, usage } => {
                let answer = &mut answers[choice];
                anyhow::ensure!(answer.finished.is_none(), "request {index} ended twice");
                answer.finished = Some((reason, usage));
            }
            Event::Failed { error } => bail!("request {index}: {error}"),
        }
    }
    let open = |answers: &Vec<Answer>| answers.iter().any(|answer| answer.finished.is_none());
    match answers.iter().position(open) {
        Some(index) => bail!("request {index} never ended"),
        None => Ok(answers),
    }
}
