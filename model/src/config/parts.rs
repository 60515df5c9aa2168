//! Fields that several architectures have, read alike.

use amphora_hal::DType;
use serde_json::{Map, Value};

use super::{Architecture, MAX_COUNT, MAX_VOCAB, MAX_WIDTH, Quantization};
use crate::error::ConfigError;
use crate::json::{Fields, NumberRule};

type Result<T> = std::result::Result<T, ConfigError>;

/// Widths of the residual stream and of attention.
pub(super) struct Heads {
    pub(super) hidden: usize,
    pub(super) q: usize,
    pub(super) kv: usize,
    pub(super) dim: usize,
}

/// `head_dim` is `default` where a file has none, or the hidden width divided by the heads.
pub(super) fn heads(fields: &Fields<'_>, default: Option<usize>) -> Result<Heads> {
    let hidden = fields.need_count("hidden_size", 1..=MAX_WIDTH)?;
    let q = fields.need_count("num_attention_heads", 1..=MAX_COUNT)?;
    let kv = fields.count("num_key_value_heads", 1..=MAX_COUNT)?.unwrap_or(q);
    if !q.is_multiple_of(kv) {
        let expected = format!("a divisor of num_attention_heads ({q})");
        return Err(fields.refuse("num_key_value_heads", &kv.into(), &expected));
    }
    let dim = match (fields.count("head_dim", 1..=MAX_COUNT)?, default) {
        (Some(dim), _) | (None, Some(dim)) => dim,
        (None, None) if hidden.is_multiple_of(q) && hidden / q <= MAX_COUNT => hidden / q,
        (None, None) => {
            let expected =
                format!("a whole number, as hidden_size {hidden} is not one of {q} heads");
            return Err(fields.missing("head_dim", &expected));
        }
    };
    if !dim.is_multiple_of(2) {
        return Err(fields.refuse("head_dim", &dim.into(), "an even number"));
    }
    Ok(Heads { hidden, q, kv, dim })
}

pub(super) fn vocab(fields: &Fields<'_>) -> Result<usize> {
    fields.need_count("vocab_size", 1..=MAX_VOCAB)
}

pub(super) fn layers(fields: &Fields<'_>) -> Result<usize> {
    fields.need_count("num_hidden_layers", 1..=MAX_COUNT)
}

pub(super) fn positive(fields: &Fields<'_>, field: &str, default: f32) -> Result<f32> {
    let found = fields.number(field, NumberRule::Positive)?;
    Ok(found.map_or(default, |x| x as f32))
}

pub(super) fn check_activation(fields: &Fields<'_>) -> Result<()> {
    match fields.text("hidden_act")? {
        None | Some("silu") => Ok(()),
        Some(other) => Err(fields.refuse("hidden_act", &other.into(), "silu")),
    }
}

/// `num_experts_per_tok`, which older files also call `experts_per_token`.
pub(super) fn top_k(fields: &Fields<'_>, experts: usize) -> Result<usize> {
    one_of(fields, ["num_experts_per_tok", "experts_per_token"], experts)
}

/// A whole number in 1..=`most` that goes by two names; where both are there they must agree.
pub(super) fn one_of(fields: &Fields<'_>, names: [&str; 2], most: usize) -> Result<usize> {
    let [first, second] = names;
    match (fields.count(first, 1..=most)?, fields.count(second, 1..=most)?) {
        (Some(a), Some(b)) if a != b => {
            Err(fields.refuse(second, &b.into(), &format!("{first} ({a})")))
        }
        (Some(n), _) | (None, Some(n)) => Ok(n),
        (None, None) => Err(fields.missing(first, &format!("a whole number in 1..={most}"))),
    }
}

/// Where `layer_types` does not say which layers have a window.
pub(super) struct Windows<'a> {
    /// The window of those that have one.
    pub(super) window: Option<usize>,
    pub(super) slides: &'a dyn Fn(usize) -> bool,
}

/// The window of each layer: by `layer_types`, else by the architecture's rule.
pub(super) fn windows(
    fields: &Fields<'_>,
    layers: usize,
    rule: &Windows<'_>,
) -> Result<Vec<Option<usize>>> {
    let Some(types) = fields.get("layer_types") else {
        return Ok((0..layers).map(|i| rule.window.filter(|_| (rule.slides)(i))).collect());
    };
    let Some(types) = types.as_array().filter(|types| types.len() == layers) else {
        return Err(fields.refuse(
            "layer_types",
            types,
            &format!("a list of {layers} layer types"),
        ));
    };
    let window_of = |kind: &Value| match (kind.as_str(), rule.window) {
        (Some("full_attention"), _) => Ok(None),
        (Some("sliding_attention"), Some(window)) => Ok(Some(window)),
        (Some("sliding_attention"), None) => {
            let expected = "a whole number, as layers are sliding_attention";
            Err(fields.refuse("sliding_window", &Value::Null, expected))
        }
        _ => Err(fields.refuse("layer_types", kind, "sliding_attention or full_attention")),
    };
    types.iter().map(window_of).collect()
}

pub(super) fn stored_dtype(fields: &Fields<'_>) -> Result<Option<DType>> {
    let field = if fields.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    match fields.text(field)? {
        None => Ok(None),
        Some("float32") => Ok(Some(DType::F32)),
        Some("float16") => Ok(Some(DType::F16)),
        Some("bfloat16") => Ok(Some(DType::BF16)),
        Some(other) => Err(fields.refuse(field, &other.into(), "float32, float16 or bfloat16")),
    }
}

/// Quantised weights are read for gpt_oss alone, in MXFP4; any other pair is refused before a tensor
/// is looked at.
pub(super) fn quantization(
    fields: &Fields<'_>,
    architecture: Architecture,
) -> Result<Quantization> {
    let Some(quantization) = fields.object("quantization_config")? else {
        return Ok(Quantization::None);
    };
    let expected = match architecture {
        Architecture::GptOss => "mxfp4".to_owned(),
        other => format!("no quantization_config, as {} is read in floating point", other.name()),
    };
    match quantization.text("quant_method")? {
        Some("mxfp4") if architecture == Architecture::GptOss => Ok(Quantization::Mxfp4),
        Some(found) => Err(quantization.refuse("quant_method", &found.into(), &expected)),
        None => Err(quantization.missing("quant_method", &expected)),
    }
}

pub(super) struct SpecialTokens {
    pub(super) eos: Vec<u32>,
    pub(super) bos: Option<u32>,
    pub(super) pad: Option<u32>,
}

pub(super) fn special_tokens(fields: &Fields<'_>, vocab: usize) -> Result<SpecialTokens> {
    let one = |field: &str| -> Result<Option<u32>> {
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
            .collect::<Result<_>>()?,
        _ => one("eos_token_id")?.into_iter().collect(),
    };
    Ok(SpecialTokens { eos, bos: one("bos_token_id")?, pad: one("pad_token_id")? })
}
