//! What both examples need: where the gateway is, and events.

use std::io::{self, BufRead};

pub fn env(name: &str, otherwise: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| otherwise.to_string())
}

pub fn authorization() -> String {
    format!("Bearer {}", env("RYZANSTEIN_API_KEY", "none"))
}

pub fn first_model(gateway: &str) -> Result<String, Box<dyn std::error::Error>> {
    let answer = ureq::get(&format!("{gateway}/v1/models"))
        .set("Authorization", &authorization())
        .call()?;
    let models: serde_json::Value = answer.into_json()?;
    let model = models["data"][0]["id"]
        .as_str()
        .ok_or("no model is served")?;
    Ok(model.to_string())
}

/// A server-sent event; it counts when the blank line behind it is there.
pub struct Event {
    pub data: String,
    pub id: String,
}

/// The next event. `UnexpectedEof` where the stream ends: its own end is the event `[DONE]`.
pub fn next_event(lines: &mut impl BufRead) -> io::Result<Event> {
    let (mut data, mut id) = (String::new(), String::new());
    loop {
        let mut line = String::new();
        if lines.read_line(&mut line)? == 0 || !line.ends_with('\n') {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let line = line.trim_end();
        if let Some(value) = line.strip_prefix("data: ") {
            data = value.to_string();
        } else if let Some(value) = line.strip_prefix("id: ") {
            id = value.to_string();
        } else if line.is_empty() && !data.is_empty() {
            return Ok(Event { data, id });
        }
    }
}
