//! Reading fields of a JSON object so that every refusal names file, field, found and expected.

use serde_json::{Map, Value};

use crate::error::ConfigError;

/// Characters that an error shows of a name.
pub(crate) const MOST_NAME: usize = 200;

/// One JSON object of a file; `prefix` is its path inside the file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fields<'a> {
    file: &'a str,
    prefix: &'a str,
    map: &'a Map<String, Value>,
}

/// Parses a file's text into an object.
pub(crate) fn parse_object(file: &str, text: &str) -> Result<Map<String, Value>, ConfigError> {
    let not_json = |reason: String| ConfigError::NotJson { file: file.to_owned(), reason };
    match serde_json::from_str(text).map_err(|e| not_json(e.to_string()))? {
        Value::Object(map) => Ok(map),
        other => Err(not_json(format!("found {}", shown(&other)))),
    }
}

/// A value as an error shows it: short.
pub(crate) fn shown(value: &Value) -> String {
    short(&value.to_string(), 60)
}

/// At most the first `most` characters of a text that somebody else wrote.
pub(crate) fn short(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

impl<'a> Fields<'a> {
    pub(crate) fn new(file: &'a str, map: &'a Map<String, Value>) -> Self {
        Fields { file, prefix: "", map }
    }

    /// The file that errors name.
    pub(crate) fn file(&self) -> &'a str {
        self.file
    }

    /// The value of `field`; `null` counts as absent, as it does for transformers.
    pub(crate) fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|v| !v.is_null())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Field names, in the file's order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    /// Whether `field` is there and `null`.
    pub(crate) fn is_null(&self, field: &str) -> bool {
        self.map.get(field).is_some_and(Value::is_null)
    }

    /// The same place in the file, with other values.
    pub(crate) fn with(&self, map: &'a Map<String, Value>) -> Self {
        Fields { map, ..*self }
    }

    /// The object in `field`.
    pub(crate) fn object(&self, field: &'a str) -> Result<Option<Fields<'a>>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields { file: self.file, prefix: field, map })),
            Some(other) => Err(self.refuse(field, other, "an object")),
        }
    }

    /// A whole number within `range`.
    pub(crate) fn count(
        &self,
        field: &str,
        range: std::ops::RangeInclusive<usize>,
    ) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.get(field) else {
            return Ok(None);
        };
        // Some writers give whole numbers as floats (16.0).
        let whole = value.as_u64().or_else(|| {
            let f = value.as_f64().filter(|f| f.fract() == 0.0)?;
            (0.0..9e15).contains(&f).then_some(f as u64)
        });
        match whole.and_then(|n| usize::try_from(n).ok()) {
            Some(n) if range.contains(&n) => Ok(Some(n)),
            _ => {
                let expected = format!("a whole number in {}..={}", range.start(), range.end());
                Err(self.refuse(field, value, &expected))
            }
        }
    }

    /// The same, of a field that must be there.
    pub(crate) fn need_count(
        &self,
        field: &str,
        range: std::ops::RangeInclusive<usize>,
    ) -> Result<usize, ConfigError> {
        let expected = format!("a whole number in {}..={}", range.start(), range.end());
        self.count(field, range)?.ok_or_else(|| self.missing(field, &expected))
    }

    /// A finite number that `holds`.
    pub(crate) fn number(&self, field: &str, rule: NumberRule) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.get(field) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(x) if rule.holds(x) => Ok(Some(x)),
            _ => Err(self.refuse(field, value, rule.expected())),
        }
    }

    pub(crate) fn flag(&self, field: &str) -> Result<Option<bool>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(other) => Err(self.refuse(field, other, "true or false")),
        }
    }

    pub(crate) fn text(&self, field: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => Err(self.refuse(field, other, "a string")),
        }
    }

    /// A refusal of `field` for holding `found`.
    pub(crate) fn refuse(&self, field: &str, found: &Value, expected: &str) -> ConfigError {
        ConfigError::Field {
            file: self.file.to_owned(),
            field: self.path(field),
            found: shown(found),
            expected: expected.to_owned(),
        }
    }

    /// A refusal for the absence of `field`.
    pub(crate) fn missing(&self, field: &str, expected: &str) -> ConfigError {
        ConfigError::Missing {
            file: self.file.to_owned(),
            field: self.path(field),
            expected: expected.to_owned(),
        }
    }

    fn path(&self, field: &str) -> String {
        let field = short(field, MOST_NAME);
        if self.prefix.is_empty() { field } else { format!("{}.{field}", self.prefix) }
    }
}

/// What a number must be, beside finite and small enough for f32.
#[derive(Debug, Clone, Copy)]
pub(crate) enum NumberRule {
    Positive,
    NotNegative,
    /// Above 0 and at most 1.
    Share,
    Any,
}

impl NumberRule {
    fn holds(self, x: f64) -> bool {
        // As the f32 that is computed with: 1e-60 is positive, but would be 0 there.
        let x = x as f32;
        x.is_finite()
            && match self {
                NumberRule::Positive => x > 0.0,
                NumberRule::NotNegative => x >= 0.0,
                NumberRule::Share => x > 0.0 && x <= 1.0,
                NumberRule::Any => true,
            }
    }

    fn expected(self) -> &'static str {
        match self {
            NumberRule::Positive => "a positive number",
            NumberRule::NotNegative => "a number of at least 0",
            NumberRule::Share => "a number above 0 and at most 1",
            NumberRule::Any => "a finite number",
        }
    }
}
