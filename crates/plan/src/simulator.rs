//! The discrete-event loop: compute and links serve one at a time, delay is pure, the deepest stage goes first.
//!
//! It mirrors the protocol: a shard (the rows of a flight on one lane) travels by itself, and a Tier-1 node merges the
//! shards that wait for a stage, whole flights first, up to a flight's rows. Links are first in, first out and fed in order of
//! time, so they need no events of their own: a send knows its arrival at once. Times are whole nanoseconds.

mod merge;
mod outcome;
mod tier1;
mod tier2;

pub(crate) use outcome::Outcome;

use crate::heap::{Heap, key};
use crate::program::{Program, Stage};
use crate::queue::Queues;
use crate::random::Random;
use crate::trace::{Trace, TraceSpan};
use outcome::Tally;
use tier1::Tier1;
use tier2::{Tier2, WayNs};

/// Steps of every shard before the measurement, and of all shards together, so that transients settle even with
/// few shards.
const STEPS_SETTLING: usize = 2;
const STEPS_SETTLING_TOGETHER: usize = 150;
/// The fewest steps that are measured, over all shards, so that few shards do not mean few samples; more if chance
/// plays a part.
const STEPS_MEASURED: usize = 100;
const STEPS_MEASURED_RANDOM: usize = 1000;
/// Steps of every shard to settle, and the fewest to measure, if the run begins prompt by prompt.
const STEPS_ONE_BY_ONE: (usize, usize) = (12, 12);
/// Up to this many shards the run begins as a job does, prompt by prompt: how batches merge later depends on it.
/// With more shards, the bunch that this creates takes too long to spread, so they begin with all their rows.
const SHARDS_ONE_BY_ONE: usize = 40;

/// What happens: the kind in the lowest bits, above it the index of a shard, node or worker.
mod event {
    /// A shard is ready for its next stage on a Tier-1 node.
    pub const READY: u32 = 0;
    /// A Tier-1 node finished a batch.
    pub const COMPUTED: u32 = 1;
    /// A Tier-1 node finished its own attention.
    pub const ATTENDED_LOCALLY: u32 = 2;
    /// A shard reached a Tier-2 node.
    pub const ARRIVED: u32 = 3;
    /// A Tier-2 node finished attention, or has a shard waiting once it is free.
    pub const ATTENDED: u32 = 4;
    /// A Tier-1 node has waited long enough.
    pub const WAKES: u32 = 5;
    /// Bits of the kind.
    pub const BITS: u32 = 3;
}

#[derive(Clone, Copy, Debug, Default)]
struct Shard {
    stage: u32,
    step: u32,
    began_ns: u64,
    /// The Tier-1 node that it is at, and the stage that it waits for, is computed at or comes to next.
    node: u32,
    next: u32,
    waits: bool,
    /// Steps, as the furthest shard of its flight counts them.
    lap: u32,
}

/// The node of a shard between nodes.
const NOWHERE: u32 = u32::MAX;

struct Machine<'a> {
    program: &'a Program,
    lanes: usize,
    /// First stage of every node.
    first_stages: Vec<u32>,
    ways: Vec<WayNs>,
    /// Nanoseconds by (time of the program, rows); `u64::MAX` if not computed yet.
    times_ns: Vec<u64>,
    delay_ns: u64,
    /// Whether a reply's arrival is known when its attention starts: no other lane takes the link in between.
    foreseen: bool,
    now_ns: u64,
    sequence: u32,
    /// Times in nanoseconds, sequence numbers and what happens, all in the keys.
    events: Heap<()>,
    handled: u64,
    shards: Vec<Shard>,
    tier1: Vec<Tier1>,
    tier1_queues: Queues,
    /// The parts of flights, by (node, flight), that wait for Tier 1 and for none of their flight.
    whole: Queues,
    /// The stage that each of them waits for.
    whole_at: Vec<u32>,
    one_by_one: bool,
    called: Vec<u32>,
    /// An empty list for the shards of a batch that attend on Tier 1.
    kept: Vec<u32>,
    tier2: Vec<Tier2>,
    tier2_queues: Queues,
    random: Random,
    steps: u64,
    tally: Tally,
    trace: Option<&'a mut Trace>,
}

/// The time of an event's key.
fn time_of(key: u128) -> u64 {
    (key >> 64) as u64
}

fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9).round() as u64
}

/// Runs `program` until every shard has settled and been measured; `trace` collects what was busy when.
pub(crate) fn run(program: &Program, trace: Option<&mut Trace>) -> Outcome {
    let mut machine = Machine::new(program, trace);
    let shards = machine.shards.len();
    // A start prompt by prompt takes longer to settle.
    let (settling_least, measured_least) =
        if machine.one_by_one { STEPS_ONE_BY_ONE } else { (STEPS_SETTLING, 1) };
    let settling = STEPS_SETTLING_TOGETHER.div_ceil(shards).max(settling_least);
    machine.run_until((shards * settling) as u64);
    let began = machine.now_ns;
    machine.start_measuring();
    let least = if program.is_deterministic() { STEPS_MEASURED } else { STEPS_MEASURED_RANDOM };
    let measured = least.div_ceil(shards).max(measured_least);
    machine.run_until((shards * (settling + measured)) as u64);
    machine.outcome((machine.now_ns - began) as f64 * 1e-9)
}

impl<'a> Machine<'a> {
    fn new(program: &'a Program, trace: Option<&'a mut Trace>) -> Self {
        let (nodes, lanes) = (program.nodes, program.lanes.len());
        let shards = program.flights * lanes;
        let mut first_stages = vec![u32::MAX; nodes];
        let mut stages = vec![0; nodes];
        for (index, stage) in program.stages.iter().enumerate() {
            let first = &mut first_stages[stage.node as usize];
            *first = (*first).min(index as u32);
            stages[stage.node as usize] += 1;
        }
        let stages = stages.into_iter().max().expect("there is a slice");
        let ways = program.ways.iter().map(|way| WayNs {
            send: nanoseconds(way.send_seconds),
            send_far: nanoseconds(way.send_far_seconds),
            attend: nanoseconds(way.attend_seconds),
            reply: nanoseconds(way.reply_seconds),
            reply_far: nanoseconds(way.reply_far_seconds),
        });
        let ways: Vec<WayNs> = ways.collect();
        let one_by_one = program.one_by_one && shards <= SHARDS_ONE_BY_ONE;
        let mut machine = Self {
            program,
            lanes,
            first_stages,
            foreseen: lanes == 1 || ways.iter().all(|way| way.reply == 0),
            ways,
            times_ns: vec![u64::MAX; program.times.len() * (program.rows + 1)],
            delay_ns: nanoseconds(program.delay_seconds),
            now_ns: 0,
            sequence: 0,
            events: Heap::default(),
            handled: 0,
            shards: vec![Shard { node: NOWHERE, ..Shard::default() }; shards],
            tier1: vec![Tier1::default(); nodes],
            tier1_queues: Queues::new(nodes, stages, shards),
            whole: Queues::new(nodes, stages, nodes * program.flights),
            whole_at: vec![NOWHERE; nodes * program.flights],
            one_by_one,
            called: Vec::new(),
            kept: Vec::new(),
            tier2: vec![Tier2::default(); nodes * lanes],
            tier2_queues: Queues::new(nodes * lanes, stages, shards),
            random: Random::new(program.seed),
            steps: 0,
            tally: Tally { steps: vec![(0, 0); lanes], ..Tally::default() },
            trace,
        };
        for shard in 0..shards as u32 {
            machine.wait_for_tier1(shard);
        }
        machine
    }

    fn run_until(&mut self, steps: u64) {
        while self.steps < steps {
            let next = self.events.first();
            // Everything that happens at one moment is taken in before a node starts, so that batches
            // are larger.
            if !self.called.is_empty() && next.is_none_or(|key| time_of(key) > self.now_ns) {
                while let Some(node) = self.called.pop() {
                    self.start_tier1(node);
                }
                continue;
            }
            let (key, ()) = self.events.pop().expect("a shard is always on its way");
            self.now_ns = time_of(key);
            self.handled += 1;
            let what = key as u32;
            let index = what >> event::BITS;
            match what & ((1 << event::BITS) - 1) {
                event::READY => self.wait_for_tier1(index),
                event::COMPUTED => self.computed(index),
                event::ATTENDED_LOCALLY => self.attended_locally(index),
                event::ARRIVED => self.arrived(index),
                event::WAKES => self.call(index),
                _ => self.attended(index as usize),
            }
        }
    }

    fn schedule(&mut self, at_ns: u64, kind: u32, index: u32) {
        self.sequence = self.sequence.wrapping_add(1);
        let what = (index << event::BITS) | kind;
        self.events.push(key(at_ns, (u64::from(self.sequence) << 32) | u64::from(what)), ());
    }

    fn jittered(&mut self, ns: u64) -> u64 {
        let jitter = self.program.jitter;
        if jitter == 0.0 {
            return ns;
        }
        (ns as f64 * (1.0 + jitter * (2.0 * self.random.unit() - 1.0))) as u64
    }

    fn stage(&self, shard: u32) -> &'a Stage {
        &self.program.stages[self.shards[shard as usize].stage as usize]
    }

    fn lane(&self, shard: u32) -> usize {
        shard as usize % self.lanes
    }

    /// Whether the shard has only one row yet: prompts arrive one by one, and each launches a shard while one is
    /// home. Only a flight for each slice is used at first, and prompts for a full one wait when another is opened.
    fn has_one_row(&self, shard: u32) -> bool {
        let flight = shard as usize / self.lanes;
        self.one_by_one && self.shards[shard as usize].step == 0 && flight < self.program.nodes
    }

    fn rows(&self, shard: u32) -> usize {
        if self.has_one_row(shard) { 1 } else { self.program.lanes[self.lane(shard)].rows }
    }

    /// The shard's part of a lane's time.
    fn part(&self, shard: u32, ns: u64) -> u64 {
        if !self.has_one_row(shard) {
            return ns;
        }
        nanoseconds(ns as f64 * 1e-9 / self.program.lanes[self.lane(shard)].rows as f64)
    }

    fn advance(&mut self, shard: u32) {
        let stage = self.stage(shard);
        let mut at_ns = self.now_ns;
        if stage.hop_row_seconds > 0.0 || stage.hop_delay_seconds > 0.0 {
            let rows = self.rows(shard) as f64;
            let free = &mut self.tier1[stage.node as usize].hop_free_ns;
            *free = (*free).max(self.now_ns) + nanoseconds(stage.hop_row_seconds * rows);
            at_ns = *free + nanoseconds(stage.hop_delay_seconds);
        }
        self.move_on(shard, at_ns);
    }

    /// The shard turns to its next stage at `at_ns`; after the last one a step is complete.
    fn move_on(&mut self, shard: u32, at_ns: u64) {
        let lane = self.lane(shard);
        let state = &mut self.shards[shard as usize];
        state.stage += 1;
        if state.stage as usize == self.program.stages.len() {
            let (steps, ns) = &mut self.tally.steps[lane];
            *steps += 1;
            *ns += at_ns - state.began_ns;
            (state.stage, state.began_ns) = (0, at_ns);
            state.step += 1;
            self.steps += 1;
            self.count_lap(shard);
        }
        if at_ns > self.now_ns {
            self.schedule(at_ns, event::READY, shard);
        } else {
            self.wait_for_tier1(shard);
        }
    }

    fn record(&mut self, span: TraceSpan, start_ns: u64, shard: u32, ns: u64) {
        if let Some(trace) = &mut self.trace {
            let stage = self.shards[shard as usize].stage;
            let flight = shard / self.lanes as u32;
            trace.push(span, start_ns as f64 * 1e-9, ns as f64 * 1e-9, flight, stage);
        }
    }
}
