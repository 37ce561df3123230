//! Times every stage of a layer on a backend, over batches and contexts.

use crate::error::LaunchError;
use crate::sweep::{Turns, sweep};
use glinthawk_compute::bench::{
    AttentionBench, StageBench, TimedStage, copy_to_device, copy_to_host, timed,
};
use glinthawk_compute::{Backend, ComputeError};
use glinthawk_model::ModelConfig;
use glinthawk_plan::profile::{AttentionCurve, Curve, Point};
use std::time::Duration;

/// The most repetitions in one sample, alone and when other work is done in between.
const TIMES_MAX: usize = 200;
const INTERLEAVED_TIMES_MAX: usize = 4;

/// Prompts whose contexts are attended to between two kernels with weights. For most models, even the shortest
/// contexts exceed a second-level cache.
const BETWEEN_PROMPTS: usize = 192;

/// How the kernels of a backend are timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// One by one. In between, other work goes through the caches, as it does in a run.
    Alone,
    /// Many in a row, as a device is given them.
    Queued,
}

/// What is timed, and how long.
pub(crate) struct Extent {
    /// Batches, ascending.
    pub batches: Vec<usize>,
    /// Batches of attention, which is nearly proportional to them.
    pub attention_batches: Vec<usize>,
    /// Contexts that rows attend to, in positions, ascending.
    pub contexts: Vec<usize>,
    /// Largest batch for which logits are timed; more rows take proportionally longer.
    pub logits_max: usize,
    /// Time for all batches of the kernels with weights together.
    pub weights: Duration,
    /// Time for all batches of attention at one context length.
    pub attention: Duration,
    /// The fewest samples of each batch, even if time runs out.
    pub samples_min: usize,
}

impl Extent {
    /// Parts that are timed one after the other.
    pub fn parts(&self) -> u64 {
        3 + 2 * self.contexts.len() as u64
    }
}

/// Kernels that are timed.
pub(crate) struct KernelBench<B: Backend> {
    pub backend: B,
    pub stages: StageBench<B>,
    pub pages: AttentionBench<B>,
    pub pace: Pace,
    /// Rows of a batch in prefill: a prompt is timed among as many as have these together, because threads share them
    /// better than one.
    pub prefill_rows: usize,
}

/// The seconds of all stages.
pub(crate) struct KernelCurves {
    /// Pre, post, fused, greedy and logits.
    pub weights: [Curve; 5],
    /// To the host and to the device; empty if nothing is copied.
    pub copies: [Curve; 2],
    pub attention: Vec<AttentionCurve>,
    pub prefill: Vec<AttentionCurve>,
}

impl KernelCurves {
    /// The average time of kernels that ran side by side.
    pub fn mean(instances: &[Self]) -> Self {
        let attention = |of: fn(&Self) -> &Vec<AttentionCurve>| {
            let curve = |(index, first): (usize, &AttentionCurve)| AttentionCurve {
                context: first.context,
                points: mean_curve(instances.iter().map(|curves| &of(curves)[index].points)),
            };
            of(&instances[0]).iter().enumerate().map(curve).collect()
        };
        let mean = |of: &dyn Fn(&Self) -> &Curve| {
            mean_curve(instances.iter().map(of).collect::<Vec<_>>().into_iter())
        };
        Self {
            weights: std::array::from_fn(|stage| mean(&|curves| &curves.weights[stage])),
            copies: std::array::from_fn(|way| mean(&|curves| &curves.copies[way])),
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
    for point in &mut mean {
        (point.seconds, point.spread) = (rounded(point.seconds), rounded(point.spread));
    }
    mean
}

/// With five digits: no time is known better.
fn rounded(seconds: f64) -> f64 {
    format!("{seconds:.4e}").parse().expect("digits are a number")
}

impl<B: Backend> KernelBench<B> {
    /// Times everything; `advance` hears of each part that is done.
    pub fn curves(
        mut self,
        config: &ModelConfig,
        extent: &Extent,
        advance: &mut dyn FnMut(),
    ) -> Result<KernelCurves, LaunchError> {
        let weights = self.weights(extent)?;
        advance();
        let logits = self.logits(extent)?;
        advance();
        let copies = self.copies(config, extent)?;
        advance();
        let (mut decoding, mut prefill) = (Vec::new(), Vec::new());
        for &context in &extent.contexts {
            for (prefills, curves) in [(false, &mut decoding), (true, &mut prefill)] {
                let points = self.attention(extent, context, prefills)?;
                advance();
                if !points.is_empty() {
                    curves.push(AttentionCurve { context, points });
                }
            }
        }
        let [pre, post, fused, classify] = weights;
        let weights = [pre, post, fused, classify, logits];
        Ok(KernelCurves { weights, copies, attention: decoding, prefill })
    }

    /// The mean seconds of several runs of a kernel.
    fn mean(
        &mut self,
        times: usize,
        before: impl Fn(&mut Self) -> Result<(), ComputeError>,
        kernel: impl Fn(&mut Self) -> Result<(), ComputeError>,
    ) -> Result<f64, ComputeError> {
        let backend = self.backend.clone();
        let mut seconds = 0.0;
        match self.pace {
            Pace::Queued => {
                let mut runs = || (0..times).try_for_each(|_| kernel(self));
                seconds = timed(&backend, &mut runs)?.0;
            }
            Pace::Alone => {
                for _ in 0..times {
                    before(self)?;
                    seconds += timed(&backend, || kernel(self))?.0;
                }
            }
        }
        Ok(seconds / times as f64)
    }

    fn turns(&self, extent: &Extent, time: Duration, interleaved: bool) -> Turns {
        let (samples_min, queued) = (extent.samples_min, self.pace != Pace::Alone);
        let times_max = if interleaved && !queued { INTERLEAVED_TIMES_MAX } else { TIMES_MAX };
        Turns { time, samples_min, times_max, warm: queued }
    }

    fn weights(&mut self, extent: &Extent) -> Result<[Curve; 4], ComputeError> {
        let held = |context: &usize| self.pages.prompts_held(*context) >= BETWEEN_PROMPTS;
        let between = extent.contexts.iter().copied().filter(held).min();
        if let Some(context) = between {
            self.pages.turn_to(BETWEEN_PROMPTS, 1, context)?;
        }
        // In between, contexts go through the caches, as they do in a run.
        let before = |this: &mut Self| between.map_or(Ok(()), |_| this.pages.attend());
        sweep(&extent.batches, self.turns(extent, extent.weights, true), |rows, kernel, times| {
            self.mean(times, before, |this| match kernel {
                0 => this.stages.stage(TimedStage::Pre, rows),
                1 => this.stages.stage(TimedStage::Post, rows),
                2 => this.stages.stage(TimedStage::Fused, rows),
                _ => this.stages.classify(rows, false),
            })
        })
    }

    fn logits(&mut self, extent: &Extent) -> Result<Curve, ComputeError> {
        let few = extent.batches.iter().copied().filter(|rows| *rows <= extent.logits_max);
        let few: Vec<usize> = few.collect();
        let turns = self.turns(extent, extent.attention, false);
        let [logits] = sweep(&few, turns, |rows, _, times| {
            self.mean(times, |_| Ok(()), |this| this.stages.classify(rows, true))
        })?;
        Ok(logits)
    }

    /// q, k, v on their way to the host, attention's output on its way back.
    fn copies(
        &mut self,
        config: &ModelConfig,
        extent: &Extent,
    ) -> Result<[Curve; 2], ComputeError> {
        if self.pace == Pace::Alone {
            return Ok([Vec::new(), Vec::new()]);
        }
        let turns = self.turns(extent, extent.attention, false);
        let backend = &self.backend;
        sweep(&extent.batches, turns, |rows, way, times| {
            let copy = || match way {
                0 => copy_to_host(backend, 2 * rows * config.qkv_width()),
                _ => copy_to_device(backend, 2 * rows * config.query_width()),
            };
            let all = (0..times).map(|_| copy()).sum::<Result<f64, ComputeError>>();
            Ok(all? / times as f64)
        })
    }

    /// Decoding or prefill at one context length, as far as it fits into memory.
    fn attention(
        &mut self,
        extent: &Extent,
        context: usize,
        prefills: bool,
    ) -> Result<Curve, ComputeError> {
        let (together, held) = (self.prefill_rows, self.pages.prompts_held(context));
        let prompts_of =
            |rows: usize| if prefills { (together / rows).min(held).max(1) } else { rows };
        let rows_each = |rows: usize| if prefills { rows } else { 1 };
        let fits = |rows: &usize| rows_each(*rows) <= context && prompts_of(*rows) <= held;
        let batches: Vec<usize> = extent.attention_batches.iter().copied().filter(fits).collect();
        // In between, weights go through the caches, as they do in a run.
        let turns = self.turns(extent, extent.attention, true);
        let [points] = sweep(&batches, turns, |rows, _, times| {
            let prompts = prompts_of(rows);
            self.pages.turn_to(prompts, rows_each(rows), context)?;
            let before = |this: &mut Self| this.stages.stage(TimedStage::Fused, rows);
            let seconds = self.mean(times, before, |this| this.pages.attend())?;
            Ok::<f64, ComputeError>(seconds / if prefills { prompts as f64 } else { 1.0 })
        })?;
        Ok(points)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use glinthawk_compute::{ContextType, CpuBackend, CpuContext, Isa, Threads};
    use glinthawk_flight::Pool;
    use glinthawk_model::Model;
    use std::sync::Arc;

    /// Batches and contexts of what is timed at a pace.
    fn check(pace: Pace, copied: &[usize]) {
        let model = Model::dummy("tiny").expect("a known shape");
        let config = model.config();
        let (threads, pool) = (Arc::new(Threads::new(1).expect("one")), Arc::new(Pool::new(4)));
        let backend = CpuBackend { isa: Isa::detect(), threads, pool };
        let extent = Extent {
            batches: vec![1, 4, 8],
            attention_batches: vec![1, 8, 24],
            contexts: vec![16, 64],
            logits_max: 4,
            weights: Duration::ZERO,
            attention: Duration::ZERO,
            samples_min: 1,
        };
        let stages = StageBench::new(&backend, &model, 0..2, 24, &mut |_, _| ());
        let bytes = 24 * CpuContext::bytes(config, 1, ContextType::Bf16, 64);
        let bench = KernelBench {
            stages: stages.expect("loaded"),
            pages: AttentionBench::new(&backend, config, bytes, 64, 24).expect("it fits"),
            backend,
            pace,
            prefill_rows: 24,
        };
        let mut parts = 0;
        let curves = bench.curves(config, &extent, &mut || parts += 1).expect("timed");
        assert_eq!(parts, extent.parts());
        let batches = |curve: &Curve| curve.iter().map(|point| point.batch).collect::<Vec<_>>();
        let weights: Vec<Vec<usize>> = curves.weights.iter().map(batches).collect();
        assert_eq!(weights, [&[1, 4, 8][..], &[1, 4, 8], &[1, 4, 8], &[1, 4, 8], &[1, 4]]);
        assert_eq!(curves.copies.each_ref().map(batches), [copied, copied]);
        let attended = |curves: &[AttentionCurve]| -> Vec<(usize, Vec<usize>)> {
            curves.iter().map(|curve| (curve.context, batches(&curve.points))).collect()
        };
        let all = vec![1, 8, 24];
        assert_eq!(attended(&curves.attention), [(16, all.clone()), (64, all.clone())]);
        // A chunk is at most as long as its context.
        assert_eq!(attended(&curves.prefill), [(16, vec![1, 8]), (64, all)]);
        let seconds = curves.weights.iter().flatten().map(|point| point.seconds);
        assert!(seconds.chain([1.0]).all(|seconds| seconds > 0.0));
    }

    #[test]
    fn every_stage_is_timed_one_by_one_and_in_a_row() {
        check(Pace::Alone, &[]);
        check(Pace::Queued, &[1, 4, 8]);
    }
}
