//! A fault of the GPU under a running engine. Of its own process, which is of no use to a GPU afterwards.
//! Needs a GPU; a machine without one says NOT RUN.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)]

use amphora_backend_cuda::Cuda;
use amphora_engine::EngineConfig;
use amphora_hal::{DType, Device, DeviceConfig};
use amphora_tests::golden;
use amphora_tests::serving::{self, Ask};

#[test]
fn a_fault_fails_the_requests_and_ends_the_engine_with_an_error() {
    let device = match Cuda::open(&DeviceConfig::default()) {
        Ok(device) => device,
        Err(error) => return println!("NOT RUN: {error}"),
    };
    let model = golden::folder().join("models").join("gpt_oss");
    let settings = EngineConfig::default();
    let started = serving::start(device.clone(), &model, DType::F32, &settings).unwrap();
    let ask = || Ask::greedy(&[1, 2, 3], None, 4);
    serving::ask_all(&started, &[ask()]).expect("a sound device answers");

    device.provoke_fault().expect("nothing has run yet");
    let failed = serving::ask_all(&started, &[ask(), ask()]).expect_err("the device is lost");
    assert!(failed.to_string().contains("device"), "{failed:#}");
    let ended = started.thread.join().expect_err("the engine does not go on");
    assert!(ended.to_string().contains("the device was lost"), "{ended}");
}
