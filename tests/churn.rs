//! Adapters that come and go under requests, on the CPU: every answer has the bits that its version gives alone.
#![cfg(feature = "cpu")]

use amphora_backend_cpu::Cpu;
use amphora_hal::{Device, DeviceConfig};
use amphora_tests::churn::{Churn, answers_are_their_versions};
use amphora_tests::golden::hold::BatchBits;

fn churn(slots: usize, arena_bytes: usize, seed: u64) {
    let open = || Cpu::open(&DeviceConfig::default()).expect("there is a CPU");
    answers_are_their_versions(open, Churn { slots, arena_bytes, seed, bits: BatchBits::Same });
}

#[test]
fn one_slot() {
    churn(1, 64 << 20, 1);
}

#[test]
fn three_slots_and_room_for_one_or_two() {
    churn(3, 9 << 20, 2);
}

#[test]
fn the_largest_never_fit() {
    churn(4, 2 << 20, 3);
}
