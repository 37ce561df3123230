//! Files over HTTP: fetched beside their place, continued where they stopped, and put in place once
//! they are whole and right. Nothing that a server says becomes part of a path here.

use super::cache::hexadecimal;
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;
use std::thread;
use std::time::Duration;
use ureq::Body;
use ureq::config::ConfigBuilder;
use ureq::http::Response;
use ureq::typestate::AgentScope;

const REDIRECTS_MAX: usize = 8;
const CONNECT_PATIENCE: Duration = Duration::from_secs(30);
const ANSWER_PATIENCE: Duration = Duration::from_secs(60);
/// How long a file may send nothing before its connection counts as broken.
const IDLE_PATIENCE: Duration = Duration::from_secs(60);
/// How often a file is asked for, the first time included, if its connection breaks.
const TRIES_MAX: u32 = 3;
const RETRY_PAUSE: Duration = Duration::from_secs(1);
const CHUNK_BYTES: usize = 1 << 18;

/// What is known about a file before it is fetched.
#[derive(Clone, Debug)]
pub(super) struct Expected {
    pub(super) bytes: Option<u64>,
    /// In hexadecimal.
    pub(super) sha256: Option<String>,
    /// Longer files are refused.
    pub(super) bytes_max: u64,
}

/// A server, and the token that it alone is shown.
pub(super) struct Site {
    agent: ureq::Agent,
    /// Without a slash at its end.
    endpoint: String,
    token: Option<String>,
}

impl Site {
    pub(super) fn new(endpoint: &str, token: Option<String>) -> Result<Self, String> {
        if !endpoint.starts_with("https://") && !endpoint.starts_with("http://") {
            return Err(format!("HF_ENDPOINT is \"{endpoint}\", which is no http address"));
        }
        let agent = agent_settings(IDLE_PATIENCE).build().into();
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        Ok(Self { agent, endpoint, token })
    }

    /// A short answer, whole.
    pub(super) fn read(&self, address: &str, bytes_max: u64) -> Result<Vec<u8>, String> {
        let mut bytes = Vec::new();
        let body = self.get(address, 0)?.into_body().into_reader();
        body.take(bytes_max + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
        if bytes.len() as u64 > bytes_max {
            return Err(format!("{}/{address} is longer than {bytes_max} bytes", self.endpoint));
        }
        Ok(bytes)
    }

    /// Puts a file at `target`, unless it is there. If a connection breaks, what arrived is kept, and
    /// another one continues from there: a few times here, then in the next call.
    pub(super) fn download(
        &self,
        address: &str,
        target: &Path,
        expected: &Expected,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), String> {
        if fs::symlink_metadata(target).is_ok() {
            return Ok(());
        }
        if expected.bytes.is_some_and(|bytes| bytes > expected.bytes_max) {
            return Err(too_long(expected.bytes_max));
        }
        let part = target.with_added_extension("part");
        let mut fetched = self.fetch(address, &part, expected, progress);
        for _ in 1..TRIES_MAX {
            if !matches!(fetched, Err(Trouble::Broken(_))) {
                break;
            }
            thread::sleep(RETRY_PAUSE);
            fetched = self.fetch(address, &part, expected, progress);
        }
        let fetched = fetched.and_then(|()| verify(&part, expected.sha256.as_deref()));
        match fetched {
            Ok(()) => fs::rename(&part, target).map_err(|error| error.to_string()),
            Err(Trouble::Broken(reason) | Trouble::Refused(reason)) => {
                Err(format!("{reason}; run again to go on from there"))
            }
            Err(Trouble::Wrong(reason)) => {
                // If it cannot be removed, the next call finds the same and says so.
                fs::remove_file(&part).ok();
                Err(reason)
            }
        }
    }

    /// Fetches what `part` lacks of a file.
    fn fetch(
        &self,
        address: &str,
        part: &Path,
        expected: &Expected,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Trouble> {
        let mut done = kept_bytes(part, expected.bytes)?;
        if expected.bytes.is_some() && expected.bytes == Some(done) {
            return Ok(());
        }
        let response = self.get(address, done).map_err(Trouble::Refused)?;
        if done > 0 && !continues(&response, done) {
            // The server starts from the beginning, so start over.
            fs::remove_file(part)?;
            done = 0;
        }
        let total = expected.bytes.or(response.body().content_length().map(|rest| done + rest));
        let unknown = expected.bytes_max == u64::MAX && total.is_none();
        if unknown {
            return Err(Trouble::Wrong("the server does not say how long it is".to_owned()));
        }
        let bytes_max = total.unwrap_or(expected.bytes_max);
        if bytes_max > expected.bytes_max {
            return Err(Trouble::Wrong(too_long(expected.bytes_max)));
        }
        let mut file = OpenOptions::new().append(true).create(true).open(part)?;
        let mut body = response.into_body().into_reader();
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            let broken = |error| format!("{} after {done} bytes", reading_trouble(&error));
            let count = body.read(&mut buffer).map_err(|error| Trouble::Broken(broken(error)))?;
            if count == 0 {
                break;
            }
            done += count as u64;
            if done > bytes_max {
                return Err(Trouble::Wrong(too_long(bytes_max)));
            }
            file.write_all(&buffer[..count])?;
            progress(done, total.unwrap_or(done));
        }
        file.sync_all()?;
        match total {
            Some(total) if done < total => {
                Err(Trouble::Broken(format!("it ended after {done} of {total} bytes")))
            }
            _ => Ok(()),
        }
    }

    /// Follows redirects to an answer that holds the file, from this byte on if the server can.
    fn get(&self, address: &str, from: u64) -> Result<Response<Body>, String> {
        let mut url = format!("{}/{address}", self.endpoint);
        for _ in 0..REDIRECTS_MAX {
            let mut request = self.agent.get(&url);
            if let Some(token) = &self.token
                && origin(&url) == origin(&self.endpoint)
            {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            if from > 0 {
                request = request.header("Range", format!("bytes={from}-"));
            }
            let response = request.call().map_err(|error| format!("{}: {error}", origin(&url)))?;
            match response.status().as_u16() {
                200 | 206 => return Ok(response),
                301 | 302 | 303 | 307 | 308 => {
                    let location = response.headers().get("Location");
                    let location = location.and_then(|location| location.to_str().ok());
                    url = redirected(&url, location.unwrap_or_default())?;
                }
                status => {
                    return Err(format!("{} answers {}", origin(&url), response_name(status)));
                }
            }
        }
        Err(format!("{} redirects without end", self.endpoint))
    }
}

/// How servers are talked to; `idle` is how long one may send nothing.
fn agent_settings(idle: Duration) -> ConfigBuilder<AgentScope> {
    // Redirects are followed in `get`, which makes sure that only this server sees the token.
    ureq::Agent::config_builder()
        .max_redirects(0)
        .max_redirects_will_error(false)
        .http_status_as_error(false)
        .timeout_connect(Some(CONNECT_PATIENCE))
        .timeout_recv_response(Some(ANSWER_PATIENCE))
        .timeout_per_read(Some(idle))
        .user_agent(concat!("glinthawk/", env!("CARGO_PKG_VERSION")))
}

/// Why a body could not be read on.
fn reading_trouble(error: &io::Error) -> String {
    match error.get_ref().and_then(|inner| inner.downcast_ref()) {
        Some(ureq::Error::Timeout(_)) => "the server sent nothing more".to_owned(),
        _ => error.to_string(),
    }
}

/// Why a file did not come.
enum Trouble {
    /// The connection broke. What came is good as far as it goes.
    Broken(String),
    /// The server does not give it, or it cannot be written. What came is good as far as it goes.
    Refused(String),
    /// What came is of no use.
    Wrong(String),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Trouble::Refused(error.to_string())
    }
}

fn too_long(bytes_max: u64) -> String {
    format!("is longer than {bytes_max} bytes")
}

fn response_name(status: u16) -> String {
    let meaning = match status {
        401 | 403 => ": this model needs a token that may read it",
        404 => ": there is no such model or file",
        429 => ": too many requests, try again later",
        _ => "",
    };
    format!("{status}{meaning}")
}

/// Bytes of a file that an earlier call began; begins anew where they cannot be its beginning.
fn kept_bytes(part: &Path, bytes: Option<u64>) -> io::Result<u64> {
    let Ok(found) = fs::symlink_metadata(part) else { return Ok(0) };
    if found.is_file() && bytes.is_some_and(|bytes| found.len() <= bytes) {
        return Ok(found.len());
    }
    fs::remove_file(part)?;
    Ok(0)
}

/// Whether an answer goes on from this byte.
fn continues(response: &Response<Body>, from: u64) -> bool {
    let range = response.headers().get("Content-Range").and_then(|range| range.to_str().ok());
    response.status().as_u16() == 206
        && range.is_some_and(|range| range.starts_with(&format!("bytes {from}-")))
}

/// Compares a file with its checksum, where it has one.
fn verify(path: &Path, sha256: Option<&str>) -> Result<(), Trouble> {
    let Some(expected) = sha256 else { return Ok(()) };
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            count => hash.update(&buffer[..count]),
        }
    }
    let digest = hexadecimal(&hash.finalize());
    match digest.eq_ignore_ascii_case(expected) {
        true => Ok(()),
        false => Err(Trouble::Wrong(format!("has sha256 {digest}, not what the hub lists"))),
    }
}

/// Scheme, host and port as they are written. Two that are spelt differently count as different,
/// which costs a token that could have been sent.
fn origin(url: &str) -> &str {
    let host = url.find("://").map_or(0, |at| at + 3);
    let end = url[host..].find(['/', '?', '#']).map_or(url.len(), |at| host + at);
    &url[..end]
}

/// Where a redirect leads. One that gives up encryption is refused.
fn redirected(url: &str, location: &str) -> Result<String, String> {
    let scheme = url.split("://").next().unwrap_or_default();
    let target = if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{}{location}", origin(url))
    } else {
        location.to_owned()
    };
    let as_open_as_before = scheme == "http" && target.starts_with("http://");
    match target.starts_with("https://") || as_open_as_before {
        true => Ok(target),
        false => Err(format!("{} redirects to an address that is not https", origin(url))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::net::TcpListener;

    const FILE: &[u8] = b"0123456789";

    /// A server that sends up to 4 bytes of `FILE` to each of so many connections, and then nothing, with the
    /// connection open. Returns its address, and the ranges that it was asked for once it is done.
    fn stalling_server(connections: usize) -> (String, thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let serve = move || {
            let (mut asked, mut open) = (Vec::new(), Vec::new());
            for _ in 0..connections {
                let (mut stream, _) = listener.accept().expect("a connection");
                let lines = BufReader::new(&stream).lines().map_while(Result::ok);
                let lines = lines.take_while(|line| !line.is_empty());
                let range = lines.filter_map(|line| {
                    let line = line.to_ascii_lowercase();
                    Some(line.strip_prefix("range: bytes=")?.trim_end_matches('-').to_owned())
                });
                let range = range.last().unwrap_or_default();
                let from: usize = range.parse().unwrap_or(0);
                asked.push(range);
                let (total, left) = (FILE.len(), FILE.len() - from);
                let head = format!(
                    "HTTP/1.1 {}\r\nContent-Range: bytes {from}-{}/{total}\r\nContent-Length: {left}\r\n\r\n",
                    if from > 0 { "206 Partial Content" } else { "200 OK" },
                    total - 1,
                );
                stream.write_all(head.as_bytes()).expect("it listens");
                stream.write_all(&FILE[from..total.min(from + 4)]).expect("it listens");
                open.push(stream);
            }
            asked
        };
        (address, thread::spawn(serve))
    }

    #[test]
    fn a_body_that_stalls_is_continued_over_another_connection() {
        let (endpoint, server) = stalling_server(3);
        // The test machine may have a proxy, which has no business here.
        let agent = agent_settings(Duration::from_millis(100)).proxy(None).build().into();
        let site = Site { agent, endpoint, token: None };
        let folder = tempfile::tempdir().expect("a folder");
        let target = folder.path().join("file");
        let bytes = Some(FILE.len() as u64);
        let expected = Expected { bytes, sha256: None, bytes_max: u64::MAX };
        site.download("file", &target, &expected, &mut |_, _| {}).expect("three pieces");
        assert_eq!(fs::read(&target).expect("it is there"), FILE);
        assert_eq!(server.join().expect("no panic there"), ["", "4", "8"]);
    }

    #[test]
    fn a_server_that_only_stalls_is_given_up() {
        let (endpoint, server) = stalling_server(TRIES_MAX as usize);
        let agent = agent_settings(Duration::from_millis(100)).proxy(None).build().into();
        let site = Site { agent, endpoint, token: None };
        let folder = tempfile::tempdir().expect("a folder");
        let target = folder.path().join("file");
        // Longer than what the server has.
        let expected = Expected { bytes: Some(1000), sha256: None, bytes_max: u64::MAX };
        let error = site.download("file", &target, &expected, &mut |_, _| {}).unwrap_err();
        assert!(error.contains("10 of 1000 bytes") && error.contains("run again"), "{error}");
        server.join().expect("no panic there");
    }

    #[test]
    fn an_origin_is_all_in_front_of_the_path() {
        for (url, expected) in [
            ("https://a.b/c", "https://a.b"),
            ("https://a.b:1/c?d#e", "https://a.b:1"),
            ("https://a.b?c", "https://a.b"),
            ("https://a.b", "https://a.b"),
            ("https://a.b@evil/c", "https://a.b@evil"),
            ("https://a.b\\@evil/c", "https://a.b\\@evil"),
        ] {
            assert_eq!(origin(url), expected);
        }
    }

    #[test]
    fn redirects_lead_to_whole_addresses() {
        let check = |url: &str, location: &str, expected: Option<&str>| {
            let target = redirected(url, location).ok();
            assert_eq!(target.as_deref(), expected, "{url} to {location}");
        };
        check("https://a/b/c", "/d?e", Some("https://a/d?e"));
        check("https://a/b/c", "//d/e", Some("https://d/e"));
        check("https://a/b/c", "https://d/e", Some("https://d/e"));
        check("http://a/b/c", "http://d/e", Some("http://d/e"));
        check("http://a/b/c", "https://d/e", Some("https://d/e"));
        check("https://a/b/c", "http://d/e", None);
        check("https://a/b/c", "file:///d", None);
        check("https://a/b/c", "d", None);
        check("https://a/b/c", "", None);
    }
}
