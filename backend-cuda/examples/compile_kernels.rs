//! Compiles every kernel without a GPU: `compile_kernels --arch sm_80,sm_90a [--out FOLDER]`.
//!
//! Fails if a kernel lacks registers that is not in the list of those that may, or if one's warpgroup products
//! wait for each other.
//!
//! Products of few tokens are compiled for the widths of their inputs (`--widths 2880,768`; without it,
//! those of gpt-oss, Qwen3-30B-A3B and the demo model). `--only linear` takes the units alone whose names
//! hold the text. With `--out`, the folder becomes a kernel cache
//! (`AMPHORA_KERNEL_CACHE`) that needs no compiler on the machine it is shipped to. The compiler is found
//! in `AMPHORA_NVRTC_DIR`, else by the loader.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use amphora_backend_cuda::jit::{JitConfig, STREAM_WIDTHS, compile_all};

const USAGE: &str =
    "usage: compile_kernels --arch sm_80,sm_90a,.. [--widths 2880,..] [--only TEXT] [--out FOLDER]";

struct Options {
    architectures: Vec<String>,
    widths: Vec<usize>,
    /// Part of the names of units.
    only: String,
    out: Option<PathBuf>,
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        architectures: Vec::new(),
        widths: STREAM_WIDTHS.to_vec(),
        only: String::new(),
        out: None,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{argument} wants a value\n{USAGE}"))?;
        match argument.as_str() {
            "--arch" => options.architectures.extend(value.split(',').map(str::to_owned)),
            "--widths" => {
                let widths = value.split(',').map(str::parse).collect::<Result<_, _>>();
                options.widths = widths.map_err(|error| format!("{value}: {error}\n{USAGE}"))?;
            }
            "--only" => options.only = value,
            "--out" => options.out = Some(value.into()),
            _ => return Err(format!("{argument} is unknown\n{USAGE}")),
        }
    }
    if options.architectures.is_empty() {
        return Err(USAGE.to_owned());
    }
    Ok(options)
}

fn compile(architecture: &str, options: &Options, nvrtc: Option<&Path>) -> Result<(), String> {
    let started = std::time::Instant::now();
    let kernels = compile_all(architecture, &options.widths, &options.only, nvrtc)
        .map_err(|error| error.to_string())?;
    let bytes: usize = kernels.iter().map(|unit| unit.cubin.len()).sum();
    if let Some(out) = &options.out {
        let failed = |error| format!("{}: {error}", out.display());
        std::fs::create_dir_all(out).map_err(failed)?;
        for unit in &kernels {
            std::fs::write(out.join(&unit.name), &unit.cubin).map_err(failed)?;
        }
    }
    let seconds = started.elapsed().as_secs_f32();
    println!("{architecture}: {} units, {bytes} bytes, {seconds:.1} s", kernels.len());
    let spills = || kernels.iter().flat_map(|unit| unit.spills.iter());
    for spill in spills() {
        println!("{architecture}: {spill}");
    }
    if let Some(words) = kernels.iter().flat_map(|unit| &unit.serialized).next() {
        return Err(format!("{architecture}: {words}"));
    }
    match spills().find(|spill| !spill.is_accepted()) {
        Some(spill) => Err(format!("{architecture}: {spill}: no such spill is accepted")),
        None => Ok(()),
    }
}

fn main() -> ExitCode {
    let run = || {
        let options = options()?;
        let nvrtc = JitConfig::from_environment().nvrtc_dir;
        options.architectures.iter().try_for_each(|arch| compile(arch, &options, nvrtc.as_deref()))
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
