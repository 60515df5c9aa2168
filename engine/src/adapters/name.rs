//! What an adapter may be called. Its name is a field of requests and replies, a line of lists and logs
//! and a label of metrics, so it is a short text on one line that reads as what it is.

/// Most bytes of a name.
const MOST_BYTES: usize = 256;

/// Why a name is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// It is empty, or longer than `MOST_BYTES`.
    #[error("an adapter's name has {bytes} bytes, expected 1 to {MOST_BYTES}")]
    Length {
        /// How long it is.
        bytes: usize,
    },
    /// It holds a character that nobody would see, or that changes how others are shown.
    #[error("an adapter's name holds U+{:04X}, expected characters that can be seen", u32::from(*.character))]
    Character {
        /// The first one.
        character: char,
    },
    /// It is no path of plain parts.
    #[error(
        "an adapter's name has a part {part:?} between its '/', expected plain names, without '\\', \
         '.', '..', empty parts and spaces at an end"
    )]
    Part {
        /// What is wrong with it.
        part: &'static str,
    },
}

/// Whether an adapter may be called `name`: 1 to 256 bytes of visible characters, in parts between '/'
/// (as in `org/adapter`) that are neither empty nor `.` nor `..`.
pub fn check_name(name: &str) -> Result<(), NameError> {
    if !(1..=MOST_BYTES).contains(&name.len()) {
        return Err(NameError::Length { bytes: name.len() });
    }
    if let Some(character) = name.chars().find(|&c| is_unseen(c)) {
        return Err(NameError::Character { character });
    }
    for part in name.split('/') {
        let part = match part {
            "" => "",
            "." => ".",
            ".." => "..",
            part if part.contains('\\') => "\\",
            part if part.trim() != part => " ",
            _ => continue,
        };
        return Err(NameError::Part { part });
    }
    Ok(())
}

/// Control characters, separators of lines, and marks without width that hide or reorder text.
fn is_unseen(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_one_line_of_visible_parts() {
        let long = "x".repeat(MOST_BYTES);
        for good in ["a", "org/adapter", "a b", "v1.2", "...", "a=b", "名前", "è", &long] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        let too_long = "x".repeat(MOST_BYTES + 1);
        for bad in [
            "",
            "/",
            "/a",
            "a/",
            "a//b",
            ".",
            "..",
            "a/../b",
            "a\\b",
            " a",
            "a ",
            "a/ b",
            "a\nb",
            "a\0",
            "\u{7f}",
            "a\u{202e}b",
            "\u{200b}",
            "\u{feff}a",
            "\t",
            &too_long,
        ] {
            let error = check_name(bad).expect_err(bad).to_string();
            assert!(!error.chars().any(is_unseen), "{error}");
        }
    }
}
