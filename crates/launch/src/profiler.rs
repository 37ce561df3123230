//! Takes profiles: times the kernels here for a model's shape, and what the engine does around them.

use crate::error::LaunchError;
use crate::news::{LaunchNews, Tell};
use crate::opened::Opened;
use crate::overheads;
use crate::profiles::provenance;
use crate::sweep::{mean, sweep};
use glinthawk_cluster::keep_to_cores;
use glinthawk_compute::bench::{AttentionBench, StageBench, TimedStage};
use glinthawk_compute::{Isa, Threads, allowed_cores};
use glinthawk_model::{Model, ModelConfig};
use glinthawk_plan::Profile;
use glinthawk_plan::profile::{
    AttentionCurve, Curve, PROFILE_VERSION, Point, ProfileShape, batch_ladder,
};
use std::sync::Arc;
use std::time::Duration;

/// The most weights to load.
const WEIGHT_BYTES: usize = 1 << 30;
/// The least memory of contexts for each of several simultaneous measurements.
const CONTEXT_BYTES_MIN: usize = 64 << 20;
/// The most repetitions in one sample, alone and when other work is done in between.
const TIMES_MAX: usize = 200;
const INTERLEAVED_TIMES_MAX: usize = 4;

/// Prompts whose contexts are attended to between two kernels with weights. For most models, even the shortest
/// contexts exceed a second-level cache.
const BETWEEN_PROMPTS: usize = 192;

/// How thorough a profile is.
pub struct ProfileEffort {
    /// Batches, ascending.
    batches: Vec<usize>,
    /// Batches of attention, which is nearly proportional to them.
    attention_batches: Vec<usize>,
    /// Contexts that rows attend to, in positions, ascending.
    contexts: &'static [usize],
    /// Largest batch for which logits are timed; more rows take proportionally longer.
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
            batches: batch_ladder(4096),
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
            batches: batch_ladder(1024),
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
            batches: batch_ladder(512),
            attention_batches: vec![1, 4, 16, 64, 256],
            contexts: &[16, 128, 1024],
            logits_max: 64,
            context_bytes: 512 << 20,
            weights: Duration::from_millis(1800),
            attention: Duration::from_millis(150),
            samples_min: 2,
            round_trips: 200,
        }
    }

    fn batch_max(&self) -> usize {
        self.batches.last().copied().unwrap_or(1)
    }
}

/// Takes a profile of kernels with `count` threads each; as many of them run side by side as the cores allow.
pub fn take_profile(
    opened: &Opened,
    isa: Isa,
    count: usize,
    effort: &ProfileEffort,
    tell: Tell<'_>,
) -> Result<Profile, LaunchError> {
    let model = &opened.model;
    let config = model.config();
    let cores = allowed_cores();
    let beside = (cores.len() / count).max(1);
    let stages = stages(model, isa, cores.len(), effort.batch_max(), tell)?;
    // On threads of their own, because they are pinned and later work must not be.
    let kernels = std::thread::scope(|scope| {
        let instance = |instance: usize| {
            let cores = cores.get(instance * count..(instance + 1) * count);
            let stages = &stages;
            scope.spawn(move || {
                if let Some(cores) = cores {
                    // If this fails, only precision suffers.
                    _ = keep_to_cores(cores);
                }
                let threads = Arc::new(Threads::new(count)?);
                let stages = stages.beside(Arc::clone(&threads))?;
                let instance = Instance { number: instance, of: beside };
                kernels(config, isa, stages, threads, effort, instance, tell)
            })
        };
        let instances: Vec<_> = (0..beside).map(instance).collect();
        let curves =
            instances.into_iter().map(|thread| thread.join().expect("kernels do not panic"));
        curves.collect::<Result<Vec<_>, LaunchError>>()
    })?;
    let kernels = KernelCurves::mean(&kernels);
    let overheads = overheads::measure(opened, isa, count, effort.round_trips, tell)?;
    let [pre, post, fused, classify, logits] = kernels.weights;
    Ok(Profile {
        version: PROFILE_VERSION,
        provenance: provenance(isa, count),
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
        classify,
        logits,
        attention: kernels.attention,
        prefill: kernels.prefill,
        overheads,
    })
}

/// Pre, post, fused, greedy and logits; attention of decoding and of prefill.
struct KernelCurves {
    weights: [Curve; 5],
    attention: Vec<AttentionCurve>,
    prefill: Vec<AttentionCurve>,
}

impl KernelCurves {
    /// The average time of kernels that ran side by side.
    fn mean(instances: &[Self]) -> Self {
        let attention = |of: fn(&Self) -> &Vec<AttentionCurve>| {
            let curve = |(index, first): (usize, &AttentionCurve)| AttentionCurve {
                context: first.context,
                points: mean_curve(instances.iter().map(|curves| &of(curves)[index].points)),
            };
            of(&instances[0]).iter().enumerate().map(curve).collect()
        };
        Self {
            weights: std::array::from_fn(|stage| {
                mean_curve(instances.iter().map(|curves| &curves.weights[stage]))
            }),
            attention: attention(|curves| &curves.attention),
            prefill: attention(|curves| &curves.prefill),
        }
    }
}

/// Point by point; all have the same batches.
fn mean_curve<'a>(curves: impl ExactSizeIterator<Item = &'a Curve>) -> Curve {
    let share = 1.0 / curves.len() as f64;
    let mut mean: Curve = Vec::new();
    for curve in curves {
        mean.resize(curve.len(), Point { batch: 0, seconds: 0.0, spread: 0.0 });
        for (mean, point) in mean.iter_mut().zip(curve) {
            mean.batch = point.batch;
            mean.seconds += share * point.seconds;
            mean.spread += share * point.spread;
        }
    }
    mean
}

/// One of several measurements at the same time.
#[derive(Clone, Copy)]
struct Instance {
    number: usize,
    of: usize,
}

/// Layers whose weights are loaded to time kernels with: more than fit in a last-level cache, if there are as many.
pub fn layers_timed(config: &ModelConfig) -> usize {
    (WEIGHT_BYTES / (2 * config.layer_parameters())).clamp(1, config.layers)
}

/// Loads the weights, which all instances share.
fn stages(
    model: &Model,
    isa: Isa,
    cores: usize,
    batch_max: usize,
    tell: Tell<'_>,
) -> Result<StageBench, LaunchError> {
    let layers = layers_timed(model.config());
    let threads = Arc::new(Threads::new(cores)?);
    let show = &mut |done, total| tell(LaunchNews::Loading(done, total));
    Ok(StageBench::new(model, 0..layers, batch_max, isa, threads, show)?)
}

fn kernels(
    config: &ModelConfig,
    isa: Isa,
    mut stages: StageBench,
    threads: Arc<Threads>,
    effort: &ProfileEffort,
    instance: Instance,
    tell: Tell<'_>,
) -> Result<KernelCurves, LaunchError> {
    threads.pin_caller();
    let known = effort.contexts.iter().copied();
    let contexts: Vec<usize> = known.filter(|context| *context <= config.context_max).collect();
    let (mut done, total) = (0, 2 + 2 * contexts.len() as u64);
    // One speaks for all.
    let show = |done| {
        if instance.number == 0 {
            tell(LaunchNews::Profiling(done, total));
        }
    };
    show(done);
    let mut advance = || {
        done += 1;
        show(done);
    };
    let mut pages = AttentionBench::new(
        config,
        config.layers,
        (effort.context_bytes / instance.of).max(CONTEXT_BYTES_MIN),
        isa,
        Arc::clone(&threads),
    )?;
    let between = contexts.iter().copied().filter(|context| pages.holds(BETWEEN_PROMPTS, *context));
    let between = between.min();
    let run = |rows: usize, kernel: usize, times: usize| {
        mean(times, || {
            // In between, contexts go through the caches, as they do in a run.
            if let Some(context) = between {
                pages.attend(BETWEEN_PROMPTS, 1, context);
            }
            match kernel {
                0 => stages.stage(TimedStage::Pre, rows, 1),
                1 => stages.stage(TimedStage::Post, rows, 1),
                2 => stages.stage(TimedStage::Fused, rows, 1),
                _ => stages.classify_greedy(rows),
            }
        })
    };
    let least = effort.samples_min;
    let [pre, post, fused, classify] =
        sweep(&effort.batches, effort.weights, least, INTERLEAVED_TIMES_MAX, run);
    advance();
    let run = |rows: usize, _, times| mean(times, || stages.classify_sampled(rows));
    let few: Vec<usize> =
        effort.batches.iter().copied().filter(|rows| *rows <= effort.logits_max).collect();
    let [logits] = sweep(&few, effort.attention, least, TIMES_MAX, run);
    advance();
    let (attention, prefill) = attention(stages, pages, &contexts, effort, &mut advance);
    Ok(KernelCurves { weights: [pre, post, fused, classify, logits], attention, prefill })
}

/// Decoding and prefill, as far as their contexts fit into memory.
fn attention(
    mut stages: StageBench,
    mut pages: AttentionBench,
    contexts: &[usize],
    effort: &ProfileEffort,
    advance: &mut dyn FnMut(),
) -> (Vec<AttentionCurve>, Vec<AttentionCurve>) {
    let (mut decode, mut prefill) = (Vec::new(), Vec::new());
    for &context in contexts {
        for (prefills, curves) in [(false, &mut decode), (true, &mut prefill)] {
            let split = |rows: usize| if prefills { (1, rows) } else { (rows, 1) };
            let fits = |rows: &usize| {
                let (prompts, rows) = split(*rows);
                rows <= context && pages.holds(prompts, context)
            };
            let batches: Vec<usize> =
                effort.attention_batches.iter().copied().filter(fits).collect();
            let run = |rows: usize, _, times| {
                let (prompts, rows_each) = split(rows);
                mean(times, || {
                    // In between, weights go through the caches, as they do in a run.
                    stages.stage(TimedStage::Fused, rows, 1);
                    pages.attend(prompts, rows_each, context)
                })
            };
            let [points] =
                sweep(&batches, effort.attention, effort.samples_min, INTERLEAVED_TIMES_MAX, run);
            advance();
            if !points.is_empty() {
                curves.push(AttentionCurve { context, points });
            }
        }
    }
    (decode, prefill)
}
