//! SentencePiece's byte-pair encoding: among neighbours that together form a token, the pair with
//! the highest score is joined first.

use super::control::{ControlTokens, Piece};
use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap};

/// The character that stands for a space.
pub(super) const SPACE: char = '▁';

/// Scores, and what text falls back to when no token has it.
pub(super) struct SentencePiece {
    /// Id and score of every token that text can become.
    pub(super) tokens: HashMap<Box<str>, (u32, f32)>,
    /// The tokens of single bytes, for characters without a token.
    pub(super) bytes: Option<Box<[u32; 256]>>,
    /// For characters without a token if there are no byte tokens.
    pub(super) unknown: Option<u32>,
    /// Tokens that are found before anything is joined, user-defined in SentencePiece's words.
    pub(super) fixed: ControlTokens,
    /// A space goes in front of the text.
    pub(super) space_prefix: bool,
}

/// A stretch of the text that is one token, or one character without a token.
struct Symbol {
    start: usize,
    /// Equal to `start` once joined to the symbol on the left.
    end: usize,
    previous: Option<usize>,
    next: Option<usize>,
}

/// Two neighbours that together are a token.
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    /// Length of the text they made when they were neighbours; a later join changes it.
    length: usize,
}

impl Pair {
    /// Highest score first, then leftmost.
    fn key(&self) -> (Score, Reverse<usize>) {
        (Score(self.score), Reverse(self.left))
    }
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

/// A score with a total order.
struct Score(f32);

impl Ord for Score {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Score {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Score {}

impl SentencePiece {
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        for piece in self.fixed.split(text, None) {
            match piece {
                Piece::Control(id) => ids.push(id),
                Piece::Text(text) => self.encode_between(&text, ids),
            }
        }
    }

    fn encode_between(&self, text: &str, ids: &mut Vec<u32>) {
        let mut spaced = String::with_capacity(text.len() + SPACE.len_utf8());
        if self.space_prefix {
            spaced.push(SPACE);
        }
        spaced.extend(text.chars().map(|character| match character {
            ' ' => SPACE,
            other => other,
        }));
        for symbol in self.join(&spaced) {
            self.push_ids(symbol, ids);
        }
    }

    /// Joins neighbours until no two of them make a token.
    fn join<'a>(&self, text: &'a str) -> Vec<&'a str> {
        let mut symbols = characters(text);
        let mut pairs = BinaryHeap::new();
        for left in 0..symbols.len().saturating_sub(1) {
            pairs.extend(self.pair(text, &symbols, left, left + 1));
        }
        while let Some(pair) = pairs.pop() {
            let (left, right) = (&symbols[pair.left], &symbols[pair.right]);
            let stale = left.start == left.end
                || right.start == right.end
                || right.end - left.start != pair.length;
            if stale {
                continue;
            }
            let (end, next) = (right.end, right.next);
            symbols[pair.right].end = symbols[pair.right].start;
            symbols[pair.left].end = end;
            symbols[pair.left].next = next;
            if let Some(next) = next {
                symbols[next].previous = Some(pair.left);
                pairs.extend(self.pair(text, &symbols, pair.left, next));
            }
            if let Some(previous) = symbols[pair.left].previous {
                pairs.extend(self.pair(text, &symbols, previous, pair.left));
            }
        }
        symbols
            .iter()
            .filter(|symbol| symbol.start != symbol.end)
            .map(|symbol| &text[symbol.start..symbol.end])
            .collect()
    }

    fn pair(&self, text: &str, symbols: &[Symbol], left: usize, right: usize) -> Option<Pair> {
        let joined = &text[symbols[left].start..symbols[right].end];
        let &(_, score) = self.tokens.get(joined)?;
        Some(Pair { score, left, right, length: joined.len() })
    }

    fn push_ids(&self, symbol: &str, ids: &mut Vec<u32>) {
        if let Some(&(id, _)) = self.tokens.get(symbol) {
            ids.push(id);
        } else if let Some(bytes) = &self.bytes {
            ids.extend(symbol.bytes().map(|byte| bytes[usize::from(byte)]));
        } else {
            ids.extend(self.unknown);
        }
    }
}

/// One symbol for each character, in a row.
fn characters(text: &str) -> Vec<Symbol> {
    let count = text.chars().count();
    text.char_indices()
        .enumerate()
        .map(|(index, (start, character))| Symbol {
            start,
            end: start + character.len_utf8(),
            previous: index.checked_sub(1),
            next: Some(index + 1).filter(|&next| next < count),
        })
        .collect()
}
