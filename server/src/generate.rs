//! `generate`: one prompt, its answer streamed to standard output.

use std::io::Write;
use std::process::ExitCode;
use std::sync::mpsc::channel;
use std::time::Instant;

use amphora_engine::{Delivery, Event, FinishReason};
use anyhow::bail;
use serde_json::json;

use crate::cli::GenerateArgs;
use crate::console::Voice;
use crate::openai::{Kind, Sampling};
use crate::service::{Ask, Service};
use crate::start;

/// Runs the command.
pub fn run(args: GenerateArgs) -> anyhow::Result<ExitCode> {
    let setup = start::Setup::generate(&args)?;
    start::with(setup, Voice::Err, |running| answer(&running.service, args))
}

fn answer(service: &Service, args: GenerateArgs) -> anyhow::Result<ExitCode> {
    let prompt = if args.raw {
        service.plain_prompt(&args.prompt)?
    } else {
        let messages = json!([{"role": "user", "content": args.prompt}]);
        service.chat_prompt(&messages)?
    };
    let sampling = Sampling {
        max_tokens: args.max_tokens,
        temperature: args.temperature,
        top_p: args.top_p,
        top_k: args.top_k,
        seed: args.seed,
        stop: args.stop,
        ..Sampling::default()
    };
    let adapter = service.adapters().into_iter().next();
    let (sender, events) = channel();
    let began = Instant::now();
    let sink = Box::new(move |event| match sender.send(event) {
        Ok(()) => Delivery::Ok,
        Err(_) => Delivery::Gone,
    });
    // A raw prompt too is answered at the length of a chat: until it ends, or the context does.
    service.submit(Ask { kind: Kind::Chat, prompt, adapter, sampling }, sink)?;

    let mut out = std::io::stdout().lock();
    for event in events {
        match event {
            Event::Token { text, .. } => {
                out.write_all(text.as_bytes())?;
                out.flush()?;
            }
            Event::Finished { reason, usage, .. } => {
                writeln!(out)?;
                let seconds = began.elapsed().as_secs_f64();
                let why = match reason {
                    FinishReason::Stop => "a stop token or text",
                    FinishReason::Length => "the length",
                    FinishReason::Cancelled => "a cancellation",
                };
                Voice::Err.line(format_args!(
                    "{} prompt tokens, {} tokens in {seconds:.2} s ({:.0} tokens/s), ended by {why}",
                    usage.prompt,
                    usage.completion,
                    usage.completion as f64 / seconds.max(1e-9),
                ))?;
                return Ok(ExitCode::SUCCESS);
            }
            Event::Failed { error } => bail!(error),
            Event::Started { .. } | Event::PromptLogits { .. } | Event::PromptLogprobs { .. } => {}
        }
    }
    bail!("the engine stopped before the answer was complete")
}
