//! Both files of an adapter of arbitrary bytes. Input: length of the configuration as a little-endian
//! u16, the configuration, then the weights.
#![no_main]

use std::sync::LazyLock;

use amphora_fuzz::{golden, load_adapter};
use amphora_model::adapter::AdapterBase;
use libfuzzer_sys::fuzz_target;

static BASE: LazyLock<AdapterBase> = LazyLock::new(golden::base);

fuzz_target!(|data: &[u8]| {
    let Some((length, rest)) = data.split_first_chunk::<2>() else {
        return;
    };
    let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
    let (config, weights) = rest.split_at(length);
    // Refused or not, the laws have been checked.
    let _ = load_adapter(config, weights, &BASE);
});
