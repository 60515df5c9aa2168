//! One round: streams that begin together, and when each of their tokens came.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use amphora_engine::{Delivery, EngineHandle, EosRule, Event, Request, Sink, StopRules};
use amphora_hal::ops::split_mix64;
use anyhow::{Context, bail};

/// Whom the streams ask.
#[derive(Debug, Clone, Copy)]
pub enum Tenants<'a> {
    /// The base.
    Base,
    /// These adapters in turn.
    Mixed(&'a [String]),
}

impl Tenants<'_> {
    /// Different adapters among so many streams.
    pub fn adapters(self, streams: usize) -> usize {
        match self {
            Tenants::Base => 0,
            Tenants::Mixed(names) => names.len().min(streams),
        }
    }

    fn of(self, stream: usize) -> Option<String> {
        match self {
            Tenants::Base => None,
            Tenants::Mixed(names) => names.get(stream % names.len().max(1)).cloned(),
        }
    }
}

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub struct Load<'a> {
    pub streams: usize,
    /// Tokens of each prompt.
    pub prompt: usize,
    /// Tokens of each answer.
    pub answer: usize,
    pub vocab: usize,
    pub tenants: Tenants<'a>,
}

/// Times in milliseconds, sorted.
#[derive(Debug, Default)]
pub struct Times(Vec<f64>);

impl Times {
    pub(super) fn new(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        Self(times)
    }

    /// The time that a share `p` of all does not exceed (nearest rank); 0 of none.
    pub fn at(&self, p: f64) -> f64 {
        let rank = (p * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
    }
}

/// What came of it.
#[derive(Debug)]
pub struct Outcome {
    /// From the beginning to the first token, one for each stream.
    pub first: Times,
    /// Between two tokens of a stream, all of them.
    pub next: Times,
    pub tokens: usize,
    /// All streams together, from the beginning to the last token.
    pub tokens_per_second: f64,
}

/// Asks, and waits for every token.
pub fn run(engine: &EngineHandle, load: &Load<'_>) -> anyhow::Result<Outcome> {
    let (sender, events) = channel();
    let began = Instant::now();
    for stream in 0..load.streams {
        let sender = sender.clone();
        let sink: Sink =
            Box::new(move |event| match sender.send((stream, Instant::now(), event)) {
                Ok(()) => Delivery::Ok,
                Err(_) => Delivery::Gone,
            });
        let request = Request {
            adapter: load.tenants.of(stream),
            max_new_tokens: load.answer,
            stop: StopRules { eos_rule: EosRule::Ignore, ..StopRules::default() },
            ..Request::new(prompt(load), sink)
        };
        engine.submit(request)?;
    }
    let mut last: Vec<Option<Instant>> = vec![None; load.streams];
    let (mut first, mut next) = (Vec::new(), Vec::new());
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let (mut open, mut tokens, mut end) = (load.streams, 0, began);
    while open > 0 {
        let (stream, at, event) = events.recv().context("the engine stopped")?;
        match event {
            Event::Token { .. } => {
                match last[stream].replace(at) {
                    None => first.push(ms(at - began)),
                    Some(before) => next.push(ms(at - before)),
                }
                tokens += 1;
                end = at;
            }
            Event::Finished { .. } => open -= 1,
            Event::Failed { error } => bail!("stream {stream}: {error}"),
            Event::Started { .. } | Event::PromptLogits { .. } | Event::PromptLogprobs { .. } => {}
        }
    }
    let seconds = (end - began).as_secs_f64().max(1e-9);
    let tokens_per_second = tokens as f64 / seconds;
    Ok(Outcome { first: Times::new(first), next: Times::new(next), tokens, tokens_per_second })
}

/// Random tokens, other ones each time, so that no two prompts begin alike.
fn prompt(load: &Load<'_>) -> Vec<u32> {
    use std::sync::atomic::{AtomicU64, Ordering};
    static DRAWN: AtomicU64 = AtomicU64::new(0);
    (0..load.prompt)
        .map(|_| {
            let z = split_mix64(1, DRAWN.fetch_add(1, Ordering::Relaxed));
            (((z >> 32) * load.vocab as u64) >> 32) as u32
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let times = Times::new((1..=100).rev().map(f64::from).collect());
        assert_eq!((times.at(0.5), times.at(0.99), times.at(1.0)), (50.0, 99.0, 100.0));
        assert_eq!(Times::default().at(0.5), 0.0);
        assert_eq!(Times::new(vec![3.0]).at(0.01), 3.0);
    }

    #[test]
    fn prompts_differ_and_stay_in_the_vocabulary() {
        let tenants = Tenants::Base;
        let load = Load { streams: 1, prompt: 300, answer: 1, vocab: 17, tenants };
        let (first, second) = (prompt(&load), prompt(&load));
        assert_ne!(first, second);
        assert!(first.iter().chain(&second).all(|&token| token < 17));
        assert!((0..17).all(|token| first.contains(&token)), "every token comes up");
    }
}
