//! Chat templates, rendered as transformers renders them: blocks trimmed, Python's string methods,
//! `raise_exception`, `strftime_now`, and a `tojson` that writes what Python's `json.dumps` writes.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter};

use super::TextError;
use super::clock::strftime;

/// The name of the one template in an environment.
const NAME: &str = "chat_template";

/// Source of a template and the file it was found in.
pub struct TemplateSource {
    pub file: String,
    pub source: String,
}

/// The special tokens that a template may name.
#[derive(Debug, Clone, Default, Serialize)]
pub struct NamedTokens {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bos_token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eos_token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pad_token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unk_token: Option<String>,
}

/// What one rendering is given.
#[derive(Debug, Serialize)]
pub struct Render<'a> {
    /// A list of objects with `role` and `content`.
    pub messages: &'a serde_json::Value,
    /// Tool definitions; null when there are none, as in transformers.
    pub tools: Option<&'a serde_json::Value>,
    /// Whether the text ends where the assistant is to begin.
    pub add_generation_prompt: bool,
}

/// A parsed chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    tokens: NamedTokens,
}

#[derive(Serialize)]
struct Context<'a> {
    #[serde(flatten)]
    render: &'a Render<'a>,
    #[serde(flatten)]
    tokens: &'a NamedTokens,
}

impl ChatTemplate {
    /// Parses `template`; the error names its file and line.
    pub fn new(template: &TemplateSource, tokens: NamedTokens) -> Result<Self, TextError> {
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let refuse = |error: Error| TextError::File {
            file: template.file.clone(),
            what: format!("the chat template does not parse: {error}"),
        };
        let mut environment = Environment::new();
        environment.set_syntax(syntax.map_err(refuse)?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        environment.add_template_owned(NAME, template.source.clone()).map_err(refuse)?;
        Ok(Self { environment, tokens })
    }

    /// The prompt's text for these messages.
    pub fn render(&self, render: &Render<'_>) -> Result<String, TextError> {
        let context = Context { render, tokens: &self.tokens };
        self.environment
            .get_template(NAME)
            .and_then(|template| template.render(Value::from(Serde(context))))
            .map_err(|error| TextError::Render { what: reason(&error) })
    }
}

/// The template's own words where it raised an exception, else the whole error.
fn reason(error: &Error) -> String {
    match (error.kind(), error.detail()) {
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
        _ => error.to_string(),
    }
}

fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: String) -> Result<String, Error> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    strftime(&format, seconds).map_err(|code| {
        let what = format!("strftime_now: the format code %{code} is not known");
        Error::new(ErrorKind::InvalidOperation, what)
    })
}

/// `json.dumps(value, ensure_ascii=False, indent=indent)`. minijinja's own filter escapes what
/// HTML would trip over, which transformers does not.
fn to_json(value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    if options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false) {
        let what = "tojson: ensure_ascii=true is not supported";
        return Err(Error::new(ErrorKind::InvalidOperation, what));
    }
    options.assert_all_used()?;
    let text = match indent {
        None => write_json(&value, Spaced)?,
        Some(width) => {
            let indent = " ".repeat(width);
            write_json(&value, PrettyFormatter::with_indent(indent.as_bytes()))?
        }
    };
    Ok(Value::from_safe_string(text))
}

fn write_json<F: Formatter>(value: &Value, formatter: F) -> Result<String, Error> {
    let refuse = |what: String| Error::new(ErrorKind::BadSerialization, what);
    let mut bytes = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, formatter);
    value.serialize(&mut serializer).map_err(|error| refuse(error.to_string()))?;
    String::from_utf8(bytes).map_err(|error| refuse(error.to_string()))
}

/// One line, with Python's space after `,` and `:`.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()>
    where
        W: ?Sized + std::io::Write,
    {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()>
    where
        W: ?Sized + std::io::Write,
    {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W>(&mut self, writer: &mut W) -> std::io::Result<()>
    where
        W: ?Sized + std::io::Write,
    {
        writer.write_all(b": ")
    }

    fn write_f64<W>(&mut self, writer: &mut W, value: f64) -> std::io::Result<()>
    where
        W: ?Sized + std::io::Write,
    {
        CompactFormatter.write_f64(writer, value)
    }
}
