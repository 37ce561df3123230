//! `profile`: what the profiler measured, in tables.

use crate::args::ProfileArgs;
use crate::folder::require_folder;
use crate::progress::{say, with_bars};
use crate::units;
use glinthawk_launch::{Opened, ProfileEffort, Specification, isa, keep_profile, take_profile};
use glinthawk_plan::Profile;
use glinthawk_plan::profile::Curve;
use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

/// Takes a profile, prints it and writes it.
pub fn profile(args: &ProfileArgs) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    require_folder("--output", args.output.as_deref())?;
    let effort = match (args.brief, args.quick) {
        (true, _) => ProfileEffort::brief(),
        (false, true) => ProfileEffort::quick(),
        (false, false) => ProfileEffort::full(),
    };
    let specification = Specification {
        device: args.device,
        threads: Some(args.threads),
        ..Specification::new(&args.model)
    };
    let isa = isa(args.isa)?;
    let (opened, profile) = with_bars(|tell| {
        let opened = Opened::open(&specification, tell)?;
        let profile = take_profile(&opened, isa, args.threads as usize, &effort, tell)?;
        anyhow::Ok((opened, profile))
    })?;
    let path = match &args.output {
        Some(path) => {
            profile.write(path)?;
            path.clone()
        }
        None => keep_profile(opened.model.config(), &profile)?,
    };
    print(&profile)?;
    if let Some(warning) = warning(&profile) {
        say(warning);
    }
    say(format_args!(
        "profile in {}, taken in {}",
        path.display(),
        units::seconds(started.elapsed().as_secs_f64())
    ));
    Ok(ExitCode::SUCCESS)
}

/// Width of a table's column: `0.123±0.045`, six of them beside the rows.
const COLUMN: usize = 11;

/// Milliseconds of one layer, a line for each batch. No line is longer than 80 characters.
fn print(profile: &Profile) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let from = &profile.provenance;
    writeln!(out, "{} on {}", profile.shape.model, from.machine)?;
    let threads = units::counted(from.threads as u64, "thread");
    let kernels = match profile.to_host.is_empty() {
        true => format!("{}, {threads}", from.instruction_set),
        false => from.instruction_set.clone(),
    };
    writeln!(out, "{kernels}; milliseconds, mean±spread")?;
    writeln!(out, "\nweights: pre, post and fused for one layer, greedy and logits for all")?;
    let stages = ["pre", "post", "fused", "greedy", "logits"].map(str::to_owned);
    table(&mut out, &stages, &weight_curves(profile))?;
    writeln!(out, "\nattention of one layer, by positions of each context")?;
    let contexts: Vec<String> =
        profile.attention.iter().map(|curve| curve.context.to_string()).collect();
    let curves: Vec<&Curve> = profile.attention.iter().map(|curve| &curve.points).collect();
    table(&mut out, &contexts, &curves)?;
    if !profile.fused_at_once.is_empty() {
        writeln!(out, "\nfused, in a step that the device is given at once")?;
        table(&mut out, &["fused".to_owned()], &[&profile.fused_at_once])?;
    }
    if !profile.to_host.is_empty() {
        writeln!(out, "\ncopies: q, k and v to the host, attention's output to the device")?;
        let names = ["to host", "to device"].map(str::to_owned);
        table(&mut out, &names, &[&profile.to_host, &profile.to_device])?;
    }
    let around = &profile.overheads;
    let microseconds = |seconds: f64| seconds * 1e6;
    writeln!(
        out,
        "\naround the kernels: {:.1} µs a step, {:.2} µs a row",
        microseconds(around.step_seconds),
        microseconds(around.row_seconds),
    )?;
    writeln!(
        out,
        "each end of a message: {:.1} µs, on a core that computes {:.1} µs",
        microseconds(around.message_seconds),
        microseconds(around.message_beside_kernels_seconds),
    )?;
    writeln!(
        out,
        "each of its KiB: {:.2} µs, beside readers {:.2} µs",
        microseconds(around.byte_seconds) * 1024.0,
        microseconds(around.byte_beside_reading_seconds) * 1024.0,
    )?;
    writeln!(
        out,
        "a node that sleeps wakes in {:.1} µs, on a core that computes in {:.1} µs",
        microseconds(around.wake_seconds),
        microseconds(around.crowded_seconds),
    )?;
    let slower = 100.0 * around.slower_beside_messages;
    writeln!(out, "cores read memory {slower:.0}% slower while messages are sent and received")?;
    Ok(())
}

fn weight_curves(profile: &Profile) -> [&Curve; 5] {
    [&profile.pre, &profile.post, &profile.fused, &profile.classify, &profile.logits]
}

/// A column for each curve, a line for each batch that any of them has.
fn table(out: &mut impl Write, names: &[String], curves: &[&Curve]) -> std::io::Result<()> {
    let heads: String = names.iter().map(|name| format!(" {name:>COLUMN$}")).collect();
    writeln!(out, "{:>5}{heads}", "rows")?;
    let mut batches: Vec<usize> =
        curves.iter().flat_map(|curve| curve.iter().map(|point| point.batch)).collect();
    batches.sort_unstable();
    batches.dedup();
    for batch in batches {
        let cell = |curve: &&Curve| {
            let point = curve.iter().find(|point| point.batch == batch);
            let text = point.map_or(String::new(), |point| {
                format!("{}±{}", milliseconds(point.seconds), milliseconds(point.spread))
            });
            format!(" {text:>COLUMN$}")
        };
        let cells: String = curves.iter().map(cell).collect();
        writeln!(out, "{batch:>5}{}", cells.trim_end())?;
    }
    Ok(())
}

/// Three digits or more: `0.012`, `1.23`, `45.6`, `789`.
fn milliseconds(seconds: f64) -> String {
    let value = seconds * 1e3;
    let digits = match value {
        _ if value < 1.0 => 3,
        _ if value < 10.0 => 2,
        _ if value < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$}")
}

/// Warns if times vary by more than their mean: forecasts from such a profile are unreliable.
fn warning(profile: &Profile) -> Option<String> {
    let attention = [&profile.attention, &profile.prefill].into_iter().flatten();
    let curves = weight_curves(profile).into_iter().chain(attention.map(|curve| &curve.points));
    let (mut noisy, mut all) = (0, 0);
    for point in curves.flatten() {
        all += 1;
        noisy += u64::from(point.spread > point.seconds);
    }
    (noisy > 0).then(|| {
        format!(
            "warning: the spread exceeds the mean in {noisy} of {}: something else kept this machine busy. \
             Forecasts from this profile will be poor; take it again when the machine is quiet",
            units::counted(all, "measurement"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use glinthawk_plan::profile::{
        AttentionCurve, PROFILE_VERSION, Point, ProfileShape, Provenance, batch_ladder,
    };

    /// A profile whose every time is `seconds`, with this spread.
    fn flat(seconds: f64, spread: f64) -> Profile {
        let curve: Curve =
            batch_ladder(4096).into_iter().map(|batch| Point { batch, seconds, spread }).collect();
        let contexts = [16, 64, 256, 1024, 4096, 16384];
        let attention =
            contexts.map(|context| AttentionCurve { context, points: curve.clone() }).to_vec();
        Profile {
            version: PROFILE_VERSION,
            provenance: Provenance {
                machine: "a machine".to_owned(),
                instruction_set: "portable".to_owned(),
                threads: 1,
                date: "2026-11-15".to_owned(),
                version: "0.1.0".to_owned(),
            },
            shape: ProfileShape {
                model: "flat".to_owned(),
                hidden: 1,
                query_width: 1,
                kv_width: 1,
                feed_forward: 1,
                vocab: 1,
            },
            pre: curve.clone(),
            post: curve.clone(),
            fused_at_once: Vec::new(),
            fused: curve.clone(),
            classify: curve.clone(),
            logits: curve.clone(),
            attention: attention.clone(),
            prefill: attention,
            to_host: Vec::new(),
            to_device: Vec::new(),
            overheads: Default::default(),
        }
    }

    #[test]
    fn a_spread_above_the_mean_is_warned_of() {
        assert_eq!(warning(&flat(1e-3, 1e-3)), None);
        let mut noisy = flat(1e-3, 1e-4);
        noisy.fused[2].spread = 2e-3;
        let said = warning(&noisy).expect("a warning");
        assert!(said.starts_with("warning: the spread exceeds the mean in 1 of "), "{said}");
    }

    #[test]
    fn tables_fit_80_columns_for_any_time() {
        for seconds in [0.0, 1e-9, 9.9996e-4, 9.996e-3, 0.09996, 0.9996, 9.99, 99.9] {
            let profile = flat(seconds, seconds);
            let mut out = Vec::new();
            let curves: Vec<&Curve> = profile.attention.iter().map(|curve| &curve.points).collect();
            let names: Vec<String> =
                profile.attention.iter().map(|curve| curve.context.to_string()).collect();
            table(&mut out, &names, &curves).expect("written");
            for line in String::from_utf8(out).expect("text").lines() {
                assert!(line.chars().count() <= 80, "{line}");
            }
        }
    }
}
