//! Takes profiles: times the kernels here for a model's shape, and what the engine does around them.

use crate::error::LaunchError;
use crate::kernel_curves::{Extent, KernelBench, KernelCurves, Pace};
use crate::news::{LaunchNews, Tell};
use crate::opened::Opened;
use crate::overheads;
use crate::profiles::{of_cores, of_device};
use glinthawk_cluster::keep_to_cores;
use glinthawk_compute::bench::{AttentionBench, StageBench};
use glinthawk_compute::cuda::{CudaBackend, CudaDevice, pinned_pool};
use glinthawk_compute::{CpuBackend, Isa, Threads, allowed_cores};
use glinthawk_flight::Pool;
use glinthawk_model::ModelConfig;
use glinthawk_plan::Profile;
use glinthawk_plan::profile::{Overheads, PROFILE_VERSION, ProfileShape, batch_ladder};
use std::sync::Arc;
use std::time::Duration;

/// The most weights to load.
const WEIGHT_BYTES: usize = 1 << 30;
/// The least memory of contexts for each of several simultaneous measurements.
const CONTEXT_BYTES_MIN: usize = 64 << 20;
/// The most memory of contexts on a device.
const DEVICE_CONTEXT_BYTES: u64 = 16 << 30;
/// Rows of a prefill: those of a batch, on cores and on a device.
const PREFILL_ROWS: usize = 256;
const DEVICE_PREFILL_ROWS: usize = 4096;

/// How thorough a profile is.
pub struct ProfileEffort {
    /// Largest batch of the kernels with weights.
    batch_max: usize,
    /// Batches of attention.
    attention_batches: Vec<usize>,
    /// Contexts that rows attend to, in positions, ascending.
    contexts: &'static [usize],
    /// Largest batch for which logits are timed.
    logits_max: usize,
    /// Memory of the contexts that attention is timed on.
    context_bytes: usize,
    /// Time for all batches of the kernels with weights together.
    weights: Duration,
    /// Time for all batches of attention at one context length.
    attention: Duration,
    /// The fewest samples of each batch, even if time runs out.
    samples_min: usize,
    /// Round trips over the loopback.
    round_trips: usize,
}

impl ProfileEffort {
    /// For plans: minutes.
    pub fn full() -> Self {
        Self {
            batch_max: 4096,
            attention_batches: batch_ladder(4096),
            contexts: &[16, 64, 256, 1024, 4096, 16384],
            logits_max: 256,
            context_bytes: 1 << 30,
            weights: Duration::from_secs(150),
            attention: Duration::from_secs(12),
            samples_min: 5,
            round_trips: 4000,
        }
    }

    /// Under a minute.
    pub fn quick() -> Self {
        Self {
            batch_max: 1024,
            attention_batches: batch_ladder(1024),
            context_bytes: 512 << 20,
            weights: Duration::from_secs(15),
            attention: Duration::from_millis(1500),
            samples_min: 3,
            round_trips: 600,
            ..Self::full()
        }
    }

    /// A few seconds.
    pub fn brief() -> Self {
        Self {
            batch_max: 512,
            attention_batches: vec![1, 4, 16, 64, 256, 512],
            contexts: &[16, 128, 1024],
            logits_max: 64,
            context_bytes: 512 << 20,
            weights: Duration::from_millis(1800),
            attention: Duration::from_millis(150),
            samples_min: 2,
            round_trips: 200,
        }
    }

    /// What is timed of a model on a CPU.
    fn extent(&self, config: &ModelConfig) -> Extent {
        let contexts = self.contexts.iter().copied();
        Extent {
            batches: batch_ladder(self.batch_max),
            attention_batches: self.attention_batches.clone(),
            contexts: contexts.filter(|context| *context <= config.context_max).collect(),
            logits_max: self.logits_max,
            weights: self.weights,
            attention: self.attention,
            samples_min: self.samples_min,
        }
    }

    /// The same on a device, which is faster, has larger batches, and is disturbed less.
    fn device_extent(&self, config: &ModelConfig) -> Extent {
        let batch_max = (2 * self.batch_max).max(DEVICE_PREFILL_ROWS);
        Extent {
            batches: batch_ladder(batch_max),
            attention_batches: batch_ladder(DEVICE_PREFILL_ROWS),
            logits_max: DEVICE_PREFILL_ROWS,
            weights: self.weights / 30,
            attention: self.attention / 30,
            ..self.extent(config)
        }
    }
}

/// Takes a profile of the opened device, or of a CPU's kernels with `count` threads each; as many of them run side by
/// side as the cores allow.
pub fn take_profile(
    opened: &Opened,
    isa: Isa,
    count: usize,
    effort: &ProfileEffort,
    tell: Tell<'_>,
) -> Result<Profile, LaunchError> {
    let (kernels, provenance) = match &opened.device {
        Some(device) => (on_device(opened, device, effort, tell)?, of_device(device)),
        None => (on_cores(opened, isa, count, effort, tell)?, of_cores(isa, count)),
    };
    let (model, config) = (&opened.model, opened.model.config());
    let [pre, post, fused, classify, logits] = kernels.weights;
    let [to_host, to_device] = kernels.copies;
    let mut profile = Profile {
        version: PROFILE_VERSION,
        provenance,
        shape: ProfileShape {
            model: model.name().to_owned(),
            hidden: config.hidden,
            query_width: config.query_width(),
            kv_width: config.kv_width(),
            feed_forward: config.feed_forward,
            vocab: config.vocab,
        },
        pre,
        post,
        fused,
        fused_at_once: Vec::new(),
        classify,
        logits,
        attention: kernels.attention,
        prefill: kernels.prefill,
        to_host,
        to_device,
        overheads: Overheads::default(),
    };
    overheads::measure(opened, isa, count, effort.round_trips, &mut profile, tell)?;
    Ok(profile)
}

fn on_cores(
    opened: &Opened,
    isa: Isa,
    count: usize,
    effort: &ProfileEffort,
    tell: Tell<'_>,
) -> Result<KernelCurves, LaunchError> {
    let (model, config, cores) = (&opened.model, opened.model.config(), allowed_cores());
    let beside = (cores.len() / count).max(1);
    let backend = |count: usize| {
        let (threads, pool) = (Arc::new(Threads::new(count)?), Arc::new(Pool::new(4)));
        Ok::<_, LaunchError>(CpuBackend { isa, threads, pool })
    };
    let extent = &effort.extent(config);
    let rows_max = effort.batch_max;
    let show = &mut |done, total| tell(LaunchNews::Loading(done, total));
    let layers = 0..layers_timed(config);
    // All instances share the weights.
    let stages = &StageBench::new(&backend(cores.len())?, model, layers, rows_max, show)?;
    let bytes = (effort.context_bytes / beside).max(CONTEXT_BYTES_MIN);
    let context_max = extent.contexts.last().copied().unwrap_or(1);
    // On threads of their own, because they are pinned and later work must not be.
    let curves = std::thread::scope(|scope| {
        let instance = |instance: usize| {
            let cores = cores.get(instance * count..(instance + 1) * count);
            scope.spawn(move || {
                if let Some(cores) = cores {
                    // If this fails, only precision suffers.
                    _ = keep_to_cores(cores);
                }
                let backend = backend(count)?;
                backend.threads.pin_caller();
                let bench = KernelBench {
                    stages: stages.beside(&backend)?,
                    pages: AttentionBench::new(&backend, config, bytes, context_max, rows_max)?,
                    backend,
                    pace: Pace::Alone,
                    prefill_rows: PREFILL_ROWS,
                };
                // One speaks for all.
                bench.curves(config, extent, &mut progress(extent, tell, instance == 0))
            })
        };
        let instances: Vec<_> = (0..beside).map(instance).collect();
        let curves =
            instances.into_iter().map(|thread| thread.join().expect("kernels do not panic"));
        curves.collect::<Result<Vec<_>, LaunchError>>()
    })?;
    Ok(KernelCurves::mean(&curves))
}

fn on_device(
    opened: &Opened,
    device: &CudaDevice,
    effort: &ProfileEffort,
    tell: Tell<'_>,
) -> Result<KernelCurves, LaunchError> {
    let (model, config) = (&opened.model, opened.model.config());
    let threads = Arc::new(Threads::new(allowed_cores().len())?);
    let pool = Arc::new(pinned_pool(device, 4));
    let backend = CudaBackend::new(device.clone(), threads, pool);
    let extent = effort.device_extent(config);
    let rows_max = extent.batches.last().copied().unwrap_or(1);
    let show = &mut |done, total| tell(LaunchNews::Loading(done, total));
    let stages = StageBench::new(&backend, model, 0..layers_timed(config), rows_max, show)?;
    let bytes = (device.memory_free_bytes()? / 2).min(DEVICE_CONTEXT_BYTES) as usize;
    let context_max = extent.contexts.last().copied().unwrap_or(1);
    let bench = KernelBench {
        stages,
        pages: AttentionBench::new(&backend, config, bytes, context_max, DEVICE_PREFILL_ROWS)?,
        backend,
        pace: Pace::Queued,
        prefill_rows: DEVICE_PREFILL_ROWS,
    };
    let curves = bench.curves(config, &extent, &mut progress(&extent, tell, true))?;
    Ok(KernelCurves::mean(&[curves]))
}

/// Tells how many parts are done, if `speaks`.
fn progress<'a>(extent: &Extent, tell: Tell<'a>, speaks: bool) -> impl FnMut() + use<'a> {
    let (mut done, total) = (0, extent.parts());
    let show = move |done| {
        if speaks {
            tell(LaunchNews::Profiling(done, total));
        }
    };
    show(done);
    move || {
        done += 1;
        show(done);
    }
}

/// Layers whose weights are loaded to time kernels with: more than fit in a last-level cache, if there are as many.
pub fn layers_timed(config: &ModelConfig) -> usize {
    (WEIGHT_BYTES / (2 * config.layer_parameters())).clamp(1, config.layers)
}
