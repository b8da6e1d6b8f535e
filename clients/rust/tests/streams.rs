//! The client against a server that answers as the test says, and breaks its connections.

use ryzanstein_client::{Client, Cursor, Error, Options, Ranked, Times};
use serde_json::{json, Value};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const TEXT: &str = "A cursor – ok.";

const RANKING: &str =
    r#"{"results": [{"index": 1, "relevance_score": 0.5, "document": {"text": "b"}}]}"#;

/// Head (in lower case) and body of a request.
type Asked = (String, String);

struct Server {
    url: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Server {
    /// `answer` says what the request is answered with, given its number from 1; then the connection ends.
    fn new(answer: impl Fn(&Asked, usize) -> Vec<u8> + Send + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let kept = asked.clone();
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let mut connection = connection.unwrap();
                let mut lines = BufReader::new(connection.try_clone().unwrap());
                let (mut head, mut length) = (String::new(), 0);
                loop {
                    let mut line = String::new();
                    if lines.read_line(&mut line).unwrap() <= 2 {
                        break;
                    }
                    let line = line.to_lowercase();
                    if let Some(value) = line.strip_prefix("content-length: ") {
                        length = value.trim().parse().unwrap();
                    }
                    head.push_str(&line);
                }
                let mut body = vec![0; length];
                lines.read_exact(&mut body).unwrap();
                let request = (head, String::from_utf8(body).unwrap());
                let number = {
                    let mut kept = kept.lock().unwrap();
                    kept.push(request.clone());
                    kept.len()
                };
                connection.write_all(&answer(&request, number)).unwrap();
            }
        });
        Server { url, asked }
    }

    fn client(&self) -> Client {
        Client::new(&[&self.url], "").unwrap()
    }

    fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

fn answer(status: &str, headers: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\nConnection: close\r\n{headers}\r\n{body}").into_bytes()
}

/// The events behind the request's Last-Event-ID, one for each character, and the end.
fn events(asked: &Asked) -> String {
    let after = asked.0.split("last-event-id: ").nth(1);
    let after: usize = after.map_or(0, |rest| rest.lines().next().unwrap().parse().unwrap());
    let mut found = ": waiting\n\n".to_string();
    let end = json!({"index": 0, "finish_reason": "stop"});
    let choices = TEXT
        .chars()
        .map(|each| json!({"delta": {"content": each.to_string()}}));
    for (number, choice) in choices.chain([end]).enumerate().skip(after) {
        let chunk = json!({"id": "chatcmpl-1", "choices": [choice]});
        found += &format!("data: {chunk}\nid: {}\n\n", number + 1);
    }
    found + "data: [DONE]\n\n"
}

fn chat() -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}]})
}

#[test]
fn wherever_a_connection_is_cut_each_piece_comes_once() {
    let length = events(&Asked::default()).len();
    for cut in (0..length).step_by(83) {
        let server = Server::new(move |asked, number| {
            let mut whole = answer("200 OK", "", &events(asked));
            if number == 1 {
                whole.truncate(whole.len() - length + cut);
            }
            whole
        });
        let client = server.client();
        let pieces: Result<Vec<_>, _> = client.stream_chat(chat(), &Options::default()).collect();
        let pieces = pieces.unwrap();
        let read: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
        assert_eq!(read, TEXT);
        for (number, piece) in pieces.iter().enumerate() {
            assert_eq!(piece.position, (number + 1).to_string());
        }
        assert_eq!(
            pieces.last().unwrap().finish_reason.as_deref(),
            Some("stop")
        );
        let asked = server.asked();
        assert_eq!(asked.len(), 2);
        assert!(
            asked[0].0.starts_with("post /v1/chat/completions "),
            "{asked:?}"
        );
        assert!(asked[0].1.contains(r#""stream":true"#));
        let again = asked[1] == asked[0] && asked[0].0.contains("idempotency-key: ");
        assert!(
            again
                || asked[1]
                    .0
                    .starts_with("get /v1/generations/chatcmpl-1/stream "),
            "{asked:?}"
        );
    }
}

#[test]
fn another_gateway_goes_on() {
    let stopping = r#"{"error": {"message": "Stopping.", "code": "unavailable"}}"#;
    let server = Server::new(move |asked, number| match number {
        1 => answer("503 Service Unavailable", "Retry-After: 0\r\n", stopping),
        2 => answer("502 Bad Gateway", "", "<html>"),
        3 => answer("200 OK", "", &format!("data: {stopping}\n\n")),
        _ => answer("200 OK", "", &events(asked)),
    });
    let gateways = ["http://127.0.0.1:9", &format!("{}/v1/", server.url)];
    let client = Client::new(&gateways, "secret").unwrap();
    let background = Some(Duration::from_millis(1500));
    let options = Options {
        idempotency_key: Some("mine".to_string()),
        background,
    };
    assert_eq!(client.stream_chat(chat(), &options).text().unwrap(), TEXT);
    let asked = server.asked();
    assert_eq!(asked.len(), 4);
    for header in [
        "idempotency-key: mine",
        "x-ryzanstein-background: 1.5",
        "authorization: bearer secret",
    ] {
        assert!(asked[0].0.contains(&format!("{header}\r\n")), "{header}");
    }
    let cursor = Cursor {
        generation: "chatcmpl-1".to_string(),
        position: "9".to_string(),
    };
    assert_eq!(
        client.attach(cursor).text().unwrap(),
        TEXT.chars().skip(9).collect::<String>()
    );
}

#[test]
fn a_refusal_is_told_at_once() {
    let told = r#"{"error": {"message": "No.", "type": "t", "param": "model", "code": "model_not_found"}}"#;
    let server = Server::new(move |_, _| answer("404 Not Found", "X-Request-Id: r-1\r\n", told));
    let client = server.client();
    let mut stream = client.stream_chat(chat(), &Options::default());
    match stream.next() {
        Some(Err(Error::Api(error))) => {
            assert_eq!(
                (error.status, error.code.as_str(), error.again),
                (404, "model_not_found", false)
            );
            assert_eq!(
                (error.kind.as_str(), error.param.as_deref()),
                ("t", Some("model"))
            );
            assert_eq!(
                (error.request_id.as_str(), error.retry_after),
                ("r-1", None)
            );
            assert_eq!(Error::Api(error).to_string(), "No. (404 model_not_found)");
        }
        other => panic!("{other:?}"),
    }
    assert!(stream.next().is_none());
    assert!(matches!(client.models(), Err(Error::Api(_))));
    let options = Options {
        idempotency_key: Some("a\nb".to_string()),
        background: None,
    };
    assert!(matches!(
        client.chat(chat(), &options),
        Err(Error::Invalid(_))
    ));
    assert_eq!(server.asked().len(), 2);
}

#[test]
fn what_was_cancelled_is_not_tried_for_ever() {
    let server = Server::new(|asked, _| match asked.0.split(' ').nth(1).unwrap() {
        "/v1/generations/chatcmpl-1/stream" => answer("503 Service Unavailable", "", ""),
        "/v1/generations/chatcmpl-1" => answer("200 OK", "", r#"{"status": "cancelled"}"#),
        _ => answer("200 OK", "", &events(asked)[..150]),
    });
    let read = server
        .client()
        .stream_chat(chat(), &Options::default())
        .text();
    assert!(matches!(read, Err(Error::Api(error)) if error.status == 503 && !error.again));
}

#[test]
fn with_nobody_there_patience_ends() {
    let patience = Duration::from_millis(100);
    let times = Times {
        patience,
        ..Times::default()
    };
    let client = Client::with_times(&["http://127.0.0.1:9"], "", times).unwrap();
    let read = client.stream_chat(chat(), &Options::default()).text();
    assert!(matches!(read, Err(Error::Lost(_))));
    assert!(matches!(client.state("x"), Err(Error::Lost(_))));
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let times = Times {
        timeout: Duration::from_millis(20),
        ..times
    };
    let client = Client::with_times(&[url], "", times).unwrap();
    let read = client.stream_chat(chat(), &Options::default()).text();
    assert!(matches!(read, Err(Error::Lost(_))));
}

#[test]
fn whole_answers_are_repeated_under_one_key() {
    let server = Server::new(
        |asked, number| match (number, asked.0.split(' ').next().unwrap()) {
            _ if asked.1.contains("documents") => answer("200 OK", "", RANKING),
            (1, _) => Vec::new(),
            (_, "get") => answer("200 OK", "", r#"{"data": [{"id": "a"}, {"id": "b"}]}"#),
            (_, "delete") => answer("200 OK", "", r#"{"cancelled": true}"#),
            _ => answer("200 OK", "", r#"{"choices": []}"#),
        },
    );
    let client = server.client();
    assert_eq!(
        client.chat(chat(), &Options::default()).unwrap(),
        json!({"choices": []})
    );
    let asked = server.asked();
    assert_eq!(asked[0], asked[1]);
    assert!(asked[0].1.contains(r#""stream":false"#));
    assert_eq!(client.models().unwrap(), ["a", "b"]);
    assert!(client.cancel("x").unwrap());
    let other = client.rerank(json!({}), &Options::default());
    assert!(matches!(other, Err(Error::Api(error)) if error.message.contains("not a ranking")));
    let documents = json!({"documents": ["a", "b"]});
    let ranking = client.rerank(documents, &Options::default()).unwrap();
    assert_eq!(
        ranking,
        [Ranked {
            index: 1,
            relevance_score: 0.5,
            text: Some("b".to_string())
        }]
    );
    assert!(client
        .call("/v1/embeddings", json!({"input": "x"}), &Options::default())
        .is_ok());
}

#[test]
fn what_is_no_gateway() {
    for given in [
        &[][..],
        &[""],
        &["127.0.0.1:8000"],
        &["http://"],
        &["http://a", "ftp://b"],
    ] {
        let told = Client::new(given, "").err().unwrap().to_string();
        assert!(told.contains("http://HOST:8000"), "{told}");
    }
}
