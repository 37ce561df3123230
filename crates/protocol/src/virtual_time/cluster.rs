//! Nodes, links and the event heap.

use super::model;
use super::setting::{Costs, Death, Failure, Garble, Link, Mishap, Report, Topology};
use crate::dispatcher::{Dispatcher, DispatcherAction, DispatcherEvent};
use crate::message::{Attend, Attended, Home, Launch};
use crate::prompt::{Completion, Prompt, PromptId};
use crate::tier1::{Stage, Tier1Action, Tier1Node, Tier1Work};
use crate::tier2::Tier2Node;
use glinthawk_flight::{Generated, PAGE_POSITIONS, StepId};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};

/// What travels, with its payload.
#[derive(Clone)]
enum Message {
    Launch { slice: usize, launch: Launch, residual: Vec<u64> },
    Attend { slice: usize, attend: Attend, values: Vec<u64> },
    Attended { slice: usize, attended: Attended, values: Vec<u64> },
    Home(Home),
}

impl Message {
    fn step(&self) -> StepId {
        match self {
            Self::Launch { launch, .. } => launch.step,
            Self::Attend { attend, .. } => attend.step,
            Self::Attended { attended, .. } => attended.step,
            Self::Home(home) => home.step,
        }
    }
}

enum Event {
    /// A prompt is submitted; its place among all of them.
    Submit(usize, Prompt),
    Dispatcher(DispatcherEvent),
    Dies {
        slice: usize,
        lane: u32,
    },
    Arrival(Message),
    Garbled {
        slice: usize,
        attend: Attend,
        garble: Garble,
    },
    Tier1Computed {
        slice: usize,
    },
    Tier2Computed {
        slice: usize,
        lane: u32,
        values: Vec<u64>,
    },
}

/// What Tier 1 keeps for a step, a value for each row.
struct Visit {
    residual: Vec<u64>,
    attended: Vec<u64>,
}

struct Tier1 {
    node: Tier1Node<Visit>,
    first_layer: u32,
}

struct Tier2 {
    node: Tier2Node<Vec<u64>>,
    /// (layer, page, offset) → value
    store: Vec<u64>,
    slots: u32,
    pages: u32,
}

struct Cluster<'a, C> {
    costs: &'a mut C,
    now_ns: u64,
    sequence: u64,
    heap: BinaryHeap<Reverse<(u64, u64)>>,
    events: HashMap<u64, Event>,
    /// When each link is free. Messages may overtake each other in its latency: a step has one
    /// message under way at most, and among steps the network sends the deepest first.
    links: HashMap<Link, u64>,
    dispatcher: Dispatcher,
    tier1: Vec<Tier1>,
    /// Slices that something happened to at this moment. A worker takes in everything that is there
    /// before it starts, so they start at the end of the moment.
    stirred: BTreeSet<usize>,
    tier2: BTreeMap<(usize, u32), Tier2>,
    /// The prompts' places, by the names that the dispatcher gave them.
    places: HashMap<PromptId, usize>,
    dead: BTreeSet<(usize, u32)>,
    completions: BTreeMap<usize, Completion>,
    watched: BTreeMap<usize, Vec<u32>>,
    stale: u64,
    refused: u64,
}

/// Runs prompts, each submitted at its time, until all are finished.
pub fn run<C: Costs>(
    topology: &Topology,
    prompts: Vec<(u64, Prompt)>,
    costs: &mut C,
) -> Result<Report, Failure> {
    let config = &topology.dispatcher;
    let slots = config.flights * config.batch;
    let mut first_layer = 0;
    let mut tier1 = Vec::new();
    let mut tier2 = BTreeMap::new();
    for (slice, &layers) in topology.slice_layers.iter().enumerate() {
        let node = Tier1Node::new(layers, topology.tier1_rows_max, config.merge);
        tier1.push(Tier1 { node, first_layer });
        first_layer += layers;
        for (lane, &pages) in config.lane_pages.iter().enumerate() {
            let store = vec![0; (layers * pages * PAGE_POSITIONS) as usize];
            let node = Tier2Node::new(slots, pages);
            tier2.insert((slice, lane as u32), Tier2 { node, store, slots, pages });
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
        places: HashMap::new(),
        dead: BTreeSet::new(),
        completions: BTreeMap::new(),
        watched: BTreeMap::new(),
        stale: 0,
        refused: 0,
    };
    for (place, (time_ns, prompt)) in prompts.into_iter().enumerate() {
        cluster.schedule(time_ns, Event::Submit(place, prompt));
    }
    for &Death { slice, lane, at_ns, noticed_ns } in &topology.deaths {
        cluster.schedule(at_ns, Event::Dies { slice, lane });
        let lost = Event::Dispatcher(DispatcherEvent::LaneLost(lane));
        cluster.schedule(at_ns + noticed_ns, lost);
    }
    cluster.drive()
}

impl<C: Costs> Cluster<'_, C> {
    fn schedule(&mut self, time_ns: u64, event: Event) {
        self.heap.push(Reverse((time_ns, self.sequence)));
        self.events.insert(self.sequence, event);
        self.sequence += 1;
    }

    fn send(&mut self, link: Link, rows: usize, message: Message) {
        let (occupied_ns, latency_ns) = self.costs.link_ns(link, rows);
        let free_ns = self.links.entry(link).or_default();
        *free_ns = (*free_ns).max(self.now_ns) + occupied_ns;
        let arrival_ns = *free_ns + latency_ns;
        let relaunch = Event::Dispatcher(DispatcherEvent::Relaunch(message.step()));
        match self.costs.mishap(link) {
            None => {}
            Some(Mishap::Twice { later_ns }) => {
                self.schedule(arrival_ns + later_ns, Event::Arrival(message.clone()));
            }
            Some(Mishap::Lost { noticed_ns }) => {
                return self.schedule(arrival_ns + noticed_ns, relaunch);
            }
            Some(Mishap::GivenUp { after_ns }) => self.schedule(self.now_ns + after_ns, relaunch),
            Some(Mishap::Garbled(garble)) => {
                if let Message::Attend { slice, attend, .. } = &message {
                    let (slice, attend) = (*slice, attend.clone());
                    self.schedule(arrival_ns, Event::Garbled { slice, attend, garble });
                }
            }
        }
        self.schedule(arrival_ns, Event::Arrival(message));
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
        Ok(Report {
            completions: self.completions,
            stats: self.dispatcher.stats().clone(),
            end_ns: self.now_ns,
            events,
            watched: self.watched,
            stale: self.stale,
            refused: self.refused,
        })
    }

    fn handle(&mut self, event: Event) -> Result<(), Failure> {
        match event {
            Event::Submit(place, prompt) => {
                let id = self.dispatcher.submit(prompt, self.now_ns).map_err(Failure::Rejected)?;
                self.places.insert(id, place);
                return self.dispatch(None);
            }
            Event::Dispatcher(event) => {
                if let DispatcherEvent::LaneLost(lane) = event {
                    self.tier1.iter_mut().for_each(|tier1| tier1.node.lose_lane(lane));
                    self.stirred.extend(0..self.tier1.len());
                }
                return self.dispatch(Some(event));
            }
            Event::Dies { slice, lane } => _ = self.dead.insert((slice, lane)),
            Event::Arrival(message) => return self.arrive(message),
            Event::Garbled { slice, attend, garble } => {
                let worker = self.worker(slice, attend.step.shard.lane);
                match worker.node.take(worker.garbled(attend, garble), Vec::new()) {
                    Ok(true) => return Err(Failure::Accepted(garble)),
                    Ok(false) => self.stale += 1,
                    Err(_) => self.refused += 1,
                }
            }
            Event::Tier1Computed { slice } => {
                let mut actions = Vec::new();
                self.tier1[slice].node.computed(&mut actions);
                for action in actions {
                    self.act_tier1(slice, action);
                }
                self.stirred.insert(slice);
            }
            Event::Tier2Computed { slice, lane, .. } if self.dead.contains(&(slice, lane)) => {}
            Event::Tier2Computed { slice, lane, values } => {
                let attended = self.worker(slice, lane).node.computed();
                let rows = values.len();
                let message = Message::Attended { slice, attended, values };
                self.send(Link::Back(slice, lane), rows, message);
                self.tier2_start(slice, lane);
            }
        }
        Ok(())
    }

    fn arrive(&mut self, message: Message) -> Result<(), Failure> {
        let news = match message {
            Message::Launch { slice, launch, residual } => {
                self.stirred.insert(slice);
                let visit = Visit { residual, attended: Vec::new() };
                self.tier1[slice].node.arrive(launch, visit)
            }
            Message::Attended { slice, attended, values } => {
                self.stirred.insert(slice);
                let visit = self.tier1[slice].node.attended(&attended);
                visit.map(|visit| visit.attended = values).is_some()
            }
            Message::Attend { slice, attend, values } => {
                let lane = attend.step.shard.lane;
                if self.dead.contains(&(slice, lane)) {
                    return Ok(());
                }
                let taken = self.worker(slice, lane).node.take(attend, values);
                let taken = taken.map_err(|error| Failure::Refused(error.to_string()))?;
                self.tier2_start(slice, lane);
                taken
            }
            Message::Home(home) => return self.dispatch(Some(DispatcherEvent::Home(home))),
        };
        self.stale += u64::from(!news);
        Ok(())
    }

    fn worker(&mut self, slice: usize, lane: u32) -> &mut Tier2 {
        self.tier2.get_mut(&(slice, lane)).expect("lanes exist on every slice")
    }

    fn dispatch(&mut self, event: Option<DispatcherEvent>) -> Result<(), Failure> {
        let mut events = Vec::from_iter(event);
        let mut actions = Vec::new();
        // A watcher's stop comes before the next launch, as it does in a job.
        while let Some(event) = events.pop() {
            self.dispatcher.on(event, self.now_ns, &mut actions);
            for action in std::mem::take(&mut actions) {
                self.act(action, &mut events)?;
            }
        }
        self.dispatcher.fill(&mut actions);
        actions.into_iter().try_for_each(|action| self.act(action, &mut events))
    }

    fn act(
        &mut self,
        action: DispatcherAction,
        stops: &mut Vec<DispatcherEvent>,
    ) -> Result<(), Failure> {
        match action {
            DispatcherAction::Launch(launch) => {
                let rows = launch.rows.len();
                let residual = launch.rows.iter().map(|row| model::embed(row.token)).collect();
                self.send(Link::Launch, rows, Message::Launch { slice: 0, launch, residual });
            }
            DispatcherAction::Finish(completion) => {
                let id = completion.id;
                if self.completions.insert(self.places[&id], completion).is_some() {
                    return Err(Failure::Twice(id));
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

    fn act_tier1(&mut self, slice: usize, action: Tier1Action<Visit>) {
        match action {
            Tier1Action::Attend(attend) => {
                let values = self.tier1[slice].node.payload(attend.step).residual.clone();
                let link = Link::Out(slice, attend.step.shard.lane);
                self.send(link, attend.rows.len(), Message::Attend { slice, attend, values });
            }
            Tier1Action::Leave(launch, visit) => self.leave(slice, launch, visit.residual),
        }
    }

    /// Computes what a slice has ready. The values are there at once, as in a worker that hears nothing
    /// while its kernels run; what follows from them comes when the time is over.
    fn start(&mut self, slice: usize) {
        let Some(work) = self.tier1[slice].node.start() else { return };
        self.tier1[slice].compute(&work);
        let node = &self.tier1[slice].node;
        let rows = work.steps.iter().map(|step| node.rows(*step).len()).sum();
        let cost_ns = self.costs.tier1_ns(slice, &work, rows);
        self.schedule(self.now_ns + cost_ns, Event::Tier1Computed { slice });
    }

    fn leave(&mut self, slice: usize, launch: Launch, residual: Vec<u64>) {
        let rows = launch.rows.len();
        if slice + 1 < self.tier1.len() {
            let message = Message::Launch { slice: slice + 1, launch, residual };
            return self.send(Link::Hop(slice), rows, message);
        }
        let tokens = launch.samples.iter().map(|sample| Generated {
            token: model::pick(residual[sample.row as usize], sample),
            logprob: 0.0,
            alternatives: Vec::new(),
        });
        let home = Home { step: launch.step, tokens: tokens.collect() };
        self.send(Link::Home, rows, Message::Home(home));
    }

    fn tier2_start(&mut self, slice: usize, lane: u32) {
        let worker = self.worker(slice, lane);
        let Some((attend, inputs)) = worker.node.start() else { return };
        let values = worker.compute(&attend, inputs);
        let cost_ns = self.costs.tier2_ns(slice, lane, &attend.rows);
        self.schedule(self.now_ns + cost_ns, Event::Tier2Computed { slice, lane, values });
    }
}

impl Tier1 {
    /// Post-attention of the work's rows: the simulated kernel.
    fn compute(&mut self, work: &Tier1Work) {
        let layer = match work.stage {
            Stage::Enter => return,
            Stage::Middle(layer) => layer,
            Stage::Exit => self.node.layers() - 1,
        };
        for step in &work.steps {
            let visit = self.node.payload(*step);
            assert_eq!(visit.attended.len(), visit.residual.len(), "{step:?} was not attended");
            for (residual, attended) in visit.residual.iter_mut().zip(visit.attended.drain(..)) {
                *residual = model::post(*residual, attended, self.first_layer + layer);
            }
        }
    }
}

impl Tier2 {
    /// Appends and attends rows: the simulated kernel.
    fn compute(&mut self, attend: &Attend, inputs: Vec<u64>) -> Vec<u64> {
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

    /// The same rows, so that they make no sense to this node.
    fn garbled(&self, mut attend: Attend, garble: Garble) -> Attend {
        let last = attend.rows.last_mut().expect("a step has rows");
        match garble {
            Garble::Slot => last.slot += self.slots,
            Garble::Page => last.page += self.pages,
            Garble::Position => last.position += self.pages * PAGE_POSITIONS,
            Garble::Order => {
                let last = *last;
                attend.rows.push(last);
            }
        }
        attend
    }
}
