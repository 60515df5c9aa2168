//! PEFT adapters of Linear modules made in memory, and the model that each of them means: the checkpoint
//! with scale · B·A added to its weights, which runs without any adapter.

use std::collections::BTreeMap;
use std::path::Path;

use amphora_model::source::Source;
use anyhow::{Context, Result, ensure};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use crate::rng::Rng;

/// Tensors by name, as f32.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// An adapter: A and B of Linear modules under their paths in the checkpoint.
#[derive(Debug, Clone)]
pub struct Adapter {
    /// Rank of every module.
    pub rank: usize,
    /// alpha of every module.
    pub alpha: f64,
    /// By PEFT's names.
    pub tensors: Tensors,
}

/// The tensors of a safetensors file of f32.
///
/// # Errors
/// The file is not there, or holds something else.
pub fn read(path: &Path) -> Result<Tensors> {
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    let file = SafeTensors::deserialize(&bytes)?;
    let mut tensors = Tensors::new();
    for (name, view) in file.iter() {
        ensure!(view.dtype() == Dtype::F32, "{name} is {:?}", view.dtype());
        let words = view.data().chunks_exact(4);
        let values = words.map(|w| f32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect();
        tensors.insert(name.to_owned(), (view.shape().to_vec(), values));
    }
    Ok(tensors)
}

/// The bytes of a safetensors file.
pub fn write(tensors: &Tensors) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    for (name, (shape, values)) in tensors {
        let start = data.len();
        data.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        let place = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(name.clone(), place);
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.into_bytes());
    file.extend(data);
    file
}

impl Adapter {
    /// Random factors for modules of `model`, by their paths.
    ///
    /// # Errors
    /// The model has no such module.
    pub fn random(model: &Tensors, modules: &[String], rank: usize, seed: u64) -> Result<Self> {
        let mut rng = Rng::new(seed, "peft");
        let mut tensors = Tensors::new();
        for path in modules {
            let weight = model.get(&format!("{path}.weight")).with_context(|| path.clone())?;
            let (outputs, inputs) = (weight.0[0], weight.0[1]);
            let mut add = |half: &str, rows: usize, cols: usize| {
                let values = (0..rows * cols).map(|_| 0.2 * rng.normal() as f32).collect();
                let name = format!("base_model.model.{path}.lora_{half}.weight");
                tensors.insert(name, (vec![rows, cols], values));
            };
            add("A", rank, inputs);
            add("B", outputs, rank);
        }
        Ok(Adapter { rank, alpha: 2.0 * (rank as f64).sqrt(), tensors })
    }

    /// The folder that PEFT would have written.
    pub fn source(&self, name: &str) -> Source {
        let config = json!({
            "peft_type": "LORA", "r": self.rank, "lora_alpha": self.alpha, "bias": "none",
            "target_modules": "all-linear", "peft_version": "0.18.0",
        });
        memory(
            name,
            [
                ("adapter_config.json", config.to_string().into_bytes()),
                ("adapter_model.safetensors", write(&self.tensors)),
            ],
        )
    }

    /// The checkpoint in `folder`, one file of f32, with this adapter merged into it.
    ///
    /// # Errors
    /// The folder is no such model, or lacks a module.
    pub fn merged_into(&self, folder: &Path) -> Result<Source> {
        let mut model = read(&folder.join("model.safetensors"))?;
        let scale = self.alpha / self.rank as f64;
        for (name, (shape, a)) in &self.tensors {
            let Some(path) = name.strip_suffix(".lora_A.weight") else { continue };
            let (_, b) = &self.tensors[&format!("{path}.lora_B.weight")];
            let path = path.strip_prefix("base_model.model.").context("PEFT's prefix")?;
            let weight =
                model.get_mut(&format!("{path}.weight")).with_context(|| path.to_owned())?;
            let (rank, inputs) = (shape[0], shape[1]);
            for (i, value) in weight.1.iter_mut().enumerate() {
                let (y, x) = (i / inputs, i % inputs);
                let product = |j| f64::from(b[y * rank + j]) * f64::from(a[j * inputs + x]);
                let delta = scale * (0..rank).map(product).sum::<f64>();
                *value = (f64::from(*value) + delta) as f32;
            }
        }
        let config = std::fs::read(folder.join("config.json"))?;
        Ok(memory("merged", [("config.json", config), ("model.safetensors", write(&model))]))
    }
}

fn memory<const N: usize>(name: &str, files: [(&str, Vec<u8>); N]) -> Source {
    let files = files.into_iter().map(|(name, bytes)| (name.to_owned(), bytes.into())).collect();
    Source::Memory { name: name.to_owned(), files }
}
