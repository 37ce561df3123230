//! A Tier-2 node: page tables and a queue of rows to attend. It knows no weights, no sampling and
//! no prompts; slots and pages are numbers that the dispatcher chose.

use crate::message::{Attend, Attended};
use glinthawk_flight::{PAGE_POSITIONS, Row};
use std::collections::{BTreeMap, VecDeque};

/// A message that no dispatcher of ours would have sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier2Error {
    /// The row's slot, page or position is outside what the node was given.
    OutOfRange(Row),
    /// The row's context has a hole before it.
    Gap(Row),
}

impl std::fmt::Display for Tier2Error {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (row, what) = match self {
            Self::OutOfRange(row) => (row, "is outside this node's slots and pages"),
            Self::Gap(row) => (row, "comes before the pages below it"),
        };
        write!(
            formatter,
            "row at slot {}, position {}, page {} {what}",
            row.slot, row.position, row.page
        )
    }
}

impl std::error::Error for Tier2Error {}

/// The state machine; see the module's head.
pub struct Tier2Node {
    pages: u32,
    /// Pages of every slot, one for each 16 positions.
    tables: Vec<Vec<u32>>,
    ready: BTreeMap<u32, VecDeque<Attend>>,
    computing: Option<Attended>,
}

impl Tier2Node {
    /// A node with `slots` page tables over `pages` pages.
    pub fn new(slots: u32, pages: u32) -> Self {
        let tables = vec![Vec::new(); slots as usize];
        Self { pages, tables, ready: BTreeMap::new(), computing: None }
    }

    /// The pages of positions `0..=position` of a row that is being computed.
    pub fn pages(&self, row: &Row) -> &[u32] {
        &self.tables[row.slot as usize][..=(row.position / PAGE_POSITIONS) as usize]
    }

    /// Takes rows to attend.
    pub fn take(&mut self, attend: Attend) -> Result<(), Tier2Error> {
        for row in &attend.rows {
            self.bind(row)?;
        }
        self.ready.entry(attend.layer).or_default().push_back(attend);
        Ok(())
    }

    /// The next rows to append and attend, if nothing is being computed: the deepest that wait.
    pub fn start(&mut self) -> Option<Attend> {
        if self.computing.is_some() {
            return None;
        }
        let mut queue = self.ready.last_entry()?;
        let attend = queue.get_mut().pop_front().expect("empty queues are removed");
        if queue.get().is_empty() {
            queue.remove();
        }
        self.computing =
            Some(Attended { shard: attend.shard, epoch: attend.epoch, layer: attend.layer });
        Some(attend)
    }

    /// The rows that [`Tier2Node::start`] gave are attended; what to answer.
    pub fn computed(&mut self) -> Attended {
        self.computing.take().expect("nothing was being computed")
    }

    /// Enters a row's page into its slot's table. Position 0 starts the slot anew: that is how a
    /// slot is released, without a message.
    fn bind(&mut self, row: &Row) -> Result<(), Tier2Error> {
        let index = (row.position / PAGE_POSITIONS) as usize;
        let Some(table) = self.tables.get_mut(row.slot as usize) else {
            return Err(Tier2Error::OutOfRange(*row));
        };
        if row.page >= self.pages || index >= self.pages as usize {
            return Err(Tier2Error::OutOfRange(*row));
        }
        if index > table.len() {
            return Err(Tier2Error::Gap(*row));
        }
        table.truncate(index);
        table.push(row.page);
        Ok(())
    }
}
