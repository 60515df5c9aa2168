//! `adapter_config.json` → what it says about ranks, scales and targets; everything in it that plain
//! LoRA does not have is a reason to refuse.

use std::collections::{BTreeSet, HashSet};

use regex::{Regex, RegexBuilder};
use serde_json::{Map, Value};

use super::AdapterBase;
use super::reason::Reason;
use crate::error::ConfigError;
use crate::json::{Fields, NumberRule, parse_object, shown};

const FILE: &str = "adapter_config.json";
/// Ranks above any limit; only there so that sums cannot overflow.
const MAX_RANK: usize = 1 << 24;
/// More patterns than any writer makes; each is matched against each module.
const MAX_PATTERNS: usize = 4096;
/// Most memory of one compiled pattern, and of all in one field. A list of modules takes 4 KiB; a key
/// like `\w{1000}` would take megabytes, and thousands of those minutes to compile.
const PATTERN_BYTES: usize = 256 << 10;
const ALL_PATTERN_BYTES: usize = 32 << 20;

/// A sound configuration.
#[derive(Debug)]
pub(super) struct PeftConfig {
    rank: usize,
    alpha: f64,
    use_rslora: bool,
    rank_pattern: Vec<(Regex, usize)>,
    alpha_pattern: Vec<(Regex, f64)>,
    target_modules: ModuleTargets,
    /// Entries of `target_parameters`.
    target_parameters: HashSet<String>,
    pub(super) peft_version: Option<String>,
    pub(super) base_model: Option<String>,
}

#[derive(Debug)]
enum ModuleTargets {
    /// Not said, `all-linear`, or a pattern in a dialect that only Python reads: the tensors decide.
    Any,
    Suffixes(HashSet<String>),
    Pattern(Regex),
}

/// Rank and alpha of one module.
#[derive(Debug, Clone, Copy)]
pub(super) struct RankAndScale {
    pub(super) rank: usize,
    /// alpha / r, or alpha / √r.
    pub(super) scale: f64,
}

impl PeftConfig {
    /// What the configuration says of the module at `path`, which for a fused parameter ends in the
    /// parameter's name. Both values of the quotient are the replaced ones.
    pub(super) fn of(&self, path: &str) -> RankAndScale {
        let rank = first_match(&self.rank_pattern, path).unwrap_or(self.rank);
        let alpha = first_match(&self.alpha_pattern, path).unwrap_or(self.alpha);
        let divisor = match self.use_rslora {
            true => (rank as f64).sqrt(),
            false => rank as f64,
        };
        RankAndScale { rank, scale: alpha / divisor }
    }

    /// Whether `target_modules` covers the module at `path`.
    pub(super) fn targets_module(&self, path: &str) -> bool {
        match &self.target_modules {
            ModuleTargets::Any => true,
            ModuleTargets::Suffixes(list) => suffixes(path).any(|s| list.contains(s)),
            ModuleTargets::Pattern(pattern) => pattern.is_match(path),
        }
    }

    /// Whether `target_parameters` covers the parameter at `path`.
    pub(super) fn targets_parameter(&self, path: &str) -> bool {
        suffixes(path).any(|s| self.target_parameters.contains(s))
    }
}

fn first_match<T: Copy>(patterns: &[(Regex, T)], path: &str) -> Option<T> {
    let (_, value) = patterns.iter().find(|(key, _)| key.is_match(path))?;
    Some(*value)
}

/// `a.b.c`, `b.c`, `c`.
fn suffixes(path: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(path), |rest| Some(rest.split_once('.')?.1))
}

/// Features that need more than A and B, and the value that leaves each off.
enum Off {
    /// Off when absent, null, false or empty.
    Falsy,
    /// Off when absent, null or this text.
    Text(&'static str),
}

const UNSUPPORTED: &[(&str, Off, &str)] = &[
    ("use_dora", Off::Falsy, "DoRA"),
    ("bias", Off::Text("none"), "trained biases of the base model"),
    ("lora_bias", Off::Falsy, "a bias on lora_B"),
    ("fan_in_fan_out", Off::Falsy, "weights stored as (in, out), which no module of the model has"),
    ("modules_to_save", Off::Falsy, "whole trained modules beside LoRA"),
    ("trainable_token_indices", Off::Falsy, "trained token embeddings"),
    ("layer_replication", Off::Falsy, "replicated layers"),
    ("alora_invocation_tokens", Off::Falsy, "activated LoRA"),
    ("use_qalora", Off::Falsy, "QALoRA"),
    ("use_bdlora", Off::Falsy, "block-diagonal LoRA"),
    ("arrow_config", Off::Falsy, "arrow routing"),
    ("kasa_config", Off::Falsy, "KaSA"),
    ("monteclora_config", Off::Falsy, "MonteCLoRA"),
    ("velora_config", Off::Falsy, "VeLoRA"),
];

/// Initialisations after which the file is a plain delta on the unchanged base.
const PLAIN_INITS: &[&str] = &["gaussian", "eva", "orthogonal", "true", "false"];

/// Reads the configuration; reasons found on the way are added to `reasons`. `None` if nothing
/// more can be said of the adapter.
pub(super) fn read(
    text: &str,
    base: &AdapterBase,
    reasons: &mut Vec<Reason>,
) -> Option<PeftConfig> {
    let object = match parse_object(FILE, text) {
        Ok(object) => object,
        Err(error) => {
            reasons.push(error.into());
            return None;
        }
    };
    let fields = Fields::new(FILE, &object);
    refuse_features(&fields, &object, reasons);
    let mut keep = |error: ConfigError| reasons.push(error.into());
    let rank = fields.need_count("r", 1..=MAX_RANK).map_err(&mut keep).ok();
    let alpha = alpha(&fields).map_err(&mut keep).ok();
    let use_rslora = fields.flag("use_rslora").map_err(&mut keep).ok();
    let rank_pattern = patterns(&fields, "rank_pattern", |f, k| f.need_count(k, 1..=MAX_RANK))
        .map_err(&mut keep)
        .ok();
    let alpha_pattern = patterns(&fields, "alpha_pattern", |f, k| {
        let found = f.number(k, NumberRule::Any)?;
        found.ok_or_else(|| f.missing(k, "a number"))
    })
    .map_err(&mut keep)
    .ok();
    let target_modules = module_targets(&fields).map_err(&mut keep).ok();
    let target_parameters = list(&fields, "target_parameters").map_err(&mut keep).ok();
    let peft_version = fields.text("peft_version").map_err(&mut keep).ok();
    let base_model = fields.text("base_model_name_or_path").ok().flatten();
    let config = PeftConfig {
        rank: rank?,
        alpha: alpha?,
        use_rslora: use_rslora?.unwrap_or(false),
        rank_pattern: rank_pattern?,
        alpha_pattern: alpha_pattern?,
        target_modules: target_modules?,
        target_parameters: target_parameters?,
        peft_version: peft_version?.map(str::to_owned),
        base_model: base_model.map(str::to_owned),
    };
    check_parameters(&config, base, reasons);
    Some(config)
}

fn refuse_features(fields: &Fields<'_>, object: &Map<String, Value>, reasons: &mut Vec<Reason>) {
    match fields.text("peft_type") {
        Ok(Some("LORA")) => {}
        Ok(Some(_)) => reasons.push(Reason::Unsupported {
            source_of: format!("peft_type = {}", shown(&object["peft_type"])),
            feature: "a PEFT method other than LORA",
        }),
        Ok(None) => reasons.push(fields.missing("peft_type", "LORA").into()),
        Err(error) => reasons.push(error.into()),
    }
    for (field, off, feature) in UNSUPPORTED {
        let Some(value) = fields.get(field) else {
            continue;
        };
        let is_off = match off {
            Off::Text(text) => value.as_str() == Some(text),
            Off::Falsy => match value {
                Value::Bool(on) => !on,
                Value::Array(items) => items.is_empty(),
                Value::Object(map) => map.is_empty(),
                _ => false,
            },
        };
        if !is_off {
            reasons.push(Reason::Unsupported {
                source_of: format!("{field} = {}", shown(value)),
                feature,
            });
        }
    }
    let init = fields.get("init_lora_weights");
    let plain =
        init.is_none_or(|v| v.is_boolean() || v.as_str().is_some_and(|s| PLAIN_INITS.contains(&s)));
    if let (false, Some(value)) = (plain, init) {
        reasons.push(Reason::Unsupported {
            source_of: format!("init_lora_weights = {}", shown(value)),
            feature: "an initialisation that changes the base weights (convert it to plain LoRA \
                      when saving)",
        });
    }
}

fn alpha(fields: &Fields<'_>) -> Result<f64, ConfigError> {
    let found = fields.number("lora_alpha", NumberRule::Any)?;
    found.ok_or_else(|| fields.missing("lora_alpha", "a number"))
}

/// A pattern's key k stands for `re.match("(.*\.)?(k)$", path)`; the first that matches counts.
fn patterns<'a, T>(
    fields: &Fields<'a>,
    field: &'a str,
    value: impl Fn(&Fields<'a>, &str) -> Result<T, ConfigError>,
) -> Result<Vec<(Regex, T)>, ConfigError> {
    let Some(entries) = fields.object(field)? else {
        return Ok(Vec::new());
    };
    let count = entries.keys().count();
    if count > MAX_PATTERNS {
        return Err(fields.refuse(field, &count.into(), "at most 4096 patterns"));
    }
    let limit = PATTERN_BYTES.min(ALL_PATTERN_BYTES / count.max(1));
    entries
        .keys()
        .map(|key| {
            let regex = compile(&format!(r"^(?:.*\.)?(?:{key})$"), limit).map_err(|error| {
                let expected = match error {
                    regex::Error::CompiledTooBig(_) => "keys that are small regular expressions",
                    _ => "keys that are regular expressions",
                };
                fields.refuse(field, &key.into(), expected)
            })?;
            Ok((regex, value(&entries, key)?))
        })
        .collect()
}

fn compile(pattern: &str, limit: usize) -> Result<Regex, regex::Error> {
    RegexBuilder::new(pattern).size_limit(limit).build()
}

fn module_targets(fields: &Fields<'_>) -> Result<ModuleTargets, ConfigError> {
    match fields.get("target_modules") {
        None => Ok(ModuleTargets::Any),
        Some(Value::String(text)) if text == "all-linear" => Ok(ModuleTargets::Any),
        Some(Value::String(pattern)) => {
            Ok(match compile(&format!("^(?:{pattern})$"), PATTERN_BYTES) {
                Ok(regex) => ModuleTargets::Pattern(regex),
                // Lookarounds, for example, or far too large. What the file adapts is read from its tensors anyway.
                Err(_) => ModuleTargets::Any,
            })
        }
        Some(_) => list(fields, "target_modules").map(ModuleTargets::Suffixes),
    }
}

fn list(fields: &Fields<'_>, field: &str) -> Result<HashSet<String>, ConfigError> {
    match fields.get(field) {
        None => Ok(HashSet::new()),
        Some(Value::Array(items)) => items
            .iter()
            .map(|item| match item.as_str() {
                Some(text) => Ok(text.to_owned()),
                None => Err(fields.refuse(field, item, "a list of strings")),
            })
            .collect(),
        Some(other) => Err(fields.refuse(field, other, "a list of strings")),
    }
}

/// Every entry of `target_parameters` must name something: PEFT would have trained nothing there.
fn check_parameters(config: &PeftConfig, base: &AdapterBase, reasons: &mut Vec<Reason>) {
    let mut unmatched: BTreeSet<&str> =
        config.target_parameters.iter().map(String::as_str).collect();
    for layer in 0..base.layers() {
        for path in base.parameters(layer) {
            for suffix in suffixes(&path) {
                unmatched.remove(suffix);
            }
        }
    }
    reasons.extend(
        unmatched.iter().map(|entry| Reason::UnknownParameter { entry: (*entry).to_owned() }),
    );
}
