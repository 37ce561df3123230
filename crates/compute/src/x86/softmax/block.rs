//! The softmax of whole tiles on AMX, all rows of a block after each other. Whether any base must be raised is seen by one
//! look at all of them, which takes fewer operations than one at each. The results are those of single rows.

use super::{BASE_NONE, RAISE, RunningSoftmax};
use crate::x86::pages::{BLOCK_PAGES, PAGE};
use crate::x86::simd::{SIMD_WIDTH, Simd, ZmmBf16};
use crate::x86::tiles::{RESULT_TILE, STEP, TILE, TILE_ROWS};
use crate::x86::weigh::Weigh;
use half::bf16;
use std::arch::x86_64::{_mm512_mask_loadu_ps, _mm512_set1_ps};

/// Bases of usual scores are smaller: then any such score exceeds what a weight may be while there is no base.
const BASE_USUAL: f32 = 1e6;

/// A block's scores of several tiles, and where its weights go.
pub(in crate::x86) struct TileBlock<'a> {
    /// [tile][page of the block][16 rows][16 positions]
    pub(in crate::x86) scores: *const f32,
    /// Of each tile, [pair of pages][16 rows][32 positions]; the next tile's stand `weights_tile` further.
    pub(in crate::x86) weights: *mut bf16,
    pub(in crate::x86) weights_tile: usize,
    /// Pairs of pages that the block has: two, unless rows see it partly.
    pub(in crate::x86) pairs: usize,
    /// Rows of all tiles.
    pub(in crate::x86) rows: usize,
    /// The positions that each row sees, a bit for each, unless all see all of them.
    pub(in crate::x86) seen: Option<&'a [u64]>,
    /// log2 e / √d
    pub(in crate::x86) scale: f32,
}

/// A tile's part of it.
struct TileRows<'a> {
    scores: *const f32,
    weights: *mut bf16,
    pairs: usize,
    rows: usize,
    seen: &'a [u64],
    scale: f32,
}

/// Turns the scores of a block into weights. Says in `raised` if sums of values must be scaled first.
///
/// # Safety
/// The machine has the instruction set of AMX's path; buffers are as described.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma")]
pub(in crate::x86) unsafe fn weigh_tiles(
    parts: &mut [RunningSoftmax],
    block: &TileBlock<'_>,
    raised: &mut bool,
) {
    for (tile, part) in parts.iter_mut().enumerate() {
        let first = tile * TILE_ROWS;
        let rows = TileRows {
            scores: block.scores.wrapping_add(tile * BLOCK_PAGES * RESULT_TILE),
            weights: block.weights.wrapping_add(tile * block.weights_tile),
            pairs: block.pairs,
            rows: (block.rows - first).min(TILE_ROWS),
            seen: block.seen.map_or(&[], |seen| &seen[first..]),
            scale: block.scale,
        };
        // SAFETY: as promised by the caller.
        unsafe {
            match block.seen {
                None => part.weigh_tile::<false>(&rows, raised),
                Some(_) => part.weigh_tile::<true>(&rows, raised),
            }
        }
    }
}

impl TileRows<'_> {
    /// A row's scores, -∞ where it does not see.
    #[inline(always)]
    unsafe fn scores<const MASKED: bool>(&self, row: usize) -> [ZmmBf16; BLOCK_PAGES] {
        let first = self.scores.wrapping_add(row * PAGE);
        let seen = if MASKED { self.seen[row] } else { 0 };
        // SAFETY: as promised by the caller.
        unsafe {
            std::array::from_fn(|page| {
                let scores = first.add(page * RESULT_TILE);
                if MASKED {
                    let seen = (seen >> (page * PAGE)) as u16;
                    let none = _mm512_set1_ps(f32::NEG_INFINITY);
                    return ZmmBf16(_mm512_mask_loadu_ps(none, seen, scores));
                }
                ZmmBf16::load(scores)
            })
        }
    }

    #[inline(always)]
    fn weights(&self, row: usize) -> *mut bf16 {
        self.weights.wrapping_add(row * STEP)
    }
}

impl RunningSoftmax {
    #[inline(always)]
    unsafe fn weigh_tile<const MASKED: bool>(&mut self, tile: &TileRows<'_>, raised: &mut bool) {
        // SAFETY: as promised by the caller.
        unsafe {
            if self.begin_rows::<MASKED>(tile) && self.weigh_rows::<MASKED>(tile) {
                return;
            }
            for row in 0..tile.rows {
                let (scores, into) = (tile.scores::<MASKED>(row), tile.weights(row));
                self.weigh_scores::<_, true>(row, &scores, tile.scale, into, tile.pairs, raised);
            }
        }
    }

    /// Gives rows that have no base the one that their scores give them, if they see any. Returns false, and has done
    /// nothing, if scores are so odd that each row must be looked at.
    #[inline(always)]
    unsafe fn begin_rows<const MASKED: bool>(&mut self, tile: &TileRows<'_>) -> bool {
        if !self.bases[..tile.rows].contains(&BASE_NONE) {
            return true;
        }
        let (mut bases, mut are_usual) = (self.bases, true);
        for (row, base) in bases.iter_mut().enumerate().take(tile.rows) {
            if *base == BASE_NONE && !(MASKED && tile.seen[row] == 0) {
                // SAFETY: as promised by the caller.
                *base = unsafe { Self::base_of(&tile.scores::<MASKED>(row), tile.scale) };
                are_usual &= base.abs() < BASE_USUAL;
            }
        }
        if are_usual {
            for row in (0..tile.rows).filter(|&row| self.bases[row] != bases[row]) {
                self.offsets[row] = Self::offset_of::<ZmmBf16>(bases[row]);
            }
            self.bases = bases;
        }
        are_usual
    }

    /// Turns the scores of all rows into weights. Returns false, and has added nothing, if a base must be raised.
    #[inline(always)]
    unsafe fn weigh_rows<const MASKED: bool>(&mut self, tile: &TileRows<'_>) -> bool {
        // SAFETY: as promised by the caller.
        unsafe {
            let mut before = Sums([[0.0; SIMD_WIDTH]; TILE_ROWS]);
            let none = ZmmBf16::splat(f32::NEG_INFINITY);
            let mut most = ZmmBf16::line([none, none]);
            for row in 0..tile.rows {
                let scores = tile.scores::<MASKED>(row);
                let [first, second] = Self::lines(&scores, tile.scale, self.offsets[row]);
                most = ZmmBf16::larger(most, ZmmBf16::larger(first, second));
                let sums = self.sums[row].as_mut_ptr();
                let mut sum = ZmmBf16::load(sums);
                sum.store(before.0[row].as_mut_ptr());
                let into = tile.weights(row);
                sum = ZmmBf16::weigh::<true>(first, sum, into);
                if !MASKED || tile.pairs == BLOCK_PAGES / 2 {
                    sum = ZmmBf16::weigh::<true>(second, sum, into.add(TILE));
                }
                sum.store(sums);
            }
            if ZmmBf16::exceeds(most, RAISE) {
                self.sums[..tile.rows].copy_from_slice(&before.0[..tile.rows]);
                return false;
            }
            true
        }
    }
}

/// Sums of rows, each in a cache line.
#[repr(align(64))]
struct Sums([[f32; SIMD_WIDTH]; TILE_ROWS]);
