//! `kernels`: every CUDA kernel to machine code for each architecture, without a GPU.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::command::cargo;

/// Names the folder of NVRTC's libraries, for this command and for the binary.
const FOLDER: &str = "AMPHORA_NVRTC_DIR";

/// Where `.ci/run` puts NVIDIA's compiler wheels, relative to the root.
const WHEELS: &str = "target/nvrtc/nvidia/cu13/lib";

/// Where a toolkit puts them.
const TOOLKIT: &str = "/usr/local/cuda/lib64";

#[derive(Debug, clap::Args)]
pub struct Options {
    /// Architectures, as NVRTC names them.
    #[arg(long, value_delimiter = ',', default_value = "sm_80,sm_90a,sm_100a")]
    arch: Vec<String>,
    /// Keep the machine code here: a kernel cache to ship.
    #[arg(long)]
    out: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        let arch = ["sm_80", "sm_90a", "sm_100a"].map(str::to_owned).to_vec();
        Options { arch, out: None }
    }
}

/// The folder with NVRTC: the one that the environment names, the wheels', or the toolkit's.
pub fn compiler(root: &Path) -> Option<PathBuf> {
    let named = std::env::var_os(FOLDER).map(PathBuf::from);
    let candidates = named.into_iter().chain([root.join(WHEELS), PathBuf::from(TOOLKIT)]);
    candidates.into_iter().find(|folder| {
        ["libnvrtc.so.13", "libnvrtc.so"].iter().any(|file| folder.join(file).exists())
    })
}

/// What to do where there is none.
pub const MISSING: &str = "NVRTC was not found: set AMPHORA_NVRTC_DIR to the folder of libnvrtc.so.13, \
or install NVIDIA's wheels as .ci/run does";

/// Compiles; true if all did.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let folder = compiler(root).context(MISSING)?;
    let mut command =
        cargo(root, "run --quiet -p amphora-backend-cuda --example compile_kernels --");
    command.args(["--arch", &options.arch.join(",")]).env(FOLDER, folder);
    if let Some(out) = &options.out {
        command.arg("--out").arg(out);
    }
    let status = command.status().context("cannot start cargo")?;
    Ok(status.success())
}
