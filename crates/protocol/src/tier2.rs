//! A Tier-2 node: a queue of rows to attend, and how far every slot's page table reaches, to check them. It
//! knows no weights, no sampling and no prompts; slots and pages are numbers that the dispatcher chose.
//! The tables themselves are the kernels'.

use crate::message::{Attend, Attended, Parcel};
use glinthawk_flight::{Row, ShardId};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// The cores that a process on so many, which does nothing but attend, leaves to the threads that receive and send: on
/// many cores, attention waits for memory rather than for cores.
pub fn network_cores(cores: usize) -> usize {
    match cores {
        0..6 => 0,
        6..12 => 1,
        _ => 2,
    }
}

/// A message that a correct dispatcher would not send. Nothing of it was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier2Error {
    /// The row's slot, page or position is outside what the node was given.
    OutOfRange(Row),
    /// The row's context has a hole before it.
    Gap(Row),
    /// The rows of the slot do not stand together, in order of position.
    Disorder(Row),
}

impl std::fmt::Display for Tier2Error {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (row, what) = match self {
            Self::OutOfRange(row) => (row, "is outside this node's slots and pages"),
            Self::Gap(row) => (row, "comes before the pages below it"),
            Self::Disorder(row) => (row, "does not follow the slot's row before it"),
        };
        write!(
            formatter,
            "row at slot {}, position {}, page {} {what}",
            row.slot, row.position, row.page
        )
    }
}

impl std::error::Error for Tier2Error {}

/// Rows that are attended.
#[derive(Debug)]
pub struct Tier2Work<P> {
    /// The rows.
    pub attend: Attend,
    /// Their q, k, v; then the attention output.
    pub payload: P,
}

#[derive(Clone, Default)]
struct Slot {
    /// Pages in its table.
    pages: u32,
    /// The last message whose rows were checked against this slot.
    checked_by: u64,
}

/// The state machine; see the module's head. `P` is what travels beside a message.
pub struct Tier2Node<P> {
    pages: u32,
    page_positions: u32,
    slots: Vec<Slot>,
    /// The newest generation of the lane that came. What is left of an earlier one belongs to contexts that are gone.
    generation: u64,
    /// The epoch and layer of the last message of each shard. What is not later than that belongs to an
    /// abandoned step or came before, and its pages may be another prompt's by now.
    newest: HashMap<ShardId, (u64, u32)>,
    messages: u64,
    ready: BTreeMap<u32, VecDeque<Tier2Work<P>>>,
    /// Works that were started and are not done.
    computing: usize,
}

impl<P> Tier2Node<P> {
    /// A node with `slots` page tables over `pages` pages of `page_positions` positions.
    pub fn new(slots: u32, pages: u32, page_positions: u32) -> Self {
        Self {
            pages,
            page_positions,
            slots: vec![Slot::default(); slots as usize],
            generation: 0,
            newest: HashMap::new(),
            messages: 0,
            ready: BTreeMap::new(),
            computing: 0,
        }
    }

    /// Takes rows to attend. `false`: they are old news, and no page was touched for them.
    pub fn take(&mut self, attend: Attend, payload: P) -> Result<bool, Tier2Error> {
        let generation = attend.step.generation();
        let newest = self.newest.get(&attend.step.shard).copied();
        if generation < self.generation {
            return Ok(false);
        }
        if newest.is_some_and(|newest| (attend.step.epoch, attend.layer) <= newest) {
            return Ok(false);
        }
        self.check(&attend)?;
        if generation > self.generation {
            self.generation = generation;
            self.ready.clear();
        } else if newest.is_some_and(|(epoch, _)| epoch < attend.step.epoch) {
            self.abandon(attend.step.shard);
        }
        self.newest.insert(attend.step.shard, (attend.step.epoch, attend.layer));
        for row in attend.shared.iter().chain(&attend.rows) {
            // Position 0 starts the slot again. That is how a slot is released without a message.
            self.slots[row.slot as usize].pages = row.position / self.page_positions + 1;
        }
        self.ready.entry(attend.layer).or_default().push_back(Tier2Work { attend, payload });
        Ok(true)
    }

    /// Works that wait: one for each shard at most.
    pub fn waiting(&self) -> usize {
        self.ready.values().map(VecDeque::len).sum()
    }

    /// Forgets the rows of a shard that wait.
    fn abandon(&mut self, shard: ShardId) {
        self.ready.retain(|_, queue| {
            queue.retain(|work| work.attend.step.shard != shard);
            !queue.is_empty()
        });
    }

    /// The next rows to append and attend, if fewer than `works_max` works are being computed: the deepest that wait.
    pub fn start(&mut self, works_max: usize) -> Option<Tier2Work<P>> {
        let free = self.computing < works_max;
        let mut queue = self.ready.last_entry().filter(|_| free)?;
        let work = queue.get_mut().pop_front();
        if queue.get().is_empty() {
            queue.remove();
        }
        self.computing += 1;
        work
    }

    /// Rows that [`Tier2Node::start`] gave are attended; gives the answer to send.
    pub fn computed(&mut self, work: Tier2Work<P>) -> Parcel<P> {
        self.computing = self.computing.checked_sub(1).expect("something was being computed");
        let Attend { step, layer, .. } = work.attend;
        Parcel::Attended(Attended { step, layer }, work.payload)
    }

    /// Whether every row can be entered into its slot's table, as it will be when the shared pages and the rows before
    /// it are.
    fn check(&mut self, attend: &Attend) -> Result<(), Tier2Error> {
        let reach = self.check_shared(&attend.shared)?;
        self.messages += 1;
        let messages = self.messages;
        let mut before: Option<&Row> = None;
        for row in &attend.rows {
            let index = row.position / self.page_positions;
            let shared = reach.get(&row.slot).copied();
            let slot = self.in_range(row)?;
            match before.filter(|before| before.slot == row.slot) {
                Some(before) if before.position.checked_add(1) != Some(row.position) => {
                    return Err(Tier2Error::Disorder(*row));
                }
                Some(_) => {}
                None if slot.checked_by == messages => return Err(Tier2Error::Disorder(*row)),
                None if index > shared.unwrap_or(slot.pages) => return Err(Tier2Error::Gap(*row)),
                // It would write on a page that others read.
                None if shared.is_some_and(|pages| index < pages) => {
                    return Err(Tier2Error::Disorder(*row));
                }
                None => slot.checked_by = messages,
            }
            before = Some(row);
        }
        Ok(())
    }

    fn in_range(&mut self, row: &Row) -> Result<&mut Slot, Tier2Error> {
        let index = row.position / self.page_positions;
        let slot = self.slots.get_mut(row.slot as usize);
        let slot = slot.filter(|_| row.page < self.pages && index < self.pages);
        slot.ok_or(Tier2Error::OutOfRange(*row))
    }

    /// How far the tables will reach that shared pages are entered into, if they can be: each begins where the slot's
    /// table ends or goes on after the one before it.
    fn check_shared(&mut self, shared: &[Row]) -> Result<HashMap<u32, u32>, Tier2Error> {
        let mut reach = HashMap::new();
        for row in shared {
            let index = row.position / self.page_positions;
            let pages = self.in_range(row)?.pages;
            let fits = match reach.get(&row.slot) {
                Some(&next) => index == next,
                None => index <= pages,
            };
            if !fits || !row.position.is_multiple_of(self.page_positions) {
                return Err(Tier2Error::Gap(*row));
            }
            reach.insert(row.slot, index + 1);
        }
        Ok(reach)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use glinthawk_flight::StepId;

    const PAGE_POSITIONS: u32 = 5;

    fn row(slot: u32, position: u32, page: u32) -> Row {
        Row { slot, position, page, token: 0 }
    }

    fn attend(epoch: u64, layer: u32, rows: &[Row]) -> Attend {
        let step = StepId { shard: ShardId::default(), epoch };
        Attend { step, layer, rows: rows.to_vec(), shared: Vec::new() }
    }

    #[test]
    fn rows_that_make_no_sense_are_refused_and_change_nothing() {
        let check = |rows: &[Row], expected: Tier2Error| {
            let mut node = Tier2Node::new(2, 8, PAGE_POSITIONS);
            let good = [row(0, 0, 4), row(1, 0, 5)];
            assert_eq!(node.take(attend(1, 0, &good), ()), Ok(true));
            assert_eq!(node.take(attend(1, 1, rows), ()), Err(expected));
            assert_eq!((node.slots[0].pages, node.slots[1].pages), (1, 1));
            assert_eq!(node.take(attend(1, 1, &good), ()), Ok(true), "the right one still counts");
        };
        let bad = row(2, 0, 0);
        check(&[row(0, 0, 1), bad], Tier2Error::OutOfRange(bad));
        let bad = row(0, 1, 8);
        check(&[bad], Tier2Error::OutOfRange(bad));
        let bad = row(0, 8 * PAGE_POSITIONS, 1);
        check(&[bad], Tier2Error::OutOfRange(bad));
        let bad = row(1, 2 * PAGE_POSITIONS, 1);
        check(&[row(0, 0, 1), bad], Tier2Error::Gap(bad));
        let bad = row(0, 0, 1);
        check(&[row(0, 1, 1), bad], Tier2Error::Disorder(bad));
        check(&[row(0, 1, 1), row(1, 1, 2), bad], Tier2Error::Disorder(bad));
        let last = row(0, u32::MAX, 1);
        check(&[last, row(0, 0, 1)], Tier2Error::OutOfRange(last));
    }

    #[test]
    fn shared_pages_reach_as_far_as_the_rows_begin() {
        let check = |shared: &[Row], rows: &[Row], expected: Result<bool, Tier2Error>| {
            let mut node = Tier2Node::new(2, 8, PAGE_POSITIONS);
            let attend = Attend { shared: shared.to_vec(), ..attend(1, 0, rows) };
            assert_eq!(node.take(attend, ()), expected);
            let pages = if expected.is_ok() { 3 } else { 0 };
            assert_eq!((node.slots[0].pages, node.slots[1].pages), (0, pages));
        };
        let page = PAGE_POSITIONS;
        let two = [row(1, 0, 4), row(1, page, 5)];
        check(&two, &[row(1, 2 * page, 6), row(1, 2 * page + 1, 6)], Ok(true));
        let written = row(1, 2 * page - 1, 5);
        check(&two, &[written], Err(Tier2Error::Disorder(written)));
        let far = row(1, 3 * page, 6);
        check(&two, &[far], Err(Tier2Error::Gap(far)));
        check(&two[1..], &[row(1, 2 * page, 6)], Err(Tier2Error::Gap(two[1])));
        let beyond = row(1, 0, 8);
        check(&[beyond], &[row(1, page, 6)], Err(Tier2Error::OutOfRange(beyond)));
        let crooked = row(1, 1, 4);
        check(&[crooked], &[row(1, page, 6)], Err(Tier2Error::Gap(crooked)));
    }

    #[test]
    fn a_newer_step_takes_the_place_of_an_older_one() {
        let mut node = Tier2Node::new(1, 8, PAGE_POSITIONS);
        assert_eq!(node.take(attend(3, 1, &[row(0, 0, 4)]), "old"), Ok(true));
        assert_eq!(node.take(attend(3, 1, &[row(0, 0, 5)]), "twice"), Ok(false));
        assert_eq!(node.take(attend(3, 0, &[row(0, 0, 5)]), "late"), Ok(false));
        assert_eq!(node.take(attend(4, 0, &[row(0, 0, 6)]), "new"), Ok(true));
        assert_eq!(node.take(attend(3, 2, &[row(0, 0, 7)]), "stale"), Ok(false));
        let work = node.start(1).expect("the new one waits");
        assert_eq!(work.payload, "new");
        assert_eq!(node.computed(work).step().epoch, 4);
        assert!(node.start(1).is_none(), "the old one is gone");
    }
}
