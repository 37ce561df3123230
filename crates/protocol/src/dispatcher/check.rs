//! What holds between any two events, for tests that look at every one.

use super::Dispatcher;

impl Dispatcher {
    /// Takes a page of a lane and forgets it, as a bug would: a test sees that this is found.
    #[doc(hidden)]
    pub fn leak_page(&mut self, lane: u32) {
        self.lanes[lane as usize].pages.take();
    }

    /// Checks that every prompt waits or is seated, that every page has the holders it counts, and every slot one owner.
    ///
    /// # Panics
    /// If something of that does not hold.
    #[doc(hidden)]
    pub fn check(&self) {
        let seats = self.entries.values().filter(|entry| entry.seat.is_some()).count();
        assert_eq!(seats + self.queue.len(), self.entries.len(), "a prompt neither waits nor sits");
        for (lane, state) in (0..).zip(&self.lanes) {
            let mut holders = vec![0u32; state.pages.total() as usize];
            let mut slots = vec![false; self.config.lane_shape(lane).slots() as usize];
            let mut seated = 0;
            for (shard, shard_state) in self.shards.iter().filter(|(shard, _)| shard.lane == lane) {
                for id in &shard_state.seated {
                    let seat = self.entries[id].seat.as_ref().expect("it is seated");
                    assert_eq!(seat.shard, *shard, "{id:?} sits elsewhere");
                    seat.pages.iter().for_each(|page| holders[*page as usize] += 1);
                    let taken = std::mem::replace(&mut slots[seat.slot as usize], true);
                    assert!(!taken, "two prompts have slot {} of lane {lane}", seat.slot);
                    let at_home = seat.rows_in_air == 0;
                    assert!(!at_home || seat.drafts.is_empty(), "{id:?} is at home with drafts");
                    seated += 1;
                }
            }
            let free = state.slots_free.iter().filter(|slot| !slots[**slot as usize]).count();
            assert_eq!(free + seated, slots.len(), "slots of lane {lane} are not conserved");
            state.pages.check(&holders);
            assert!(!state.lost || seated == 0, "a lost lane has contexts");
        }
    }
}
