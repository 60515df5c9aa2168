//! `config.json` and `generation_config.json` → [`Config`].
//!
//! Both styles are read: the hub's (`rope_theta`, `rope_scaling` with `rope_type` or the older
//! `type`, `torch_dtype`) and that of transformers 5 (`rope_parameters`, `dtype`). Defaults are those
//! of transformers' own configuration classes; sizes have none but those that classes derive. Whatever would change the model's
//! numbers and is not understood is refused here, before any tensor is looked at.

mod families;
mod faults;
mod parts;
mod rope;

use amphora_hal::DType;
use amphora_hal::ops::Activation;

use crate::error::ConfigError;
use crate::files::ModelFiles;
use crate::json::{Fields, NumberRule, parse_object};
use crate::{Error, Result};

pub use faults::faults;
pub use rope::{Llama3Scaling, RopeConfig, RopeScaling, YarnScaling};

/// The architectures that load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Experts with a clamped, interleaved SwiGLU; sinks, windows, biases.
    GptOss,
    /// Experts, and dense layers between them; norms of query and key heads.
    Qwen3Moe,
    /// Experts in every layer.
    Mixtral,
    /// Dense.
    Llama,
    /// Dense; norms of query and key heads.
    Qwen3,
}

impl Architecture {
    /// All of them.
    pub const ALL: [Architecture; 5] = [
        Architecture::GptOss,
        Architecture::Qwen3Moe,
        Architecture::Mixtral,
        Architecture::Llama,
        Architecture::Qwen3,
    ];

    /// The `model_type` of `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Architecture::GptOss => "gpt_oss",
            Architecture::Qwen3Moe => "qwen3_moe",
            Architecture::Mixtral => "mixtral",
            Architecture::Llama => "llama",
            Architecture::Qwen3 => "qwen3",
        }
    }

    /// The names of all, as messages list them.
    fn names() -> String {
        Self::ALL.map(Architecture::name).join(", ")
    }
}

/// Architectures that the contract has room for and that do not load yet.
const NOT_YET: &[&str] = &["deepseek_v2", "deepseek_v3", "llama4", "llama4_text"];

/// What follows attention in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpKind {
    /// One MLP for every token.
    Dense,
    /// A router and experts.
    Experts,
}

// Bounds far above any model there is, so that products of two sizes cannot overflow.
const MAX_WIDTH: usize = 1 << 20;
const MAX_COUNT: usize = 1 << 14;
const MAX_VOCAB: usize = 1 << 24;
const MAX_POSITIONS: usize = 1 << 24;
/// Experts of all layers: each has a place in the table of adapters, and most files a tensor's name.
const MAX_EXPERTS: usize = 1 << 18;

/// What a model's files say it is.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Whose layers these are.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Token ids, which may be more than the tokenizer's.
    pub vocab: usize,
    /// What each layer has behind attention.
    pub mlps: Vec<MlpKind>,
    /// Experts of a layer; 0 in a model without.
    pub experts: usize,
    /// Experts of a token; 0 in a model without.
    pub top_k: usize,
    /// Whether the weights of the chosen experts are divided by their sum, where the score leaves
    /// that open.
    pub renorm_top_k: bool,
    /// Width inside an expert; 0 in a model without.
    pub intermediate: usize,
    /// Width inside a dense layer's MLP; 0 in a model without.
    pub dense_intermediate: usize,
    /// Added to the mean square in norms.
    pub rms_eps: f32,
    /// For each layer its sliding window, or `None` for full attention.
    pub windows: Vec<Option<usize>>,
    /// Between gate, up and down.
    pub activation: Activation,
    /// Rotary positions.
    pub rope: RopeConfig,
    /// Positions the model is made for.
    pub max_positions: usize,
    /// Token ids that end a text.
    pub eos: Vec<u32>,
    /// Token id that begins one.
    pub bos: Option<u32>,
    /// Token id of padding.
    pub pad: Option<u32>,
    /// Whether the head is the embedding, with no tensor of its own.
    pub tied_embeddings: bool,
    /// Whether attention projections have biases.
    pub attention_bias: bool,
    /// Whether the projections of dense MLPs have biases.
    pub mlp_bias: bool,
    /// Element type the checkpoint was saved in, where the file says so.
    pub stored_dtype: Option<DType>,
    /// How the experts are stored.
    pub quantization: Quantization,
    /// Sampling that the model's makers suggest.
    pub generation: GenerationDefaults,
}

/// How a checkpoint stores its experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantization {
    /// Plain floating point.
    None,
    /// The hub's MXFP4: `*_blocks` and `*_scales`.
    Mxfp4,
}

/// Suggestions of `generation_config.json`; a request's own parameters come first.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GenerationDefaults {
    /// Whether to sample at all.
    pub do_sample: Option<bool>,
    /// Sampling temperature.
    pub temperature: Option<f32>,
    /// Keep the k most likely.
    pub top_k: Option<usize>,
    /// Keep the most likely until their share reaches p.
    pub top_p: Option<f32>,
    /// Keep those at least so likely as this share of the likeliest.
    pub min_p: Option<f32>,
    /// Divides the logits above 0, and multiplies those below, of tokens that occurred.
    pub repetition_penalty: Option<f32>,
}

impl Config {
    /// Reads the configuration of a model folder.
    ///
    /// # Errors
    /// A file or field is missing, of another kind, inconsistent, or asks for what is not built.
    pub fn read(files: &ModelFiles) -> Result<Self> {
        let config = files.config()?;
        let generation = files.generation_config()?;
        Self::parse(&files.name(), &config, generation.as_deref()).map_err(Error::from)
    }

    /// The same from the texts; `folder` is named in errors.
    ///
    /// # Errors
    /// As [`Config::read`].
    pub fn parse(
        folder: &str,
        config: &str,
        generation: Option<&str>,
    ) -> std::result::Result<Self, ConfigError> {
        let file = format!("{folder}/config.json");
        let object = parse_object(&file, config)?;
        let fields = Fields::new(&file, &object);
        let mut parsed = match architecture(&fields)? {
            Architecture::GptOss => families::gpt_oss(&fields),
            Architecture::Qwen3Moe => families::qwen3_moe(&fields),
            Architecture::Mixtral => families::mixtral(&fields),
            Architecture::Llama => families::llama(&fields),
            Architecture::Qwen3 => families::qwen3(&fields),
        }?;
        let most = MAX_EXPERTS / parsed.layers();
        if parsed.experts > most {
            let names = ["num_experts", "num_local_experts"];
            let field = names.into_iter().find(|name| fields.get(name).is_some());
            let expected = format!("at most {most} in each of {} layers", parsed.layers());
            let (field, found) = (field.unwrap_or(names[1]), parsed.experts.into());
            return Err(fields.refuse(field, &found, &expected));
        }
        if let Some(text) = generation {
            let file = format!("{folder}/generation_config.json");
            let object = parse_object(&file, text)?;
            parsed.take_generation(&Fields::new(&file, &object))?;
        }
        Ok(parsed)
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.windows.len()
    }

    /// Width of all query heads.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key (or value) heads.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Where both files speak, `generation_config.json` is about generation and wins.
    fn take_generation(&mut self, fields: &Fields<'_>) -> std::result::Result<(), ConfigError> {
        let tokens = parts::special_tokens(fields, self.vocab)?;
        if !tokens.eos.is_empty() {
            self.eos = tokens.eos;
        }
        self.bos = tokens.bos.or(self.bos);
        self.pad = tokens.pad.or(self.pad);
        let min_p = fields.number("min_p", NumberRule::NotNegative)?;
        if let Some(above) = min_p.filter(|&min_p| min_p > 1.0) {
            return Err(fields.refuse("min_p", &above.into(), "a number from 0 to 1"));
        }
        self.generation = GenerationDefaults {
            do_sample: fields.flag("do_sample")?,
            temperature: fields.number("temperature", NumberRule::NotNegative)?.map(|x| x as f32),
            top_k: fields.count("top_k", 0..=MAX_VOCAB)?,
            top_p: fields.number("top_p", NumberRule::Share)?.map(|x| x as f32),
            min_p: min_p.map(|x| x as f32),
            repetition_penalty: fields
                .number("repetition_penalty", NumberRule::Positive)?
                .map(|x| x as f32),
        };
        Ok(())
    }
}

fn architecture(fields: &Fields<'_>) -> std::result::Result<Architecture, ConfigError> {
    let found = fields
        .text("model_type")?
        .ok_or_else(|| fields.missing("model_type", &Architecture::names()))?;
    if let Some(known) = Architecture::ALL.into_iter().find(|known| known.name() == found) {
        return Ok(known);
    }
    let (file, found) = (fields.file().to_owned(), found.to_owned());
    let supported = Architecture::names();
    Err(match NOT_YET.contains(&found.as_str()) {
        true => ConfigError::NotYet { file, found, supported },
        false => ConfigError::ModelType { file, found, supported },
    })
}

#[cfg(test)]
#[path = "config/tests.rs"]
mod tests;
