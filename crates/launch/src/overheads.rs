//! What the engine does around the kernels, measured for a profile: short runs in this process for a
//! step and its rows, messages over this machine's loopback for the network.

use crate::error::LaunchError;
use crate::fixed_job::FixedJob;
use crate::launch::launch;
use crate::news::Tell;
use crate::opened::Opened;
use crate::resolved::Resolved;
use crate::specification::Specification;
use glinthawk_cluster::net::{BenchOptions, EndCores, round_trip};
use glinthawk_cluster::{Crowd, Engine, keep_to_cores};
use glinthawk_compute::{Isa, allowed_cores};
use glinthawk_model::ModelConfig;
use glinthawk_plan::profile::{Overheads, Point};
use glinthawk_plan::{KernelTimes, Profile};
use glinthawk_protocol::network_cores;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Rows of the large batch.
const ROWS: u32 = 256;
/// Rows of the batches on a device.
const DEVICE_ROWS: [u32; 6] = [1, 16, 32, 64, 128, ROWS];
/// Rows of the large message: more than the caches next to a core hold, as in a run.
const MESSAGE_ROWS: u32 = 1024;
/// Memory that a core reads beside others: together they read more than a last-level cache holds.
const READ_BYTES: usize = 64 << 20;
/// What it reads between two looks at the rest of the world.
const READ_WORDS: usize = 64 << 10;
/// Messages of a large batch under way at a time beside them, as with so many flights.
const UNDER_WAY: usize = 3;
/// For how long cores read without being disturbed.
const READING: Duration = Duration::from_millis(100);
/// About how long a node computes between two messages.
const REST: Duration = Duration::from_micros(500);
/// Tokens that each prompt of an engine run generates: on cores, and on a device, which is fast and grows hot.
const TOKENS: u32 = 8;
const DEVICE_TOKENS: u32 = 48;
/// Layers of a model on a device in those runs.
const LAYERS: usize = 12;
/// The most weights of layers that those runs load on cores.
const WEIGHT_BYTES_MAX: usize = 16 << 30;
/// The engine of those runs is small.
const CONTEXT_MAX: u32 = 64;
const CONTEXT_MEMORY_BYTES: u64 = 256 << 20;

/// Measures them for an engine with this instruction set and as many threads, or on the opened device, and adds them to
/// the profile of its kernels.
pub(crate) fn measure(
    opened: &Opened,
    isa: Isa,
    threads: usize,
    round_trips: usize,
    profile: &mut Profile,
    tell: Tell<'_>,
) -> Result<(), LaunchError> {
    let network = network(opened.model.config(), threads, round_trips)?;
    let config = opened.model.config();
    let layers = match opened.device {
        // A device goes from layer to layer by itself, so a few of them show all that is around them.
        Some(_) => LAYERS.min(config.layers),
        None => (WEIGHT_BYTES_MAX / (2 * config.layer_parameters())).clamp(1, config.layers),
    };
    let few = (layers < config.layers).then(|| opened.shortened(layers));
    let measured = few.as_ref().unwrap_or(opened);
    let batches: &[u32] = if opened.device.is_some() { &DEVICE_ROWS } else { &[1, ROWS] };
    let steps = steps(measured, isa, threads, batches, tell)?;
    let (small, large) = (steps[0], steps[steps.len() - 1]);
    let row = ((large.outside - small.outside) / f64::from(ROWS - 1)).max(0.0);
    let step = (small.outside - row).max(0.0);
    if opened.device.is_some() {
        for (&rows, step) in batches.iter().zip(&steps) {
            let layer = layer_seconds(profile, layers, rows as usize, step.inside);
            let point = Point { batch: rows as usize, seconds: layer, spread: 0.0 };
            profile.fused_at_once.extend((layer > 0.0).then_some(point));
        }
    }
    profile.overheads = Overheads { step_seconds: step, row_seconds: row, ..network };
    Ok(())
}

/// Seconds of a step, outside its kernels and inside.
#[derive(Clone, Copy, Default)]
struct StepSeconds {
    outside: f64,
    inside: f64,
}

/// Steps of so many rows.
fn steps(
    opened: &Opened,
    isa: Isa,
    threads: usize,
    batches: &[u32],
    tell: Tell<'_>,
) -> Result<Vec<StepSeconds>, LaunchError> {
    let config = opened.model.config();
    let contexts_bytes = match opened.device {
        // All prompts must generate side by side; keys and values have two bytes each.
        Some(_) => u64::from(ROWS * CONTEXT_MAX) * 4 * (config.kv_width() * config.layers) as u64,
        None => CONTEXT_MEMORY_BYTES,
    };
    let specification = Specification {
        isa: Some(isa),
        threads: Some(threads as u32),
        batch: Some(ROWS),
        context_memory_bytes: Some(contexts_bytes),
        context_max: Some(CONTEXT_MAX.min(config.context_max as u32)),
        drafts: false,
        ..Specification::new(opened.model.name())
    };
    let resolved = Resolved::new(&specification, opened, Crowd::ONE)?;
    let mut running = launch(opened, &resolved, &AtomicBool::new(false), tell)?;
    let tokens = if opened.device.is_some() { DEVICE_TOKENS } else { TOKENS };
    let mut run = |prompts: u32, number: u32| -> Result<StepSeconds, LaunchError> {
        let busy = |engine: &mut Engine| -> Result<f64, LaunchError> {
            let (_, nodes) = engine.stats()?;
            Ok(nodes.iter().map(|node| node.busy_ns as f64 / 1e9).sum())
        };
        let before = busy(&mut running.engine)?;
        let job = FixedJob { prompts, input: 1, prefix: 0, output: tokens };
        let seconds = job.run(&mut running.engine, config.vocab as u32, number)?;
        let inside = busy(&mut running.engine)? - before;
        // All prompts generate side by side, so each of their tokens is a step.
        let each = |seconds: f64| seconds.max(0.0) / f64::from(tokens);
        Ok(StepSeconds { outside: each(seconds - inside), inside: each(inside) })
    };
    // The first run wakes everything up.
    run(1, 0)?;
    batches.iter().map(|prompts| run(*prompts, 1)).collect()
}

/// Seconds of a layer's products in a step of so many layers and rows on a device, if the rest of it takes what the
/// profile says.
fn layer_seconds(profile: &Profile, layers: usize, rows: usize, inside: f64) -> f64 {
    let kernels = KernelTimes::Measured(Box::new(profile.clone()));
    let attention = kernels.attention_seconds(rows, f64::from(DEVICE_TOKENS) / 2.0);
    let ends =
        kernels.pre_seconds(rows) + kernels.post_seconds(rows) + kernels.classify_seconds(rows);
    (inside - ends - layers as f64 * attention) / (layers as f64 - 1.0).max(1.0)
}

/// What a message costs at each end, and kernels of so many threads beside it.
fn network(
    config: &ModelConfig,
    threads: usize,
    round_trips: usize,
) -> Result<Overheads, LaunchError> {
    let options = |rows: u32, pause: Duration| BenchOptions {
        rows: rows as usize,
        row_bytes_out: 2 * config.qkv_width(),
        row_bytes_back: 2 * config.query_width(),
        round_trips,
        under_way: 1,
        pause,
        touched: false,
        evicts: false,
        stream_messages: 0,
    };
    let cores = allowed_cores();
    let core = |number: usize| cores[number % cores.len()];
    let (here, there) = (EndCores::one(core(0)), EndCores::one(core(1)));
    let at_once = Duration::ZERO;
    let small = round_trip(&options(1, at_once), [here, here])?;
    let large = round_trip(&options(MESSAGE_ROWS, at_once), [here, here])?;
    let apart = round_trip(&options(1, at_once), [here, there])?.median.as_secs_f64();
    // A core that has been idle for longer takes longer to wake.
    let rested = round_trip(&options(1, REST), [here, there])?.median.as_secs_f64();
    let crowded = beside_computation(here.node, || round_trip(&options(1, at_once), [here, here]))?;
    // A thread rarely waits for a core, but when it does it waits long. So the mean matters, not the
    // median.
    let crowded = (crowded.mean.as_secs_f64() - small.mean.as_secs_f64()) / 2.0;
    let (small, large) = (small.median.as_secs_f64(), large.median.as_secs_f64());
    // A round trip is two messages with two ends each.
    let bytes =
        |rows: u32| (rows as usize * 2 * (config.qkv_width() + config.query_width())) as f64;
    let byte = ((large - small) / (bytes(MESSAGE_ROWS) - bytes(1)) / 2.0).max(0.0);
    let message = |round_trip: f64| ((round_trip - 2.0 * byte * bytes(1)) / 4.0).max(0.0);
    let cold = BenchOptions { evicts: true, ..options(1, at_once) };
    let cold = round_trip(&cold, [here, here])?.median.as_secs_f64();
    // On a machine of many cores, each end has one or two for its network threads and one that makes and uses messages.
    let touched = cores.len() > 4;
    let side_by_side = network_cores(cores.len()) > 1;
    let (ends, readers_from) = match (touched, side_by_side) {
        (true, true) => {
            let end = |end| EndCores { network: [core(end), core(2 + end)], node: core(4 + end) };
            ([end(0), end(1)], 6)
        }
        (true, false) => {
            let end = |end| EndCores { network: [core(end); 2], node: core(2 + end) };
            ([end(0), end(1)], 4)
        }
        (false, _) => ([here, there], 2),
    };
    let readers = cores.get(readers_from..).unwrap_or_default();
    // Kernels of many threads leave some of their cores to the network.
    let (all, left) = match network_cores(threads) {
        0 => (readers, readers.len()),
        network => (&cores[..threads.min(cores.len())], threads - network),
    };
    let (_, undisturbed) = beside_readers(all, || std::thread::sleep(READING));
    let flights = BenchOptions { under_way: UNDER_WAY, touched, ..options(ROWS, at_once) };
    let (streamed, disturbed) = beside_readers(readers, || round_trip(&flights, ends));
    let disturbed = disturbed * left as f64 / readers.len().max(1) as f64;
    let slower = if disturbed > 0.0 { (undisturbed / disturbed - 1.0).max(0.0) } else { 0.0 };
    // Each end sends and receives all bytes while the other one does. If one of its threads sends and another receives, what
    // counts is the slowest of those that a byte passes, and more bytes go out than back.
    let copied = match side_by_side {
        true => f64::from(ROWS) * 2.0 * config.qkv_width() as f64,
        false => bytes(ROWS),
    };
    let beside = byte.max(streamed?.median.as_secs_f64() / copied);
    Ok(Overheads {
        message_seconds: message(small),
        message_beside_kernels_seconds: message(cold.max(small)),
        byte_seconds: byte,
        byte_beside_reading_seconds: beside,
        slower_beside_messages: slower,
        wake_seconds: ((apart - small) / 2.0 + (rested - apart)).max(0.0),
        crowded_seconds: crowded.max(0.0),
        ..Overheads::default()
    })
}

/// Does something while other cores read memory, as they do when they attend; also says how many words they read in a
/// second.
fn beside_readers<T>(cores: &[usize], work: impl FnOnce() -> T) -> (T, f64) {
    let (over, words) = (&AtomicBool::new(false), &AtomicU64::new(0));
    let ready = &Barrier::new(cores.len() + 1);
    std::thread::scope(|scope| {
        for &core in cores {
            scope.spawn(move || {
                // If this fails, only precision suffers.
                _ = keep_to_cores(&[core]);
                let memory = vec![1u64; READ_BYTES / size_of::<u64>()];
                ready.wait();
                for part in memory.chunks(READ_WORDS).cycle() {
                    std::hint::black_box(part.iter().fold(0, |sum, word| sum ^ word));
                    words.fetch_add(part.len() as u64, Ordering::Relaxed);
                    if over.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
        }
        ready.wait();
        let (begun, before) = (Instant::now(), words.load(Ordering::Relaxed));
        let done = work();
        let read = (words.load(Ordering::Relaxed) - before) as f64 / begun.elapsed().as_secs_f64();
        over.store(true, Ordering::Relaxed);
        (done, read)
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
