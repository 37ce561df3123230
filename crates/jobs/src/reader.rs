//! The reader thread: reads, checks and tokenizes lines ahead of the engine, and skips those that
//! have a result already. A bounded channel limits how far ahead it is.

use crate::error::JobError;
use crate::input::OpenInput;
use crate::journal::Results;
use crate::key::Key;
use crate::named::Namer;
use crate::refusal::Refusal;
use crate::request::Request;
use crate::served::ServedModel;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

/// Lines that are checked and tokenized before the engine asks for them.
const LINES_AHEAD: usize = 64;

/// What the reader makes of the input.
pub(crate) enum Item {
    /// A line to be run.
    Request { number: u64, key: Key, custom_id: String, request: Box<Request> },
    /// A line that cannot be run; `key` is `None` if an earlier run has already written so.
    Refused { number: u64, key: Option<Key>, custom_id: String, refusal: Refusal },
    /// No more lines.
    End(Box<Ended>),
    /// The input cannot be read on.
    Failed(JobError),
}

/// What is known once an input has been read to its end.
pub(crate) struct Ended {
    /// Earlier results that no line asked for.
    pub(crate) unmatched: Results,
    /// Knows the custom ids of all lines.
    pub(crate) namer: Namer,
}

/// How far the reader is; written by the reader, read for progress.
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
    input: OpenInput,
    namer: Namer,
    model: Arc<ServedModel>,
    /// Results of earlier runs, without those whose line has been seen.
    results: Results,
    counters: Arc<Counters>,
}

/// Starts reading; the thread ends with the input, or when the receiver is dropped.
pub(crate) fn start(
    input: OpenInput,
    model: Arc<ServedModel>,
    results: Results,
    counters: Arc<Counters>,
) -> Result<Receiver<Item>, JobError> {
    let (sender, receiver) = sync_channel(LINES_AHEAD);
    let reader = Reader { input, namer: Namer::new(&model), model, results, counters };
    thread::Builder::new()
        .name("input-reader".to_owned())
        .spawn(move || reader.run(&sender))
        .map_err(|source| JobError::Thread { name: "input-reader", source })?;
    Ok(receiver)
}

impl Reader {
    fn run(mut self, sender: &SyncSender<Item>) {
        let mut looked_at = self.input.sniff();
        loop {
            let item = match looked_at.and_then(|()| self.advance()) {
                Ok(Some(item)) => item,
                Ok(None) => break,
                Err(error) => {
                    // If the receiver is gone, nobody needs the error.
                    _ = sender.send(Item::Failed(error));
                    return;
                }
            };
            if sender.send(item).is_err() {
                return;
            }
            looked_at = Ok(());
        }
        let ended = Ended { unmatched: self.results, namer: self.namer };
        _ = sender.send(Item::End(Box::new(ended)));
    }

    /// The next line that has no result yet.
    fn advance(&mut self) -> Result<Option<Item>, JobError> {
        loop {
            let Some(line) = self.namer.next(&mut self.input)? else { return Ok(None) };
            self.counters.lines.fetch_add(1, Ordering::Relaxed);
            let (number, key) = (line.number, line.key);
            let item = if self.results.succeeded.remove(&key) {
                self.counters.resumed_succeeded.fetch_add(1, Ordering::Relaxed);
                None
            } else {
                // A line that failed before fails again in the same way; report the reason.
                let before = self.results.failed.remove(&key);
                self.counters.resumed_failed.fetch_add(u64::from(before), Ordering::Relaxed);
                match line.request(&self.model) {
                    (custom_id, Err(refusal)) => {
                        let key = (!before).then_some(key);
                        Some(Item::Refused { number, key, custom_id, refusal })
                    }
                    (_, Ok(_)) if before => None,
                    (custom_id, Ok(request)) => {
                        Some(Item::Request { number, key, custom_id, request: Box::new(request) })
                    }
                }
            };
            self.counters.bytes.store(self.input.lines.position_bytes, Ordering::Relaxed);
            if item.is_some() {
                return Ok(item);
            }
        }
    }
}
