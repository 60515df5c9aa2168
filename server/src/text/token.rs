//! One token as text and as bytes, for log-probabilities.

use std::collections::HashMap;
use std::sync::OnceLock;

use super::Text;
use crate::openai::TokenText;

impl Text {
    /// Whether a token is special, so that texts of answers leave it out.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// A token by itself. Ids above the tokenizer's vocabulary (models pad theirs) have no text.
    pub fn token(&self, id: u32) -> TokenText {
        let Some(written) = self.tokenizer.id_to_token(id) else {
            return TokenText::default();
        };
        let text = match self.special.contains(&id) {
            true => written.clone(),
            // `decode` fails on no known id.
            false => self.tokenizer.decode(&[id], false).unwrap_or_default(),
        };
        let bytes = match text.contains(char::REPLACEMENT_CHARACTER) {
            // Part of a character: only the way the vocabulary writes it says which bytes.
            true => byte_level(&written).or_else(|| byte_fallback(&written)),
            false => None,
        };
        let bytes = bytes.unwrap_or_else(|| text.as_bytes().to_vec());
        TokenText { text, bytes }
    }
}

/// The bytes of a token of a byte-level vocabulary; `None` if it is written otherwise.
fn byte_level(written: &str) -> Option<Vec<u8>> {
    static BYTES: OnceLock<HashMap<char, u8>> = OnceLock::new();
    let bytes = BYTES.get_or_init(|| {
        // GPT-2's alphabet: printable bytes of Latin-1 stand for themselves, the others for the
        // characters from U+0100 on, in order.
        let printable = |byte: &u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let themselves = (0..=255u8).filter(printable).map(|byte| (char::from(byte), byte));
        let others = (0..=255u8).filter(|byte| !printable(byte)).zip(0x100..);
        let others = others.filter_map(|(byte, code)| Some((char::from_u32(code)?, byte)));
        themselves.chain(others).collect()
    });
    written.chars().map(|c| bytes.get(&c).copied()).collect()
}

/// The byte of a token such as `<0xE2>`.
fn byte_fallback(written: &str) -> Option<Vec<u8>> {
    let digits = written.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok().map(|byte| vec![byte])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_characters_keep_their_bytes() {
        assert_eq!(byte_level("Ġa"), Some(b" a".to_vec()));
        assert_eq!(byte_level("âĤ"), Some(vec![0xe2, 0x82]));
        assert_eq!(byte_level("▁a"), None);
        assert_eq!(byte_fallback("<0xE2>"), Some(vec![0xe2]));
        assert_eq!(byte_fallback("<0x>"), None);
    }
}
