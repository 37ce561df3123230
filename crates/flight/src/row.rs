//! Rows: who a token belongs to, where it stands, and where its context lives; and the names of what
//! rows travel in.

/// Positions in one page of context where no cluster has settled on another number, as in plans: what CPUs usually have. GPUs
/// have smaller pages, so plans count theirs a little too full.
pub const PAGE_POSITIONS: u32 = 32;

/// Stands for a token that is not known where the row is made: the one that the step before picked for the row's slot.
pub const TOKEN_PENDING: u32 = u32::MAX;

/// What is picked where the logits allow no token: each of them is minus infinity or not a number.
pub const TOKEN_NONE: u32 = u32::MAX - 1;

/// Pages of `page_positions` positions that hold this many positions.
pub fn pages_for(positions: u32, page_positions: u32) -> u32 {
    positions.div_ceil(page_positions)
}

/// One token of one prompt at one position: the unit of work that flows through the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Row {
    /// Context slot on the row's Tier-2 node; the node keeps one page table per slot.
    pub slot: u32,
    /// Position of the token in its prompt, from 0.
    pub position: u32,
    /// Page that holds this position on the row's Tier-2 node, chosen by the dispatcher.
    pub page: u32,
    /// The input token; only slice 0 looks at it.
    pub token: u32,
}

/// Names a shard: the rows of one flight whose context lives on one lane.
///
/// A *lane* is a place in every Tier-1 node's list of attention workers. A prompt bound to lane 2
/// has its context on worker 2 of every slice, under the same slot and page numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardId {
    /// The flight.
    pub flight: u32,
    /// The attention worker's place in each Tier-1 node's list.
    pub lane: u32,
}

/// Names a step: one launch of a shard, and every message that belongs to it. A step is abandoned by
/// launching its shard again; the newer epoch makes what is left of the older one recognisable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepId {
    /// The shard.
    pub shard: ShardId,
    /// Counts the launches of the shard, from 1. Its upper half is the generation of the lane.
    pub epoch: u64,
}

impl StepId {
    /// Bits of an epoch below the generation.
    const GENERATION_SHIFT: u32 = 32;

    /// How often the shard's lane had been opened again when the step was launched. What is left of an earlier
    /// generation belongs to contexts that are gone.
    pub fn generation(&self) -> u64 {
        self.epoch >> Self::GENERATION_SHIFT
    }

    /// The epoch before the first of a generation.
    pub fn epoch_before(generation: u64) -> u64 {
        generation << Self::GENERATION_SHIFT
    }
}
