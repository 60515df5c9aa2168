//! Both files of an adapter of arbitrary bytes. Input: length of the configuration as a little-endian
//! u16, the configuration, then the weights.
#![no_main]

use amphora_fuzz::try_adapter;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((length, rest)) = data.split_first_chunk::<2>() else {
        return;
    };
    let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
    let (config, weights) = rest.split_at(length);
    try_adapter(config, weights);
});
