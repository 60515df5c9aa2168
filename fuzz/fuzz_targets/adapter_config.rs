//! `adapter_config.json` of arbitrary bytes beside sound weights: refused, or factors that obey the
//! laws of [`amphora_fuzz::try_adapter`].
#![no_main]

use amphora_fuzz::{golden, try_adapter};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    // The smallest one: what is fuzzed is the other file.
    let weights = golden::ADAPTERS[0].weights;
    try_adapter(data, weights);
});
