//! A model folder.

use std::collections::BTreeMap;

use amphora_engine::{EngineConfig, budget};
use amphora_hal::{Backend, DType};
use amphora_model::config::{self, MlpKind};
use amphora_model::source::Source;
use amphora_model::{Config, LoadOptions, ModelFiles, examine};

use super::report::{
    ByDtype, Fault, ModelFacts, ModelFileFacts, ModelMemory, ModelReport, Verdict,
};
use crate::cli::InspectArgs;
use crate::text::{Text, TextFiles};

/// The texts of a configuration are a few kilobytes.
const TEXT_LIMIT: u64 = 64 << 20;
/// Faults of a kind that are told one by one.
const TOLD: usize = 3;

pub fn inspect<B: Backend>(device: &B, args: &InspectArgs, folder: Source) -> ModelReport {
    let dtype = DType::from(args.device.dtype);
    let mut faults = Faults::default();
    let config = read_config(&folder, &mut faults);
    let files = ModelFiles::from_source(folder.clone()).map_err(|error| faults.add(&error)).ok();
    if let Some(files) = &files {
        let text = TextFiles::of(files).and_then(|files| Text::new(&files));
        if let Err(error) = text {
            faults.add(&error);
        }
    }
    let mut memory = None;
    if let Some(config) = &config {
        let f32 = Tier::of(device, files.as_ref(), config, DType::F32);
        let bf16 = Tier::of(device, files.as_ref(), config, DType::BF16);
        let both = |of: fn(&Tier) -> usize| ByDtype { f32: of(&f32), bf16: of(&bf16) };
        memory = Some(ModelMemory {
            weights: both(|tier| tier.weights),
            kv_per_1000_tokens: both(|tier| tier.kv),
            step: both(|tier| tier.step),
            adapter_table: f32.table,
        });
        let wanted = if dtype == DType::F32 { f32 } else { bf16 };
        for fault in wanted.faults {
            faults.push(fault);
        }
    }
    ModelReport {
        folder: folder.name(),
        backend: B::NAME,
        dtype: dtype.to_string(),
        verdict: if faults.0.is_empty() { Verdict::Accepted } else { Verdict::Refused },
        reasons: faults.0.into_iter().map(|(_, fault)| fault).collect(),
        config: config.as_ref().map(facts),
        files: files.as_ref().map(file_facts),
        memory,
    }
}

/// The configuration of a model folder, if it is sound.
pub fn read_config(folder: &Source, faults: &mut Faults) -> Option<Config> {
    let missing = "the model's configuration";
    let text = folder.need_text("config.json", TEXT_LIMIT, missing);
    let generation = folder.read_text("generation_config.json", TEXT_LIMIT);
    let (Ok(text), Ok(generation)) = (&text, &generation) else {
        for error in [text.err(), generation.err()].into_iter().flatten() {
            faults.add(&error);
        }
        return None;
    };
    let generation = generation.as_deref();
    match Config::parse(&folder.name(), text, generation) {
        Ok(config) => Some(config),
        Err(_) => {
            for fault in config::faults(&folder.name(), text, generation) {
                faults.add(&fault);
            }
            None
        }
    }
}

/// What a model takes in one type of arithmetic, and what speaks against it there.
#[derive(Default)]
struct Tier {
    weights: usize,
    kv: usize,
    step: usize,
    table: usize,
    /// Their kinds and messages.
    faults: Vec<(String, String)>,
}

impl Tier {
    fn of<B: Backend>(
        device: &B,
        files: Option<&ModelFiles>,
        config: &Config,
        dtype: DType,
    ) -> Self {
        let mut tier = Tier::default();
        if let Some(files) = files {
            let options = LoadOptions { dtype, positions: config.max_positions };
            let (report, faults) = examine(files, config, options, device);
            tier.weights = report.device_bytes;
            tier.faults.extend(faults.iter().map(|fault| (kind(fault), fault.to_string())));
        }
        match budget(device, config, dtype, &EngineConfig::default()) {
            Ok(budget) => {
                tier.kv = 1000 * budget.kv_per_position;
                tier.step = budget.activations + budget.workspace;
                tier.table = budget.adapter_table;
                let missing = budget.missing.iter().map(ToString::to_string);
                tier.faults.extend(missing.map(|message| ("operator".to_owned(), message)));
            }
            Err(error) => tier.faults.push(("setting".to_owned(), error.to_string())),
        }
        tier
    }
}

/// The kind of a fault: the names of its variants.
fn kind(fault: &amphora_model::Error) -> String {
    let debug = format!("{fault:?}");
    debug.split(['{', '"']).next().unwrap_or_default().to_owned()
}

/// Faults by kind; of many of one kind, the first few and a number are kept.
#[derive(Default)]
pub struct Faults(Vec<(String, Fault)>);

impl Faults {
    pub fn add(&mut self, error: &dyn std::error::Error) {
        let message = error.to_string();
        self.push((message.clone(), message));
    }

    fn push(&mut self, (kind, message): (String, String)) {
        let alike: Vec<usize> = (0..self.0.len()).filter(|&i| self.0[i].0 == kind).collect();
        match alike.last() {
            Some(&last) if alike.len() >= TOLD => self.0[last].1.count += 1,
            _ => self.0.push((kind, Fault { category: None, message, count: 1 })),
        }
    }

    pub fn into_messages(self) -> Vec<String> {
        self.0.into_iter().map(|(_, fault)| fault.message).collect()
    }
}

fn facts(config: &Config) -> ModelFacts {
    ModelFacts {
        architecture: config.architecture.name(),
        layers: config.layers(),
        expert_layers: config.mlps.iter().filter(|mlp| **mlp == MlpKind::Experts).count(),
        experts: config.experts,
        experts_per_token: config.top_k,
        hidden: config.hidden,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        expert_intermediate: config.intermediate,
        dense_intermediate: config.dense_intermediate,
        vocab: config.vocab,
        max_positions: config.max_positions,
        tied_embeddings: config.tied_embeddings,
    }
}

fn file_facts(files: &ModelFiles) -> ModelFileFacts {
    let mut facts = ModelFileFacts {
        shards: files.shards(),
        tensors: 0,
        parameters: 0,
        bytes: 0,
        dtypes: BTreeMap::new(),
    };
    for name in files.names() {
        let Some(tensor) = files.tensor(name) else { continue };
        let elements: usize = tensor.shape.iter().product();
        facts.tensors += 1;
        facts.bytes += tensor.bytes.len();
        *facts.dtypes.entry(format!("{:?}", tensor.dtype)).or_default() += tensor.bytes.len();
        facts.parameters += match name {
            // Two numbers a byte, and a scale that is none of them.
            name if name.ends_with("_blocks") => 2 * elements,
            name if name.ends_with("_scales") => 0,
            _ => elements,
        };
    }
    facts
}
