//! What the prompts of an input have in common: found by a chain of hashes over the pages of tokens that each begins
//! with, in bounded memory.

use glinthawk_protocol::page_hashes;
use std::collections::HashMap;

/// Positions of a page here: of the smallest that kernels have unless a cluster settles on others. Those with larger pages
/// share whole ones of theirs.
const PAGE_POSITIONS: u32 = 16;
/// Pages that are told apart. What comes later is still compared with those.
const PAGES_MAX: usize = 2 << 20;
/// Prompts that are judged by all of the input. Later ones are judged by what was read before them.
const PROMPTS_JUDGED_LAST: usize = 10_000;

/// What a prompt begins with and others do too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Beginning {
    /// Tokens of it, in whole pages; 0 where there is nothing in common.
    pub tokens: u32,
    /// Names the text.
    pub text: u64,
}

/// The beginnings of all prompts so far.
#[derive(Default)]
pub(crate) struct Beginnings {
    /// Prompts that begin with the pages up to one, by the hash of all of them.
    counts: HashMap<u64, u32>,
    /// The hashes of the first prompts.
    first: Vec<Vec<u64>>,
}

impl Beginnings {
    /// Takes in the next prompt. Gives its beginning, as far as the prompts before it show it.
    pub(crate) fn add(&mut self, tokens: &[u32]) -> Beginning {
        // At least one token follows the last shared page.
        let before_last = &tokens[..tokens.len().saturating_sub(1)];
        let hashes = page_hashes(before_last, PAGE_POSITIONS);
        for &hash in &hashes {
            if self.counts.len() < PAGES_MAX || self.counts.contains_key(&hash) {
                *self.counts.entry(hash).or_default() += 1;
            }
        }
        let beginning = self.judge(&hashes);
        if self.first.len() < PROMPTS_JUDGED_LAST {
            self.first.push(hashes);
        }
        beginning
    }

    /// The beginnings of the first prompts, by all that was read.
    pub(crate) fn of_the_first(&self) -> impl Iterator<Item = Beginning> + '_ {
        self.first.iter().map(|hashes| self.judge(hashes))
    }

    /// Of the beginnings that a prompt has in common with some others, each with more pages and fewer others, the one that
    /// saves it most: each of `count` prompts is spared that share of it which the others compute.
    fn judge(&self, hashes: &[u64]) -> Beginning {
        let saved = |(number, hash): (usize, &u64)| {
            let count = f64::from(self.counts.get(hash).copied().unwrap_or(1).max(1));
            let tokens = (number as u32 + 1) * PAGE_POSITIONS;
            (f64::from(tokens) * (count - 1.0) / count, Beginning { tokens, text: *hash })
        };
        let most =
            hashes.iter().enumerate().map(saved).max_by(|one, other| one.0.total_cmp(&other.0));
        most.filter(|(saved, _)| *saved > 0.0).map_or(Beginning::default(), |(_, found)| found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(parts: &[std::ops::Range<u32>]) -> Vec<u32> {
        parts.iter().cloned().flatten().collect()
    }

    fn tokens_in_common(prompts: &[Vec<u32>]) -> Vec<u32> {
        let mut beginnings = Beginnings::default();
        prompts.iter().for_each(|tokens| _ = beginnings.add(tokens));
        beginnings.of_the_first().map(|beginning| beginning.tokens).collect()
    }

    #[test]
    fn prompts_begin_with_what_saves_them_most() {
        // Whole pages, and never all of a prompt.
        let alike = [prompt(&[0..40, 50..60]), prompt(&[0..40, 70..80]), prompt(&[0..20, 20..48])];
        assert_eq!(tokens_in_common(&alike), [32, 32, 32]);
        assert_eq!(tokens_in_common(&[prompt(&[0..8, 8..32]), prompt(&[0..8, 8..32])]), [16, 16]);
        assert_eq!(
            tokens_in_common(&[prompt(&[0..8, 8..40]), prompt(&[1..8, 8..41]), vec![]]),
            [0, 0, 0]
        );
        // Two of many that begin alike go on alike for a little, or for long.
        let twins = |more: u32| {
            let mut all: Vec<_> =
                (0..20).map(|n| prompt(&[0..64, 1000 * (n + 1)..1000 * (n + 1) + 20])).collect();
            all.push(prompt(&[0..64, 500..500 + more, 90..99]));
            all.push(prompt(&[0..64, 500..500 + more, 80..89]));
            tokens_in_common(&all)
        };
        assert_eq!(twins(16), [64; 22]);
        assert_eq!(twins(160)[19..], [64, 224, 224]);
        let mut beginnings = Beginnings::default();
        let texts = alike.map(|tokens| beginnings.add(&tokens));
        assert_eq!(
            (texts[0].tokens, texts[1].tokens),
            (0, 32),
            "only what was read before is known"
        );
        assert_eq!(texts[1].text, texts[2].text);
    }
}
