//! Rows and shards: who a token belongs to, where it stands, and where its context lives.

use std::ops::Range;

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

impl Shard {
    /// The shard's rows as indices into the flight's.
    pub fn range(&self) -> Range<usize> {
        self.start as usize..self.start as usize + self.len as usize
    }
}

/// Why shards do not partition a flight's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    /// A shard without rows.
    #[error("shard of lane {lane} is empty")]
    Empty {
        /// The shard's lane.
        lane: u32,
    },
    /// A gap or an overlap.
    #[error("shard of lane {lane} starts at row {start}, the one before ends at {expected}")]
    Start {
        /// The shard's lane.
        lane: u32,
        /// Where it starts.
        start: u32,
        /// Where it must start.
        expected: u32,
    },
    /// Rows are not ordered by Tier-2 node.
    #[error("shard of lane {lane} follows the shard of lane {before}")]
    Order {
        /// The shard's lane.
        lane: u32,
        /// The lane before it.
        before: u32,
    },
    /// Rows left over, or more rows than there are.
    #[error("shards hold {held} rows of {rows}")]
    Count {
        /// Rows the shards hold together.
        held: u64,
        /// Rows of the flight.
        rows: u32,
    },
}

/// Whether `shards` are non-empty, adjacent, ascending by lane, and together exactly `rows` rows.
pub fn check_shards(rows: u32, shards: impl IntoIterator<Item = Shard>) -> Result<(), ShardError> {
    let mut held = 0u64;
    let mut before = None;
    for Shard { lane, start, len } in shards {
        if len == 0 {
            return Err(ShardError::Empty { lane });
        }
        // `held` cannot exceed `rows` here, so it fits.
        let expected = held as u32;
        if start != expected {
            return Err(ShardError::Start { lane, start, expected });
        }
        if let Some(before) = before.filter(|before| lane <= *before) {
            return Err(ShardError::Order { lane, before });
        }
        held += u64::from(len);
        if held > u64::from(rows) {
            return Err(ShardError::Count { held, rows });
        }
        before = Some(lane);
    }
    if held == u64::from(rows) { Ok(()) } else { Err(ShardError::Count { held, rows }) }
}

/// Each shard with its rows: ranges of the flight's, nothing is copied.
pub fn split<'a>(
    rows: &'a [Row],
    shards: &'a [Shard],
) -> impl ExactSizeIterator<Item = (&'a Shard, &'a [Row])> {
    shards.iter().map(|shard| (shard, &rows[shard.range()]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rows: u32, shards: &[(u32, u32, u32)], expected: Result<(), ShardError>) {
        let shards = shards.iter().map(|&(lane, start, len)| Shard { lane, start, len });
        assert_eq!(check_shards(rows, shards), expected);
    }

    #[test]
    fn shards_partition_the_rows() {
        check(0, &[], Ok(()));
        check(5, &[(0, 0, 2), (3, 2, 3)], Ok(()));
        check(5, &[(0, 0, 2), (3, 2, 0)], Err(ShardError::Empty { lane: 3 }));
        check(
            5,
            &[(0, 0, 2), (3, 3, 2)],
            Err(ShardError::Start { lane: 3, start: 3, expected: 2 }),
        );
        check(5, &[(3, 0, 2), (3, 2, 3)], Err(ShardError::Order { lane: 3, before: 3 }));
        check(5, &[(0, 0, 4)], Err(ShardError::Count { held: 4, rows: 5 }));
        check(5, &[(0, 0, u32::MAX)], Err(ShardError::Count { held: u32::MAX.into(), rows: 5 }));
    }
}
