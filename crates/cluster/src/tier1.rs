//! A Tier-1 node with its kernels: merges what is ready, computes, says what goes where.

use crate::layout::Layout;
use crate::report::NodeReport;
use crate::trace::Tracer;
use glinthawk_compute::sample::{Sampler, sample};
use glinthawk_compute::{ShardIn, ShardOut, Threads, WeightKernels};
use glinthawk_flight::{Buffer, Pool};
use glinthawk_model::ModelConfig;
use glinthawk_protocol::{
    Attend, Attended, Generated, Home, Launch, Sample, ShardId, Stage, Tier1Action, Tier1Event,
    Tier1Node, Tier1Work,
};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Rows whose logits are held at once: bounds their memory whatever the batch.
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

/// The node's state machine, its weights and slab, and the payloads that wait.
pub struct Tier1Worker<W> {
    node: Tier1Node,
    kernels: W,
    place: Tier1Place,
    hidden: usize,
    qkv_width: usize,
    vocab: usize,
    residuals: HashMap<ShardId, Buffer>,
    attended: HashMap<ShardId, Buffer>,
    outbound: HashMap<ShardId, Buffer>,
    tokens: HashMap<ShardId, Vec<Generated>>,
    logits: Vec<f32>,
    pool: Arc<Pool>,
    threads: Arc<Threads>,
    /// When each shard's current wait began.
    arrivals: HashMap<ShardId, Instant>,
    report: NodeReport,
    tracer: Tracer,
}

impl<W: WeightKernels<Buffer = Buffer>> Tier1Worker<W> {
    /// A worker for the slice at `place`.
    pub fn new(
        node: Tier1Node,
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
            residuals: HashMap::new(),
            attended: HashMap::new(),
            outbound: HashMap::new(),
            tokens: HashMap::new(),
            logits: Vec::new(),
            pool,
            threads,
            arrivals: HashMap::new(),
            report: NodeReport::new(format!("tier1-{}", place.slice), 1),
            tracer: Tracer::new(place.trace),
        }
    }

    /// Takes a shard in that arrived just then: from the dispatcher, or from the previous slice
    /// with its residual, (rows, hidden) f32.
    pub fn arrive(&mut self, launch: Launch, residual: Option<Buffer>, arrived: Instant) {
        assert_eq!(residual.is_none(), self.place.first, "only the first slice takes tokens");
        self.arrivals.insert(launch.shard, arrived);
        if let Some(residual) = residual {
            self.residuals.insert(launch.shard, residual);
        }
        self.node.on(Tier1Event::Arrive(launch), &mut Vec::new());
    }

    /// Takes a shard's attention output, (rows, query_width) bf16, that arrived just then.
    pub fn attended(&mut self, attended: Attended, output: Buffer, arrived: Instant) {
        if !self.node.awaits(&attended) {
            return self.pool.give(output); // of an abandoned step
        }
        self.arrivals.insert(attended.shard, arrived);
        self.attended.insert(attended.shard, output);
        self.node.on(Tier1Event::Attended(attended), &mut Vec::new());
    }

    /// Computes the next batch that is ready, appending what is to be sent; `false` where none is.
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
        let rows = work.shards.iter().map(|shard| self.node.rows(*shard).len()).sum();
        let arrivals = work.shards.iter().map(|shard| self.arrivals[shard]);
        self.report.record(rows, started, arrivals);
        let layer = match work.stage {
            Stage::Enter => 0,
            Stage::Middle(layer) => layer + 1,
            Stage::Exit => self.node.layers(),
        };
        self.tracer.record(started, layer, work.shards[0].flight, work.shards.len(), rows);
        let mut actions = Vec::new();
        self.node.on(Tier1Event::Computed, &mut actions);
        outgoing.extend(actions.into_iter().map(|action| self.send(action)));
        true
    }

    /// Counters so far.
    pub fn report(&self) -> NodeReport {
        NodeReport { spans: self.tracer.spans(), ..self.report.clone() }
    }

    fn slab(&self, shard: ShardId) -> Range<usize> {
        let lane = shard.lane - self.place.first_lane;
        let start = (shard.flight * self.place.lanes + lane) * self.place.rows_per_lane;
        let start = start as usize;
        start..start + self.node.rows(shard).len()
    }

    fn enter(&mut self, work: &Tier1Work) {
        for &shard in &work.shards {
            let slab = self.slab(shard);
            if self.place.first {
                let tokens: Vec<u32> = self.node.rows(shard).iter().map(|row| row.token).collect();
                self.kernels.embed(slab, &tokens);
            } else {
                let residual = self.residuals.remove(&shard).expect("a hop brings its residual");
                self.kernels.put_residual(slab, residual.f32());
                self.pool.give(residual);
            }
        }
    }

    fn pre_attention(&mut self, layer: u32, work: &Tier1Work) {
        let positions: Vec<Vec<u32>> = work
            .shards
            .iter()
            .map(|shard| self.node.rows(*shard).iter().map(|row| row.position).collect())
            .collect();
        let mut buffers: Vec<Buffer> =
            positions.iter().map(|rows| self.pool.take(rows.len() * self.qkv_width * 2)).collect();
        let parts = work.shards.iter().zip(&positions).zip(&mut buffers);
        let mut parts: Vec<ShardOut<'_, Buffer>> = parts
            .map(|((&shard, positions), qkv)| ShardOut { slab: self.slab(shard), positions, qkv })
            .collect();
        self.kernels.pre_attention(layer as usize, &mut parts);
        self.outbound.extend(work.shards.iter().copied().zip(buffers));
    }

    fn post_attention(&mut self, layer: u32, work: &Tier1Work) {
        let buffers: Vec<Buffer> = work
            .shards
            .iter()
            .map(|shard| self.attended.remove(shard).expect("a ready shard was attended"))
            .collect();
        let parts = work.shards.iter().zip(&buffers);
        let parts: Vec<ShardIn<'_, Buffer>> =
            parts.map(|(&shard, attended)| ShardIn { slab: self.slab(shard), attended }).collect();
        self.kernels.post_attention(layer as usize, &parts);
        for buffer in buffers {
            self.pool.give(buffer);
        }
    }

    fn give_residuals(&mut self, work: &Tier1Work) {
        for &shard in &work.shards {
            let slab = self.slab(shard);
            let mut residual = self.pool.take(slab.len() * self.hidden * 4);
            self.kernels.get_residual(slab, residual.f32_mut());
            self.outbound.insert(shard, residual);
        }
    }

    /// Logits and a token for every row that ends in one, a bounded number of rows at a time.
    fn classify(&mut self, work: &Tier1Work) {
        let mut picks: Vec<(ShardId, usize, Sample)> = Vec::new();
        for &shard in &work.shards {
            self.tokens.insert(shard, Vec::new());
            let start = self.slab(shard).start;
            let samples = self.node.samples(shard).iter();
            picks
                .extend(samples.map(|sample| (shard, start + sample.row as usize, sample.clone())));
        }
        let (greedy, sampled): (Vec<_>, Vec<_>) =
            picks.into_iter().enumerate().partition(|(_, (_, _, sample))| is_plain_greedy(sample));
        let mut tokens: Vec<(usize, ShardId, Generated)> = Vec::new();
        self.classify_greedy(&greedy, &mut tokens);
        for picks in sampled.chunks(CLASSIFY_ROWS_MAX) {
            self.classify_sampled(picks, &mut tokens);
        }
        tokens.sort_unstable_by_key(|(index, _, _)| *index);
        for (_, shard, generated) in tokens {
            self.tokens.get_mut(&shard).expect("inserted above").push(generated);
        }
    }

    fn classify_greedy(&mut self, picks: &[Pick], tokens: &mut Vec<(usize, ShardId, Generated)>) {
        let rows: Vec<usize> = picks.iter().map(|(_, (_, row, _))| *row).collect();
        let mut likeliest = vec![0; rows.len()];
        self.kernels.classify_greedy(&rows, &mut likeliest);
        tokens.extend(picks.iter().zip(likeliest).map(|((index, (shard, _, _)), token)| {
            (*index, *shard, Generated { token, logprob: 0.0, alternatives: Vec::new() })
        }));
    }

    fn classify_sampled(&mut self, picks: &[Pick], tokens: &mut Vec<(usize, ShardId, Generated)>) {
        let rows: Vec<usize> = picks.iter().map(|(_, (_, row, _))| *row).collect();
        self.logits.resize(rows.len() * self.vocab, 0.0);
        self.kernels.classify(&rows, &mut self.logits);
        let logits = self.logits.chunks_exact_mut(self.vocab);
        let slots: Vec<_> = logits.map(|logits| Mutex::new((logits, None))).collect();
        self.threads.for_each(picks.len(), |index| {
            let mut slot = slots[index].lock().expect("no panic while sampling");
            slot.1 = Some(pick(slot.0, &picks[index].1.2));
        });
        for ((index, (shard, _, _)), slot) in picks.iter().zip(slots) {
            let generated = slot.into_inner().expect("no panic while sampling").1;
            tokens.push((*index, *shard, generated.expect("every row was sampled")));
        }
    }

    fn send(&mut self, action: Tier1Action) -> Outgoing {
        match action {
            Tier1Action::Attend(attend) => {
                let qkv = self.outbound.remove(&attend.shard).expect("pre-attention made it");
                Outgoing::Attend(attend, qkv)
            }
            Tier1Action::Leave(launch) if self.place.last => {
                let tokens = self.tokens.remove(&launch.shard).expect("classified");
                Outgoing::Home(Home { shard: launch.shard, epoch: launch.epoch, tokens })
            }
            Tier1Action::Leave(launch) => {
                let residual = self.outbound.remove(&launch.shard).expect("read out");
                Outgoing::Hop(launch, residual)
            }
        }
    }
}

/// A row that ends in a token: its place among the batch's, its shard, its slab row, how to pick.
type Pick = (usize, (ShardId, usize, Sample));

/// Whether the likeliest token is all that is asked for.
fn is_plain_greedy(sample: &Sample) -> bool {
    sample.temperature == 0.0
        && sample.repetition_penalty == 1.0
        && sample.biases.is_empty()
        && sample.logprobs.is_none()
}

fn pick(logits: &mut [f32], spec: &Sample) -> Generated {
    let sampler = Sampler {
        temperature: spec.temperature,
        top_k: spec.top_k,
        top_p: spec.top_p,
        min_p: spec.min_p,
        seed: spec.seed,
        position: spec.position,
        repeated: &spec.repeated,
        repetition_penalty: spec.repetition_penalty,
        biases: &spec.biases,
        logprobs: spec.logprobs,
    };
    let sampled = sample(logits, &sampler);
    Generated { token: sampled.token, logprob: sampled.logprob, alternatives: sampled.alternatives }
}
