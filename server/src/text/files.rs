//! The files of a model folder that concern text, and what is read from each.

use std::path::Path;

use amphora_model::ModelFiles;
use serde_json::Value;

use super::TextError;
use super::chat::{NamedTokens, TemplateSource};

/// Special tokens are few.
const MAX_BYTES: u64 = 1 << 20;

/// The text files of one model, from a folder or from the binary.
pub struct TextFiles {
    /// Folder that errors name.
    pub folder: String,
    pub tokenizer: String,
    pub tokenizer_config: Option<String>,
    pub special_tokens_map: Option<String>,
    pub chat_template: Option<TemplateSource>,
    pub generation_config: Option<String>,
}

impl TextFiles {
    /// Reads what a model folder has; only `tokenizer.json` must be there.
    pub fn of(files: &ModelFiles) -> Result<Self, TextError> {
        // Where the template was found is said in errors.
        let file = match files.source().has("chat_template.jinja") {
            true => "chat_template.jinja",
            false => "tokenizer_config.json",
        };
        let file = files.source().path(file).display().to_string();
        Ok(Self {
            folder: files.name(),
            tokenizer: files.tokenizer()?,
            tokenizer_config: files.tokenizer_config()?,
            special_tokens_map: files.source().read_text("special_tokens_map.json", MAX_BYTES)?,
            chat_template: files.chat_template()?.map(|source| TemplateSource { file, source }),
            generation_config: files.generation_config()?,
        })
    }

    /// A file's name as errors show it.
    pub(super) fn name(&self, file: &str) -> String {
        Path::new(&self.folder).join(file).display().to_string()
    }

    fn json(&self, file: &str, text: &Option<String>) -> Result<Value, TextError> {
        let Some(text) = text else {
            return Ok(Value::Null);
        };
        serde_json::from_str(text)
            .map_err(|error| TextError::File { file: self.name(file), what: error.to_string() })
    }

    /// The special tokens that a template may name, from either file.
    pub(super) fn tokens(&self) -> Result<NamedTokens, TextError> {
        let config = self.json("tokenizer_config.json", &self.tokenizer_config)?;
        let map = self.json("special_tokens_map.json", &self.special_tokens_map)?;
        let token = |name: &str| token_text(&config[name]).or_else(|| token_text(&map[name]));
        Ok(NamedTokens {
            bos_token: token("bos_token"),
            eos_token: token("eos_token"),
            pad_token: token("pad_token"),
            unk_token: token("unk_token"),
        })
    }

    /// `max_new_tokens` of `generation_config.json`: the length of an answer that sets none.
    pub fn max_new_tokens(&self) -> Result<Option<usize>, TextError> {
        const FILE: &str = "generation_config.json";
        match &self.json(FILE, &self.generation_config)?["max_new_tokens"] {
            Value::Null => Ok(None),
            value => match value.as_u64().map(usize::try_from) {
                Some(Ok(tokens)) if tokens > 0 => Ok(Some(tokens)),
                _ => Err(TextError::File {
                    file: self.name(FILE),
                    what: format!("field `max_new_tokens` is {value}, expected a number above 0"),
                }),
            },
        }
    }

    /// Fields of `generation_config.json` that would change answers and are not applied.
    pub fn not_applied(&self) -> Result<Vec<String>, TextError> {
        const NEUTRAL: [(&str, f64); 3] =
            [("no_repeat_ngram_size", 0.0), ("typical_p", 1.0), ("num_beams", 1.0)];
        let config = self.json("generation_config.json", &self.generation_config)?;
        let other = NEUTRAL
            .iter()
            .filter(|(name, neutral)| config[*name].as_f64().is_some_and(|value| value != *neutral))
            .map(|(name, _)| format!("{name} {}", config[*name]));
        Ok(other.collect())
    }
}

/// A special token is written as its text, or as an object with the text as `content`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}
