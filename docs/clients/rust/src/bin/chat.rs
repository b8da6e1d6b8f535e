//! A chat, streamed.

use ryzanstein_examples::{authorization, env, first_model, next_event};
use serde_json::{json, Value};
use std::io::{BufReader, Write};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gateway = env("RYZANSTEIN_URL", "http://127.0.0.1:8000");
    let answer = ureq::post(&format!("{gateway}/v1/chat/completions"))
        .set("Authorization", &authorization())
        .send_json(json!({
            "model": first_model(&gateway)?,
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "max_tokens": 200,
            "stream": true,
        }))?;
    let mut lines = BufReader::new(answer.into_reader());
    loop {
        let event = next_event(&mut lines)?;
        if event.data == "[DONE]" {
            break;
        }
        let chunk: Value = serde_json::from_str(&event.data)?;
        if let Some(error) = chunk.get("error") {
            return Err(error["message"].to_string().into());
        }
        print!(
            "{}",
            chunk["choices"][0]["delta"]["content"]
                .as_str()
                .unwrap_or("")
        );
        std::io::stdout().flush()?;
    }
    println!();
    Ok(())
}
