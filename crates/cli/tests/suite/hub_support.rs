//! A small HTTP server on the loopback, for tests of what is fetched from one.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// What was asked for.
#[derive(Clone, Debug)]
pub struct Request {
    pub path: String,
    /// Names in lower case.
    headers: Vec<(String, String)>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(header, _)| header == name);
        found.map(|(_, value)| value.as_str())
    }

    fn read(stream: &TcpStream) -> Option<Self> {
        let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
        let path = lines.next()?.split(' ').nth(1)?.to_owned();
        let headers = lines.take_while(|line| !line.is_empty());
        let headers = headers.filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            Some((name.to_ascii_lowercase(), value.trim().to_owned()))
        });
        Some(Self { path, headers: headers.collect() })
    }
}

/// What is answered.
pub struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// The connection breaks after this many bytes of the body.
    pub sent_max: Option<usize>,
}

impl Reply {
    pub fn ok(body: &[u8]) -> Self {
        Self { body: body.to_vec(), ..Self::status(200) }
    }

    pub fn status(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Vec::new(), sent_max: None }
    }

    /// Sets a header, replacing one of the same name.
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.retain(|(header, _)| header != name);
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The part that was asked for, as servers of big files answer it.
    fn part(mut self, request: &Request) -> Self {
        let range = request.header("range").and_then(|range| range.strip_prefix("bytes="));
        let Some((start, end)) = range.and_then(|range| range.split_once('-')) else {
            return self;
        };
        let total = self.body.len();
        let start: usize = start.parse().expect("a number");
        let end = end.parse().map_or(total, |last: usize| total.min(last + 1));
        if self.status != 200 || start >= end {
            return self;
        }
        self.status = 206;
        self.body = self.body[start..end].to_vec();
        self.with("Content-Range", &format!("bytes {start}-{}/{total}", end - 1))
    }

    fn send(&self, stream: &mut TcpStream) -> std::io::Result<()> {
        let mut text = format!("HTTP/1.1 {} Reply\r\n", self.status);
        for (name, value) in &self.headers {
            text += &format!("{name}: {value}\r\n");
        }
        text += &format!("Content-Length: {}\r\nConnection: close\r\n\r\n", self.body.len());
        stream.write_all(text.as_bytes())?;
        let sent = self.sent_max.unwrap_or(usize::MAX).min(self.body.len());
        stream.write_all(&self.body[..sent])
    }
}

/// A server that runs until it is dropped.
pub struct Hub {
    /// `http://127.0.0.1:PORT`.
    pub address: String,
    requests: Arc<Mutex<Vec<Request>>>,
    over: Arc<AtomicBool>,
    server: Option<JoinHandle<()>>,
}

impl Hub {
    pub fn start(answer: impl Fn(&Request) -> Reply + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let over = Arc::new(AtomicBool::new(false));
        let (seen, stop) = (Arc::clone(&requests), Arc::clone(&over));
        let server = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::Acquire) {
                    return;
                }
                let Ok(mut stream) = stream else { continue };
                let Some(request) = Request::read(&stream) else { continue };
                let reply = answer(&request).part(&request);
                seen.lock().expect("no panic here").push(request);
                // A client that has gone away does not matter.
                _ = reply.send(&mut stream);
            }
        });
        Self { address, requests, over, server: Some(server) }
    }

    /// All requests so far.
    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().expect("no panic here").clone()
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        // It waits for a connection.
        _ = TcpStream::connect(self.address.trim_start_matches("http://"));
        if let Some(server) = self.server.take() {
            server.join().expect("the server does not panic");
        }
    }
}
