//! The transport and the clock of a forecast: the real dispatcher and nodes over forecast kernels, links and cores.

mod alike;
mod parcels;
mod work;

use super::cores::{Core, Turn};
use super::network::Network;
use super::processes::{Nodes, processes};
use super::{Deployment, Forecast, Place};
use crate::heap::{Heap, time_key, time_of};
use crate::profile::Overheads;
use crate::random::Random;
use crate::trace::Trace;
use crate::workload::Length;
use alike::Alike;
use glinthawk_protocol::{
    Dispatcher, DispatcherAction, DispatcherEvent, Launch, NodeAddress, Parcel, Prompt, ShardId,
    Started,
};
use parcels::Transit;

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
    /// A process has waited long enough for the rest of a flight.
    Wakes { process: usize, at_ns: u64 },
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
    attention_seconds: f64,
    launched_seconds: Option<f64>,
    /// When it became ready where it is: for weights, for attention.
    ready_seconds: [f64; 2],
}

pub(super) struct Machine<'a> {
    deployment: &'a Deployment,
    /// Whether every process has its machine to itself and messages cost nothing but their way: no core is shared,
    /// and none needs to be simulated.
    apart: bool,
    now_seconds: f64,
    sequence: u64,
    events: Heap<Event>,
    transits: Vec<Option<Transit>>,
    transits_free: Vec<usize>,
    network: Network,
    cores: Vec<Core<After>>,
    processes: Vec<Process>,
    dispatcher: Dispatcher,
    lengths: std::slice::Iter<'a, Length>,
    alike: Alike,
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
            Place::OneProcess => 1,
            Place::SharedCores(cores) => cores.min(processes),
            // For kernels, for what is received, for what is sent, and one for the dispatcher.
            Place::OwnMachines => 3 * processes + 1,
        };
        let process = |(index, nodes): (usize, _)| Process {
            core: index % cores,
            nodes,
            work: None,
            called: false,
        };
        let alike = Alike::new(lengths, deployment.page_positions);
        Self {
            deployment,
            apart: deployment.place == Place::OwnMachines
                && deployment.tier1.overheads() == Overheads::default(),
            now_seconds: 0.0,
            sequence: 0,
            events: Heap::default(),
            transits: Vec::new(),
            transits_free: Vec::new(),
            network: Network::new(slices, lanes),
            cores: vec![Core::new(processes); cores],
            processes: hosted.into_iter().enumerate().map(process).collect(),
            dispatcher: Dispatcher::new(deployment.dispatcher(alike.any)),
            lengths: lengths.iter(),
            alike,
            grains: deployment
                .slices
                .iter()
                .map(|layers| *layers as f64 / layers.div_ceil(grain) as f64)
                .collect(),
            shards: vec![Shard::default(); (deployment.flights as usize + slices) * lanes],
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
            if let Event::Wakes { process, at_ns } = event
                && self.processes[process].nodes.patient_until_ns() != Some(at_ns)
            {
                continue; // what it waited for came
            }
            self.now_seconds = time_of(key);
            handled += 1;
            match event {
                Event::Core { core, version } if self.cores[core].version == version => {
                    match self.cores[core].turn(self.now_seconds) {
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
                Event::Wakes { process, .. } => self.wake(process),
            }
            if handled == EVENTS_MAX {
                break;
            }
        }
        let stats = self.dispatcher.stats();
        self.forecast.rows_done = stats.rows_computed - stats.rows_recomputed + stats.shared;
        self.forecast.tokens_shared = stats.shared as f64;
        self.forecast.preemptions = stats.preemptions;
        self.forecast.seconds = self.now_seconds;
        self.forecast.events = handled;
        self.forecast
    }

    fn now_ns(&self) -> u64 {
        (self.now_seconds * 1e9).round() as u64
    }

    fn schedule(&mut self, at_seconds: f64, event: Event) {
        self.sequence += 1;
        self.events.push(time_key(at_seconds, self.sequence), event);
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
        let Deployment { slices, crowding, .. } = self.deployment;
        let in_tier2 = (slices.len()..self.processes.len()).contains(&core);
        let seconds = crowding[usize::from(in_tier2)] * seconds;
        self.cores[core].add_urgent(self.now_seconds, seconds, after);
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

    /// The cores that a process has for the network beside its own: those of a process on a device, or those that a
    /// process which only attends leaves to it.
    fn network_cores(&self, process: usize) -> usize {
        let Deployment { place, tier1, tier2_kernels, slices, strands, .. } = self.deployment;
        let kernels = if process < slices.len() { tier1 } else { tier2_kernels };
        match *place {
            Place::OwnMachines if kernels.on_device() => 2,
            Place::OwnMachines if process >= slices.len() && *strands == 1 => {
                kernels.network_cores()
            }
            _ => 0,
        }
    }

    /// The core on which a process receives.
    fn receiving_core(&self, process: usize) -> usize {
        match self.network_cores(process) {
            0 => self.processes[process].core,
            _ => self.processes.len() + process,
        }
    }

    /// The core on which it sends.
    fn sending_core(&self, process: usize) -> usize {
        match self.network_cores(process) {
            2 => 2 * self.processes.len() + process,
            _ => self.receiving_core(process),
        }
    }

    /// How many times as long a Tier-2 node that leaves cores to the network attends as it would with them, and without
    /// messages that pass through memory.
    fn beside_messages(&self) -> f64 {
        let Deployment { place, tier2_kernels, strands, .. } = self.deployment;
        let leaves_cores = *strands == 1 && tier2_kernels.network_cores() > 0;
        match *place == Place::OwnMachines && leaves_cores {
            true => 1.0 + tier2_kernels.overheads().slower_beside_messages,
            false => 1.0,
        }
    }

    fn in_one_process(&self) -> bool {
        self.deployment.place == Place::OneProcess
    }

    fn handle(&mut self, to: NodeAddress, mut parcel: Parcel<()>) {
        let now = self.now_seconds;
        let shard = self.shard(parcel.step().shard);
        match &mut parcel {
            // Its page tables are not needed, and entering every row on every layer would take most of the time.
            Parcel::Attend(attend, ()) => {
                shard.ready_seconds[1] = now;
                (attend.rows, attend.shared) = (Vec::new(), Vec::new());
            }
            _ => shard.ready_seconds[0] = now,
        }
        if let Parcel::Home(home) = parcel {
            if let Some(launched) = shard.launched_seconds.take() {
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
            let (tokens, tokens_max) = (self.alike.tokens(length), length.output as u32);
            let prompt = Prompt { tokens, tokens_max, ..Prompt::default() };
            // A prompt that is too long gets an error line and takes no time.
            _ = self.dispatcher.submit(prompt, self.now_ns());
        }
        self.launch();
    }

    fn dispatch(&mut self, event: DispatcherEvent) {
        self.dispatcher.on(event, self.now_ns(), &mut Vec::new());
    }

    fn launch(&mut self) {
        let mut actions = Vec::new();
        self.dispatcher.fill(&mut actions);
        for action in actions {
            if let DispatcherAction::Launch(launch) = action {
                self.alike.note(&launch);
                let (attention_seconds, launched_seconds) =
                    (self.attention_seconds(&launch), Some(self.now_seconds));
                let shard = self.shard(launch.step.shard);
                *shard = Shard {
                    rows: launch.rows.len(),
                    attention_seconds,
                    launched_seconds,
                    ..Shard::default()
                };
                self.send(None, NodeAddress::Tier1(0), Parcel::Launch(launch, ()));
            }
        }
    }

    /// Seconds of one layer's attention.
    fn attention_seconds(&self, launch: &Launch) -> f64 {
        let local = self.deployment.local_lane && launch.step.shard.lane == 0;
        let kernels = if local { &self.deployment.tier1 } else { &self.deployment.tier2_kernels };
        let crowding = self.deployment.crowding[usize::from(!local)];
        let seconds = crowding * self.alike.attention_seconds(launch, kernels);
        if local { seconds } else { self.beside_messages() * seconds }
    }
}
