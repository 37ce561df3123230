//! The discrete-event loop: compute and links serve one at a time, delay is pure, the deepest step goes first.
//!
//! Links are first in, first out and fed in order of time, so they need no events of their own: a send knows its
//! arrival at once. What remains are at most four events per flight, layer and shard.

use crate::heap::{Heap, key, time_key, time_of};
use crate::program::{Bottleneck, Fan, Program};
use crate::random::{Random, mix};
use crate::trace::{Span, Trace};

/// Passes of every flight before the measurement: transients settle.
const PASSES_SETTLING: usize = 2;
/// Passes that are measured at least, of all flights together, so that few flights do not mean few samples.
const PASSES_MEASURED: usize = 24;
/// Passes of every flight that are measured where chance plays a part.
const PASSES_MEASURED_RANDOM: usize = 4;

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A flight is ready for its next step on a Tier-1 node.
    Ready { flight: u32 },
    /// A Tier-1 node finished a step.
    Computed { node: u32 },
    /// A Tier-1 node finished its local attention.
    AttendedLocally { node: u32 },
    /// A shard reached a Tier-2 node.
    Arrived { flight: u32, node: u32, shard: u32 },
    /// A Tier-2 node finished attention.
    Attended { node: u32, shard: u32 },
}

#[derive(Clone, Copy, Debug, Default)]
struct Flight {
    step: u32,
    /// Branches of the fan that have not come back.
    pending: u32,
    pass: u32,
    /// When the last branch so far is back.
    back_at: f64,
    began: f64,
}

/// A node that serves one flight at a time.
#[derive(Clone, Debug, Default)]
struct Server {
    busy: bool,
    flight: u32,
    /// Shards on their way to a Tier-2 node whose arrival is an event.
    in_transit: u32,
    busy_seconds: f64,
    waiting: Heap<u32>,
}

/// What a run measured.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// Rows per second; never above the bound where nothing is random.
    pub rows_per_second: f64,
    /// Mean seconds of a pass: the time per token.
    pub pass_seconds: f64,
    /// Busy share of each Tier-1 node.
    pub tier1_busy: Vec<f64>,
    /// Busy share of each simulated Tier-2 worker.
    pub tier2_busy: Vec<f64>,
    /// Busy share of each Tier-1 node's outgoing inter-tier link.
    pub link_busy: Vec<f64>,
    /// Events processed.
    pub events: u64,
    /// The limit that the bound names.
    pub bottleneck: Bottleneck,
}

struct Machine<'a> {
    program: &'a Program,
    now: f64,
    sequence: u64,
    events: Heap<Event>,
    flights: Vec<Flight>,
    tier1: Vec<Server>,
    tier2: Vec<Server>,
    /// When each link is free again.
    out_free: Vec<f64>,
    back_free: Vec<f64>,
    hop_free: Vec<f64>,
    node_out_free: Vec<f64>,
    out_seconds: Vec<f64>,
    random: Random,
    passes: u64,
    pass_seconds: f64,
    trace: Option<&'a mut Trace>,
}

/// Runs `program` until every flight has settled and been measured; `trace` collects what was busy when.
pub(crate) fn run(program: &Program, trace: Option<&mut Trace>) -> Outcome {
    let mut machine = Machine::new(program, trace);
    let flights = program.flights as u64;
    let mut handled = 0u64;
    machine.run_until(flights * PASSES_SETTLING as u64, &mut handled);
    let began = machine.now;
    machine.start_measuring();
    let least = if program.is_deterministic() { 1 } else { PASSES_MEASURED_RANDOM };
    let measured = PASSES_MEASURED.div_ceil(program.flights).max(least);
    machine.run_until(flights * (PASSES_SETTLING + measured) as u64, &mut handled);
    machine.outcome(machine.now - began, measured, handled)
}

impl<'a> Machine<'a> {
    fn new(program: &'a Program, trace: Option<&'a mut Trace>) -> Self {
        let nodes = program.fans.len();
        let mut machine = Self {
            program,
            now: 0.0,
            sequence: 0,
            events: Heap::default(),
            flights: vec![Flight::default(); program.flights],
            tier1: vec![Server::default(); nodes],
            tier2: vec![Server::default(); program.workers],
            out_free: vec![0.0; nodes],
            back_free: vec![0.0; nodes],
            hop_free: vec![0.0; nodes],
            node_out_free: vec![0.0; program.workers],
            out_seconds: vec![0.0; nodes],
            random: Random::new(program.seed),
            passes: 0,
            pass_seconds: 0.0,
            trace,
        };
        for flight in 0..program.flights as u32 {
            machine.wait_for_tier1(flight);
        }
        machine
    }

    fn run_until(&mut self, passes: u64, handled: &mut u64) {
        while self.passes < passes {
            let (key, event) = self.events.pop().expect("a flight is always on its way");
            self.now = time_of(key);
            *handled += 1;
            match event {
                Event::Ready { flight } => self.wait_for_tier1(flight),
                Event::Computed { node } => self.computed(node),
                Event::AttendedLocally { node } => self.attended_locally(node),
                Event::Arrived { flight, node, shard } => self.arrived(flight, node, shard),
                Event::Attended { node, shard } => self.attended(node, shard),
            }
        }
    }

    fn start_measuring(&mut self) {
        self.tier1.iter_mut().chain(&mut self.tier2).for_each(|server| server.busy_seconds = 0.0);
        self.out_seconds.fill(0.0);
        self.pass_seconds = 0.0;
    }

    fn outcome(&self, seconds: f64, measured: usize, events: u64) -> Outcome {
        let flights = self.program.flights as f64;
        let measured = flights * measured as f64;
        let mut rows_per_second = measured * self.program.rows as f64 / seconds;
        let (bound, bottleneck) = self.program.bound();
        // A short run may drain what a transient has piled up; a settled one cannot beat its busiest resource.
        if self.program.is_deterministic() {
            rows_per_second = rows_per_second.min(bound);
        }
        let share = |busy: f64| (busy / seconds).min(1.0);
        Outcome {
            rows_per_second,
            pass_seconds: self.pass_seconds / measured,
            tier1_busy: self.tier1.iter().map(|server| share(server.busy_seconds)).collect(),
            tier2_busy: self.tier2.iter().map(|server| share(server.busy_seconds)).collect(),
            link_busy: self.out_seconds.iter().map(|&busy| share(busy)).collect(),
            events,
            bottleneck,
        }
    }

    fn schedule(&mut self, at: f64, event: Event) {
        self.sequence += 1;
        self.events.push(time_key(at, self.sequence), event);
    }

    fn jittered(&mut self, seconds: f64) -> f64 {
        let jitter = self.program.jitter;
        if jitter == 0.0 {
            seconds
        } else {
            seconds * (1.0 + jitter * (2.0 * self.random.unit() - 1.0))
        }
    }

    /// Deepest step first, then in order of arrival.
    fn rank(&mut self, flight: u32) -> u128 {
        self.sequence += 1;
        key(u64::from(u32::MAX - self.flights[flight as usize].step), self.sequence)
    }

    fn wait_for_tier1(&mut self, flight: u32) {
        let node = self.program.steps[self.flights[flight as usize].step as usize].node;
        if self.tier1[node as usize].busy {
            let rank = self.rank(flight);
            self.tier1[node as usize].waiting.push(rank, flight);
        } else {
            self.compute(node, flight);
        }
    }

    fn compute(&mut self, node: u32, flight: u32) {
        let step = self.flights[flight as usize].step;
        let seconds = self.jittered(self.program.steps[step as usize].seconds);
        self.record(Span::tier1(node), self.now, flight, step, seconds);
        let server = &mut self.tier1[node as usize];
        (server.busy, server.flight) = (true, flight);
        server.busy_seconds += seconds;
        self.schedule(self.now + seconds, Event::Computed { node });
    }

    fn computed(&mut self, node: u32) {
        let flight = self.tier1[node as usize].flight;
        let step = &self.program.steps[self.flights[flight as usize].step as usize];
        if !step.attends {
            self.advance(flight);
            return self.release_tier1(node);
        }
        let fan = &self.program.fans[node as usize];
        self.send_shards(node, flight, fan);
        if fan.local > 0.0 {
            let seconds = self.jittered(fan.local);
            self.record(
                Span::tier1_attention(node),
                self.now,
                flight,
                self.flights[flight as usize].step,
                seconds,
            );
            self.tier1[node as usize].busy_seconds += seconds;
            self.schedule(self.now + seconds, Event::AttendedLocally { node });
        } else {
            self.release_tier1(node);
        }
    }

    fn send_shards(&mut self, node: u32, flight: u32, fan: &Fan) {
        let state = &mut self.flights[flight as usize];
        state.pending = fan.shards.len() as u32 + u32::from(fan.local > 0.0);
        state.back_at = self.now;
        for (shard, path) in fan.shards.iter().enumerate() {
            let seconds = f64::from(path.copies) * path.send;
            let sent = self.out_free[node as usize].max(self.now) + seconds;
            self.out_free[node as usize] = sent;
            self.out_seconds[node as usize] += seconds;
            let arrival = sent + path.send_extra + self.program.delay;
            let server = &mut self.tier2[path.worker as usize];
            // What is sent later arrives later, so an idle node with nothing under way will start this shard at once.
            if !server.busy && server.in_transit == 0 {
                self.attend(arrival, flight, node, shard as u32);
            } else {
                server.in_transit += 1;
                self.schedule(arrival, Event::Arrived { flight, node, shard: shard as u32 });
            }
        }
    }

    fn release_tier1(&mut self, node: u32) {
        match self.tier1[node as usize].waiting.pop() {
            Some((_, flight)) => self.compute(node, flight),
            None => self.tier1[node as usize].busy = false,
        }
    }

    fn attended_locally(&mut self, node: u32) {
        let flight = self.tier1[node as usize].flight;
        self.came_back(flight, self.now);
        self.release_tier1(node);
    }

    fn arrived(&mut self, flight: u32, node: u32, shard: u32) {
        let worker = self.program.fans[node as usize].shards[shard as usize].worker as usize;
        self.tier2[worker].in_transit -= 1;
        if self.tier2[worker].busy {
            let rank = self.rank(flight);
            self.tier2[worker].waiting.push(rank, flight);
        } else {
            self.attend(self.now, flight, node, shard);
        }
    }

    fn attend(&mut self, start: f64, flight: u32, node: u32, shard: u32) {
        let path = &self.program.fans[node as usize].shards[shard as usize];
        let state = self.flights[flight as usize];
        let seconds = match path.samples.len() as u64 {
            0 => path.attend,
            // The same rows all through a pass: the draw depends on flight, pass and node alone.
            count => {
                let draw =
                    mix(self.program.seed ^ (u64::from(flight) << 32) ^ u64::from(state.pass))
                        ^ u64::from(path.worker);
                path.samples[(mix(draw) % count) as usize]
            }
        };
        let seconds = self.jittered(seconds);
        self.record(Span::tier2(path.worker), start, flight, state.step, seconds);
        let server = &mut self.tier2[path.worker as usize];
        (server.busy, server.flight) = (true, flight);
        server.busy_seconds += seconds;
        self.schedule(start + seconds, Event::Attended { node, shard });
    }

    fn attended(&mut self, node: u32, shard: u32) {
        let path = &self.program.fans[node as usize].shards[shard as usize];
        let (worker, copies) = (path.worker as usize, f64::from(path.copies));
        let flight = self.tier2[worker].flight;
        let free = &mut self.back_free[node as usize];
        let received = if self.program.whole_flights {
            *free = free.max(self.now) + copies * path.reply;
            *free
        } else {
            let start = self.node_out_free[worker].max(self.now);
            self.node_out_free[worker] = start + path.reply_node;
            // The first copy's shard left earlier than the last's by the sends between them, and so returns earlier.
            let first = free.max(start - (copies - 1.0) * path.send);
            *free = first + copies * path.reply;
            free.max(start + path.reply.max(path.reply_node))
        };
        self.came_back(flight, received + self.program.delay);
        match self.tier2[worker].waiting.pop() {
            Some((_, next)) => self.attend(self.now, next, node, shard),
            None => self.tier2[worker].busy = false,
        }
    }

    fn came_back(&mut self, flight: u32, at: f64) {
        let state = &mut self.flights[flight as usize];
        state.back_at = state.back_at.max(at);
        state.pending -= 1;
        if state.pending == 0 {
            let at = state.back_at;
            self.move_on(flight, at);
        }
    }

    fn advance(&mut self, flight: u32) {
        let step = &self.program.steps[self.flights[flight as usize].step as usize];
        let mut at = self.now;
        if step.hop > 0.0 || step.hop_delay > 0.0 {
            let free = &mut self.hop_free[step.node as usize];
            *free = free.max(self.now) + step.hop;
            at = *free + step.hop_delay;
        }
        self.move_on(flight, at);
    }

    /// The flight turns to its next step at time `at`; after the last one a pass is complete.
    fn move_on(&mut self, flight: u32, at: f64) {
        let state = &mut self.flights[flight as usize];
        state.step += 1;
        if state.step as usize == self.program.steps.len() {
            self.pass_seconds += at - state.began;
            (state.step, state.began) = (0, at);
            state.pass += 1;
            self.passes += 1;
        }
        // At once where nothing lies between: a node must see the deeper step before it picks its next flight.
        if at > self.now {
            self.schedule(at, Event::Ready { flight });
        } else {
            self.wait_for_tier1(flight);
        }
    }

    fn record(&mut self, span: Span, start: f64, flight: u32, step: u32, seconds: f64) {
        if let Some(trace) = &mut self.trace {
            trace.push(span, start, seconds, flight, step);
        }
    }
}
