//! `config.json` and `generation_config.json` → [`Config`].
//!
//! Both styles are read: the hub's (`rope_theta`, `rope_scaling` with `rope_type` or the older
//! `type`, `torch_dtype`) and that of transformers 5 (`rope_parameters`, `dtype`). Defaults are those
//! of transformers' own configuration class; sizes have none. Whatever would change the model's
//! numbers and is not understood is refused here, before any tensor is looked at.

mod rope;

use amphora_hal::DType;
use serde_json::{Map, Value};

use crate::error::ConfigError;
use crate::files::ModelFiles;
use crate::json::{Fields, NumberRule, parse_object};
use crate::{Error, Result};

pub use rope::{RopeConfig, RopeScaling, YarnScaling};

/// The architectures that load, by `model_type`.
pub const SUPPORTED: &[&str] = &["gpt_oss"];

// Bounds far above any model there is, so that products of two sizes cannot overflow.
const MAX_WIDTH: usize = 1 << 20;
const MAX_COUNT: usize = 1 << 14;
const MAX_VOCAB: usize = 1 << 24;
const MAX_POSITIONS: usize = 1 << 24;

/// The architectures that adapters are read for.
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

/// What follows attention in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpKind {
    /// One MLP for every token.
    Dense,
    /// A router and experts.
    Experts,
}

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
    /// Experts of a layer.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Width inside an expert.
    pub intermediate: usize,
    /// Added to the mean square in norms.
    pub rms_eps: f32,
    /// For each layer its sliding window, or `None` for full attention.
    pub windows: Vec<Option<usize>>,
    /// Clamp of the expert activation.
    pub swiglu_limit: f32,
    /// Factor inside the activation's sigmoid.
    pub swiglu_alpha: f32,
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
        check_model_type(&file, &fields)?;
        let mut parsed = gpt_oss(&fields)?;
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
        let tokens = special_tokens(fields, self.vocab)?;
        if !tokens.eos.is_empty() {
            self.eos = tokens.eos;
        }
        self.bos = tokens.bos.or(self.bos);
        self.pad = tokens.pad.or(self.pad);
        self.generation = GenerationDefaults {
            do_sample: fields.flag("do_sample")?,
            temperature: fields.number("temperature", NumberRule::NotNegative)?.map(|x| x as f32),
            top_k: fields.count("top_k", 0..=MAX_VOCAB)?,
            top_p: fields.number("top_p", NumberRule::Share)?.map(|x| x as f32),
        };
        Ok(())
    }
}

fn check_model_type(file: &str, fields: &Fields<'_>) -> std::result::Result<(), ConfigError> {
    let found = fields
        .text("model_type")?
        .ok_or_else(|| fields.missing("model_type", &SUPPORTED.join(", ")))?;
    if SUPPORTED.contains(&found) {
        return Ok(());
    }
    Err(ConfigError::ModelType {
        file: file.to_owned(),
        found: found.to_owned(),
        supported: SUPPORTED.join(", "),
    })
}

fn gpt_oss(fields: &Fields<'_>) -> std::result::Result<Config, ConfigError> {
    let hidden = fields.need_count("hidden_size", 1..=MAX_WIDTH)?;
    let heads = fields.need_count("num_attention_heads", 1..=MAX_COUNT)?;
    let kv_heads = fields.need_count("num_key_value_heads", 1..=MAX_COUNT)?;
    if !heads.is_multiple_of(kv_heads) {
        let expected = format!("a divisor of num_attention_heads ({heads})");
        return Err(fields.refuse("num_key_value_heads", &kv_heads.into(), &expected));
    }
    let head_dim = fields.need_count("head_dim", 1..=MAX_COUNT)?;
    if !head_dim.is_multiple_of(2) {
        return Err(fields.refuse("head_dim", &head_dim.into(), "an even number"));
    }
    let vocab = fields.need_count("vocab_size", 1..=MAX_VOCAB)?;
    let experts = fields.need_count("num_local_experts", 1..=MAX_COUNT)?;
    let max_positions =
        fields.count("max_position_embeddings", 1..=MAX_POSITIONS)?.unwrap_or(131_072);
    check_activation(fields)?;
    let tokens = special_tokens(fields, vocab)?;
    Ok(Config {
        architecture: Architecture::GptOss,
        hidden,
        heads,
        kv_heads,
        head_dim,
        vocab,
        experts,
        top_k: top_k(fields, experts)?,
        intermediate: fields.need_count("intermediate_size", 1..=MAX_WIDTH)?,
        rms_eps: positive(fields, "rms_norm_eps", 1e-5)?,
        windows: windows(fields)?,
        swiglu_limit: positive(fields, "swiglu_limit", 7.0)?,
        swiglu_alpha: positive(fields, "swiglu_alpha", 1.702)?,
        rope: rope::read(fields, max_positions)?,
        max_positions,
        eos: tokens.eos,
        bos: tokens.bos,
        pad: tokens.pad,
        tied_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        attention_bias: fields.flag("attention_bias")?.unwrap_or(true),
        stored_dtype: stored_dtype(fields)?,
        quantization: quantization(fields)?,
        generation: GenerationDefaults::default(),
    })
}

fn positive(
    fields: &Fields<'_>,
    field: &str,
    default: f32,
) -> std::result::Result<f32, ConfigError> {
    let found = fields.number(field, NumberRule::Positive)?;
    Ok(found.map_or(default, |x| x as f32))
}

fn check_activation(fields: &Fields<'_>) -> std::result::Result<(), ConfigError> {
    match fields.text("hidden_act")? {
        None | Some("silu") => Ok(()),
        Some(other) => Err(fields.refuse("hidden_act", &other.into(), "silu")),
    }
}

/// `num_experts_per_tok`, which older files also call `experts_per_token`.
fn top_k(fields: &Fields<'_>, experts: usize) -> std::result::Result<usize, ConfigError> {
    let named = fields.count("num_experts_per_tok", 1..=experts)?;
    let alias = fields.count("experts_per_token", 1..=experts)?;
    match (named, alias) {
        (Some(a), Some(b)) if a != b => {
            let expected = format!("num_experts_per_tok ({a})");
            Err(fields.refuse("experts_per_token", &b.into(), &expected))
        }
        (Some(k), _) | (None, Some(k)) => Ok(k),
        (None, None) => {
            Err(fields.missing("num_experts_per_tok", &format!("a whole number in 1..={experts}")))
        }
    }
}

/// The window of each layer, from `layer_types`; without it layers alternate, windowed first.
fn windows(fields: &Fields<'_>) -> std::result::Result<Vec<Option<usize>>, ConfigError> {
    let layers = fields.need_count("num_hidden_layers", 1..=MAX_COUNT)?;
    let sliding: Vec<bool> = match fields.get("layer_types") {
        None => (0..layers).map(|i| i % 2 == 0).collect(),
        Some(Value::Array(types)) if types.len() == layers => types
            .iter()
            .map(|t| match t.as_str() {
                Some("sliding_attention") => Ok(true),
                Some("full_attention") => Ok(false),
                _ => Err(fields.refuse("layer_types", t, "sliding_attention or full_attention")),
            })
            .collect::<std::result::Result<_, _>>()?,
        Some(other) => {
            let expected = format!("a list of {layers} layer types");
            return Err(fields.refuse("layer_types", other, &expected));
        }
    };
    let explicit_null = fields.is_null("sliding_window");
    let window = match fields.count("sliding_window", 1..=MAX_POSITIONS)? {
        None if explicit_null => None,
        None => Some(128),
        given => given,
    };
    if window.is_none() && sliding.contains(&true) {
        let expected = "a whole number, as layers are sliding_attention";
        return Err(fields.refuse("sliding_window", &Value::Null, expected));
    }
    Ok(sliding.into_iter().map(|slides| window.filter(|_| slides)).collect())
}

fn stored_dtype(fields: &Fields<'_>) -> std::result::Result<Option<DType>, ConfigError> {
    let field = if fields.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    match fields.text(field)? {
        None => Ok(None),
        Some("float32") => Ok(Some(DType::F32)),
        Some("float16") => Ok(Some(DType::F16)),
        Some("bfloat16") => Ok(Some(DType::BF16)),
        Some(other) => Err(fields.refuse(field, &other.into(), "float32, float16 or bfloat16")),
    }
}

fn quantization(fields: &Fields<'_>) -> std::result::Result<Quantization, ConfigError> {
    let Some(quantization) = fields.object("quantization_config")? else {
        return Ok(Quantization::None);
    };
    match quantization.text("quant_method")? {
        Some("mxfp4") => Ok(Quantization::Mxfp4),
        Some(other) => Err(quantization.refuse("quant_method", &other.into(), "mxfp4")),
        None => Err(quantization.missing("quant_method", "mxfp4")),
    }
}

struct SpecialTokens {
    eos: Vec<u32>,
    bos: Option<u32>,
    pad: Option<u32>,
}

fn special_tokens(
    fields: &Fields<'_>,
    vocab: usize,
) -> std::result::Result<SpecialTokens, ConfigError> {
    let one = |field: &str| -> std::result::Result<Option<u32>, ConfigError> {
        // Some checkpoints say −1 for "none".
        if fields.get(field).and_then(Value::as_i64) == Some(-1) {
            return Ok(None);
        }
        Ok(fields.count(field, 0..=vocab - 1)?.map(|id| id as u32))
    };
    let eos = match fields.get("eos_token_id") {
        Some(Value::Array(list)) => list
            .iter()
            .map(|id| {
                let mut holder = Map::new();
                holder.insert("eos_token_id".to_owned(), id.clone());
                let id = fields.with(&holder).need_count("eos_token_id", 0..=vocab - 1)?;
                Ok(id as u32)
            })
            .collect::<std::result::Result<_, ConfigError>>()?,
        _ => one("eos_token_id")?.into_iter().collect(),
    };
    Ok(SpecialTokens { eos, bos: one("bos_token_id")?, pad: one("pad_token_id")? })
}

#[cfg(test)]
#[path = "config/tests.rs"]
mod tests;
