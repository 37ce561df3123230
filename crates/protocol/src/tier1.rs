//! A Tier-1 node: queues the steps that are ready at each layer and merges what is ready into
//! batches, deepest layer first, without waiting for anyone. It keeps no prompts and no context.

use crate::message::{Attend, Attended, Home, Launch, Merge, Parcel};
use glinthawk_flight::{Generated, ShardId, StepId};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

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

/// A shard's newest step that came.
struct Visitor<P> {
    epoch: u64,
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

/// The state machine; see the module's head. `P` is what travels beside a message.
pub struct Tier1Node<P> {
    layers: u32,
    /// Rows in one batch at most; a single shard is never larger.
    rows_max: usize,
    merge: Merge,
    visitors: HashMap<ShardId, Visitor<P>>,
    ready: BTreeMap<Stage, VecDeque<ShardId>>,
    /// Works that were started and are not done.
    computing: usize,
    lost_lanes: BTreeSet<u32>,
}

impl<P> Tier1Node<P> {
    /// A node with `layers` layers that merges shards up to `rows_max` rows.
    pub fn new(layers: u32, rows_max: usize, merge: Merge) -> Self {
        assert!(layers > 0 && rows_max > 0);
        Self {
            layers,
            rows_max,
            merge,
            visitors: HashMap::new(),
            ready: BTreeMap::new(),
            computing: 0,
            lost_lanes: BTreeSet::new(),
        }
    }

    /// Takes in a step that enters the slice, from the dispatcher or from the previous slice. It takes
    /// the place of an older one of its shard, which is abandoned. `false`: it is old news itself.
    pub fn arrive(&mut self, launch: Launch, payload: P) -> bool {
        let StepId { shard, epoch } = launch.step;
        let newest = self.visitors.get(&shard).map_or(0, |visitor| visitor.epoch);
        if epoch <= newest || self.lost_lanes.contains(&shard.lane) {
            return false;
        }
        let state = State::Ready(Task { launch, payload, tokens: None });
        let visitor = Visitor { epoch, stage: Stage::Enter, state };
        if let Some(abandoned) = self.visitors.insert(shard, visitor) {
            self.forget(shard, &abandoned);
        }
        self.ready.entry(Stage::Enter).or_default().push_back(shard);
        true
    }

    /// Forgets the steps of a lane whose contexts are gone, and those still on their way here.
    pub fn lose_lane(&mut self, lane: u32) {
        self.lost_lanes.insert(lane);
        let lost = self.visitors.extract_if(|shard, _| shard.lane == lane);
        for (shard, abandoned) in lost.collect::<Vec<_>>() {
            self.forget(shard, &abandoned);
        }
    }

    /// Takes an abandoned step of a shard out of its queue.
    fn forget(&mut self, shard: ShardId, abandoned: &Visitor<P>) {
        let State::Ready(_) = abandoned.state else { return };
        let queue = self.ready.get_mut(&abandoned.stage).expect("what is ready is queued");
        queue.retain(|queued| *queued != shard);
        if queue.is_empty() {
            self.ready.remove(&abandoned.stage);
        }
    }

    /// The shard's visitor, if it is this step's.
    fn visitor(&mut self, step: StepId) -> Option<&mut Visitor<P>> {
        self.visitors.get_mut(&step.shard).filter(|visitor| visitor.epoch == step.epoch)
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
                true
            }
            other => {
                visitor.state = other;
                false
            }
        }
    }

    /// A work that [`Tier1Node::start`] gave is done; gives each of the parcels that follow, with the
    /// rows of its step. A step that was abandoned in the meantime has no followers.
    pub fn computed(&mut self, work: Tier1Work<P>, mut follows: impl FnMut(usize, Parcel<P>)) {
        self.computing = self.computing.checked_sub(1).expect("something was being computed");
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
                    let parcel = match tokens {
                        Some(tokens) => Parcel::Home(Home { step, tokens }),
                        None => Parcel::Launch(launch, payload),
                    };
                    follows(rows, parcel);
                    continue;
                }
            };
            let (rows_of, shared) = (launch.rows.clone(), launch.shared.clone());
            let attend = Attend { step, layer, rows: rows_of, shared };
            visitor.state = State::Attending(launch, layer);
            visitor.stage = if layer + 1 == layers { Stage::Exit } else { Stage::Middle(layer) };
            follows(rows, Parcel::Attend(attend, payload));
        }
    }

    /// The next work, if fewer than `works_max` are being computed: the deepest batch that is ready. Call it after
    /// everything that arrived was taken in: batches are then larger.
    pub fn start(&mut self, works_max: usize) -> Option<Tier1Work<P>> {
        let free = self.computing < works_max;
        let mut deepest = self.ready.keys().next_back().copied().filter(|_| free);
        while let Some(stage) = deepest {
            let tasks = self.batch(stage);
            if !tasks.is_empty() {
                self.computing += 1;
                return Some(Tier1Work { stage, tasks });
            }
            deepest = self.ready.range(..stage).next_back().map(|(stage, _)| *stage);
        }
        None
    }

    /// Takes what may be computed now at a stage, up to a batch, oldest first.
    fn batch(&mut self, stage: Stage) -> Vec<Task<P>> {
        let mut tasks = Vec::new();
        let mut left = VecDeque::new();
        let mut rows = 0;
        for shard in self.ready.remove(&stage).expect("the caller found it") {
            let may_start = self.may_start(shard, stage);
            let state = &mut self.visitors.get_mut(&shard).expect("queued").state;
            let State::Ready(task) = state else { unreachable!("what is queued is ready") };
            let rows_with = rows + task.launch.rows.len();
            if !may_start || !(tasks.is_empty() || rows_with <= self.rows_max) {
                left.push_back(shard);
            } else if let State::Ready(task) = std::mem::replace(state, State::Computing) {
                tasks.push(task);
                rows = rows_with;
            }
        }
        if !left.is_empty() {
            self.ready.insert(stage, left);
        }
        tasks
    }

    /// Whether a shard that waits for a stage need not wait for others of its flight: none of them is
    /// behind it.
    fn may_start(&self, shard: ShardId, stage: Stage) -> bool {
        let mut flight = self.visitors.iter().filter(|(other, _)| other.flight == shard.flight);
        self.merge == Merge::Ready
            || flight.all(|(_, other)| match other.state {
                State::Gone => true,
                State::Attending(..) => other.stage > stage,
                State::Ready(_) | State::Computing => other.stage >= stage,
            })
    }
}
