//! Tier 1's kernels under a driver: embeds, multiplies, classifies what the node merged into a batch.

use crate::error::ClusterError;
use crate::layout::Layout;
use crate::meter::{Batch, Meter};
use crate::payload::{Activations, Payload};
use crate::report::NodeReport;
use glinthawk_compute::{Backend, ComputeError, ShardIn, ShardOut, WeightKernels};
use glinthawk_model::ModelConfig;
use glinthawk_protocol::{Compute, Launch, Sample, Stage, Task, Tier1Work};
use std::iter;
use std::ops::Range;
use std::time::Instant;

/// Where a slice stands, and how its slab is cut.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tier1Place {
    /// Its pipeline, from 0.
    pub pipeline: usize,
    /// Its strand of the pipeline, from 0.
    pub strand: usize,
    /// The slice, from 0.
    pub slice: usize,
    /// The slice embeds.
    pub first: bool,
    /// The slice classifies.
    pub last: bool,
    /// First of the strand's lanes, whose shards come here.
    pub first_lane: u32,
    /// Whether the first lane attends on this node's device.
    pub attends: bool,
    /// Whether a timeline is recorded.
    pub trace: bool,
}

impl Tier1Place {
    /// Where a strand of a layout's pipeline stands in slice `slice`.
    pub fn new(
        layout: &Layout,
        (pipeline, strand): (usize, usize),
        slice: usize,
        trace: bool,
    ) -> Self {
        Self {
            pipeline,
            strand,
            slice,
            first: slice == 0,
            last: slice + 1 == layout.slices,
            first_lane: layout.lanes_of_strand(pipeline, strand).start,
            attends: layout.tier1_attends,
            trace,
        }
    }
}

/// A slice's weights and slab.
pub(crate) struct Tier1Kernels<B: Backend> {
    backend: B,
    weights: B::Weights,
    place: Tier1Place,
    layout: Layout,
    layers: u32,
    hidden: usize,
    qkv_width: usize,
    meter: Meter<B>,
}

impl<B: Backend> Tier1Kernels<B> {
    /// Kernels of the slice at `place`.
    pub fn new(
        name: String,
        backend: B,
        weights: B::Weights,
        place: Tier1Place,
        layout: &Layout,
        config: &ModelConfig,
    ) -> Self {
        Self {
            meter: Meter::new(backend.clone(), name, 1, place.trace),
            backend,
            weights,
            place,
            layers: layout.layers(config.layers, place.slice).len() as u32,
            layout: layout.clone(),
            hidden: config.hidden,
            qkv_width: config.qkv_width(),
        }
    }

    /// Counters so far.
    pub fn report(&self) -> NodeReport {
        self.meter.report()
    }

    fn failed(&self, work: &Work<B>, source: ComputeError) -> ClusterError {
        let stage = match work.stage {
            Stage::Enter => "the slice's entry".to_owned(),
            Stage::Middle(layer) => format!("the way from layer {layer} to {}", layer + 1),
            Stage::Exit => "the slice's exit".to_owned(),
        };
        let kernel = format!("{stage}, {} rows", work.rows());
        ClusterError::kernel(self.meter.name(), kernel, source)
    }

    fn batch(&self, work: &Work<B>) -> Batch {
        Batch {
            layer: match work.stage {
                Stage::Enter => 0,
                Stage::Middle(layer) => layer + 1,
                Stage::Exit => self.layers,
            },
            flight: work.tasks[0].launch.step.shard.flight,
            shards: work.tasks.len(),
            rows: work.rows(),
            waited: work.tasks.iter().map(|task| task.payload.since.elapsed()).sum(),
        }
    }

    fn slab(&self, launch: &Launch) -> Range<usize> {
        let start = self.layout.slab_start(launch.step.shard, self.place.first_lane);
        start..start + launch.rows.len()
    }

    /// Has a stage computed.
    fn submit(&mut self, work: &mut Work<B>) -> Result<(), ComputeError> {
        let slabs: Vec<Range<usize>> =
            work.tasks.iter().map(|task| self.slab(&task.launch)).collect();
        if work.stage == Stage::Enter {
            self.enter(work, &slabs)?;
            return self.pre_attention(work, &slabs, &[]);
        }
        let inbound = work.tasks.iter_mut().map(|task| task.payload.take(&self.backend));
        let inbound = inbound.collect::<Result<Vec<B::Buffer>, _>>()?;
        let ends = work.stage == Stage::Exit && self.place.last;
        let mut back: Vec<ShardIn<'_, B::Buffer>> = Vec::new();
        for ((task, slab), attended) in work.tasks.iter().zip(&slabs).zip(&inbound) {
            let pieces = match ends {
                true => rows_asked_for(&task.launch),
                false => iter::once(0..slab.len()).collect(),
            };
            back.extend(pieces.into_iter().map(|Range { start: first, end }| ShardIn {
                slab: slab.start + first..slab.start + end,
                attended,
                first,
            }));
        }
        match work.stage {
            Stage::Exit => {
                if !back.is_empty() {
                    self.weights.post_attention(self.layers as usize - 1, &back)?;
                }
                match self.place.last {
                    true => self.classify(work, &slabs)?,
                    false => self.read_residuals(work, &slabs)?,
                }
            }
            _ => self.pre_attention(work, &slabs, &back)?,
        }
        drop(back);
        inbound.into_iter().for_each(|buffer| self.backend.give(buffer));
        Ok(())
    }

    fn enter(&mut self, work: &mut Work<B>, slabs: &[Range<usize>]) -> Result<(), ComputeError> {
        for (Task { launch, payload, .. }, slab) in work.tasks.iter_mut().zip(slabs) {
            if self.place.first {
                let tokens: Vec<u32> = launch.rows.iter().map(|row| row.token).collect();
                self.weights.embed(slab.clone(), &tokens)?;
            } else {
                let residual = payload.take(&self.backend)?;
                self.weights.put_residual(slab.clone(), &residual)?;
                self.backend.give(residual);
            }
        }
        Ok(())
    }

    /// Pre-attention of the next layer, after post-attention of the one that rows come back from.
    fn pre_attention(
        &mut self,
        work: &mut Work<B>,
        slabs: &[Range<usize>],
        back: &[ShardIn<'_, B::Buffer>],
    ) -> Result<(), ComputeError> {
        let positions: Vec<Vec<u32>> = work
            .tasks
            .iter()
            .map(|task| task.launch.rows.iter().map(|row| row.position).collect())
            .collect();
        let buffers = slabs.iter().map(|slab| self.backend.take(slab.len() * self.qkv_width * 2));
        let mut buffers = buffers.collect::<Result<Vec<B::Buffer>, _>>()?;
        let mut out: Vec<ShardOut<'_, B::Buffer>> = slabs
            .iter()
            .zip(&positions)
            .zip(&mut buffers)
            .map(|((slab, positions), qkv)| ShardOut { slab: slab.clone(), positions, qkv })
            .collect();
        match work.stage {
            Stage::Middle(layer) => self.weights.middle(layer as usize, back, &mut out)?,
            _ => self.weights.pre_attention(0, &mut out)?,
        }
        for (task, qkv) in work.tasks.iter_mut().zip(buffers) {
            let is_first = task.launch.step.shard.lane == self.place.first_lane;
            task.payload.activations = match self.place.attends && is_first {
                true => Activations::Device(qkv),
                false => Activations::Host(self.backend.to_host(qkv)?),
            };
        }
        Ok(())
    }

    fn read_residuals(
        &mut self,
        work: &mut Work<B>,
        slabs: &[Range<usize>],
    ) -> Result<(), ComputeError> {
        for (task, slab) in work.tasks.iter_mut().zip(slabs) {
            let mut residual = self.backend.take(slab.len() * self.hidden * 4)?;
            self.weights.get_residual(slab.clone(), &mut residual)?;
            task.payload.activations = Activations::Host(self.backend.to_host(residual)?);
        }
        Ok(())
    }

    /// A token for every row that ends in one.
    fn classify(&mut self, work: &Work<B>, slabs: &[Range<usize>]) -> Result<(), ComputeError> {
        let (mut rows, mut samples) = (Vec::new(), Vec::<Sample>::new());
        for (Task { launch, .. }, slab) in work.tasks.iter().zip(slabs) {
            rows.extend(launch.samples.iter().map(|sample| slab.start + sample.row as usize));
            samples.extend_from_slice(&launch.samples);
        }
        self.weights.classify(&rows, &samples)
    }
}

/// The rows of a step that end in a token, in pieces. After the last attention, the others are not needed any more. A
/// few between two of them may come along: a piece costs as much as some rows.
fn rows_asked_for(launch: &Launch) -> Vec<Range<usize>> {
    const ROWS_BETWEEN_MAX: usize = 16;
    let mut rows: Vec<usize> = launch.samples.iter().map(|sample| sample.row as usize).collect();
    // They are in order, unless a peer is not what it should be.
    rows.sort_unstable();
    let mut pieces: Vec<Range<usize>> = Vec::new();
    for row in rows {
        match pieces.last_mut() {
            Some(piece) if row <= piece.end + ROWS_BETWEEN_MAX => piece.end = row + 1,
            _ => pieces.push(row..row + 1),
        }
    }
    pieces
}

type Work<B> = Tier1Work<Payload<<B as Backend>::Buffer>>;

impl<B: Backend> Compute<Work<B>> for Tier1Kernels<B> {
    type Error = ClusterError;

    fn start(&mut self, work: &mut Work<B>) -> Result<(), ClusterError> {
        let batch = self.batch(work);
        let begun = self.backend.mark().map_err(|error| self.failed(work, error))?;
        let submitted = self.submit(work).and_then(|()| self.meter.submitted(begun, batch));
        submitted.map_err(|error| self.failed(work, error))
    }

    fn finish(&mut self, work: &mut Work<B>) -> Result<(), ClusterError> {
        if work.stage == Stage::Exit && self.place.last {
            let tokens = self.weights.tokens().map_err(|error| self.failed(work, error))?;
            let mut tokens = tokens.into_iter();
            for task in &mut work.tasks {
                task.tokens = Some(tokens.by_ref().take(task.launch.samples.len()).collect());
            }
        }
        self.meter.settle().map_err(|error| self.failed(work, error))?;
        work.tasks.iter_mut().for_each(|task| task.payload.since = Instant::now());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use glinthawk_protocol::{Row, ShardId, StepId};

    #[test]
    fn rows_that_end_in_a_token_are_in_pieces() {
        let pieces = |rows: &[u32]| {
            let row = Row { slot: 0, position: 0, page: 0, token: 0 };
            rows_asked_for(&Launch {
                step: StepId { shard: ShardId { flight: 0, lane: 0 }, epoch: 0 },
                rows: vec![row; 100],
                shared: Vec::new(),
                samples: rows.iter().map(|&row| Sample { row, ..Sample::default() }).collect(),
            })
        };
        assert!(pieces(&[]).is_empty());
        assert_eq!(pieces(&[0, 1, 2, 99]), [0..3, 99..100]);
        assert_eq!(pieces(&[3, 20, 38]), [3..21, 38..39], "16 rows between two come along");
        assert_eq!(pieces(&[50, 3, 50]), [3..4, 50..51], "each row once, in any order");
    }
}
