//! Finished results that wait for their epilogue, which works on them between the products of the next.

use super::epilogue::Epilogue;
use super::panel_pass::{PanelPass, RESULTS_OF_PAIR, RowResults};
use super::simd::Simd;
use super::tiles::{PANEL, RESULT_TILE, ROWS_OF_PAIR, TILE_ROWS};

/// Finished results of a pair of row blocks. The epilogue works on them while the next results are
/// computed: on one row of the first block and the same row of the second at a time.
pub(super) struct DelayedEpilogue<'a, E: Epilogue> {
    epilogue: &'a E,
    columns: Option<E::Columns>,
    /// First row of the batch, and how many there are.
    first: usize,
    rows: usize,
    /// Rows of each block that are done.
    done: usize,
    values: *const f32,
    values_pair: usize,
}

impl<'a, E: Epilogue> DelayedEpilogue<'a, E> {
    pub(super) fn none(epilogue: &'a E) -> Self {
        let values = std::ptr::null();
        Self { epilogue, columns: None, first: 0, rows: 0, done: 0, values, values_pair: 0 }
    }

    /// Finishes some rows of each block, if any are left.
    ///
    /// # Safety
    /// The machine has the instruction set of `S`; the results that were taken up still exist; the epilogue
    /// may be called for them.
    #[inline(always)]
    pub(super) unsafe fn advance<S: Simd>(&mut self, rows: usize) {
        let Some(columns) = &self.columns else { return };
        let end = (self.done + rows).min(self.rows).min(TILE_ROWS);
        for index in self.done..end {
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
        self.done = end;
    }

    /// Finishes all remaining rows.
    ///
    /// # Safety
    /// As `advance`.
    #[inline(always)]
    pub(super) unsafe fn finish<S: Simd>(&mut self) {
        // SAFETY: as promised by the caller.
        unsafe { self.advance::<S>(TILE_ROWS) };
    }

    /// Takes up the groups that the results of a pair of row blocks finish. Nothing else may be left to do, and the
    /// results must stay until they are done.
    pub(super) fn take(&mut self, pass: &PanelPass, pair: usize) {
        assert_eq!(self.done, self.rows.min(TILE_ROWS), "rows of the results before are done");
        if let Some((group, values)) = &pass.finishes {
            self.columns = Some(self.epilogue.columns(group));
            self.first = pass.rows.start + pair * ROWS_OF_PAIR;
            self.rows = (pass.rows.end - self.first).min(ROWS_OF_PAIR);
            self.done = 0;
            self.values = values.wrapping_add(pass.place(pair));
            self.values_pair = pass.pairs() * RESULTS_OF_PAIR;
        }
    }
}
