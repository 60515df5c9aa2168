//! A JSON object whose fields are taken one by one, so that what is left over can be named.

use serde_json::{Map, Value};

use super::ApiError;

/// The fields of a request not yet taken. `null` is the same as absent.
pub struct Fields(Map<String, Value>);

/// A value that changes nothing, so that a field not built yet may still be sent with it.
#[derive(Debug, Clone, Copy)]
pub enum Neutral {
    /// Only absent or null.
    Absent,
    Number(f64),
    Bool(bool),
    Text(&'static str),
    /// An empty list, object or text.
    Empty,
    /// `{"type": TEXT}`.
    Type(&'static str),
    /// `[TEXT]`.
    Only(&'static str),
}

impl Neutral {
    pub fn accepts(self, value: &Value) -> bool {
        match self {
            Self::Absent => false,
            Self::Number(neutral) => value.as_f64() == Some(neutral),
            Self::Bool(neutral) => value.as_bool() == Some(neutral),
            Self::Text(neutral) => value.as_str() == Some(neutral),
            Self::Type(neutral) => value["type"] == neutral,
            Self::Only(neutral) => value.as_array().is_some_and(|list| list[..] == [neutral]),
            Self::Empty => match value {
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
                Value::String(text) => text.is_empty(),
                _ => false,
            },
        }
    }

    fn describe(self) -> String {
        match self {
            Self::Absent => "leave it out".to_owned(),
            Self::Number(neutral) => format!("leave it out or send {neutral}"),
            Self::Bool(neutral) => format!("leave it out or send {neutral}"),
            Self::Text(neutral) => format!("leave it out or send \"{neutral}\""),
            Self::Type(neutral) => format!("leave it out or send {{\"type\": \"{neutral}\"}}"),
            Self::Only(neutral) => format!("leave it out or send [\"{neutral}\"]"),
            Self::Empty => "leave it out or send it empty".to_owned(),
        }
    }
}

impl Fields {
    /// The fields of a request's body.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let value: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::malformed(format!("the body is not valid JSON: {error}")))?;
        match value {
            Value::Object(map) => Ok(Self(map)),
            _ => Err(ApiError::malformed("the body must be a JSON object")),
        }
    }

    /// The fields of an object inside a request.
    pub fn of(param: &str, value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self(map)),
            other => Err(expected(param, "an object", &other)),
        }
    }

    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.0.shift_remove(name).filter(|value| !value.is_null())
    }

    pub fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(expected(name, "a string", &other)),
        }
    }

    pub fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(expected(name, "true or false", &other)),
        }
    }

    /// A number in `least..=most`.
    pub fn number(&mut self, name: &str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(number) if (least..=most).contains(&number) => Ok(Some(number)),
            _ => Err(expected(name, &format!("a number from {least} to {most}"), &value)),
        }
    }

    /// An integer of at least `least`.
    pub fn integer(&mut self, name: &str, least: i64) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        match value.as_i64() {
            Some(number) if number >= least => Ok(Some(number)),
            _ => Err(expected(name, &format!("an integer of at least {least}"), &value)),
        }
    }

    /// An integer in `least..=most`.
    pub fn integer_within(
        &mut self,
        name: &str,
        least: usize,
        most: usize,
    ) -> Result<Option<usize>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        match value.as_u64().and_then(|number| usize::try_from(number).ok()) {
            Some(number) if (least..=most).contains(&number) => Ok(Some(number)),
            _ => Err(expected(name, &format!("an integer from {least} to {most}"), &value)),
        }
    }

    /// One string or a list of them.
    pub fn texts(&mut self, name: &str) -> Result<Vec<String>, ApiError> {
        let refuse = |value: &Value| expected(name, "a string or a list of strings", value);
        match self.take(name) {
            None => Ok(Vec::new()),
            Some(Value::String(text)) => Ok(vec![text]),
            Some(Value::Array(list)) => list
                .into_iter()
                .map(|entry| match entry {
                    Value::String(text) => Ok(text),
                    other => Err(refuse(&other)),
                })
                .collect(),
            Some(other) => Err(refuse(&other)),
        }
    }

    /// Takes a field that changes no answer.
    pub fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.0.shift_remove(*name);
        }
    }

    /// Takes fields that are not built yet, and refuses any value that would change the answer.
    pub fn refuse(&mut self, fields: &[(&str, Neutral)]) -> Result<(), ApiError> {
        for (name, neutral) in fields {
            if let Some(value) = self.take(name)
                && !neutral.accepts(&value)
            {
                return Err(ApiError::unsupported(*name, &neutral.describe()));
            }
        }
        Ok(())
    }

    /// Refuses what nobody took; `path` is where this object stands in the request.
    pub fn finish(self, path: &str) -> Result<(), ApiError> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(name) => Err(ApiError::unknown_field(format!("{path}{name}"))),
        }
    }
}

/// 400: `param` is of the wrong kind or out of range.
pub fn expected(param: &str, what: &str, found: &Value) -> ApiError {
    let mut found = found.to_string();
    if found.chars().count() > 80 {
        found = found.chars().take(79).chain(['…']).collect();
    }
    ApiError::invalid(param, format!("'{param}' must be {what}, not {found}"))
}
