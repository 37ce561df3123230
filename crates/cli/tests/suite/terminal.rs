//! What a person sees in a terminal, and what a log holds without one.

use crate::common::{Case, Finished};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

/// Runs a command with a terminal of 100 columns as its standard error; returns all that was ever drawn there.
fn in_terminal(command: &mut Command) -> String {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
    grantpt(&ours).and_then(|()| unlockpt(&ours)).expect("our own");
    let size = Winsize { ws_row: 24, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&ours, size).expect("a size");
    let name = ptsname(&ours, Vec::new()).expect("a name").into_string().expect("text");
    let theirs = File::options().read(true).write(true).open(name).expect("the other end");
    command.env("TERM", "xterm").stdout(Stdio::null()).stderr(OwnedFd::from(theirs));
    let mut child = command.spawn().expect("the binary starts");
    // The command holds the other end too, which must close for the reading to end.
    command.stderr(Stdio::null());
    let reader = std::thread::spawn(move || {
        let (mut drawn, mut part) = (Vec::new(), [0; 4096]);
        let mut ours = File::from(ours);
        // When the other end is closed, reading is an error.
        while let Ok(count @ 1..) = ours.read(&mut part) {
            drawn.extend_from_slice(&part[..count]);
        }
        String::from_utf8(drawn).expect("text")
    });
    assert!(child.wait().expect("it ends").success());
    reader.join().expect("no panic while reading")
}

/// The numbers that stand before `mark` wherever it is drawn.
fn numbers_before(drawn: &str, mark: &str) -> Vec<u64> {
    let number = |(at, _): (usize, &str)| {
        let digits = drawn[..at].rfind(|c: char| !c.is_ascii_digit()).map_or(0, |start| start + 1);
        drawn[digits..at].parse().ok()
    };
    drawn.match_indices(mark).filter_map(number).collect()
}

#[test]
fn progress_is_seen_before_the_first_line_is_done() {
    let line = r#"{"prompt":"hello","max_tokens":30,"ignore_eos":true}"#;
    let case = Case::new(format!("{line}\n").repeat(8));
    // Slow without using a core; all lines are alike and end together.
    let drawn = in_terminal(&mut case.command(&["--tier1", "1", "--tier2", "1", "--delay", "6ms"]));
    let shares = numbers_before(&drawn, "%, 0 of 8 lines, ");
    assert!(shares.is_sorted(), "{shares:?}");
    assert!(shares.iter().any(|share| (30..=100).contains(share)), "{shares:?} in {drawn}");
    let rates = numbers_before(&drawn, " out tokens/s");
    assert!(rates.iter().any(|rate| *rate > 0), "{rates:?} in {drawn}");
    assert!(!numbers_before(&drawn, " in + ").is_empty(), "{drawn}");
}

#[test]
fn one_line_is_one_line() {
    let case = Case::new(r#"{"prompt":"hello","max_tokens":20,"ignore_eos":true}"#);
    let drawn = in_terminal(&mut case.command(&["--tier1", "1", "--tier2", "1", "--delay", "6ms"]));
    assert!(drawn.contains("0 of 1 line, "), "{drawn}");
}

#[test]
fn a_log_that_is_not_a_terminal_has_no_colours() {
    let case = Case::new(r#"{"prompt":"hello","max_tokens":2}"#);
    let mut command = case.command(&["--tier1", "1", "--tier2", "1"]);
    let finished = Finished::of(command.env("GLINTHAWK_LOG", "trace").env_remove("NO_COLOR"));
    let log = finished.expect(0).stderr;
    assert!(log.lines().count() > 4, "nothing was logged: {log}");
    assert!(!log.contains('\u{1b}'), "{log}");
}
