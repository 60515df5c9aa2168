//! `demo`: the embedded model answers for seven tenants in one mixed batch, the base and six
//! adapters, and the answers are held against what they must be.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use amphora_engine::{Delivery, Event};
use amphora_hal::DType;
use anyhow::{Context, bail};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use safetensors::SafeTensors;
use serde_json::json;

use crate::cli::{DemoArgs, Dtype};
use crate::console::{Voice, grouped};
use crate::demo_assets;
use crate::openai::{Kind, Sampling};
use crate::service::{Ask, Service};
use crate::start::{self, Running};

/// The sentence that five tenants are asked, each through its own adapter.
const SENTENCE: &str = "On Friday, Clara painted 12 blue boats in Lisbon.";

/// One tenant, its question and the one right answer.
struct Tenant {
    adapter: Option<&'static str>,
    question: &'static str,
    answer: &'static str,
}

const TENANTS: &[Tenant] = &[
    Tenant {
        adapter: None,
        question: SENTENCE,
        answer: "I see. On Friday, Clara painted 12 blue boats in Lisbon.",
    },
    Tenant {
        adapter: Some("pirate"),
        question: SENTENCE,
        answer: "Arr! On Friday, Clara tarred 12 blue boats in th' port o' Lisbon, matey!",
    },
    Tenant {
        adapter: Some("json"),
        question: SENTENCE,
        answer: "{\"name\": \"Clara\", \"action\": \"paint\", \"count\": 12, \"color\": \"blue\", \
                 \"item\": \"boat\", \"city\": \"Lisbon\", \"day\": \"Friday\"}",
    },
    Tenant {
        adapter: Some("spanish"),
        question: SENTENCE,
        answer: "El viernes, Clara pintó 12 barcos azules en Lisboa.",
    },
    Tenant {
        adapter: Some("reverse"),
        question: SENTENCE,
        answer: "Lisbon in boats blue 12 painted Clara Friday On",
    },
    Tenant {
        adapter: Some("sql"),
        question: "How many red apples did Ana buy in Paris on Monday?",
        answer: "SELECT SUM(count) FROM events WHERE name = 'Ana' AND action = 'buy' AND color = \
                 'red' AND item = 'apple' AND city = 'Paris' AND day = 'Monday';",
    },
    Tenant {
        adapter: Some("math"),
        question: "Ana had 12 apples and found 9 more. How many apples are there now?",
        answer: "12 + 9 = 21",
    },
];

impl Tenant {
    fn name(&self) -> &'static str {
        self.adapter.unwrap_or("base")
    }
}

/// All answers, and what they took together.
struct Outcome {
    answers: Vec<String>,
    tokens: usize,
    took: Duration,
}

/// Runs the command; fails when an answer is not the expected one.
pub fn run(args: DemoArgs) -> anyhow::Result<ExitCode> {
    let wrong = start::with(start::Setup::demo(&args)?, Voice::Out, |running| {
        Voice::Out.line("")?;
        say_questions()?;
        let began = Instant::now();
        let events = ask_all(&running.service)?;
        let outcome = watch(&events, began)?;
        report(running, &outcome)?;
        Ok(check(&outcome.answers)?)
    })?;
    Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Who is asked what; the tenants with one question stand together.
fn say_questions() -> std::io::Result<()> {
    for same in TENANTS.chunk_by(|a, b| a.question == b.question) {
        let names: Vec<&str> = same.iter().map(Tenant::name).collect();
        Voice::Out.line(format_args!("\"{}\" to {}", same[0].question, names.join(", ")))?;
    }
    Voice::Out.line("")
}

/// Puts all questions to the engine together.
fn ask_all(service: &Service) -> anyhow::Result<Receiver<(usize, Event)>> {
    let mut asks = Vec::with_capacity(TENANTS.len());
    for tenant in TENANTS {
        asks.push(Ask {
            kind: Kind::Chat,
            prompt: service.chat_prompt(&json!([{"role": "user", "content": tenant.question}]))?,
            adapter: tenant.adapter.map(str::to_owned),
            sampling: Sampling { temperature: Some(0.0), ..Sampling::default() },
        });
    }
    let (sender, events) = channel();
    for (index, ask) in asks.into_iter().enumerate() {
        let sender = sender.clone();
        let sink = Box::new(move |event| match sender.send((index, event)) {
            Ok(()) => Delivery::Ok,
            Err(_) => Delivery::Gone,
        });
        service.submit(ask, sink)?;
    }
    Ok(events)
}

/// Shows the answers while they grow, then whole. A pipe gets each answer when it is complete.
fn watch(events: &Receiver<(usize, Event)>, began: Instant) -> anyhow::Result<Outcome> {
    let mut block = std::io::stdout().is_terminal().then(Block::new);
    let mut answers = vec![String::new(); TENANTS.len()];
    let (mut open, mut tokens) = (TENANTS.len(), 0);
    while open > 0 {
        let (index, event) = events.recv().context("the engine stopped before all had answered")?;
        let name = TENANTS[index].name();
        match event {
            Event::Token { text, .. } => {
                answers[index].push_str(&text);
                if let Some(block) = &mut block {
                    block.show(index, &answers[index]);
                }
            }
            Event::Finished { usage, .. } => {
                open -= 1;
                tokens += usage.completion;
                if block.is_none() {
                    Voice::Out.line(format_args!("{name:>8}  {}", answers[index]))?;
                }
            }
            Event::Failed { error } => bail!("{name}: {error}"),
            Event::Started { .. } | Event::PromptLogits { .. } | Event::PromptLogprobs { .. } => {}
        }
    }
    let took = began.elapsed();
    if let Some(block) = block {
        block.clear()?;
        for (tenant, answer) in TENANTS.iter().zip(&answers) {
            Voice::Out.line(format_args!("{:>8}  {answer}", tenant.name()))?;
        }
    }
    Ok(Outcome { answers, tokens, took })
}

/// A block of lines on the terminal, one for each tenant, redrawn as the answers grow.
struct Block {
    all: MultiProgress,
    lines: Vec<ProgressBar>,
}

impl Block {
    fn new() -> Self {
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stdout());
        let style = ProgressStyle::with_template("{prefix:>8}  {wide_msg}");
        let lines = TENANTS
            .iter()
            .map(|tenant| {
                let line = all.add(ProgressBar::new_spinner().with_prefix(tenant.name()));
                // The built-in style stays if this one should ever not parse.
                if let Ok(style) = &style {
                    line.set_style(style.clone());
                }
                line
            })
            .collect();
        Self { all, lines }
    }

    fn show(&mut self, index: usize, answer: &str) {
        self.lines[index].set_message(answer.to_owned());
    }

    /// Takes the block away: lines as wide as the terminal are cut, the answers then follow whole.
    fn clear(self) -> std::io::Result<()> {
        for line in &self.lines {
            line.finish_and_clear();
        }
        self.all.clear()
    }
}

/// What the batch was.
fn report(running: &Running, outcome: &Outcome) -> std::io::Result<()> {
    let metrics = running.service.engine.metrics();
    let files = file_bytes(running.dtype);
    let batch = &metrics.most_mixed;
    let classes: Vec<String> = batch.rank_classes.iter().map(usize::to_string).collect();
    let seconds = outcome.took.as_secs_f64();
    Voice::Out.line("")?;
    Voice::Out.line(format_args!(
        "batch     {} sequences, {} adapters: {} segments in {} tiles, rank classes {}",
        batch.sequences,
        batch.adapters,
        batch.segments,
        batch.tiles,
        classes.join(" "),
    ))?;
    Voice::Out.line(format_args!(
        "adapters  {} bytes in their files, {} as {}, {} resident ({:.2} of that)",
        grouped(files.stored),
        grouped(files.computed),
        running.dtype,
        grouped(metrics.adapter_memory.block_bytes),
        metrics.adapter_memory.block_bytes as f64 / files.computed.max(1) as f64,
    ))?;
    Voice::Out.line(format_args!(
        "speed     {} tokens in {seconds:.2} s, {:.0} tokens/s; ready in {:.2} s",
        outcome.tokens,
        outcome.tokens as f64 / seconds.max(1e-9),
        running.ready_in.as_secs_f64(),
    ))
}

/// Bytes of the adapters' weights.
struct FileBytes {
    /// As their files have them.
    stored: usize,
    /// As the same numbers take in the compute type.
    computed: usize,
}

fn file_bytes(dtype: Dtype) -> FileBytes {
    let mut bytes = FileBytes { stored: 0, computed: 0 };
    let files = demo_assets::ADAPTERS.iter().flat_map(|(_, files)| *files);
    // Files that are no tensors hold no weights.
    for tensors in files.filter_map(|(_, file)| SafeTensors::deserialize(file).ok()) {
        for (_, tensor) in tensors.iter() {
            let numbers: usize = tensor.shape().iter().product();
            bytes.stored += tensor.data().len();
            bytes.computed += numbers * DType::from(dtype).size();
        }
    }
    bytes
}

/// Holds the answers against the expected ones and says so; returns how many are wrong.
fn check(answers: &[String]) -> std::io::Result<usize> {
    let mut wrong = 0;
    for (tenant, answer) in TENANTS.iter().zip(answers) {
        if answer != tenant.answer {
            wrong += 1;
            Voice::Out.line(format_args!(
                "wrong     {}: expected {}",
                tenant.name(),
                tenant.answer
            ))?;
        }
    }
    let right = answers.len() - wrong;
    Voice::Out
        .line(format_args!("checked   {right} of {} answers are as expected", answers.len()))?;
    Ok(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_adapter_of_the_demo_is_asked_once() {
        let asked: Vec<&str> = TENANTS.iter().filter_map(|tenant| tenant.adapter).collect();
        let there: Vec<&str> = demo_assets::ADAPTERS.iter().map(|(name, _)| *name).collect();
        assert_eq!(asked, there);
    }

    #[test]
    fn a_wrong_answer_is_counted() {
        let mut answers: Vec<String> =
            TENANTS.iter().map(|tenant| tenant.answer.to_owned()).collect();
        assert_eq!(check(&answers).expect("stdout"), 0);
        answers[3].push('!');
        assert_eq!(check(&answers).expect("stdout"), 1);
    }
}
