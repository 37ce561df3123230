//! What `run` says of its forecasts.

use crate::progress::{say, with_bars};
use crate::units;
use glinthawk_cluster::RunStats;
use glinthawk_launch::{BatchAndFlights, Expected, Opened, Outlook, Specification, better_shape};

/// A batch and a number of flights that promise more than the usual ones. A job does not fail for want of a profile.
pub fn chosen_shape(
    expected: &Expected,
    opened: &Opened,
    specification: &Specification,
) -> Option<BatchAndFlights> {
    let found = with_bars(|tell| better_shape(expected, opened, specification, tell));
    let found = found.unwrap_or_else(|error| {
        let error = anyhow::Error::from(error);
        say(format_args!("going on without a profile of this machine: {error:#}"));
        None
    })?;
    let flights = |(_, flights)| match found.better.1 == found.usual.1 {
        true => String::new(),
        false => format!(" in {}", units::counted(u64::from(flights), "flight")),
    };
    say(format_args!(
        "batches of {} rows{} instead of {}{}: {:.0}% more tokens/s by a profile of this machine",
        found.better.0,
        flights(found.better),
        found.usual.0,
        flights(found.usual),
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
