//! A Tier-1 node with its kernels: merges what is ready, computes, says what goes where.

use crate::error::ClusterError;
use crate::layout::Layout;
use crate::payload::Payload;
use crate::report::NodeReport;
use crate::span::Tracer;
use glinthawk_compute::{Backend, ComputeError, ShardIn, ShardOut, WeightKernels};
use glinthawk_flight::Buffer;
use glinthawk_model::ModelConfig;
use glinthawk_protocol::{
    Attend, Attended, Generated, Home, Launch, Sample, Stage, StepId, Tier1Action, Tier1Node,
    Tier1Work,
};
use std::ops::Range;
use std::time::Instant;

/// What leaves a Tier-1 node.
pub enum Outgoing<B> {
    /// To the attention worker of the shard's lane, with q, k, v.
    Attend(Attend, Payload<B>),
    /// To the next slice, with the residual.
    Hop(Launch, Buffer),
    /// To the dispatcher.
    Home(Home),
}

/// Where a Tier-1 worker's slice stands, and how its slab is cut.
#[derive(Clone, Copy, Debug)]
pub struct Tier1Place {
    /// The slice, from 0.
    pub slice: usize,
    /// The slice embeds.
    pub first: bool,
    /// The slice classifies.
    pub last: bool,
    /// First of the lanes whose shards come here.
    pub first_lane: u32,
    /// How many lanes those are.
    pub lanes: u32,
    /// How many of them, from the first, attend on this node's device.
    pub lanes_here: u32,
    /// Rows of a shard at most.
    pub rows_per_lane: u32,
    /// Whether a timeline is recorded.
    pub trace: bool,
}

impl Tier1Place {
    /// Where slice `slice` of a layout stands.
    pub fn new(layout: &Layout, slice: usize, trace: bool) -> Self {
        Self {
            slice,
            first: slice == 0,
            last: slice + 1 == layout.slices,
            first_lane: 0,
            lanes: layout.lanes() as u32,
            lanes_here: layout.local_lanes as u32,
            rows_per_lane: layout.batch,
            trace,
        }
    }
}

/// What a Tier-1 worker keeps for a step while it is in the slice.
pub(crate) struct Visit<B> {
    /// What arrived last: the residual of a hop, or attention output.
    inbound: Option<B>,
    /// When its current wait began.
    arrived: Instant,
}

/// A batch that the device was given.
struct Submitted<B> {
    stage: Stage,
    started: Instant,
    rows: usize,
    arrivals: Vec<Instant>,
    /// What becomes of each step.
    outputs: Vec<(StepId, Output<B>)>,
}

enum Output<B> {
    Qkv(Payload<B>),
    Residual(Buffer),
    /// This many tokens of the batch's.
    Tokens(usize),
}

/// The node's state machine, its weights and slab.
pub struct Tier1Worker<B: Backend> {
    node: Tier1Node<Visit<B::Buffer>>,
    backend: B,
    kernels: B::Weights,
    submitted: Option<Submitted<B::Buffer>>,
    place: Tier1Place,
    hidden: usize,
    qkv_width: usize,
    report: NodeReport,
    tracer: Tracer,
}

impl<B: Backend> Tier1Worker<B> {
    /// A worker for the slice at `place`.
    pub fn new(
        node: Tier1Node<Visit<B::Buffer>>,
        backend: B,
        kernels: B::Weights,
        place: Tier1Place,
        config: &ModelConfig,
    ) -> Self {
        Self {
            node,
            backend,
            kernels,
            submitted: None,
            place,
            hidden: config.hidden,
            qkv_width: config.qkv_width(),
            report: NodeReport::new(format!("tier1-{}", place.slice), 1),
            tracer: Tracer::new(place.trace),
        }
    }

    /// Takes in a shard that arrived at the given time: from the dispatcher, or from the previous
    /// slice with its residual, (rows, hidden) f32. An older step of it is abandoned.
    pub fn arrive(
        &mut self,
        launch: Launch,
        residual: Option<Buffer>,
        arrived: Instant,
    ) -> Result<(), ClusterError> {
        assert_eq!(residual.is_none(), self.place.first, "only the first slice takes tokens");
        let inbound = residual.map(|residual| self.backend.to_device(residual)).transpose();
        let inbound = inbound.map_err(|error| self.failed("a residual's arrival", error))?;
        self.node.arrive(launch, Visit { inbound, arrived });
        Ok(())
    }

    /// Takes a shard's attention output, (rows, query_width) bf16, that arrived at the given time.
    pub fn attended(
        &mut self,
        attended: Attended,
        output: Payload<B::Buffer>,
        arrived: Instant,
    ) -> Result<(), ClusterError> {
        let output = output.on_device(&self.backend);
        let output = output.map_err(|error| self.failed("attention output's arrival", error))?;
        match self.node.attended(&attended) {
            Some(visit) => *visit = Visit { inbound: Some(output), arrived },
            None => self.backend.give(output), // of an abandoned step
        }
        Ok(())
    }

    /// Forgets the steps of a lane whose contexts are gone.
    pub fn lose_lane(&mut self, lane: u32) {
        self.node.lose_lane(lane);
    }

    /// Gives the device the next batch that is ready; `false` if none is, or if it has one.
    pub fn start(&mut self) -> Result<bool, ClusterError> {
        let Some(work) = self.node.start() else { return Ok(false) };
        let started = Instant::now();
        let rows = work.steps.iter().map(|step| self.node.rows(*step).len()).sum();
        let arrivals = work.steps.iter().map(|step| self.node.payload(*step).arrived).collect();
        let outputs = self.submit(&work).map_err(|error| self.failed(&name(work.stage), error))?;
        let outputs = work.steps.into_iter().zip(outputs).collect();
        let stage = work.stage;
        self.submitted = Some(Submitted { stage, started, rows, arrivals, outputs });
        Ok(true)
    }

    /// If the device is done with its batch, appends what is to be sent; `false` if it is not, or has
    /// none.
    pub fn finish(
        &mut self,
        outgoing: &mut Vec<Outgoing<B::Buffer>>,
    ) -> Result<bool, ClusterError> {
        let Some(Submitted { stage, .. }) = self.submitted else { return Ok(false) };
        let failed = |error| self.failed(&name(stage), error);
        if !self.backend.is_done().map_err(failed)? {
            return Ok(false);
        }
        let tokens = self.kernels.tokens();
        let mut tokens = tokens.map_err(|error| self.failed(&name(stage), error))?.into_iter();
        let done = self.submitted.take().expect("looked at above");
        self.report.record(done.rows, done.started, done.arrivals.into_iter());
        let layer = match stage {
            Stage::Enter => 0,
            Stage::Middle(layer) => layer + 1,
            Stage::Exit => self.node.layers(),
        };
        let (flight, steps) = (done.outputs[0].0.shard.flight, done.outputs.len());
        self.tracer.record(done.started, layer, flight, steps, done.rows);
        let mut actions = Vec::new();
        self.node.computed(&mut actions);
        let mut actions = actions.into_iter().peekable();
        for (step, output) in done.outputs {
            let own: Vec<Generated> = match output {
                Output::Tokens(count) => tokens.by_ref().take(count).collect(),
                _ => Vec::new(),
            };
            // A step that was abandoned in the meantime has no action.
            let action = actions.next_if(|action| match action {
                Tier1Action::Attend(attend) => attend.step == step,
                Tier1Action::Leave(launch, _) => launch.step == step,
            });
            match (action, output) {
                (Some(Tier1Action::Attend(attend)), Output::Qkv(qkv)) => {
                    outgoing.push(Outgoing::Attend(attend, qkv));
                }
                (Some(Tier1Action::Leave(launch, _)), Output::Residual(residual)) => {
                    outgoing.push(Outgoing::Hop(launch, residual));
                }
                (Some(Tier1Action::Leave(launch, _)), Output::Tokens(_)) => {
                    outgoing.push(Outgoing::Home(Home { step: launch.step, tokens: own }));
                }
                (None, Output::Qkv(Payload::Device(qkv))) => self.backend.give(qkv),
                (None, _) => {}
                (Some(_), _) => unreachable!("a stage's output fits what follows the stage"),
            }
        }
        Ok(true)
    }

    /// Counters so far.
    pub fn report(&self) -> NodeReport {
        NodeReport { spans: self.tracer.spans(), ..self.report.clone() }
    }

    fn failed(&self, kernel: &str, source: ComputeError) -> ClusterError {
        let (node, kernel) = (self.report.name.clone(), kernel.to_owned());
        ClusterError::Kernel { node, kernel, source: Box::new(source) }
    }

    fn slab(&self, step: StepId) -> Range<usize> {
        let lane = step.shard.lane - self.place.first_lane;
        let start = (step.shard.flight * self.place.lanes + lane) * self.place.rows_per_lane;
        let start = start as usize;
        start..start + self.node.rows(step).len()
    }

    /// What arrived last for a step.
    fn inbound(&mut self, step: StepId) -> B::Buffer {
        self.node.payload(step).inbound.take().expect("a step is ready when its payload is here")
    }

    /// Has a stage computed; returns what becomes of each step.
    fn submit(&mut self, work: &Tier1Work) -> Result<Vec<Output<B::Buffer>>, ComputeError> {
        if work.stage == Stage::Enter {
            self.enter(work)?;
        }
        let buffers: Vec<B::Buffer> = match work.stage {
            Stage::Enter => Vec::new(),
            _ => work.steps.iter().map(|step| self.inbound(*step)).collect(),
        };
        let slabs: Vec<Range<usize>> = work.steps.iter().map(|step| self.slab(*step)).collect();
        let back: Vec<ShardIn<'_, B::Buffer>> = slabs
            .iter()
            .zip(&buffers)
            .map(|(slab, attended)| ShardIn { slab: slab.clone(), attended })
            .collect();
        let outputs = match work.stage {
            Stage::Exit => {
                self.kernels.post_attention(self.node.layers() as usize - 1, &back)?;
                if self.place.last { self.classify(work)? } else { self.give_residuals(work)? }
            }
            _ => self.pre_attention(work, &slabs, &back)?,
        };
        drop(back);
        buffers.into_iter().for_each(|buffer| self.backend.give(buffer));
        Ok(outputs)
    }

    fn enter(&mut self, work: &Tier1Work) -> Result<(), ComputeError> {
        for &step in &work.steps {
            let slab = self.slab(step);
            if self.place.first {
                let tokens: Vec<u32> = self.node.rows(step).iter().map(|row| row.token).collect();
                self.kernels.embed(slab, &tokens)?;
            } else {
                let residual = self.inbound(step);
                self.kernels.put_residual(slab, &residual)?;
                self.backend.give(residual);
            }
        }
        Ok(())
    }

    /// Pre-attention of the next layer, after post-attention of the one that rows come back from.
    fn pre_attention(
        &mut self,
        work: &Tier1Work,
        slabs: &[Range<usize>],
        back: &[ShardIn<'_, B::Buffer>],
    ) -> Result<Vec<Output<B::Buffer>>, ComputeError> {
        let positions: Vec<Vec<u32>> = work
            .steps
            .iter()
            .map(|step| self.node.rows(*step).iter().map(|row| row.position).collect())
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
            Stage::Middle(layer) => self.kernels.middle(layer as usize, back, &mut out)?,
            _ => self.kernels.pre_attention(0, &mut out)?,
        }
        let here = |step: &StepId| step.shard.lane - self.place.first_lane < self.place.lanes_here;
        let output = |(step, qkv)| {
            Ok(Output::Qkv(match here(step) {
                true => Payload::Device(qkv),
                false => Payload::Host(self.backend.to_host(qkv)?),
            }))
        };
        work.steps.iter().zip(buffers).map(output).collect()
    }

    fn give_residuals(&mut self, work: &Tier1Work) -> Result<Vec<Output<B::Buffer>>, ComputeError> {
        let mut outputs = Vec::new();
        for &step in &work.steps {
            let slab = self.slab(step);
            let mut residual = self.backend.take(slab.len() * self.hidden * 4)?;
            self.kernels.get_residual(slab, &mut residual)?;
            outputs.push(Output::Residual(self.backend.to_host(residual)?));
        }
        Ok(outputs)
    }

    /// A token for every row that ends in one.
    fn classify(&mut self, work: &Tier1Work) -> Result<Vec<Output<B::Buffer>>, ComputeError> {
        let (mut rows, mut samples) = (Vec::new(), Vec::<Sample>::new());
        let mut outputs = Vec::new();
        for &step in &work.steps {
            let (start, of_step) = (self.slab(step).start, self.node.samples(step));
            rows.extend(of_step.iter().map(|sample| start + sample.row as usize));
            samples.extend_from_slice(of_step);
            outputs.push(Output::Tokens(of_step.len()));
        }
        self.kernels.classify(&rows, &samples)?;
        Ok(outputs)
    }
}

/// What a stage is called where it fails.
fn name(stage: Stage) -> String {
    match stage {
        Stage::Enter => "the slice's entry".to_owned(),
        Stage::Middle(layer) => format!("the way from layer {layer} to {}", layer + 1),
        Stage::Exit => "the slice's exit".to_owned(),
    }
}
