//! Rows that attend together to pages that their contexts begin with: each has the bits that it has alone.

use super::{PAGE_POSITIONS, device, wide};
use crate::Threads;
use crate::conformance::model::Shape;
use crate::cuda::{CudaDevice, CudaModel, StepLimits};
use glinthawk_flight::Row;
use std::sync::Arc;

const PROMPTS: u32 = 100;
/// Pages of a prompt's own, at most.
const OWN_PAGES: u32 = 10;
/// Pages of a common beginning, at most.
const COMMON_PAGES: u32 = 200;

/// Prompts whose contexts begin with the same pages.
struct Kin<'a> {
    shape: &'a Shape,
    /// Positions that they begin with in common, a multiple of a page's.
    common: u32,
}

impl Kin<'_> {
    fn row(&self, slot: u32, position: u32) -> Row {
        let page = position / PAGE_POSITIONS;
        let is_common = position < self.common;
        let own = if is_common { 0 } else { slot * 11 + 5 };
        let token = (position * position * 7 + position * 13 + own) % self.shape.vocab as u32;
        // Pages are scattered.
        let own_page = COMMON_PAGES + slot * OWN_PAGES + page.saturating_sub(self.common_pages());
        let page = if is_common { (page * 37) % COMMON_PAGES } else { own_page };
        Row { slot, position, page, token }
    }

    fn common_pages(&self) -> u32 {
        self.common / PAGE_POSITIONS
    }

    /// The position of the row that a prompt comes to.
    fn end(&self, slot: u32) -> u32 {
        self.common + slot * 7 % 100
    }

    /// A prompt's own rows before that.
    fn own(&self, slot: u32) -> impl Iterator<Item = Row> + '_ {
        (self.common..self.end(slot)).map(move |position| self.row(slot, position))
    }

    /// What a slot's table begins with.
    fn bound(&self, slot: u32) -> impl Iterator<Item = Row> + '_ {
        (0..self.common_pages()).map(move |page| self.row(slot, page * PAGE_POSITIONS))
    }
}

fn load(shape: &Shape, device: &CudaDevice) -> CudaModel {
    let pages = (COMMON_PAGES + PROMPTS * OWN_PAGES) as usize;
    let limits = StepLimits { rows: 600, slots: PROMPTS as usize, pages, context: 3400 };
    let threads = Arc::new(Threads::new(2).unwrap());
    CudaModel::load_from(&shape.source(), device, limits, &threads, &mut |_, _| {}).unwrap()
}

/// Logits of all rows of one step, as bits.
fn step(model: &mut CudaModel, shape: &Shape, rows: &[Row], bound: &[Row]) -> Vec<Vec<u32>> {
    let bits = |logits: &Vec<f32>| logits.iter().map(|logit| logit.to_bits()).collect();
    super::step(model, shape, rows, bound).iter().map(bits).collect()
}

fn check(shape: &Shape, device: &CudaDevice, common: u32) {
    let mut model = load(shape, device);
    let kin = Kin { shape, common };
    let prefix: Vec<Row> = (0..common).map(|position| kin.row(0, position)).collect();
    for rows in prefix.chunks(500) {
        step(&mut model, shape, rows, &[]);
    }
    let bound: Vec<Row> = (1..PROMPTS).flat_map(|slot| kin.bound(slot)).collect();
    let own: Vec<Vec<Row>> = (0..PROMPTS).map(|slot| kin.own(slot).collect()).collect();
    for (number, some) in own.chunks(6).enumerate() {
        let bound = if number == 0 { &bound[..] } else { &[] };
        step(&mut model, shape, &some.concat(), bound);
    }
    let ends: Vec<Row> = (0..PROMPTS).map(|slot| kin.row(slot, kin.end(slot))).collect();
    let together = step(&mut model, shape, &ends, &[]);
    assert!(model.shared_units() > 0, "{common} positions are attended together");
    // Others beside them, and some that store in the midst.
    let mixed: Vec<Row> = own[14].iter().chain(&ends[15..]).copied().collect();
    let beside = step(&mut model, shape, &mixed, &[]);
    assert!(model.shared_units() > 0);
    for (slot, end) in ends.iter().enumerate() {
        let alone = step(&mut model, shape, &[*end], &[]);
        assert_eq!(model.shared_units(), 0);
        assert!(alone[0] == together[slot], "{common} positions, prompt {slot}: {shape:?}");
        if slot >= 15 {
            let found = &beside[own[14].len() + slot - 15];
            assert!(alone[0] == *found, "{common} positions, prompt {slot} beside: {shape:?}");
        }
    }
}

#[test]
fn rows_that_share_pages_have_the_bits_they_have_alone() {
    let Some(device) = device() else { return };
    let f16 = device.clone().in_f16();
    let base = wide();
    let eight = Shape { heads: 8, kv_heads: 1, head_dim: 128, ..base.clone() };
    let odd = Shape { heads: 3, kv_heads: 3, head_dim: 80, ..base.clone() };
    let large = Shape { heads: 2, kv_heads: 1, head_dim: 256, ..base.clone() };
    // Whole splits, part of one, both.
    for common in [1024, 768, 2160, 3072] {
        check(&base, &device, common);
    }
    for (shape, device) in [(&eight, &device), (&odd, &device), (&large, &device), (&base, &f16)] {
        check(shape, device, 1712);
    }
}
