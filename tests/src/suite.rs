//! The test binary of a backend: chooses cases by name, runs each on a fixed and on a fresh seed,
//! and prints what `cargo test` prints.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use amphora_hal::{Backend, Device, DeviceConfig};

use crate::cases;
use crate::expectations::expected;
use crate::harness::{Case, Failure};
use crate::laws::{self, RowLaw};

/// The seed that every run includes.
const FIXED_SEED: u64 = 20_261_130;

/// Sets the only seed of a run.
const SEED_VARIABLE: &str = "AMPHORA_TEST_SEED";

/// What the command line asks for.
#[derive(Debug, Default, PartialEq, Eq)]
struct Options {
    filters: Vec<String>,
    skip: Vec<String>,
    exact: bool,
    list: bool,
    quiet: bool,
    ignored_only: bool,
}

impl Options {
    /// Understands what `cargo test` passes on; options that only matter to threads or colours are
    /// taken and have no effect.
    fn parse(arguments: impl Iterator<Item = String>) -> Self {
        let mut options = Options::default();
        let mut arguments = arguments.peekable();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--exact" => options.exact = true,
                "--list" => options.list = true,
                "-q" | "--quiet" => options.quiet = true,
                "--ignored" => options.ignored_only = true,
                "--skip" => options.skip.extend(arguments.next()),
                "--test-threads" | "--format" | "--color" | "-Z" | "--logfile"
                | "--shuffle-seed" => {
                    arguments.next();
                }
                other if other.starts_with('-') => {}
                _ => options.filters.push(argument),
            }
        }
        options
    }

    fn takes(&self, name: &str) -> bool {
        let matches = |filter: &String| {
            if self.exact { name == filter } else { name.contains(filter.as_str()) }
        };
        !self.ignored_only
            && (self.filters.is_empty() || self.filters.iter().any(matches))
            && !self.skip.iter().any(matches)
    }
}

/// A set seed alone, or the fixed one and one from the clock.
fn seeds() -> Vec<u64> {
    if let Ok(text) = std::env::var(SEED_VARIABLE) {
        match text.parse() {
            Ok(seed) => return vec![seed],
            Err(_) => eprintln!("{SEED_VARIABLE} is {text:?}, expected a number; it is not used"),
        }
    }
    let clock = SystemTime::now().duration_since(UNIX_EPOCH);
    let fresh = clock.map_or(1, |since| since.as_nanos() as u64 >> 10);
    vec![FIXED_SEED, fresh % 1_000_000_000]
}

/// One case on every seed, held against the known gaps.
fn verdict<B: Backend>(device: &B, case: &Case<B>, seeds: &[u64]) -> Result<(), String> {
    let mut result = Ok(());
    for &seed in seeds {
        // A panic is a failed case like any other; the rest still runs.
        let ran = catch_unwind(AssertUnwindSafe(|| (case.run)(device, seed)));
        if let Err(failure) = ran.unwrap_or_else(|_| Err(Failure::Wrong("it panicked".to_owned())))
        {
            result = Err((failure, seed));
            break;
        }
    }
    match (result, expected(<B as Device>::NAME, &case.name)) {
        (Ok(()), None) | (Err(_), Some(_)) => Ok(()),
        (Ok(()), Some(gap)) => {
            Err(format!("passes, but is listed as a gap ({}): remove it from the list", gap.reason))
        }
        (Err((failure @ Failure::Unsupported(_), _)), None) => Err(failure.to_string()),
        (Err((failure, seed)), None) => Err(format!("{failure}\n    {SEED_VARIABLE}={seed}")),
    }
}

/// Runs the suite on a backend: the whole of a `conformance_<backend>.rs`.
pub fn suite<B: Backend>(config: &DeviceConfig) -> ExitCode {
    run::<B>(config, |device| cases::all(device))
}

/// The same, with cases of a backend's own behind them.
pub fn suite_and<B: Backend>(
    config: &DeviceConfig,
    own: impl FnOnce(&B) -> Vec<Case<B>>,
) -> ExitCode {
    run::<B>(config, |device| [cases::all(device), own(device)].into_iter().flatten().collect())
}

/// Runs the laws on a backend that keeps `rows` as it says.
pub fn laws<B: Backend>(config: &DeviceConfig, rows: RowLaw) -> ExitCode {
    run::<B>(config, |_| laws::all(rows))
}

fn run<B: Backend>(config: &DeviceConfig, cases: impl FnOnce(&B) -> Vec<Case<B>>) -> ExitCode {
    cases::device::CONFIG.get_or_init(|| config.clone());
    let options = Options::parse(std::env::args().skip(1));
    let device = match B::open(config) {
        Ok(device) => device,
        Err(error) => {
            eprintln!("{}: no device: {error}", B::NAME);
            return ExitCode::FAILURE;
        }
    };
    let all = cases(&device);
    let count = all.len();
    let chosen: Vec<Case<B>> = all.into_iter().filter(|case| options.takes(&case.name)).collect();
    if options.list {
        chosen.iter().for_each(|case| println!("{}: test", case.name));
        println!("\n{} tests, 0 benchmarks", chosen.len());
        return ExitCode::SUCCESS;
    }
    let seeds = seeds();
    println!("\nrunning {} tests on {} with seeds {seeds:?}", chosen.len(), device.caps().name);
    let begin = Instant::now();
    let mut failures = Vec::new();
    for case in &chosen {
        let verdict = verdict(&device, case, &seeds);
        if !options.quiet {
            println!("test {} ... {}", case.name, if verdict.is_ok() { "ok" } else { "FAILED" });
        }
        if let Err(what) = verdict {
            failures.push((&case.name, what));
        }
    }
    if !failures.is_empty() {
        println!("\nfailures:\n");
        failures.iter().for_each(|(name, what)| println!("---- {name} ----\n    {what}\n"));
        println!("failures:");
        failures.iter().for_each(|(name, _)| println!("    {name}"));
    }
    println!(
        "\ntest result: {}. {} passed; {} failed; 0 ignored; 0 measured; {} filtered out; finished in {:.2}s\n",
        if failures.is_empty() { "ok" } else { "FAILED" },
        chosen.len() - failures.len(),
        failures.len(),
        count - chosen.len(),
        begin.elapsed().as_secs_f64()
    );
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(line: &str) -> Options {
        Options::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn cargos_arguments_are_understood() {
        let some = options("--nocapture rope/ --test-threads 1 --skip f32 -q");
        assert!(some.quiet && some.takes("rope/bf16/t=1") && !some.takes("rope/f32/t=1"));
        assert!(!some.takes("linear/bf16/t=1"));
        let exact = options("--exact rope");
        assert!(exact.takes("rope") && !exact.takes("rope/f32"));
        assert!(options("--test-threads=1").takes("anything"));
        assert!(options("--list --format terse").list);
    }
}
