//! When the strands of a process compute together. Side by side, each reads all weights for its own rows, and a strand
//! without rows leaves its cores idle. Together, all threads share every kernel, and the weights are read once.

use glinthawk_compute::Isa;

/// The rule of a process with several strands. Nothing but speed depends on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule {
    pub strands: usize,
    pub isa: Isa,
    /// Whether weights come from memory, and kernels take long beside what it takes to share them.
    pub is_large: bool,
}

impl Rule {
    /// Whether strands should compute together, if they do or do not `now`: if a single lane has rows, or if all `lanes` that
    /// have some have so few `rows` that they take less time than reading the weights.
    pub(crate) fn is_together(&self, now: bool, lanes: usize, rows: usize) -> bool {
        self.strands > 1 && (lanes == 1 || rows < self.few(now))
    }

    /// The more threads there are, the longer they take to share out a small kernel.
    fn few(&self, now: bool) -> usize {
        let few = self.isa.rows_per_reading() as usize;
        let few = if self.is_large { few * self.strands } else { 2 * few / self.strands };
        // All have to come home for a change: rows that vary a little must not cause many.
        if now { few + few / 4 } else { few }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strands_part_where_they_have_much_to_do() {
        let all = Rule { strands: 4, isa: Isa::Amx, is_large: false };
        assert!(!all.is_together(false, 4, 4 * 512), "the usual step");
        assert!(!all.is_together(true, 4, 4 * 512));
        assert!(all.is_together(false, 4, 4 * 8), "the end of a job");
        let others = Rule { isa: Isa::Avx2, ..all };
        assert!(!others.is_together(false, 4, 4 * 8), "reading is the least of it");
        let large = Rule { is_large: true, ..all };
        assert!(large.is_together(false, 4, 4 * 64) && !all.is_together(false, 4, 4 * 64));
        assert!(!large.is_together(false, 4, 4 * 128));
        assert!(all.is_together(false, 1, 512), "the others would be idle");
        assert!(!Rule { strands: 1, ..all }.is_together(false, 1, 1), "there is nobody else");
    }

    #[test]
    fn rows_that_vary_a_little_change_nothing() {
        let all = Rule { strands: 2, isa: Isa::Amx, is_large: false };
        let mut together = false;
        let changes = (0..100).filter(|step| {
            let next = all.is_together(together, 2, 85 + step * 7 % 20);
            std::mem::replace(&mut together, next) != next
        });
        assert_eq!(changes.count(), 1);
    }
}
