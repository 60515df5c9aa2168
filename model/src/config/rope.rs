//! The rotary part of `config.json`, in either style.

use serde_json::Value;

use crate::error::ConfigError;
use crate::json::{Fields, NumberRule};

/// Rotary positions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// How they are stretched to longer contexts.
    pub scaling: RopeScaling,
}

/// How rotary frequencies are stretched.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// YaRN (Peng et al. 2023, arXiv 2309.00071).
    Yarn(YarnScaling),
    /// That of Llama 3.1.
    Llama3(Llama3Scaling),
}

/// YaRN's parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct YarnScaling {
    /// How much longer than the original the context is.
    pub factor: f64,
    /// Positions of the original.
    pub original_positions: usize,
    /// Turns over the original context above which a frequency is kept.
    pub beta_fast: f64,
    /// Turns below which it is divided by `factor`.
    pub beta_slow: f64,
    /// Whether the borders between are rounded to whole dimensions.
    pub truncate: bool,
    /// Multiplies cosines and sines.
    pub attention_factor: f64,
}

/// Low-frequency stretching of Llama 3.1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3Scaling {
    /// How much slow frequencies are stretched.
    pub factor: f64,
    /// Positions of the original.
    pub original_positions: usize,
    /// Turns over the original context below which a frequency is divided by `factor`.
    pub low_freq_factor: f64,
    /// Turns above which it is kept; more than `low_freq_factor`.
    pub high_freq_factor: f64,
}

/// What an architecture takes when a file says nothing.
pub(super) struct RopeDefaults {
    pub(super) theta: f64,
    pub(super) scaling: RopeScaling,
}

/// What transformers takes for gpt_oss.
pub(super) const GPT_OSS: RopeDefaults = RopeDefaults {
    theta: 150_000.0,
    scaling: RopeScaling::Yarn(YarnScaling {
        factor: 32.0,
        original_positions: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: false,
        attention_factor: 1.346_573_590_279_972_7, // 0.1 · ln 32 + 1
    }),
};

pub(super) fn read(
    fields: &Fields<'_>,
    max_positions: usize,
    defaults: &RopeDefaults,
) -> Result<RopeConfig, ConfigError> {
    let outer_theta = theta(fields)?;
    refuse_partial(fields)?;
    let scaling = match fields.object("rope_scaling")? {
        Some(scaling) if !scaling.is_empty() => Some(scaling),
        _ => fields.object("rope_parameters")?,
    };
    let Some(scaling) = scaling.filter(|s| !s.is_empty()) else {
        return Ok(RopeConfig {
            theta: outer_theta.unwrap_or(defaults.theta),
            scaling: defaults.scaling,
        });
    };
    for nested in ["full_attention", "sliding_attention"] {
        if let Some(value) = scaling.get(nested) {
            return Err(scaling.refuse(nested, value, "one set of parameters for all layers"));
        }
    }
    refuse_partial(&scaling)?;
    let theta = theta(&scaling)?.or(outer_theta).unwrap_or(defaults.theta);
    let kind_field = if scaling.get("rope_type").is_some() { "rope_type" } else { "type" };
    let kind = match scaling.text(kind_field)? {
        None | Some("default") => RopeScaling::None,
        Some("yarn") => {
            let outer = fields.count("original_max_position_embeddings", 1..=max_positions)?;
            RopeScaling::Yarn(yarn(&scaling, outer, max_positions)?)
        }
        Some("llama3") => RopeScaling::Llama3(llama3(&scaling)?),
        Some(other) => {
            return Err(scaling.refuse(kind_field, &other.into(), "yarn, llama3 or default"));
        }
    };
    Ok(RopeConfig { theta, scaling: kind })
}

/// Frequencies are powers of 1/theta: at 1 they are all the same, and below 1 they grow past f32.
fn theta(fields: &Fields<'_>) -> Result<Option<f64>, ConfigError> {
    match fields.number("rope_theta", NumberRule::Positive)? {
        Some(theta) if theta <= 1.0 => {
            Err(fields.refuse("rope_theta", &Value::from(theta), "more than 1"))
        }
        other => Ok(other),
    }
}

fn refuse_partial(fields: &Fields<'_>) -> Result<(), ConfigError> {
    match fields.number("partial_rotary_factor", NumberRule::Any)? {
        Some(share) if share != 1.0 => {
            Err(fields.refuse("partial_rotary_factor", &Value::from(share), "1"))
        }
        _ => Ok(()),
    }
}

/// All four fields must be there: transformers has no defaults for them either.
fn llama3(fields: &Fields<'_>) -> Result<Llama3Scaling, ConfigError> {
    let need = |field: &str| {
        let found = fields.number(field, NumberRule::Positive)?;
        found.ok_or_else(|| fields.missing(field, "a positive number"))
    };
    let scaling = Llama3Scaling {
        factor: need("factor")?,
        original_positions: fields
            .need_count("original_max_position_embeddings", 1..=usize::MAX >> 1)?,
        low_freq_factor: need("low_freq_factor")?,
        high_freq_factor: need("high_freq_factor")?,
    };
    if scaling.factor < 1.0 {
        let found = Value::from(scaling.factor);
        return Err(fields.refuse("factor", &found, "a number of at least 1"));
    }
    // As f32, in which the ramp between the two divides by their difference.
    if scaling.high_freq_factor as f32 <= scaling.low_freq_factor as f32 {
        let found = Value::from(scaling.high_freq_factor);
        let expected = format!("more than low_freq_factor ({})", scaling.low_freq_factor);
        return Err(fields.refuse("high_freq_factor", &found, &expected));
    }
    Ok(scaling)
}

fn yarn(
    fields: &Fields<'_>,
    outer_original: Option<usize>,
    max_positions: usize,
) -> Result<YarnScaling, ConfigError> {
    let inner = fields.count("original_max_position_embeddings", 1..=usize::MAX >> 1)?;
    // Where both places name it, transformers gives the outer one priority.
    let original = outer_original.or(inner).unwrap_or(max_positions);
    let factor = match fields.number("factor", NumberRule::Positive)? {
        // Shorter contexts than the original's need no stretching; a tiny factor would divide
        // frequencies past f32.
        Some(factor) if factor < 1.0 => {
            return Err(fields.refuse("factor", &Value::from(factor), "a number of at least 1"));
        }
        Some(factor) => factor,
        None => max_positions as f64 / original as f64,
    };
    let given = fields.number("attention_factor", NumberRule::Positive)?;
    let mscale = fields.number("mscale", NumberRule::Any)?;
    let mscale_all_dim = fields.number("mscale_all_dim", NumberRule::Any)?;
    let of = |m: f64| {
        if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
    };
    let computed = match (mscale, mscale_all_dim) {
        (Some(m), Some(all)) if m != 0.0 && all != 0.0 => of(m) / of(all),
        _ => of(1.0),
    };
    let attention_factor = given.unwrap_or(computed);
    if !(attention_factor > 0.0 && (attention_factor as f32).is_finite()) {
        let found = Value::from(mscale_all_dim);
        let expected = "a value with which the attention factor is a positive number";
        return Err(fields.refuse("mscale_all_dim", &found, expected));
    }
    // transformers reads a beta of 0 as absent; what f32 cannot tell from 0 is one.
    let beta = |field: &str, default: f64| -> Result<f64, ConfigError> {
        let found = fields.number(field, NumberRule::NotNegative)?;
        Ok(found.filter(|&b| b as f32 != 0.0).unwrap_or(default))
    };
    Ok(YarnScaling {
        factor,
        original_positions: original,
        beta_fast: beta("beta_fast", 32.0)?,
        beta_slow: beta("beta_slow", 1.0)?,
        truncate: fields.flag("truncate")?.unwrap_or(true),
        attention_factor,
    })
}
