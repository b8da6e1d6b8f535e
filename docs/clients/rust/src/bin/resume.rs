//! A stream that survives its connection and its gateway, with the crate of clients/rust.
//!
//! RYZANSTEIN_URL may name several gateways, separated by commas: when one is lost the next one goes on.

use ryzanstein_client::{Client, Options};
use ryzanstein_examples::env;
use serde_json::json;
use std::io::Write;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let urls = env("RYZANSTEIN_URL", "http://127.0.0.1:8000");
    let gateways: Vec<&str> = urls.split(',').collect();
    let client = Client::new(&gateways, &env("RYZANSTEIN_API_KEY", "none"))?;
    let models = client.models()?;
    let body = json!({
        "model": models.first().ok_or("no model is served")?,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": 200,
    });
    for piece in client.stream_chat(body, &Options::default()) {
        print!("{}", piece?.text);
        std::io::stdout().flush()?;
    }
    println!();
    Ok(())
}
