//! From a backend's name to its type: the only place that knows which were built in.

use amphora_hal::{Backend, DeviceConfig};
use anyhow::{Context, bail};

#[cfg(not(feature = "cpu"))]
compile_error!("amphora needs a backend to run on: build with the feature `cpu`");

/// The names that `--backend` knows, best first.
const NAMES: &[&str] = &["cuda", "ascend", "ascend-twin", "cpu"];

/// Code that is generic over the device it runs on.
pub trait Task {
    type Output;
    fn run<B: Backend>(self, device: B) -> anyhow::Result<Self::Output>;
}

/// Opens the device that `name` says, or else the first that opens, and runs `task` on it.
///
/// A backend that is named is taken or refused; another never stands in for it.
pub fn run<T: Task>(
    name: Option<&str>,
    config: &DeviceConfig,
    task: T,
) -> anyhow::Result<T::Output> {
    match name {
        #[cfg(feature = "cpu")]
        None | Some("cpu") => open::<amphora_backend_cpu::Cpu, T>(config, task),
        Some(name) if NAMES.contains(&name) => bail!(
            "--backend {name}: this binary was built without it; build with --features {name}"
        ),
        Some(name) => bail!("--backend {name}: expected one of {}", NAMES.join(", ")),
    }
}

fn open<B: Backend, T: Task>(config: &DeviceConfig, task: T) -> anyhow::Result<T::Output> {
    let device = B::open(config).with_context(|| format!("cannot open backend {}", B::NAME))?;
    task.run(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Name;

    impl Task for Name {
        type Output = &'static str;

        fn run<B: Backend>(self, _device: B) -> anyhow::Result<&'static str> {
            Ok(B::NAME)
        }
    }

    #[test]
    #[cfg(feature = "cpu")]
    fn the_cpu_is_there_and_is_taken_unasked() {
        for name in [None, Some("cpu")] {
            assert_eq!(run(name, &DeviceConfig::default(), Name).expect("cpu"), "cpu");
        }
    }

    #[test]
    fn a_backend_that_is_not_there_is_refused_by_feature() {
        let error = run(Some("cuda"), &DeviceConfig::default(), Name).expect_err("not built in");
        assert!(error.to_string().contains("--features cuda"), "{error}");
        let error = run(Some("tpu"), &DeviceConfig::default(), Name).expect_err("no such thing");
        assert!(error.to_string().contains("expected one of"), "{error}");
    }
}
