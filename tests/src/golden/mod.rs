//! The stored outputs of transformers + PEFT, and the rules they are compared by.

pub mod hold;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use safetensors::{Dtype, SafeTensors};

/// f32 compute: every logit and log-probability within this of the golden one. Independent
/// implementations agree within 1e-4 on logits of standard deviation 3; the rest is room for another
/// order of sums.
pub const F32_TOLERANCE: f32 = 2e-3;

/// The models that have stored sets.
pub const MODELS: [&str; 8] = [
    "gpt_oss",
    "gpt_oss_bf16",
    "gpt_oss_mxfp4",
    "qwen3_moe",
    "qwen3_moe_sparse",
    "mixtral",
    "llama",
    "qwen3",
];

/// The prompts of every run.
pub const PROMPTS: [&str; 4] = ["p0", "p1", "p2", "p3"];

/// The folder of stored sets.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden")
}

/// A file of one golden run: a model as it is, or with one adapter.
#[derive(Debug)]
pub struct Run {
    /// `None` is the base.
    pub adapter: Option<String>,
    bytes: Vec<u8>,
    json: serde_json::Value,
}

/// What is stored of one prompt.
#[derive(Debug, Clone)]
pub struct Prompt {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Position of the first stored row of logits.
    pub logits_start: usize,
    /// `[positions, vocab]`.
    pub logits: Vec<f32>,
    /// Values of a row.
    pub vocab: usize,
    /// Greedy continuation, end of sequence ignored.
    pub greedy_ids: Vec<u32>,
    /// Its log-probabilities.
    pub greedy_logprobs: Vec<f32>,
}

/// What is stored of the inside of a model for a prompt.
#[derive(Debug, Clone)]
pub struct Inside {
    /// Token ids of the prompt.
    pub tokens: Vec<u32>,
    /// `[layers + 2, tokens, hidden]`: embedding, residual after each layer, final norm.
    pub hidden: Vec<f32>,
    /// The layers that have experts.
    pub expert_layers: Vec<usize>,
    /// `[expert layers, tokens, experts]`.
    pub logits: Vec<f32>,
    /// `[expert layers, tokens, top_k]`, by descending weight.
    pub experts: Vec<i32>,
    /// The weights applied.
    pub weights: Vec<f32>,
}

impl Run {
    /// Reads the run of `adapter` on `model`.
    ///
    /// # Errors
    /// The files are not there or are damaged.
    pub fn read(model: &str, adapter: Option<&str>) -> Result<Self> {
        let name = adapter.unwrap_or("base");
        let path = folder().join("expected").join(model).join(name);
        let read = |ending: &str| {
            let path = path.with_extension(ending);
            std::fs::read(&path).with_context(|| path.display().to_string())
        };
        Ok(Run {
            adapter: adapter.map(str::to_owned),
            bytes: read("safetensors")?,
            json: serde_json::from_slice(&read("json")?)?,
        })
    }

    /// The base and every adapter of `model`, the base first.
    ///
    /// # Errors
    /// As [`Run::read`].
    pub fn all(model: &str) -> Result<Vec<Self>> {
        let mut runs = vec![Self::read(model, None)?];
        for adapter in adapters(model)? {
            runs.push(Self::read(model, Some(&adapter))?);
        }
        Ok(runs)
    }

    /// What is stored of prompt `name`.
    ///
    /// # Errors
    /// The file is damaged.
    pub fn prompt(&self, name: &str) -> Result<Prompt> {
        let tensors = SafeTensors::deserialize(&self.bytes)?;
        let of = |what: &str| format!("{name}.{what}");
        let logits = tensors.tensor(&of("logits"))?;
        let start = self.json["prompts"][name]["logits_start"].as_u64().context("logits_start")?;
        Ok(Prompt {
            tokens: ids(&tensors, &of("input_ids"))?,
            logits_start: start as usize,
            vocab: logits.shape()[1],
            logits: floats(&tensors, &of("logits"))?,
            greedy_ids: ids(&tensors, &of("greedy_ids"))?,
            greedy_logprobs: floats(&tensors, &of("greedy_logprobs"))?,
        })
    }

    /// What is stored of the inside: one prompt of a run has it, or none.
    ///
    /// # Errors
    /// The file is damaged.
    pub fn inside(&self) -> Result<Option<Inside>> {
        let tensors = SafeTensors::deserialize(&self.bytes)?;
        let stored = |name: &&str| tensors.tensor(&format!("{name}.hidden_states")).is_ok();
        let Some(name) = PROMPTS.into_iter().find(stored) else {
            return Ok(None);
        };
        let of = |what: &str| format!("{name}.{what}");
        let layers = self.json["prompts"][name]["moe_layers"].as_array().context("moe_layers")?;
        let mut inside = Inside {
            tokens: ids(&tensors, &of("input_ids"))?,
            hidden: floats(&tensors, &of("hidden_states"))?,
            expert_layers: layers.iter().filter_map(|l| Some(l.as_u64()? as usize)).collect(),
            logits: Vec::new(),
            experts: Vec::new(),
            weights: Vec::new(),
        };
        if !inside.expert_layers.is_empty() {
            let experts = ids(&tensors, &of("router_indices"))?;
            inside.logits = floats(&tensors, &of("router_logits"))?;
            inside.experts = experts.into_iter().map(|id| id as i32).collect();
            inside.weights = floats(&tensors, &of("router_weights"))?;
        }
        Ok(Some(inside))
    }
}

/// The adapters that are stored for `model`, sorted.
///
/// # Errors
/// The folder is not there.
pub fn adapters(model: &str) -> Result<Vec<String>> {
    let path = folder().join("adapters").join(model);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&path).with_context(|| path.display().to_string())? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    ensure!(!names.is_empty(), "{} holds no adapter", path.display());
    Ok(names)
}

fn floats(tensors: &SafeTensors<'_>, name: &str) -> Result<Vec<f32>> {
    let tensor = tensors.tensor(name).with_context(|| name.to_owned())?;
    ensure!(tensor.dtype() == Dtype::F32, "{name} is {:?}", tensor.dtype());
    let words = tensor.data().chunks_exact(4);
    Ok(words.map(|w| f32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect())
}

fn ids(tensors: &SafeTensors<'_>, name: &str) -> Result<Vec<u32>> {
    let tensor = tensors.tensor(name).with_context(|| name.to_owned())?;
    let size = match tensor.dtype() {
        Dtype::I64 => 8,
        Dtype::I32 => 4,
        other => anyhow::bail!("{name} is {other:?}"),
    };
    // Little-endian and never negative, so the low word is the id.
    let words = tensor.data().chunks_exact(size);
    Ok(words.map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect())
}

/// The largest difference, with where it is.
pub fn worst(got: &[f32], want: &[f32]) -> (f32, usize) {
    assert_eq!(got.len(), want.len(), "lengths differ");
    got.iter().zip(want).enumerate().fold((0.0, 0), |(worst, at), (i, (g, w))| {
        let off = (g - w).abs();
        // A NaN is off by everything.
        if off > worst || off.is_nan() {
            (if off.is_nan() { f32::INFINITY } else { off }, i)
        } else {
            (worst, at)
        }
    })
}

/// The logarithm of the softmax of a row of logits, in f64.
pub fn log_softmax(row: &[f32]) -> Vec<f64> {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = row.iter().map(|v| f64::from(v - most).exp()).sum();
    row.iter().map(|v| f64::from(v - most) - total.ln()).collect()
}

/// Per position: KL(want, got) and whether the largest logit is the same one.
pub fn divergence(got: &[f32], want: &[f32], vocab: usize) -> Vec<(f64, bool)> {
    let argmax = |row: &[f32]| {
        row.iter().enumerate().fold(0, |best, (i, v)| if *v > row[best] { i } else { best })
    };
    got.chunks(vocab)
        .zip(want.chunks(vocab))
        .map(|(got, want)| {
            let (p, q) = (log_softmax(want), log_softmax(got));
            let kl = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum();
            (kl, argmax(got) == argmax(want))
        })
        .collect()
}
