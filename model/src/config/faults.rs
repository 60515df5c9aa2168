//! Everything that is wrong with a model's configuration, found by putting right what was found first and
//! reading again. What follows from another fault may be told too; what depends on a sound value that
//! is not there may not.

use serde_json::{Map, Value};

use super::Config;
use crate::error::ConfigError;
use crate::json::parse_object;

/// More faults than any file has that is a configuration at all.
const MOST: usize = 64;

/// The texts of a folder's configuration while they are put right.
struct Texts {
    config: Map<String, Value>,
    generation: Option<Map<String, Value>>,
}

/// All faults of a configuration; none if it is sound. Arguments as of [`Config::parse`].
pub fn faults(folder: &str, config: &str, generation: Option<&str>) -> Vec<ConfigError> {
    let mut found = Vec::new();
    let mut read = |file: &str, text: &str| {
        parse_object(&format!("{folder}/{file}"), text).map_err(|fault| found.push(fault)).ok()
    };
    let config = read("config.json", config);
    let generation = generation.map(|text| read("generation_config.json", text));
    let Some(config) = config else {
        return found;
    };
    let mut texts = Texts { config, generation: generation.flatten() };
    let mut seen = Vec::new();
    while found.len() < MOST {
        let generation = texts.generation.clone().map(|map| Value::Object(map).to_string());
        let config = Value::Object(texts.config.clone()).to_string();
        let Err(fault) = Config::parse(folder, &config, generation.as_deref()) else {
            break;
        };
        let known = place(&fault);
        match known.filter(|place| !seen.contains(place)) {
            Some(place) => {
                put_right(&mut texts, &place);
                seen.push(place);
                found.push(fault);
            }
            // Of no field, or of one whose value follows from others that are wrong.
            None => {
                if place(&fault).is_none() {
                    found.push(fault);
                }
                break;
            }
        }
    }
    found
}

/// File and field of a fault that a value could put right.
fn place(fault: &ConfigError) -> Option<(String, String)> {
    match fault {
        ConfigError::Missing { file, field, .. } | ConfigError::Field { file, field, .. } => {
            Some((file.clone(), field.clone()))
        }
        _ => None,
    }
}

/// Gives a field that must be there a value that fits most others, and takes another field away.
fn put_right(texts: &mut Texts, (file, field): &(String, String)) {
    let whole = if file.ends_with("generation_config.json") {
        match &mut texts.generation {
            Some(map) => map,
            None => return,
        }
    } else {
        &mut texts.config
    };
    // The outermost field stands for what is inside it.
    let field = field.split(['.', '[']).next().unwrap_or(field);
    let fitting = match field {
        "hidden_size" | "intermediate_size" | "moe_intermediate_size" => 1 << 10,
        "vocab_size" => 1 << 22,
        "num_experts" | "num_local_experts" => 1 << 12,
        "num_attention_heads" => 1 << 10,
        "num_key_value_heads" | "num_hidden_layers" | "num_experts_per_tok" => 1,
        "head_dim" => 64,
        _ => {
            whole.shift_remove(field);
            return;
        }
    };
    whole.insert(field.to_owned(), fitting.into());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(edit: impl Fn(&mut Value)) -> Vec<String> {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let path = root.join("../tests/golden/models/qwen3_moe/config.json");
        let text = std::fs::read_to_string(path).expect("a stored model");
        let mut config: Value = serde_json::from_str(&text).expect("JSON");
        edit(&mut config);
        let generation = r#"{"temperature": -1, "top_p": 7}"#;
        faults("m", &config.to_string(), Some(generation)).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn all_faults_are_told() {
        let found = told(|config| {
            config["hidden_act"] = "gelu".into();
            config["num_experts_per_tok"] = 99.into();
            config["rope_scaling"] = serde_json::json!({"rope_type": "yodel"});
            config["torch_dtype"] = "int4".into();
            config["vocab_size"] = Value::Null;
        });
        for part in [
            "`hidden_act` is \"gelu\"",
            "`num_experts_per_tok` is 99",
            "yodel",
            "`torch_dtype` is \"int4\"",
            "`vocab_size` is missing",
            "`temperature` is -1",
            "`top_p` is 7",
        ] {
            assert!(found.iter().any(|fault| fault.contains(part)), "{part}: {found:?}");
        }
        assert_eq!(found.len(), 7, "{found:?}");
    }

    #[test]
    fn another_architecture_is_one_fault() {
        let found = told(|config| config["model_type"] = "phi".into());
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(faults("m", "[", None)[0].to_string().contains("m/config.json"));
        assert_eq!(faults("m", "{}", None).len(), 1);
    }
}
