//! `tune`: searches, on the machine at hand, which kernels and sizes run a model's products fastest, and
//! writes files for `--tuned-config-dir`.
//!
//! Calls are measured as a step runs them: a layer's routing and experts with adapters, or a projection
//! with them, recorded, over copies of the weights that no cache holds, in turns with what the heuristic
//! chooses. Only choices that keep their operator's laws are tried. One that gains too little to be told
//! from noise is left to the heuristic, and a second, longer comparison must agree.

mod files;
mod search;
mod shapes;

use std::process::ExitCode;

use amphora_hal::{Device, DeviceConfig};
use amphora_model::Config;

use super::Cuda;
use crate::cli::TuneArgs;
use crate::console::Voice;

/// Runs the command.
pub fn run(args: &TuneArgs) -> anyhow::Result<ExitCode> {
    let model = crate::bench::open(&args.model, None)?;
    let config = Config::read(&model)?;
    let device = super::open::<Cuda>(&DeviceConfig::default())?;
    let earlier = files::Earlier::read(&args.output, files::gpu(&device))?;
    Voice::Out.line(format_args!(
        "tuning {} on {}, at most {} s",
        args.model,
        device.caps().name,
        args.budget
    ))?;
    let shapes = shapes::Shapes::new(&config, args);
    earlier.search(|found| search::search(&device, &shapes, args, found))?;
    Ok(ExitCode::SUCCESS)
}
