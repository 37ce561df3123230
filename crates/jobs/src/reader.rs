//! The reader thread: reads, checks and tokenizes lines ahead of the engine, and passes over those
//! that have their result already. Never further ahead than a bounded channel.

use std::collections::HashSet;
use std::io::BufRead;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use crate::error::JobError;
use crate::input::{LineReader, NextLine};
use crate::journal::Results;
use crate::key::{Key, RunDigest, seed_of_request};
use crate::line::Line;
use crate::refusal::Refusal;
use crate::request::Request;
use crate::served::ServedModel;

/// Longer input lines get an error line; no more than one such line is ever held.
pub const LINE_BYTES_MAX: usize = 16 << 20;
/// Lines that are checked and tokenized before the engine asks for them.
const LINES_AHEAD: usize = 64;

/// What the reader makes of the input.
pub(crate) enum Item {
    /// A line to be run.
    Request { key: Key, custom_id: String, request: Box<Request> },
    /// A line that cannot be.
    Refused { key: Key, custom_id: String, refusal: Refusal },
    /// No more lines; the results that no line of the input asked for.
    End { stale: HashSet<Key> },
    /// The input cannot be read on.
    Failed(JobError),
}

/// How far the reader is; written by it, read by whoever shows progress.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Lines that are not blank.
    pub(crate) lines: AtomicU64,
    pub(crate) bytes: AtomicU64,
    /// Lines passed over because an earlier run had answered them.
    pub(crate) resumed_succeeded: AtomicU64,
    /// Lines passed over because an earlier run had refused them.
    pub(crate) resumed_failed: AtomicU64,
}

struct Reader {
    input_name: String,
    lines: LineReader<Box<dyn BufRead + Send>>,
    model: Arc<ServedModel>,
    run: RunDigest,
    /// Of the custom ids so far: 16 bytes each, whatever their length.
    claimed: HashSet<Key>,
    /// Of earlier runs, less those whose line has been seen.
    results: Results,
    counters: Arc<Counters>,
}

/// Starts reading; the thread ends with the input, or when the receiver is dropped.
pub(crate) fn start(
    input_name: String,
    source: Box<dyn BufRead + Send>,
    model: Arc<ServedModel>,
    results: Results,
    counters: Arc<Counters>,
) -> Result<Receiver<Item>, JobError> {
    let (sender, receiver) = sync_channel(LINES_AHEAD);
    let reader = Reader {
        input_name,
        lines: LineReader::new(source, LINE_BYTES_MAX),
        run: model.run_digest(),
        model,
        claimed: HashSet::new(),
        results,
        counters,
    };
    thread::Builder::new()
        .name("input-reader".to_owned())
        .spawn(move || reader.run(&sender))
        .map_err(|source| JobError::Thread { name: "input-reader", source })?;
    Ok(receiver)
}

impl Reader {
    fn run(mut self, sender: &SyncSender<Item>) {
        loop {
            let item = match self.lines.advance() {
                Ok(NextLine::End) => break,
                Ok(next) => self.examine(&next),
                Err(source) => {
                    let (input, line) = (self.input_name, self.lines.number);
                    // Whoever dropped the receiver does not want to know.
                    _ = sender.send(Item::Failed(JobError::ReadInput { input, line, source }));
                    return;
                }
            };
            self.counters.bytes.store(self.lines.position_bytes, Ordering::Relaxed);
            if let Some(item) = item
                && sender.send(item).is_err()
            {
                return;
            }
        }
        let mut stale = self.results.succeeded;
        stale.extend(self.results.failed);
        _ = sender.send(Item::End { stale });
    }

    /// What is to be done about the line just read; nothing where it is blank or done.
    fn examine(&mut self, next: &NextLine) -> Option<Item> {
        let number = self.lines.number;
        let line = match next {
            NextLine::TooLong => Line::too_long(number, LINE_BYTES_MAX),
            _ if self.lines.line().trim_ascii().is_empty() => return None,
            _ => Line::read(number, self.lines.line()),
        };
        self.counters.lines.fetch_add(1, Ordering::Relaxed);
        let Line { custom_id, digest, body } = line;
        let first = self.claimed.insert(Key::of_custom_id(&custom_id));
        let key = match first {
            true => Key::of_request(self.run, &custom_id, &digest),
            false => Key::of_duplicate(&custom_id, number),
        };
        if self.results.succeeded.remove(&key) {
            self.counters.resumed_succeeded.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        if self.results.failed.remove(&key) {
            self.counters.resumed_failed.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let request = body.and_then(|(endpoint, fields)| {
            if !first {
                return Err(duplicate(&custom_id));
            }
            Request::read(&self.model, endpoint, fields, seed_of_request(&custom_id, &digest))
        });
        Some(match request {
            Ok(request) => Item::Request { key, custom_id, request: Box::new(request) },
            Err(refusal) => Item::Refused { key, custom_id, refusal },
        })
    }
}

fn duplicate(custom_id: &str) -> Refusal {
    Refusal {
        message: format!("an earlier line has the same custom_id `{custom_id}`"),
        param: Some("custom_id".to_owned()),
        code: Some("duplicate_custom_id"),
    }
}
