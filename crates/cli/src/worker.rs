//! `worker`: a process that joins a dispatcher, says what it does, and stays for the next job if asked to.

use crate::args::WorkerArgs;
use crate::progress::{say, with_bars};
use crate::units;
use anyhow::{Context, bail};
use glinthawk_cluster::net::Token;
use glinthawk_cluster::{
    ClusterError, NodeReport, Role, Traffic, WorkerNews, WorkerOptions, keep_to_cores, work,
};
use glinthawk_compute::allowed_cores;
use glinthawk_launch::{
    check_free_memory, cluster_secret, encryption, free_memory_bytes, isa, threads,
};
use glinthawk_model::{Model, Source};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Pause between a failed job and the next: what was wrong may stay wrong for a while.
const PAUSE: Duration = Duration::from_secs(1);

/// Works until the dispatcher says goodbye, or until it is stopped.
pub fn worker(args: &WorkerArgs) -> anyhow::Result<ExitCode> {
    let token = cluster_secret(args.security.secret_file.as_deref())?;
    let all = allowed_cores();
    if let Some(core) = args.cores.iter().find(|core| !all.contains(core)) {
        bail!("there is no core {core} here that this process may use (--cores)");
    }
    if !args.cores.is_empty() {
        keep_to_cores(&args.cores)?;
    }
    let gpu = with_bars(|tell| args.device.open(tell))?;
    let options = WorkerOptions {
        join: args.join.clone(),
        token: Token::new(&token),
        encryption: encryption(args.security.insecure),
        tier: args.tier,
        place: args.place,
        isa: isa(args.isa)?,
        threads: threads(args.threads)?,
        // Local processes, which have a place, wait for each other.
        cores: args.place.filter(|_| !args.cores.is_empty()).map(|_| {
            let others = all.into_iter().filter(|core| !args.cores.contains(core));
            [args.cores.clone(), others.collect()]
        }),
        memory_bytes: match (args.context_memory, &gpu) {
            // Local processes, which have a place, get what `run` was told.
            (Some(bytes), None) if args.place.is_none() => {
                check_free_memory(bytes)?;
                bytes
            }
            (Some(bytes), _) => bytes,
            (None, Some(_)) => u64::MAX,
            (None, None) => free_memory_bytes()? / 2,
        },
        gpu,
        patient: args.stay,
        has_role: Arc::default(),
        leaving: Arc::default(),
        // For local processes, which have a place, `run` says what there is to know.
        news: if args.place.is_some() { |_| () } else { tell },
    };
    leave_when_asked(&options)?;
    if args.place.is_some() {
        end_with_parent()?;
    }
    if !args.stay {
        work_apart(&options)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut last_error = String::new();
    loop {
        match work_apart(&options) {
            // Whoever was asked to leave does, even if the dispatcher went first.
            Ok(()) | Err(ClusterError::DispatcherLost(_))
                if options.leaving.load(Ordering::Relaxed) =>
            {
                return Ok(ExitCode::SUCCESS);
            }
            Ok(()) => last_error.clear(),
            Err(error) => {
                // A worker that stays does not fail when its dispatcher leaves.
                let error = match error {
                    ClusterError::DispatcherLost(_) => error.to_string(),
                    _ => format!("error: {error}"),
                };
                if error != last_error {
                    say(format_args!("{error}; waiting for the next job"));
                }
                last_error = error;
                std::thread::sleep(PAUSE);
            }
        }
    }
}

/// A worker that is asked to end (Ctrl-C, SIGTERM) leaves its role in order; asked again, or without a role, it ends.
fn leave_when_asked(options: &WorkerOptions) -> anyhow::Result<()> {
    let (has_role, leaving) = (Arc::clone(&options.has_role), Arc::clone(&options.leaving));
    ctrlc::set_handler(move || {
        let is_first = !leaving.swap(true, Ordering::Relaxed);
        if !is_first || !has_role.load(Ordering::Relaxed) {
            std::process::exit(i32::from(!is_first));
        }
    })
    .context("cannot watch for Ctrl-C")
}

/// A local process ends with the one that started it, which holds the other end of its standard input.
fn end_with_parent() -> anyhow::Result<()> {
    let read = || {
        // Whatever is there, or why it cannot be read: it is over.
        _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(1);
    };
    std::thread::Builder::new().spawn(read).context("cannot start a thread").map(drop)
}

/// Works on a thread of its own: it is pinned to cores, and the next job must not inherit that.
fn work_apart(options: &WorkerOptions) -> Result<(), ClusterError> {
    let worked = std::thread::scope(|scope| scope.spawn(|| work(options)).join());
    // What happened was said by the panic itself. A worker that stays is there for the next job all the same.
    worked.unwrap_or_else(|_| Err(ClusterError::Panicked))
}

fn tell(news: WorkerNews<'_>) {
    match news {
        WorkerNews::Dialling(address) => say(format_args!("dialling {address}")),
        WorkerNews::NotNeeded => say("done: the job needed no further worker"),
        WorkerNews::Joined(role) => say(format_args!("joined as {}", joined(role))),
        WorkerNews::Loading(model, bytes) => {
            say(format_args!("loading {} of weights, {}", units::bytes(bytes), origin(model)))
        }
        WorkerNews::Contexts(bytes) => {
            say(format_args!("{} for contexts", units::bytes(bytes)));
        }
        WorkerNews::Ready => say("ready"),
        WorkerNews::Leaving => say("leaving, when nothing here is needed any more"),
        WorkerNews::Done(report, time) => say(format_args!("done: {}", done(report, time))),
    }
}

fn joined(role: &Role) -> String {
    let layers = role.layout.layers(role.config.layers, role.slice);
    let (first, last, of) = (layers.start + 1, layers.end, role.config.layers);
    let layers = format!("layers {first} to {last} of {of} of {}", role.model);
    let (slices, lanes) = (role.layout.slices, role.layout.tier2);
    match role.lane {
        None => format!("{}, one of {}: {layers}", role.name(), nodes(slices, 1)),
        Some(_) => format!(
            "{}, one of {} of {}: attention in {layers}",
            role.name(),
            nodes(lanes, 2),
            role.layout.node_name(role.pipeline, role.slice, None)
        ),
    }
}

fn nodes(count: usize, tier: u8) -> String {
    units::counted(count as u64, &format!("Tier-{tier} node"))
}

fn origin(model: &Model) -> String {
    match model.source() {
        Source::Gguf { path, .. } | Source::Folder(path) => format!("from {}", path.display()),
        Source::Dummy => "made up here".to_owned(),
        Source::Elsewhere => "from the dispatcher".to_owned(),
    }
}

fn done(report: &NodeReport, time: Duration) -> String {
    let bytes = |traffic: &BTreeMap<String, Traffic>| {
        units::bytes(traffic.values().map(|traffic| traffic.bytes).sum())
    };
    format!(
        "{} of {:.1} rows on average, busy for {} of {}, {} sent and {} received",
        counted_batches(report.batches),
        report.rows as f64 / report.batches.max(1) as f64,
        units::seconds(report.busy_ns as f64 / 1e9),
        units::seconds(time.as_secs_f64()),
        bytes(&report.sent),
        bytes(&report.received),
    )
}

fn counted_batches(count: u64) -> String {
    if count == 1 { "1 batch".to_owned() } else { format!("{} batches", units::count(count)) }
}
