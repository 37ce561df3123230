//! Log lines that strangers can cause: some of them at once, then a count.

use std::time::{Duration, Instant};

/// Lines that are written in one period.
const LINES_MAX: u32 = 32;
/// How long a period is.
const PERIOD: Duration = Duration::from_secs(10);
/// Characters of a peer's own words in a line.
const WORDS_MAX: usize = 300;

/// Keeps a flood of refused connections, or of lies, from flooding the log.
pub(crate) struct Complaints {
    begun: Instant,
    written: u32,
    kept_back: u64,
}

impl Complaints {
    pub(crate) fn new() -> Self {
        Self { begun: Instant::now(), written: 0, kept_back: 0 }
    }

    /// Whether one more line may be written. It is counted if not.
    pub(crate) fn may_write(&mut self, now: Instant) -> bool {
        self.keep_house(now);
        let may = self.written < LINES_MAX;
        if may {
            self.written += 1;
        } else {
            self.kept_back += 1;
        }
        may
    }

    /// Begins the next period, and says what was kept back in the last.
    pub(crate) fn keep_house(&mut self, now: Instant) {
        if now.saturating_duration_since(self.begun) < PERIOD {
            return;
        }
        if self.kept_back > 0 {
            tracing::warn!(lines = self.kept_back, "more of the same was not logged");
        }
        *self = Self { begun: now, written: 0, kept_back: 0 };
    }
}

/// A peer's own words, fit for a line of a log or a terminal.
pub(crate) fn words(said: &str) -> String {
    let mut characters = said.chars();
    let printable = |character: char| if character.is_control() { ' ' } else { character };
    let mut words: String = characters.by_ref().take(WORDS_MAX).map(printable).collect();
    if characters.next().is_some() {
        words.push('…');
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_counted_and_does_not_last() {
        let mut complaints = Complaints::new();
        let now = complaints.begun;
        let written = (0..1000).filter(|_| complaints.may_write(now)).count();
        assert_eq!((written, complaints.kept_back), (LINES_MAX as usize, 1000 - written as u64));
        assert!(complaints.may_write(now + PERIOD), "the next period begins anew");
        assert_eq!(complaints.kept_back, 0);
    }

    #[test]
    fn words_of_a_peer_are_one_short_printable_line() {
        assert_eq!(words("no\u{1b}[31m\nroom"), "no [31m room");
        let long = words(&"é".repeat(WORDS_MAX + 1));
        assert_eq!(long.chars().count(), WORDS_MAX + 1);
        assert!(long.ends_with('…'));
    }
}
