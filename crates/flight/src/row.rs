//! Rows and shards: who a token belongs to, where it stands, and where its context lives.

/// Positions in one page of context.
pub const PAGE_POSITIONS: u32 = 16;

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

/// The rows of a flight whose context lives on one Tier-2 node: a contiguous range of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The Tier-2 node's place in its Tier-1 node's list of attention workers.
    pub lane: u32,
    /// First row of the shard in the flight.
    pub start: u32,
    /// Number of rows.
    pub len: u32,
}
