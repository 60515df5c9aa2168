//! Input of `score`: a JSON object on each line.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;

/// One line.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// Names the tensors of this line.
    pub id: String,
    /// `None` for the base.
    #[serde(default)]
    pub adapter: Option<String>,
    /// The prompt.
    pub tokens: Vec<u32>,
    /// Tokens of the greedy continuation.
    pub max_new_tokens: usize,
}

/// What can be wrong with the input.
#[derive(Debug, Error)]
pub enum InputError {
    #[error("{}: {cause}", file.display())]
    Io { file: PathBuf, cause: std::io::Error },
    #[error(
        "{} line {line}: {what}; expected {{\"id\", \"adapter\": null or a name, \"tokens\": [...], \
         \"max_new_tokens\"}}", file.display()
    )]
    Line { file: PathBuf, line: usize, what: String },
    #[error("{}: no lines", file.display())]
    Empty { file: PathBuf },
}

/// Reads all lines; blank ones are skipped.
pub fn read(file: &Path) -> Result<Vec<Line>, InputError> {
    let text = std::fs::read_to_string(file)
        .map_err(|cause| InputError::Io { file: file.to_owned(), cause })?;
    parse(file, &text)
}

fn parse(file: &Path, text: &str) -> Result<Vec<Line>, InputError> {
    let mut lines = Vec::new();
    let mut seen = HashSet::new();
    for (number, text) in text.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
        let refuse = |what| InputError::Line { file: file.to_owned(), line: number + 1, what };
        let line: Line = serde_json::from_str(text).map_err(|error| refuse(error.to_string()))?;
        if line.tokens.is_empty() {
            return Err(refuse("field 'tokens' is empty".to_owned()));
        }
        if !seen.insert(line.id.clone()) {
            return Err(refuse(format!("field 'id': '{}' was used before", line.id)));
        }
        lines.push(line);
    }
    if lines.is_empty() {
        return Err(InputError::Empty { file: file.to_owned() });
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        let text = "{\"id\":\"a\",\"adapter\":null,\"tokens\":[1,2],\"max_new_tokens\":3}\n\n\
                    {\"id\":\"b\",\"adapter\":\"x\",\"tokens\":[5],\"max_new_tokens\":0}\n";
        let lines = parse(Path::new("f"), text).expect("good lines");
        assert_eq!(lines.len(), 2);
        assert_eq!((lines[1].id.as_str(), lines[1].adapter.as_deref()), ("b", Some("x")));
    }

    #[test]
    fn wrong_lines_are_named() {
        let good = "{\"id\":\"a\",\"tokens\":[1],\"max_new_tokens\":3}\n";
        for wrong in [
            "{",
            "{\"id\":\"b\",\"tokens\":[-1],\"max_new_tokens\":3}",
            "{\"id\":\"b\",\"tokens\":[],\"max_new_tokens\":3}",
            "{\"id\":\"b\",\"tokens\":[1]}",
            "{\"id\":\"b\",\"tokens\":[1],\"max_new_tokens\":3,\"x\":1}",
            "{\"id\":\"a\",\"tokens\":[1],\"max_new_tokens\":3}",
        ] {
            let error = parse(Path::new("f"), &format!("{good}{wrong}")).expect_err(wrong);
            assert!(error.to_string().contains("line 2"), "{error}");
        }
        assert!(matches!(parse(Path::new("f"), "\n"), Err(InputError::Empty { .. })));
    }
}
