//! What fuzz targets share: folders made of bytes, the stored adapters, and the laws that whatever
//! was accepted must obey. A parser that only returns without a panic has shown half of it.

pub mod golden;
pub mod mutation;

use std::collections::BTreeSet;
use std::sync::Arc;

use amphora_model::ModelFiles;
use amphora_model::adapter::{AdapterBase, AdapterFactors, AdapterOptions, AdapterRefused, survey};
use amphora_model::error::FileError;
use amphora_model::source::Source;
use safetensors::SafeTensors;

/// A folder of these files, in memory.
pub fn folder(files: &[(&str, &[u8])]) -> Source {
    Source::Memory {
        name: "fuzzed".to_owned(),
        files: files.iter().map(|(name, bytes)| ((*name).to_owned(), Arc::from(*bytes))).collect(),
    }
}

/// Loads an adapter on each of the models and holds the results against their laws.
pub fn try_adapter(config: &[u8], weights: &[u8]) {
    for base in golden::bases() {
        // Refused or not, the laws are checked.
        let _ = load_adapter(config, weights, base);
    }
}

/// Loads an adapter and holds the result against its laws.
///
/// # Errors
/// The adapter is refused.
pub fn load_adapter(
    config: &[u8],
    weights: &[u8],
    base: &AdapterBase,
) -> Result<AdapterFactors, AdapterRefused> {
    let options = AdapterOptions::default();
    let source = folder(&[("adapter_config.json", config), ("adapter_model.safetensors", weights)]);
    let loaded = AdapterFactors::load(&source, base, &options);
    // What is said without a base never speaks against what a base takes.
    let (survey, against) = survey(&source, &options);
    if loaded.is_ok() {
        assert!(against.is_none(), "{against:?}");
        let pairs: usize = survey.modules.values().map(|module| module.pairs).sum();
        assert_eq!(2 * pairs, survey.tensors);
    }
    match &loaded {
        Ok(factors) => check_factors(factors, weights, base, &options),
        Err(refused) => {
            assert!(!refused.reasons.is_empty(), "refused for no reason");
            let message = refused.to_string();
            assert!(message.contains("fuzzed"), "the folder is not named");
            assert!(message.len() < 1 << 19, "a message of {} bytes", message.len());
        }
    }
    loaded
}

fn check_factors(
    factors: &AdapterFactors,
    weights: &[u8],
    base: &AdapterBase,
    options: &AdapterOptions,
) {
    let mut kept: usize = 0;
    for shrink in &factors.shrinks {
        assert_eq!(shrink.data.len(), shrink.rows * shrink.cols);
        assert!(shrink.data.iter().all(|x| x.is_finite()));
        kept += shrink.data.len();
    }
    let mut used = BTreeSet::new();
    for module in &factors.modules {
        let dims = base.dims(module.layer, module.target);
        let (inputs, outputs) = dims.expect("factors are of what the model has");
        let a = factors.a(module);
        assert_eq!((a.rows, a.cols), (module.rank, inputs));
        assert_eq!((module.b.rows, module.b.cols), (outputs, module.rank));
        assert_eq!(module.b.data.len(), outputs * module.rank);
        assert!(module.b.data.iter().all(|x| x.is_finite()));
        assert!((1..=options.max_rank).contains(&module.rank));
        assert!(module.scale.is_finite());
        let experts = base.experts_of(module.layer, module.target);
        assert_eq!(module.expert.is_some(), experts.is_some());
        assert!(module.expert < experts.or(Some(1)));
        used.insert(module.shrink);
        kept += module.b.data.len();
    }
    assert_eq!(used.len(), factors.shrinks.len(), "an A that no module uses");
    let place = |i: usize| {
        let m = &factors.modules[i];
        (m.layer, m.target, m.expert)
    };
    assert!((1..factors.modules.len()).all(|i| place(i - 1) < place(i)), "not sorted and unique");
    // All or nothing: every number of the file is in a factor.
    let file = SafeTensors::deserialize(weights).expect("what the loader accepts is safetensors");
    let stored: usize = file.iter().map(|(_, t)| t.shape().iter().product::<usize>()).sum();
    assert_eq!(kept, stored, "numbers of the file are lost");
}

/// Opens a model folder and holds the result against its laws.
///
/// # Errors
/// The folder is refused.
pub fn open_model(source: Source) -> Result<ModelFiles, FileError> {
    let opened = ModelFiles::from_source(source);
    match &opened {
        Ok(files) => {
            let mut bytes = 0;
            for name in files.names() {
                let tensor = files.tensor(name).expect("a listed tensor is there");
                let elements: usize = tensor.shape.iter().product();
                assert_eq!(tensor.bytes.len() * 8, elements * tensor.dtype.bitsize());
                bytes += tensor.bytes.len();
            }
            assert_eq!(bytes, files.tensor_bytes());
        }
        Err(error) => assert!(error.to_string().contains("fuzzed"), "the file is not named"),
    }
    opened
}
