//! `adapter_config.json` of arbitrary bytes beside sound weights: refused, or factors that obey the
//! laws of [`amphora_fuzz::load_adapter`].
#![no_main]

use std::sync::LazyLock;

use amphora_fuzz::{golden, load_adapter};
use amphora_model::adapter::AdapterBase;
use libfuzzer_sys::fuzz_target;

static BASE: LazyLock<AdapterBase> = LazyLock::new(golden::base);

fuzz_target!(|data: &[u8]| {
    // The smallest one: what is fuzzed is the other file.
    let weights = golden::ADAPTERS[0].weights;
    // Refused or not, the laws have been checked.
    let _ = load_adapter(data, weights, &BASE);
});
