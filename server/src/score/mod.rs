//! `score`: logits of every prompt position and greedy continuations of given tokens, all lines
//! through the real engine, mixed and batched; and how two such files differ.

mod compare;
mod file;
mod input;

use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::channel;

use amphora_engine::{Delivery, EosRule, Event, Request, Sink, StopRules, Want};
use anyhow::{Context, bail, ensure};

use crate::cli::ScoreArgs;
use crate::console::{Voice, counter};
use crate::service::Service;
use crate::start;
use file::{Scored, Scores};
use input::Line;

pub use compare::{BF16_TOLERANCE, F32_TOLERANCE, Rule};

/// Runs the command.
pub fn run(args: ScoreArgs) -> anyhow::Result<ExitCode> {
    match (&args.compare, &args.input, &args.output) {
        (Some(files), _, _) => compare_files(&files[0], &files[1], args.rule()),
        (None, Some(input), Some(output)) => score(&args, input, output),
        _ => bail!("either --compare, or --input and --output, is expected"),
    }
}

/// Prints the differences; failure when they are past the rule.
fn compare_files(first: &Path, second: &Path, rule: Rule) -> anyhow::Result<ExitCode> {
    let comparison = compare::compare(&file::read(first)?, &file::read(second)?, rule)?;
    Voice::Out.line(comparison.report.trim_end())?;
    Ok(if comparison.within { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn score(args: &ScoreArgs, input: &Path, output: &Path) -> anyhow::Result<ExitCode> {
    let lines = input::read(input)?;
    let scores = start::with(start::Setup::score(args)?, Voice::Err, |running| {
        let service = &running.service;
        for line in &lines {
            if let Some(name) = &line.adapter
                && !service.engine.has_adapter(name)
            {
                bail!("{}: id '{}': no adapter '{name}' was given", input.display(), line.id);
            }
        }
        run_lines(service, lines)
    })?;
    file::write(output, &scores)?;
    Voice::Err.line(format_args!("{} ids written to {}", scores.len(), output.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Puts all lines to the engine at once and gathers what it computes.
fn run_lines(service: &Service, lines: Vec<Line>) -> anyhow::Result<Scores> {
    let (sender, events) = channel();
    let mut ids = Vec::with_capacity(lines.len());
    let mut prompts = Vec::with_capacity(lines.len());
    let mut scored = vec![Scored::default(); lines.len()];
    for (index, line) in lines.into_iter().enumerate() {
        let sender = sender.clone();
        ids.push(line.id);
        prompts.push(line.tokens.len());
        let sink: Sink = Box::new(move |event| match sender.send((index, event)) {
            Ok(()) => Delivery::Ok,
            Err(_) => Delivery::Gone,
        });
        let request = Request {
            adapter: line.adapter,
            max_new_tokens: line.max_new_tokens,
            stop: StopRules { eos_rule: EosRule::Ignore, ..StopRules::default() },
            logprobs: Some(0),
            prompt_logits: Want::Yes,
            ..Request::new(line.tokens, sink)
        };
        let taken = service.engine.submit(request);
        taken.with_context(|| format!("id '{}'", ids[index]))?;
    }
    drop(sender);
    let bar = counter(ids.len(), "lines");
    let mut open = ids.len();
    while open > 0 {
        let (index, event) = events.recv().context("the engine stopped before all was scored")?;
        let here = &mut scored[index];
        match event {
            Event::PromptLogits { first_position, vocab, rows } => {
                ensure!(
                    first_position * vocab == here.logits.len(),
                    "id '{}': logits of position {first_position} came out of order",
                    ids[index]
                );
                here.vocab = vocab;
                here.logits.extend_from_slice(&rows);
            }
            Event::Token { id, logprob, .. } => {
                here.greedy_ids.push(i64::from(id));
                here.greedy_logprobs.extend(logprob);
            }
            Event::Finished { .. } => {
                ensure!(
                    here.positions() == prompts[index]
                        && here.greedy_ids.len() == here.greedy_logprobs.len(),
                    "id '{}': {} of {} positions were computed",
                    ids[index],
                    here.positions(),
                    prompts[index]
                );
                open -= 1;
                bar.inc(1);
            }
            Event::Failed { error } => bail!("id '{}': {error}", ids[index]),
            Event::Started { .. } | Event::PromptLogprobs { .. } => {}
        }
    }
    bar.finish_and_clear();
    Ok(ids.into_iter().zip(scored).collect())
}
