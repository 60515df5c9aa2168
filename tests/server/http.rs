//! A small HTTP/1.1 client over one kept connection, with streams that can be left in the middle.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use serde_json::Value;

use crate::binary::HANGS;

/// One connection.
pub struct Client {
    stream: BufReader<TcpStream>,
}

/// A whole reply.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: String,
}

/// How long a body is.
enum Framing {
    Length(usize),
    Chunked,
}

struct Head {
    status: u16,
    headers: Vec<(String, String)>,
}

impl Client {
    pub fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("the server accepts");
        stream.set_read_timeout(Some(HANGS)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream: BufReader::new(stream) }
    }

    /// Writes bytes as they are. The server may refuse before it has read all of them.
    pub fn send_raw(&mut self, bytes: &[u8]) {
        let _ = self.stream.get_mut().write_all(bytes);
    }

    /// Says that nothing more will be sent.
    pub fn end(&mut self) {
        // Fails where the server has closed the connection already.
        let _ = self.stream.get_mut().shutdown(std::net::Shutdown::Write);
    }

    pub fn send(&mut self, method: &str, path: &str, body: &[u8]) {
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        self.send_raw(&[head.as_bytes(), body].concat());
    }

    pub fn get(&mut self, path: &str) -> Reply {
        self.send("GET", path, b"");
        self.reply().expect("a reply")
    }

    pub fn post(&mut self, path: &str, body: &Value) -> Reply {
        self.post_bytes(path, body.to_string().as_bytes())
    }

    pub fn post_bytes(&mut self, path: &str, body: &[u8]) -> Reply {
        self.send("POST", path, body);
        self.reply().expect("a reply")
    }

    /// The next reply; `None` when the server closed the connection instead.
    pub fn reply(&mut self) -> Option<Reply> {
        let Head { status, headers } = self.head()?;
        let body = match framing(&headers) {
            Framing::Length(length) => {
                let mut body = vec![0; length];
                self.stream.read_exact(&mut body).expect("the whole body");
                body
            }
            Framing::Chunked => std::iter::from_fn(|| self.chunk()).flatten().collect(),
        };
        let body = String::from_utf8(body).expect("a body in UTF-8");
        Some(Reply { status, headers, body })
    }

    /// Asks for a stream and reads its events as they come.
    pub fn stream(&mut self, path: &str, body: &Value) -> Events<'_> {
        self.send("POST", path, body.to_string().as_bytes());
        let head = self.head().expect("a reply");
        if head.status != 200 {
            let mut rest = String::new();
            let _ = self.stream.read_to_string(&mut rest);
            panic!("status {} for {body}: {rest}", head.status);
        }
        let kind = head.headers.iter().find(|(name, _)| name == "content-type");
        assert!(kind.is_some_and(|(_, kind)| kind.starts_with("text/event-stream")), "{kind:?}");
        assert!(matches!(framing(&head.headers), Framing::Chunked));
        Events { client: self, ready: String::new() }
    }

    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(1..) => Some(line.trim_end_matches(['\r', '\n']).to_owned()),
            Ok(0) => None,
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => None,
            Err(error) => panic!("no reply: {error}"),
        }
    }

    fn head(&mut self) -> Option<Head> {
        let status = self.line()?;
        let code = status.split(' ').nth(1).and_then(|code| code.parse().ok());
        let status = code.unwrap_or_else(|| panic!("not a status line: {status}"));
        let mut headers = Vec::new();
        loop {
            let line = self.line().expect("headers end with an empty line");
            let Some((name, value)) = line.split_once(':') else {
                assert_eq!(line, "");
                return Some(Head { status, headers });
            };
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    /// One chunk of a chunked body; `None` after the last.
    fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = self.line().expect("a chunk's size");
        let size = usize::from_str_radix(&size, 16).expect("a size in hexadecimal");
        let mut chunk = vec![0; size];
        self.stream.read_exact(&mut chunk).expect("a whole chunk");
        assert_eq!(self.line().as_deref(), Some(""), "a chunk ends with a line end");
        (size > 0).then_some(chunk)
    }
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("not JSON: {self:?}"))
    }

    /// The body of a reply that must be good.
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{self:?}");
        self.json()
    }
}

fn framing(headers: &[(String, String)]) -> Framing {
    let get = |wanted| headers.iter().find(|(name, _)| name == wanted).map(|(_, value)| value);
    match (get("content-length"), get("transfer-encoding")) {
        (Some(length), None) => Framing::Length(length.parse().expect("a length")),
        (None, Some(coding)) if coding == "chunked" => Framing::Chunked,
        (None, None) => Framing::Length(0),
        other => panic!("a body of unknown length: {other:?}"),
    }
}

/// The data of server-sent events, `[DONE]` among them. Dropped early, the rest stays unread.
pub struct Events<'c> {
    client: &'c mut Client,
    ready: String,
}

impl Iterator for Events<'_> {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        loop {
            if let Some((event, rest)) = self.ready.split_once("\n\n") {
                let data = event.strip_prefix("data: ").expect("an event has data");
                let data = data.to_owned();
                self.ready = rest.to_owned();
                return Some(data);
            }
            let Some(chunk) = self.client.chunk() else {
                assert_eq!(self.ready, "", "the stream ends with a whole event");
                return None;
            };
            self.ready.push_str(std::str::from_utf8(&chunk).expect("chunks in UTF-8"));
        }
    }
}
