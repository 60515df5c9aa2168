//! A fault under `serve` on the CPU, which a test can make fault.

use amphora_hal::{Device, DeviceConfig};

use super::Cpu;
use super::fault::serve_until_a_fault;

#[test]
fn a_fault_of_the_device_fails_what_runs_and_ends_the_command_with_an_error() {
    let device = Cpu::open(&DeviceConfig { threads: Some(1), ..DeviceConfig::default() });
    let device = device.expect("there is a CPU");
    assert_eq!(serve_until_a_fault(device.clone(), || device.provoke_fault()), 1);
}
