//! Keys of `rank_pattern` and `alpha_pattern`, and the pattern that `target_modules` may be.
//!
//! A key k stands for `re.match("(.*\\.)?(k)$", path)`. Python's `re` searches by trial and error, which some
//! patterns make endless; here every pattern takes time in proportion to the path. Almost all keys are
//! plain names, compared as such, since an adapter may have thousands of keys and of modules.

use regex::{Regex, RegexBuilder};

/// Most memory of one compiled pattern. A list of modules takes 4 KiB; `\w{1000}` would take megabytes.
const PATTERN_BYTES: usize = 256 << 10;

/// One key.
#[derive(Debug)]
pub(super) enum Key {
    /// A plain name, from its first character on: a byte, or any one where the key has a bare dot.
    Name(Vec<Option<u8>>),
    Pattern(Regex),
}

impl Key {
    /// # Errors
    /// It is no regular expression, or none that can be read here.
    pub(super) fn new(key: &str) -> Result<Self, regex::Error> {
        match name(key) {
            Some(name) => Ok(Key::Name(name)),
            // The frame is Python's, letter by letter, so that brackets mean what they mean there.
            None => compile(&format!(r"^(?:(.*\.)?({key})$)")).map(Key::Pattern),
        }
    }

    pub(super) fn is_match(&self, path: &str) -> bool {
        match self {
            Key::Pattern(pattern) => pattern.is_match(path),
            Key::Name(name) => {
                let Some(start) = path.len().checked_sub(name.len()) else {
                    return false;
                };
                let (before, end) = path.as_bytes().split_at(start);
                before.last().is_none_or(|&b| b == b'.')
                    && end.iter().zip(name).all(|(b, n)| n.is_none_or(|n| n == *b))
            }
        }
    }
}

/// The key as a name, if it holds nothing but letters, digits, dashes, and dots with or without a
/// backslash. Paths of modules are ASCII, so a bare dot is one byte.
fn name(key: &str) -> Option<Vec<Option<u8>>> {
    let mut name = Vec::with_capacity(key.len());
    let mut bytes = key.bytes();
    while let Some(byte) = bytes.next() {
        name.push(match byte {
            b'.' => None,
            b'\\' if bytes.next()? == b'.' => Some(b'.'),
            b'_' | b'-' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => Some(byte),
            _ => return None,
        });
    }
    Some(name)
}

/// `re.fullmatch(pattern, path)`.
///
/// # Errors
/// As of [`Key::new`].
pub(super) fn full(pattern: &str) -> Result<Regex, regex::Error> {
    // On its own first: a bracket that closes ours would compile in the frame alone.
    compile(pattern)?;
    compile(&format!("^(?:{pattern})$"))
}

fn compile(pattern: &str) -> Result<Regex, regex::Error> {
    RegexBuilder::new(pattern).size_limit(PATTERN_BYTES).build()
}

/// What a pattern that does not compile should have been.
pub(super) fn expected(error: &regex::Error) -> &'static str {
    match error {
        regex::Error::CompiledTooBig(_) => "a small regular expression",
        _ => {
            "a regular expression without look-around, back-references and what else only Python's \
             re reads"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names and patterns are one language: what a name matches, its pattern matches.
    #[test]
    fn a_name_is_matched_as_its_pattern_would_be() {
        let paths = [
            "model.layers.1.self_attn.q_proj",
            "model.layers.11.self_attn.q_proj",
            "model.layers.1.mlp.experts.down_proj",
            "q_proj",
            "xq_proj",
            "",
        ];
        let keys = [
            "q_proj",
            "1.self_attn.q_proj",
            r"1\.self_attn\.q_proj",
            r"layers\.1\.self_attn\.q_proj",
            "self_attn",
            "self.attn.q_proj",
            "model.layers.1.self_attn.q_proj",
            ".q_proj",
            "",
            "experts.down.proj",
        ];
        for key in keys {
            let named = Key::new(key).expect("a name");
            assert!(matches!(named, Key::Name(_)), "{key}");
            let pattern = compile(&format!(r"^(?:(.*\.)?({key})$)")).expect("a pattern");
            for path in paths {
                assert_eq!(named.is_match(path), pattern.is_match(path), "{key} on {path}");
            }
        }
        for key in ["(q|k)_proj", "q_proj$", r"\w+", "q_proj\\", r"a\_b", "é"] {
            assert!(!matches!(Key::new(key), Ok(Key::Name(_))), "{key}");
        }
    }

    /// Python's frame is kept letter by letter: such a key is two alternatives there.
    #[test]
    fn brackets_mean_what_they_mean_in_python() {
        let key = Key::new("q_proj)|(k_proj").expect("odd, but sound");
        assert!(key.is_match("a.q_proj.x") && key.is_match("k_proj"));
        assert!(!key.is_match("a.k_proj"));
    }
}
