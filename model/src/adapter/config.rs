//! `adapter_config.json` → what it says about ranks, scales and targets; everything in it that plain
//! LoRA does not have is a reason to refuse.

use std::collections::{BTreeSet, HashSet};

use regex::Regex;
use serde_json::{Map, Value};

use super::AdapterBase;
use super::pattern::{self, Key};
use super::reason::Reason;
use super::refusal::Reasons;
use crate::error::ConfigError;
use crate::json::{Fields, MOST_NAME, NumberRule, parse_object, short, shown};

const FILE: &str = "adapter_config.json";
/// Ranks above any limit; only there so that sums cannot overflow.
const MAX_RANK: usize = 1 << 24;
/// More keys than any model has modules that one would name. Each is held against each module.
const MAX_KEYS: usize = 1 << 15;
/// Keys that are more than names, which take a thousand times as long to compile and to match.
const MAX_PATTERNS: usize = 64;

/// A configuration. What is not sound in it has been refused and is absent here, so that the rest can
/// still be held against the tensors.
#[derive(Debug)]
pub(super) struct PeftConfig {
    pub(super) rank: Option<usize>,
    pub(super) alpha: Option<f64>,
    pub(super) use_rslora: bool,
    rank_pattern: Vec<(Key, usize)>,
    alpha_pattern: Vec<(Key, f64)>,
    target_modules: ModuleTargets,
    /// Entries of `target_parameters`.
    pub(super) target_parameters: Option<HashSet<String>>,
    pub(super) peft_version: Option<String>,
    pub(super) base_model: Option<String>,
    /// Fields that say something and are not known: a later PEFT may mean something else by A and B.
    pub(super) unknown: Vec<String>,
}

#[derive(Debug)]
enum ModuleTargets {
    /// Not said, or `all-linear`: the tensors decide.
    Any,
    Suffixes(HashSet<String>),
    Pattern(Regex),
}

impl PeftConfig {
    /// Rank of the module at `path`, which for a fused parameter ends in the parameter's name.
    pub(super) fn rank(&self, path: &str) -> Option<usize> {
        first_match(&self.rank_pattern, path).or(self.rank)
    }

    /// alpha / r or alpha / √r of the module at `path`; both values of the quotient are the replaced
    /// ones.
    pub(super) fn scale(&self, path: &str) -> Option<f64> {
        let rank = self.rank(path)? as f64;
        let alpha = first_match(&self.alpha_pattern, path).or(self.alpha)?;
        Some(alpha / if self.use_rslora { rank.sqrt() } else { rank })
    }

    /// Whether `target_modules` covers the module at `path`.
    pub(super) fn targets_module(&self, path: &str) -> bool {
        match &self.target_modules {
            ModuleTargets::Any => true,
            ModuleTargets::Suffixes(list) => suffixes(path).any(|s| list.contains(s)),
            ModuleTargets::Pattern(pattern) => pattern.is_match(path),
        }
    }

    /// Whether `target_parameters` covers the parameter at `path`; `None` if it says nothing sound.
    pub(super) fn targets_parameter(&self, path: &str) -> Option<bool> {
        let list = self.target_parameters.as_ref()?;
        Some(suffixes(path).any(|s| list.contains(s)))
    }
}

fn first_match<T: Copy>(patterns: &[(Key, T)], path: &str) -> Option<T> {
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

/// Fields that are read, or say nothing about what A and B mean once they are trained.
const PLAIN: &[&str] = &[
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
    "task_type",
    "use_rslora",
];
/// Unknown fields that are told one by one.
const MOST_UNKNOWN: usize = 8;

/// Initialisations after which the file is a plain delta on the unchanged base.
const PLAIN_INITS: &[&str] = &["gaussian", "eva", "orthogonal", "true", "false"];

/// Reads the configuration; reasons found on the way are added to `reasons`. `None` if the text is no
/// configuration at all. Without a base, nothing is said of what only a base tells.
pub(super) fn read(
    text: &str,
    base: Option<&AdapterBase>,
    reasons: &mut Reasons,
) -> Option<PeftConfig> {
    let object = match parse_object(FILE, text) {
        Ok(object) => object,
        Err(error) => {
            reasons.push(error);
            return None;
        }
    };
    let fields = Fields::new(FILE, &object);
    refuse_features(&fields, &object, reasons);
    let mut keep = |error: ConfigError| reasons.push(error);
    let rank = fields.need_count("r", 1..=MAX_RANK).map_err(&mut keep).ok();
    let alpha = alpha(&fields).map_err(&mut keep).ok();
    let use_rslora = fields.flag("use_rslora").map_err(&mut keep).ok().flatten();
    let rank_pattern =
        patterns(&fields, "rank_pattern", &mut keep, |f, k| f.need_count(k, 1..=MAX_RANK));
    let alpha_pattern = patterns(&fields, "alpha_pattern", &mut keep, |f, k| {
        let found = f.number(k, NumberRule::Any)?;
        found.ok_or_else(|| f.missing(k, "a number"))
    });
    let target_modules = module_targets(&fields).map_err(&mut keep).unwrap_or(ModuleTargets::Any);
    let target_parameters = list(&fields, "target_parameters").map_err(&mut keep).ok();
    let peft_version = fields.text("peft_version").map_err(&mut keep).ok().flatten();
    let base_model = fields.text("base_model_name_or_path").ok().flatten();
    let config = PeftConfig {
        rank,
        alpha,
        use_rslora: use_rslora.unwrap_or(false),
        rank_pattern,
        alpha_pattern,
        target_modules,
        target_parameters,
        peft_version: peft_version.map(|text| short(text, MOST_NAME)),
        base_model: base_model.map(|text| short(text, MOST_NAME)),
        unknown: unknown(&fields),
    };
    if let Some(base) = base {
        check_parameters(&config, base, reasons);
    }
    Some(config)
}

fn refuse_features(fields: &Fields<'_>, object: &Map<String, Value>, reasons: &mut Reasons) {
    match fields.text("peft_type") {
        Ok(Some("LORA")) => {}
        Ok(Some(_)) => reasons.push(Reason::Unsupported {
            source_of: format!("peft_type = {}", shown(&object["peft_type"])),
            feature: "a PEFT method other than LORA",
        }),
        Ok(None) => reasons.push(fields.missing("peft_type", "LORA")),
        Err(error) => reasons.push(error),
    }
    for (field, off, feature) in UNSUPPORTED {
        let Some(value) = fields.get(field) else {
            continue;
        };
        let is_off = match off {
            Off::Text(text) => value.as_str() == Some(text),
            Off::Falsy => is_falsy(value),
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

fn is_falsy(value: &Value) -> bool {
    match value {
        Value::Bool(on) => !on,
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// Names of fields that are not known and not left off.
fn unknown(fields: &Fields<'_>) -> Vec<String> {
    let known = |name: &str| {
        PLAIN.contains(&name) || UNSUPPORTED.iter().any(|(field, _, _)| *field == name)
    };
    let says = |name: &&str| fields.get(name).is_some_and(|value| !is_falsy(value));
    let names = fields.keys().filter(|name| !known(name)).filter(says);
    names.take(MOST_UNKNOWN).map(|name| short(name, MOST_NAME)).collect()
}

fn alpha(fields: &Fields<'_>) -> Result<f64, ConfigError> {
    let found = fields.number("lora_alpha", NumberRule::Any)?;
    found.ok_or_else(|| fields.missing("lora_alpha", "a number"))
}

/// The sound entries of a pattern field, the others refused one by one; the first that matches counts.
fn patterns<'a, T>(
    fields: &Fields<'a>,
    field: &'a str,
    keep: &mut impl FnMut(ConfigError),
    value: impl Fn(&Fields<'a>, &str) -> Result<T, ConfigError>,
) -> Vec<(Key, T)> {
    let entries = match fields.object(field) {
        Ok(Some(entries)) => entries,
        Ok(None) => return Vec::new(),
        Err(error) => {
            keep(error);
            return Vec::new();
        }
    };
    let count = entries.keys().count();
    if count > MAX_KEYS {
        keep(fields.refuse(field, &count.into(), "at most 32768 keys"));
        return Vec::new();
    }
    let mut sound = Vec::with_capacity(count);
    let mut compiled = 0;
    for key in entries.keys() {
        let read = Key::new(key)
            .map_err(|error| fields.refuse(field, &key.into(), pattern::expected(&error)));
        compiled += usize::from(matches!(read, Ok(Key::Pattern(_)) | Err(_)));
        if compiled > MAX_PATTERNS {
            let expected = "at most 64 keys that are more than names of modules";
            keep(fields.refuse(field, &key.into(), expected));
            break;
        }
        match (read, value(&entries, key)) {
            (Ok(key), Ok(value)) => sound.push((key, value)),
            (key, value) => {
                key.map_or_else(&mut *keep, drop);
                value.map_or_else(&mut *keep, drop);
            }
        }
    }
    sound
}

fn module_targets(fields: &Fields<'_>) -> Result<ModuleTargets, ConfigError> {
    match fields.get("target_modules") {
        None => Ok(ModuleTargets::Any),
        Some(Value::String(text)) if text == "all-linear" => Ok(ModuleTargets::Any),
        Some(value @ Value::String(text)) => pattern::full(text)
            .map(ModuleTargets::Pattern)
            .map_err(|error| fields.refuse("target_modules", value, pattern::expected(&error))),
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
fn check_parameters(config: &PeftConfig, base: &AdapterBase, reasons: &mut Reasons) {
    let entries = config.target_parameters.iter().flatten();
    let mut unmatched: BTreeSet<&str> = entries.map(String::as_str).collect();
    for layer in 0..base.layers() {
        for path in base.parameters(layer) {
            for suffix in suffixes(&path) {
                unmatched.remove(suffix);
            }
        }
    }
    for entry in unmatched {
        reasons.push(Reason::UnknownParameter { entry: short(entry, MOST_NAME) });
    }
}
