//! What the server refuses, and what is worth trying again.

use serde_json::Value;
use std::fmt;
use std::time::Duration;

/// An error in OpenAI's shape.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApiError {
    pub message: String,
    pub kind: String,
    pub code: String,
    pub param: Option<String>,
    /// HTTP's; 0 for an error in the middle of a stream.
    pub status: u16,
    pub request_id: String,
    pub retry_after: Option<Duration>,
    /// Whether the same request may succeed later, or elsewhere.
    pub again: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// What the server refuses.
    Api(Box<ApiError>),
    /// No gateway could be reached, or each was lost, for as long as the client's patience.
    Lost(String),
    /// What cannot be sent: an address, a header.
    Invalid(String),
}

impl fmt::Display for Error {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Api(error) => write!(to, "{} ({} {})", error.message, error.status, error.code),
            Error::Lost(reason) => write!(to, "The connection was lost: {reason}."),
            Error::Invalid(reason) => write!(to, "{reason}"),
        }
    }
}

impl std::error::Error for Error {}

impl Error {
    pub(crate) fn is_worth_another_try(&self) -> bool {
        match self {
            Error::Api(error) => error.again,
            Error::Lost(_) => true,
            Error::Invalid(_) => false,
        }
    }

    /// From the object `error` of an answer, or of an event, whose status is 0.
    pub(crate) fn told(error: &Value, status: u16) -> ApiError {
        let text = |name: &str| error[name].as_str().unwrap_or_default().to_string();
        let code = text("code");
        ApiError {
            message: text("message"),
            kind: text("type"),
            param: error["param"].as_str().map(str::to_string),
            again: match status {
                0 => code == "unavailable" || code == "broker_unavailable",
                429 | 502 | 503 => true,
                _ => false,
            },
            status,
            code,
            ..ApiError::default()
        }
    }

    /// From what became of a request; whatever a proxy on the way has made of it.
    pub(crate) fn of(error: ureq::Error) -> Error {
        let answer = match error {
            ureq::Error::Status(_, answer) => answer,
            ureq::Error::Transport(lost) => {
                use ureq::ErrorKind::{BadHeader, InvalidUrl, UnknownScheme};
                return match lost.kind() {
                    BadHeader | InvalidUrl | UnknownScheme => Error::Invalid(lost.to_string()),
                    _ => Error::Lost(lost.to_string()),
                };
            }
        };
        let status = answer.status();
        let header = |name: &str| answer.header(name).unwrap_or_default().to_string();
        let (request_id, wait) = (header("x-request-id"), header("retry-after"));
        let body: Value = match answer.into_string() {
            Ok(text) => serde_json::from_str(&text).unwrap_or_default(),
            Err(lost) => return Error::Lost(lost.to_string()),
        };
        let mut error = Error::told(&body["error"], status);
        if !body["error"].is_object() {
            error.message =
                format!("The server answered {status}, and not with an error of OpenAI's shape.");
        }
        error.request_id = request_id;
        error.retry_after = wait
            .parse()
            .ok()
            .map(|seconds: u32| Duration::from_secs(seconds.into()));
        Error::Api(Box::new(error))
    }
}
