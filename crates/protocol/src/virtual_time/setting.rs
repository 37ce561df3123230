//! What a simulated run is given and what it comes to: the cluster's shape, what things cost, what goes
//! wrong, the outcome.

use crate::dispatcher::{DispatcherConfig, DispatcherStats, Rejection};
use crate::message::NodeAddress;
use crate::prompt::{Completion, PromptId};
use crate::tier1::Stage;
use glinthawk_flight::Row;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// The simulated cluster's shape.
#[derive(Clone, Debug)]
pub struct SimulatedCluster {
    /// Layers of each slice.
    pub slice_layers: Vec<u32>,
    /// Rows in one Tier-1 batch at most.
    pub tier1_rows_max: usize,
    /// Works that a node may have started at a time.
    pub works_max: usize,
    /// The dispatcher's part; its lanes are every slice's Tier-2 nodes.
    pub dispatcher: DispatcherConfig,
    /// What happens to nodes.
    pub faults: Vec<Fault>,
    /// How long a host that offers itself takes to load.
    pub load_ns: u64,
    /// How long a pipeline waits for a missing Tier-1 node before its lanes are closed.
    pub replace_within_ns: u64,
    /// How long a step may take, at least and at most, before nodes are asked for it.
    pub patience_ns: RangeInclusive<u64>,
    /// A bug to be found.
    pub planted: Option<Planted>,
}

/// A bug that the simulation makes, to see that it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// Tier-2 nodes take what is left of abandoned steps and lost lanes.
    EpochsUnchecked,
    /// Once a lane was lost, prompts are retired twice.
    RetiredTwice,
    /// A step that is launched again leaks a page.
    PageLeaked,
    /// The dispatcher has no clock, so that it cannot tell which lanes are slow.
    NoClock,
}

/// Something happens to a node. It is there again later, with nothing of what it knew.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// The node.
    pub node: NodeAddress,
    /// When.
    pub at_ns: u64,
    /// What.
    pub kind: FaultKind,
    /// How long after it is known to be gone another host offers itself; `None` is never.
    pub back_ns: Option<u64>,
}

/// What happens to a node.
#[derive(Clone, Copy, Debug)]
pub enum FaultKind {
    /// It dies: it takes and sends nothing any more. What it had sent still arrives.
    Dies {
        /// How much later the others know of it.
        noticed_ns: u64,
    },
    /// It does nothing any more, but lives: nobody is told. What it had sent still arrives.
    Hangs,
    /// It is cut off for a while: what it sends and what it is sent arrives when that is over. If the others give it up
    /// before, two hosts have its place: it does not know, and goes on.
    CutOff {
        /// That while.
        for_ns: u64,
        /// When the others give it up.
        noticed_ns: u64,
    },
    /// A Tier-2 node is asked to leave. It goes when its contexts have ended, or after a time.
    Leaves {
        /// That time.
        within_ns: u64,
    },
}

/// What things cost, in nanoseconds of virtual time. Called in the order of events, so that a
/// seeded generator inside makes a run that replays exactly.
pub trait Costs {
    /// Tier-1 work of a batch of `rows` rows.
    fn tier1_ns(&mut self, slice: usize, stage: Stage, rows: usize) -> u64;
    /// Attention of rows on a lane.
    fn tier2_ns(&mut self, slice: usize, lane: u32, rows: &[Row]) -> u64;
    /// A message of `rows` rows on a link: time it occupies the link, and latency after that.
    fn link_ns(&mut self, link: Wire, rows: usize) -> (u64, u64);
    /// What goes wrong with a message on a link.
    fn mishap(&mut self, _link: Wire) -> Option<Mishap> {
        None
    }
    /// What the watcher of a prompt, counted from 0, does when it has seen this many tokens.
    fn watch(&mut self, _prompt: usize, _seen: usize) -> Option<Stop> {
        None
    }
}

/// Something that goes wrong with a message. The dispatcher gives its step up where that is needed.
#[derive(Clone, Copy, Debug)]
pub enum Mishap {
    /// It arrives a second time, so much later.
    Twice {
        /// Nanoseconds after the first time.
        later_ns: u64,
    },
    /// It never arrives, which is noticed.
    Lost {
        /// Nanoseconds after it would have arrived.
        noticed_ns: u64,
    },
    /// It arrives, but the dispatcher has lost patience with its step.
    GivenUp {
        /// Nanoseconds after it was sent.
        after_ns: u64,
    },
    /// Before it, rows to attend arrive that make no sense; other messages have none.
    Garbled(Garble),
}

/// How rows to attend make no sense.
#[derive(Clone, Copy, Debug)]
pub enum Garble {
    /// The last row's slot is beyond the node's.
    Slot,
    /// The last row's page is.
    Page,
    /// The last row's position is.
    Position,
    /// The last row is there twice.
    Order,
}

/// A watcher ends a completion.
#[derive(Clone, Copy, Debug)]
pub struct Stop {
    /// Tokens that are kept.
    pub kept: usize,
    /// When the dispatcher hears of it; 0 is before it launches anything else.
    pub after_ns: u64,
}

/// A directed link between two places of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wire {
    /// Dispatcher → slice 0.
    Launch,
    /// Slice → next slice.
    Hop(usize),
    /// Slice → its worker on a lane.
    Out(usize, u32),
    /// Worker on a lane → its slice.
    Back(usize, u32),
    /// Last slice → dispatcher.
    Home,
}

/// What a run came to.
pub struct VirtualRun {
    /// One for each prompt, counted from 0.
    pub completions: BTreeMap<usize, Completion>,
    /// The dispatcher's counters.
    pub stats: DispatcherStats,
    /// Virtual time at the end.
    pub end_ns: u64,
    /// Events handled.
    pub events: u64,
    /// The tokens of watched prompts, as they were reported.
    pub watched: BTreeMap<usize, Vec<u32>>,
    /// Messages that nodes found to be old news.
    pub stale: u64,
    /// Messages that Tier-2 nodes refused, as they must.
    pub refused: u64,
    /// How often a Tier-1 node looked for work and waited for the rest of a flight.
    pub waits: u64,
    /// How often a place had a node again.
    pub replaced: u64,
    /// How often a lane was closed because nobody came in time.
    pub expired: u64,
    /// How often a node left with no context left.
    pub drained: u64,
    /// How often a node was found that hung.
    pub found: u64,
    /// How often a node lived on when its place was given away.
    pub doubled: u64,
}

/// Why a run is wrong.
#[derive(Debug)]
pub enum Failure {
    /// Nothing is under way, yet prompts are unfinished.
    Deadlock(Vec<PromptId>),
    /// A node refused a message.
    Refused(String),
    /// A node took rows that make no sense.
    Accepted(Garble),
    /// A prompt got a second result.
    Twice(PromptId),
    /// A prompt was turned away.
    Rejected(Rejection),
}
