//! A lane's pages: the dispatcher hands them out, so no Tier-2 node ever finds itself out of memory.
//!
//! A full page whose positions are all computed is published under the tokens that led to it. A prompt that begins with
//! the same tokens holds the page too instead of computing it. Nobody writes a published page. When nobody holds it any
//! more it is kept until its memory is wanted, least recently held first.
//!
//! Memory that was never written is not wanted lightly: the system has to find and clear it, and it is in no cache. So
//! once more pages are kept for nothing so far than are held at all, the oldest of them is written again before an
//! untouched one. A page that a second prompt has found stays.

use glinthawk_flight::pages_for;
use std::collections::{BTreeMap, HashMap};

/// Pages of `page_positions` positions of a lane that has memory for `held` of them: no more than its slots could ever use. `None` if one context of
/// the longest length does not fit: memory must never decide what a completion says.
pub fn lane_pages(held: u64, context_max: u32, slots: u64, page_positions: u32) -> Option<u32> {
    let context_pages = u64::from(pages_for(context_max, page_positions));
    let pages = held.min(context_pages.saturating_mul(slots));
    (held >= context_pages).then(|| u32::try_from(pages).unwrap_or(u32::MAX))
}

/// What leads to a context's first page.
pub(super) const BEGINNING: u64 = 0;

/// A page's tokens and what leads to them.
struct Published {
    /// The name by which following pages know this one; never given twice.
    name: u64,
    /// The name of the page before.
    before: u64,
    tokens: Box<[u32]>,
    hash: u64,
}

#[derive(Default)]
struct Page {
    holders: u32,
    published: Option<Published>,
    /// Whether a second prompt has found it.
    found: bool,
    /// When its last holder let it go.
    idle_since: u64,
}

/// The pages of one lane.
pub(super) struct PagePool {
    pages: Vec<Page>,
    /// Pages that hold nothing. The untouched ones are below the others.
    free: Vec<u32>,
    /// Pages that were never taken.
    untouched: u32,
    /// Published pages that nobody holds, by the time since when.
    idle: BTreeMap<u64, u32>,
    /// Those of them that no second prompt has found.
    idle_unfound: BTreeMap<u64, u32>,
    /// Published pages by the hash of their tokens and all before them.
    by_hash: HashMap<u64, u32>,
    /// Counts names and moments.
    counter: u64,
    published_held: u32,
}

impl PagePool {
    pub(super) fn new(total: u32) -> Self {
        Self {
            pages: (0..total).map(|_| Page::default()).collect(),
            free: (0..total).rev().collect(),
            untouched: total,
            idle: BTreeMap::new(),
            idle_unfound: BTreeMap::new(),
            by_hash: HashMap::new(),
            counter: BEGINNING,
            published_held: 0,
        }
    }

    pub(super) fn total(&self) -> u32 {
        self.pages.len() as u32
    }

    /// Pages that somebody holds.
    pub(super) fn used(&self) -> u32 {
        self.total() - self.available()
    }

    /// Pages that can be taken.
    pub(super) fn available(&self) -> u32 {
        (self.free.len() + self.idle.len()) as u32
    }

    /// Pages that nobody holds and others may find.
    pub(super) fn kept(&self) -> u32 {
        self.idle.len() as u32
    }

    /// Pages that somebody holds and others may.
    pub(super) fn published_held(&self) -> u32 {
        self.published_held
    }

    fn count(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    /// Checks that every page has this many holders, and that those without are free or kept.
    pub(super) fn check(&self, holders: &[u32]) {
        for (number, (page, &expected)) in self.pages.iter().zip(holders).enumerate() {
            assert_eq!(page.holders, expected, "holders of page {number}");
        }
        let held = holders.iter().filter(|count| **count > 0).count();
        let known = held + self.free.len() + self.idle.len();
        assert_eq!(known, self.pages.len(), "pages are not conserved");
    }

    /// A page to write on.
    pub(super) fn take(&mut self) -> Option<u32> {
        let only_untouched = self.free.len() == self.untouched as usize;
        let kept_for_nothing = self.idle_unfound.len() as u32 > self.used();
        let page = match self.free.pop_if(|_| !(only_untouched && kept_for_nothing)) {
            Some(page) => {
                self.untouched -= u32::from(only_untouched);
                page
            }
            None => {
                let kept = if self.free.is_empty() { &self.idle } else { &self.idle_unfound };
                let (&since, &page) = kept.first_key_value()?;
                self.idle.remove(&since);
                self.idle_unfound.remove(&since);
                let published = self.pages[page as usize].published.take();
                let published = published.expect("only published pages are kept");
                self.by_hash.remove(&published.hash);
                page
            }
        };
        self.pages[page as usize].found = false;
        self.pages[page as usize].holders = 1;
        Some(page)
    }

    /// The page of these tokens after the page `before`, and its name.
    pub(super) fn find(&self, hash: u64, before: u64, tokens: &[u32]) -> Option<(u32, u64)> {
        let &page = self.by_hash.get(&hash)?;
        let published = self.pages[page as usize].published.as_ref().expect("found by its hash");
        let same = published.before == before && *published.tokens == *tokens;
        same.then_some((page, published.name))
    }

    /// Whether pages with this hash can be found.
    pub(super) fn has(&self, hash: u64) -> bool {
        self.by_hash.contains_key(&hash)
    }

    /// Holds a published page.
    pub(super) fn hold(&mut self, page: u32) {
        let state = &mut self.pages[page as usize];
        assert!(state.published.is_some(), "page {page} is written by its holder");
        state.holders += 1;
        state.found = true;
        if state.holders == 1 {
            let idle = self.idle.remove(&state.idle_since);
            self.idle_unfound.remove(&state.idle_since);
            assert_eq!(idle, Some(page), "what nobody holds is idle");
            self.published_held += 1;
        }
    }

    /// Makes a full page known under its tokens and what leads to them. Gives the name by which the page after it
    /// knows it. If another page with the same content is known already, that one stays.
    pub(super) fn publish(&mut self, page: u32, hash: u64, before: u64, tokens: &[u32]) -> u64 {
        if let Some((_, name)) = self.find(hash, before, tokens) {
            return name;
        }
        let name = self.count();
        let state = &mut self.pages[page as usize];
        assert!(state.holders == 1 && state.published.is_none(), "page {page} is published twice");
        // Another page with this hash, of other tokens, is the one that is found.
        if self.by_hash.contains_key(&hash) {
            return name;
        }
        state.published = Some(Published { name, before, tokens: tokens.into(), hash });
        self.by_hash.insert(hash, page);
        self.published_held += 1;
        name
    }

    /// Whether the page may be written: its only holder does, and nobody else can find it.
    pub(super) fn is_private(&self, page: u32) -> bool {
        let state = &self.pages[page as usize];
        state.holders == 1 && state.published.is_none()
    }

    /// Lets a context's pages go, in the order of its positions.
    pub(super) fn give(&mut self, pages: Vec<u32>) {
        // The last page goes first, because it is of no use without those before it.
        for page in pages.into_iter().rev() {
            let now = self.count();
            let state = &mut self.pages[page as usize];
            assert!(state.holders > 0, "page {page} is given back by nobody");
            state.holders -= 1;
            if state.holders > 0 {
                continue;
            }
            if state.published.is_some() {
                state.idle_since = now;
                self.published_held -= 1;
                self.idle.insert(now, page);
                if !state.found {
                    self.idle_unfound.insert(now, page);
                }
            } else {
                self.free.push(page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_holds_is_kept_until_it_is_wanted() {
        let mut pool = PagePool::new(3);
        let pages = vec![pool.take().unwrap(), pool.take().unwrap()];
        let first = pool.publish(pages[0], 10, BEGINNING, &[1, 2]);
        let second = pool.publish(pages[1], 20, first, &[3, 4]);
        assert_eq!(pool.find(20, first, &[3, 4]), Some((pages[1], second)));
        assert_eq!(pool.find(20, BEGINNING, &[3, 4]), None, "other tokens came before");
        assert_eq!(pool.find(20, first, &[3, 5]), None, "the tokens are compared");
        pool.hold(pages[0]);
        pool.give(pages.clone());
        assert_eq!((pool.used(), pool.published_held(), pool.available()), (1, 1, 2));
        let third = pool.take().unwrap();
        assert!(!pages.contains(&third), "a free page goes before a kept one");
        assert_eq!(pool.take(), Some(pages[1]), "then the one that nobody holds");
        assert_eq!(pool.take(), None);
        assert_eq!((pool.has(10), pool.has(20)), (true, false));
        pool.give(vec![pages[0]]);
        assert_eq!(pool.take(), Some(pages[0]));
    }

    #[test]
    fn memory_that_was_never_written_is_taken_last_if_pages_are_kept_for_nothing() {
        let mut pool = PagePool::new(100);
        let held = pool.take().unwrap();
        let mut most = held;
        for number in 1..50 {
            let page = pool.take().unwrap();
            most = most.max(page);
            pool.publish(page, number, BEGINNING, &[1]);
            if number == 7 {
                pool.hold(page);
                pool.give(vec![page]);
            }
            pool.give(vec![page]);
        }
        assert_eq!(most, held + 3, "two in turn, and the one that was found");
        let kept = (1..50).filter(|hash| pool.has(*hash));
        assert_eq!(
            kept.collect::<Vec<_>>(),
            [7, 48, 49],
            "the last two, and the one that was found"
        );
    }

    #[test]
    fn of_one_context_the_last_page_goes_first() {
        let mut pool = PagePool::new(2);
        let pages = vec![pool.take().unwrap(), pool.take().unwrap()];
        let first = pool.publish(pages[0], 10, BEGINNING, &[1]);
        pool.publish(pages[1], 20, first, &[2]);
        pool.give(pages.clone());
        assert_eq!(pool.take(), Some(pages[1]));
        assert!(pool.find(10, BEGINNING, &[1]).is_some());
    }
}
