//! An index of shards of arbitrary bytes over two sound shards: refused with its name, or the model's
//! tensors are those of the shards that it names.
#![no_main]

use std::sync::LazyLock;

use amphora_fuzz::{folder, open_model};
use libfuzzer_sys::fuzz_target;

/// Tensors `a` and `b`, two bytes each.
const FIRST: &str = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}"#;
/// Tensor `c`, two bytes.
const SECOND: &str = r#"{"c":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;

/// The folder but for its index.
static SHARDS: LazyLock<[Vec<u8>; 2]> =
    LazyLock::new(|| [shard(FIRST, b"wxyz"), shard(SECOND, b"yz")]);

fn shard(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

fuzz_target!(|data: &[u8]| {
    let opened = open_model(folder(&[
        ("model.safetensors.index.json", data),
        ("first.safetensors", &SHARDS[0]),
        ("second.safetensors", &SHARDS[1]),
    ]));
    if let Ok(files) = opened {
        let names: Vec<&str> = files.names().collect();
        assert!([&[][..], &["a", "b"], &["c"], &["a", "b", "c"]].contains(&&names[..]));
    }
});
