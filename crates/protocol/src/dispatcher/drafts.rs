//! Drafts: tokens that may come next, by what came after the same tokens before, in any prompt. A prompt that generates
//! has rows for them in the same step. They read its context together, and every draft that turns out to be right saves
//! the prompt a step. A row has the same bits in any company, so a draft decides when a token is known, and never which.
//!
//! How often guesses of a sort are right is counted on every generated token, drafted or not. So where guessing does not
//! pay, nothing is drafted, and it is noticed when that changes.

use super::hashes::hash_on;

/// Drafts of a prompt in one step at most.
pub const DRAFTS_MAX: usize = 4;

/// A guess looks at so many tokens before, at more of them first.
const LOOKS: [usize; 2] = [4, 2];
/// The most of them.
pub(super) const LOOK_MAX: usize = LOOKS[0];
/// Places of a table, a power of two: 1.5 MiB.
const PLACES: usize = 1 << 17;
/// A token that came so often in a row is no surer when it comes again.
const SURENESS_MAX: u8 = 3;
/// When so many guesses of a sort were counted, all counts are halved: the next ones weigh more.
const COUNTED_MAX: u32 = 512;
/// Guesses of each sort that count beside those seen, as right as `RIGHT_ASSUMED` says.
const ASSUMED: u32 = 4;
const RIGHT_ASSUMED: [u32; SURENESS_MAX as usize] = [1, 2, 2];
/// A draft is not worth its row if it is right less often, however long the context.
const WORTH_MIN: f32 = 0.15;

/// What came last after some tokens.
#[derive(Clone, Copy, Default)]
struct Memory {
    /// Tells these tokens from others with the same place.
    tag: u32,
    token: u32,
    /// How often in a row; 0 if nothing is known.
    sureness: u8,
}

/// How often guesses of a sort were right.
#[derive(Clone, Copy)]
struct Record {
    right: u32,
    counted: u32,
}

impl Record {
    fn count(&mut self, right: bool) {
        self.right += u32::from(right);
        self.counted += 1;
        if self.counted >= COUNTED_MAX {
            (self.right, self.counted) = (self.right / 2, self.counted / 2);
        }
    }

    fn rate(self) -> f32 {
        self.right as f32 / self.counted as f32
    }
}

/// A row's own part of attention beside reading the context, in rows of products: with AMX 3 to 7% of the reading, with
/// AVX-512 38%, with AVX2 70%, where 90, 10 and 4 rows take as long as reading the weights.
const ATTENTION_ROWS: f32 = 3.0;

/// What drafts cost, in positions of context: the time of reading so many.
#[derive(Clone, Copy)]
pub(super) struct DraftCosts {
    /// A row of a full step.
    row: f32,
    /// A row's own part of attention, for each position.
    attention: f32,
    /// A step with fewer rows is half reading weights, so that another row costs half as much.
    rows_few: u32,
}

impl DraftCosts {
    /// Of a model whose weights are as many bytes as `weights_positions` positions of context, where reading them takes as
    /// long as computing `rows_per_reading` rows.
    pub(super) fn new(weights_positions: u64, rows_per_reading: u32) -> Self {
        let rows = rows_per_reading.max(1) as f32;
        Self {
            row: weights_positions as f32 / rows,
            attention: (ATTENTION_ROWS / rows).min(1.0),
            rows_few: rows_per_reading,
        }
    }

    /// How often a draft must be right to be worth its row. If it is right, it saves a row and a reading of the prompt's
    /// own `context`. The step has `rows` rows without it.
    pub(super) fn worth(self, context: u32, rows: u32) -> f32 {
        let row = if rows < self.rows_few { self.row / 2.0 } else { self.row };
        let context = context.max(1) as f32;
        ((row + self.attention * context) / (row + context)).max(WORTH_MIN)
    }
}

/// What came after which tokens, in bounded memory.
pub(super) struct Guesses {
    tables: [Vec<Memory>; LOOKS.len()],
    records: [[Record; SURENESS_MAX as usize]; LOOKS.len()],
}

impl Guesses {
    pub(super) fn new() -> Self {
        let record = |right| Record { right, counted: ASSUMED };
        Self {
            tables: [(); LOOKS.len()].map(|()| vec![Memory::default(); PLACES]),
            records: [RIGHT_ASSUMED.map(record); LOOKS.len()],
        }
    }

    /// Takes in the last of these tokens, which came after the others; `generated`: guesses of it count.
    pub(super) fn learn(&mut self, tokens: &[u32], generated: bool) {
        let Some((&token, before)) = tokens.split_last() else { return };
        if generated && let Some((look, memory)) = self.find(before) {
            self.records[look][memory.sureness as usize - 1].count(memory.token == token);
        }
        for (look, table) in LOOKS.iter().zip(&mut self.tables) {
            let Some((place, tag)) = place(before, *look) else { continue };
            let memory = &mut table[place];
            if (memory.tag, memory.token) == (tag, token) {
                memory.sureness = (memory.sureness + 1).min(SURENESS_MAX);
            } else if memory.sureness > 1 {
                memory.sureness -= 1;
            } else {
                *memory = Memory { tag, token, sureness: 1 };
            }
        }
    }

    /// What may come after these tokens, as far as it is right as often as `worth` says.
    pub(super) fn draft(&self, mut tokens: Vec<u32>, count_max: usize, worth: f32) -> Vec<u32> {
        let (mut drafts, mut chance) = (Vec::new(), 1.0);
        while drafts.len() < count_max {
            let Some((look, memory)) = self.find(&tokens) else { break };
            chance *= self.records[look][memory.sureness as usize - 1].rate();
            if chance < worth {
                break;
            }
            drafts.push(memory.token);
            tokens.push(memory.token);
        }
        drafts
    }

    /// What came after these tokens, and how many of them say so.
    fn find(&self, before: &[u32]) -> Option<(usize, Memory)> {
        LOOKS.iter().zip(&self.tables).enumerate().find_map(|(look, (count, table))| {
            let (place, tag) = place(before, *count)?;
            let memory = table[place];
            (memory.sureness > 0 && memory.tag == tag).then_some((look, memory))
        })
    }
}

/// Where what comes after the last `look` of these tokens is kept, and how it is told from others.
fn place(before: &[u32], look: usize) -> Option<(usize, u32)> {
    let last = before.len().checked_sub(look)?;
    let hash = before[last..].iter().fold(1, |hash, token| hash_on(hash, *token));
    Some((hash as usize % PLACES, (hash >> 32) as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learned(texts: &[&[u32]]) -> Guesses {
        let mut guesses = Guesses::new();
        for text in texts {
            (1..=text.len()).for_each(|end| guesses.learn(&text[..end], true));
        }
        guesses
    }

    #[test]
    fn what_came_before_comes_again() {
        let text = [5, 6, 7, 8, 9, 10, 11];
        let guesses = learned(&[&text[..]; 3]);
        assert_eq!(guesses.draft(vec![5, 6], 3, 0.0), [7, 8, 9]);
        assert_eq!(guesses.draft(vec![1, 2, 8, 9], 9, 0.25), [10, 11], "two tokens are enough");
        assert!(guesses.draft(vec![9], 9, 0.0).is_empty(), "one is not");
        assert!(guesses.draft(vec![9, 8], 9, 0.0).is_empty(), "never seen");
    }

    #[test]
    fn what_says_more_is_believed_first() {
        let guesses = learned(&[&[1, 2, 3, 4, 50], &[9, 9, 3, 4, 60], &[9, 9, 3, 4, 60]]);
        assert_eq!(guesses.draft(vec![1, 2, 3, 4], 1, 0.0), [50]);
        assert_eq!(guesses.draft(vec![7, 7, 3, 4], 1, 0.0), [60]);
    }

    #[test]
    fn guesses_that_are_wrong_are_made_no_more_until_they_are_right() {
        let mut guesses = Guesses::new();
        let mut drafted = |round: u32, token: u32| {
            let drafts = guesses.draft(vec![1, 2], 1, 0.5);
            guesses.learn(&[1, 2, token], true);
            guesses.learn(&[3, round, 4], false);
            !drafts.is_empty()
        };
        let changing = (0..200).filter(|round| drafted(*round, round % 7)).count();
        assert!(changing < 10, "{changing} drafts of what never came twice in a row");
        let steady = (0..1000).filter(|round| drafted(*round, 5)).count();
        assert!(steady > 300, "{steady} drafts of what always came");
    }

    #[test]
    fn long_contexts_and_small_steps_make_more_drafts_worth_their_rows() {
        let costs = DraftCosts::new(9_000, 90);
        assert!((0.5..0.55).contains(&costs.worth(100, 90)));
        assert_eq!(costs.worth(4_000, 90), WORTH_MIN);
        assert!((0.3..0.4).contains(&costs.worth(100, 89)));
        assert!(DraftCosts::new(9_000, 9).worth(100, 90) > 0.9);
        assert_eq!(DraftCosts::new(9_000, 1).worth(100, 0), 1.0, "nothing is that sure");
    }
}
