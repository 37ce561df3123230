//! The running softmax of a tile: scores become weights, block after block.
//!
//! Weights are powers of two, 2^(score - base), and a row's base is the maximum of some block. It is raised only if
//! a later block's maximum exceeds it by more than [`RAISE`]: then what came before is scaled down once. The rule
//! looks at the row and at blocks whose places are fixed, so a row's bits depend on the row alone.

mod block;

use super::for_each_isa;
use super::functions::{exp2, weight};
use super::int8::Scales;
use super::pages::{BLOCK_PAGES, PAGE};
use super::simd::{SIMD_WIDTH, Simd};
use super::tiles::{RESULT_TILE, TILE, TILE_ROWS};
use super::weigh::Weigh;
use crate::memory::Memory;
use crate::{ComputeError, Isa};
pub(super) use block::{TileBlock, weigh_tiles};
use half::bf16;

/// Stands for "no score yet": below any score, but finite, so that differences stay numbers.
const BASE_NONE: f32 = -1e32;
/// The offset before there is a base: every score exceeds what a weight may be, and as an exponent is an integer of 32
/// bits. (No model has scores of millions of doublings. Where weights are made of integers, one that is so far above the
/// base, or infinite, counts as none.)
const OFFSET_NONE: f32 = (1 << 30) as f32;
/// How much a maximum must exceed the base before the base is raised. Weights stay below 2^8, which costs no
/// precision.
const RAISE: f32 = 8.0;

/// Running softmax of a tile: bases, sums of weights, and weighted sums of values. Rows begin with a cache line: they
/// are loaded and stored for every block, and a vector that lies in two lines takes longer.
#[repr(C, align(64))]
pub(super) struct RunningSoftmax {
    /// Sums of every sixteenth weight. They are added up in the end.
    sums: [[f32; SIMD_WIDTH]; TILE_ROWS],
    bases: [f32; TILE_ROWS],
    /// What makes a score the exponent of its weight, as the path counts it: `one` less the base in parts.
    offsets: [f32; TILE_ROWS],
    /// What the sums of values must still be multiplied by, for bases raised in this block.
    factors: [f32; TILE_ROWS],
    /// [d / 16][16 rows][16], if they have begun: until then nothing was added, and what stands there means nothing.
    pub(super) values: Memory<f32>,
    pub(super) begun: bool,
}

/// One row's scores of a block, and where its weights go.
pub(super) struct BlockRow<'a, V> {
    /// [page of the block][16 rows][16 positions], from this row on.
    pub(super) scores: *const f32,
    /// [64 / 32][16 rows][32 positions], from this row on.
    pub(super) weights: *mut V,
    /// The block's pages, at most [`BLOCK_PAGES`], and the first one's first position.
    pub(super) pages: &'a [*const u8],
    pub(super) position: usize,
    /// The first and the last position that the row sees.
    pub(super) seen: (u32, u32),
    pub(super) head_dim: usize,
    /// log2 e / √d
    pub(super) scale: f32,
}

const COUNT: [f32; SIMD_WIDTH] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];

impl<V> BlockRow<'_, V> {
    /// Scores of one page, -∞ where the row does not see. A key's scale multiplies its score.
    #[inline(always)]
    unsafe fn page<S: Simd, const SCALED: bool, const WHOLE: bool>(&self, page: usize) -> S {
        let start = self.position + page * PAGE;
        let (first, last) = (self.seen.0 as usize, self.seen.1 as usize);
        // SAFETY: a page of the block, as promised by the caller.
        unsafe {
            let mut scores = S::load(self.scores.add(page * RESULT_TILE));
            if SCALED {
                let scales = Scales::of(self.pages[page], self.head_dim);
                scores = scores.multiply(S::load((*scales).keys.as_ptr()));
            }
            if !WHOLE && (start < first || start + PAGE - 1 > last) {
                let none = S::splat(f32::NEG_INFINITY);
                let positions = S::load(COUNT.as_ptr()).add(S::splat(start as f32));
                scores = positions.if_greater(S::splat(last as f32), none, scores);
                scores = S::splat(first as f32).if_greater(positions, none, scores);
            }
            scores
        }
    }
}

/// score · scale + offset
#[inline(always)]
unsafe fn exponents<S: Simd>(
    scores: [S; BLOCK_PAGES],
    scale: f32,
    offset: f32,
) -> [S; BLOCK_PAGES] {
    let [a, b, c, d] = scores;
    // SAFETY: as promised by the caller: the machine has the instruction set of `S`.
    unsafe {
        let (scale, offset) = (S::splat(scale), S::splat(offset));
        [
            a.multiply_add(scale, offset),
            b.multiply_add(scale, offset),
            c.multiply_add(scale, offset),
            d.multiply_add(scale, offset),
        ]
    }
}

impl RunningSoftmax {
    pub(super) fn new(head_dim: usize) -> Result<Self, ComputeError> {
        let values = Memory::zeroed("attention sums", head_dim / SIMD_WIDTH * RESULT_TILE)?;
        Ok(Self {
            bases: [BASE_NONE; TILE_ROWS],
            offsets: [OFFSET_NONE; TILE_ROWS],
            sums: [[0.0; SIMD_WIDTH]; TILE_ROWS],
            factors: [1.0; TILE_ROWS],
            values,
            begun: false,
        })
    }

    /// Resets the first `rows` rows: they have seen nothing yet.
    pub(super) fn clear(&mut self, rows: usize) {
        self.bases = [BASE_NONE; TILE_ROWS];
        self.offsets = [OFFSET_NONE; TILE_ROWS];
        self.sums[..rows].fill([0.0; SIMD_WIDTH]);
        self.begun = false;
        if cfg!(test) {
            // Tests see it if sums are used that have not begun.
            self.values.fill(f32::NAN);
        }
    }

    /// Takes over what another tile's row has seen. All rows of the tile must be taken over.
    pub(super) fn take_row(&mut self, row: usize, from: &Self, from_row: usize) {
        self.begun = true;
        self.bases[row] = from.bases[from_row];
        self.offsets[row] = from.offsets[from_row];
        self.sums[row] = from.sums[from_row];
        let tiles = self.values.chunks_exact_mut(RESULT_TILE);
        for (values, from) in tiles.zip(from.values.chunks_exact(RESULT_TILE)) {
            values[row * SIMD_WIDTH..][..SIMD_WIDTH]
                .copy_from_slice(&from[from_row * SIMD_WIDTH..][..SIMD_WIDTH]);
        }
    }

    /// Turns one row's scores of a block into weights. If pages have scales (`SCALED`), a value's scale multiplies
    /// its weight after the weight was added to the sum. Says in `raised` if the sums of values must be scaled before
    /// this block's values are added. A block is `WHOLE` if it has all its pages and the row sees all of it.
    ///
    /// # Safety
    /// The machine has the instruction set of `S`; the block's buffers are as described.
    #[inline(always)]
    pub(super) unsafe fn weigh<
        S: Weigh,
        const SCALED: bool,
        const WHOLE: bool,
        const TILES: bool,
    >(
        &mut self,
        row: usize,
        block: &BlockRow<'_, S::Value>,
        raised: &mut bool,
    ) {
        let count = if WHOLE { BLOCK_PAGES } else { block.pages.len() };
        // SAFETY: as promised by the caller.
        unsafe {
            let mut scores = [S::splat(f32::NEG_INFINITY); BLOCK_PAGES];
            for (page, score) in scores.iter_mut().enumerate().take(count) {
                *score = block.page::<S, SCALED, WHOLE>(page);
            }
            if SCALED {
                self.weigh_scaled(row, block, &scores, raised);
                return;
            }
            let pairs = count.div_ceil(2);
            self.weigh_scores::<S, TILES>(row, &scores, block.scale, block.weights, pairs, raised);
        }
    }

    /// Turns one row's scores of a block into weights, for so many pairs of pages.
    #[inline(always)]
    unsafe fn weigh_scores<S: Weigh, const TILES: bool>(
        &mut self,
        row: usize,
        scores: &[S; BLOCK_PAGES],
        scale: f32,
        weights: *mut S::Value,
        pairs: usize,
        raised: &mut bool,
    ) {
        // SAFETY: as promised by the caller.
        unsafe {
            let mut lines = Self::lines(scores, scale, self.offsets[row]);
            if S::exceeds(S::larger(lines[0], lines[1]), RAISE) {
                *raised |= self.raise(row, scores, scale);
                self.offsets[row] = Self::offset_of::<S>(self.bases[row]);
                lines = Self::lines(scores, scale, self.offsets[row]);
            }
            let mut sum = S::load(self.sums[row].as_ptr());
            for (pair, line) in lines.into_iter().enumerate().take(pairs) {
                sum = S::weigh::<TILES>(line, sum, weights.add(pair * TILE));
            }
            sum.store(self.sums[row].as_mut_ptr());
        }
    }

    /// A block's exponents, as they are compared.
    #[inline(always)]
    unsafe fn lines<S: Weigh>(
        scores: &[S; BLOCK_PAGES],
        scale: f32,
        offset: f32,
    ) -> [S::Line; BLOCK_PAGES / 2] {
        // SAFETY: as promised by the caller.
        unsafe {
            let [a, b, c, d] = exponents(*scores, scale * S::PARTS, offset);
            [S::line([a, b]), S::line([c, d])]
        }
    }

    /// As [`Self::weigh`], where a value's scale multiplies its weight after that was added to the sum.
    #[inline(always)]
    unsafe fn weigh_scaled<S: Simd>(
        &mut self,
        row: usize,
        block: &BlockRow<'_, S::Value>,
        scores: &[S; BLOCK_PAGES],
        raised: &mut bool,
    ) {
        // SAFETY: as promised by the caller.
        unsafe {
            let mut x = exponents(*scores, block.scale, self.offsets[row]);
            let largest = x[0].max(x[1]).max(x[2].max(x[3]));
            if largest.any_greater(S::splat(RAISE)) {
                *raised |= self.raise(row, scores, block.scale);
                self.offsets[row] = -self.bases[row];
                x = exponents(*scores, block.scale, self.offsets[row]);
            }
            let mut sum = S::load(self.sums[row].as_ptr());
            for (pair, pages) in block.pages.chunks(2).enumerate() {
                let mut weights = [weight(x[2 * pair]), weight(x[2 * pair + 1])];
                sum = sum.add(weights[0].add(weights[1]));
                for (&page, weights) in pages.iter().zip(&mut weights) {
                    let scales = Scales::of(page, block.head_dim);
                    *weights = weights.multiply(S::load((*scales).values.as_ptr()));
                }
                S::store_step(weights, block.weights.add(pair * TILE));
            }
            sum.store(self.sums[row].as_mut_ptr());
        }
    }

    /// The base that a row's scores of a block give it.
    #[inline(always)]
    unsafe fn base_of<S: Simd>(scores: &[S; BLOCK_PAGES], scale: f32) -> f32 {
        let [a, b, c, d] = *scores;
        // SAFETY: as promised by the caller.
        unsafe { a.max(b).max(c.max(d)).largest() * scale }
    }

    /// What makes a score the exponent of its weight.
    #[inline(always)]
    fn offset_of<S: Weigh>(base: f32) -> f32 {
        base.mul_add(-S::PARTS, S::ONE)
    }

    /// Raises a row's base to the largest of a block's scores. Returns whether sums of values must be scaled.
    #[inline(always)]
    unsafe fn raise<S: Simd>(&mut self, row: usize, scores: &[S; BLOCK_PAGES], scale: f32) -> bool {
        let before = self.bases[row];
        // SAFETY: as promised by the caller.
        unsafe {
            self.bases[row] = Self::base_of(scores, scale);
            if before == BASE_NONE {
                return false;
            }
            let factor = exp2(S::splat(before - self.bases[row]));
            let sums = self.sums[row].as_mut_ptr();
            S::load(sums).multiply(factor).store(sums);
            self.factors[row] = factor.to_array()[0];
            true
        }
    }

    /// Scales the sums of values of rows whose bases were raised.
    ///
    /// # Safety
    /// The machine has the instruction set of `S`.
    #[inline(always)]
    pub(super) unsafe fn scale_values<S: Simd>(&mut self) {
        for (row, factor) in self.factors.iter_mut().enumerate() {
            let factor = std::mem::replace(factor, 1.0);
            if factor == 1.0 {
                continue;
            }
            for values in self.values.chunks_exact_mut(RESULT_TILE) {
                let values = values[row * SIMD_WIDTH..].as_mut_ptr();
                // SAFETY: sixteen values of the row.
                unsafe { S::load(values).multiply(S::splat(factor)).store(values) };
            }
        }
    }
}

/// Clears the first `rows` rows of tiles.
pub(super) fn clear(tiles: &mut [RunningSoftmax], rows: usize) {
    for (tile, first) in tiles.iter_mut().zip((0..rows).step_by(TILE_ROWS)) {
        tile.clear((rows - first).min(TILE_ROWS));
    }
}

/// Adds a split's parts of `rows` rows to the totals, tile by tile.
pub(super) fn combine_tiles(
    isa: Isa,
    rows: usize,
    parts: &[RunningSoftmax],
    totals: &mut [RunningSoftmax],
) {
    for ((part, total), first) in parts.iter().zip(totals).zip((0..rows).step_by(TILE_ROWS)) {
        // SAFETY: the instruction set is there: whoever attends has checked it.
        unsafe { combine(isa, (rows - first).min(TILE_ROWS), part, total) };
    }
}

/// Adds a split's part to the total. Rows that saw nothing in the split do not change.
#[inline(always)]
unsafe fn combine_simd<S: Simd>(rows: usize, part: &RunningSoftmax, total: &mut RunningSoftmax) {
    if !total.begun {
        total.values.fill(0.0);
        total.begun = true;
    }
    let mut bases = total.bases;
    bases.iter_mut().zip(part.bases).for_each(|(base, new)| *base = base.max(new));
    // SAFETY: sixteen rows; the machine has the instruction set, as promised by the caller.
    let (old, new) = unsafe {
        let base = S::load(bases.as_ptr());
        let old = exp2(S::load(total.bases.as_ptr()).subtract(base));
        let new = exp2(S::load(part.bases.as_ptr()).subtract(base));
        (old.to_array(), new.to_array())
    };
    for row in (0..rows).filter(|&row| part.bases[row] != BASE_NONE) {
        // SAFETY: rows of both parts, which are of one size.
        unsafe {
            let (old, new) = (S::splat(old[row]), S::splat(new[row]));
            let tiles = total
                .values
                .chunks_exact_mut(RESULT_TILE)
                .zip(part.values.chunks_exact(RESULT_TILE));
            for (total, part) in tiles {
                let total = total[row * SIMD_WIDTH..].as_mut_ptr();
                let part = S::load(part[row * SIMD_WIDTH..].as_ptr()).multiply(new);
                S::load(total).multiply_add(old, part).store(total);
            }
            let sums = total.sums[row].as_mut_ptr();
            let part = S::load(part.sums[row].as_ptr()).multiply(new);
            S::load(sums).multiply_add(old, part).store(sums);
            total.bases[row] = bases[row];
        }
    }
}

for_each_isa! {
    /// Adds a split's part to the total.
    fn combine = combine_simd(rows: usize, part: &RunningSoftmax, total: &mut RunningSoftmax)
}

/// The attention output of a tile's rows, `head_dim` values each.
#[inline(always)]
unsafe fn finish_tile_simd<S: Simd>(total: &RunningSoftmax, places: &[*mut bf16]) {
    for (row, into) in places.iter().enumerate() {
        // SAFETY: `into` has room for the head, as promised by the caller.
        unsafe {
            let reciprocal = S::splat(1.0 / S::load(total.sums[row].as_ptr()).sum());
            for (column, values) in total.values.chunks_exact(RESULT_TILE).enumerate() {
                // Adding 0 turns a negative zero into a positive one. Otherwise the sign could depend
                // on the rest of the tile.
                let value = S::load(values[row * SIMD_WIDTH..].as_ptr())
                    .multiply_add(reciprocal, S::splat(0.0));
                value.store_bf16(into.add(column * SIMD_WIDTH));
            }
        }
    }
}

for_each_isa! {
    /// Writes the attention output of a tile's rows.
    fn finish_tile = finish_tile_simd(total: &RunningSoftmax, places: &[*mut bf16])
}
