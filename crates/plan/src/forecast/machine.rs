//! The driver: the real dispatcher and nodes over forecast kernels, links and cores.

use super::cores::{Core, Turn};
use super::{Deployment, Forecast, Place};
use crate::calculus::Traffic;
use crate::heap::{Heap, time_key, time_of};
use crate::profile::Overheads;
use crate::random::Random;
use crate::trace::{Span, Trace};
use crate::workload::Length;
use glinthawk_protocol::{
    Attend, Attended, Dispatcher, DispatcherAction, DispatcherConfig, DispatcherEvent, Generated,
    Home, Launch, Merge, Prompt, ShardId, Stage, Tier1Action, Tier1Node, Tier1Work, Tier2Node,
};

/// Bytes of a message before its rows.
const HEADER_BYTES: f64 = 64.0;
/// Bytes of a row's entry in a message's table.
const ROW_ENTRY_BYTES: f64 = 12.0;
/// After this many events, the rest of a job is assumed to continue at the same pace.
const EVENTS_MAX: u64 = 200_000_000;

enum Message {
    Launch { slice: usize, launch: Launch },
    Attend { slice: usize, attend: Attend },
    Attended { slice: usize, attended: Attended },
    Home(Home),
}

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

/// A message under way.
struct Parcel {
    message: Message,
    bytes: f64,
    /// Messages of the real engine that it stands for.
    count: f64,
    way: Way,
    to_core: usize,
    /// The process that receives it; none is the dispatcher.
    receiver: Option<usize>,
}

/// What a message crosses.
#[derive(Clone, Copy)]
enum Way {
    /// Nothing: dispatcher and first slice are neighbours.
    Near,
    /// From a slice's Tier-1 node to an attention worker of its, or back.
    Tiers { slice: usize, worker: usize, back: bool },
    /// From a slice to the next.
    Hop { slice: usize },
    /// From the last slice to the dispatcher beside the first: delay without weight.
    Home,
}

enum Work {
    Tier1(usize, Tier1Work),
    Tier2(usize, Attend),
}

/// A process: it computes one thing at a time.
struct Process {
    core: usize,
    work: Option<(Work, f64)>,
    /// Whether it is about to look for work.
    called: bool,
}

pub(super) struct Machine<'a> {
    deployment: &'a Deployment,
    /// Whether every process has its machine to itself and messages cost nothing but their way: no core is shared,
    /// and none needs to be simulated.
    apart: bool,
    now: f64,
    sequence: u64,
    events: Heap<Event>,
    parcels: Vec<Option<Parcel>>,
    parcels_free: Vec<usize>,
    /// When each attention worker's link is free, out and back; (slice, lane), row-major.
    links: Vec<[f64; 2]>,
    /// When each Tier-1 node's port to Tier 2 is free, out and back.
    ports: Vec<[f64; 2]>,
    /// When each slice's link to the next is free.
    hops: Vec<f64>,
    cores: Vec<Core<After>>,
    processes: Vec<Process>,
    dispatcher: Dispatcher,
    tier1: Vec<Tier1Node>,
    /// (slice, lane), row-major
    tier2: Vec<Tier2Node>,
    lengths: std::slice::Iter<'a, Length>,
    /// Layers that one simulated layer of each slice stands for.
    grains: Vec<f64>,
    /// Seconds of one layer's attention of each shard in the air.
    attention: Vec<f64>,
    launched: Vec<Option<f64>>,
    /// When each shard became ready where it is: for weights, for attention.
    ready: Vec<[f64; 2]>,
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
        let slices = deployment.slices.len();
        let simulated = |layers: &usize| layers.div_ceil(grain);
        let shards = deployment.flights as usize * deployment.lanes();
        let lanes = deployment.lanes();
        let processes = match deployment.place {
            Place::OneProcess { .. } => 1,
            _ => slices * (1 + deployment.tier2),
        };
        let cores = match deployment.place {
            Place::OneProcess { .. } => 1,
            Place::SharedCores(cores) => cores.min(processes),
            // One more for the dispatcher.
            Place::OwnMachines => processes + 1,
        };
        let merge = if deployment.whole_flights { Merge::WholeFlights } else { Merge::Ready };
        let rows_max = deployment.batch as usize * lanes;
        Self {
            deployment,
            apart: deployment.place == Place::OwnMachines
                && deployment.tier1.overheads() == Overheads::default(),
            now: 0.0,
            sequence: 0,
            events: Heap::default(),
            parcels: Vec::new(),
            parcels_free: Vec::new(),
            links: vec![[0.0; 2]; slices * lanes],
            ports: vec![[0.0; 2]; slices],
            hops: vec![0.0; slices],
            cores: vec![Core::new(processes); cores],
            processes: (0..processes)
                .map(|index| Process { core: index % cores, work: None, called: false })
                .collect(),
            dispatcher: Dispatcher::new(DispatcherConfig {
                flights: deployment.flights,
                batch: deployment.batch,
                chunk: deployment.chunk,
                lane_pages: vec![deployment.lane_pages; lanes],
                context_max: deployment.context_max,
                oversubscription: 3.0,
                merge,
            }),
            tier1: deployment
                .slices
                .iter()
                .map(|layers| Tier1Node::new(simulated(layers) as u32, rows_max, merge))
                .collect(),
            tier2: (0..slices * lanes).map(|_| Tier2Node::new(0, deployment.lane_pages)).collect(),
            lengths: lengths.iter(),
            grains: deployment
                .slices
                .iter()
                .map(|layers| *layers as f64 / simulated(layers) as f64)
                .collect(),
            attention: vec![0.0; shards],
            launched: vec![None; shards],
            ready: vec![[0.0; 2]; shards],
            random: Random::new(1),
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

    fn shard(&self, shard: ShardId) -> usize {
        shard.flight as usize * self.deployment.lanes() + shard.lane as usize
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
            After::Sent(parcel) => self.sent(parcel),
            After::Received(parcel) => {
                let parcel = self.parcels[parcel].take().map(|held| (parcel, held));
                let (index, held) = parcel.expect("a parcel is received once");
                self.parcels_free.push(index);
                self.handle(held.message);
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

    /// The process of an attention worker.
    fn tier2_process(&self, slice: usize, lane: usize) -> usize {
        let local = usize::from(self.deployment.local_lane);
        match self.deployment.place {
            Place::OneProcess { .. } => 0,
            _ if lane < local => slice,
            _ => self.tier1.len() + slice * self.deployment.tier2 + lane - local,
        }
    }

    fn in_one_process(&self) -> bool {
        matches!(self.deployment.place, Place::OneProcess { .. })
    }

    fn tier1_process(&self, slice: usize) -> usize {
        if self.in_one_process() { 0 } else { slice }
    }

    /// Sends a message; one within a process is there at once.
    fn send(&mut self, from: Option<usize>, to: Option<usize>, rows: usize, message: Message) {
        if from == to || self.in_one_process() {
            return match message {
                // The dispatcher's own work takes time here too.
                Message::Home(_) => {
                    let work = self.dispatching(rows);
                    let (way, receiver) = (Way::Near, None);
                    let parcel =
                        Parcel { message, bytes: 0.0, count: 1.0, way, to_core: 0, receiver };
                    let parcel = self.parcel(parcel);
                    self.urgent(0, work, After::Received(parcel));
                }
                message => self.handle(message),
            };
        }
        let shape = &self.deployment.shape;
        let traffic = Traffic::ResidualHome;
        let lanes = self.deployment.lanes();
        let tiers = |slice: usize, shard: ShardId, back: bool| {
            let way = Way::Tiers { slice, worker: slice * lanes + shard.lane as usize, back };
            (way, self.grains[slice])
        };
        let (payload, (way, count)) = match &message {
            Message::Attend { slice, attend } => {
                (traffic.out_bytes(shape), tiers(*slice, attend.step.shard, false))
            }
            Message::Attended { slice, attended } => {
                (traffic.back_bytes(shape), tiers(*slice, attended.step.shard, true))
            }
            Message::Launch { slice: 0, .. } => (0.0, (Way::Near, 1.0)),
            Message::Launch { slice, .. } => {
                (traffic.hop_bytes(shape), (Way::Hop { slice: slice - 1 }, 1.0))
            }
            Message::Home(_) if self.tier1.len() == 1 => (0.0, (Way::Near, 1.0)),
            Message::Home(_) => (0.0, (Way::Home, 1.0)),
        };
        let bytes = count * (HEADER_BYTES + rows as f64 * (ROW_ENTRY_BYTES + payload));
        match &message {
            Message::Attended { .. } => self.forecast.tier2_bytes += bytes,
            _ if from.is_some() => self.forecast.tier1_bytes += bytes,
            _ => {}
        }
        let core_of = |machine: &Self, process: Option<usize>| match process {
            Some(process) => machine.processes[process].core,
            None => machine.dispatcher_core(),
        };
        let (from_core, to_core) = (core_of(self, from), core_of(self, to));
        let overheads = self.deployment.tier1.overheads();
        let seconds = count * overheads.message + overheads.byte * bytes;
        let parcel = Parcel { message, bytes, count, way, to_core, receiver: to };
        let parcel = self.parcel(parcel);
        self.urgent(from_core, seconds, After::Sent(parcel));
    }

    fn dispatching(&self, rows: usize) -> f64 {
        let overheads = self.deployment.tier1.overheads();
        overheads.step + overheads.row * rows as f64
    }

    fn parcel(&mut self, parcel: Parcel) -> usize {
        let index = self.parcels_free.pop().unwrap_or(self.parcels.len());
        if index == self.parcels.len() {
            self.parcels.push(None);
        }
        self.parcels[index] = Some(parcel);
        index
    }

    fn sent(&mut self, index: usize) {
        let Parcel { bytes, count, way, .. } =
            *self.parcels[index].as_ref().expect("a parcel under way");
        let Deployment { delay, bandwidth, port, hop, .. } = self.deployment;
        let at = match way {
            Way::Near => self.now,
            Way::Home => self.now + hop.rtt / 2.0,
            Way::Hop { slice } => {
                let free = &mut self.hops[slice];
                *free = free.max(self.now) + bytes / hop.bandwidth;
                *free + hop.rtt / 2.0
            }
            // What leaves one end arrives at the other at once: the slower end decides.
            Way::Tiers { slice, worker, back } => {
                let near = &mut self.ports[slice][usize::from(back)];
                let far = &mut self.links[worker][usize::from(back)];
                let begins = if back { far.max(self.now) } else { near.max(self.now) };
                *near = near.max(begins) + bytes / port;
                *far = far.max(begins) + bytes / bandwidth;
                near.max(*far) + count * delay
            }
        };
        self.schedule(at, Event::Arrived(index));
    }

    /// A message waits until its receiver's core has woken or another process leaves it. The wait is usually short and
    /// sometimes longer. If it always took the same time, identical nodes would stay in step for ever.
    fn arrived(&mut self, index: usize) {
        let overheads = self.deployment.tier1.overheads();
        if overheads.wake == 0.0 && overheads.crowded == 0.0 {
            return self.admitted(index);
        }
        let parcel = self.parcels[index].as_ref().expect("a parcel under way");
        let (core, receiver) = (parcel.to_core, parcel.receiver);
        let others = self.processes.iter().enumerate().any(|(index, process)| {
            process.core == core && Some(index) != receiver && process.work.is_some()
        });
        let mean = match (self.cores[core].is_idle(), others) {
            (true, _) => parcel.count * overheads.wake,
            (false, true) => parcel.count * overheads.crowded,
            (false, false) => 0.0,
        };
        let wait = -mean * (1.0 - self.random.unit()).ln();
        self.schedule(self.now + wait, Event::Admitted(index));
    }

    fn admitted(&mut self, index: usize) {
        let parcel = self.parcels[index].as_ref().expect("a parcel under way");
        let overheads = self.deployment.tier1.overheads();
        let mut seconds = parcel.count * overheads.message + overheads.byte * parcel.bytes;
        let core = parcel.to_core;
        if let Message::Home(home) = &parcel.message {
            seconds += self.dispatching(home.tokens.len());
        }
        self.urgent(core, seconds, After::Received(index));
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Launch { slice, launch } => {
                let shard = self.shard(launch.step.shard);
                self.ready[shard][0] = self.now;
                self.tier1[slice].arrive(launch, ());
                self.wake(self.tier1_process(slice));
            }
            Message::Attend { slice, attend } => {
                let lane = attend.step.shard.lane as usize;
                let shard = self.shard(attend.step.shard);
                self.ready[shard][1] = self.now;
                let worker = slice * self.deployment.lanes() + lane;
                // Its page tables are not needed, and entering every row on every layer would take most of the time.
                let attend = Attend { rows: Vec::new(), ..attend };
                self.tier2[worker].take(attend, ()).expect("nothing to enter");
                self.wake(self.tier2_process(slice, lane));
            }
            Message::Attended { slice, attended } => {
                let shard = self.shard(attended.step.shard);
                self.ready[shard][0] = self.now;
                self.tier1[slice].attended(&attended);
                self.wake(self.tier1_process(slice));
            }
            Message::Home(home) => {
                let shard = self.shard(home.step.shard);
                if let Some(launched) = self.launched[shard].take() {
                    self.forecast.steps += 1;
                    self.forecast.step_seconds += self.now - launched;
                }
                self.dispatch(DispatcherEvent::Home(home));
                self.feed();
            }
        }
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
                let shard = self.shard(launch.step.shard);
                self.attention[shard] = self.attention_seconds(&launch);
                self.launched[shard] = Some(self.now);
                let rows = launch.rows.len();
                let to = Some(self.tier1_process(0));
                self.send(None, to, rows, Message::Launch { slice: 0, launch });
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

    fn next_work(&mut self, process: usize) -> Option<(Work, f64)> {
        let slices = self.tier1.len();
        if self.in_one_process() {
            return self.tier2_work(0, 0).or_else(|| self.tier1_work(0));
        }
        if process < slices {
            let own = self.tier1_work(process);
            let local = self.deployment.local_lane;
            return own.or_else(|| local.then(|| self.tier2_work(process, 0)).flatten());
        }
        let index = process - slices;
        let local = usize::from(self.deployment.local_lane);
        let (slice, lane) = (index / self.deployment.tier2, index % self.deployment.tier2 + local);
        self.tier2_work(slice, lane)
    }

    fn tier1_work(&mut self, slice: usize) -> Option<(Work, f64)> {
        let work = self.tier1[slice].start()?;
        let node = &self.tier1[slice];
        let rows: usize = work.steps.iter().map(|step| node.rows(*step).len()).sum();
        let kernels = &self.deployment.tier1;
        // Layers that this one also stands for lie half before its attention and half after.
        let grain = self.grains[slice];
        let more = if grain > 1.0 { (grain - 1.0) / 2.0 * kernels.fused(rows) } else { 0.0 };
        let seconds = match work.stage {
            Stage::Enter => kernels.pre(rows) + more,
            Stage::Middle(_) => grain * kernels.fused(rows),
            Stage::Exit if slice + 1 < self.tier1.len() => kernels.post(rows) + more,
            Stage::Exit => {
                let samples = work.steps.iter().map(|step| node.samples(*step).len()).sum();
                let classify = match self.deployment.greedy {
                    true => kernels.classify(samples),
                    false => kernels.logits(samples),
                };
                kernels.post(rows) + more + classify
            }
        };
        for step in &work.steps {
            let waited = self.now - self.ready[self.shard(step.shard)][0];
            self.forecast.queueing_seconds += waited;
        }
        self.forecast.tier1_batches += 1;
        self.forecast.tier1_rows += rows as u64;
        Some((Work::Tier1(slice, work), seconds))
    }

    fn tier2_work(&mut self, slice: usize, lane: usize) -> Option<(Work, f64)> {
        let (attend, ()) = self.tier2[slice * self.deployment.lanes() + lane].start()?;
        let shard = self.shard(attend.step.shard);
        self.forecast.queueing_seconds += self.now - self.ready[shard][1];
        let seconds = self.grains[slice] * self.attention[shard];
        Some((Work::Tier2(slice, attend), seconds))
    }

    fn computed(&mut self, process: usize) {
        let (work, started) = self.processes[process].work.take().expect("it was computing");
        let seconds = self.now - started;
        match work {
            Work::Tier1(slice, work) => {
                self.forecast.tier1_seconds[slice] += seconds;
                self.forecast.tier1_shard_seconds += seconds * work.steps.len() as f64;
                self.record(Span::tier1(slice as u32), started, seconds, &work.steps[0].shard);
                let mut actions = Vec::new();
                self.tier1[slice].computed(&mut actions);
                for action in actions {
                    self.leave_tier1(slice, action);
                }
            }
            Work::Tier2(slice, attend) => {
                let lane = attend.step.shard.lane as usize;
                let worker = slice * self.deployment.lanes() + lane;
                self.forecast.tier2_seconds[worker] += seconds;
                self.record(Span::tier2(worker as u32), started, seconds, &attend.step.shard);
                let attended = self.tier2[worker].computed();
                let rows = self.tier1[slice].rows(attend.step).len();
                let (from, to) = (self.tier2_process(slice, lane), self.tier1_process(slice));
                let message = Message::Attended { slice, attended };
                self.send(Some(from), Some(to), rows, message);
            }
        }
    }

    fn leave_tier1(&mut self, slice: usize, action: Tier1Action<()>) {
        let from = Some(self.tier1_process(slice));
        match action {
            Tier1Action::Attend(attend) => {
                let to = Some(self.tier2_process(slice, attend.step.shard.lane as usize));
                let rows = attend.rows.len();
                self.send(from, to, rows, Message::Attend { slice, attend });
            }
            Tier1Action::Leave(launch, ()) if slice + 1 < self.tier1.len() => {
                let to = Some(self.tier1_process(slice + 1));
                let rows = launch.rows.len();
                self.send(from, to, rows, Message::Launch { slice: slice + 1, launch });
            }
            Tier1Action::Leave(launch, ()) => {
                let token = Generated { token: 0, logprob: 0.0, alternatives: Vec::new() };
                let tokens = vec![token; launch.samples.len()];
                let home = Home { step: launch.step, tokens };
                self.send(from, None, launch.rows.len(), Message::Home(home));
            }
        }
    }

    fn record(&mut self, span: Span, started: f64, seconds: f64, shard: &ShardId) {
        if let Some(trace) = &mut self.trace {
            trace.push(span, started, seconds, shard.flight, shard.lane);
        }
    }
}
