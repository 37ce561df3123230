//! Beyond the loopback a cluster is encrypted and open to those that have its secret: on this machine's own address, as
//! other machines would see it.

use crate::cluster_support::{Dispatcher, Running, TOKEN, TOKEN_VARIABLE, worker};
use crate::common::{Case, lines_in, mixed_requests};
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::{Arc, Mutex};
use std::thread::spawn;

const ONE_BY_ONE: [&str; 4] = ["--tier1", "1", "--workers", "2"];

/// Slow enough, without using a core, to be met half-way.
const UNHURRIED: [&str; 6] = ["--batch", "8", "--flights", "2", "--delay", "1ms"];

/// This machine's address on its network, if it has one. Nothing is sent to find it.
fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("10.255.255.255:9").ok()?;
    let address = socket.local_addr().ok()?.ip();
    if address.is_loopback() || address.is_unspecified() {
        return None;
    }
    Some(address)
}

/// A dispatcher at all addresses, and where it is on the network; `None`, and a line, without a network.
fn listening(case: &Case, options: &[&str]) -> Option<(Dispatcher, SocketAddr)> {
    let Some(own) = own_address() else {
        eprintln!("skipped: this machine has no network");
        return None;
    };
    let dispatcher = Dispatcher::listen(case, "0.0.0.0:0", options);
    let port = dispatcher.address.parse::<SocketAddr>().expect("an address").port();
    Some((dispatcher, SocketAddr::new(own, port)))
}

fn expected(case: &Case) -> Vec<String> {
    case.run(&[]).expect(0);
    let results = case.results();
    fs::remove_file(case.output()).expect("the output of one process");
    results
}

/// Forwards the connections of one address to another, and keeps what the diallers say.
fn record(from: IpAddr, to: SocketAddr) -> (SocketAddr, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind((from, 0)).expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    let said = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&said);
    spawn(move || {
        let (mut near, _) = listener.accept().expect("a worker dials");
        let mut far = TcpStream::connect(to).expect("the dispatcher listens");
        let mut back = (far.try_clone().expect("a socket"), near.try_clone().expect("a socket"));
        spawn(move || std::io::copy(&mut back.0, &mut back.1));
        let mut buffer = [0; 4096];
        while let Ok(read @ 1..) = near.read(&mut buffer) {
            heard.lock().expect("no panic").extend_from_slice(&buffer[..read]);
            if far.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        _ = far.shutdown(Shutdown::Write);
    });
    (address, said)
}

#[test]
fn strangers_stay_out_of_an_encrypted_cluster() {
    let case = Case::new(mixed_requests(120, 4, 16));
    let expected = expected(&case);
    let options = [&ONE_BY_ONE[..], &UNHURRIED].concat();
    let Some((mut dispatcher, address)) = listening(&case, &options) else { return };
    let join = address.to_string();

    // The secret may be in a file, and the connection may be watched.
    let secret = case.path("secret");
    fs::write(&secret, format!("{TOKEN}\n")).expect("written");
    let (relay, said) = record(address.ip(), address);
    let mut watched = worker(&relay.to_string(), &["--tier", "2", "--secret-file"]);
    let watched = Running::start(watched.arg(&secret).env_remove(TOKEN_VARIABLE));

    let refused = |options: &[&str], secret: &str, part: &str| {
        let mut command = worker(&join, options);
        let refused = Running::start(command.env(TOKEN_VARIABLE, secret)).finish().expect(1);
        assert!(refused.stderr.contains(part), "{}", refused.stderr);
    };
    let other_secret = "another secret of the tests";
    refused(&[], other_secret, "failed: wrong cluster secret");
    refused(&["--insecure"], TOKEN, "give --insecure on both or on neither");
    let tier1 = Running::start(&mut worker(&join, &["--tier", "1"]));
    dispatcher.running.wait_for_lines(&case.output(), 1);
    refused(&[], other_secret, "failed: wrong cluster secret");
    refused(&["--insecure"], TOKEN, "give --insecure on both or on neither");
    let said = said.lock().expect("no panic").clone();
    assert!(said.len() > 500, "only {} bytes were said", said.len());
    assert!(!said.windows(4).any(|bytes| bytes == b"GLHI"), "its hello can be read");
    for end in [said.len(), said.len() / 2, 100] {
        let mut thief = TcpStream::connect(address).expect("the dispatcher listens");
        // It may be sent away before it has said all.
        _ = thief.write_all(&said[..end]);
        _ = thief.shutdown(Shutdown::Write);
        _ = thief.read_to_end(&mut Vec::new());
    }
    assert!(lines_in(&case.output()) < 120, "all was over before it was disturbed");

    let finished = dispatcher.running.finish().expect(0);
    for reason in ["wrong cluster secret", "does not speak TLS"] {
        assert!(finished.stderr.contains(reason), "\"{reason}\" is missing: {}", finished.stderr);
    }
    for worker in [tier1, watched] {
        worker.finish().expect(0);
    }
    assert!(case.results() == expected, "other results than one process");
}

#[test]
fn without_encryption_if_all_say_so() {
    let case = Case::new(mixed_requests(20, 4, 16));
    let expected = expected(&case);
    let options = [&ONE_BY_ONE[..], &["--insecure"]].concat();
    let Some((dispatcher, address)) = listening(&case, &options) else { return };
    let join = address.to_string();
    let encrypted = Running::start(&mut worker(&join, &[])).finish().expect(1);
    assert!(encrypted.stderr.contains("does not speak TLS"), "{}", encrypted.stderr);
    let start = |_| Running::start(&mut worker(&join, &["--insecure"]));
    let workers: Vec<Running> = (0..2).map(start).collect();
    let finished = dispatcher.running.finish().expect(0);
    for warning in ["connections to other machines are not encrypted", "speaks TLS"] {
        assert!(finished.stderr.contains(warning), "{}", finished.stderr);
    }
    for worker in workers {
        worker.finish().expect(0);
    }
    assert!(case.results() == expected, "other results than one process");
}
