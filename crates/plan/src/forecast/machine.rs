//! The transport and the clock of a forecast: the real dispatcher and nodes over forecast kernels, links and cores.

use super::cores::{Core, Turn};
use super::network::{Network, Way};
use super::processes::{Nodes, processes};
use super::{Deployment, Forecast, Place};
use crate::heap::{Heap, time_key, time_of};
use crate::profile::Overheads;
use crate::random::Random;
use crate::trace::{Trace, TraceSpan};
use crate::workload::Length;
use glinthawk_protocol::{
    Dispatcher, DispatcherAction, DispatcherConfig, DispatcherEvent, Launch, NodeAddress,
    OVERSUBSCRIPTION, Parcel, Prompt, ShardId, Stage, Started, Tier1Work,
};

/// After this many events, the rest of a job is assumed to continue at the same pace.
const EVENTS_MAX: u64 = 200_000_000;

/// The seed of the waits for a core.
const SEED: u64 = 1;

/// What follows a task of a core.
#[derive(Clone, Copy)]
enum After {
    /// A message was put on its link.
    Sent(usize),
    /// A message was received.
    Received(usize),
    /// A process finished what it computed.
    Computed(usize),
}

#[derive(Clone, Copy)]
enum Event {
    /// A core's next turn, unless something came in between.
    Core { core: usize, version: u64 },
    /// A message has crossed its link.
    Arrived(usize),
    /// A message that arrived has its receiver's core.
    Admitted(usize),
    /// A process with a machine to itself looks for work, after all that happens at this moment.
    Looks(usize),
    /// Such a process finished what it computed.
    Computed(usize),
}

/// A parcel under way.
struct Transit {
    to: NodeAddress,
    parcel: Parcel<()>,
    bytes: f64,
    /// Messages of the real engine that it stands for.
    count: f64,
    way: Way,
    to_core: usize,
}

/// A process: it computes one thing at a time.
struct Process {
    core: usize,
    nodes: Nodes,
    /// What it computes, and since when.
    work: Option<(Started<()>, f64)>,
    /// Whether it is about to look for work.
    called: bool,
}

/// The step of a shard that is in the air.
#[derive(Clone, Default)]
struct Shard {
    rows: usize,
    /// Seconds of one layer's attention.
    attention: f64,
    launched: Option<f64>,
    /// When it became ready where it is: for weights, for attention.
    ready: [f64; 2],
}

pub(super) struct Machine<'a> {
    deployment: &'a Deployment,
    /// Whether every process has its machine to itself and messages cost nothing but their way: no core is shared,
    /// and none needs to be simulated.
    apart: bool,
    now: f64,
    sequence: u64,
    events: Heap<Event>,
    transits: Vec<Option<Transit>>,
    transits_free: Vec<usize>,
    network: Network,
    cores: Vec<Core<After>>,
    processes: Vec<Process>,
    dispatcher: Dispatcher,
    lengths: std::slice::Iter<'a, Length>,
    /// Layers that one simulated layer of each slice stands for.
    grains: Vec<f64>,
    /// (flight, lane), row-major
    shards: Vec<Shard>,
    random: Random,
    forecast: Forecast,
    trace: Option<&'a mut Trace>,
}

impl<'a> Machine<'a> {
    pub fn new(
        deployment: &'a Deployment,
        lengths: &'a [Length],
        grain: usize,
        trace: Option<&'a mut Trace>,
    ) -> Self {
        let (slices, lanes) = (deployment.slices.len(), deployment.lanes());
        let hosted = processes(deployment, grain);
        let processes = hosted.len();
        let cores = match deployment.place {
            Place::OneProcess { .. } => 1,
            Place::SharedCores(cores) => cores.min(processes),
            // One more for the dispatcher.
            Place::OwnMachines => processes + 1,
        };
        let process = |(index, nodes): (usize, _)| Process {
            core: index % cores,
            nodes,
            work: None,
            called: false,
        };
        Self {
            deployment,
            apart: deployment.place == Place::OwnMachines
                && deployment.tier1.overheads() == Overheads::default(),
            now: 0.0,
            sequence: 0,
            events: Heap::default(),
            transits: Vec::new(),
            transits_free: Vec::new(),
            network: Network::new(slices, lanes),
            cores: vec![Core::new(processes); cores],
            processes: hosted.into_iter().enumerate().map(process).collect(),
            dispatcher: Dispatcher::new(DispatcherConfig {
                flights: deployment.flights,
                batch: deployment.batch,
                chunk: deployment.chunk,
                lane_pages: vec![deployment.lane_pages; lanes],
                context_max: deployment.context_max,
                oversubscription: OVERSUBSCRIPTION,
                merge: deployment.merge(),
            }),
            lengths: lengths.iter(),
            grains: deployment
                .slices
                .iter()
                .map(|layers| *layers as f64 / layers.div_ceil(grain) as f64)
                .collect(),
            shards: vec![Shard::default(); deployment.flights as usize * lanes],
            random: Random::new(SEED),
            forecast: Forecast { layers_as_one: grain, ..Forecast::new(slices, slices * lanes) },
            trace,
        }
    }

    /// Runs all prompts, or as many as fit in a forecast.
    pub fn run(mut self) -> Forecast {
        self.feed();
        let mut handled = 0;
        while let Some((key, event)) = self.events.pop() {
            self.now = time_of(key);
            handled += 1;
            match event {
                Event::Core { core, version } if self.cores[core].version == version => {
                    match self.cores[core].turn(self.now) {
                        Turn::Ended(after) => self.after(after),
                        Turn::Looks(process) => self.start(process),
                        Turn::Switched => {}
                    }
                    self.foresee(core);
                }
                Event::Core { .. } => {}
                Event::Arrived(parcel) => self.arrived(parcel),
                Event::Admitted(parcel) => self.admitted(parcel),
                Event::Looks(process) => self.look(process),
                Event::Computed(process) => {
                    self.computed(process);
                    self.call(process);
                }
            }
            if handled == EVENTS_MAX {
                break;
            }
        }
        let stats = self.dispatcher.stats();
        self.forecast.rows_done = stats.rows_computed - stats.rows_recomputed;
        self.forecast.preemptions = stats.preemptions;
        self.forecast.seconds = self.now;
        self.forecast.events = handled;
        self.forecast
    }

    fn schedule(&mut self, at: f64, event: Event) {
        self.sequence += 1;
        self.events.push(time_key(at, self.sequence), event);
    }

    /// Schedules a core's next turn.
    fn foresee(&mut self, core: usize) {
        if let Some(at) = self.cores[core].next_turn() {
            let version = self.cores[core].version;
            self.schedule(at, Event::Core { core, version });
        }
    }

    fn shard(&mut self, shard: ShardId) -> &mut Shard {
        let lanes = self.deployment.lanes();
        &mut self.shards[shard.flight as usize * lanes + shard.lane as usize]
    }

    fn urgent(&mut self, core: usize, seconds: f64, after: After) {
        // What takes no time needs no core, and most forecasts of a catalogue's devices are of such.
        if seconds == 0.0 {
            return self.after(after);
        }
        self.cores[core].add_urgent(self.now, seconds, after);
        self.foresee(core);
    }

    fn after(&mut self, after: After) {
        match after {
            After::Sent(transit) => self.sent(transit),
            After::Received(index) => {
                let Transit { to, parcel, .. } =
                    self.transits[index].take().expect("a parcel is received once");
                self.transits_free.push(index);
                self.handle(to, parcel);
            }
            After::Computed(process) => self.computed(process),
        }
    }

    /// The core that the dispatcher runs on: it is not pinned.
    fn dispatcher_core(&self) -> usize {
        if self.deployment.place == Place::OwnMachines {
            return self.cores.len() - 1;
        }
        let least = (0..self.cores.len()).min_by_key(|&core| self.cores[core].load());
        least.expect("there is a core")
    }

    fn in_one_process(&self) -> bool {
        matches!(self.deployment.place, Place::OneProcess { .. })
    }

    /// The process that hosts a node; none is the dispatcher.
    fn process_of(&self, node: NodeAddress) -> Option<usize> {
        let Deployment { slices, tier2, local_lane, .. } = self.deployment;
        let local = usize::from(*local_lane);
        match node {
            NodeAddress::Dispatcher => None,
            _ if self.in_one_process() => Some(0),
            NodeAddress::Tier1(slice) => Some(slice),
            NodeAddress::Tier2(slice, lane) if (lane as usize) < local => Some(slice),
            NodeAddress::Tier2(slice, lane) => {
                Some(slices.len() + slice * tier2 + lane as usize - local)
            }
        }
    }

    /// Sends a parcel; one within a process is there at once.
    fn send(&mut self, from: Option<usize>, to: NodeAddress, parcel: Parcel<()>) {
        let rows = self.shard(parcel.step().shard).rows;
        let receiver = self.process_of(to);
        if from == receiver || self.in_one_process() {
            if receiver.is_some() {
                return self.handle(to, parcel);
            }
            // The dispatcher's own work takes time here too.
            let work = self.dispatching(rows);
            let way = Way::Near;
            let transit = Transit { to, parcel, bytes: 0.0, count: 1.0, way, to_core: 0 };
            let transit = self.transit(transit);
            return self.urgent(0, work, After::Received(transit));
        }
        let way = Way::of(self.deployment, to, &parcel);
        let count = match way {
            Way::Tiers { slice, .. } => self.grains[slice],
            _ => 1.0,
        };
        let bytes = count * way.bytes(&self.deployment.shape, rows);
        match way {
            Way::Tiers { back: true, .. } => self.forecast.tier2_bytes += bytes,
            _ if from.is_some() => self.forecast.tier1_bytes += bytes,
            _ => {}
        }
        let core_of = |machine: &Self, process: Option<usize>| match process {
            Some(process) => machine.processes[process].core,
            None => machine.dispatcher_core(),
        };
        let (from_core, to_core) = (core_of(self, from), core_of(self, receiver));
        let overheads = self.deployment.tier1.overheads();
        let seconds = count * overheads.message + overheads.byte * bytes;
        let transit = self.transit(Transit { to, parcel, bytes, count, way, to_core });
        self.urgent(from_core, seconds, After::Sent(transit));
    }

    fn dispatching(&self, rows: usize) -> f64 {
        let overheads = self.deployment.tier1.overheads();
        overheads.step + overheads.row * rows as f64
    }

    fn transit(&mut self, transit: Transit) -> usize {
        let index = self.transits_free.pop().unwrap_or(self.transits.len());
        if index == self.transits.len() {
            self.transits.push(None);
        }
        self.transits[index] = Some(transit);
        index
    }

    fn under_way(&self, index: usize) -> &Transit {
        self.transits[index].as_ref().expect("a parcel under way")
    }

    fn sent(&mut self, index: usize) {
        let &Transit { bytes, count, way, .. } = self.under_way(index);
        let at = self.network.cross(self.deployment, way, self.now, bytes, count);
        self.schedule(at, Event::Arrived(index));
    }

    /// A message waits until its receiver's core has woken or another process leaves it. The wait is usually short and
    /// sometimes longer. If it always took the same time, identical nodes would stay in step for ever.
    fn arrived(&mut self, index: usize) {
        let overheads = self.deployment.tier1.overheads();
        if overheads.wake == 0.0 && overheads.crowded == 0.0 {
            return self.admitted(index);
        }
        let &Transit { to, to_core: core, count, .. } = self.under_way(index);
        let receiver = self.process_of(to);
        let others = self.processes.iter().enumerate().any(|(index, process)| {
            process.core == core && Some(index) != receiver && process.work.is_some()
        });
        let mean = match (self.cores[core].is_idle(), others) {
            (true, _) => count * overheads.wake,
            (false, true) => count * overheads.crowded,
            (false, false) => 0.0,
        };
        let wait = -mean * (1.0 - self.random.unit()).ln();
        self.schedule(self.now + wait, Event::Admitted(index));
    }

    fn admitted(&mut self, index: usize) {
        let Transit { parcel, bytes, count, to_core, .. } = self.under_way(index);
        let overheads = self.deployment.tier1.overheads();
        let mut seconds = count * overheads.message + overheads.byte * bytes;
        let core = *to_core;
        if let Parcel::Home(home) = parcel {
            seconds += self.dispatching(home.tokens.len());
        }
        self.urgent(core, seconds, After::Received(index));
    }

    fn handle(&mut self, to: NodeAddress, mut parcel: Parcel<()>) {
        let now = self.now;
        let shard = self.shard(parcel.step().shard);
        match &mut parcel {
            // Its page tables are not needed, and entering every row on every layer would take most of the time.
            Parcel::Attend(attend, ()) => (shard.ready[1], attend.rows) = (now, Vec::new()),
            _ => shard.ready[0] = now,
        }
        if let Parcel::Home(home) = parcel {
            if let Some(launched) = shard.launched.take() {
                self.forecast.steps += 1;
                self.forecast.step_seconds += now - launched;
            }
            self.dispatch(DispatcherEvent::Home(home));
            return self.feed();
        }
        let process = self.process_of(to).expect("nodes have processes");
        self.processes[process].nodes.deliver(parcel).expect("there are no rows to refuse");
        self.wake(process);
    }

    /// Submits prompts while the dispatcher wants some, and launches.
    fn feed(&mut self) {
        while self.dispatcher.wants_prompts() {
            let Some(length) = self.lengths.next() else { break };
            let (tokens, tokens_max) = (vec![0; length.prompt], length.output as u32);
            let prompt = Prompt { tokens, tokens_max, ..Prompt::default() };
            // A prompt that is too long gets an error line and takes no time.
            _ = self.dispatcher.submit(prompt, (self.now * 1e9) as u64);
        }
        self.launch();
    }

    fn dispatch(&mut self, event: DispatcherEvent) {
        self.dispatcher.on(event, (self.now * 1e9) as u64, &mut Vec::new());
    }

    fn launch(&mut self) {
        let mut actions = Vec::new();
        self.dispatcher.fill(&mut actions);
        for action in actions {
            if let DispatcherAction::Launch(launch) = action {
                let (attention, launched) = (self.attention_seconds(&launch), Some(self.now));
                let shard = self.shard(launch.step.shard);
                *shard = Shard { rows: launch.rows.len(), attention, launched, ..Shard::default() };
                self.send(None, NodeAddress::Tier1(0), Parcel::Launch(launch, ()));
            }
        }
    }

    /// Seconds of one layer's attention: rows of one prompt stand together.
    fn attention_seconds(&self, launch: &Launch) -> f64 {
        let local = self.deployment.local_lane && launch.step.shard.lane == 0;
        let kernels = if local { &self.deployment.tier1 } else { &self.deployment.tier2_kernels };
        let (mut decoding, mut positions, mut seconds) = (0, 0.0, 0.0);
        for rows in launch.rows.chunk_by(|one, other| one.slot == other.slot) {
            let context = f64::from(rows[rows.len() - 1].position + 1);
            if rows.len() == 1 {
                (decoding, positions) = (decoding + 1, positions + context);
            } else {
                seconds += kernels.prefill(rows.len(), context);
            }
        }
        seconds + kernels.attention(decoding, positions / f64::from(decoding.max(1) as u32))
    }

    /// Has a process with a machine to itself look for work, if it is not computing or about to.
    fn call(&mut self, process: usize) {
        let state = &mut self.processes[process];
        if state.work.is_none() && !state.called {
            state.called = true;
            self.schedule(self.now, Event::Looks(process));
        }
    }

    fn look(&mut self, process: usize) {
        self.processes[process].called = false;
        if let Some((work, seconds)) = self.next_work(process) {
            self.processes[process].work = Some((work, self.now));
            self.schedule(self.now + seconds, Event::Computed(process));
        }
    }

    /// Wakes a process that has something to do.
    fn wake(&mut self, process: usize) {
        if self.apart {
            return self.call(process);
        }
        let core = self.processes[process].core;
        if self.cores[core].wake(self.now, process) {
            self.foresee(core);
        }
    }

    /// Gives a process that has its core its next work, or lets it sleep.
    fn start(&mut self, process: usize) {
        let core = self.processes[process].core;
        let Some((work, seconds)) = self.next_work(process) else {
            return self.cores[core].sleep();
        };
        self.processes[process].work = Some((work, self.now));
        self.cores[core].compute(seconds, After::Computed(process));
    }

    /// The next work of a process and its seconds.
    fn next_work(&mut self, process: usize) -> Option<(Started<()>, f64)> {
        let nodes = &mut self.processes[process].nodes;
        let slice = nodes.slice;
        let Ok(work) = nodes.start();
        let work = work?;
        let seconds = match &work {
            Started::Tier1(work) => {
                for task in &work.tasks {
                    self.forecast.queueing_seconds +=
                        self.now - self.shard(task.launch.step.shard).ready[0];
                }
                let rows = work.rows();
                self.forecast.tier1_batches += 1;
                self.forecast.tier1_rows += rows as u64;
                self.tier1_seconds(slice, work, rows)
            }
            Started::Tier2(work) => {
                let Shard { attention, ready, .. } = *self.shard(work.attend.step.shard);
                self.forecast.queueing_seconds += self.now - ready[1];
                self.grains[slice] * attention
            }
        };
        Some((work, seconds))
    }

    fn tier1_seconds(&self, slice: usize, work: &Tier1Work<()>, rows: usize) -> f64 {
        let kernels = &self.deployment.tier1;
        // Layers that this one also stands for lie half before its attention and half after.
        let grain = self.grains[slice];
        let more = if grain > 1.0 { (grain - 1.0) / 2.0 * kernels.fused(rows) } else { 0.0 };
        match work.stage {
            Stage::Enter => kernels.pre(rows) + more,
            Stage::Middle(_) => grain * kernels.fused(rows),
            Stage::Exit if slice + 1 < self.deployment.slices.len() => kernels.post(rows) + more,
            Stage::Exit => {
                let classify = match self.deployment.greedy {
                    true => kernels.classify(work.samples()),
                    false => kernels.logits(work.samples()),
                };
                kernels.post(rows) + more + classify
            }
        }
    }

    fn computed(&mut self, process: usize) {
        let (work, started) = self.processes[process].work.take().expect("it was computing");
        let slice = self.processes[process].nodes.slice;
        let seconds = self.now - started;
        match &work {
            Started::Tier1(work) => {
                self.forecast.tier1_seconds[slice] += seconds;
                self.forecast.tier1_shard_seconds += seconds * work.tasks.len() as f64;
                let shard = work.tasks[0].launch.step.shard;
                self.record(TraceSpan::tier1(slice as u32), started, seconds, shard);
            }
            Started::Tier2(work) => {
                let shard = work.attend.step.shard;
                let worker = slice * self.deployment.lanes() + shard.lane as usize;
                self.forecast.tier2_seconds[worker] += seconds;
                self.record(TraceSpan::tier2(worker as u32), started, seconds, shard);
            }
        }
        let mut outbox = Vec::new();
        let Ok(()) = self.processes[process].nodes.finish(work, &mut outbox);
        for outgoing in outbox {
            self.send(Some(process), outgoing.to, outgoing.parcel);
        }
    }

    fn record(&mut self, span: TraceSpan, started: f64, seconds: f64, shard: ShardId) {
        if let Some(trace) = &mut self.trace {
            trace.push(span, started, seconds, shard.flight, shard.lane);
        }
    }
}
