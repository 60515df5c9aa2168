//! Text in and out: the tokenizer and chat template of a model folder.
//!
//! The text of an answer is what the tokenizer decodes from the answer's tokens alone, special tokens
//! left out; [`Detokenizer`] gives that text piece by piece. `clean_up_tokenization_spaces` is not
//! applied: it rewrites text that may already have been sent.

mod chat;
pub mod clock;
mod detokenizer;
mod files;
mod token;

use std::collections::HashSet;
use std::sync::Arc;

use thiserror::Error;
use tokenizers::Tokenizer;

pub use chat::{ChatTemplate, Render};
pub use detokenizer::Detokenizer;
pub use files::TextFiles;

/// What can be wrong with the text files of a model, or with text given to them.
#[derive(Debug, Error)]
pub enum TextError {
    /// A file is missing or cannot be read.
    #[error(transparent)]
    Read(#[from] amphora_model::error::FileError),
    /// A file says something that is not understood.
    #[error("{file}: {what}")]
    File { file: String, what: String },
    /// The model folder has no chat template.
    #[error(
        "the model has no chat template (neither chat_template.jinja nor chat_template in \
         tokenizer_config.json); use a plain prompt"
    )]
    NoTemplate,
    /// The template refuses these messages, in its own words.
    #[error("the chat template refuses the messages: {what}")]
    Render { what: String },
    /// More text than the context has tokens for, whatever it says.
    #[error("{bytes} bytes of text are more than the context of {tokens} tokens can hold")]
    TooLong { bytes: usize, tokens: usize },
    /// The tokenizer fails on a text.
    #[error("the tokenizer cannot encode this text: {what}")]
    Encode { what: String },
}

/// The tokenizer and the chat template of one model.
pub struct Text {
    tokenizer: Arc<Tokenizer>,
    special: Arc<HashSet<u32>>,
    chat: Option<ChatTemplate>,
    /// Bytes of the longest token.
    longest_token: usize,
}

impl Text {
    /// Reads everything that `files` holds; a template that does not parse is an error here, not
    /// at the first chat.
    pub fn new(files: &TextFiles) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::from_bytes(&files.tokenizer).map_err(|error| {
            TextError::File { file: files.name("tokenizer.json"), what: error.to_string() }
        })?;
        let special = tokenizer
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| token.special)
            .map(|(id, _)| id)
            .collect();
        let chat = match &files.chat_template {
            Some(template) => Some(ChatTemplate::new(template, files.tokens()?)?),
            None => None,
        };
        // Byte-level tokens are written with up to two bytes for one, so this is no underestimate.
        let longest_token = tokenizer.get_vocab(true).keys().map(String::len).max().unwrap_or(1);
        Ok(Self { tokenizer: Arc::new(tokenizer), special: Arc::new(special), chat, longest_token })
    }

    /// Refuses text that cannot fit `tokens` tokens by its length alone: encoding takes some hundred
    /// times the memory of the text, so what is hopeless is not begun.
    pub fn check_length(&self, text: &str, tokens: usize) -> Result<(), TextError> {
        let bytes = text.len();
        match bytes <= tokens.saturating_mul(self.longest_token) {
            true => Ok(()),
            false => Err(TextError::TooLong { bytes, tokens }),
        }
    }

    /// Tokens of a plain prompt, with what the tokenizer puts around a text (often a first token).
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode(text, Surround::Added)
    }

    /// Tokens of a rendered chat, which has all its special tokens spelt out.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode(text, Surround::None)
    }

    fn encode(&self, text: &str, surround: Surround) -> Result<Vec<u32>, TextError> {
        let encoding = self
            .tokenizer
            .encode_fast(text, matches!(surround, Surround::Added))
            .map_err(|error| TextError::Encode { what: error.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of these tokens, special ones left out.
    pub fn decode(&self, tokens: &[u32]) -> String {
        // `decode` fails on no list of ids: it leaves unknown ones out.
        self.tokenizer.decode(tokens, true).unwrap_or_default()
    }

    /// The chat template, or an error that says what to do without one.
    pub fn chat(&self) -> Result<&ChatTemplate, TextError> {
        self.chat.as_ref().ok_or(TextError::NoTemplate)
    }

    /// A detokenizer for one new answer.
    pub fn detokenizer(&self) -> Detokenizer {
        Detokenizer::new(self.tokenizer.clone(), self.special.clone())
    }
}

/// Whether the tokenizer's post-processor adds its tokens around a text.
enum Surround {
    Added,
    None,
}

#[cfg(test)]
mod tests;
