//! Nodes, links and the event heap.

mod faults;
mod made;
mod planted;

use super::kernels::{Contexts, Values, Weights};
use super::setting::{Costs, Failure, Garble, Mishap, SimulatedCluster, VirtualRun, Wire};
use crate::dispatcher::{Dispatcher, DispatcherAction, DispatcherEvent};
use crate::driver::{Driver, Outgoing, Started};
use crate::message::{Attend, NodeAddress, Parcel};
use crate::prompt::{Completion, Prompt, PromptId};
use crate::roster::{Roster, RosterShape};
use crate::watch::Watch;
use faults::Follows;
use glinthawk_flight::{ShardId, StepId};
use made::{garbled, nodes};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};

/// A node with simulated kernels.
type Node = Driver<Values, Weights, Contexts>;

enum Event {
    /// A prompt is submitted; its place among all of them.
    Submit(usize, Prompt),
    Dispatcher(DispatcherEvent),
    /// Something happens to a node: its place among the faults.
    Fault(usize),
    /// What follows from it.
    Follows(Follows),
    /// To which of the hosts that a node had: one that is gone hears nothing.
    Arrival(NodeAddress, u64, Parcel<Values>),
    Garbled(NodeAddress, u64, Attend, Garble),
    Computed(NodeAddress, u64, Started<Values>),
    /// A Tier-1 node has waited long enough for the rest of a flight.
    Wakes(NodeAddress, u64),
}

struct Cluster<'a, C> {
    topology: &'a SimulatedCluster,
    costs: &'a mut C,
    now_ns: u64,
    sequence: u64,
    heap: BinaryHeap<Reverse<(u64, u64)>>,
    events: HashMap<u64, Event>,
    /// When each link is free. Messages may overtake each other in its latency: a step has one
    /// message under way at most, and among steps the network sends the deepest first.
    links: HashMap<Wire, u64>,
    dispatcher: Dispatcher,
    /// The nodes that live, each with a driver of its own.
    nodes: BTreeMap<NodeAddress, Node>,
    /// Hosts that lost their place and do not know it, each with the hosts that know it: no later one does.
    ousted: BTreeMap<(NodeAddress, u64), (Node, BTreeMap<NodeAddress, u64>)>,
    /// Until when nodes are cut off.
    cut_off: BTreeMap<NodeAddress, u64>,
    /// How many hosts each node had before.
    hosts: BTreeMap<NodeAddress, u64>,
    roster: Roster,
    watch: Watch,
    /// Nodes that hang and were not found yet, and when another host offers itself.
    hanging: BTreeMap<NodeAddress, Option<u64>>,
    /// Looks for them so far.
    looks: u64,
    /// The epochs of messages that are disguised as later ones.
    disguised: Vec<u64>,
    /// The newest step of every shard.
    launched: BTreeMap<ShardId, StepId>,
    /// Nodes that are leaving, and when another host offers itself.
    leaving: BTreeMap<NodeAddress, Option<u64>>,
    counts: Counts,
    /// Tier-1 nodes that something happened to at this moment. A worker takes in everything that is
    /// there before it starts, so they start at the end of the moment.
    stirred: BTreeSet<(NodeAddress, u64)>,
    /// The prompts' places, by the names that the dispatcher gave them.
    places: HashMap<PromptId, usize>,
    completions: BTreeMap<usize, Completion>,
    /// How many prompts there are.
    prompts: usize,
    watched: BTreeMap<usize, Vec<u32>>,
    stale: u64,
    refused: u64,
    waits: u64,
}

/// How often what followed from faults.
#[derive(Default)]
struct Counts {
    replaced: u64,
    expired: u64,
    drained: u64,
    found: u64,
    doubled: u64,
}

/// Runs prompts, each submitted at its time, until all are finished.
pub fn run<C: Costs>(
    topology: &SimulatedCluster,
    prompts: Vec<(u64, Prompt)>,
    costs: &mut C,
) -> Result<VirtualRun, Failure> {
    let config = &topology.dispatcher;
    let mut cluster = Cluster {
        topology,
        costs,
        now_ns: 0,
        sequence: 0,
        heap: BinaryHeap::new(),
        events: HashMap::new(),
        links: HashMap::new(),
        dispatcher: Dispatcher::new(config.clone()),
        nodes: nodes(topology),
        ousted: BTreeMap::new(),
        cut_off: BTreeMap::new(),
        hosts: BTreeMap::new(),
        roster: Roster::hosted(RosterShape {
            pipelines: 1,
            slices: topology.slice_layers.len(),
            workers: config.lane_pages.len() as u32,
            tier1_attends: false,
            strands: 1,
        }),
        watch: Watch::new(topology.patience_ns.clone()),
        hanging: BTreeMap::new(),
        looks: 0,
        disguised: Vec::new(),
        launched: BTreeMap::new(),
        leaving: BTreeMap::new(),
        counts: Counts::default(),
        stirred: BTreeSet::new(),
        places: HashMap::new(),
        completions: BTreeMap::new(),
        prompts: prompts.len(),
        watched: BTreeMap::new(),
        stale: 0,
        refused: 0,
        waits: 0,
    };
    for (place, (time_ns, prompt)) in prompts.into_iter().enumerate() {
        cluster.schedule(time_ns, Event::Submit(place, prompt));
    }
    for (number, fault) in topology.faults.iter().enumerate() {
        cluster.schedule(fault.at_ns, Event::Fault(number));
    }
    cluster.drive()
}

impl<C: Costs> Cluster<'_, C> {
    fn schedule(&mut self, time_ns: u64, event: Event) {
        self.heap.push(Reverse((time_ns, self.sequence)));
        self.events.insert(self.sequence, event);
        self.sequence += 1;
    }

    fn send(&mut self, outgoing: Outgoing<Values>) {
        let Outgoing { to, rows, parcel } = outgoing;
        let link = match (to, &parcel) {
            (NodeAddress::Dispatcher, _) => Wire::Home,
            (NodeAddress::Tier2(slice, lane), _) => Wire::Out(slice, lane),
            (NodeAddress::Tier1(slice), Parcel::Attended(attended, _)) => {
                Wire::Back(slice, attended.step.shard.lane)
            }
            (NodeAddress::Tier1(0), _) => Wire::Launch,
            (NodeAddress::Tier1(slice), _) => Wire::Hop(slice - 1),
        };
        let (occupied_ns, latency_ns) = self.costs.link_ns(link, rows);
        let free_ns = self.links.entry(link).or_default();
        *free_ns = (*free_ns).max(self.now_ns) + occupied_ns;
        let arrival_ns = (*free_ns + latency_ns).max(self.reached_ns(link));
        let host = self.host(to);
        let relaunch = Event::Dispatcher(DispatcherEvent::Relaunch(parcel.step()));
        match self.costs.mishap(link) {
            None => {}
            Some(Mishap::Twice { later_ns }) => {
                self.schedule(arrival_ns + later_ns, Event::Arrival(to, host, parcel.clone()));
            }
            Some(Mishap::Lost { noticed_ns }) => {
                return self.schedule(arrival_ns + noticed_ns, relaunch);
            }
            Some(Mishap::GivenUp { after_ns }) => self.schedule(self.now_ns + after_ns, relaunch),
            Some(Mishap::Garbled(garble)) => {
                if let Parcel::Attend(attend, _) = &parcel {
                    self.schedule(arrival_ns, Event::Garbled(to, host, attend.clone(), garble));
                }
            }
        }
        self.schedule(arrival_ns, Event::Arrival(to, host, parcel));
    }

    /// Which of its hosts a node has.
    fn host(&self, node: NodeAddress) -> u64 {
        self.hosts.get(&node).copied().unwrap_or(0)
    }

    /// The node as this host knows it, if it lives.
    fn at_host(&mut self, node: NodeAddress, host: u64) -> Option<&mut Node> {
        match self.host(node) == host {
            true => self.nodes.get_mut(&node),
            false => self.ousted.get_mut(&(node, host)).map(|(node, _)| node),
        }
    }

    fn drive(mut self) -> Result<VirtualRun, Failure> {
        let mut events = 0;
        loop {
            let next = self.heap.peek();
            if next.is_none_or(|Reverse((time_ns, _))| *time_ns > self.now_ns) {
                for (node, host) in std::mem::take(&mut self.stirred) {
                    self.start(node, host);
                }
            }
            let Some(Reverse((time_ns, sequence))) = self.heap.pop() else { break };
            let event = self.events.remove(&sequence).expect("scheduled once");
            if let Event::Wakes(node, host) = event
                && self.at_host(node, host).and_then(|node| node.patient_until_ns())
                    != Some(time_ns)
            {
                continue; // what it waited for came
            }
            self.now_ns = time_ns;
            events += 1;
            self.handle(event)?;
        }
        if !self.dispatcher.is_idle() {
            return Err(Failure::Deadlock(self.dispatcher.prompt_ids()));
        }
        Ok(VirtualRun {
            completions: self.completions,
            stats: self.dispatcher.stats().clone(),
            end_ns: self.now_ns,
            events,
            watched: self.watched,
            stale: self.stale,
            refused: self.refused,
            waits: self.waits,
            replaced: self.counts.replaced,
            expired: self.counts.expired,
            drained: self.counts.drained,
            found: self.counts.found,
            doubled: self.counts.doubled,
        })
    }

    fn handle(&mut self, event: Event) -> Result<(), Failure> {
        match event {
            Event::Submit(place, prompt) => {
                let id = self
                    .dispatcher
                    .submit(prompt, self.dispatcher_ns())
                    .map_err(Failure::Rejected)?;
                self.places.insert(id, place);
                return self.dispatch(None);
            }
            Event::Dispatcher(event) => {
                self.plant_leak(&event);
                return self.dispatch(Some(event));
            }
            Event::Fault(number) => return self.fault(number),
            Event::Follows(what) => return self.follow(what),
            Event::Arrival(_, _, Parcel::Home(home)) => {
                self.watch.home(home.step, self.now_ns);
                return self.dispatch(Some(DispatcherEvent::Home(home)));
            }
            Event::Arrival(node, host, parcel) => {
                let parcel = self.disguise(parcel);
                let Some(driver) = self.at_host(node, host) else { return Ok(()) };
                let news = driver.deliver(parcel);
                let news = news.map_err(|error| Failure::Refused(error.to_string()))?;
                self.stale += u64::from(!news);
                self.stir(node, host);
            }
            Event::Garbled(node, host, attend, garble) => {
                let garbled = garbled(&self.topology.dispatcher, attend, garble);
                let Some(driver) = self.at_host(node, host) else { return Ok(()) };
                match driver.deliver(Parcel::Attend(garbled, Values::new())) {
                    Ok(true) => return Err(Failure::Accepted(garble)),
                    Ok(false) => self.stale += 1,
                    Err(_) => self.refused += 1,
                }
            }
            Event::Computed(node, host, work) => {
                let now_ns = self.now_ns;
                let Some(driver) = self.at_host(node, host) else { return Ok(()) };
                let mut outbox = Vec::new();
                let Ok(()) = driver.finish(work, now_ns, &mut outbox);
                for mut outgoing in outbox {
                    self.unmask(&mut outgoing.parcel);
                    if self.is_known(node, host, outgoing.to) {
                        self.send(outgoing);
                    }
                }
                self.stir(node, host);
            }
            Event::Wakes(node, host) => self.stir(node, host),
        }
        Ok(())
    }

    fn stir(&mut self, node: NodeAddress, host: u64) {
        match node {
            NodeAddress::Tier1(_) => _ = self.stirred.insert((node, host)),
            _ => self.start(node, host),
        }
    }

    /// Starts what a node has ready. The values are there at once, as in a worker that hears nothing
    /// while its kernels run; what follows from them comes when the time is over.
    fn start(&mut self, node: NodeAddress, host: u64) {
        let now_ns = self.now_ns;
        // It may have died since something happened to it.
        let Some(driver) = self.at_host(node, host) else { return };
        let Ok(work) = driver.start(now_ns);
        let patient_until_ns = driver.patient_until_ns();
        let Some(work) = work else {
            if let Some(until_ns) = patient_until_ns {
                self.waits += 1;
                self.schedule(until_ns, Event::Wakes(node, host));
            }
            return;
        };
        let cost_ns = match (node, &work) {
            (NodeAddress::Tier1(slice), Started::Tier1(work)) => {
                self.costs.tier1_ns(slice, work.stage, work.rows())
            }
            (NodeAddress::Tier2(slice, lane), Started::Tier2(work)) => {
                self.costs.tier2_ns(slice, lane, &work.attend.rows)
            }
            _ => unreachable!("a node has the work of its tier"),
        };
        self.schedule(self.now_ns + cost_ns, Event::Computed(node, host, work));
        self.start(node, host);
    }

    fn dispatch(&mut self, event: Option<DispatcherEvent>) -> Result<(), Failure> {
        let mut events = Vec::from_iter(event);
        let mut actions = Vec::new();
        // A watcher's stop comes before the next launch, as it does in a job.
        while let Some(event) = events.pop() {
            self.dispatcher.on(event, self.dispatcher_ns(), &mut actions);
            for action in std::mem::take(&mut actions) {
                self.act(action, &mut events)?;
            }
        }
        self.dispatcher.fill(&mut actions);
        actions.into_iter().try_for_each(|action| self.act(action, &mut events))?;
        self.check();
        self.let_drained_go()
    }

    fn act(
        &mut self,
        action: DispatcherAction,
        stops: &mut Vec<DispatcherEvent>,
    ) -> Result<(), Failure> {
        match action {
            DispatcherAction::Launch(launch) => {
                let (rows, step) = (launch.rows.len(), launch.step);
                self.launched.insert(step.shard, step);
                if !self.roster.is_open(step.shard.lane) {
                    return Ok(()); // it is launched again when the lane goes on
                }
                self.watch.launch(step, self.now_ns);
                let parcel = Parcel::Launch(launch, Values::new());
                self.send(Outgoing { to: NodeAddress::Tier1(0), rows, parcel });
            }
            DispatcherAction::Finish(completion) => {
                for completion in self.retired(completion) {
                    let id = completion.id;
                    if self.completions.insert(self.places[&id], completion).is_some() {
                        return Err(Failure::Twice(id));
                    }
                }
            }
            DispatcherAction::Token(id, generated) => {
                let place = self.places[&id];
                let seen = self.watched.entry(place).or_default();
                seen.push(generated.token);
                if let Some(stop) = self.costs.watch(place, seen.len()) {
                    let event = DispatcherEvent::Stop(id, stop.kept);
                    match stop.after_ns {
                        0 => stops.push(event),
                        later_ns => self.schedule(self.now_ns + later_ns, Event::Dispatcher(event)),
                    }
                }
            }
        }
        Ok(())
    }
}
