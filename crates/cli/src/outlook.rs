//! What `run` says of its forecasts.

use crate::progress::{say, with_bars};
use crate::units;
use glinthawk_cluster::RunStats;
use glinthawk_launch::{Expected, JobShape, Opened, Outlook, Specification, better_shape};

/// A shape of batches that promises more than the usual one. A job does not fail for want of a profile.
pub fn chosen_shape(
    expected: &Expected,
    opened: &Opened,
    specification: &Specification,
) -> Option<JobShape> {
    let found = with_bars(|tell| better_shape(expected, opened, specification, tell));
    let found = found.unwrap_or_else(|error| {
        let error = anyhow::Error::from(error);
        say(format_args!("going on without a profile of this machine: {error:#}"));
        None
    })?;
    let (better, usual) = (found.better, found.usual);
    let parts = [
        ("rows in a batch", better.batch, usual.batch),
        ("flights", better.flights, usual.flights),
        ("prefill rows of a prompt at a time", better.chunk, usual.chunk),
    ];
    let other = parts.iter().filter(|(_, better, usual)| better != usual);
    let other = other.map(|(what, better, usual)| format!("{better} {what} instead of {usual}"));
    say(format_args!(
        "{}: {:.0}% more tokens/s by a profile of this machine",
        other.collect::<Vec<_>>().join(", "),
        100.0 * found.gain
    ));
    Some(found.better)
}

/// Says what a job will take, before it begins.
pub fn announce(outlook: &Outlook) {
    say(format_args!(
        "forecast from {}: {} if completions are as long as they may be, {:.0} tokens/s{}",
        outlook.source,
        units::seconds(outlook.seconds),
        outlook.tokens_per_second,
        dollars(outlook, outlook.seconds),
    ));
}

/// Says how it came out.
pub fn compare(outlook: &Outlook, stats: &RunStats) {
    let off = 100.0 * (outlook.tokens_per_second / stats.tokens_per_second - 1.0);
    say(format_args!(
        "forecast {} at {:.0} tokens/s, took {} at {:.0} tokens/s: {off:+.1}%{}",
        units::seconds(outlook.seconds),
        outlook.tokens_per_second,
        units::seconds(stats.wall_s),
        stats.tokens_per_second,
        dollars(outlook, stats.wall_s),
    ));
}

fn dollars(outlook: &Outlook, seconds: f64) -> String {
    outlook.usd.map_or(String::new(), |usd| format!(", ${:.2}", usd / outlook.seconds * seconds))
}
