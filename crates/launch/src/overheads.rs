//! What the engine does around the kernels, measured for a profile: short runs in this process for a
//! step and its rows, messages over this machine's loopback for the network.

use crate::error::LaunchError;
use crate::fixed_job::FixedJob;
use crate::launch::launch;
use crate::news::Tell;
use crate::opened::Opened;
use crate::resolved::Resolved;
use crate::specification::Specification;
use glinthawk_cluster::net::{BenchOptions, round_trip};
use glinthawk_cluster::{Crowd, Engine, keep_to_cores};
use glinthawk_compute::{Isa, allowed_cores};
use glinthawk_model::ModelConfig;
use glinthawk_plan::profile::Overheads;
use glinthawk_plan::{KernelTimes, Profile};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Rows of the large batch.
const ROWS: u32 = 256;
/// Rows of the large message: more than the caches next to a core hold, as in a run.
const MESSAGE_ROWS: u32 = 1024;
/// About how long a node computes between two messages.
const REST: Duration = Duration::from_micros(500);
/// Tokens that each prompt of an engine run generates.
const TOKENS: u32 = 8;
/// Layers of a model on a device in those runs.
const LAYERS: usize = 4;
/// The most weights of layers that those runs load on cores.
const WEIGHT_BYTES_MAX: usize = 16 << 30;
/// The engine of those runs is small.
const CONTEXT_MAX: u32 = 64;
const CONTEXT_MEMORY_BYTES: u64 = 256 << 20;

/// Measures them for an engine with this instruction set and as many threads, or on the opened device, whose kernels
/// take what `profile` says.
pub(crate) fn measure(
    opened: &Opened,
    isa: Isa,
    threads: usize,
    round_trips: usize,
    profile: &Profile,
    tell: Tell<'_>,
) -> Result<Overheads, LaunchError> {
    let network = network(opened.model.config(), round_trips)?;
    let config = opened.model.config();
    let layers = match opened.device {
        // A device goes from layer to layer by itself, so a few of them show all that is around them.
        Some(_) => LAYERS.min(config.layers),
        None => (WEIGHT_BYTES_MAX / (2 * config.layer_parameters())).clamp(1, config.layers),
    };
    let few = (layers < config.layers).then(|| opened.shortened(layers));
    let measured = few.as_ref().unwrap_or(opened);
    let [small, large] = steps(measured, isa, threads, tell)?;
    let row = ((large.outside - small.outside) / f64::from(ROWS - 1)).max(0.0);
    let mut step = (small.outside - row).max(0.0);
    if opened.device.is_some() {
        // The device also waits for the first kernel of a step, and the host for the last.
        step += (small.inside - step_seconds(profile, measured.model.config())).max(0.0);
    }
    Ok(Overheads { step_seconds: step, row_seconds: row, ..network })
}

/// Seconds of a step, outside its kernels and inside.
#[derive(Clone, Copy, Default)]
struct StepSeconds {
    outside: f64,
    inside: f64,
}

/// A step of one row, and one of many.
fn steps(
    opened: &Opened,
    isa: Isa,
    threads: usize,
    tell: Tell<'_>,
) -> Result<[StepSeconds; 2], LaunchError> {
    let config = opened.model.config();
    let specification = Specification {
        isa: Some(isa),
        threads: Some(threads as u32),
        batch: Some(ROWS),
        context_memory_bytes: Some(CONTEXT_MEMORY_BYTES),
        context_max: Some(CONTEXT_MAX.min(config.context_max as u32)),
        ..Specification::new(opened.model.name())
    };
    let resolved = Resolved::new(&specification, opened, Crowd::ONE)?;
    let mut running = launch(opened, &resolved, &AtomicBool::new(false), tell)?;
    let mut measured = [StepSeconds::default(); 2];
    let mut run = |prompts: u32, number: u32| -> Result<StepSeconds, LaunchError> {
        let busy = |engine: &mut Engine| -> Result<f64, LaunchError> {
            let (_, nodes) = engine.stats()?;
            Ok(nodes.iter().map(|node| node.busy_ns as f64 / 1e9).sum())
        };
        let before = busy(&mut running.engine)?;
        let job = FixedJob { prompts, input: 1, prefix: 0, output: TOKENS };
        let seconds = job.run(&mut running.engine, config.vocab as u32, number)?;
        let inside = busy(&mut running.engine)? - before;
        // All prompts generate side by side, so each of their tokens is a step.
        let each = |seconds: f64| seconds.max(0.0) / f64::from(TOKENS);
        Ok(StepSeconds { outside: each(seconds - inside), inside: each(inside) })
    };
    // The first run wakes everything up.
    run(1, 0)?;
    for (measured, prompts) in measured.iter_mut().zip([1, ROWS]) {
        *measured = run(prompts, 1)?;
    }
    Ok(measured)
}

/// Seconds of the kernels of a step of one row.
fn step_seconds(profile: &Profile, config: &ModelConfig) -> f64 {
    let kernels = KernelTimes::Measured(Box::new(profile.clone()));
    let layers = config.layers as f64;
    kernels.pre_seconds(1)
        + (layers - 1.0) * kernels.fused_seconds(1)
        + layers * kernels.attention_seconds(1, f64::from(TOKENS) / 2.0)
        + kernels.post_seconds(1)
        + kernels.classify_seconds(1)
}

/// What a message costs at each end.
fn network(config: &ModelConfig, round_trips: usize) -> Result<Overheads, LaunchError> {
    let options = |rows: u32, pause: Duration| BenchOptions {
        rows: rows as usize,
        row_bytes_out: 2 * config.qkv_width(),
        row_bytes_back: 2 * config.query_width(),
        round_trips,
        pause,
        stream_messages: 0,
    };
    let cores = allowed_cores();
    let (here, there) = (cores[0], cores[1 % cores.len()]);
    let at_once = Duration::ZERO;
    let small = round_trip(&options(1, at_once), [here, here])?;
    let large = round_trip(&options(MESSAGE_ROWS, at_once), [here, here])?;
    let apart = round_trip(&options(1, at_once), [here, there])?.median.as_secs_f64();
    // A core that has been idle for longer takes longer to wake.
    let rested = round_trip(&options(1, REST), [here, there])?.median.as_secs_f64();
    let crowded = beside_computation(here, || round_trip(&options(1, at_once), [here, here]))?;
    // A thread rarely waits for a core, but when it does it waits long. So the mean matters, not the
    // median.
    let crowded = (crowded.mean.as_secs_f64() - small.mean.as_secs_f64()) / 2.0;
    let (small, large) = (small.median.as_secs_f64(), large.median.as_secs_f64());
    // A round trip is two messages with two ends each.
    let bytes =
        |rows: u32| (rows as usize * 2 * (config.qkv_width() + config.query_width())) as f64;
    let byte = ((large - small) / (bytes(MESSAGE_ROWS) - bytes(1)) / 2.0).max(0.0);
    let message = ((small - 2.0 * byte * bytes(1)) / 4.0).max(0.0);
    Ok(Overheads {
        message_seconds: message,
        byte_seconds: byte,
        wake_seconds: ((apart - small) / 2.0 + (rested - apart)).max(0.0),
        crowded_seconds: crowded.max(0.0),
        ..Overheads::default()
    })
}

/// Does something while a thread keeps a core busy.
fn beside_computation<T>(core: usize, work: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Without pinning, it would compete for the core less often.
            _ = keep_to_cores(&[core]);
            while !over.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let done = work();
        over.store(true, Ordering::Relaxed);
        done
    })
}
