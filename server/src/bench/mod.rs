//! `bench`: the real engine under load, with adapters and without: time to the first token, tokens a
//! second, time between tokens, and how far that is from what memory alone would allow.
//!
//! Prompts are random tokens, different in every request, so nothing is found in a cache. All streams
//! of a round begin together. A round without adapters asks the base with adapters loaded, so both
//! rounds run on the same engine; the tax is the ratio of their times between tokens. `--profile` adds
//! where a step's time goes, `--contexts` prompts of many lengths.

mod adapters;
mod contexts;
mod limit;
mod profile;
mod round;

use std::process::ExitCode;
use std::time::Instant;

use amphora_engine::{AdapterConfig, EngineConfig, KvSize, ModelSource};
use amphora_hal::{Backend, DType};
use amphora_model::synthetic::{self, Spread};
use amphora_model::{Config, LoraSlices, ModelFiles};
use anyhow::{Context, bail, ensure};

use crate::backend::{self, Task};
use crate::cli::{BenchArgs, RoutingSpread};
use crate::console::{Voice, grouped};
use crate::start;
use adapters::MadeAdapters;
use contexts::Contexts;
use limit::StepBytes;
use round::{Load, Outcome, Tenants};

/// Positions of a cache block, as the engine has them unless told otherwise.
const BLOCK: usize = 16;

/// Runs the command.
pub fn run(args: BenchArgs) -> anyhow::Result<ExitCode> {
    let config = args.device.config();
    let name = args.device.backend.clone();
    backend::run(name.as_deref(), &config, Bench { args })?;
    Ok(ExitCode::SUCCESS)
}

/// Opens what `--model` names: a folder, or a shape without files.
pub fn open(model: &str, routing: Option<Spread>) -> anyhow::Result<ModelFiles> {
    match model.strip_prefix(synthetic::PREFIX) {
        Some(shape) => Ok(ModelFiles::synthetic(shape, routing.unwrap_or_default())?),
        None if routing.is_some() => {
            bail!("--routing is of shapes without files; the routers of {model} choose as they do")
        }
        None => Ok(ModelFiles::open(std::path::Path::new(model))?),
    }
}

struct Bench {
    args: BenchArgs,
}

impl Task for Bench {
    type Output = ();

    fn run<B: Backend>(self, device: B, passed_over: &[String]) -> anyhow::Result<()> {
        let Self { args } = self;
        let dtype: DType = args.device.dtype.into();
        Voice::Out.line(format_args!("backend {}: {}, {dtype}", B::NAME, device.caps().name))?;
        for reason in passed_over {
            Voice::Out.line(format_args!("passed over: {reason}"))?;
        }
        for note in device.notes() {
            Voice::Out.line(format_args!("tuning: {note}"))?;
        }
        let files = open(&args.model, args.routing.map(Spread::from))?;
        ensure!(
            args.contexts == 0 || args.adapters > 0,
            "--contexts compares with an adapter, and --adapters 0 leaves none"
        );
        let config = Config::read(&files)?;
        let slices = LoraSlices::new(&config);
        let made = (args.adapters > 0).then(|| MadeAdapters::new(&config, &slices, args.rank));
        let settings = settings(&args, &config, made.as_ref(), dtype)?;
        let began = Instant::now();
        let source = ModelSource { files: &files, config: config.clone(), dtype };
        let started = amphora_engine::start(device.clone(), source, &settings, &mut |_| {})?;
        let measure = || -> anyhow::Result<()> {
            let names: Vec<String> = (0..args.adapters).map(|i| format!("adapter-{i}")).collect();
            if let Some(made) = &made {
                made.load(&started.handle, &names)?;
            }
            let ready = device.counters();
            let weights = started.report.weights.device_bytes;
            Voice::Out.line(format_args!(
                "{}: {} bytes of weights, {} adapters of rank {} and {} numbers each, ready in {:.1} s",
                args.model,
                grouped(weights),
                args.adapters,
                args.rank,
                grouped(made.as_ref().map_or(0, MadeAdapters::numbers)),
                began.elapsed().as_secs_f64()
            ))?;
            let bytes = StepBytes::new(&config, dtype, args.rank);
            let routing = match (args.model.starts_with(synthetic::PREFIX), args.routing) {
                (false, _) => "by the model",
                (true, None | Some(RoutingSpread::Balanced)) => "evenly",
                (true, Some(RoutingSpread::Zipf)) => "by Zipf's law",
                (true, Some(RoutingSpread::One)) => "all alike",
            };
            let mut table = Table { args: &args, bytes: &bytes, routing };
            table.head()?;
            for &streams in &args.streams {
                let load = |tenants| Load {
                    streams,
                    prompt: args.prompt_tokens,
                    answer: args.new_tokens,
                    vocab: config.vocab,
                    tenants,
                };
                let rounds = [Some(Tenants::Base), made.as_ref().map(|_| Tenants::Mixed(&names))];
                let mut base = None;
                for tenants in rounds.into_iter().flatten() {
                    // A first, short round: what is done once is done before anything is timed.
                    let warm = Load { answer: 4.min(args.new_tokens), ..load(tenants) };
                    round::run(&started.handle, &warm)?;
                    let outcome = round::run(&started.handle, &load(tenants))?;
                    table.row(streams, tenants, &outcome, base.as_ref())?;
                    base.get_or_insert(outcome);
                    if args.profile {
                        profile::run(&started.handle, &load(tenants), args.max_batch_tokens)?;
                    }
                }
            }
            if args.contexts > 0 {
                let load = Load {
                    streams: 1,
                    prompt: args.prompt_tokens,
                    answer: 1,
                    vocab: config.vocab,
                    tenants: Tenants::Base,
                };
                Contexts { count: args.contexts, load, names: &names, ready }
                    .run(&started.handle, &device)?;
            }
            Ok(())
        };
        start::end(measure(), &started.handle, started.thread)
    }
}

/// An engine that has room for exactly what is asked of it; more than a model takes is refused.
fn settings(
    args: &BenchArgs,
    config: &Config,
    made: Option<&MadeAdapters>,
    dtype: DType,
) -> anyhow::Result<EngineConfig> {
    let streams = args.streams.iter().copied().max().unwrap_or(1);
    let (prompt, new, most) = (args.prompt_tokens, args.new_tokens, config.max_positions);
    let length = prompt.checked_add(new).filter(|&length| length <= most);
    let length = length.with_context(|| {
        format!(
            "--prompt-tokens {prompt} and --new-tokens {new}: together at most {most} are expected, as \
             the model was made for"
        )
    })?;
    let blocks = streams.checked_mul(length.div_ceil(BLOCK) + 1);
    let blocks = blocks.with_context(|| format!("--streams {streams}: no cache is so large"))?;
    let adapters = made.map(|made| AdapterConfig {
        slots: args.adapters,
        arena_bytes: made.arena_bytes(args.adapters, dtype),
        max_rank: args.rank,
        ..AdapterConfig::default()
    });
    Ok(EngineConfig {
        max_seqs: streams,
        max_batch_tokens: args.max_batch_tokens.max(streams),
        max_model_len: Some(length),
        block_size: BLOCK,
        kv: KvSize::Blocks(blocks),
        adapters,
        ..EngineConfig::default()
    })
}

/// What is printed.
struct Table<'a> {
    args: &'a BenchArgs,
    bytes: &'a StepBytes,
    /// How experts are chosen, in words.
    routing: &'static str,
}

impl Table<'_> {
    fn head(&self) -> std::io::Result<()> {
        Voice::Out.line(format_args!(
            "{} prompt tokens, {} new tokens; experts chosen {}; times in ms; limit: bytes of a step at {} \
             GB/s, were experts chosen evenly",
            self.args.prompt_tokens,
            self.args.new_tokens,
            self.routing,
            self.args.roof_gbps
        ))?;
        Voice::Out.line(
            "streams  adapters  first p50  first p99  next p50  next p99  tokens/s each  \
             tokens/s all  of the limit  tax",
        )
    }

    /// One round; `base` is the round without adapters beside it.
    fn row(
        &mut self,
        streams: usize,
        tenants: Tenants<'_>,
        outcome: &Outcome,
        base: Option<&Outcome>,
    ) -> anyhow::Result<()> {
        let next = outcome.next.at(0.5);
        let context = self.args.prompt_tokens + self.args.new_tokens / 2;
        let floor = self.bytes.step(streams, context, tenants.adapters(streams)) as f64
            / (self.args.roof_gbps * 1e6);
        let share = match next > 0.0 {
            true => format!("{:.0} %", 100.0 * floor / next),
            false => "-".to_owned(),
        };
        let tax = match base.map(|base| base.next.at(0.5)).filter(|base| *base > 0.0) {
            Some(base) => format!("{:+.1} %", 100.0 * (next / base - 1.0)),
            None => "-".to_owned(),
        };
        let each = if next > 0.0 { 1000.0 / next } else { 0.0 };
        Voice::Out.line(format_args!(
            "{streams:>7}  {:>8}  {:>9.2}  {:>9.2}  {next:>8.3}  {:>8.3}  {each:>13.1}  {:>12.1}  \
             {share:>12}  {tax:>6}",
            tenants.adapters(streams),
            outcome.first.at(0.5),
            outcome.first.at(0.99),
            outcome.next.at(0.99),
            outcome.tokens_per_second,
        ))?;
        let expected = streams * self.args.new_tokens;
        ensure!(outcome.tokens == expected, "{} of {expected} tokens came", outcome.tokens);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_that_is_not_there_is_named() {
        let error = open("synthetic:gpt-9", None).expect_err("no such shape").to_string();
        assert!(error.contains("gpt-oss-20b"), "{error}");
        let error = open("folder", Some(Spread::One)).expect_err("it has files").to_string();
        assert!(error.contains("--routing"), "{error}");
    }
}
