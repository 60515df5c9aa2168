//! Repository commands: `cargo xtask check` is what CI runs; the others are its parts and tools.

mod check;
mod command;
mod conformance;
mod fuzz;
mod kernels;
mod mutants;
mod tidy;
mod tree;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Repository commands of amphora.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Format, lints, docs, tidy, all tests, the twin, what is built for a GPU, every kernel, fuzzing; goes on after a failure and ends with a table.
    Check(check::Options),
    /// Rules that no compiler checks: layers, file length, unsafe, features, names.
    Tidy,
    /// The conformance suite of one backend.
    Conformance(conformance::Options),
    /// Compiles every CUDA kernel for each architecture, without a GPU.
    Kernels(kernels::Options),
    /// Breaks the code on purpose, one patch at a time, and wants each noticed by its test.
    Mutants(mutants::Options),
    /// Fuzz targets of the parsers, for some seconds each; needs a C++ compiler.
    Fuzz(fuzz::Options),
}

fn main() -> ExitCode {
    match run(Cli::parse().task) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// True if the task found nothing wrong; an error if it could not be done.
fn run(task: Task) -> Result<bool> {
    let root = tree::root();
    match task {
        Task::Check(options) => check::run(&root, &options),
        Task::Tidy => tidy::run(&root),
        Task::Conformance(options) => conformance::run(&root, &options),
        Task::Kernels(options) => kernels::run(&root, &options),
        Task::Mutants(options) => mutants::run(&root, &options),
        Task::Fuzz(options) => fuzz::run(&root, &options),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
