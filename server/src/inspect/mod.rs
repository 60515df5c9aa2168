//! `amphora inspect DIR`: what a model or adapter folder holds, what it needs in memory, and whether this
//! build would take it, with every reason if not. Nothing is loaded to a device.

mod adapter;
mod human;
mod model;
mod report;

use std::process::ExitCode;

use amphora_hal::Backend;
use amphora_model::source::Source;
use anyhow::bail;

use crate::backend::{self, Task};
use crate::cli::InspectArgs;
use crate::console::Voice;
use report::{Report, Verdict};

/// The exit code is 0 if the folder is accepted (or nothing speaks against an adapter that is looked at
/// without its model), and 1 if it is refused.
pub fn run(args: InspectArgs) -> anyhow::Result<ExitCode> {
    let config = args.device.config();
    let name = args.device.backend.clone();
    let json = args.json;
    let report = backend::run(name.as_deref(), &config, Inspect(args))?;
    if json {
        Voice::Out.line(serde_json::to_string_pretty(&report)?)?;
    } else {
        for line in human::lines(&report) {
            Voice::Out.line(line)?;
        }
    }
    Ok(match report.verdict() {
        Verdict::Refused => ExitCode::FAILURE,
        Verdict::Accepted | Verdict::Open => ExitCode::SUCCESS,
    })
}

/// What is done once a device is open: it says how weights and blocks would be packed.
struct Inspect(InspectArgs);

impl Task for Inspect {
    type Output = Report;

    fn run<B: Backend>(self, device: B, _: &[String]) -> anyhow::Result<Report> {
        let Inspect(args) = self;
        let folder = Source::Folder(args.folder.clone());
        let has = |file| folder.has(file);
        if !args.folder.is_dir() {
            bail!("{}: no such folder", args.folder.display());
        }
        if has("adapter_config.json") || has("adapter_model.safetensors") {
            return Ok(Report::Adapter(adapter::inspect(&device, &args, &folder)?));
        }
        if has("config.json") || has("model.safetensors") || has("model.safetensors.index.json") {
            return Ok(Report::Model(model::inspect(&device, &args, folder)));
        }
        bail!(
            "{}: neither a model folder (config.json, *.safetensors) nor an adapter folder \
             (adapter_config.json, adapter_model.safetensors)",
            args.folder.display()
        )
    }
}
