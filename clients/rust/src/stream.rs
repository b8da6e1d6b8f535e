//! One generation, whatever connections and gateways are lost on the way.

use crate::{path_of, plain, Client, Error, Patience, Request};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};

const LONGEST_LINE: u64 = 64 << 20;

/// Where a reader stands in a generation. Whoever has it can go on, in any process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// As the server's chunks name it: `chatcmpl-...` or `cmpl-...`.
    pub generation: String,
    /// Id of the last event that is here; empty: the stream comes from its beginning.
    pub position: String,
}

/// One event of a stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// What it adds to the answer of its choice; empty where it says something else.
    pub text: String,
    pub position: String,
    pub choice: u64,
    /// `stop`, `length`, `tool_calls`, ... on the last piece of a choice.
    pub finish_reason: Option<String>,
    /// OpenAI's chunk.
    pub chunk: Value,
}

type Lines = BufReader<Box<dyn Read + Send + Sync>>;

/// Pieces, each once, in order. Dropping it closes the connection: the generation ends some seconds later, unless
/// somebody reads it, or it was asked to go on.
pub struct Stream<'a> {
    client: &'a Client,
    begin: Option<Request>,
    cursor: Option<Cursor>,
    connection: Option<(usize, Lines)>,
    patience: Patience,
    done: bool,
}

impl<'a> Stream<'a> {
    /// From a request, or from where somebody else stood.
    pub(crate) fn new(client: &'a Client, begin: Option<Request>, cursor: Option<Cursor>) -> Self {
        Stream {
            client,
            begin,
            cursor,
            connection: None,
            patience: Patience::default(),
            done: false,
        }
    }

    /// Behind the last piece; none before the first.
    pub fn cursor(&self) -> Option<&Cursor> {
        self.cursor.as_ref()
    }

    /// What is left of the first choice's text, to its end.
    pub fn text(self) -> Result<String, Error> {
        let mut text = String::new();
        for piece in self {
            let piece = piece?;
            if piece.choice == 0 {
                text.push_str(&piece.text);
            }
        }
        Ok(text)
    }

    /// The next piece at this gateway; none at the stream's end.
    fn read(&mut self, gateway: usize) -> Result<Option<Piece>, Error> {
        if self.connection.is_none() {
            let answer = self
                .client
                .open(gateway, &self.ask())
                .map_err(|error| self.judged(error, gateway))?;
            self.connection = Some((gateway, BufReader::new(answer.into_reader())));
        }
        let lines = &mut self.connection.as_mut().expect("it was opened").1;
        let (data, id) = next_event(lines).map_err(|lost| Error::Lost(lost.to_string()))?;
        if data == "[DONE]" {
            return Ok(None);
        }
        let chunk: Value = serde_json::from_str(&data).map_err(|wrong| {
            Error::Invalid(format!("An event of the stream is not JSON: {wrong}."))
        })?;
        if chunk["error"].is_object() {
            return Err(Error::Api(Box::new(Error::told(&chunk["error"], 0))));
        }
        let generation = chunk["id"].as_str().unwrap_or_default().to_string();
        self.cursor = Some(Cursor {
            generation,
            position: id.clone(),
        });
        let choice = &chunk["choices"][0]; // one at most, as OpenAI has it
        let text = choice["text"]
            .as_str()
            .or_else(|| choice["delta"]["content"].as_str());
        Ok(Some(Piece {
            text: text.unwrap_or_default().to_string(),
            position: id,
            choice: choice["index"].as_u64().unwrap_or_default(),
            finish_reason: choice["finish_reason"].as_str().map(str::to_string),
            chunk,
        }))
    }

    /// The request that continues behind what has been taken.
    fn ask(&self) -> Request {
        match (&self.cursor, &self.begin) {
            (None, Some(begin)) => Request {
                method: begin.method,
                path: begin.path.clone(),
                headers: begin.headers.clone(),
                body: begin.body.clone(),
            },
            (cursor, _) => {
                let cursor = cursor.clone().unwrap_or_default();
                let mut ask = plain("GET", format!("{}/stream", path_of(&cursor.generation)));
                if !cursor.position.is_empty() {
                    ask.headers.push(("Last-Event-ID", cursor.position));
                }
                ask
            }
        }
    }

    /// A generation that has failed or was cancelled says so for ever: trying again would not end.
    fn judged(&self, error: Error, gateway: usize) -> Error {
        let (mut refusal, cursor) = match (error, &self.cursor) {
            (Error::Api(refusal), Some(cursor)) if refusal.again => (refusal, cursor),
            (error, _) => return error,
        };
        match self
            .client
            .json_at(gateway, &plain("GET", path_of(&cursor.generation)))
        {
            Ok(state) => {
                refusal.again = !matches!(state["status"].as_str(), Some("failed" | "cancelled"))
            }
            Err(error) => return error,
        }
        Error::Api(refusal)
    }
}

impl Iterator for Stream<'_> {
    type Item = Result<Piece, Error>;

    /// `None` at the end, and after an error.
    fn next(&mut self) -> Option<Self::Item> {
        while !self.done {
            let gateway = self
                .connection
                .as_ref()
                .map_or_else(|| self.client.gateway(), |(at, _)| *at);
            match self.read(gateway) {
                Ok(Some(piece)) => {
                    self.patience = Patience::default();
                    return Some(Ok(piece));
                }
                Ok(None) => self.done = true,
                Err(error) => {
                    self.connection = None;
                    if let Err(error) = self.client.retreat(error, gateway, &mut self.patience) {
                        self.done = true;
                        return Some(Err(error));
                    }
                }
            }
        }
        self.connection = None;
        None
    }
}

/// Data and id of the next event that has data: it counts when the blank line behind it is there.
fn next_event(lines: &mut impl BufRead) -> std::io::Result<(String, String)> {
    let (mut data, mut id) = (Vec::new(), String::new());
    loop {
        let mut line = String::new();
        lines.take(LONGEST_LINE).read_line(&mut line)?;
        if !line.ends_with('\n') {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let line = line.trim_end_matches(|end| end == '\n' || end == '\r');
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "data" => data.push(value.to_string()),
            "id" => id = value.to_string(),
            "" if line.is_empty() && !data.is_empty() => return Ok((data.join("\n"), id)),
            _ => {}
        }
    }
}
