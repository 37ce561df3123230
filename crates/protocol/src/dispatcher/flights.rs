//! How many flights are used: as many as the rows that are there make worthwhile. Every batch of Tier 1 reads all weights,
//! so a few rows are better off in one flight. Many are better off in several, because the tiers then work at once.

use super::Dispatcher;
use crate::prompt::PromptId;
use glinthawk_flight::ShardId;

/// Rows of a batch from which computing them takes about as long as reading the weights.
const ROWS_WORTHWHILE: u64 = 64;

impl Dispatcher {
    /// Flights that the prompts inside make worthwhile: one for as many rows, and one for as many positions to attend
    /// over, as take the time of reading the weights once more. Full ones always are worthwhile, and one for each slice.
    pub(super) fn flights_wanted(&self) -> u32 {
        let config = &self.config;
        if config.own_lane.is_some() {
            return u32::MAX; // `flights_worthwhile` decides for each lane
        }
        let lanes = self.lanes_used().count().max(1) as u64;
        let rows_of_one = u64::from(config.batch) * lanes;
        let rows_of_one = rows_of_one.min(ROWS_WORTHWHILE * u64::from(config.pipelines));
        let positions_of_one = config.weights_positions * lanes;
        let (mut rows, mut positions, mut flights) = (0, 0, 0);
        for entry in self.entries.values() {
            let computed = entry.seat.as_ref().map_or(0, |seat| seat.computed);
            rows += u64::from(entry.len().saturating_sub(computed).clamp(1, config.chunk));
            positions += u64::from(entry.len());
            let one = rows_of_one * positions_of_one;
            flights = (rows * positions_of_one + positions * rows_of_one + one / 2) / one;
            if flights >= u64::from(config.flights) {
                return config.flights;
            }
        }
        config.slices.min(config.flights).max(flights as u32)
    }

    /// Moves prompts at home from flights that are not wanted to those that are. A prompt's context stays where it is:
    /// flights of one lane share its slots and pages.
    pub(super) fn regroup(&mut self, open: &[ShardId], flights: u32) {
        let unwanted =
            open.iter().filter(|shard| shard.flight >= flights && !self.shards[shard].in_air);
        let moving: Vec<PromptId> =
            unwanted.flat_map(|shard| &self.shards[shard].seated).copied().collect();
        for id in moving {
            let from = self.entries[&id].seat.as_ref().expect("seated").shard;
            let shards = (0..flights).map(|flight| ShardId { flight, ..from });
            let room =
                |shard: &ShardId| self.shards[shard].seated.len() < self.config.batch as usize;
            let key =
                |shard: &ShardId| (self.shards[shard].in_air, self.shards[shard].seated.len());
            let Some(to) = shards.filter(room).min_by_key(key) else { continue };
            self.shards.get_mut(&from).expect("exists").seated.retain(|seated| *seated != id);
            self.entries
                .get_mut(&id)
                .and_then(|entry| entry.seat.as_mut())
                .expect("seated")
                .shard = to;
            self.take_place(id, to);
            self.stats.regrouped += 1;
        }
    }

    /// Enters a prompt among those of its shard, by rank.
    pub(super) fn take_place(&mut self, id: PromptId, shard: ShardId) {
        let rank = self.entries[&id].rank();
        let seated = &mut self.shards.get_mut(&shard).expect("exists").seated;
        let place = seated.partition_point(|id| self.entries[id].rank() < rank);
        seated.insert(place, id);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{DispatcherAction, DispatcherConfig, DispatcherEvent};
    use super::*;
    use crate::message::{Home, Launch, Merge};
    use crate::prompt::Prompt;
    use glinthawk_flight::Generated;

    /// Rows of every flight's first launch and of a later one, if all come home together.
    fn rows(prompts: usize, slices: u32, weights_positions: u64) -> [Vec<usize>; 2] {
        let mut dispatcher = Dispatcher::new(DispatcherConfig {
            flights: 3,
            slices,
            pipelines: 1,
            weights_positions,
            batch: 256,
            own_lane: None,
            filled_first: None,
            chunk: 256,
            lane_pages: vec![10_000],
            page_positions: 16,
            context_max: 256,
            oversubscription: 1.0,
            merge: Merge::Ready,
            sharing: false,
            nodes_apart: true,
            run_ahead: false,
            drafts: None,
        });
        for _ in 0..prompts {
            let prompt = Prompt { tokens: vec![1; 64], tokens_max: 30, ..Prompt::default() };
            dispatcher.submit(prompt, 0).expect("it fits");
        }
        let mut steps: Vec<Vec<usize>> = Vec::new();
        while !dispatcher.is_idle() {
            let mut actions = Vec::new();
            dispatcher.fill(&mut actions);
            let launches = actions.into_iter().filter_map(|action| match action {
                DispatcherAction::Launch(launch) => Some(launch),
                _ => None,
            });
            let launches: Vec<Launch> = launches.collect();
            steps.push(launches.iter().map(|launch| launch.rows.len()).collect());
            for launch in launches {
                let generated = Generated { token: 1, logprob: 0.0, alternatives: Vec::new() };
                let tokens = vec![generated; launch.samples.len()];
                let home = DispatcherEvent::Home(Home { step: launch.step, tokens });
                dispatcher.on(home, 0, &mut Vec::new());
            }
        }
        [steps[0].clone(), steps[25].clone()]
    }

    #[test]
    fn flights_follow_the_rows_and_the_contexts_that_are_there() {
        assert_eq!(
            rows(64, 1, 1_000_000),
            [vec![256; 3], vec![64]],
            "prefill fills three, then one is enough"
        );
        assert_eq!(rows(2, 1, 1_000_000), [vec![64, 64], vec![2]], "two prompts prefill apart");
        assert_eq!(rows(64, 2, 1_000_000)[1], [32, 32], "a flight for each slice");
        assert_eq!(rows(64, 1, 64 * 90)[1], [32, 32], "attention takes as long as the weights");
        assert_eq!(rows(192, 1, 1_000_000)[1].len(), 3, "rows enough for three");
    }
}
