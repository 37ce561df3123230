//! Progress on standard error: bars on a terminal, a plain line now and then elsewhere.

use crate::units;
use glinthawk_cluster::{Engine, Estimate, Lines, Pace};
use glinthawk_compute::ComputeError;
use glinthawk_jobs::Job;
use glinthawk_launch::{LaunchNews, Tell};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
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

/// Does something that has news, with a bar on the terminal for whatever takes a while.
pub fn with_bars<T>(work: impl FnOnce(Tell<'_>) -> T) -> T {
    let shown = Mutex::new(None);
    let done = work(&|news| show(&mut shown.lock().unwrap_or_else(PoisonError::into_inner), news));
    if let Some((_, bar)) = shown.into_inner().unwrap_or_else(PoisonError::into_inner) {
        bar.finish_and_clear();
    }
    done
}

const BYTES_BAR: &str = "{msg} {wide_bar} {binary_bytes} of {binary_total_bytes}, {eta} left";

/// Says the news, or shows them on a bar of their kind in place of the one that is there.
fn show(shown: &mut Option<(&'static str, ProgressBar)>, news: LaunchNews<'_>) {
    let (kind, template, done, total) = match news {
        LaunchNews::Pulling(pull) => ("fetching", BYTES_BAR, pull.bytes_done, pull.bytes_total),
        LaunchNews::Checking(done, total) => ("checking the model", BYTES_BAR, done, total),
        LaunchNews::Loading(done, total) => ("loading", BYTES_BAR, done, total),
        LaunchNews::Profiling(done, total) => {
            ("profiling", "{msg} {wide_bar} {pos} of {len}, {elapsed}", done, total)
        }
        LaunchNews::Joined(count, of) => {
            ("workers joined:", "{msg} {pos} of {len}", count as u64, of as u64)
        }
        LaunchNews::Ready(count, of) => {
            ("workers ready:", "{msg} {pos} of {len}", count as u64, of as u64)
        }
        LaunchNews::Listening(address, workers) => {
            let workers = units::counted(workers as u64, "worker");
            let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
            let at = reachable(address, name.trim());
            return say(format_args!(
                "waiting at {address} for {workers}: glinthawk worker --join {at}"
            ));
        }
        LaunchNews::Settled(best, other) => {
            let other = other.map_or(String::new(), |other| format!("; {other} would be next"));
            return say(format_args!("workers become {best}{other} (by forecast)"));
        }
        LaunchNews::MixedKinds(kinds) => {
            return say(format_args!(
                "the nodes compute on different kinds ({kinds}): results depend on where they are computed"
            ));
        }
        LaunchNews::DamagedProfile(error) => {
            return say(format_args!(
                "ignoring a damaged profile: {error}. Delete it, or take it again with `glinthawk profile`"
            ));
        }
        LaunchNews::NoProfile => {
            return say(
                "there is no profile of this machine for such a model yet: taking a brief one",
            );
        }
        LaunchNews::NoGpu(ComputeError::CudaMissing { library, .. }) => {
            return say(format_args!("using the CPU: {library} is not on this machine"));
        }
        LaunchNews::NoGpu(error) => return say(format_args!("using the CPU: {error}")),
    };
    if let Some((_, other)) = shown.take_if(|(shown, _)| *shown != kind) {
        other.finish_and_clear();
    }
    let (_, bar) = shown.get_or_insert_with(|| {
        if let LaunchNews::Pulling(pull) = &news {
            say(format_args!("fetching {}", pull.file));
        }
        let style = ProgressStyle::with_template(template).expect("a valid template");
        (kind, ProgressBar::new(total).with_style(style).with_message(kind))
    });
    if let LaunchNews::Pulling(pull) = &news {
        bar.set_message(pull.file.to_owned());
    }
    bar.set_length(total);
    bar.set_position(done);
}

/// How others reach an address of this machine, which has a name. One that stands for all addresses is no destination; a name
/// usually is.
fn reachable(address: SocketAddr, name: &str) -> String {
    match address.ip().is_unspecified() {
        false => address.to_string(),
        true if name.is_empty() || name == "(none)" || name.starts_with("localhost") => {
            format!("ADDRESS-OF-THIS-MACHINE:{}", address.port())
        }
        true => format!("{name}:{}", address.port()),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_told_where_to_join() {
        let told = |address: &str, name: &str| reachable(address.parse().expect("valid"), name);
        assert_eq!(told("10.0.0.1:7070", "host"), "10.0.0.1:7070");
        assert_eq!(told("0.0.0.0:7070", "host"), "host:7070");
        assert_eq!(told("[::]:7070", "host.example"), "host.example:7070");
        for nameless in ["", "(none)", "localhost", "localhost.localdomain"] {
            assert_eq!(told("0.0.0.0:7070", nameless), "ADDRESS-OF-THIS-MACHINE:7070");
        }
    }
}
