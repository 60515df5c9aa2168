//! A server of the demo whose device faults: what its requests are told, and the code that the command ends with.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::ExitCode;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use amphora_hal::Backend;
use clap::Parser;
use serde_json::json;

use super::Task;
use crate::cli::{Cli, Command};
use crate::console::Voice;
use crate::http;
use crate::serve::serve;
use crate::start::{Launch, Setup};

/// Longer than anything here takes.
const HANGS: Duration = Duration::from_secs(300);

/// Begins an answer that takes many seconds: it must not end before the device faults.
fn ask(address: SocketAddr, stream: bool) -> BufReader<TcpStream> {
    let body = json!({"prompt": "Once", "max_tokens": 1500, "ignore_eos": true, "stream": stream});
    let body = body.to_string();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\
                Content-Type: application/json\r\nContent-Length";
    let mut connection = TcpStream::connect(address).expect("it listens");
    connection.set_read_timeout(Some(HANGS)).expect("a limit");
    write!(connection, "{head}: {}\r\n\r\n{body}", body.len()).expect("it reads");
    BufReader::new(connection)
}

/// Serves the demo on `device` until it faults under two answers; the code that the command ends with.
pub(super) fn serve_until_a_fault<B: Backend>(device: B, provoke: impl FnOnce()) -> i32 {
    let Command::Serve(args) = Cli::parse_from(["amphora", "serve"]).command else {
        panic!("it is serve")
    };
    let setup = Setup::serve(&args).expect("the demo's");
    let launch = Launch { setup, voice: Voice::Err, began: Instant::now() };
    let running = launch.run(device, &[]).expect("it starts");
    let engine = running.service.engine.clone();
    let (sender, bound) = channel();
    let serving = std::thread::spawn(move || {
        let address = ("127.0.0.1", 0);
        let options = http::Options { address, adapter_root: None, max_requests: 4 };
        serve(running, options, |address| sender.send(address).expect("it is waited for"))
    });
    let address = bound.recv_timeout(HANGS).expect("it listens");

    let mut streamed = ask(address, true);
    let first = streamed.by_ref().lines().map_while(Result::ok).find(|l| l.starts_with("data:"));
    assert!(first.is_some_and(|line| line.contains("text")), "an answer has begun");
    let mut whole = ask(address, false);
    let asked = Instant::now();
    while engine.metrics().running < 2 {
        let running = engine.metrics().running;
        assert!(asked.elapsed() < HANGS, "both answers run at once: {running} after {HANGS:?}");
        std::thread::yield_now();
    }
    provoke();

    let (mut rest, mut answer) = (String::new(), String::new());
    streamed.read_to_string(&mut rest).expect("it is closed");
    whole.read_to_string(&mut answer).expect("it is closed");
    let lost = "the device was lost";
    assert!(rest.contains(r#"{"error":"#) && rest.contains(lost), "{rest}");
    assert!(answer.starts_with("HTTP/1.1 500") && answer.contains(lost), "{answer}");
    let ended = serving.join().expect("no panic").expect_err("the device is lost");
    let text = format!("{ended:#}");
    assert!(text.contains("the engine stopped") && text.contains(lost), "{text}");
    // Codes cannot be compared, but shown.
    let code = crate::fail(&ended);
    i32::from(format!("{code:?}") != format!("{:?}", ExitCode::SUCCESS))
}
