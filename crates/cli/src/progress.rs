//! Progress on standard error: bars on a terminal, a plain line now and then elsewhere.

use crate::units;
use glinthawk_cluster::{Engine, Estimate, Lines, Pace};
use glinthawk_jobs::Job;
use glinthawk_model::catalogue::PullProgress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Between two plain lines.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

/// Between two updates of a bar.
const BAR_INTERVAL: Duration = Duration::from_millis(100);

/// Steps of a job's bar. It counts tokens, and not all of them are known.
const BAR_STEPS: u64 = 1000;

/// Prints a line on standard error. If that fails (a closed pipe, a full disk), it is no reason to
/// stop.
pub fn say(text: impl Display) {
    _ = writeln!(std::io::stderr(), "{text}");
}

fn bytes_bar() -> ProgressBar {
    let template = "{msg} {wide_bar} {binary_bytes} of {binary_total_bytes}, {eta} left";
    ProgressBar::new(0)
        .with_style(ProgressStyle::with_template(template).expect("a valid template"))
}

/// Progress of a pull.
pub struct PullBar(Option<ProgressBar>);

impl PullBar {
    /// Shows nothing until there is something to show.
    pub fn new() -> Self {
        Self(None)
    }

    /// Shows how far it is.
    pub fn show(&mut self, progress: PullProgress<'_>) {
        let bar = self.0.get_or_insert_with(|| {
            say(format_args!("fetching {}", progress.file));
            bytes_bar()
        });
        bar.set_message(progress.file.to_owned());
        bar.set_length(progress.bytes_total);
        bar.set_position(progress.bytes_done);
    }

    /// Takes the bar away.
    pub fn clear(&mut self) {
        if let Some(bar) = self.0.take() {
            bar.finish_and_clear();
        }
    }
}

/// Progress of loading weights.
pub struct LoadBar(ProgressBar);

impl LoadBar {
    /// An empty bar.
    pub fn new() -> Self {
        Self(bytes_bar().with_message("loading"))
    }

    /// An empty bar, for hashing the weights.
    pub fn checking() -> Self {
        Self(bytes_bar().with_message("checking the model"))
    }

    /// Shows how far it is.
    pub fn show(&mut self, bytes_done: u64, bytes_total: u64) {
        self.0.set_length(bytes_total);
        self.0.set_position(bytes_done);
    }

    /// Takes the bar away.
    pub fn clear(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Progress of something that is counted.
pub struct CountBar(ProgressBar);

impl CountBar {
    /// Begins to count to `total`, and shows it if asked to.
    pub fn new(what: &'static str, total: u64, shown: bool) -> Self {
        let style = ProgressStyle::with_template("{msg} {wide_bar} {pos} of {len}, {elapsed}")
            .expect("a valid template");
        let bar = ProgressBar::new(total).with_style(style).with_message(what);
        if !shown {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        Self(bar)
    }

    /// One more is done.
    pub fn advance(&self) {
        self.0.inc(1);
    }

    /// Takes the bar away.
    pub fn clear(&self) {
        self.0.finish_and_clear();
    }
}

/// Progress of a cluster's start.
pub struct MusterBar {
    bar: ProgressBar,
    loading: bool,
}

impl MusterBar {
    /// Begins to wait for `workers` workers; says where, if they come from elsewhere.
    pub fn new(workers: usize, address: SocketAddr, from_elsewhere: bool) -> Self {
        if from_elsewhere {
            say(format_args!(
                "waiting at {address} for {}: glinthawk worker --join {address}",
                units::counted(workers as u64, "worker"),
            ));
        }
        let style = ProgressStyle::with_template("{msg} {pos} of {len}").expect("a valid template");
        let bar =
            ProgressBar::new(workers as u64).with_style(style).with_message("workers joined:");
        Self { bar, loading: false }
    }

    /// Shows how many have joined, or (once they load) are ready.
    pub fn show(&mut self, count: usize, loading: bool) {
        if loading && !self.loading {
            self.loading = true;
            self.bar.set_message("workers ready:");
        }
        self.bar.set_position(count as u64);
    }

    /// Takes the bar away.
    pub fn clear(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Progress of a job.
pub struct JobProgress {
    place: Place,
    bar: ProgressBar,
    shown: Instant,
    pace: Pace,
    /// Lines that were done when this run began.
    resumed: Option<u64>,
}

/// Where a job's progress is shown.
#[derive(PartialEq)]
enum Place {
    Bar,
    PlainLines,
    /// The results scroll by on the same terminal.
    Nowhere,
}

impl JobProgress {
    /// Begins to show a job; `to_stdout` says that its results are printed.
    pub fn new(to_stdout: bool) -> Self {
        let place = match std::io::stderr().is_terminal() {
            true if to_stdout && std::io::stdout().is_terminal() => Place::Nowhere,
            true => Place::Bar,
            false => Place::PlainLines,
        };
        let bar = match place {
            Place::Bar => ProgressDrawTarget::stderr(),
            Place::PlainLines | Place::Nowhere => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(Some(BAR_STEPS), bar);
        Self { place, bar, shown: Instant::now(), pace: Pace::default(), resumed: None }
    }

    /// Shows how far the job is, if it is time.
    pub fn show(&mut self, engine: &Engine, job: &Job) {
        let resumed = *self.resumed.get_or_insert_with(|| job.progress().lines_done);
        let interval = if self.place == Place::Bar { BAR_INTERVAL } else { PLAIN_INTERVAL };
        if self.place == Place::Nowhere || self.shown.elapsed() < interval {
            return;
        }
        self.shown = Instant::now();
        let progress = job.progress();
        let lines = Lines {
            done: progress.lines_done.saturating_sub(resumed),
            open: progress.lines_open,
            unread: progress
                .lines_total
                .map(|total| total.saturating_sub(progress.lines_done + progress.lines_open)),
        };
        let estimate = self.pace.look(&engine.count(), lines);
        let text = describe(&estimate, &progress);
        if self.place == Place::PlainLines {
            return say(text);
        }
        // A stream of unknown length has no bar.
        let template = if estimate.share.is_some() { "{wide_bar} {msg}" } else { "{msg}" };
        let style = ProgressStyle::with_template(template).expect("a valid template");
        self.bar.set_style(style);
        self.bar.set_position((estimate.share.unwrap_or(0.0) * BAR_STEPS as f64) as u64);
        self.bar.set_message(text);
    }

    /// Takes the bar away.
    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

/// `43%, 12 of 100 lines, 1,234 in + 567 out tokens/s, 12 s left`.
fn describe(estimate: &Estimate, progress: &glinthawk_jobs::Progress) -> String {
    let mut text = String::new();
    if let Some(share) = estimate.share {
        text += &format!("{:.0}%, ", (100.0 * share).floor());
    }
    text += &match progress.lines_total {
        Some(total) => {
            format!("{} of {}", units::count(progress.lines_done), units::counted(total, "line"))
        }
        None => units::counted(progress.lines_done, "line"),
    };
    text += &format!(
        ", {} in + {} out tokens/s",
        units::count(estimate.prompt_rate.round() as u64),
        units::count(estimate.generated_rate.round() as u64),
    );
    if let Some(left_s) = estimate.left_s {
        let at_most = if estimate.at_most { "at most " } else { "" };
        text += &format!(", {at_most}{} left", units::whole_seconds(left_s));
    }
    text
}
