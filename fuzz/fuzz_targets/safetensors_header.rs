//! A model's tensor file of arbitrary bytes: refused with the file's name, or every tensor in it lies
//! inside the file and is as large as its shape and type say.
#![no_main]

use amphora_fuzz::{folder, open_model};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(files) = open_model(folder(&[("model.safetensors", data)])) {
        let header = data.first_chunk::<8>().map_or(0, |length| u64::from_le_bytes(*length));
        assert_eq!(8 + header as usize + files.tensor_bytes(), data.len(), "bytes left over");
    }
});
