//! What OpenAI's clients lack for Ryzanstein: streams that survive their connection and their gateway, and answers that
//! are generated once however often they are asked for.

mod errors;
mod stream;

pub use errors::{ApiError, Error};
pub use stream::{Cursor, Piece, Stream};

use serde_json::Value;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

const FIRST_WAIT: Duration = Duration::from_millis(50);
/// A generation that nobody reads is kept for 5 s, unless more was asked for: be back before.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Of one request; the default will do.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Yours, so that another process can repeat the request; else one is made up.
    pub idempotency_key: Option<String>,
    /// How long it goes on with no reader; else the server's grace of 5 s.
    pub background: Option<Duration>,
}

/// Times of a client.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// Silence after which a stream's connection counts as lost. 60 s.
    pub timeout: Duration,
    /// The longest silence before a whole answer. 10 min.
    pub answer_timeout: Duration,
    /// Since the first failure without anything new: then it gives up. 2 min.
    pub patience: Duration,
}

impl Default for Times {
    fn default() -> Self {
        let [timeout, answer_timeout, patience] = [60, 600, 120].map(Duration::from_secs);
        Times {
            timeout,
            answer_timeout,
            patience,
        }
    }
}

/// One server with any number of gateways. Threads may share it.
pub struct Client {
    gateways: Vec<String>,
    at: AtomicUsize,
    api_key: String,
    patience: Duration,
    streams: ureq::Agent,
    answers: ureq::Agent,
}

/// A document of a ranking.
#[derive(Clone, Debug, PartialEq)]
pub struct Ranked {
    /// Of the document in the request.
    pub index: usize,
    pub relevance_score: f64,
    /// None with `return_documents` false.
    pub text: Option<String>,
}

pub(crate) struct Request {
    pub method: &'static str,
    pub path: String,
    pub headers: Vec<(&'static str, String)>,
    pub body: Option<Value>,
}

impl Client {
    /// `gateways`: addresses of which any will do, each as `http://HOST:8000`; an empty key is none.
    pub fn new<Text: AsRef<str>>(gateways: &[Text], api_key: &str) -> Result<Client, Error> {
        Client::with_times(gateways, api_key, Times::default())
    }

    pub fn with_times<Text: AsRef<str>>(
        gateways: &[Text],
        api_key: &str,
        times: Times,
    ) -> Result<Client, Error> {
        let agent = |timeout| {
            let builder = ureq::AgentBuilder::new().timeout_connect(Duration::from_secs(5));
            builder.timeout_read(timeout).build()
        };
        let gateways: Vec<String> = gateways
            .iter()
            .map(|url| without_end(url.as_ref()))
            .collect();
        match gateways.iter().find(|url| !is_address(url)) {
            None if !gateways.is_empty() => Ok(Client {
                gateways,
                at: AtomicUsize::new(0),
                api_key: api_key.to_string(),
                patience: times.patience,
                streams: agent(times.timeout),
                answers: agent(times.answer_timeout),
            }),
            found => Err(Error::Invalid(format!(
                "{:?} is no gateway: name it as http://HOST:8000.",
                found.map_or("", String::as_str)
            ))),
        }
    }

    /// A chat completion; the body has the endpoint's fields.
    pub fn stream_chat(&self, body: Value, options: &Options) -> Stream<'_> {
        Stream::new(
            self,
            Some(request("/v1/chat/completions", body, Some(true), options)),
            None,
        )
    }

    /// A completion of a prompt.
    pub fn stream_completion(&self, body: Value, options: &Options) -> Stream<'_> {
        Stream::new(
            self,
            Some(request("/v1/completions", body, Some(true), options)),
            None,
        )
    }

    /// Reads a chat completion or completion, running or ended, behind the cursor.
    pub fn attach(&self, cursor: Cursor) -> Stream<'_> {
        Stream::new(self, None, Some(cursor))
    }

    /// A whole chat completion. However often it is repeated on the way, it is generated once.
    pub fn chat(&self, body: Value, options: &Options) -> Result<Value, Error> {
        self.json(&request("/v1/chat/completions", body, Some(false), options))
    }

    /// Documents by how well they answer a query, the best first; the body has the endpoint's fields `model`, `query`,
    /// `documents`, `top_n`, ...
    pub fn rerank(&self, body: Value, options: &Options) -> Result<Vec<Ranked>, Error> {
        let answer = self.call("/v1/rerank", body, options)?;
        let results = answer["results"].as_array();
        results
            .and_then(|found| found.iter().map(ranked).collect())
            .ok_or_else(|| {
                Error::Api(Box::new(ApiError {
                    message: "The server's answer is not a ranking.".to_string(),
                    ..ApiError::default()
                }))
            })
    }

    /// Posts a body to a path of the API that answers in JSON.
    pub fn call(&self, path: &str, body: Value, options: &Options) -> Result<Value, Error> {
        self.json(&request(path, body, None, options))
    }

    /// Names of the models that are served.
    pub fn models(&self) -> Result<Vec<String>, Error> {
        let answer = self.json(&plain("GET", "/v1/models".to_string()))?;
        let models = answer["data"].as_array().cloned().unwrap_or_default();
        Ok(models
            .iter()
            .filter_map(|model| model["id"].as_str().map(str::to_string))
            .collect())
    }

    /// What has come of a generation so far: `status`, `position`, `response`, `error`.
    pub fn state(&self, generation: &str) -> Result<Value, Error> {
        self.json(&plain("GET", path_of(generation)))
    }

    /// Ends it for everybody; false when it had ended already.
    pub fn cancel(&self, generation: &str) -> Result<bool, Error> {
        let answer = self.json(&plain("DELETE", path_of(generation)))?;
        Ok(answer["cancelled"].as_bool().unwrap_or_default())
    }

    /// Tries until the answer is there, at one gateway after the other.
    fn json(&self, ask: &Request) -> Result<Value, Error> {
        let mut patience = Patience::default();
        loop {
            let gateway = self.gateway();
            match self.json_at(gateway, ask) {
                Ok(answer) => return Ok(answer),
                Err(error) => self.retreat(error, gateway, &mut patience)?,
            }
        }
    }

    /// One try at one gateway.
    pub(crate) fn json_at(&self, gateway: usize, ask: &Request) -> Result<Value, Error> {
        let answer = self.send(&self.answers, gateway, ask)?;
        answer
            .into_json()
            .map_err(|lost| Error::Lost(lost.to_string()))
    }

    pub(crate) fn open(&self, gateway: usize, ask: &Request) -> Result<ureq::Response, Error> {
        self.send(&self.streams, gateway, ask)
    }

    fn send(
        &self,
        agent: &ureq::Agent,
        gateway: usize,
        ask: &Request,
    ) -> Result<ureq::Response, Error> {
        let mut sent = agent.request(
            ask.method,
            &format!("{}{}", self.gateways[gateway], ask.path),
        );
        if !self.api_key.is_empty() {
            sent = sent.set("Authorization", &format!("Bearer {}", self.api_key));
        }
        for (name, value) in &ask.headers {
            sent = sent.set(name, value);
        }
        let answer = match &ask.body {
            Some(body) => sent.send_json(body),
            None => sent.call(),
        };
        answer.map_err(Error::of)
    }

    /// The number of the gateway that is tried next.
    pub(crate) fn gateway(&self) -> usize {
        self.at.load(Ordering::Relaxed)
    }

    /// Leaves the gateway and waits; gives the error back where another try would not help.
    pub(crate) fn retreat(
        &self,
        error: Error,
        gateway: usize,
        patience: &mut Patience,
    ) -> Result<(), Error> {
        if !error.is_worth_another_try() {
            return Err(error);
        }
        let next = (gateway + 1) % self.gateways.len();
        // Only if it is still the current one: others may have seen it first.
        let _ = self
            .at
            .compare_exchange(gateway, next, Ordering::Relaxed, Ordering::Relaxed);
        match patience.wait_after(&error, Instant::now(), self.patience) {
            Some(wait) => sleep(wait),
            None => return Err(error),
        }
        Ok(())
    }
}

/// How long failures in a row are borne.
#[derive(Default)]
pub(crate) struct Patience {
    since: Option<Instant>,
    tries: u32,
}

impl Patience {
    /// How long to wait after a failure; none: it has lasted too long.
    fn wait_after(&mut self, error: &Error, now: Instant, length: Duration) -> Option<Duration> {
        let since = *self.since.get_or_insert(now);
        let asked = match error {
            Error::Api(error) => error.retry_after,
            _ => None,
        };
        let wait =
            asked.unwrap_or_else(|| LONGEST_WAIT.min(FIRST_WAIT * 2u32.pow(self.tries.min(10))));
        self.tries += 1;
        (now + wait - since <= length).then(|| wait)
    }
}

/// A request that may be repeated: it always has a key.
fn request(path: &str, mut body: Value, stream: Option<bool>, options: &Options) -> Request {
    if let (Some(stream), Some(fields)) = (stream, body.as_object_mut()) {
        fields.insert("stream".to_string(), stream.into());
    }
    let key = options.idempotency_key.clone().unwrap_or_else(new_key);
    let mut headers = vec![("Idempotency-Key", key)];
    if let Some(background) = options.background {
        headers.push((
            "X-Ryzanstein-Background",
            background.as_secs_f64().to_string(),
        ));
    }
    Request {
        method: "POST",
        path: path.to_string(),
        headers,
        body: Some(body),
    }
}

pub(crate) fn plain(method: &'static str, path: String) -> Request {
    Request {
        method,
        path,
        headers: Vec::new(),
        body: None,
    }
}

fn ranked(result: &Value) -> Option<Ranked> {
    Some(Ranked {
        index: result["index"].as_u64()? as usize,
        relevance_score: result["relevance_score"].as_f64()?,
        text: result["document"]["text"].as_str().map(str::to_string),
    })
}

/// The path of a generation; what its id may not have is left out, so that it is of one segment.
pub(crate) fn path_of(generation: &str) -> String {
    let name: String = generation
        .chars()
        .filter(|each| each.is_ascii_alphanumeric() || "-_".contains(*each))
        .collect();
    format!("/v1/generations/{name}")
}

/// 128 bits that nobody else has; std's only source of them is the seed of its hash maps.
fn new_key() -> String {
    let draw = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}{:08x}", draw(), draw(), std::process::id())
}

fn without_end(url: &str) -> String {
    let found = url.trim().trim_end_matches('/');
    found.strip_suffix("/v1").unwrap_or(found).to_string()
}

fn is_address(url: &str) -> bool {
    let host = url
        .strip_prefix("http://")
        .or_else(|| url.strip_prefix("https://"));
    host.map_or(false, |host| !host.is_empty() && !host.starts_with('/'))
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
