//! An adapter folder, alone or against the model it is for.

use std::collections::{BTreeMap, BTreeSet};

use amphora_engine::{AdapterConfig, arena_pages};
use amphora_hal::{Backend, DType, HostBytes};
use amphora_model::adapter::{
    AdapterBase, AdapterFactors, AdapterOptions, AdapterRefused, FusedLayout, Orientation, Survey,
    Target, survey,
};
use amphora_model::adapter_image::AdapterImage;
use amphora_model::source::Source;
use amphora_model::{Config, LoraSlices};
use anyhow::bail;

use super::model::{Faults, read_config};
use super::report::{
    AdapterFile, AdapterMemory, AdapterReport, AdapterSays, Applied, AppliedModule, ByDtype, Fault,
    FileModule, Verdict,
};
use crate::cli::InspectArgs;

/// # Errors
/// The model that `--model` names cannot be understood.
pub fn inspect<B: Backend>(
    device: &B,
    args: &InspectArgs,
    folder: &Source,
) -> anyhow::Result<AdapterReport> {
    let options = AdapterOptions {
        max_rank: args.max_lora_rank,
        square_orientation: args.reading.adapter_orientation.map(Into::into),
        round_to: args.reading.adapter_dtype.map(Into::into),
        ..AdapterOptions::default()
    };
    let (survey, refused) = survey(folder, &options);
    let mut reasons = refused.as_ref().map(told).unwrap_or_default();
    let mut applied = None;
    if let Some(model) = &args.model {
        let config = model_config(model)?;
        // What a server would say is all that counts then.
        reasons.clear();
        match AdapterFactors::load(folder, &AdapterBase::from(&config), &options) {
            Ok(factors) => match apply(device, &config, &factors) {
                Ok(found) => {
                    applied = Some(found);
                    reasons.extend(room(device, args, &config, &factors).err());
                }
                Err(error) => reasons.push(fault("unsupported", error.to_string())),
            },
            Err(refused) => reasons = told(&refused),
        }
    }
    let verdict = match (&applied, reasons.is_empty()) {
        (Some(_), true) => Verdict::Accepted,
        (None, true) => Verdict::Open,
        (_, false) => Verdict::Refused,
    };
    Ok(AdapterReport {
        folder: folder.name(),
        model: args.model.as_ref().map(|model| model.display().to_string()),
        backend: B::NAME,
        dtype: DType::from(args.device.dtype).to_string(),
        verdict,
        reasons,
        file: file(&survey),
        says: says(survey),
        applied,
    })
}

fn model_config(folder: &std::path::Path) -> anyhow::Result<Config> {
    let mut faults = Faults::default();
    match read_config(&Source::Folder(folder.to_owned()), &mut faults) {
        Some(config) => Ok(config),
        None => bail!("--model {}: {}", folder.display(), faults.into_messages().join("; ")),
    }
}

fn fault(category: &'static str, message: String) -> Fault {
    Fault { category: Some(category), message, count: 1 }
}

fn told(refused: &AdapterRefused) -> Vec<Fault> {
    let each = refused.reasons.iter().map(|refusal| Fault {
        category: Some(refusal.reason.category().name()),
        message: refusal.to_string(),
        count: refusal.count,
    });
    let further = (refused.further > 0).then(|| Fault {
        category: None,
        message: format!("and {} more reasons of further kinds", refused.further),
        count: refused.further,
    });
    each.chain(further).collect()
}

fn says(survey: Survey) -> AdapterSays {
    AdapterSays {
        rank: survey.rank,
        alpha: survey.alpha,
        use_rslora: survey.use_rslora,
        target_parameters: survey.target_parameters,
        peft_version: survey.peft_version,
        base_model: survey.base_model,
    }
}

fn file(survey: &Survey) -> AdapterFile {
    let modules = survey.modules.iter().map(|(name, module)| FileModule {
        name: name.clone(),
        pairs: module.pairs,
        layers: module.layers,
        lora_a: module.a.iter().cloned().collect(),
        lora_b: module.b.iter().cloned().collect(),
    });
    AdapterFile {
        bytes: survey.file_bytes,
        tensors: survey.tensors,
        dtypes: survey.dtypes.clone(),
        modules: modules.collect(),
    }
}

/// What becomes of checked factors on the model and the device.
fn apply<B: Backend>(
    device: &B,
    config: &Config,
    factors: &AdapterFactors,
) -> amphora_hal::Result<Applied> {
    let slices = LoraSlices::new(config);
    let sizes = |dtype| -> amphora_hal::Result<(usize, usize)> {
        let image = AdapterImage::pack(device, factors, &slices, dtype)?;
        let host: usize = image.pages.iter().map(|page| page.bytes().len()).sum();
        Ok((host, image.bytes()))
    };
    let (f32, bf16) = (sizes(DType::F32)?, sizes(DType::BF16)?);
    Ok(Applied {
        architecture: config.architecture.name(),
        layout: layout(factors),
        notes: factors.notes.clone(),
        modules: Target::ALL
            .into_iter()
            .filter_map(|target| module(device, factors, target))
            .collect(),
        memory: AdapterMemory {
            file: factors.file_bytes,
            host: ByDtype { f32: f32.0, bf16: bf16.0 },
            device: ByDtype { f32: f32.1, bf16: bf16.1 },
        },
    })
}

/// Whether the arena of a server with these arguments would hold it, alone.
fn room<B: Backend>(
    device: &B,
    args: &InspectArgs,
    config: &Config,
    factors: &AdapterFactors,
) -> Result<(), Fault> {
    let no_room = |reason: &dyn std::fmt::Display| {
        fault("memory", format!("--adapter-memory {}: {reason}", args.adapter_memory))
    };
    let (slices, dtype) = (LoraSlices::new(config), DType::from(args.device.dtype));
    let arena = AdapterConfig {
        arena_bytes: args.adapter_memory,
        max_rank: args.max_lora_rank,
        ..AdapterConfig::default()
    };
    let pages = arena_pages(device, slices.layout(), arena, dtype);
    let pages = pages.map_err(|error| no_room(&error))?;
    let image = AdapterImage::pack(device, factors, &slices, dtype);
    let image = image.map_err(|error| fault("unsupported", error.to_string()))?;
    let blocks: Vec<usize> = image.blocks.iter().map(|block| block.bytes).collect();
    pages.check_alone(&blocks).map_err(|error| no_room(&error))
}

fn layout(factors: &AdapterFactors) -> Vec<String> {
    let mut found = Vec::new();
    if factors.layouts.per_expert {
        found.push("experts one by one".to_owned());
    }
    let mut ways: BTreeMap<String, usize> = BTreeMap::new();
    for &FusedLayout { parameter, orientation, decided_by, .. } in &factors.layouts.fused {
        let way = match orientation {
            Orientation::Natural => "natural (lora_A over inputs)",
            Orientation::Swapped => "swapped (lora_A over outputs)",
        };
        let words = decided_by.words();
        *ways.entry(format!("fused {parameter}: {way}, by {words}")).or_default() += 1;
    }
    found.extend(ways.into_iter().map(|(way, layers)| format!("{way}, in {layers} layers")));
    found
}

fn module<B: Backend>(
    device: &B,
    factors: &AdapterFactors,
    target: Target,
) -> Option<AppliedModule> {
    let of: Vec<_> = factors.modules.iter().filter(|m| m.target == target).collect();
    let ranks = || of.iter().map(|m| m.rank);
    let scales = || of.iter().map(|m| m.scale);
    let rank = (ranks().min()?, ranks().max()?);
    let class = |rank| device.caps().rank_class(rank).map_or(rank, |class| class.get());
    Some(AppliedModule {
        projection: target.name(),
        layers: of.iter().map(|m| m.layer).collect::<BTreeSet<_>>().len(),
        factors: of.len(),
        rank,
        rank_class: (class(rank.0), class(rank.1)),
        scale: (scales().fold(f32::INFINITY, f32::min), scales().fold(f32::NEG_INFINITY, f32::max)),
    })
}
