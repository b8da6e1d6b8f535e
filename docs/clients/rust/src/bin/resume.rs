//! A stream that survives its connection and its gateway.
//!
//! RYZANSTEIN_URL may name several gateways, separated by commas: when one is lost the next one goes on.

use ryzanstein_examples::{authorization, env, first_model, next_event};
use serde_json::{json, Value};
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{BufReader, Write};
use std::time::Duration;

const TRIES: u64 = 20; // in a row without anything new

enum End {
    Done,
    /// No answer, or one that says to come again.
    Lost(String),
}

/// One connection: prints the text of its events, and keeps the id of the last one in `last`.
fn read(
    gateway: &str,
    key: &str,
    body: &Value,
    last: &mut String,
) -> Result<End, Box<dyn std::error::Error>> {
    let mut request = ureq::post(&format!("{gateway}/v1/chat/completions"))
        .set("Authorization", &authorization())
        .set("Idempotency-Key", key);
    if !last.is_empty() {
        request = request.set("Last-Event-ID", last);
    }
    let answer = match request.send_json(body.clone()) {
        Ok(answer) => answer,
        Err(ureq::Error::Status(429 | 502 | 503, answer)) => {
            return Ok(End::Lost(answer.into_string()?))
        }
        Err(ureq::Error::Status(_, answer)) => return Err(answer.into_string()?.into()),
        Err(error) => return Ok(End::Lost(error.to_string())),
    };
    let mut lines = BufReader::new(answer.into_reader());
    loop {
        let event = match next_event(&mut lines) {
            Ok(event) => event,
            Err(error) => return Ok(End::Lost(error.to_string())),
        };
        if event.data == "[DONE]" {
            return Ok(End::Done);
        }
        let chunk: Value = serde_json::from_str(&event.data)?;
        if let Some(error) = chunk.get("error") {
            return Ok(End::Lost(error["message"].to_string())); // or over: the next try tells
        }
        print!(
            "{}",
            chunk["choices"][0]["delta"]["content"]
                .as_str()
                .unwrap_or("")
        );
        std::io::stdout().flush()?;
        *last = event.id;
    }
}

/// 128 bits that nobody else has; std's only source of them is the seed of its hash maps.
fn unique() -> String {
    let draw = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}{:08x}", draw(), draw(), std::process::id())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let urls = env("RYZANSTEIN_URL", "http://127.0.0.1:8000");
    let gateways: Vec<&str> = urls.split(',').collect();
    let body = json!({
        "model": first_model(gateways[0])?,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": 200,
        "stream": true,
    });
    // The same request under the same key is the same generation, at every gateway.
    let (key, mut last, mut tries) = (unique(), String::new(), 0);
    for gateway in gateways.iter().cycle() {
        let before = last.clone();
        match read(gateway, &key, &body, &mut last)? {
            End::Done => break,
            End::Lost(why) => eprintln!("\n[{gateway} is lost: {why}]"),
        }
        tries = if last == before { tries + 1 } else { 0 };
        if tries > TRIES {
            return Err("no gateway answers".into());
        }
        std::thread::sleep(Duration::from_millis(50 * (tries + 1)));
    }
    println!();
    Ok(())
}
