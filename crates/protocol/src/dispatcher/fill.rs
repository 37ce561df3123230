//! Filling the shards that are home: decode rows first, then prefill of the seated, then newcomers.

use super::drafts::LOOK_MAX;
use super::entry::{Entry, Seat};
use super::need::{Need, Needs};
use super::newcomers::{Manifest, Manifests, Newcomer};
use super::{Dispatcher, DispatcherAction, ShardState, sharing};
use crate::message::{Launch, Merge};
use crate::prompt::PromptId;
use glinthawk_flight::{Row, ShardId, StepId, pages_for};

impl Dispatcher {
    /// Plans and launches every shard that is home and has something to do. Call it after everything
    /// that has happened was taken in: flights are then fuller. A flight that leaves with a single row
    /// comes home no sooner than a full one. A dispatcher that runs ahead launches twice: call it again.
    pub fn fill(&mut self, actions: &mut Vec<DispatcherAction>) {
        let open = self.shards.iter().filter(|(shard, state)| {
            let waits =
                self.config.merge == Merge::WholeFlights && self.flight_in_air(shard.flight);
            let open = !state.in_air && !waits || self.may_run_ahead(shard, state);
            open && !self.lanes[shard.lane as usize].lost
        });
        let open: Vec<ShardId> = open.map(|(&shard, _)| shard).collect();
        if open.is_empty() {
            return;
        }
        self.recall(&open);
        let flights = self.flights_wanted();
        self.regroup(&open, flights);
        let mut manifests = Manifests::new();
        for shard in open {
            manifests.insert(shard, Manifest::default());
            self.plan_seated(shard, &mut manifests);
        }
        self.plan_newcomers(flights, &mut manifests);
        for (shard, manifest) in manifests {
            if self.is_too_small(shard, manifest.rows) {
                self.send_back(shard);
            } else if manifest.rows > 0 {
                self.board(shard, manifest);
                actions.push(DispatcherAction::Launch(self.launch(shard)));
            }
        }
        self.count_pages();
    }

    fn flight_in_air(&self, flight: u32) -> bool {
        self.shards.iter().any(|(shard, state)| shard.flight == flight && state.in_air)
    }

    /// Whether a shard in the air may be launched again: nobody aboard must know its last token to pick the next, and
    /// nobody lacks pages, which only prompts that are home give up.
    fn may_run_ahead(&self, shard: &ShardId, state: &ShardState) -> bool {
        if !self.config.run_ahead || !state.in_air || state.ahead.is_some() {
            return false;
        }
        let entries = || state.seated.iter().map(|id| &self.entries[id]);
        let pages_wanted = entries().map(|entry| {
            let seat = entry.seat.as_ref().expect("seated");
            let rows = entry.rows_wanted().min(self.config.chunk);
            let positions = seat.computed + seat.rows_in_air + rows;
            let pages = pages_for(positions, self.config.page_positions);
            pages.saturating_sub(seat.pages.len() as u32)
        });
        let pages = &self.lanes[shard.lane as usize].pages;
        !entries().any(Entry::looks_back) && pages_wanted.sum::<u32>() <= pages.available()
    }

    /// Gives the seated prompts of a shard their rows: those that generate first (one row each
    /// always fits, because there are never more seats than rows), then those still in prefill, by
    /// age.
    fn plan_seated(&mut self, shard: ShardId, manifests: &mut Manifests) {
        let seated = self.shards[&shard].seated.clone();
        let (generating, prefilling): (Vec<_>, Vec<_>) =
            seated.into_iter().partition(|id| self.entries[id].rows_wanted() == 1);
        for id in &generating {
            self.plan_rows(*id, shard, manifests);
        }
        self.plan_drafts(shard, !prefilling.is_empty(), manifests);
        for id in prefilling {
            self.plan_rows(id, shard, manifests);
        }
    }

    /// Gives prompts that generate, which are planned, rows for what may come next, where that is worth its rows and leaves
    /// others their memory.
    fn plan_drafts(&mut self, shard: ShardId, goes_on: bool, manifests: &mut Manifests) {
        let Some((guesses, costs)) = &self.guesses else { return };
        let manifest = manifests.get_mut(&shard).expect("the shard is being planned");
        let batch = self.config.lane_shape(shard.lane).batch;
        let is_filled = goes_on || !self.queue.is_empty();
        // Prefill keeps half of what is left.
        let room = (batch - manifest.rows) / if is_filled { 2 } else { 1 };
        let rows_max = manifest.rows + room;
        let slots_free = self.lanes[shard.lane as usize].slots_free.len() as u32;
        let seated = self.config.lane_shape(shard.lane).slots() - slots_free;
        for (id, count) in &mut manifest.prompts {
            let entry = self.entries.get_mut(id).expect("planned prompts have an entry");
            let most = entry.drafts_max().min(rows_max - manifest.rows);
            if most == 0 {
                continue;
            }
            let known = entry.len();
            // What it shares is read for others anyway.
            let read = known.saturating_sub(entry.shared);
            let worth = costs.worth(read, if is_filled { batch } else { manifest.rows });
            let before = entry.tokens_before(known, LOOK_MAX);
            let drafts = guesses.draft(before, most as usize, worth);
            let pages = &mut self.lanes[shard.lane as usize].pages;
            let seat = entry.seat.as_mut().expect("planned prompts are seated");
            for draft in drafts {
                let positions = known + seat.drafts.len() as u32 + 1;
                if pages_for(positions, self.config.page_positions) > seat.pages.len() as u32 {
                    // Every prompt of the lane may want one soon.
                    let spare = pages.available() > seated;
                    let Some(page) = spare.then(|| pages.take()).flatten() else { break };
                    seat.pages.push(page);
                }
                seat.drafts.push(draft);
                *count += 1;
                manifest.rows += 1;
            }
        }
    }

    /// Seats waiting prompts, one after the other, while there is room for the next.
    fn plan_newcomers(&mut self, flights: u32, manifests: &mut Manifests) {
        if self.queue.is_empty() {
            return;
        }
        let lanes = 0..self.lanes.len() as u32;
        let mut needs: Vec<Needs> = lanes.map(|lane| self.needs(lane)).collect();
        while let Some(Newcomer { id, shard, need }) = self.newcomer(flights, &needs, manifests) {
            needs[shard.lane as usize].add(need);
            self.queue.remove(&self.entries[&id].rank());
            self.seat(id, shard);
            self.plan_rows(id, shard, manifests);
            if self.entries[&id].seat.is_none() {
                return; // it found no pages after all and waits again
            }
        }
    }

    fn seat(&mut self, id: PromptId, shard: ShardId) {
        let lane = &mut self.lanes[shard.lane as usize];
        let slot = lane.slots_free.pop().expect("as many slots as seats");
        let entry = self.entries.get_mut(&id).expect("queued prompts have an entry");
        entry.seat = Some(Seat::new(shard, slot));
        sharing::promise(&entry.hashes, lane);
        self.take_place(id, shard);
    }

    /// What the prompts of a lane are expected to need.
    fn needs(&self, lane: u32) -> Needs {
        let shards = self.shards.iter().filter(|(shard, _)| shard.lane == lane);
        let seated = shards.flat_map(|(_, state)| &state.seated);
        let published = self.lanes[lane as usize].pages.published_held();
        Needs::new(
            self.config.page_positions,
            published,
            seated.map(|id| self.need_of(&self.entries[id])),
        )
    }

    /// Once nobody waits and lane 0 has room, takes prompts from slower lanes, the last first, so that they wait for it:
    /// computing their contexts again takes less time than going on where they are. They are no more than it has rows
    /// for.
    fn recall(&mut self, open: &[ShardId]) {
        if self.config.own_lane.is_none()
            || self.lanes[0].lost
            || self.lanes[0].leaving
            || !self.queue.is_empty()
        {
            return;
        }
        let mut room = self.lanes[0].slots_free.len() as u32;
        let total = self.lanes[0].pages.total();
        let mut needs = self.needs(0);
        let others = open.iter().filter(|shard| shard.lane != 0 && !self.shards[shard].in_air);
        let mut seated: Vec<PromptId> =
            others.flat_map(|shard| &self.shards[shard].seated).copied().collect();
        seated.sort_unstable_by_key(|id| std::cmp::Reverse(self.entries[id].rank()));
        for id in seated {
            let entry = &self.entries[&id];
            let left = entry.prompt.tokens_max - entry.generated.len() as u32;
            let need = Need { now: entry.len(), more: self.more_expected(entry) };
            if room > 0 && left > self.config.page_positions && needs.leave_room(need, total) {
                room = room.saturating_sub(entry.len().min(self.config.chunk));
                needs.add(need);
                self.stats.preemptions += 1;
                self.drop_context(id);
            }
        }
    }

    /// Whether a flight beside lane 0 would have less than half of the rows that lane 0 has for the same reading of
    /// weights.
    fn is_too_small(&self, shard: ShardId, rows: u32) -> bool {
        let is_beside = self.config.own_lane.is_some() && shard.lane != 0;
        let own_is_there = !self.lanes[0].lost && !self.lanes[0].leaving;
        is_beside && own_is_there && 2 * (rows as usize) < self.own_rows()
    }

    /// Has all prompts of a shard that is home wait for lane 0.
    fn send_back(&mut self, shard: ShardId) {
        for id in self.shards[&shard].seated.clone() {
            let seat = self.entries[&id].seat.as_ref().expect("seated");
            self.stats.preemptions += u64::from(seat.computed > 0);
            self.drop_context(id);
        }
    }

    /// Plans as many of a prompt's rows as budget, chunk and pages allow.
    fn plan_rows(&mut self, id: PromptId, shard: ShardId, manifests: &mut Manifests) {
        if self.entries[&id].seat.is_none() {
            return; // preempted while an older one was planned
        }
        if !self.share_pages(id) {
            return; // another prompt is computing its next page
        }
        let room = self.config.lane_shape(shard.lane).batch - manifests[&shard].rows;
        let rows = self.entries[&id].rows_wanted().min(self.config.chunk).min(room);
        if rows == 0 || !self.hold_pages(id, rows, manifests) {
            return;
        }
        self.announce(id);
        let manifest = manifests.get_mut(&shard).expect("the shard is being planned");
        manifest.rows += rows;
        manifest.prompts.push((id, rows));
    }

    /// Gives a seated prompt the pages for its next `rows` rows. If none is left, the prompt of the
    /// last rank on the lane is preempted. `false` means not now: it was preempted itself, or the
    /// last one is in the air.
    fn hold_pages(&mut self, id: PromptId, rows: u32, manifests: &mut Manifests) -> bool {
        let page_positions = self.config.page_positions;
        loop {
            let seat = self.entries.get_mut(&id).and_then(|entry| entry.seat.as_mut());
            let seat = seat.expect("the caller saw it seated");
            let positions = seat.computed + seat.rows_in_air + rows;
            if seat.pages.len() as u32 >= pages_for(positions, page_positions) {
                return true;
            }
            let lane = seat.shard.lane;
            if let Some(page) = self.lanes[lane as usize].pages.take() {
                seat.pages.push(page);
                continue;
            }
            let last = self.last_on(lane);
            let victim = self.entries[&last].seat.as_ref().expect("it is on the lane");
            if victim.rows_in_air > 0 {
                return false; // the next shard of this lane that comes home tries again
            }
            if let Some(manifest) = manifests.get_mut(&victim.shard) {
                let planned = manifest.prompts.iter().position(|(planned, _)| *planned == last);
                if let Some(index) = planned {
                    manifest.rows -= manifest.prompts.remove(index).1;
                }
            }
            self.stats.preemptions += 1;
            self.drop_context(last);
            if last == id {
                return false;
            }
        }
    }

    /// The prompt of the last rank that holds pages of a lane: the youngest of the least priority.
    fn last_on(&self, lane: u32) -> PromptId {
        let seated = self.shards.iter().filter(|(shard, _)| shard.lane == lane);
        let holders = seated
            .flat_map(|(_, state)| &state.seated)
            .filter(|id| self.entries[id].seat.as_ref().is_some_and(|seat| !seat.pages.is_empty()));
        *holders
            .max_by_key(|id| self.entries[id].rank())
            .expect("a lane without free pages has holders")
    }

    /// Puts what was planned aboard a shard.
    fn board(&mut self, shard: ShardId, manifest: Manifest) {
        let mut aboard = Vec::with_capacity(manifest.prompts.len());
        for (id, count) in manifest.prompts {
            let entry = self.entries.get_mut(&id).expect("planned prompts have an entry");
            let wanted = entry.rows_wanted();
            let seat = entry.seat.as_mut().expect("planned prompts are seated");
            let drafts = seat.drafts.len() as u32;
            let samples = if count == wanted + drafts { 1 + drafts } else { 0 };
            seat.rows_in_air += count;
            seat.tokens_in_air += samples;
            aboard.push((id, count, samples));
        }
        let state = self.shards.get_mut(&shard).expect("exists");
        match state.in_air {
            true => state.ahead = Some(aboard),
            false => {
                (state.in_air, state.aboard, state.launched_ns) = (true, aboard, self.now_ns);
            }
        }
    }

    /// A step of what is aboard a shard, under an epoch of its own.
    pub(super) fn launch(&mut self, shard: ShardId) -> Launch {
        let state = self.shards.get_mut(&shard).expect("exists");
        state.epoch += 1;
        let step = StepId { shard, epoch: state.epoch };
        let aboard = state.ahead.as_ref().unwrap_or(&state.aboard);
        let rows_aboard: u32 = aboard.iter().map(|(_, count, _)| count).sum();
        let mut rows = Vec::with_capacity(rows_aboard as usize);
        let (mut shared, mut samples) = (Vec::new(), Vec::new());
        let pages = &self.lanes[shard.lane as usize].pages;
        for &(id, count, sampled_rows) in aboard {
            let entry = &self.entries[&id];
            shared.extend(entry.untold(count, self.config.page_positions));
            rows.extend(entry.rows(count, self.config.page_positions));
            samples.extend(entry.samples(sampled_rows, rows.len() as u32 - sampled_rows));
        }
        let is_private = |row: &Row| pages.is_private(row.page);
        assert!(!self.config.sharing || rows.iter().all(is_private), "a shared page is written");
        Launch { step, rows, shared, samples }
    }
}
