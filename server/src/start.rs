//! From flags to a running engine with its model, its adapters and its text.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use amphora_engine::{
    AdapterConfig, EngineConfig, EngineHandle, EngineThread, KvSize, ModelSource, PrefixCaching,
    Shutdown, StartReport, check_name,
};
use amphora_hal::{Backend, DType, Pool};
use amphora_model::source::Source;
use amphora_model::{Config, ModelFiles, Progress};
use anyhow::{Context, bail};

use crate::backend::{self, Task};
use crate::cli::{
    AdapterArgs, DemoArgs, DeviceArgs, Dtype, EngineArgs, GenerateArgs, ModelArgs, NamedFolder,
    ScoreArgs, ServeArgs, named_folder,
};
use crate::console::{Voice, byte_bar, grouped, spinner};
use crate::demo_assets;
use crate::service::{Defaults, Service};
use crate::text::{Text, TextFiles};

/// Rows of prompt logits that `score` takes from one step: enough to keep steps large, few enough
/// that a large vocabulary does not take gigabytes.
const SCORE_LOGIT_ROWS: usize = 64;

/// Tokens of prompt and answer in `demo`; what the demo model was trained on.
const DEMO_CONTEXT: usize = 256;

/// What to start.
#[derive(Debug)]
pub struct Setup {
    base: Base,
    adapters: Vec<(String, Source)>,
    served_name: Option<String>,
    device: DeviceArgs,
    engine: EngineConfig,
}

/// Where the base model is.
#[derive(Debug)]
enum Base {
    Demo,
    Folder(PathBuf),
}

/// A running engine.
pub struct Running {
    pub service: Service,
    /// For the one who waits for the engine's end.
    pub thread: EngineThread,
    pub dtype: Dtype,
    /// From the first line to the last adapter.
    pub ready_in: Duration,
    /// What was loaded and what memory it takes, as lines.
    pub report: Vec<String>,
}

impl Setup {
    pub fn demo(args: &DemoArgs) -> anyhow::Result<Self> {
        Ok(Self {
            base: Base::Demo,
            adapters: demo_adapters().collect(),
            served_name: None,
            device: args.device.clone(),
            // Sized for what is asked: a start takes no time for memory that nobody uses.
            engine: EngineConfig {
                max_seqs: 8,
                max_model_len: Some(DEMO_CONTEXT),
                adapters: Some(AdapterConfig {
                    slots: demo_assets::ADAPTERS.len(),
                    arena_bytes: 16 << 20,
                    max_rank: 64,
                    ..AdapterConfig::default()
                }),
                ..EngineConfig::default()
            },
        })
    }

    pub fn serve(args: &ServeArgs) -> anyhow::Result<Self> {
        Self::new(&args.model, &args.device, &args.engine)
    }

    pub fn score(args: &ScoreArgs) -> anyhow::Result<Self> {
        let mut setup = Self::new(&args.model, &args.device, &args.engine)?;
        setup.engine.prompt_logit_rows = SCORE_LOGIT_ROWS.min(setup.engine.max_batch_tokens);
        Ok(setup)
    }

    /// One sequence and at most one adapter.
    pub fn generate(args: &GenerateArgs) -> anyhow::Result<Self> {
        let adapters = match &args.adapter {
            None => Vec::new(),
            Some(text) => vec![chosen_adapter(text, args.model.is_none())?],
        };
        let with_adapter = AdapterConfig { slots: 1, ..adapters_read(&args.reading) };
        Ok(Self {
            base: Base::of(args.model.as_deref()),
            engine: EngineConfig {
                max_seqs: 1,
                max_model_len: args.max_model_len,
                adapters: (!adapters.is_empty()).then_some(with_adapter),
                ..EngineConfig::default()
            },
            adapters,
            served_name: None,
            device: args.device.clone(),
        })
    }

    fn new(model: &ModelArgs, device: &DeviceArgs, engine: &EngineArgs) -> anyhow::Result<Self> {
        let mut adapters: Vec<(String, Source)> = Vec::new();
        if model.model.is_none() && !engine.no_lora {
            adapters.extend(demo_adapters());
        }
        for NamedFolder { name, folder } in &model.adapters {
            if adapters.iter().any(|(other, _)| other == name) {
                bail!("--adapter {name}: the name is given twice");
            }
            check_name(name).with_context(|| format!("--adapter {name:?}"))?;
            adapters.push((name.clone(), Source::Folder(folder.clone())));
        }
        let with_adapters = AdapterConfig {
            slots: engine
                .adapter_slots
                .unwrap_or(AdapterConfig::default().slots.max(adapters.len())),
            arena_bytes: engine.adapter_memory,
            host_bytes: engine.adapter_host_memory,
            max_rank: engine.max_lora_rank,
            ..adapters_read(&engine.reading)
        };
        Ok(Self {
            base: Base::of(model.model.as_deref()),
            adapters,
            served_name: model.served_model_name.clone(),
            device: device.clone(),
            engine: EngineConfig {
                max_seqs: engine.max_seqs,
                max_batch_tokens: engine.max_batch_tokens,
                max_model_len: engine.max_model_len,
                kv: KvSize::Bytes(engine.kv_memory),
                prefix_caching: match engine.no_prefix_cache {
                    true => PrefixCaching::Off,
                    false => PrefixCaching::On,
                },
                adapters: (!engine.no_lora).then_some(with_adapters),
                ..EngineConfig::default()
            },
        })
    }

    /// The base's name in requests and replies.
    fn base_name(&self) -> String {
        match (&self.served_name, &self.base) {
            (Some(name), _) => name.clone(),
            (None, Base::Demo) => demo_assets::MODEL.to_owned(),
            (None, Base::Folder(folder)) => {
                // A folder such as "." has a name only once it is resolved.
                let resolved = folder.canonicalize().unwrap_or_else(|_| folder.clone());
                match resolved.file_name() {
                    Some(name) => name.to_string_lossy().into_owned(),
                    None => folder.display().to_string(),
                }
            }
        }
    }
}

impl Base {
    fn of(folder: Option<&Path>) -> Self {
        folder.map_or(Self::Demo, |folder| Self::Folder(folder.to_owned()))
    }

    fn open(&self) -> anyhow::Result<ModelFiles> {
        Ok(match self {
            Self::Demo => demo_assets::model()?,
            Self::Folder(folder) => ModelFiles::open(folder)?,
        })
    }
}

/// The settings that say how files are read.
fn adapters_read(reading: &AdapterArgs) -> AdapterConfig {
    AdapterConfig {
        orientation: reading.adapter_orientation.map(Into::into),
        dtype: reading.adapter_dtype.map(Into::into),
        ..AdapterConfig::default()
    }
}

fn demo_adapters() -> impl Iterator<Item = (String, Source)> {
    demo_assets::ADAPTERS
        .iter()
        .map(|(name, files)| ((*name).to_owned(), Source::Embedded { name, files }))
}

/// `NAME=DIR`, or the name of one of the demo's adapters when the demo model answers.
fn chosen_adapter(text: &str, demo: bool) -> anyhow::Result<(String, Source)> {
    if let Ok(NamedFolder { name, folder }) = named_folder(text) {
        return Ok((name, Source::Folder(folder)));
    }
    if !demo {
        bail!("--adapter {text}: expected NAME=DIR, the adapter's folder, beside --model");
    }
    demo_adapters().find(|(name, _)| name == text).with_context(|| {
        let names: Vec<&str> = demo_assets::ADAPTERS.iter().map(|(name, _)| *name).collect();
        format!("--adapter {text}: expected one of {}, or NAME=DIR", names.join(", "))
    })
}

/// Opens the device, loads the model, then each adapter. The first line says which device it is.
pub fn start(setup: Setup, voice: Voice) -> anyhow::Result<Running> {
    let began = Instant::now();
    let config = setup.device.config();
    let name = setup.device.backend.clone();
    let running = backend::run(name.as_deref(), &config, Launch { setup, voice, began })?;
    Ok(running)
}

/// Starts, does `work`, and ends the engine whatever came of it.
///
/// The process must not end while the engine's thread gives the device back: the GPU's driver crashes when
/// both happen at once.
pub fn with<R>(
    setup: Setup,
    voice: Voice,
    work: impl FnOnce(&Running) -> anyhow::Result<R>,
) -> anyhow::Result<R> {
    let running = start(setup, voice)?;
    let result = work(&running);
    end(result, &running.service.engine, running.thread)
}

/// Stops an engine and waits until it has given the device back. Gives what was done with it; an error there
/// comes before one of the engine's end.
pub fn end<R>(
    result: anyhow::Result<R>,
    engine: &EngineHandle,
    thread: EngineThread,
) -> anyhow::Result<R> {
    engine.shutdown(Shutdown::Now);
    let ended = thread.join().context("the engine stopped");
    result.and_then(|result| ended.map(|()| result))
}

/// What is done once the device is open.
pub struct Launch {
    pub setup: Setup,
    pub voice: Voice,
    pub began: Instant,
}

impl Task for Launch {
    type Output = Running;

    fn run<B: Backend>(self, device: B, passed_over: &[String]) -> anyhow::Result<Running> {
        let Self { setup, voice, began } = self;
        let dtype = setup.device.dtype;
        voice.line(format_args!("backend {}: {}, {dtype}", B::NAME, device.caps().name))?;
        for reason in passed_over {
            voice.line(format_args!("passed over: {reason}"))?;
        }
        for note in device.notes() {
            voice.line(format_args!("tuning: {note}"))?;
        }
        let base = setup.base_name();
        if setup.adapters.iter().any(|(name, _)| *name == base) {
            bail!("'{base}' names the base model and an adapter; use --served-model-name");
        }
        let files = setup.base.open()?;
        let config = Config::read(&files)?;
        let text_files = TextFiles::of(&files)?;
        for field in text_files.not_applied()? {
            voice.line(format_args!("generation_config.json: {field} is not applied"))?;
        }
        let text = Text::new(&text_files)?;
        let eos = config.eos.clone();
        let defaults = Defaults::new(&config.generation, text_files.max_new_tokens()?);
        let model = ModelSource { files: &files, config, dtype: dtype.into() };
        let bar = byte_bar(&format!("loading {}", files.name()));
        let mut progress = |now: Progress<'_>| {
            bar.set_length(now.total as u64);
            bar.set_position(now.done as u64);
        };
        let started = amphora_engine::start(device, model, &setup.engine, &mut progress)?;
        bar.finish_and_clear();
        let notes = match load_adapters(&started.handle, &setup.adapters) {
            Ok(notes) => notes,
            Err(error) => return end(Err(error), &started.handle, started.thread),
        };
        let ready_in = began.elapsed();
        let mut report = vec![format!(
            "{base} ready in {:.2} s with {} adapters",
            ready_in.as_secs_f64(),
            setup.adapters.len()
        )];
        report.extend(memory_lines(&started.report));
        report.extend(notes);
        let service = Service {
            max_model_len: started.handle.limits().context(),
            engine: started.handle,
            text: Arc::new(text),
            defaults,
            base: base.into(),
            eos,
        };
        Ok(Running { service, thread: started.thread, dtype, ready_in, report })
    }
}

/// Gives what was assumed about each, as lines.
fn load_adapters(
    engine: &EngineHandle,
    adapters: &[(String, Source)],
) -> anyhow::Result<Vec<String>> {
    let bar = spinner(String::new());
    let mut notes = Vec::new();
    for (name, source) in adapters {
        bar.set_message(format!("loading adapter {name}"));
        let loaded =
            engine.load_adapter(name, source).with_context(|| format!("adapter '{name}'"))?;
        notes.extend(loaded.notes.iter().map(|note| format!("adapter '{name}': {note}")));
    }
    // From here on lists and names know of them.
    engine.settle();
    bar.finish_and_clear();
    Ok(notes)
}

/// What memory the model takes, and what it can hold.
fn memory_lines(report: &StartReport) -> Vec<String> {
    let pools: Vec<String> = Pool::ALL
        .iter()
        .map(|pool| format!("{pool} {}", grouped(report.memory.pool(*pool))))
        .collect();
    let limits = &report.bounds.request;
    let mut lines = vec![
        format!("reserved bytes: {}", pools.join(", ")),
        format!(
            "{} tokens of context, {} tokens of cache, {} sequences in a step",
            limits.max_model_len,
            limits.kv_blocks * limits.block_size,
            report.bounds.scheduler.max_seqs
        ),
    ];
    if report.weights.repeated_bytes > 0 {
        lines.push(format!(
            "the tied head is packed apart from the embedding: {} bytes of the weights",
            grouped(report.weights.repeated_bytes)
        ));
    }
    if let Some(dense) = report.weights.dequantised {
        lines.push(format!(
            "MXFP4 experts are dequantised to {:?}: {} bytes in the files, {} on the device",
            dense.dtype,
            grouped(dense.file_bytes),
            grouped(dense.device_bytes)
        ));
    }
    lines
}

impl From<Dtype> for DType {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::BF16,
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn serve(line: &str) -> anyhow::Result<Setup> {
        match Cli::try_parse_from(line.split_whitespace())?.command {
            Command::Serve(args) => Setup::serve(&args),
            _ => bail!("not serve"),
        }
    }

    #[test]
    fn the_engine_has_ended_when_the_work_is_over_or_has_failed() {
        for fails in [false, true] {
            let setup = serve("amphora serve --backend cpu --no-lora").expect("good flags");
            let mut engine = None;
            let result = with(setup, Voice::Err, |running| {
                engine = Some(running.service.engine.clone());
                if fails { bail!("no good") } else { Ok(()) }
            });
            let told = result.map_err(|error| error.to_string());
            assert_eq!(told, if fails { Err("no good".to_owned()) } else { Ok(()) });
            let sink = Box::new(|_| amphora_engine::Delivery::Ok);
            let request = amphora_engine::Request::new(vec![1], sink);
            assert!(engine.expect("it started").submit(request).is_err(), "it runs on");
        }
    }

    #[test]
    fn without_a_model_the_demo_and_its_adapters_are_served() {
        let setup = serve("amphora serve").expect("good flags");
        assert_eq!(setup.base_name(), demo_assets::MODEL);
        assert_eq!(setup.adapters.len(), 6);
        let alone = serve("amphora serve --no-lora").expect("good flags");
        assert!(alone.adapters.is_empty() && alone.engine.adapters.is_none());
    }

    #[test]
    fn a_folder_is_served_under_its_own_name_or_the_one_given() {
        let setup = serve("amphora serve --model /models/some-moe/").expect("good flags");
        assert_eq!(setup.base_name(), "some-moe");
        let line = "amphora serve --model x --served-model-name org/y";
        assert_eq!(serve(line).expect("good flags").base_name(), "org/y");
    }

    #[test]
    fn a_name_given_twice_is_refused() {
        let line = "amphora serve --model x --adapter a=1 --adapter a=2";
        assert!(serve(line).expect_err("refused").to_string().contains("twice"));
        assert!(serve("amphora serve --adapter sql=1").is_err());
        let line = "amphora serve --model x --adapter ../a=1";
        assert!(serve(line).expect_err("refused").to_string().contains("../a"));
    }

    #[test]
    fn generate_finds_an_adapter_by_name_or_folder() {
        assert_eq!(chosen_adapter("sql", true).expect("one of the demo's").0, "sql");
        assert_eq!(chosen_adapter("a=b", false).expect("a folder").0, "a");
        assert!(chosen_adapter("ghost", true).expect_err("refused").to_string().contains("pirate"));
        assert!(chosen_adapter("sql", false).is_err());
    }
}
