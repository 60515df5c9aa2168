//! `amphora`: one base model, many LoRA adapters, one batch.

mod backend;
mod bench;
mod cli;
mod console;
mod demo;
mod demo_assets;
mod generate;
mod http;
mod inspect;
mod openai;
mod score;
mod serve;
mod service;
mod start;
mod text;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};

fn main() -> ExitCode {
    console::tell_warnings();
    let result = match Cli::parse().command {
        Command::Demo(args) => demo::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Score(args) => score::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Tune(args) => backend::tune(&args),
    };
    result.unwrap_or_else(|error| fail(&error))
}

/// One line on standard error. A reader of standard output that has gone, as in `| head`, is no error.
fn fail(error: &anyhow::Error) -> ExitCode {
    let closed = error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe);
    if closed {
        return ExitCode::SUCCESS;
    }
    // Nobody is left to be told when standard error is gone too.
    let _ = console::Voice::Err.line(format_args!("error: {error:#}"));
    ExitCode::FAILURE
}
