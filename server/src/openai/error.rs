//! Errors in OpenAI's shape.

use axum::http::StatusCode;
use serde_json::{Value, json};

/// One refused request: an HTTP status and OpenAI's error object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    pub status: StatusCode,
    pub message: String,
    /// OpenAI's `type`.
    pub kind: &'static str,
    /// The field at fault.
    pub param: Option<String>,
    pub code: Option<&'static str>,
}

impl ApiError {
    /// 400: the field `param` is wrong, as `message` says.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            message: message.into(),
            kind: "invalid_request_error",
            param: Some(param.into()),
            code: None,
        }
    }

    /// 400: the request as a whole is wrong.
    pub fn malformed(message: impl Into<String>) -> Self {
        Self { param: None, ..Self::invalid("", message) }
    }

    /// 400: the field is known, would change the answer, and is not built yet.
    pub fn unsupported(param: impl Into<String>, accepted: &str) -> Self {
        let param = param.into();
        let message = format!("'{param}' is not supported yet: {accepted}");
        Self { code: Some("unsupported_parameter"), ..Self::invalid(param, message) }
    }

    /// 400: nobody knows this field.
    pub fn unknown_field(param: impl Into<String>) -> Self {
        let param = param.into();
        let message = format!("'{param}' is not a known parameter");
        Self { code: Some("unknown_parameter"), ..Self::invalid(param, message) }
    }

    /// 404: no model or adapter has this name.
    pub fn unknown_model(name: &str) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            message: format!(
                "The model '{name}' does not exist; GET /v1/models lists those that do"
            ),
            kind: "invalid_request_error",
            param: Some("model".to_owned()),
            code: Some("model_not_found"),
        }
    }

    /// 400: prompt and answer do not fit the model's context.
    pub fn too_long(param: &str, message: impl Into<String>) -> Self {
        Self { code: Some("context_length_exceeded"), ..Self::invalid(param, message) }
    }

    /// Any other status, for the routes themselves.
    pub fn status(status: StatusCode, message: impl Into<String>) -> Self {
        let kind = match status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        Self { status, message: message.into(), kind, param: None, code: None }
    }

    /// The body of the response.
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }
}
