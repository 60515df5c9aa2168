//! A stored adapter after edits that keep its files well-formed: refused, or factors that obey the
//! laws. Without an edit it must load.
#![no_main]

use std::sync::LazyLock;

use amphora_fuzz::mutation::Mutation;
use amphora_fuzz::{golden, load_adapter};
use amphora_model::adapter::AdapterBase;
use libfuzzer_sys::fuzz_target;

static BASE: LazyLock<AdapterBase> = LazyLock::new(golden::base);

fuzz_target!(|mutation: Mutation| {
    let (config, weights) = mutation.apply();
    let loaded = load_adapter(&config, &weights, &BASE);
    assert!(loaded.is_ok() || !mutation.is_none(), "a stored adapter is refused");
});
