//! The discrete-event loop: compute and links serve one at a time, delay is pure, the deepest stage goes first.
//!
//! It mirrors the protocol: a shard (the rows of a flight on one lane) travels by itself, and a Tier-1 node merges the
//! shards that are ready at its deepest stage, up to a flight's rows. Links are first in, first out and fed in order of
//! time, so they need no events of their own: a send knows its arrival at once. Times are whole nanoseconds.

use crate::bound::Bottleneck;
use crate::heap::{Heap, key};
use crate::program::{Lane, Program, Stage};
use crate::queue::Queues;
use crate::random::{Random, mix};
use crate::trace::{Trace, TraceSpan};

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
    /// Bits of the kind.
    pub const BITS: u32 = 3;
}

#[derive(Clone, Copy, Debug, Default)]
struct Shard {
    stage: u32,
    step: u32,
    /// Its place among those that wait for Tier 1.
    ticket: u32,
    began: u64,
}

#[derive(Clone, Debug, Default)]
struct Tier1 {
    busy: bool,
    /// Whether it is in the list of nodes to be started.
    called: bool,
    batch: Vec<u32>,
    busy_ns: u64,
    out_free: u64,
    out_ns: u64,
    back_free: u64,
    hop_free: u64,
}

#[derive(Clone, Debug, Default)]
struct Tier2 {
    shard: u32,
    free: u64,
    /// Whether an event will come once it is free.
    wakes: bool,
    /// Shards on their way whose arrival is an event.
    in_transit: u32,
    waiting: u32,
    busy_ns: u64,
    in_free: u64,
    out_free: u64,
}

/// A lane's route in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct WayNs {
    send: u64,
    send_far: u64,
    attend: u64,
    reply: u64,
    reply_far: u64,
}

/// Sums over the measured steps.
#[derive(Clone, Debug, Default)]
struct Tally {
    /// Steps and their nanoseconds, by lane.
    steps: Vec<(u64, u64)>,
    /// Nanoseconds of shards in Tier-1 batches and in attention.
    tier1_ns: u64,
    tier2_ns: u64,
}

/// What a run measured.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// Rows per second; never above the bound if nothing is random.
    pub rows_per_second: f64,
    /// Mean seconds of a step: the time per token.
    pub step_seconds: f64,
    /// Seconds of a step in Tier-1 batches.
    pub tier1_seconds: f64,
    /// Seconds of a step in attention on Tier 2.
    pub tier2_seconds: f64,
    /// Fraction of time that each Tier-1 node is busy.
    pub tier1_busy: Vec<f64>,
    /// The same for each Tier-2 node, slice by slice.
    pub tier2_busy: Vec<f64>,
    /// The same for each Tier-1 node's outgoing inter-tier link.
    pub link_busy: Vec<f64>,
    /// Events processed.
    pub events: u64,
    /// What no run exceeds.
    pub bound: f64,
    /// The limit that the bound names.
    pub bottleneck: Bottleneck,
}

struct Machine<'a> {
    program: &'a Program,
    lanes: usize,
    /// First stage of every node.
    first_stages: Vec<u32>,
    ways: Vec<WayNs>,
    /// Nanoseconds by (time of the program, rows); `u64::MAX` if not computed yet.
    times: Vec<u64>,
    delay: u64,
    /// Whether a reply's arrival is known when its attention starts: no other lane takes the link in between.
    foreseen: bool,
    now: u64,
    sequence: u32,
    /// Times in nanoseconds, sequence numbers and what happens, all in the keys.
    events: Heap<()>,
    handled: u64,
    shards: Vec<Shard>,
    tier1: Vec<Tier1>,
    /// One queue for each node and class.
    tier1_queues: Queues,
    /// The class of every lane, and the rows of every class: lanes of one class have as many rows.
    classes: Vec<usize>,
    class_rows: Vec<usize>,
    one_by_one: bool,
    tickets: u32,
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
    let began = machine.now;
    machine.start_measuring();
    let least = if program.is_deterministic() { STEPS_MEASURED } else { STEPS_MEASURED_RANDOM };
    let measured = least.div_ceil(shards).max(measured_least);
    machine.run_until((shards * (settling + measured)) as u64);
    machine.outcome((machine.now - began) as f64 * 1e-9)
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
            send: nanoseconds(way.send),
            send_far: nanoseconds(way.send_far),
            attend: nanoseconds(way.attend),
            reply: nanoseconds(way.reply),
            reply_far: nanoseconds(way.reply_far),
        });
        let ways: Vec<WayNs> = ways.collect();
        let mut class_rows: Vec<usize> = program.lanes.iter().map(|lane| lane.rows).collect();
        let one_by_one = program.one_by_one && shards <= SHARDS_ONE_BY_ONE;
        class_rows.extend(one_by_one.then_some(1));
        class_rows.sort_unstable();
        class_rows.dedup();
        let class = |lane: &Lane| class_rows.binary_search(&lane.rows).expect("its rows are there");
        let classes = program.lanes.iter().map(class).collect();
        let mut machine = Self {
            program,
            lanes,
            first_stages,
            foreseen: lanes == 1 || ways.iter().all(|way| way.reply == 0),
            ways,
            times: vec![u64::MAX; program.times.len() * (program.rows + 1)],
            delay: nanoseconds(program.delay),
            now: 0,
            sequence: 0,
            events: Heap::default(),
            handled: 0,
            shards: vec![Shard::default(); shards],
            tier1: vec![Tier1::default(); nodes],
            tier1_queues: Queues::new(nodes * class_rows.len(), stages, shards),
            classes,
            class_rows,
            one_by_one,
            tickets: 0,
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
            if !self.called.is_empty() && next.is_none_or(|key| time_of(key) > self.now) {
                while let Some(node) = self.called.pop() {
                    self.start_tier1(node);
                }
                continue;
            }
            let (key, ()) = self.events.pop().expect("a shard is always on its way");
            self.now = time_of(key);
            self.handled += 1;
            let what = key as u32;
            let index = what >> event::BITS;
            match what & ((1 << event::BITS) - 1) {
                event::READY => self.wait_for_tier1(index),
                event::COMPUTED => self.computed(index),
                event::ATTENDED_LOCALLY => self.attended_locally(index),
                event::ARRIVED => self.arrived(index),
                _ => self.attended(index as usize),
            }
        }
    }

    fn start_measuring(&mut self) {
        for node in &mut self.tier1 {
            (node.busy_ns, node.out_ns) = (0, 0);
        }
        self.tier2.iter_mut().for_each(|worker| worker.busy_ns = 0);
        self.tally = Tally { steps: vec![(0, 0); self.lanes], ..Tally::default() };
    }

    fn outcome(&self, seconds: f64) -> Outcome {
        let program = self.program;
        let lanes = program.lanes.iter().zip(&self.tally.steps);
        // Little's law, lane by lane: it is steadier than counting what comes home within a window.
        let rate = |(lane, &(steps, ns)): (&Lane, &(u64, u64))| {
            if steps == 0 {
                return 0.0;
            }
            (program.flights * lane.rows) as f64 * steps as f64 / (ns as f64 * 1e-9)
        };
        let mut rows_per_second: f64 = lanes.map(rate).sum();
        let (bound, bottleneck) = program.bound();
        // A short run may drain what a transient piled up, but a settled one cannot beat its busiest resource.
        if program.is_deterministic() {
            rows_per_second = rows_per_second.min(bound);
        }
        let share = |ns: u64| (ns as f64 * 1e-9 / seconds).min(1.0);
        let remote = |worker: &usize| !program.lanes[worker % self.lanes].local;
        let workers = (0..self.tier2.len()).filter(remote);
        let steps: u64 = self.tally.steps.iter().map(|(steps, _)| steps).sum();
        let per_step = |ns: u64| ns as f64 * 1e-9 / steps as f64;
        Outcome {
            rows_per_second,
            step_seconds: per_step(self.tally.steps.iter().map(|(_, ns)| ns).sum()),
            tier1_seconds: per_step(self.tally.tier1_ns),
            tier2_seconds: per_step(self.tally.tier2_ns),
            tier1_busy: self.tier1.iter().map(|node| share(node.busy_ns)).collect(),
            tier2_busy: workers.map(|worker| share(self.tier2[worker].busy_ns)).collect(),
            link_busy: self.tier1.iter().map(|node| share(node.out_ns)).collect(),
            events: self.handled,
            bound,
            bottleneck,
        }
    }

    fn schedule(&mut self, at: u64, kind: u32, index: u32) {
        self.sequence = self.sequence.wrapping_add(1);
        let what = (index << event::BITS) | kind;
        self.events.push(key(at, (u64::from(self.sequence) << 32) | u64::from(what)), ());
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
    /// home.
    fn has_one_row(&self, shard: u32) -> bool {
        self.one_by_one && self.shards[shard as usize].step == 0
    }

    fn class(&self, shard: u32) -> usize {
        // The smallest class is that of one row.
        if self.has_one_row(shard) { 0 } else { self.classes[self.lane(shard)] }
    }

    /// The shard's part of a lane's time.
    fn part(&self, shard: u32, ns: u64) -> u64 {
        if !self.has_one_row(shard) {
            return ns;
        }
        nanoseconds(ns as f64 * 1e-9 / self.program.lanes[self.lane(shard)].rows as f64)
    }

    fn wait_for_tier1(&mut self, shard: u32) {
        self.tickets = self.tickets.wrapping_add(1);
        let state = &mut self.shards[shard as usize];
        state.ticket = self.tickets;
        let node = self.program.stages[state.stage as usize].node;
        let stage = (state.stage - self.first_stages[node as usize]) as usize;
        let queue = node as usize * self.class_rows.len() + self.class(shard);
        self.tier1_queues.push(queue, stage, shard);
        self.call(node);
    }

    /// Makes a node look for work at the end of the moment.
    fn call(&mut self, node: u32) {
        let state = &mut self.tier1[node as usize];
        if !state.busy && !state.called {
            state.called = true;
            self.called.push(node);
        }
    }

    fn start_tier1(&mut self, node: u32) {
        self.tier1[node as usize].called = false;
        let Some(deepest) = self.deepest(node as usize) else { return };
        let mut batch = std::mem::take(&mut self.tier1[node as usize].batch);
        let rows = self.merge(node as usize, deepest, &mut batch);
        let stage = self.first_stages[node as usize] + deepest as u32;
        let ns = self.stage_ns(stage, rows);
        let ns = self.jittered(ns);
        self.record(TraceSpan::tier1(node), self.now, batch[0], ns);
        self.tally.tier1_ns += ns * batch.len() as u64;
        let state = &mut self.tier1[node as usize];
        (state.busy, state.batch) = (true, batch);
        state.busy_ns += ns;
        self.schedule(self.now + ns, event::COMPUTED, node);
    }

    /// The deepest stage of a node that shards wait for.
    fn deepest(&self, node: usize) -> Option<usize> {
        let classes = self.class_rows.len();
        (node * classes..(node + 1) * classes)
            .filter_map(|queue| self.tier1_queues.deepest(queue))
            .max()
    }

    /// Moves shards that wait for a stage into `batch`, oldest first, as long as their rows fit; returns the rows.
    fn merge(&mut self, node: usize, stage: usize, batch: &mut Vec<u32>) -> usize {
        let mut rows = 0;
        let first_queue = node * self.class_rows.len();
        loop {
            let room = self.program.rows - rows;
            let mut oldest: Option<(u32, usize)> = None;
            for (class, &own) in self.class_rows.iter().enumerate() {
                if own > room {
                    continue;
                }
                let Some(shard) = self.tier1_queues.first(first_queue + class, stage) else {
                    continue;
                };
                let ticket = self.shards[shard as usize].ticket;
                if oldest.is_none_or(|(other, _)| ticket < other) {
                    oldest = Some((ticket, class));
                }
            }
            let Some((_, class)) = oldest else { return rows };
            batch.extend(self.tier1_queues.pop(first_queue + class, stage));
            rows += self.class_rows[class];
        }
    }

    fn stage_ns(&mut self, stage: u32, rows: usize) -> u64 {
        let time = self.program.stages[stage as usize].time as usize;
        let known = &mut self.times[time * (self.program.rows + 1) + rows];
        if *known == u64::MAX {
            *known = nanoseconds(self.program.times[time].seconds(rows));
        }
        *known
    }

    fn computed(&mut self, node: u32) {
        let mut batch = std::mem::take(&mut self.tier1[node as usize].batch);
        let mut kept = std::mem::take(&mut self.kept);
        for &shard in &batch {
            if !self.stage(shard).attends {
                self.advance(shard);
            } else if self.program.lanes[self.lane(shard)].local {
                kept.push(shard);
            } else {
                self.send(node as usize, shard);
            }
        }
        batch.clear();
        if kept.is_empty() {
            let state = &mut self.tier1[node as usize];
            (state.busy, state.batch, self.kept) = (false, batch, kept);
            return self.call(node);
        }
        self.kept = batch;
        let worker = node as usize * self.lanes + self.lane(kept[0]);
        let parts = kept.iter().map(|&shard| self.part(shard, self.ways[worker].attend));
        let ns = parts.sum();
        let ns = self.jittered(ns);
        self.record(TraceSpan::tier1_attention(node), self.now, kept[0], ns);
        self.tally.tier1_ns += ns * kept.len() as u64;
        let state = &mut self.tier1[node as usize];
        state.busy_ns += ns;
        state.batch = kept;
        self.schedule(self.now + ns, event::ATTENDED_LOCALLY, node);
    }

    fn attended_locally(&mut self, node: u32) {
        let mut batch = std::mem::take(&mut self.tier1[node as usize].batch);
        batch.drain(..).for_each(|shard| self.move_on(shard, self.now));
        let state = &mut self.tier1[node as usize];
        (state.busy, state.batch) = (false, batch);
        self.call(node);
    }

    fn send(&mut self, node: usize, shard: u32) {
        let worker = node * self.lanes + self.lane(shard);
        let way = self.ways[worker];
        let (send, send_far) = (self.part(shard, way.send), self.part(shard, way.send_far));
        let state = &mut self.tier1[node];
        let start = state.out_free.max(self.now);
        state.out_free = start + send;
        state.out_ns += send;
        let near = state.out_free;
        let far = &mut self.tier2[worker];
        far.in_free = far.in_free.max(start) + send_far;
        let arrival = near.max(far.in_free) + self.delay;
        // Later messages arrive later, so a node that will be idle then starts this shard at once.
        if far.in_transit == 0 && far.waiting == 0 && !far.wakes && far.free <= arrival {
            self.attend(worker, shard, arrival);
        } else {
            far.in_transit += 1;
            self.schedule(arrival, event::ARRIVED, shard);
        }
    }

    fn arrived(&mut self, shard: u32) {
        let stage = self.shards[shard as usize].stage;
        let node = self.program.stages[stage as usize].node as usize;
        let worker = node * self.lanes + self.lane(shard);
        let state = &mut self.tier2[worker];
        state.in_transit -= 1;
        if state.waiting == 0 && !state.wakes && state.free <= self.now {
            return self.attend(worker, shard, self.now);
        }
        state.waiting += 1;
        self.tier2_queues.push(worker, (stage - self.first_stages[node]) as usize, shard);
        self.wake_when_free(worker);
    }

    fn wake_when_free(&mut self, worker: usize) {
        let state = &mut self.tier2[worker];
        if !state.wakes {
            state.wakes = true;
            let at = state.free;
            self.schedule(at, event::ATTENDED, worker as u32);
        }
    }

    fn attend(&mut self, worker: usize, shard: u32, start: u64) {
        let ns = self.attention_ns(worker, shard);
        let ns = self.jittered(ns);
        self.record(TraceSpan::tier2(worker as u32), start, shard, ns);
        self.tally.tier2_ns += ns;
        let state = &mut self.tier2[worker];
        state.shard = shard;
        state.free = start + ns;
        state.busy_ns += ns;
        if self.foreseen {
            let at = self.reply(worker, shard, start + ns);
            self.move_on(shard, at);
        } else {
            self.wake_when_free(worker);
        }
    }

    fn attention_ns(&self, worker: usize, shard: u32) -> u64 {
        let samples = &self.program.ways[worker].samples;
        if samples.is_empty() {
            return self.part(shard, self.ways[worker].attend);
        }
        // The same rows all through a step: the draw depends on flight, step and node alone.
        let flight = u64::from(shard) / self.lanes as u64;
        let step = u64::from(self.shards[shard as usize].step);
        let draw = mix(self.program.seed ^ (flight << 32) ^ step) ^ worker as u64;
        nanoseconds(samples[(mix(draw) % samples.len() as u64) as usize])
    }

    /// A worker is free. It answers, unless the answer was foreseen, and turns to the deepest waiting
    /// shard.
    fn attended(&mut self, worker: usize) {
        self.tier2[worker].wakes = false;
        if !self.foreseen {
            let shard = self.tier2[worker].shard;
            let at = self.reply(worker, shard, self.now);
            self.move_on(shard, at);
        }
        let Some(stage) = self.tier2_queues.deepest(worker) else { return };
        let shard = self.tier2_queues.pop(worker, stage).expect("the stage has a shard");
        self.tier2[worker].waiting -= 1;
        self.attend(worker, shard, self.now);
        if self.tier2[worker].waiting > 0 {
            self.wake_when_free(worker);
        }
    }

    /// When an answer that leaves a worker at `from` is back.
    fn reply(&mut self, worker: usize, shard: u32, from: u64) -> u64 {
        let way = self.ways[worker];
        let (reply, reply_far) = (self.part(shard, way.reply), self.part(shard, way.reply_far));
        let start = self.tier2[worker].out_free.max(from);
        self.tier2[worker].out_free = start + reply_far;
        let free = &mut self.tier1[worker / self.lanes].back_free;
        *free = (*free).max(start) + reply;
        (*free).max(start + reply_far) + self.delay
    }

    fn advance(&mut self, shard: u32) {
        let stage = self.stage(shard);
        let mut at = self.now;
        if stage.hop > 0.0 || stage.hop_delay > 0.0 {
            let rows = self.class_rows[self.class(shard)] as f64;
            let free = &mut self.tier1[stage.node as usize].hop_free;
            *free = (*free).max(self.now) + nanoseconds(stage.hop * rows);
            at = *free + nanoseconds(stage.hop_delay);
        }
        self.move_on(shard, at);
    }

    /// The shard turns to its next stage at time `at`; after the last one a step is complete.
    fn move_on(&mut self, shard: u32, at: u64) {
        let lane = self.lane(shard);
        let state = &mut self.shards[shard as usize];
        state.stage += 1;
        if state.stage as usize == self.program.stages.len() {
            let (steps, ns) = &mut self.tally.steps[lane];
            *steps += 1;
            *ns += at - state.began;
            (state.stage, state.began) = (0, at);
            state.step += 1;
            self.steps += 1;
        }
        if at > self.now {
            self.schedule(at, event::READY, shard);
        } else {
            self.wait_for_tier1(shard);
        }
    }

    fn record(&mut self, span: TraceSpan, start: u64, shard: u32, ns: u64) {
        if let Some(trace) = &mut self.trace {
            let stage = self.shards[shard as usize].stage;
            let flight = shard / self.lanes as u32;
            trace.push(span, start as f64 * 1e-9, ns as f64 * 1e-9, flight, stage);
        }
    }
}
