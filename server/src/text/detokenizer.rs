//! Tokens to text, one token at a time.
//!
//! A token is not a piece of text: one character may take several tokens, and a decoder may add or
//! strip a space depending on what came before. So each step decodes a short window of tokens that
//! starts where the last complete text started, and emits what is new in it. Text that may still
//! change is held back: an unfinished UTF-8 sequence decodes to at most three replacement
//! characters, so that many at the end are not final.

use std::collections::HashSet;
use std::sync::Arc;

use amphora_engine::Detokenize;
use tokenizers::Tokenizer;

/// Replacement characters at the end that may still become a character. A UTF-8 sequence that
/// lacks its last byte has at most three bytes, and some decoders show one for each byte.
const UNFINISHED: usize = 3;

/// Tokens after which a window is closed although its end looks unfinished, so that a model that
/// writes invalid bytes without end does not make each step dearer than the one before.
const LONGEST_WINDOW: usize = 64;

/// The incremental decoder of one answer.
#[derive(Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    special: Arc<HashSet<u32>>,
    /// Tokens from the start of the last complete piece of text.
    window: Vec<u32>,
    /// Tokens of `window` whose text was complete and out when the window was last moved.
    context: usize,
    /// Bytes of the window's text that are out.
    emitted: usize,
}

impl Detokenizer {
    pub(super) fn new(tokenizer: Arc<Tokenizer>, special: Arc<HashSet<u32>>) -> Self {
        Self { tokenizer, special, window: Vec::new(), context: 0, emitted: 0 }
    }

    fn emit(&mut self, text: &str, end: usize) -> String {
        // A decoder may take back bytes it showed as invalid; what is out stays out.
        let Some(piece) = text.get(self.emitted..end) else {
            return String::new();
        };
        self.emitted = end;
        piece.to_owned()
    }

    /// Keeps the tokens since the last move as context for the spacing of the next.
    fn move_window(&mut self) {
        self.window.drain(..self.context);
        self.context = self.window.len();
        self.emitted = self.decode(&self.window).len();
    }

    fn decode(&self, tokens: &[u32]) -> String {
        // `decode` fails on no list of known ids: it concatenates what the decoder maps them to.
        self.tokenizer.decode(tokens, true).unwrap_or_default()
    }
}

impl Detokenize for Detokenizer {
    fn push(&mut self, token: u32) -> String {
        // Ids above the tokenizer's vocabulary (models pad theirs) have no text, as in `decode`.
        if self.special.contains(&token) || self.tokenizer.id_to_token(token).is_none() {
            return String::new();
        }
        self.window.push(token);
        let text = self.decode(&self.window);
        let complete = text.len() - unfinished_bytes(&text);
        let finished = complete == text.len() && complete > self.emitted;
        if finished || self.window.len() - self.context >= LONGEST_WINDOW {
            let piece = self.emit(&text, text.len());
            self.move_window();
            return piece;
        }
        self.emit(&text, complete)
    }

    fn flush(&mut self) -> String {
        let text = self.decode(&self.window);
        self.emit(&text, text.len())
    }

    fn fork(&self) -> Box<dyn Detokenize> {
        Box::new(self.clone())
    }
}

/// Bytes at the end of `text` that a later token may still replace.
fn unfinished_bytes(text: &str) -> usize {
    let held = text
        .chars()
        .rev()
        .take(UNFINISHED)
        .take_while(|&c| c == char::REPLACEMENT_CHARACTER)
        .count();
    held * char::REPLACEMENT_CHARACTER.len_utf8()
}
