//! `profile`: times the kernels here for a model's shape, and what the engine does around them.

use crate::args::{EngineArgs, ProfileArgs};
use crate::progress::{CountBar, LoadBar, say};
use crate::{models, overheads, setup, units};
use anyhow::Context;
use glinthawk_cluster::{allowed_cores, keep_to_cores};
use glinthawk_compute::bench::{AttentionBench, Stage, StageBench};
use glinthawk_compute::{Isa, Threads};
use glinthawk_model::catalogue::cache_folder;
use glinthawk_model::{Model, ModelConfig};
use glinthawk_plan::profile::{
    AttentionCurve, Curve, PROFILE_VERSION, Point, ProfileShape, Provenance, batch_ladder,
};
use glinthawk_plan::{Profile, Shape};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// The most weights to load: more than fits in a last-level cache.
const WEIGHT_BYTES: usize = 1 << 30;
/// The least memory of contexts for each of several simultaneous measurements.
const CONTEXT_BYTES_MIN: usize = 64 << 20;
/// Kernels shorter than this are timed several at a time.
const SAMPLE: Duration = Duration::from_millis(2);
/// The most repetitions in one sample, alone and when other work is done in between.
const TIMES_MAX: usize = 200;
const INTERLEAVED_TIMES_MAX: usize = 4;

/// Prompts whose contexts are attended to between two kernels with weights. For most models, even the shortest
/// contexts exceed a second-level cache.
const BETWEEN_PROMPTS: usize = 192;

/// How many neighbouring batches on either side show how much the machine was slowed.
const NEIGHBOURS: usize = 3;

/// How thorough a profile is.
struct Effort {
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

impl Effort {
    fn full() -> Self {
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

    fn quick() -> Self {
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

    fn brief() -> Self {
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

/// Takes a profile, prints it and writes it.
pub fn profile(args: &ProfileArgs) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    setup::require_folder("--output", args.output.as_deref())?;
    let threads = setup::threads(Some(args.threads))?;
    let isa = setup::isa(args.isa)?;
    let model = models::resolve(&args.model)?.open()?;
    let effort = match (args.brief, args.quick) {
        (true, _) => Effort::brief(),
        (false, true) => Effort::quick(),
        (false, false) => Effort::full(),
    };
    let engine = EngineArgs::of(&args.model, Some(args.threads), args.isa);
    let profile = measure(&model, &engine, isa, threads, &effort)?;
    let path = match &args.output {
        Some(path) => path.clone(),
        None => cached(model.config(), &profile.provenance)?,
    };
    profile.write(&path)?;
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

/// Takes a brief profile for an engine with this many threads per lane, and keeps it.
pub fn keep_brief(model: &Model, engine: &EngineArgs, threads: usize) -> anyhow::Result<()> {
    let isa = setup::isa(engine.isa)?;
    let engine = EngineArgs::of(&engine.model, Some(threads as u32), engine.isa);
    let profile = measure(model, &engine, isa, threads, &Effort::brief())?;
    Ok(profile.write(&cached(model.config(), &profile.provenance)?)?)
}

/// Where the profile that `run` uses for its forecasts is kept.
pub fn cached(config: &ModelConfig, provenance: &Provenance) -> anyhow::Result<PathBuf> {
    let folder = cache_folder()?.join("profiles");
    std::fs::create_dir_all(&folder).with_context(|| {
        format!(
            "cannot create {}: set GLINTHAWK_CACHE to a folder that can be written to",
            folder.display()
        )
    })?;
    let machine: String = provenance
        .machine
        .chars()
        .map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' })
        .collect();
    // The widths rather than the model's name: they are what kernel times depend on.
    Ok(folder.join(format!(
        "{}-{}-{}-{}-{} {}-{} {machine} {}.json",
        config.hidden,
        config.query_width(),
        config.kv_width(),
        config.feed_forward,
        config.vocab,
        provenance.instruction_set,
        provenance.threads,
        provenance.version,
    )))
}

/// This machine, and who measures when.
pub fn provenance(isa: Isa, threads: usize) -> Provenance {
    let information = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = information.lines().find_map(|line| line.strip_prefix("model name"));
    let name = name.map_or("a machine", |name| name.trim_start_matches([' ', '\t', ':']));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Provenance {
        machine: format!("{name}, {}", units::counted(cores as u64, "core")),
        instruction_set: isa.name().to_owned(),
        threads,
        date: units::date(SystemTime::now()),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

fn measure(
    model: &Model,
    engine: &EngineArgs,
    isa: Isa,
    count: usize,
    effort: &Effort,
) -> anyhow::Result<Profile> {
    let config = model.config();
    let cores = allowed_cores();
    let beside = (cores.len() / count).max(1);
    let stages = stages(model, isa, cores.len(), effort.batch_max())?;
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
                kernels(model.config(), isa, stages, threads, effort, instance)
            })
        };
        let instances: Vec<_> = (0..beside).map(instance).collect();
        let curves =
            instances.into_iter().map(|thread| thread.join().expect("kernels do not panic"));
        curves.collect::<anyhow::Result<Vec<_>>>()
    })?;
    let kernels = KernelCurves::mean(&kernels);
    let overheads = overheads::measure(engine, config, effort.round_trips)?;
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

/// Loads the weights, which all instances share.
fn stages(model: &Model, isa: Isa, cores: usize, batch_max: usize) -> anyhow::Result<StageBench> {
    let config = model.config();
    let layer_bytes = Shape::of(model.name(), config).layer_bytes() as usize;
    let layers = (WEIGHT_BYTES / layer_bytes).clamp(1, config.layers);
    let threads = Arc::new(Threads::new(cores)?);
    let mut load = LoadBar::new();
    let show = &mut |done, total| load.show(done, total);
    let stages = StageBench::new(model, 0..layers, batch_max, isa, threads, show);
    load.clear();
    Ok(stages?)
}

fn kernels(
    config: &ModelConfig,
    isa: Isa,
    mut stages: StageBench,
    threads: Arc<Threads>,
    effort: &Effort,
    instance: Instance,
) -> anyhow::Result<KernelCurves> {
    threads.pin_caller();
    let known = effort.contexts.iter().copied();
    let contexts: Vec<usize> = known.filter(|context| *context <= config.context_max).collect();
    // One bar speaks for all.
    let bar = CountBar::new("profiling", 2 + 2 * contexts.len() as u64, instance.number == 0);
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
                0 => stages.stage(Stage::Pre, rows, 1),
                1 => stages.stage(Stage::Post, rows, 1),
                2 => stages.stage(Stage::Fused, rows, 1),
                _ => stages.classify_greedy(rows),
            }
        })
    };
    let least = effort.samples_min;
    let [pre, post, fused, classify] =
        sweep(&effort.batches, effort.weights, least, INTERLEAVED_TIMES_MAX, run);
    bar.advance();
    let run = |rows: usize, _, times| mean(times, || stages.classify_sampled(rows));
    let few: Vec<usize> =
        effort.batches.iter().copied().filter(|rows| *rows <= effort.logits_max).collect();
    let [logits] = sweep(&few, effort.attention, least, TIMES_MAX, run);
    bar.advance();
    let (attention, prefill) = attention(stages, pages, &contexts, effort, &bar);
    bar.clear();
    Ok(KernelCurves { weights: [pre, post, fused, classify, logits], attention, prefill })
}

/// Decoding and prefill, as far as their contexts fit into memory.
fn attention(
    mut stages: StageBench,
    mut pages: AttentionBench,
    contexts: &[usize],
    effort: &Effort,
    bar: &CountBar,
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
                    stages.stage(Stage::Fused, rows, 1);
                    pages.attend(prompts, rows_each, context)
                })
            };
            let [points] =
                sweep(&batches, effort.attention, effort.samples_min, INTERLEAVED_TIMES_MAX, run);
            bar.advance();
            if !points.is_empty() {
                curves.push(AttentionCurve { context, points });
            }
        }
    }
    (decode, prefill)
}

fn mean(times: usize, mut kernel: impl FnMut() -> f64) -> f64 {
    (0..times).map(|_| kernel()).sum::<f64>() / times as f64
}

/// Means and spreads of kernels over batches. The batches take turns, so that a slow moment of the machine spoils
/// one sample of each instead of all samples of one. `run` runs a batch several times and returns the mean.
fn sweep<const KERNELS: usize>(
    batches: &[usize],
    time: Duration,
    samples_min: usize,
    times_max: usize,
    mut run: impl FnMut(usize, usize, usize) -> f64,
) -> [Curve; KERNELS] {
    let started = Instant::now();
    let mut all: Vec<[Vec<f64>; KERNELS]> =
        batches.iter().map(|_| std::array::from_fn(|_| Vec::new())).collect();
    let mut turns = 0;
    while !batches.is_empty() && (turns < samples_min || started.elapsed() < time) {
        for (&rows, samples) in batches.iter().zip(&mut all) {
            for (kernel, samples) in samples.iter_mut().enumerate() {
                // Run once to warm the caches and to see how many repetitions fill a sample.
                let first = run(rows, kernel, 1).max(1e-9);
                let times = ((SAMPLE.as_secs_f64() / first).ceil() as usize).clamp(1, times_max);
                samples.push(if times == 1 { first } else { run(rows, kernel, times) });
            }
        }
        turns += 1;
    }
    std::array::from_fn(|kernel| {
        let samples = all.iter_mut().map(|samples| std::mem::take(&mut samples[kernel])).collect();
        points(batches, samples)
    })
}

/// A job takes the mean time of its kernels, but the mean of a few samples is unreliable on a shared machine. So a
/// batch gets its best sample, times the average ratio of sample to best sample among neighbouring batches.
fn points(batches: &[usize], mut samples: Vec<Vec<f64>>) -> Curve {
    samples.iter_mut().for_each(|samples| samples.sort_by(f64::total_cmp));
    let over_best =
        |samples: &Vec<f64>| samples.iter().sum::<f64>() / samples.len() as f64 / samples[0];
    let point = |(index, &batch): (usize, &usize)| {
        let around = index.saturating_sub(NEIGHBOURS)..(index + NEIGHBOURS + 1).min(batches.len());
        let slowed =
            samples[around.clone()].iter().map(over_best).sum::<f64>() / around.len() as f64;
        let samples = &samples[index];
        let at = |part: f64| samples[((samples.len() - 1) as f64 * part).round() as usize];
        Point { batch, seconds: samples[0] * slowed, spread: (at(0.75) - at(0.25)) / 2.0 }
    };
    batches.iter().enumerate().map(point).collect()
}

/// Width of a table's column: `0.123±0.045`, six of them beside the rows.
const COLUMN: usize = 11;

/// Milliseconds of one layer, a line for each batch. No line is longer than 80 characters.
fn print(profile: &Profile) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let from = &profile.provenance;
    writeln!(out, "{} on {}", profile.shape.model, from.machine)?;
    writeln!(
        out,
        "{}, {}; milliseconds, mean±spread",
        from.instruction_set,
        units::counted(from.threads as u64, "thread"),
    )?;
    writeln!(out, "\nweights: pre, post and fused for one layer, greedy and logits for all")?;
    let stages = ["pre", "post", "fused", "greedy", "logits"].map(str::to_owned);
    table(&mut out, &stages, &weight_curves(profile))?;
    writeln!(out, "\nattention of one layer, by positions of each context")?;
    let contexts: Vec<String> =
        profile.attention.iter().map(|curve| curve.context.to_string()).collect();
    let curves: Vec<&Curve> = profile.attention.iter().map(|curve| &curve.points).collect();
    table(&mut out, &contexts, &curves)?;
    let around = &profile.overheads;
    let microseconds = |seconds: f64| seconds * 1e6;
    writeln!(
        out,
        "\naround the kernels: {:.1} µs a step, {:.2} µs a row",
        microseconds(around.step),
        microseconds(around.row),
    )?;
    writeln!(
        out,
        "each end of a message: {:.1} µs, and {:.2} µs a KiB",
        microseconds(around.message),
        microseconds(around.byte) * 1024.0,
    )?;
    writeln!(
        out,
        "a node that sleeps wakes in {:.1} µs, on a core that computes in {:.1} µs",
        microseconds(around.wake),
        microseconds(around.crowded),
    )?;
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

    #[test]
    fn a_slow_moment_is_shared_among_its_neighbours() {
        let batches: Vec<usize> = (1..=7).collect();
        // Each batch takes twice as long as the one before, and one sample in seven is three times too
        // slow.
        let mut samples: Vec<Vec<f64>> =
            batches.iter().map(|batch| vec![f64::from(1 << batch); 2]).collect();
        samples[3][1] *= 3.0;
        let curve = points(&batches, samples);
        // The batch in the middle has all seven as neighbours, and one of them took twice its best
        // on average.
        let expected = 16.0 * (6.0 + 2.0) / 7.0;
        assert!((curve[3].seconds - expected).abs() < 1e-9, "{}", curve[3].seconds);
        assert!((curve[0].seconds - 2.0 * (3.0 + 2.0) / 4.0).abs() < 1e-9, "{}", curve[0].seconds);
        assert_eq!(curve[3].spread, 16.0);
    }
    /// A profile whose every time is `seconds`, with this spread.
    fn flat(seconds: f64, spread: f64) -> Profile {
        let curve: Curve =
            batch_ladder(4096).into_iter().map(|batch| Point { batch, seconds, spread }).collect();
        let attention: Vec<AttentionCurve> = Effort::full()
            .contexts
            .iter()
            .map(|context| AttentionCurve { context: *context, points: curve.clone() })
            .collect();
        Profile {
            version: PROFILE_VERSION,
            provenance: provenance(Isa::Portable, 1),
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
            fused: curve.clone(),
            classify: curve.clone(),
            logits: curve.clone(),
            attention: attention.clone(),
            prefill: attention,
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
