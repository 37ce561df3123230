//! Prompts that begin with the same tokens share the pages of those. A prompt looks for its next page before it computes
//! it. If another prompt is computing that page it waits, and if the page is there it is held by both.

use super::entry::{Entry, Seat};
use super::{Dispatcher, Lane};
use crate::prompt::PromptId;

/// Says that a prompt of the lane has these pages or will.
pub(super) fn promise(hashes: &[u64], lane: &mut Lane) {
    for hash in hashes {
        *lane.promised.entry(*hash).or_default() += 1;
    }
}

/// Makes the pages of a prompt known that have become full.
pub(super) fn publish(entry: &mut Entry, id: PromptId, lane: &mut Lane, page_positions: u32) {
    let Entry { prompt, hashes, seat: Some(seat), .. } = entry else { return };
    let full = (seat.computed / page_positions).min(hashes.len() as u32);
    while seat.published < full {
        let number = seat.published as usize;
        let tokens = page_tokens(&prompt.tokens, number, page_positions);
        let (page, before) = (seat.pages[number], seat.published_name);
        seat.published_name = lane.pages.publish(page, hashes[number], before, tokens);
        seat.published += 1;
        if lane.computing.get(&hashes[number]) == Some(&id) {
            lane.computing.remove(&hashes[number]);
        }
    }
    let begun = seat.computed + seat.rows_in_air > seat.published * page_positions;
    if let Some(hash) = hashes.get(seat.published as usize).filter(|_| begun) {
        lane.computing.entry(*hash).or_insert(id);
    }
}

/// Takes back what a prompt has announced and promised.
pub(super) fn withdraw(hashes: &[u64], seat: &Seat, id: PromptId, lane: &mut Lane) {
    for hash in hashes {
        let promised = lane.promised.get_mut(hash).expect("it was promised");
        *promised -= 1;
        if *promised == 0 {
            lane.promised.remove(hash);
        }
    }
    if let Some(hash) = hashes.get(seat.published as usize)
        && lane.computing.get(hash) == Some(&id)
    {
        lane.computing.remove(hash);
    }
}

fn page_tokens(tokens: &[u32], number: usize, page_positions: u32) -> &[u32] {
    &tokens[number * page_positions as usize..][..page_positions as usize]
}

impl Dispatcher {
    /// Pages that a waiting prompt would share on a lane.
    pub(super) fn pages_shared(&self, id: PromptId, lane: &Lane) -> u32 {
        let entry = &self.entries[&id];
        // At least one row is computed, to pick a token from.
        let most = (entry.len() - 1) / self.config.page_positions;
        let there = |hash: &u64| lane.pages.has(*hash) || lane.promised.contains_key(hash);
        let hashes = &entry.hashes[..entry.hashes.len().min(most as usize)];
        // No page is kept longer than those before it.
        if hashes.first().is_some_and(there) { hashes.partition_point(there) as u32 } else { 0 }
    }

    /// Gives a seated prompt the pages that come next and are there already. `false`: the next one is being computed by
    /// another prompt.
    pub(super) fn share_pages(&mut self, id: PromptId) -> bool {
        let entry = self.entries.get_mut(&id).expect("the caller has it");
        let (known, page_positions) = (entry.len(), self.config.page_positions);
        let Entry { prompt, hashes, seat: Some(seat), .. } = entry else { return true };
        let lane = &mut self.lanes[seat.shard.lane as usize];
        loop {
            let number = seat.published as usize;
            let next = seat.computed + page_positions;
            let begins = seat.rows_in_air == 0 && seat.computed == seat.published * page_positions;
            let Some(&hash) = hashes.get(number).filter(|_| begins && next < known) else {
                return true;
            };
            let tokens = page_tokens(&prompt.tokens, number, page_positions);
            let Some((page, name)) = lane.pages.find(hash, seat.published_name, tokens) else {
                return lane.computing.get(&hash).is_none_or(|by| *by == id);
            };
            lane.pages.hold(page);
            // It may have been given a page to compute this one on.
            lane.pages.give(seat.pages.split_off(number));
            seat.pages.push(page);
            (seat.computed, seat.published, seat.published_name) = (next, seat.published + 1, name);
            let news = u64::from(next.saturating_sub(entry.prefilled));
            entry.prefilled = entry.prefilled.max(next);
            entry.shared += news as u32;
            self.stats.prefilled += news;
            self.stats.shared += news;
        }
    }

    /// Says that a prompt is computing its next page, so that others wait for it.
    pub(super) fn announce(&mut self, id: PromptId) {
        let Entry { hashes, seat: Some(seat), .. } = &self.entries[&id] else { return };
        if let Some(hash) = hashes.get(seat.published as usize) {
            let lane = &mut self.lanes[seat.shard.lane as usize];
            lane.computing.entry(*hash).or_insert(id);
        }
    }
}
