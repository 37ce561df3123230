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
    columns: Option<E::Columns>,
    /// First row of the batch, and how many there are: none if all are done.
    first: usize,
    rows: usize,
    values: *const f32,
    values_pair: usize,
}

impl<'a, E: Epilogue> DelayedEpilogue<'a, E> {
    pub(super) fn none(epilogue: &'a E) -> Self {
        let values = std::ptr::null();
        Self { epilogue, columns: None, first: 0, rows: 0, values, values_pair: 0 }
    }

    /// Finishes some rows of each block: those that there are. [`Self::done`] must follow when all were named once.
    ///
    /// # Safety
    /// The machine has the instruction set of `S`; the results that were taken up still exist; the epilogue
    /// may be called for them.
    #[inline(always)]
    pub(super) unsafe fn finish_some<S: Simd>(&self, rows: Range<usize>) {
        let Some(columns) = &self.columns else { return };
        for index in rows.start..rows.end.min(self.rows).min(TILE_ROWS) {
            let mut results = RowResults {
                row: self.first + index,
                values: self.values.wrapping_add(index * PANEL),
                values_pair: self.values_pair,
            };
            // SAFETY: as promised by the caller; the results are there.
            unsafe { self.epilogue.finish::<S>(columns, results) };
            if index + TILE_ROWS < self.rows {
                results.row += TILE_ROWS;
                results.values = results.values.wrapping_add(2 * RESULT_TILE);
                // SAFETY: as above.
                unsafe { self.epilogue.finish::<S>(columns, results) };
            }
        }
    }

    /// Nothing is left to do.
    #[inline(always)]
    pub(super) fn done(&mut self) {
        self.rows = 0;
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
        assert_eq!(self.rows, 0, "the results before are done");
        if let Some((group, values)) = &pass.finishes {
            self.columns = Some(self.epilogue.columns(group));
            self.first = pass.rows.start + pair * ROWS_OF_PAIR;
            self.rows = (pass.rows.end - self.first).min(ROWS_OF_PAIR);
            self.values = values.wrapping_add(pass.place(pair));
            self.values_pair = pass.pairs() * RESULTS_OF_PAIR;
        }
    }
}
