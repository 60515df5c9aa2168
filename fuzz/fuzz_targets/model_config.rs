//! `config.json`, and after a zero byte `generation_config.json`, of arbitrary text: refused, or a
//! configuration whose sizes fit together and whose numbers are numbers.
#![no_main]

use amphora_hal::ops::Activation;
use amphora_model::config::{MlpKind, faults};
use amphora_model::{Config, rope_table};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let (config, generation) = match text.split_once('\0') {
        Some((config, generation)) => (config, Some(generation)),
        None => (text, None),
    };
    let faults = faults("fuzzed", config, generation);
    match Config::parse("fuzzed", config, generation) {
        Ok(config) => {
            assert!(faults.is_empty(), "{faults:?}");
            check(&config);
        }
        Err(error) => {
            assert!(error.to_string().contains("fuzzed/"), "the file is not named");
            let said = error.to_string();
            let told = faults.iter().any(|fault| place(&fault.to_string()) == place(&said));
            assert!(told && faults.len() <= 64, "{error}: {faults:?}");
        }
    }
});

/// A message without the value that was found: `faults` reads the text again, and a number may be
/// written otherwise then.
fn place(message: &str) -> (&str, &str) {
    let (field, rest) = message.split_once(" is ").unwrap_or((message, ""));
    (field, rest.rsplit_once(", expected ").map_or(rest, |(_, expected)| expected))
}

fn check(config: &Config) {
    let sizes = [config.hidden, config.kv_heads, config.head_dim, config.vocab, config.layers()];
    assert!(sizes.iter().all(|&size| size > 0));
    assert!(config.heads.is_multiple_of(config.kv_heads));
    assert_eq!(config.mlps.len(), config.layers());
    if config.mlps.contains(&MlpKind::Experts) {
        assert!((1..=config.experts).contains(&config.top_k) && config.intermediate > 0);
    }
    if config.mlps.contains(&MlpKind::Dense) {
        assert!(config.dense_intermediate > 0);
    }
    assert!(config.q_width() >= config.kv_width());
    let tokens = config.eos.iter().chain(&config.bos).chain(&config.pad);
    assert!(tokens.into_iter().all(|&id| (id as usize) < config.vocab));
    let mut numbers = vec![config.rms_eps];
    if let Activation::ClampedInterleaved { limit, alpha } = config.activation {
        numbers.extend([limit, alpha]);
    }
    for number in numbers {
        assert!(number.is_finite() && number > 0.0, "{config:?}");
    }
    let generation = config.generation;
    assert!(generation.temperature.is_none_or(|t| t.is_finite() && t >= 0.0));
    assert!(generation.top_p.is_none_or(|p| p > 0.0 && p <= 1.0));
    // A large table takes long and shows nothing that a small one does not.
    if config.head_dim <= 256 {
        let table = rope_table(&config.rope, config.head_dim, 2);
        assert_eq!(table.len(), 2 * config.head_dim);
        assert!(table.iter().all(|x| x.is_finite()), "{:?}", config.rope);
    }
}
