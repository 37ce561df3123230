//! The last prompts of a job generate together. While others fill batches that are still to be read, those that have been
//! read wait. Their rows would take the place of others there. Later they go along with the others' for nothing, because
//! so few rows take no longer than reading the weights for one.

use super::Dispatcher;
use super::flights::ROWS_WORTHWHILE;
use crate::prompt::PromptId;

/// Batches of a lane that prompts wait for at most.
const BATCHES_MAX: u64 = 64;

impl Dispatcher {
    /// Tokens that a prompt may still generate at most to wait for those that are being read. `None`: nobody waits.
    ///
    /// They wait if no more come, and if those left are so few for each lane, find seats and room at the same time, fill the next batches, and
    /// will have been read soon. Nobody waits for a prompt that is read again: if room was short once, two could wait for
    /// each other's pages for ever.
    pub(super) fn waits_to_generate(&self) -> Option<u32> {
        let lanes = self.lanes_used().count() as u64;
        let batch = u64::from(self.config.batch);
        let few = ROWS_WORTHWHILE.min(batch) * lanes;
        let alone = self.config.flights == 1 && self.config.own_lane.is_none();
        if !alone || !self.closed || self.entries.len() as u64 > few {
            return None;
        }
        let (mut rows, mut next_rows, mut most) = (0, 0, 0);
        for entry in self.entries.values().filter(|entry| entry.reads()) {
            let computed = entry.seat.as_ref().map_or(0, |seat| seat.computed);
            if entry.reached > computed {
                return None;
            }
            let left = entry.len() - computed;
            rows += u64::from(left);
            next_rows += u64::from(left.min(self.config.chunk));
            most = most.max(self.more_expected(entry));
        }
        let fill = next_rows >= batch * lanes && rows <= batch * lanes * BATCHES_MAX;
        (fill && self.have_room_together()).then_some(most)
    }

    /// Whether all prompts inside find room at the same time, as far as is known where they will be.
    fn have_room_together(&self) -> bool {
        let mut left = 0;
        for lane in self.lanes_used() {
            let pages = u64::from(self.lanes[lane as usize].pages.total());
            match pages.checked_sub(self.needs(lane).pages_in_the_end()) {
                Some(pages) => left += pages,
                None => return false,
            }
        }
        let needs = self.queue.iter().map(|(_, id)| self.need_of(&self.entries[id]));
        needs.map(|need| u64::from(need.pages(self.config.page_positions))).sum::<u64>() <= left
    }

    /// Whether a seated prompt waits while others are read: it has been read itself, and will not be the last to end.
    pub(super) fn lets_others_read(&self, id: PromptId, most: Option<u32>) -> bool {
        let entry = &self.entries[&id];
        most.is_some_and(|most| !entry.reads() && self.more_expected(entry) <= most)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Dispatcher, DispatcherAction, DispatcherConfig, DispatcherEvent};
    use crate::message::{Home, Launch, Merge};
    use crate::prompt::Prompt;
    use glinthawk_flight::Generated;

    const BATCH: u32 = 64;

    /// Of every step of some prompts with so many tokens in and out, the rows and how many of them are sampled.
    fn steps(prompts: &[(u32, u32)], pages: u32) -> Vec<(usize, usize)> {
        let mut dispatcher = Dispatcher::new(DispatcherConfig {
            flights: 1,
            slices: 1,
            pipelines: 1,
            weights_positions: 1_000_000,
            batch: BATCH,
            own_lane: None,
            filled_first: None,
            chunk: BATCH,
            lane_pages: vec![pages],
            page_positions: 16,
            context_max: 100_000,
            oversubscription: 1.0,
            merge: Merge::Ready,
            sharing: false,
            nodes_apart: false,
            run_ahead: false,
        });
        let mut prompts = prompts.iter();
        let mut steps = Vec::new();
        loop {
            while dispatcher.wants_prompts() {
                let Some(&(tokens, tokens_max)) = prompts.next() else {
                    dispatcher.close();
                    break;
                };
                let tokens = vec![1; tokens as usize];
                let prompt = Prompt { tokens, tokens_max, ..Prompt::default() };
                dispatcher.submit(prompt, 0).expect("it fits");
            }
            if dispatcher.is_idle() {
                return steps;
            }
            let mut actions = Vec::new();
            dispatcher.fill(&mut actions);
            dispatcher.check();
            let [DispatcherAction::Launch(Launch { step, rows, samples, .. })] = &actions[..]
            else {
                panic!("one launch: {actions:?}");
            };
            steps.push((rows.len(), samples.len()));
            let generated = Generated { token: 1, logprob: 0.0, alternatives: Vec::new() };
            let home = Home { step: *step, tokens: vec![generated; samples.len()] };
            dispatcher.on(DispatcherEvent::Home(home), 0, &mut Vec::new());
        }
    }

    #[test]
    fn the_last_prompts_generate_together() {
        let together = steps(&[(BATCH, 5); 6], 10_000);
        assert_eq!(together, [vec![(64, 1); 6], vec![(6, 6); 4]].concat());
        // Half of a batch is left for a second prompt.
        let together = steps(&[(96, 3); 2], 10_000);
        assert_eq!(together, [(64, 0), (64, 1), (64, 1), (2, 2), (2, 2)]);
    }

    #[test]
    fn those_that_end_last_go_on() {
        let steps = steps(&[(BATCH, 20), (BATCH, 5), (BATCH, 5)], 10_000);
        assert_eq!(steps[1], (64, 1), "the first has a row beside those of the second");
        assert_eq!(steps.len(), 20, "nobody waits for the first");
    }

    #[test]
    fn others_are_read_and_generate_at_once() {
        // Too many, or too long, or not enough room for all, or too few to fill a batch.
        for (prompts, pages) in [
            (vec![(BATCH, 5); 200], 10_000),
            (vec![(BATCH * 40, 60); 8], 10_000),
            (vec![(BATCH, 160); 6], 6 * 14 - 1),
            (vec![(BATCH, 9), (BATCH / 2, 9)], 10_000),
        ] {
            let steps = steps(&prompts, pages);
            let mixed = steps.iter().any(|(rows, samples)| *samples > 1 && rows > samples);
            assert!(mixed, "{} prompts of {:?}: {steps:?}", prompts.len(), prompts[0]);
        }
    }
}
