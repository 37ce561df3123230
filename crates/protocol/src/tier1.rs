//! A Tier-1 node: queues the steps that are ready at each layer and merges them into batches. Flights that nobody of
//! theirs is behind go first, the deepest before others. It keeps no prompts and no context.

use crate::message::{Attend, Attended, Home, Launch, Merge, Parcel};
use crate::pace::{BatchKind, Pace};
use crate::watch::Held;
use glinthawk_flight::{Generated, ShardId, StepId};
use std::collections::{BTreeMap, VecDeque};

/// A step that Tier 1 works on.
#[derive(Debug)]
pub struct Task<P> {
    /// The step's rows and samples.
    pub launch: Launch,
    /// What the kernels take: the residual of a hop, or attention output. Then what they made: q, k, v,
    /// or the residual of a hop.
    pub payload: P,
    /// The tokens of the samples, once the last slice has made them.
    pub tokens: Option<Vec<Generated>>,
}

/// A batch of steps at the same point of the slice, of which no two are of one shard.
#[derive(Debug)]
pub struct Tier1Work<P> {
    /// What is to be computed.
    pub stage: Stage,
    /// For whom.
    pub tasks: Vec<Task<P>>,
}

impl<P> Tier1Work<P> {
    /// Rows of all steps.
    pub fn rows(&self) -> usize {
        self.tasks.iter().map(|task| task.launch.rows.len()).sum()
    }

    /// Samples of all steps.
    pub fn samples(&self) -> usize {
        self.tasks.iter().map(|task| task.launch.samples.len()).sum()
    }
}

/// A point of the slice at which rows wait for Tier 1. Later is deeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Embed (or take over the residual), then pre-attention of the slice's first layer.
    Enter,
    /// Post-attention of this layer, then pre-attention of the next.
    Middle(u32),
    /// Post-attention of the slice's last layer, then classify and sample (or hand on the residual).
    Exit,
}

impl Stage {
    fn kind(self) -> BatchKind {
        match self {
            Self::Enter => BatchKind::Enter,
            Self::Middle(_) => BatchKind::Middle,
            Self::Exit => BatchKind::Exit,
        }
    }
}

/// A shard's newest step that came.
struct Visitor<P> {
    epoch: u64,
    /// Counts the flight's visits. A shard that comes is in step with the first of its flight, or is the first.
    lap: u64,
    /// The stage the step waits for, is computed at, or comes to next.
    stage: Stage,
    state: State<P>,
}

enum State<P> {
    /// It waits for Tier 1.
    Ready(Task<P>),
    /// It is in a work that was started.
    Computing,
    /// The attention output of this layer is awaited.
    Attending(Launch, u32),
    /// It has left the slice.
    Gone,
}

/// The shards of a flight, by lane.
struct Flight<P> {
    shards: BTreeMap<u32, Visitor<P>>,
    /// The stage that the hindmost wait for, if they all do: then no other can join them.
    whole: Option<Stage>,
    /// When shards of it last entered, until one leaves, and how long its last two stays were.
    entered_ns: Option<u64>,
    stays_ns: [u64; 2],
    /// On a shared core: until when those that are here wait for others. Once that is over, they do not wait again in this lap.
    waits_until_ns: Option<u64>,
}

impl<P> Flight<P> {
    /// The shards that have not left.
    fn here(&self) -> impl Iterator<Item = &Visitor<P>> {
        self.shards.values().filter(|visitor| !matches!(visitor.state, State::Gone))
    }

    fn find_whole(&self, merge: Merge) -> Option<Stage> {
        let shares_core = merge == Merge::SharedCore;
        let first = self.here().map(|visitor| visitor.lap).max()?;
        // On a shared core, nobody waits for one that is laps behind.
        let is_awaited = |visitor: &&Visitor<P>| {
            !shares_core
                || visitor.lap + 1 >= first
                || !matches!(visitor.state, State::Attending(..))
        };
        let here = || self.here().filter(is_awaited);
        let hindmost = here().map(|visitor| (visitor.lap, visitor.stage)).min()?;
        let mut last = here().filter(|visitor| (visitor.lap, visitor.stage) == hindmost);
        let are_ready = last.all(|visitor| matches!(visitor.state, State::Ready(_)));
        // Those that were here in the last lap are on their way.
        let is_coming = |visitor: &Visitor<P>| {
            matches!(visitor.state, State::Gone) && (visitor.lap + 1, Stage::Enter) == hindmost
        };
        let awaits_some = shares_core && self.shards.values().any(is_coming);
        (are_ready && !awaits_some).then_some(hindmost.1)
    }

    /// Some of its shards are about to be computed.
    fn start(&mut self, stage: Stage, now_ns: u64) {
        if stage == Stage::Enter {
            self.entered_ns = Some(now_ns);
        }
        if stage == Stage::Exit || self.waits_until_ns.is_some_and(|until_ns| now_ns < until_ns) {
            self.waits_until_ns = None;
        }
    }

    /// The deepest stage that shards wait for.
    fn deepest_ready(&self) -> Option<Stage> {
        let ready = self.here().filter(|visitor| matches!(visitor.state, State::Ready(_)));
        ready.map(|visitor| visitor.stage).max()
    }

    /// The lanes whose shards wait for a stage, and their rows.
    fn ready(&self, stage: Stage) -> impl Iterator<Item = (u32, usize)> {
        self.shards.iter().filter_map(move |(&lane, visitor)| match &visitor.state {
            State::Ready(task) if visitor.stage == stage => Some((lane, task.launch.rows.len())),
            _ => None,
        })
    }

    /// Rows that attend and come to a stage next, of a lap.
    fn rows_awaited(&self, stage: Stage, lap: u64) -> usize {
        let rows = |visitor: &Visitor<P>| match &visitor.state {
            State::Attending(launch, _) if (visitor.lap, visitor.stage) == (lap, stage) => {
                launch.rows.len()
            }
            _ => 0,
        };
        self.shards.values().map(rows).sum()
    }
}

/// What waits for each stage, first come first.
type Queues<T> = BTreeMap<Stage, VecDeque<T>>;

fn leave<T: PartialEq>(queues: &mut Queues<T>, stage: Stage, what: &T) {
    let queue = queues.get_mut(&stage).expect("what waits is queued");
    queue.retain(|queued| queued != what);
    if queue.is_empty() {
        queues.remove(&stage);
    }
}

/// The state machine; see the module's head. `P` is what travels beside a message.
pub struct Tier1Node<P> {
    layers: u32,
    /// Rows in one batch at most; a single shard is never larger.
    rows_max: usize,
    merge: Merge,
    flights: BTreeMap<u32, Flight<P>>,
    ready: Queues<ShardId>,
    /// The flights that are whole.
    whole: Queues<u32>,
    /// When each work was started that is not done, in order.
    computing_since_ns: VecDeque<u64>,
    /// When the last one was done.
    computed_ns: u64,
    /// Until when it waits for the rest of a flight.
    patient_until_ns: Option<u64>,
    pace: Pace,
    /// The newest generation of each lane that came, and whether that is lost.
    generations: BTreeMap<u32, (u64, bool)>,
}

impl<P> Tier1Node<P> {
    /// A node with `layers` layers that merges shards up to `rows_max` rows.
    pub fn new(layers: u32, rows_max: usize, merge: Merge) -> Self {
        assert!(layers > 0 && rows_max > 0);
        Self {
            layers,
            rows_max,
            merge,
            flights: BTreeMap::new(),
            ready: BTreeMap::new(),
            whole: BTreeMap::new(),
            computing_since_ns: VecDeque::new(),
            computed_ns: 0,
            patient_until_ns: None,
            pace: Pace::default(),
            generations: BTreeMap::new(),
        }
    }

    /// Takes in a step that enters the slice, from the dispatcher or from the previous slice. It takes
    /// the place of an older one of its shard, which is abandoned. `false`: it is old news itself.
    pub fn arrive(&mut self, launch: Launch, payload: P) -> bool {
        let StepId { shard, epoch } = launch.step;
        let generation = launch.step.generation();
        match self.generations.get(&shard.lane) {
            Some((newest, _)) if generation > *newest => self.forget_lane(shard.lane),
            Some((newest, lost)) if generation < *newest || *lost => return false,
            _ => {}
        }
        self.generations.insert(shard.lane, (generation, false));
        let empty = || Flight {
            shards: BTreeMap::new(),
            whole: None,
            entered_ns: None,
            stays_ns: [0; 2],
            waits_until_ns: None,
        };
        let flight = self.flights.entry(shard.flight).or_insert_with(empty);
        let known = flight.shards.get(&shard.lane);
        let (newest, lap) = known.map_or((0, 0), |visitor| (visitor.epoch, visitor.lap));
        if epoch <= newest {
            return false;
        }
        let first = flight.shards.values().map(|visitor| visitor.lap).max().unwrap_or(0);
        let lap = if first > lap { first } else { lap + 1 };
        let state = State::Ready(Task { launch, payload, tokens: None });
        let visitor = Visitor { epoch, lap, stage: Stage::Enter, state };
        if let Some(abandoned) = flight.shards.insert(shard.lane, visitor) {
            self.forget(shard, &abandoned);
        }
        self.ready.entry(Stage::Enter).or_default().push_back(shard);
        self.gather(shard.flight);
        true
    }

    /// Forgets the steps of a lane whose contexts are gone, and those still on their way here: up to this generation, or
    /// (`None`) to the newest that came.
    pub fn lose_lane(&mut self, lane: u32, generation: Option<u64>) {
        let newest = self.generations.entry(lane).or_default();
        let generation = generation.unwrap_or(newest.0);
        if generation >= newest.0 {
            *newest = (generation, true);
            self.forget_lane(lane);
        }
    }

    fn forget_lane(&mut self, lane: u32) {
        let flights: Vec<u32> = self.flights.keys().copied().collect();
        for flight in flights {
            let shards = &mut self.flights.get_mut(&flight).expect("it is there").shards;
            if let Some(abandoned) = shards.remove(&lane) {
                self.forget(ShardId { flight, lane }, &abandoned);
                self.gather(flight);
            }
        }
    }

    /// Takes an abandoned step of a shard out of its queue.
    fn forget(&mut self, shard: ShardId, abandoned: &Visitor<P>) {
        if let State::Ready(_) = abandoned.state {
            leave(&mut self.ready, abandoned.stage, &shard);
        }
    }

    /// Finds out whether a flight is whole, after something happened to one of its shards.
    fn gather(&mut self, id: u32) {
        let flight = self.flights.get_mut(&id).expect("it has shards");
        let whole = flight.find_whole(self.merge);
        let known = std::mem::replace(&mut flight.whole, whole);
        if known == whole {
            return;
        }
        if let Some(stage) = known {
            leave(&mut self.whole, stage, &id);
        }
        if let Some(stage) = whole {
            self.whole.entry(stage).or_default().push_back(id);
        }
    }

    /// The shard's visitor, if it is this step's.
    fn visitor(&mut self, step: StepId) -> Option<&mut Visitor<P>> {
        let flight = self.flights.get_mut(&step.shard.flight)?;
        let visitor = flight.shards.get_mut(&step.shard.lane);
        visitor.filter(|visitor| visitor.epoch == step.epoch)
    }

    /// Takes a step's attention output. `false`: no step waits for it, because its step was abandoned
    /// or it came before.
    pub fn attended(&mut self, attended: Attended, payload: P) -> bool {
        let Attended { step, layer } = attended;
        let Some(visitor) = self.visitor(step) else { return false };
        match std::mem::replace(&mut visitor.state, State::Computing) {
            State::Attending(launch, awaited) if awaited == layer => {
                visitor.state = State::Ready(Task { launch, payload, tokens: None });
                let stage = visitor.stage;
                self.ready.entry(stage).or_default().push_back(step.shard);
                self.gather(step.shard.flight);
                true
            }
            other => {
                visitor.state = other;
                false
            }
        }
    }

    /// The steps of a lane that are here, each with the layer that it attends in, if it does.
    pub fn held(&self, lane: u32) -> Vec<Held> {
        let held = |(&flight, of_flight): (&u32, &Flight<P>)| {
            let visitor = of_flight.shards.get(&lane)?;
            let step = StepId { shard: ShardId { flight, lane }, epoch: visitor.epoch };
            match visitor.state {
                State::Gone => None,
                State::Attending(_, layer) => Some((step, Some(layer))),
                State::Ready(_) | State::Computing => Some((step, None)),
            }
        };
        self.flights.iter().filter_map(held).collect()
    }

    /// Rows of the step that waits for this attention output; `None` if none does.
    pub fn rows_awaited(&self, attended: &Attended) -> Option<usize> {
        let Attended { step, layer } = attended;
        match &self.flights.get(&step.shard.flight)?.shards.get(&step.shard.lane)?.state {
            State::Attending(launch, awaited) if launch.step == *step && awaited == layer => {
                Some(launch.rows.len())
            }
            _ => None,
        }
    }

    /// The first work that [`Tier1Node::start`] gave and that was not done is done; gives each of the parcels that
    /// follow, with the rows of its step. A step that was abandoned in the meantime has no followers.
    pub fn computed(
        &mut self,
        work: Tier1Work<P>,
        now_ns: u64,
        mut follows: impl FnMut(usize, Parcel<P>),
    ) {
        let started_ns = self.computing_since_ns.pop_front();
        let started_ns = started_ns.expect("something was being computed");
        // A device takes one work after the other.
        let since_ns = started_ns.max(std::mem::replace(&mut self.computed_ns, now_ns));
        self.pace.learn(work.stage.kind(), work.rows(), now_ns.saturating_sub(since_ns));
        let layers = self.layers;
        for Task { launch, payload, tokens } in work.tasks {
            let step = launch.step;
            let Some(visitor) = self.visitor(step) else { continue };
            let rows = launch.rows.len();
            let layer = match work.stage {
                Stage::Enter => 0,
                Stage::Middle(layer) => layer + 1,
                Stage::Exit => {
                    visitor.state = State::Gone;
                    let flight = self.flights.get_mut(&step.shard.flight).expect("it has shards");
                    if let Some(entered_ns) = flight.entered_ns.take() {
                        let stay_ns = now_ns.saturating_sub(entered_ns);
                        flight.stays_ns = [flight.stays_ns[1], stay_ns];
                    }
                    let parcel = match tokens {
                        Some(tokens) => Parcel::Home(Home { step, tokens }),
                        None => Parcel::Launch(launch, payload),
                    };
                    follows(rows, parcel);
                    self.gather(step.shard.flight);
                    continue;
                }
            };
            let (rows_of, shared) = (launch.rows.clone(), launch.shared.clone());
            let attend = Attend { step, layer, rows: rows_of, shared };
            visitor.state = State::Attending(launch, layer);
            visitor.stage = if layer + 1 == layers { Stage::Exit } else { Stage::Middle(layer) };
            follows(rows, Parcel::Attend(attend, payload));
            // It is no longer beside those who wait for the stage.
            self.gather(step.shard.flight);
        }
    }

    /// The next work, if fewer than `works_max` are being computed and it should not wait for more. Call it after
    /// everything that arrived was taken in, and again at [`Tier1Node::patient_until_ns`].
    pub fn start(&mut self, now_ns: u64, works_max: usize) -> Option<Tier1Work<P>> {
        if self.computing_since_ns.len() >= works_max {
            return None;
        }
        let stage = self.next_stage(now_ns)?;
        let tasks = self.batch(stage);
        let rows = tasks.iter().map(|task| task.launch.rows.len());
        self.pace.start(stage.kind(), now_ns, rows);
        for task in &tasks {
            let id = task.launch.step.shard.flight;
            self.flights.get_mut(&id).expect("it has shards").start(stage, now_ns);
        }
        self.patient_until_ns = None;
        self.computing_since_ns.push_back(now_ns);
        Some(Tier1Work { stage, tasks })
    }

    /// Until when the node waits for the rest of a flight, if it does.
    pub fn patient_until_ns(&self) -> Option<u64> {
        self.patient_until_ns
    }

    /// The stage to compute now: the deepest that a whole flight waits for. If there are only parts of flights, it is
    /// the deepest of theirs, but not before the node has waited as long as a whole flight would save.
    fn next_stage(&mut self, now_ns: u64) -> Option<Stage> {
        if let Some((&stage, _)) = self.whole.last_key_value() {
            return Some(stage);
        }
        let Some((&stage, _)) = self.ready.last_key_value() else {
            self.patient_until_ns = None; // they were abandoned
            return None;
        };
        match self.merge {
            Merge::WholeFlights => return None,
            Merge::SharedCore => return self.impatient_stage(now_ns),
            Merge::Ready => {}
        }
        if self.patient_until_ns.is_none() && !self.pace.has_time_to_spare(now_ns) {
            let saved_ns = self.saved_ns(stage);
            self.patient_until_ns = (saved_ns > 0).then_some(now_ns + saved_ns);
        }
        let waits = self.patient_until_ns.is_some_and(|until_ns| now_ns < until_ns);
        (!waits).then_some(stage)
    }

    /// On a shared core: the deepest stage that a part of a flight has waited for as long as the flight stays here. Of its last
    /// two stays the shorter one counts: in the other, the process may have been stopped for long.
    fn impatient_stage(&mut self, now_ns: u64) -> Option<Stage> {
        let mut stage = None;
        self.patient_until_ns = None;
        for flight in self.flights.values_mut() {
            let Some(ready) = flight.deepest_ready() else { continue };
            let until_ns = *flight
                .waits_until_ns
                .get_or_insert(now_ns + flight.stays_ns[0].min(flight.stays_ns[1]));
            match until_ns <= now_ns {
                true => stage = stage.max(Some(ready)),
                false => {
                    let first = self.patient_until_ns.map_or(until_ns, |first| first.min(until_ns));
                    self.patient_until_ns = Some(first);
                }
            }
        }
        stage
    }

    /// The most that the node would save if one of the flights at a stage were whole. Those who are to come there next
    /// are awaited, others of the flight are not.
    fn saved_ns(&self, stage: Stage) -> u64 {
        let saved = |shard: &ShardId| {
            let flight = &self.flights[&shard.flight];
            let awaited = flight.rows_awaited(stage, flight.shards[&shard.lane].lap);
            let here = flight.ready(stage).map(|(_, rows)| rows).sum();
            if awaited > 0 { self.pace.saved_ns(stage.kind(), here, awaited) } else { 0 }
        };
        self.ready[&stage].iter().map(saved).max().unwrap_or(0)
    }

    /// Takes what is ready at a stage, up to a batch: whole flights first, then parts, first come first.
    fn batch(&mut self, stage: Stage) -> Vec<Task<P>> {
        let mut chosen: Vec<ShardId> = Vec::new();
        let mut rows = 0;
        let mut choose = |shard: ShardId, own: usize| {
            if chosen.is_empty() || rows + own <= self.rows_max {
                chosen.push(shard);
                rows += own;
            }
            rows
        };
        let mut taken = 0;
        for &id in self.whole.get(&stage).into_iter().flatten() {
            let shards = self.flights[&id].ready(stage);
            let own: usize = shards.map(|(_, rows)| rows).sum();
            if taken == 0 || taken + own <= self.rows_max {
                for (lane, rows) in self.flights[&id].ready(stage) {
                    taken = choose(ShardId { flight: id, lane }, rows);
                }
            }
        }
        if self.merge != Merge::WholeFlights {
            for &shard in &self.ready[&stage] {
                let flight = &self.flights[&shard.flight];
                if flight.whole != Some(stage) {
                    let State::Ready(task) = &flight.shards[&shard.lane].state else {
                        unreachable!("what is queued is ready")
                    };
                    choose(shard, task.launch.rows.len());
                }
            }
        }
        chosen.into_iter().map(|shard| self.take(shard, stage)).collect()
    }

    /// Takes a shard that is ready out of its queue.
    fn take(&mut self, shard: ShardId, stage: Stage) -> Task<P> {
        leave(&mut self.ready, stage, &shard);
        let flight = self.flights.get_mut(&shard.flight).expect("it has shards");
        let visitor = flight.shards.get_mut(&shard.lane).expect("queued");
        let State::Ready(task) = std::mem::replace(&mut visitor.state, State::Computing) else {
            unreachable!("what is queued is ready")
        };
        self.gather(shard.flight);
        task
    }
}
