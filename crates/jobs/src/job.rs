//! A job: prompts out of an input's lines, result lines out of completions. Knows no engine: the
//! caller takes prompts from here, runs them, and brings back their completions.

use crate::choice::Choice;
use crate::earlier::Earlier;
use crate::error::JobError;
use crate::failures::{FailureKind, Failures};
use crate::input::OpenInput;
use crate::journal::{Results, WrittenLine};
use crate::key::Key;
use crate::output::{Output, Writer};
use crate::reader::{self, Counters, Ended, Item};
use crate::request::Request;
use crate::response::{Answer, answered_line, refused_line, rejected_line};
use crate::served::ServedModel;
use crate::stop::StopWatch;
use crate::survey::scaled;
use glinthawk_protocol::{Completion, Generated, Prompt, PromptId};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The most bad lines that one call for a prompt handles, so that the engine does not wait for
/// many.
const REFUSALS_PER_CALL: usize = 64;

/// Where the results go.
#[derive(Clone, Debug)]
pub struct JobOptions {
    /// The output.
    pub output: Output,
    /// What happens to results that it holds from before.
    pub earlier: Earlier,
}

/// An answer to "what is to be run next?".
#[derive(Debug)]
pub enum Next {
    /// This prompt. Say its name with [`Job::submitted`], or turn it away with [`Job::reject`].
    Prompt(Prompt),
    /// Nothing yet; ask again.
    Later,
    /// Nothing more.
    Exhausted,
}

/// How far a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Lines that have their result, from this run or an earlier one.
    pub lines_done: u64,
    /// Lines that were read and have no result yet.
    pub lines_open: u64,
    /// Lines in the input: exact once it has been read to its end, an estimate from the bytes read
    /// before that, unknown for a stream.
    pub lines_total: Option<u64>,
}

/// What came of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobSummary {
    /// Whether every line of the input has its result; if not, the same command continues.
    pub complete: bool,
    /// Lines with an answer, those of earlier runs included.
    pub succeeded: u64,
    /// Lines with an error, those of earlier runs included.
    pub failed: u64,
    /// Lines whose result an earlier run had written.
    pub resumed: u64,
    /// Earlier results that match no line of the input and stay in the output.
    pub unmatched: u64,
    /// Earlier error lines that were removed because their lines have other results now.
    pub superseded: u64,
    /// Bytes that another program added to the output while the job ran; they are left in place.
    pub foreign_bytes: u64,
    /// Why lines failed, in this run or an earlier one: up to 256 kinds, commonest first.
    pub failures: Vec<FailureKind>,
    /// Prompt tokens of this run's answers.
    pub prompt_tokens: u64,
    /// Generated tokens of this run's answers.
    pub completion_tokens: u64,
}

/// A job under way.
pub struct Job {
    model: Arc<ServedModel>,
    input_name: String,
    input_bytes: Option<u64>,
    items: Receiver<Item>,
    counters: Arc<Counters>,
    writer: Writer,
    /// Lines in the engine, by their sequence number.
    lines: HashMap<u64, OpenLine>,
    lines_opened: u64,
    /// The line whose choices are being handed out.
    submitting: Option<u64>,
    /// The choice that was handed out last, until its name is known.
    handed_out: Option<ChoiceOf>,
    /// The choices that prompts in the engine are for.
    prompts: HashMap<PromptId, ChoiceOf>,
    /// Set once the input has been read to its end.
    ended: Option<Box<Ended>>,
    earlier: Earlier,
    failures: Failures,
    summary: JobSummary,
}

/// A line's sequence number and one of its choices.
type ChoiceOf = (u64, usize);

/// A line some of whose choices are still to come.
struct OpenLine {
    number: u64,
    key: Key,
    custom_id: String,
    request: Request,
    prompt_tokens: u64,
    submitted: u32,
    outstanding: u32,
    watches: Vec<StopWatch>,
    choices: Vec<Option<Choice>>,
    /// Why it cannot be answered: the reason of the first of its choices that cannot, however they came back.
    rejection: Option<(usize, String)>,
}

impl Job {
    /// Starts to read. [`PreparedJob`](crate::PreparedJob) comes before it.
    pub(crate) fn start(
        input: OpenInput,
        model: Arc<ServedModel>,
        writer: Writer,
        results: Results,
        earlier: Earlier,
    ) -> Result<Self, JobError> {
        let counters = Arc::new(Counters::default());
        let (input_name, input_bytes) = (input.name.clone(), input.bytes());
        let items = reader::start(input, Arc::clone(&model), results, Arc::clone(&counters))?;
        Ok(Self {
            model,
            input_name,
            input_bytes,
            items,
            counters,
            writer,
            lines: HashMap::new(),
            lines_opened: 0,
            submitting: None,
            handed_out: None,
            prompts: HashMap::new(),
            ended: None,
            earlier,
            failures: Failures::default(),
            summary: JobSummary::default(),
        })
    }

    /// The next prompt, waiting at most `wait` for one. Error lines of bad requests are written
    /// on the way.
    pub fn next(&mut self, wait: Duration) -> Result<Next, JobError> {
        self.writer.check()?;
        let mut wait = wait;
        for _ in 0..REFUSALS_PER_CALL {
            if let Some(prompt) = self.next_choice() {
                return Ok(Next::Prompt(prompt));
            }
            if self.ended.is_some() {
                return Ok(Next::Exhausted);
            }
            match self.items.recv_timeout(wait) {
                Ok(item) => self.take(item)?,
                Err(RecvTimeoutError::Timeout) => return Ok(Next::Later),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(JobError::ReaderLost { input: self.input_name.clone() });
                }
            }
            wait = Duration::ZERO;
        }
        Ok(Next::Later)
    }

    /// The name of the prompt that was handed out last.
    pub fn submitted(&mut self, id: PromptId) {
        let choice = self.handed_out.take().expect("a prompt was handed out");
        self.prompts.insert(id, choice);
    }

    /// A watched prompt's next token; tells how many tokens to keep once it should stop.
    pub fn token(&mut self, id: PromptId, generated: &Generated) -> Option<u32> {
        let (sequence, choice) = self.prompts[&id];
        let line = open_line(&mut self.lines, sequence);
        if line.request.stop_strings.is_empty() || line.request.ends_at(generated.token) {
            return None;
        }
        let watch = &mut line.watches[choice];
        if watch.is_cut() {
            return None;
        }
        let bytes = self.model.text_bytes(generated.token);
        watch.push(&line.request.stop_strings, &bytes).map(|cut| cut.tokens)
    }

    /// A prompt's end; writes the line's result if it was the last of its prompts.
    pub fn finish(&mut self, completion: &Completion) -> Result<(), JobError> {
        let (sequence, choice) =
            self.prompts.remove(&completion.id).expect("a prompt finishes once");
        let line = open_line(&mut self.lines, sequence);
        line.outstanding -= 1;
        match Choice::new(&self.model, &line.request, completion) {
            Ok(made) => line.choices[choice] = Some(made),
            Err(reason) => self.lose(sequence, choice, reason),
        }
        self.settle(sequence)
    }

    /// The prompt that was handed out last cannot be run. Its line becomes an error, and a later run
    /// tries again.
    pub fn reject(&mut self, reason: &str) -> Result<(), JobError> {
        let (sequence, choice) = self.handed_out.take().expect("a prompt was handed out");
        open_line(&mut self.lines, sequence).outstanding -= 1;
        self.lose(sequence, choice, reason.to_owned());
        self.settle(sequence)
    }

    /// A line cannot be answered, because one of its choices cannot. No other choice of it is handed out. They are handed
    /// out in order, so all before this one have been.
    fn lose(&mut self, sequence: u64, choice: usize, reason: String) {
        let line = open_line(&mut self.lines, sequence);
        if line.rejection.as_ref().is_none_or(|(first, _)| choice < *first) {
            line.rejection = Some((choice, reason));
        }
        self.submitting = self.submitting.filter(|submitting| *submitting != sequence);
    }

    /// Whether every prompt handed out has come back.
    pub fn is_idle(&self) -> bool {
        self.lines.is_empty()
    }

    /// How far the job is.
    pub fn progress(&self) -> Progress {
        let lines = self.counters.lines.load(Ordering::Relaxed);
        let bytes = self.counters.bytes.load(Ordering::Relaxed);
        let (succeeded, failed) = self.resumed();
        Progress {
            lines_done: self.summary.succeeded + self.summary.failed + succeeded + failed,
            lines_open: self.lines.len() as u64,
            lines_total: match self.input_bytes {
                _ if self.ended.is_some() => Some(lines),
                Some(total) if lines > 0 => Some(scaled(lines, total, bytes)),
                _ => None,
            },
        }
    }

    /// Makes the results durable. If the whole input was processed, removes earlier error lines
    /// whose lines have other results now. Answers always stay.
    pub fn close(self) -> Result<JobSummary, JobError> {
        let (succeeded, failed) = self.resumed();
        let mut summary = JobSummary {
            complete: self.ended.is_some() && self.lines.is_empty(),
            succeeded: self.summary.succeeded + succeeded,
            failed: self.summary.failed + failed,
            resumed: succeeded + failed,
            failures: self.failures.by_count(),
            ..self.summary
        };
        let Some(ended) = self.ended.filter(|_| summary.complete) else {
            summary.foreign_bytes = self.writer.close(None)?.foreign_bytes;
            return Ok(summary);
        };
        let Ended { unmatched, namer } = &*ended;
        let superseded =
            |line: &WrittenLine| unmatched.failed.contains(&line.key) && namer.supersedes(line);
        let replace = self.earlier != Earlier::Keep && !unmatched.failed.is_empty();
        let closed =
            self.writer.close(replace.then_some(&superseded as &dyn Fn(&WrittenLine) -> bool))?;
        (summary.superseded, summary.foreign_bytes) = (closed.superseded, closed.foreign_bytes);
        summary.unmatched = unmatched.len() as u64 - summary.superseded;
        Ok(summary)
    }

    fn resumed(&self) -> (u64, u64) {
        let succeeded = self.counters.resumed_succeeded.load(Ordering::Relaxed);
        (succeeded, self.counters.resumed_failed.load(Ordering::Relaxed))
    }

    fn take(&mut self, item: Item) -> Result<(), JobError> {
        match item {
            Item::Request { number, key, custom_id, request } => {
                self.submitting = Some(self.lines_opened);
                let line = OpenLine::new(number, key, custom_id, *request);
                self.lines.insert(self.lines_opened, line);
                self.lines_opened += 1;
            }
            Item::Refused { number, key, custom_id, refusal } => {
                self.failures.refused(number, &refusal);
                if let Some(key) = key {
                    self.writer.write(&refused_line(key, &custom_id, &refusal))?;
                    self.summary.failed += 1;
                }
            }
            Item::End(ended) => self.ended = Some(ended),
            Item::Failed(error) => return Err(error),
        }
        Ok(())
    }

    fn next_choice(&mut self) -> Option<Prompt> {
        let sequence = self.submitting?;
        let line = self.lines.get_mut(&sequence).expect("the line being submitted is open");
        let choice = line.submitted;
        let prompt = line.request.prompt(choice);
        self.handed_out = Some((sequence, choice as usize));
        line.submitted += 1;
        line.outstanding += 1;
        if line.submitted == line.request.choices {
            line.request.tokens = Vec::new();
            self.submitting = None;
        }
        Some(prompt)
    }

    /// Writes a line's result once all of its choices have come back.
    fn settle(&mut self, sequence: u64) -> Result<(), JobError> {
        let line = open_line(&mut self.lines, sequence);
        let submitted = line.submitted == line.request.choices || line.rejection.is_some();
        if !submitted || line.outstanding > 0 {
            return Ok(());
        }
        let line = self.lines.remove(&sequence).expect("just looked at");
        if let Some((_, reason)) = &line.rejection {
            self.summary.failed += 1;
            self.failures.rejected(line.number, reason);
            return self.writer.write(&rejected_line(line.key, &line.custom_id, reason));
        }
        let choices: Vec<Choice> = line.choices.into_iter().flatten().collect();
        let answer = Answer {
            endpoint: line.request.endpoint,
            model: &self.model.name,
            created: unix_seconds(),
            prompt_tokens: line.prompt_tokens,
            echo: line.request.echo.as_deref().unwrap_or_default(),
            choices: &choices,
        };
        self.writer.write(&answered_line(line.key, &line.custom_id, &answer))?;
        self.summary.succeeded += 1;
        self.summary.prompt_tokens += line.prompt_tokens;
        self.summary.completion_tokens += choices.iter().map(|choice| choice.tokens).sum::<u64>();
        Ok(())
    }
}

impl OpenLine {
    fn new(number: u64, key: Key, custom_id: String, request: Request) -> Self {
        Self {
            number,
            key,
            custom_id,
            prompt_tokens: request.tokens.len() as u64,
            submitted: 0,
            outstanding: 0,
            watches: (0..request.choices).map(|_| StopWatch::new()).collect(),
            choices: (0..request.choices).map(|_| None).collect(),
            rejection: None,
            request,
        }
    }
}

fn open_line(lines: &mut HashMap<u64, OpenLine>, sequence: u64) -> &mut OpenLine {
    lines.get_mut(&sequence).expect("a line is open while a choice of it is in the engine")
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
