//! A fault under `serve` on a GPU: its process still ends in order, by its code, not by a signal, and does not hang.
//! Needs a GPU; a machine without one says NOT RUN.

use std::process::Command;

use amphora_hal::{Device, DeviceConfig};

use super::Cuda;
use super::fault::serve_until_a_fault;

const HERE: &str = "backend::gpu_fault::a_server_of_its_own";

#[test]
fn a_fault_of_a_gpu_ends_the_process_with_an_error() {
    let test = std::env::current_exe().expect("a test is a file");
    let child = Command::new(test).args([HERE, "--exact", "--ignored", "--nocapture"]).output();
    let child = child.expect("it runs");
    let said = [child.stdout, child.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    if let Some(why) = said[0].lines().find(|line| line.contains("NOT RUN")) {
        return println!("{why}");
    }
    assert_eq!(child.status.code(), Some(1), "{said:?}");
    assert!(said[1].contains("error: the engine stopped"), "{said:?}");
    assert!(!said[1].contains("panicked"), "{said:?}");
}

#[test]
#[ignore = "ends its process, which the test above starts"]
fn a_server_of_its_own() {
    let device = match Cuda::open(&DeviceConfig::default()) {
        Ok(device) => device,
        Err(error) => return println!("NOT RUN: {error}"),
    };
    let code = serve_until_a_fault(device.clone(), || {
        device.provoke_fault().expect("no call has failed yet");
    });
    drop(device);
    std::process::exit(code);
}
