//! From a backend's name to its type: the only place that knows which were built in.

use std::process::ExitCode;

use amphora_hal::{Backend, DeviceConfig};
use anyhow::{Context, bail};

use crate::cli::TuneArgs;

#[cfg(all(test, feature = "cpu"))]
mod cpu_fault;
#[cfg(all(test, any(feature = "cpu", feature = "cuda")))]
mod fault;
#[cfg(all(test, feature = "cuda"))]
mod gpu_fault;
#[cfg(feature = "cuda")]
mod tune;

#[cfg(all(test, feature = "cpu"))]
use amphora_backend_cpu::Cpu;
#[cfg(feature = "cuda")]
use amphora_backend_cuda::{Cuda, tuning};

#[cfg(not(any(feature = "cpu", feature = "cuda", feature = "ascend")))]
compile_error!(
    "amphora needs a backend to run on: build with the feature `cpu`, `cuda` or `ascend`"
);

/// The names that `--backend` knows. Unasked, the first built-in one that opens is taken; the host
/// twin is no device and is taken only when it is named.
const NAMES: &[&str] = &["cuda", "ascend", "cpu", "ascend-twin"];

/// Code that is generic over the device it runs on.
pub trait Task {
    type Output;
    /// `passed_over` says, a line each, why better backends were not taken.
    fn run<B: Backend>(self, device: B, passed_over: &[String]) -> anyhow::Result<Self::Output>;
}

/// Opens the device that `name` says, or else the first that opens, and runs `task` on it.
///
/// A backend that is named is taken or refused; another never stands in for it.
pub fn run<T: Task>(
    name: Option<&str>,
    config: &DeviceConfig,
    task: T,
) -> anyhow::Result<T::Output> {
    let Some(name) = name else { return first(config, task) };
    match name {
        #[cfg(feature = "cpu")]
        "cpu" => task.run(open::<amphora_backend_cpu::Cpu>(config)?, &[]),
        #[cfg(feature = "cuda")]
        "cuda" => task.run(open::<amphora_backend_cuda::Cuda>(config)?, &[]),
        #[cfg(feature = "ascend")]
        "ascend" => task.run(open::<amphora_backend_ascend::Ascend>(config)?, &[]),
        #[cfg(feature = "ascend-twin")]
        "ascend-twin" => {
            let library = amphora_backend_ascend::bundled_twin()?;
            let config = DeviceConfig { library: Some(library), ..config.clone() };
            task.run(open::<amphora_backend_ascend::Ascend>(&config)?, &[])
        }
        name if NAMES.contains(&name) => bail!(
            "--backend {name}: this binary was built without it; build with --features {name}"
        ),
        name => bail!("--backend {name}: expected one of {}", NAMES.join(", ")),
    }
}

/// `tune`: searches the choices of the one backend that has any.
pub fn tune(args: &TuneArgs) -> anyhow::Result<ExitCode> {
    #[cfg(feature = "cuda")]
    return tune::run(args);
    #[cfg(not(feature = "cuda"))]
    bail!(
        "tune {}: the backend cuda alone has something to tune, and this binary was built without it; \
         build with --features cuda",
        args.model
    )
}

/// The first that opens, best first.
fn first<T: Task>(config: &DeviceConfig, task: T) -> anyhow::Result<T::Output> {
    let mut passed_over = Vec::new();
    #[cfg(feature = "cuda")]
    match open::<amphora_backend_cuda::Cuda>(config) {
        Ok(device) => return task.run(device, &passed_over),
        Err(error) => passed_over.push(format!("{error:#}")),
    }
    #[cfg(feature = "ascend")]
    match open::<amphora_backend_ascend::Ascend>(config) {
        Ok(device) => return task.run(device, &passed_over),
        Err(error) => passed_over.push(format!("{error:#}")),
    }
    #[cfg(feature = "cpu")]
    match open::<amphora_backend_cpu::Cpu>(config) {
        Ok(device) => return task.run(device, &passed_over),
        Err(error) => passed_over.push(format!("{error:#}")),
    }
    bail!("no backend that was built in opens: {}", passed_over.join("; "))
}

fn open<B: Backend>(config: &DeviceConfig) -> anyhow::Result<B> {
    B::open(config).with_context(|| format!("cannot open backend {}", B::NAME))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Name;

    impl Task for Name {
        type Output = &'static str;

        fn run<B: Backend>(self, _: B, _: &[String]) -> anyhow::Result<&'static str> {
            Ok(B::NAME)
        }
    }

    #[test]
    #[cfg(feature = "cpu")]
    fn the_cpu_is_there_and_is_taken_unasked() {
        assert_eq!(run(Some("cpu"), &DeviceConfig::default(), Name).expect("cpu"), "cpu");
        assert!(run(None, &DeviceConfig::default(), Name).is_ok());
    }

    #[test]
    fn a_backend_that_is_not_there_is_refused() {
        #[cfg(not(feature = "cuda"))]
        {
            let error =
                run(Some("cuda"), &DeviceConfig::default(), Name).expect_err("not built in");
            assert!(error.to_string().contains("--features cuda"), "{error}");
        }
        let error = run(Some("tpu"), &DeviceConfig::default(), Name).expect_err("no such thing");
        assert!(error.to_string().contains("expected one of"), "{error}");
    }
}
