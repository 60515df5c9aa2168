//! A stored adapter after edits that keep its files well-formed: refused, or factors that obey the
//! laws. Without an edit it must load.
#![no_main]

use amphora_fuzz::mutation::Mutation;
use amphora_fuzz::{golden, load_adapter};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|mutation: Mutation| {
    let (model, config, weights) = mutation.apply();
    let loaded = load_adapter(&config, &weights, &golden::bases()[model]);
    assert!(loaded.is_ok() || !mutation.is_none(), "a stored adapter is refused");
});
