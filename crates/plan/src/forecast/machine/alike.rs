//! Prompts that begin alike: tokens that say so, and what attending to shared pages together takes.

use crate::kernels::KernelTimes;
use crate::workload::Length;
use glinthawk_protocol::{Launch, Row};
use std::collections::BTreeMap;

/// Makes the tokens of prompts, and remembers what the contexts of slots begin with.
#[derive(Default)]
pub(super) struct Alike {
    /// Whether any prompt has something in common with another.
    pub(super) any: bool,
    page_positions: u32,
    /// Requests so far, and the one before.
    requests: u64,
    before: Option<Length>,
    /// By lane and slot: the last page that was there before the prompt, and the positions up to its end.
    begun: BTreeMap<(u32, u32), (u32, u32)>,
}

impl Alike {
    pub(super) fn new(lengths: &[Length], page_positions: u32) -> Self {
        let any = lengths.iter().any(|length| length.common.tokens > 0 || length.common.again);
        Self { any, page_positions, ..Self::default() }
    }

    /// Tokens of the next prompt: those that it has in common with others are the same in all of them.
    pub(super) fn tokens(&mut self, length: &Length) -> Vec<u32> {
        if !self.any {
            return vec![0; length.prompt];
        }
        let common = length.common;
        let same =
            |before: Length| (before.prompt, before.common.text) == (length.prompt, common.text);
        if !(common.again && self.before.is_some_and(same)) {
            self.requests += 1;
        }
        self.before = Some(*length);
        let token = |at: usize| {
            let whose = if at < common.tokens { common.text } else { self.requests };
            let mixed = (whose ^ (at as u64) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed >> 32) as u32
        };
        (0..length.prompt).map(token).collect()
    }

    /// Notes which contexts of a launch begin with pages that were there.
    pub(super) fn note(&mut self, launch: &Launch) {
        if !self.any {
            return;
        }
        let lane = launch.step.shard.lane;
        for row in launch.rows.iter().filter(|row| row.position == 0) {
            self.begun.remove(&(lane, row.slot));
        }
        for row in &launch.shared {
            self.begun.insert((lane, row.slot), (row.page, row.position + self.page_positions));
        }
    }

    /// Seconds of one layer's attention of a launch: rows of one prompt stand together, and those of prompts that begin
    /// with the same pages attend to these together. On a device, only those that generate do.
    pub(super) fn attention_seconds(&self, launch: &Launch, kernels: &KernelTimes) -> f64 {
        let lane = launch.step.shard.lane;
        let begun = |rows: &[Row]| {
            let together = rows.len() == 1 || !kernels.on_device();
            self.begun.get(&(lane, rows[0].slot)).copied().filter(|_| together)
        };
        let runs = || launch.rows.chunk_by(|one, other| one.slot == other.slot);
        // By the last page in common: prompts, their rows, and positions that they have in common.
        let mut families: BTreeMap<u32, (usize, usize, f64)> = BTreeMap::new();
        for (rows, (page, end)) in runs().filter_map(|rows| Some((rows.len(), begun(rows)?))) {
            let (prompts, all, _) = families.get(&page).copied().unwrap_or_default();
            families.insert(page, (prompts + 1, all + rows, f64::from(end)));
        }
        families.retain(|_, (prompts, ..)| *prompts > 1);
        // A chunk whose rows see that many positions on average.
        let together = families
            .values()
            .map(|&(_, rows, common)| kernels.prefill_seconds(rows, common + rows as f64 / 2.0));
        let mut seconds: f64 = together.sum();
        let (mut decoding, mut positions) = (0, 0.0);
        for rows in runs() {
            let family = begun(rows).and_then(|(page, _)| families.get(&page));
            let common = family.map_or(0.0, |(_, _, common)| *common);
            let own = f64::from(rows[rows.len() - 1].position + 1) - common;
            match rows.len() {
                1 => (decoding, positions) = (decoding + 1, positions + own),
                rows => seconds += kernels.prefill_seconds(rows, own),
            }
        }
        seconds + kernels.attention_seconds(decoding, positions / f64::from(decoding.max(1) as u32))
    }
}
