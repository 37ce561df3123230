//! A Tier-1 node: queues the steps that are ready at each layer and merges what is ready into
//! batches, deepest layer first, without waiting for anyone. It keeps no prompts and no context.

use crate::message::{Attend, Attended, Launch, Merge};
use glinthawk_flight::{Row, Sample, ShardId, StepId};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// What a Tier-1 node wants done.
#[derive(Debug)]
pub enum Tier1Action<P> {
    /// Send the rows with their q, k, v to the attention worker of the shard's lane.
    Attend(Attend),
    /// The shard left the slice: to the next slice with its residual, or home with its tokens.
    Leave(Launch, P),
}

/// A batch of steps at the same point of the slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tier1Work {
    /// What is to be computed.
    pub stage: Stage,
    /// For whom; no two are of one shard.
    pub steps: Vec<StepId>,
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

struct Visitor<P> {
    launch: Launch,
    /// What the driver keeps for the step: it goes when the step does.
    payload: P,
    /// The stage the step waits for, is computed at, or comes to next.
    stage: Stage,
    /// The layer whose attention output is awaited; `None` while Tier 1 works on the step.
    awaits: Option<u32>,
}

/// The state machine; see the module's head. `P` is what its driver keeps for a step in the slice.
pub struct Tier1Node<P = ()> {
    layers: u32,
    /// Rows in one batch at most; a single shard is never larger.
    rows_max: usize,
    merge: Merge,
    /// The steps in the slice: one of each shard, the newest that came.
    visitors: HashMap<ShardId, Visitor<P>>,
    /// The newest epoch of each shard that ever came.
    newest: HashMap<ShardId, u64>,
    ready: BTreeMap<Stage, VecDeque<StepId>>,
    computing: Option<Tier1Work>,
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
            newest: HashMap::new(),
            ready: BTreeMap::new(),
            computing: None,
            lost_lanes: BTreeSet::new(),
        }
    }

    /// Layers of the slice.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Rows of a step that is in the slice.
    pub fn rows(&self, step: StepId) -> &[Row] {
        &self.here(step).launch.rows
    }

    /// Samples of a step that is in the slice.
    pub fn samples(&self, step: StepId) -> &[Sample] {
        &self.here(step).launch.samples
    }

    /// The payload of a step that is in the slice.
    pub fn payload(&mut self, step: StepId) -> &mut P {
        &mut self.visitor(step).expect("the step is in the slice").payload
    }

    fn here(&self, step: StepId) -> &Visitor<P> {
        let visitor = self.visitors.get(&step.shard).expect("the shard is in the slice");
        assert_eq!(visitor.launch.step, step, "another step of the shard is in the slice");
        visitor
    }

    /// A step, unless it has left or a newer one took its place.
    fn visitor(&mut self, step: StepId) -> Option<&mut Visitor<P>> {
        self.visitors.get_mut(&step.shard).filter(|visitor| visitor.launch.step == step)
    }

    /// Takes in a step that enters the slice, from the dispatcher or from the previous slice. It takes
    /// the place of an older one of its shard, which is abandoned. `false`: it is old news itself.
    pub fn arrive(&mut self, launch: Launch, payload: P) -> bool {
        let step = launch.step;
        let newest = self.newest.entry(step.shard).or_default();
        if step.epoch <= *newest || self.lost_lanes.contains(&step.shard.lane) {
            return false;
        }
        *newest = step.epoch;
        let visitor = Visitor { launch, payload, stage: Stage::Enter, awaits: None };
        if let Some(abandoned) = self.visitors.insert(step.shard, visitor) {
            self.forget(&abandoned);
        }
        self.ready.entry(Stage::Enter).or_default().push_back(step);
        true
    }

    /// Forgets the steps of a lane whose contexts are gone, and those still on their way here.
    pub fn lose_lane(&mut self, lane: u32) {
        self.lost_lanes.insert(lane);
        let lost = self.visitors.extract_if(|shard, _| shard.lane == lane);
        for (_, abandoned) in lost.collect::<Vec<_>>() {
            self.forget(&abandoned);
        }
    }

    /// Takes an abandoned step out of its queue.
    fn forget(&mut self, abandoned: &Visitor<P>) {
        let Some(queue) = self.ready.get_mut(&abandoned.stage) else { return };
        queue.retain(|step| *step != abandoned.launch.step);
        if queue.is_empty() {
            self.ready.remove(&abandoned.stage);
        }
    }

    /// A step's attention output is here: the payload to put it in. `None` if no step waits for
    /// it, because its step was abandoned or it came before.
    pub fn attended(&mut self, attended: &Attended) -> Option<&mut P> {
        let visitor = self.visitor(attended.step)?;
        if visitor.awaits != Some(attended.layer) {
            return None;
        }
        visitor.awaits = None;
        let stage = visitor.stage;
        self.ready.entry(stage).or_default().push_back(attended.step);
        Some(self.payload(attended.step))
    }

    /// The work that [`Tier1Node::start`] gave is done; appends what follows. A step that was abandoned
    /// in the meantime has no followers.
    pub fn computed(&mut self, actions: &mut Vec<Tier1Action<P>>) {
        let work = self.computing.take().expect("nothing was being computed");
        let layers = self.layers;
        for step in work.steps {
            let Some(visitor) = self.visitor(step) else { continue };
            let layer = match work.stage {
                Stage::Enter => 0,
                Stage::Middle(layer) => layer + 1,
                Stage::Exit => {
                    let visitor = self.visitors.remove(&step.shard).expect("it was found above");
                    actions.push(Tier1Action::Leave(visitor.launch, visitor.payload));
                    continue;
                }
            };
            visitor.awaits = Some(layer);
            visitor.stage = if layer + 1 == layers { Stage::Exit } else { Stage::Middle(layer) };
            let rows = visitor.launch.rows.clone();
            actions.push(Tier1Action::Attend(Attend { step, layer, rows }));
        }
    }

    /// The next work, if nothing is being computed: the deepest batch that is ready. Call it after
    /// everything that arrived was taken in: batches are then larger.
    pub fn start(&mut self) -> Option<Tier1Work> {
        if self.computing.is_some() {
            return None;
        }
        let stages: Vec<Stage> = self.ready.keys().rev().copied().collect();
        let work = stages.into_iter().find_map(|stage| self.batch(stage))?;
        self.computing = Some(work.clone());
        Some(work)
    }

    /// Takes what may be computed now at a stage, up to a batch, oldest first.
    fn batch(&mut self, stage: Stage) -> Option<Tier1Work> {
        let mut steps = Vec::new();
        let mut left = VecDeque::new();
        let mut rows = 0;
        for step in self.ready.remove(&stage)? {
            let rows_with = rows + self.rows(step).len();
            let fits = steps.is_empty() || rows_with <= self.rows_max;
            if fits && self.may_start(step) {
                steps.push(step);
                rows = rows_with;
            } else {
                left.push_back(step);
            }
        }
        if !left.is_empty() {
            self.ready.insert(stage, left);
        }
        (!steps.is_empty()).then_some(Tier1Work { stage, steps })
    }

    /// Whether a step need not wait for others of its flight: none of them is behind it.
    fn may_start(&self, step: StepId) -> bool {
        let stage = self.here(step).stage;
        let mut flight =
            self.visitors.iter().filter(|(other, _)| other.flight == step.shard.flight);
        self.merge == Merge::Ready
            || flight.all(|(_, other)| {
                other.stage > stage || (other.stage == stage && other.awaits.is_none())
            })
    }
}
