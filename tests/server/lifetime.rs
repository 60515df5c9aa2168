//! Clients that leave, and the end of the server.

use std::io::ErrorKind;
use std::net::TcpStream;
use std::time::Instant;

use serde_json::{Value, json};

use crate::binary::Server;
use crate::http::Client;
use crate::questions::{BASE, CHAT, ask, chat};

/// An answer of exactly so many tokens.
fn long(tokens: usize) -> Value {
    let mut body = chat(BASE, "Tell me a story about a fox and a lamp.");
    body["max_tokens"] = json!(tokens);
    body["ignore_eos"] = json!(true);
    body["stream"] = json!(true);
    body
}

fn text(event: &str) -> Option<String> {
    let chunk: Value = serde_json::from_str(event).ok()?;
    chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned)
}

/// With one sequence at a time, another request runs only once those before it are gone. They
/// would take many times as long as it does.
#[test]
fn a_client_that_leaves_frees_its_place_whether_it_streams_waits_or_reads_whole() {
    let server = Server::start(&["--max-seqs", "1"]);
    let (whole, short) = (long(1500), chat("math", "Rosa had 6 birds and lost 2 of them."));
    let began = Instant::now();
    let events = Client::connect(server.address).stream(CHAT, &whole).count();
    let undisturbed = began.elapsed();
    assert!(events > 100);

    let began = Instant::now();
    let mut running = Client::connect(server.address);
    let first =
        running.stream(CHAT, &whole).filter_map(|event| text(&event)).find(|text| !text.is_empty());
    assert!(first.is_some(), "it runs");
    let mut waiting = Client::connect(server.address);
    waiting.send("POST", CHAT, whole.to_string().as_bytes());
    let mut unstreamed = whole.clone();
    unstreamed["stream"] = json!(false);
    let mut whole_reply = Client::connect(server.address);
    whole_reply.send("POST", CHAT, unstreamed.to_string().as_bytes());
    drop((running, waiting, whole_reply));
    ask(&mut Client::connect(server.address), &short);
    let took = began.elapsed();
    println!("whole {undisturbed:?}; three that left and a short one {took:?}");
    assert!(took < undisturbed / 2, "{took:?} against {undisturbed:?}");
}

#[test]
fn sigterm_lets_running_requests_finish_and_ends_with_success() {
    let server = Server::start(&[]);
    let mut idle = Client::connect(server.address);
    assert_eq!(idle.get("/health").status, 200);
    let mut client = Client::connect(server.address);
    let mut whole = Client::connect(server.address);
    let mut unstreamed = long(300);
    unstreamed["stream"] = json!(false);

    let mut events = client.stream(CHAT, &long(400));
    let first = events.by_ref().filter_map(|event| text(&event)).find(|text| !text.is_empty());
    assert!(first.is_some(), "the streamed one runs");
    whole.send("POST", CHAT, unstreamed.to_string().as_bytes());
    // The server reads what came before the signal: a later reply shows that it has.
    assert_eq!(idle.get("/health").status, 200);
    server.signal("TERM");
    let rest: Vec<String> = events.collect();
    assert_eq!(rest.last().map(String::as_str), Some("[DONE]"), "the stream is whole");
    assert!(rest.iter().any(|event| event.contains("\"finish_reason\":\"length\"")));
    let reply = whole.reply().expect("the other one is answered too").ok();
    assert_eq!(reply["usage"]["completion_tokens"], 300);

    let address = server.address;
    let ended = server.wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    assert!(ended.out.ends_with("stopped"), "{ended:?}");
    let refused = TcpStream::connect(address).expect_err("nobody listens any more");
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
}

#[test]
fn a_second_signal_ends_at_once() {
    let server = Server::start(&["--max-seqs", "1"]);
    let mut client = Client::connect(server.address);
    let mut events = client.stream(CHAT, &long(1900));
    assert!(events.next().is_some());
    server.signal("INT");
    // Signals of one kind merge while one is pending, so the second waits until the first was seen.
    while !server.errors().contains("shutting down") {
        assert!(events.next().is_some(), "the answer goes on meanwhile");
    }
    server.signal("INT");
    assert_eq!(server.wait().status.code(), Some(130));
}

/// Half a request kept the server from ending for as long as its client liked.
#[test]
fn sigterm_does_not_wait_for_a_client_that_sends_half_a_request() {
    use std::io::Write;
    let server = Server::start(&[]);
    let mut half = TcpStream::connect(server.address).expect("it listens");
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: half\r\nContent-Length: 100\r\n\r\n{{");
    half.write_all(head.as_bytes()).expect("sent");
    assert_eq!(Client::connect(server.address).get("/health").status, 200);
    server.signal("TERM");
    let ended = server.wait();
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
}
