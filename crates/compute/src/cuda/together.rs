//! Which rows of a step attend together to the pages that their contexts begin with.

use super::PAGE;
use super::tables::{BLOCK_PAGES, Tables};
use crate::families::Families;

/// Pairs of row and query head that attend together, at least.
const PAIRS_MIN: usize = 64;
/// Positions that they need not attend to again, at least. With fewer, what is handed over costs more than it saves: on an
/// H200, 64 rows with 1,024 common positions are as fast each for itself.
const SAVED_MIN: usize = 60 * 1024;

/// Rows that attend together.
pub(super) struct Together {
    /// Indices of contexts.
    pub(super) members: Vec<usize>,
    /// Positions that all of them begin with: whole blocks.
    pub(super) end: usize,
}

/// Finds the rows that gain by attending together among those at the ends of contexts, given as slot and position.
/// `group` query heads share a key head.
pub(super) fn find(contexts: &[(u32, u32)], tables: &Tables, group: usize) -> Vec<Together> {
    let mut found = Families::default();
    found.find(contexts.len(), BLOCK_PAGES, PAIRS_MIN.div_ceil(group), |context| {
        let (slot, position) = contexts[context];
        tables.blocks_before(slot, position)
    });
    let Families { members, families } = found;
    let together = families.into_iter().map(|family| Together {
        members: members[family.members].to_vec(),
        end: family.pages * PAGE,
    });
    together.filter(|family| (family.members.len() - 1) * family.end >= SAVED_MIN).collect()
}
