//! Nodes, links and the event heap.

use super::model;
use crate::dispatcher::{
    Dispatcher, DispatcherAction, DispatcherConfig, DispatcherEvent, DispatcherStats,
};
use crate::message::{Attend, Attended, Home, Launch, ShardId};
use crate::prompt::{Completion, Generated, Prompt, PromptId};
use crate::tier1::{Stage, Tier1Action, Tier1Event, Tier1Node, Tier1Work};
use crate::tier2::Tier2Node;
use glinthawk_flight::{PAGE_POSITIONS, Row};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};

/// The simulated cluster's shape.
#[derive(Clone, Debug)]
pub struct Topology {
    /// Layers of each slice.
    pub slice_layers: Vec<u32>,
    /// Rows in one Tier-1 batch at most.
    pub tier1_rows_max: usize,
    /// The dispatcher's part; its lanes are every slice's Tier-2 nodes.
    pub dispatcher: DispatcherConfig,
}

/// What things cost, in nanoseconds of virtual time. Called in the order of events, so that a
/// seeded generator inside makes a run that replays exactly.
pub trait Costs {
    /// Tier-1 work of a batch of `rows` rows.
    fn tier1_ns(&mut self, slice: usize, work: &Tier1Work, rows: usize) -> u64;
    /// Attention of rows on a lane.
    fn tier2_ns(&mut self, slice: usize, lane: u32, rows: &[Row]) -> u64;
    /// A message of `rows` rows on a link: time it occupies the link, and latency after that.
    fn link_ns(&mut self, link: Link, rows: usize) -> (u64, u64);
}

/// A directed link between two places of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Link {
    /// Dispatcher → slice 0.
    Launch,
    /// Slice → next slice.
    Hop(usize),
    /// Slice → its worker on a lane.
    Out(usize, u32),
    /// Worker on a lane → its slice.
    Back(usize, u32),
    /// Last slice → dispatcher.
    Home,
}

/// What a run came to.
pub struct Report {
    /// One for each prompt.
    pub completions: BTreeMap<PromptId, Completion>,
    /// The dispatcher's counters.
    pub stats: DispatcherStats,
    /// Virtual time at the end.
    pub end_ns: u64,
    /// Events handled.
    pub events: u64,
}

/// Why a run is wrong.
#[derive(Debug)]
pub enum Failure {
    /// Nothing is under way, yet prompts are unfinished.
    Deadlock(Vec<PromptId>),
    /// A node refused a message.
    Refused(String),
    /// A prompt got a second result.
    Twice(PromptId),
}

enum Event {
    Dispatcher(DispatcherEvent),
    Arrive { slice: usize, launch: Launch, residual: Vec<u64> },
    Attended { slice: usize, attended: Attended, values: Vec<u64> },
    Tier1Computed { slice: usize },
    Attend { slice: usize, attend: Attend, values: Vec<u64> },
    Tier2Computed { slice: usize, lane: u32 },
}

struct Tier1 {
    node: Tier1Node,
    work: Option<Tier1Work>,
    residual: HashMap<ShardId, Vec<u64>>,
    attended: HashMap<ShardId, Vec<u64>>,
    first_layer: u32,
}

struct Tier2 {
    node: Tier2Node,
    work: Option<Attend>,
    inputs: HashMap<(ShardId, u32), Vec<u64>>,
    /// (layer, page, offset) → value
    store: Vec<u64>,
    pages: u32,
}

struct Cluster<'a, C> {
    costs: &'a mut C,
    now_ns: u64,
    sequence: u64,
    heap: BinaryHeap<Reverse<(u64, u64)>>,
    events: HashMap<u64, Event>,
    /// When each link is free. Messages may overtake each other in its latency: a shard has one
    /// message under way at most, and among shards the network sends the deepest first.
    links: HashMap<Link, u64>,
    dispatcher: Dispatcher,
    tier1: Vec<Tier1>,
    /// Slices that something happened to at this moment. A worker takes in all that is there before
    /// it starts, so they start when the moment is over.
    stirred: BTreeSet<usize>,
    tier2: BTreeMap<(usize, u32), Tier2>,
    completions: BTreeMap<PromptId, Completion>,
}

/// Runs prompts, each submitted at its time, until all are finished.
pub fn run<C: Costs>(
    topology: &Topology,
    prompts: Vec<(u64, Prompt)>,
    costs: &mut C,
) -> Result<Report, Failure> {
    let config = &topology.dispatcher;
    let slots = config.flights * config.rows_per_lane;
    let mut first_layer = 0;
    let mut tier1 = Vec::new();
    let mut tier2 = BTreeMap::new();
    for (slice, &layers) in topology.slice_layers.iter().enumerate() {
        tier1.push(Tier1 {
            node: Tier1Node::new(layers, topology.tier1_rows_max, config.merge),
            work: None,
            residual: HashMap::new(),
            attended: HashMap::new(),
            first_layer,
        });
        first_layer += layers;
        for (lane, &pages) in config.lane_pages.iter().enumerate() {
            let store = vec![0; (layers * pages * PAGE_POSITIONS) as usize];
            let node = Tier2Node::new(slots, pages);
            tier2.insert(
                (slice, lane as u32),
                Tier2 { node, work: None, inputs: HashMap::new(), store, pages },
            );
        }
    }
    let mut cluster = Cluster {
        costs,
        now_ns: 0,
        sequence: 0,
        heap: BinaryHeap::new(),
        events: HashMap::new(),
        links: HashMap::new(),
        dispatcher: Dispatcher::new(config.clone()),
        tier1,
        stirred: BTreeSet::new(),
        tier2,
        completions: BTreeMap::new(),
    };
    for (time_ns, prompt) in prompts {
        cluster.schedule(time_ns, Event::Dispatcher(DispatcherEvent::Submit(prompt)));
    }
    cluster.drive()
}

impl<C: Costs> Cluster<'_, C> {
    fn schedule(&mut self, time_ns: u64, event: Event) {
        self.heap.push(Reverse((time_ns, self.sequence)));
        self.events.insert(self.sequence, event);
        self.sequence += 1;
    }

    fn send(&mut self, link: Link, rows: usize, event: Event) {
        let (occupied_ns, latency_ns) = self.costs.link_ns(link, rows);
        let free_ns = self.links.entry(link).or_default();
        *free_ns = (*free_ns).max(self.now_ns) + occupied_ns;
        let arrival_ns = *free_ns + latency_ns;
        self.schedule(arrival_ns, event);
    }

    fn drive(mut self) -> Result<Report, Failure> {
        let mut events = 0;
        loop {
            let next = self.heap.peek();
            if next.is_none_or(|Reverse((time_ns, _))| *time_ns > self.now_ns) {
                std::mem::take(&mut self.stirred).into_iter().for_each(|slice| self.start(slice));
            }
            let Some(Reverse((time_ns, sequence))) = self.heap.pop() else { break };
            self.now_ns = time_ns;
            events += 1;
            let event = self.events.remove(&sequence).expect("scheduled once");
            self.handle(event)?;
        }
        if !self.dispatcher.is_idle() {
            return Err(Failure::Deadlock(self.dispatcher.prompt_ids()));
        }
        let stats = self.dispatcher.stats().clone();
        Ok(Report { completions: self.completions, stats, end_ns: self.now_ns, events })
    }

    fn handle(&mut self, event: Event) -> Result<(), Failure> {
        match event {
            Event::Dispatcher(event) => return self.dispatch(event),
            Event::Arrive { slice, launch, residual } => {
                self.tier1[slice].residual.insert(launch.shard, residual);
                self.tier1_on(slice, Tier1Event::Arrive(launch));
            }
            Event::Attended { slice, attended, values } => {
                self.tier1[slice].attended.insert(attended.shard, values);
                self.tier1_on(slice, Tier1Event::Attended(attended));
            }
            Event::Tier1Computed { slice } => {
                self.compute_tier1(slice);
                self.tier1_on(slice, Tier1Event::Computed);
            }
            Event::Attend { slice, attend, values } => {
                let lane = attend.shard.lane;
                let worker =
                    self.tier2.get_mut(&(slice, lane)).expect("lanes exist on every slice");
                worker.inputs.insert((attend.shard, attend.layer), values);
                worker.node.take(attend).map_err(|error| Failure::Refused(error.to_string()))?;
                self.tier2_start(slice, lane);
            }
            Event::Tier2Computed { slice, lane } => {
                let worker =
                    self.tier2.get_mut(&(slice, lane)).expect("lanes exist on every slice");
                let values = worker.compute();
                let attended = worker.node.computed();
                let rows = values.len();
                self.send(
                    Link::Back(slice, lane),
                    rows,
                    Event::Attended { slice, attended, values },
                );
                self.tier2_start(slice, lane);
            }
        }
        Ok(())
    }

    fn dispatch(&mut self, event: DispatcherEvent) -> Result<(), Failure> {
        let mut actions = Vec::new();
        self.dispatcher.on(event, self.now_ns, &mut actions);
        self.dispatcher.fill(&mut actions);
        for action in actions {
            match action {
                DispatcherAction::Launch(launch) => {
                    let rows = launch.rows.len();
                    let residual = launch.rows.iter().map(|row| model::embed(row.token)).collect();
                    self.send(Link::Launch, rows, Event::Arrive { slice: 0, launch, residual });
                }
                DispatcherAction::Finish(completion) => {
                    let id = completion.id;
                    if self.completions.insert(id, completion).is_some() {
                        return Err(Failure::Twice(id));
                    }
                }
                DispatcherAction::Token(..) => {}
                DispatcherAction::Reject(id, rejection) => {
                    return Err(Failure::Refused(format!("{id:?}: {rejection:?}")));
                }
            }
        }
        Ok(())
    }

    fn tier1_on(&mut self, slice: usize, event: Tier1Event) {
        let mut actions = Vec::new();
        self.tier1[slice].node.on(event, &mut actions);
        for action in actions {
            match action {
                Tier1Action::Attend(attend) => {
                    let values = self.tier1[slice].residual[&attend.shard].clone();
                    let link = Link::Out(slice, attend.shard.lane);
                    self.send(link, attend.rows.len(), Event::Attend { slice, attend, values });
                }
                Tier1Action::Leave(launch) => self.leave(slice, launch),
            }
        }
        self.stirred.insert(slice);
    }

    fn start(&mut self, slice: usize) {
        let Some(work) = self.tier1[slice].node.start() else { return };
        let node = &self.tier1[slice].node;
        let rows = work.shards.iter().map(|shard| node.rows(*shard).len()).sum();
        let cost_ns = self.costs.tier1_ns(slice, &work, rows);
        self.tier1[slice].work = Some(work);
        self.schedule(self.now_ns + cost_ns, Event::Tier1Computed { slice });
    }

    fn leave(&mut self, slice: usize, launch: Launch) {
        let residual =
            self.tier1[slice].residual.remove(&launch.shard).expect("it was in the slice");
        let rows = launch.rows.len();
        if slice + 1 < self.tier1.len() {
            return self.send(
                Link::Hop(slice),
                rows,
                Event::Arrive { slice: slice + 1, launch, residual },
            );
        }
        let tokens = launch.samples.iter().map(|sample| Generated {
            token: model::pick(residual[sample.row as usize], sample),
            logprob: 0.0,
            alternatives: Vec::new(),
        });
        let home = Home { shard: launch.shard, epoch: launch.epoch, tokens: tokens.collect() };
        self.send(Link::Home, rows, Event::Dispatcher(DispatcherEvent::Home(home)));
    }

    fn compute_tier1(&mut self, slice: usize) {
        let tier1 = &mut self.tier1[slice];
        let work = tier1.work.take().expect("a computation ended");
        let layer = match work.stage {
            Stage::Enter => return,
            Stage::Middle(layer) => tier1.first_layer + layer,
            Stage::Exit => {
                let next = self.tier1.get(slice + 1).map(|next| next.first_layer);
                let last = next.unwrap_or_else(|| self.layers_total()) - 1;
                return self.post(slice, &work.shards, last);
            }
        };
        self.post(slice, &work.shards, layer);
    }

    fn layers_total(&self) -> u32 {
        let last = self.tier1.last().expect("a slice exists");
        last.first_layer + last.node.layers()
    }

    fn post(&mut self, slice: usize, shards: &[ShardId], layer: u32) {
        let tier1 = &mut self.tier1[slice];
        for shard in shards {
            let attended = tier1.attended.remove(shard).expect("the shard was attended");
            let residual = tier1.residual.get_mut(shard).expect("the shard is in the slice");
            for (residual, attended) in residual.iter_mut().zip(attended) {
                *residual = model::post(*residual, attended, layer);
            }
        }
    }

    fn tier2_start(&mut self, slice: usize, lane: u32) {
        let worker = self.tier2.get_mut(&(slice, lane)).expect("lanes exist on every slice");
        let Some(attend) = worker.node.start() else { return };
        let cost_ns = self.costs.tier2_ns(slice, lane, &attend.rows);
        worker.work = Some(attend);
        self.schedule(self.now_ns + cost_ns, Event::Tier2Computed { slice, lane });
    }
}

impl Tier2 {
    /// Appends and attends the rows at work: the simulated kernel.
    fn compute(&mut self) -> Vec<u64> {
        let attend = self.work.take().expect("a computation ended");
        let inputs = self.inputs.remove(&(attend.shard, attend.layer)).expect("came with the rows");
        let place = |page: u32, offset: u32| {
            ((attend.layer * self.pages + page) * PAGE_POSITIONS + offset) as usize
        };
        for (row, input) in attend.rows.iter().zip(inputs) {
            self.store[place(row.page, row.position % PAGE_POSITIONS)] = input;
        }
        let output = attend.rows.iter().map(|row| {
            let pages = self.node.pages(row);
            let positions = 0..=row.position;
            model::attend(positions.map(|position| {
                let page = pages[(position / PAGE_POSITIONS) as usize];
                self.store[place(page, position % PAGE_POSITIONS)]
            }))
        });
        output.collect()
    }
}
