//! Finished results that wait for their epilogue, which works on them between the products of the next.

use super::epilogue::Epilogue;
use super::panel_pass::{PanelPass, RESULTS_OF_PAIR, RowResults};
use super::simd::Simd;
use super::tiles::{PANEL, RESULT_TILE, ROWS_OF_PAIR, TILE_ROWS};
use std::ops::Range;

/// Finished results of a pair of row blocks. The epilogue works on them while the next results are
/// computed: on one row of the first block and the same row of the second at a time.
pub(super) struct DelayedEpilogue<'a, E: Epilogue> {
    epilogue: &'a E,
    group: Option<(E::Columns, E::Rows)>,
    /// Rows of each block; none if all are done.
    rows: [usize; 2],
    values: *const f32,
    values_pair: usize,
}

impl<'a, E: Epilogue> DelayedEpilogue<'a, E> {
    pub(super) fn none(epilogue: &'a E) -> Self {
        Self { epilogue, group: None, rows: [0; 2], values: std::ptr::null(), values_pair: 0 }
    }

    /// Finishes some rows of each block, as far as there are such rows. Each is to be finished once, and then
    /// [`Self::done`] to be called.
    ///
    /// # Safety
    /// The machine has the instruction set of `S`; the results that were taken up still exist; the epilogue
    /// may be called for them.
    #[inline(always)]
    pub(super) unsafe fn finish_some<S: Simd>(&self, rows: Range<usize>) {
        let Some((columns, common)) = &self.group else { return };
        for row in rows.start..rows.end.min(self.rows[0]) {
            let values = self.values.wrapping_add(row * PANEL);
            let mut results = RowResults { block: 0, row, values, values_pair: self.values_pair };
            // SAFETY: as promised by the caller; the results are there.
            unsafe { self.epilogue.finish::<S>(columns, *common, results) };
            if row < self.rows[1] {
                results.block = 1;
                results.values = results.values.wrapping_add(2 * RESULT_TILE);
                // SAFETY: as above.
                unsafe { self.epilogue.finish::<S>(columns, *common, results) };
            }
        }
    }

    /// Nothing is left to do.
    #[inline(always)]
    pub(super) fn done(&mut self) {
        self.rows = [0; 2];
    }

    /// Finishes all rows.
    ///
    /// # Safety
    /// As `finish_some`.
    #[inline(always)]
    pub(super) unsafe fn finish<S: Simd>(&mut self) {
        // SAFETY: as promised by the caller.
        unsafe { self.finish_some::<S>(0..TILE_ROWS) };
        self.done();
    }

    /// Takes up the groups that the results of a pair of row blocks finish. Nothing else may be left to do, and the
    /// results must stay until they are done.
    pub(super) fn take(&mut self, pass: &PanelPass, pair: usize) {
        assert_eq!(self.rows, [0; 2], "the results before are done");
        if let Some((group, values)) = &pass.finishes {
            let first = pass.rows.start + pair * ROWS_OF_PAIR;
            let rows = (pass.rows.end - first).min(ROWS_OF_PAIR);
            let columns = self.epilogue.columns(group);
            let common = self.epilogue.rows(&columns, first..first + rows);
            self.group = Some((columns, common));
            self.rows = [rows.min(TILE_ROWS), rows.saturating_sub(TILE_ROWS)];
            self.values = values.wrapping_add(pass.place(pair));
            self.values_pair = pass.pairs() * RESULTS_OF_PAIR;
        }
    }
}
