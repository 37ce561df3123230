//! A Tier-1 node: queues the shards that are ready at each layer and merges what is ready into
//! batches, deepest layer first, without waiting for anyone. It keeps no prompts and no context.

use crate::message::{Attend, Attended, Launch, Merge, Sample, ShardId};
use glinthawk_flight::Row;
use std::collections::{BTreeMap, HashMap, VecDeque};

/// What happens to a Tier-1 node.
pub enum Tier1Event {
    /// A shard enters the slice, from the dispatcher or from the previous slice.
    Arrive(Launch),
    /// A shard's attention output is here.
    Attended(Attended),
    /// The work that [`Tier1Node::start`] gave is done.
    Computed,
}

/// What a Tier-1 node wants done.
#[derive(Debug)]
pub enum Tier1Action {
    /// Send the rows with their q, k, v to the attention worker of the shard's lane.
    Attend(Attend),
    /// The shard left the slice: to the next slice with its residual, or home with its tokens.
    Leave(Launch),
}

/// A batch of shards at the same point of the slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tier1Work {
    /// What is to be computed.
    pub stage: Stage,
    /// For whom; the driver finds rows and payloads by shard.
    pub shards: Vec<ShardId>,
}

/// A point of the slice at which rows wait for Tier 1. Later is deeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Embed (or take the residual in), then pre-attention of the slice's first layer.
    Enter,
    /// Post-attention of this layer, then pre-attention of the next.
    Middle(u32),
    /// Post-attention of the slice's last layer, then classify and sample (or give the residual out).
    Exit,
}

struct Visitor {
    launch: Launch,
    /// The stage the shard waits for, is computed at, or comes to next.
    stage: Stage,
    /// The layer whose attention output is awaited; `None` while Tier 1 works on the shard.
    awaits: Option<u32>,
}

/// The state machine; see the module's head.
pub struct Tier1Node {
    layers: u32,
    /// Rows in one batch at most; a single shard is never larger.
    rows_max: usize,
    merge: Merge,
    visitors: HashMap<ShardId, Visitor>,
    ready: BTreeMap<Stage, VecDeque<ShardId>>,
    computing: Option<Tier1Work>,
}

impl Tier1Node {
    /// A node with `layers` layers that merges shards up to `rows_max` rows.
    pub fn new(layers: u32, rows_max: usize, merge: Merge) -> Self {
        assert!(layers > 0 && rows_max > 0);
        let (visitors, ready) = (HashMap::new(), BTreeMap::new());
        Self { layers, rows_max, merge, visitors, ready, computing: None }
    }

    /// Layers of the slice.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Rows of a shard that is in the slice.
    pub fn rows(&self, shard: ShardId) -> &[Row] {
        &self.visitors[&shard].launch.rows
    }

    /// Samples of a shard that is in the slice.
    pub fn samples(&self, shard: ShardId) -> &[Sample] {
        &self.visitors[&shard].launch.samples
    }

    /// Whether this is the attention output that its shard waits for.
    pub fn awaits(&self, attended: &Attended) -> bool {
        self.visitors.get(&attended.shard).is_some_and(|visitor| {
            visitor.launch.epoch == attended.epoch && visitor.awaits == Some(attended.layer)
        })
    }

    /// Takes an event; appends what is to be done. Messages of an abandoned step are dropped.
    pub fn on(&mut self, event: Tier1Event, actions: &mut Vec<Tier1Action>) {
        match event {
            Tier1Event::Arrive(launch) => {
                let shard = launch.shard;
                self.visitors.insert(shard, Visitor { launch, stage: Stage::Enter, awaits: None });
                self.ready.entry(Stage::Enter).or_default().push_back(shard);
            }
            Tier1Event::Attended(attended) => {
                let Some(visitor) = self.visitors.get_mut(&attended.shard) else { return };
                if visitor.launch.epoch != attended.epoch || visitor.awaits != Some(attended.layer)
                {
                    return;
                }
                visitor.awaits = None;
                self.ready.entry(visitor.stage).or_default().push_back(attended.shard);
            }
            Tier1Event::Computed => self.computed(actions),
        }
    }

    fn computed(&mut self, actions: &mut Vec<Tier1Action>) {
        let work = self.computing.take().expect("nothing was being computed");
        for shard in work.shards {
            let layer = match work.stage {
                Stage::Enter => 0,
                Stage::Middle(layer) => layer + 1,
                Stage::Exit => {
                    let visitor = self.visitors.remove(&shard).expect("it was computed");
                    actions.push(Tier1Action::Leave(visitor.launch));
                    continue;
                }
            };
            let visitor = self.visitors.get_mut(&shard).expect("it was computed");
            visitor.awaits = Some(layer);
            visitor.stage =
                if layer + 1 == self.layers { Stage::Exit } else { Stage::Middle(layer) };
            let rows = visitor.launch.rows.clone();
            actions.push(Tier1Action::Attend(Attend {
                shard,
                epoch: visitor.launch.epoch,
                layer,
                rows,
            }));
        }
    }

    /// The next work, if nothing is being computed: the deepest batch that is ready. Asking late,
    /// after all that has arrived was taken in, makes larger batches.
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
        let mut shards = Vec::new();
        let mut left = VecDeque::new();
        let mut rows = 0;
        for shard in self.ready.remove(&stage)? {
            let rows_with = rows + self.visitors[&shard].launch.rows.len();
            let fits = shards.is_empty() || rows_with <= self.rows_max;
            if fits && self.may_start(shard) {
                shards.push(shard);
                rows = rows_with;
            } else {
                left.push_back(shard);
            }
        }
        if !left.is_empty() {
            self.ready.insert(stage, left);
        }
        (!shards.is_empty()).then_some(Tier1Work { stage, shards })
    }

    /// Whether a shard need not wait for others of its flight: none of them is behind it.
    fn may_start(&self, shard: ShardId) -> bool {
        let stage = self.visitors[&shard].stage;
        let mut flight = self.visitors.iter().filter(|(other, _)| other.flight == shard.flight);
        self.merge == Merge::Ready
            || flight.all(|(_, other)| {
                other.stage > stage || (other.stage == stage && other.awaits.is_none())
            })
    }
}
