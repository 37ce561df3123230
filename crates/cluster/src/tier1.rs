//! A Tier-1 node with its kernels: merges what is ready, computes, says what goes where.

use crate::layout::Layout;
use crate::report::NodeReport;
use crate::span::Tracer;
use glinthawk_compute::sample::sample;
use glinthawk_compute::{ShardIn, ShardOut, Threads, WeightKernels};
use glinthawk_flight::{Buffer, Pool};
use glinthawk_model::ModelConfig;
use glinthawk_protocol::{
    Attend, Attended, Generated, Home, Launch, Sample, Stage, StepId, Tier1Action, Tier1Node,
    Tier1Work,
};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Rows whose logits are held at once, to bound their memory for any batch.
const CLASSIFY_ROWS_MAX: usize = 64;

/// What leaves a Tier-1 node.
pub enum Outgoing {
    /// To the attention worker of the shard's lane, with q, k, v.
    Attend(Attend, Buffer),
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
            lanes: layout.lanes() as u32,
            first_lane: 0,
            rows_per_lane: layout.batch,
            trace,
        }
    }
}

/// What a Tier-1 worker keeps for a step while it is in the slice.
pub(crate) struct Visit {
    /// What arrived last: the residual of a hop, or attention output.
    inbound: Option<Buffer>,
    /// What goes next: q, k, v, or the residual of a hop.
    outbound: Option<Buffer>,
    tokens: Vec<Generated>,
    /// When its current wait began.
    arrived: Instant,
}

/// The node's state machine, its weights and slab.
pub struct Tier1Worker<W> {
    node: Tier1Node<Visit>,
    kernels: W,
    place: Tier1Place,
    hidden: usize,
    qkv_width: usize,
    vocab: usize,
    logits: Vec<f32>,
    pool: Arc<Pool>,
    threads: Arc<Threads>,
    report: NodeReport,
    tracer: Tracer,
}

impl<W: WeightKernels<Buffer = Buffer>> Tier1Worker<W> {
    /// A worker for the slice at `place`.
    pub fn new(
        node: Tier1Node<Visit>,
        kernels: W,
        place: Tier1Place,
        config: &ModelConfig,
        pool: Arc<Pool>,
        threads: Arc<Threads>,
    ) -> Self {
        Self {
            node,
            kernels,
            place,
            hidden: config.hidden,
            qkv_width: config.qkv_width(),
            vocab: config.vocab,
            logits: Vec::new(),
            pool,
            threads,
            report: NodeReport::new(format!("tier1-{}", place.slice), 1),
            tracer: Tracer::new(place.trace),
        }
    }

    /// Takes in a shard that arrived at the given time: from the dispatcher, or from the previous
    /// slice with its residual, (rows, hidden) f32. An older step of it is abandoned.
    pub fn arrive(&mut self, launch: Launch, residual: Option<Buffer>, arrived: Instant) {
        assert_eq!(residual.is_none(), self.place.first, "only the first slice takes tokens");
        let visit = Visit { inbound: residual, outbound: None, tokens: Vec::new(), arrived };
        self.node.arrive(launch, visit);
    }

    /// Takes a shard's attention output, (rows, query_width) bf16, that arrived at the given time.
    pub fn attended(&mut self, attended: Attended, output: Buffer, arrived: Instant) {
        match self.node.attended(&attended) {
            Some(visit) => (visit.inbound, visit.arrived) = (Some(output), arrived),
            None => self.pool.give(output), // of an abandoned step
        }
    }

    /// Forgets the steps of a lane whose contexts are gone.
    pub fn lose_lane(&mut self, lane: u32) {
        self.node.lose_lane(lane);
    }

    /// Computes the next batch that is ready and appends what is to be sent; `false` if none is.
    pub fn compute(&mut self, outgoing: &mut Vec<Outgoing>) -> bool {
        let Some(work) = self.node.start() else { return false };
        let started = Instant::now();
        match work.stage {
            Stage::Enter => {
                self.enter(&work);
                self.pre_attention(0, &work);
            }
            Stage::Middle(layer) => {
                self.post_attention(layer, &work);
                self.pre_attention(layer + 1, &work);
            }
            Stage::Exit => {
                self.post_attention(self.node.layers() - 1, &work);
                if self.place.last { self.classify(&work) } else { self.give_residuals(&work) }
            }
        }
        let rows = work.steps.iter().map(|step| self.node.rows(*step).len()).sum();
        let arrivals = work.steps.iter().map(|step| self.node.payload(*step).arrived);
        self.report.record(rows, started, arrivals);
        let layer = match work.stage {
            Stage::Enter => 0,
            Stage::Middle(layer) => layer + 1,
            Stage::Exit => self.node.layers(),
        };
        let flight = work.steps[0].shard.flight;
        self.tracer.record(started, layer, flight, work.steps.len(), rows);
        let mut actions = Vec::new();
        self.node.computed(&mut actions);
        outgoing.extend(actions.into_iter().map(|action| self.send(action)));
        true
    }

    /// Counters so far.
    pub fn report(&self) -> NodeReport {
        NodeReport { spans: self.tracer.spans(), ..self.report.clone() }
    }

    fn slab(&self, step: StepId) -> Range<usize> {
        let lane = step.shard.lane - self.place.first_lane;
        let start = (step.shard.flight * self.place.lanes + lane) * self.place.rows_per_lane;
        let start = start as usize;
        start..start + self.node.rows(step).len()
    }

    /// What arrived last for a step.
    fn inbound(&mut self, step: StepId) -> Buffer {
        self.node.payload(step).inbound.take().expect("a step is ready when its payload is here")
    }

    fn enter(&mut self, work: &Tier1Work) {
        for &step in &work.steps {
            let slab = self.slab(step);
            if self.place.first {
                let tokens: Vec<u32> = self.node.rows(step).iter().map(|row| row.token).collect();
                self.kernels.embed(slab, &tokens);
            } else {
                let residual = self.inbound(step);
                self.kernels.put_residual(slab, residual.f32());
                self.pool.give(residual);
            }
        }
    }

    fn pre_attention(&mut self, layer: u32, work: &Tier1Work) {
        let positions: Vec<Vec<u32>> = work
            .steps
            .iter()
            .map(|step| self.node.rows(*step).iter().map(|row| row.position).collect())
            .collect();
        let mut buffers: Vec<Buffer> =
            positions.iter().map(|rows| self.pool.take(rows.len() * self.qkv_width * 2)).collect();
        let parts = work.steps.iter().zip(&positions).zip(&mut buffers);
        let mut parts: Vec<ShardOut<'_, Buffer>> = parts
            .map(|((&step, positions), qkv)| ShardOut { slab: self.slab(step), positions, qkv })
            .collect();
        self.kernels.pre_attention(layer as usize, &mut parts);
        for (&step, qkv) in work.steps.iter().zip(buffers) {
            self.node.payload(step).outbound = Some(qkv);
        }
    }

    fn post_attention(&mut self, layer: u32, work: &Tier1Work) {
        let buffers: Vec<Buffer> = work.steps.iter().map(|step| self.inbound(*step)).collect();
        let parts = work.steps.iter().zip(&buffers);
        let parts: Vec<ShardIn<'_, Buffer>> =
            parts.map(|(&step, attended)| ShardIn { slab: self.slab(step), attended }).collect();
        self.kernels.post_attention(layer as usize, &parts);
        for buffer in buffers {
            self.pool.give(buffer);
        }
    }

    fn give_residuals(&mut self, work: &Tier1Work) {
        for &step in &work.steps {
            let slab = self.slab(step);
            let mut residual = self.pool.take(slab.len() * self.hidden * 4);
            self.kernels.get_residual(slab, residual.f32_mut());
            self.node.payload(step).outbound = Some(residual);
        }
    }

    /// Logits and a token for every row that ends in one, a bounded number of rows at a time.
    fn classify(&mut self, work: &Tier1Work) {
        let mut picks: Vec<(StepId, usize, Sample)> = Vec::new();
        for &step in &work.steps {
            let start = self.slab(step).start;
            let samples = self.node.samples(step).iter();
            picks.extend(samples.map(|sample| (step, start + sample.row as usize, sample.clone())));
        }
        let (greedy, sampled): (Vec<_>, Vec<_>) =
            picks.into_iter().enumerate().partition(|(_, (_, _, sample))| is_plain_greedy(sample));
        let mut tokens: Vec<(usize, StepId, Generated)> = Vec::new();
        self.classify_greedy(&greedy, &mut tokens);
        for picks in sampled.chunks(CLASSIFY_ROWS_MAX) {
            self.classify_sampled(picks, &mut tokens);
        }
        tokens.sort_unstable_by_key(|(index, _, _)| *index);
        for (_, step, generated) in tokens {
            self.node.payload(step).tokens.push(generated);
        }
    }

    fn classify_greedy(&mut self, picks: &[Pick], tokens: &mut Vec<(usize, StepId, Generated)>) {
        let rows: Vec<usize> = picks.iter().map(|(_, (_, row, _))| *row).collect();
        let mut likeliest = vec![0; rows.len()];
        self.kernels.classify_greedy(&rows, &mut likeliest);
        tokens.extend(picks.iter().zip(likeliest).map(|((index, (step, _, _)), token)| {
            (*index, *step, Generated { token, logprob: 0.0, alternatives: Vec::new() })
        }));
    }

    fn classify_sampled(&mut self, picks: &[Pick], tokens: &mut Vec<(usize, StepId, Generated)>) {
        let rows: Vec<usize> = picks.iter().map(|(_, (_, row, _))| *row).collect();
        self.logits.resize(rows.len() * self.vocab, 0.0);
        self.kernels.classify(&rows, &mut self.logits);
        let logits = self.logits.chunks_exact_mut(self.vocab);
        let slots: Vec<_> = logits.map(|logits| Mutex::new((logits, None))).collect();
        self.threads.for_each(picks.len(), |index| {
            let mut slot = slots[index].lock().expect("no panic while sampling");
            slot.1 = Some(sample(slot.0, &picks[index].1.2));
        });
        for ((index, (step, _, _)), slot) in picks.iter().zip(slots) {
            let generated = slot.into_inner().expect("no panic while sampling").1;
            tokens.push((*index, *step, generated.expect("every row was sampled")));
        }
    }

    fn send(&mut self, action: Tier1Action<Visit>) -> Outgoing {
        match action {
            Tier1Action::Attend(attend) => {
                let qkv = self.node.payload(attend.step).outbound.take();
                Outgoing::Attend(attend, qkv.expect("pre-attention made it"))
            }
            Tier1Action::Leave(launch, visit) if self.place.last => {
                Outgoing::Home(Home { step: launch.step, tokens: visit.tokens })
            }
            Tier1Action::Leave(launch, visit) => {
                Outgoing::Hop(launch, visit.outbound.expect("read out"))
            }
        }
    }
}

/// A row that ends in a token: its place among the batch's, its step, its slab row, how to pick.
type Pick = (usize, (StepId, usize, Sample));

/// Whether only the likeliest token is asked for.
fn is_plain_greedy(sample: &Sample) -> bool {
    sample.temperature == 0.0
        && sample.repetition_penalty == 1.0
        && sample.biases.is_empty()
        && sample.logprobs.is_none()
}
