//! How much of a job is done, how fast it goes and how long it will take, in tokens. Arithmetic on what the engine and
//! the job have counted; it reads no clock.

use crate::engine::Counted;
use glinthawk_protocol::PromptStanding;
use std::collections::VecDeque;

/// Rates cover the last seconds: long enough to be steady, short enough to follow a job from prefill to decoding.
const WINDOW_S: f64 = 5.0;
/// The time between two tokens of one prompt changes faster: it falls as the others finish.
const STEP_WINDOW_S: f64 = 1.0;
/// Until tokens have been generated for this long, rates are not reliable.
const BEGINNING_S: f64 = 1.0;

/// A completion that has outlived the others is expected to go on for this fraction of its length.
const OUTLIVED_SHARE: f64 = 0.25;

/// A job's lines that concern this run.
#[derive(Clone, Copy, Debug)]
pub struct Lines {
    /// Those that have their result from this run.
    pub done: u64,
    /// Those that were read and have no result yet.
    pub open: u64,
    /// Those that were not read yet; unknown for a stream.
    pub unread: Option<u64>,
}

/// How far a job is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Tokens done among those expected, 0 to 1; unknown for a stream.
    pub share: Option<f64>,
    /// Prompt tokens computed per second, lately.
    pub prompt_rate: f64,
    /// Tokens generated per second, lately.
    pub generated_rate: f64,
    /// Seconds left, if that can be estimated.
    pub left_s: Option<f64>,
    /// Whether no completion has ended by itself yet, so that all are expected to be as long as they may be.
    pub at_most: bool,
}

/// What is expected of the prompts inside.
struct Expected {
    /// Tokens to compute and to generate, all together.
    tokens: f64,
    /// Tokens the longest has yet to generate.
    longest: f64,
    /// Prompts that generate now.
    generating: usize,
}

/// Remembers the last seconds of a job, and estimates the rest from them.
#[derive(Debug, Default)]
pub struct Pace {
    /// Oldest first.
    recent: VecDeque<Moment>,
    /// Prompts that generated when it last looked.
    generating: usize,
    /// When there was the first generated token.
    generating_since_s: Option<f64>,
}

/// What had been done by some moment.
#[derive(Clone, Copy, Debug, Default)]
struct Moment {
    at_s: f64,
    prefilled: u64,
    generated: u64,
    /// Seconds that prompts have spent generating, all of them together.
    generating_s: f64,
}

/// What happened between two moments.
struct Lately {
    seconds: f64,
    prefilled: f64,
    generated: f64,
    generating_s: f64,
}

impl Pace {
    /// Takes what was counted at a later moment than before, and estimates the rest.
    pub fn look(&mut self, counted: &Counted, lines: Lines) -> Estimate {
        let expected = expected(counted);
        self.remember(counted, expected.generating);
        let lately = self.lately(WINDOW_S);
        let done = (counted.prefilled + counted.generated) as f64;
        // An unread line is like those that were read.
        let begun = (lines.done + lines.open).max(1) as f64;
        let left = lines
            .unread
            .map(|unread| expected.tokens + unread as f64 * (done + expected.tokens) / begun);
        let left_s = left.filter(|_| self.has_begun(counted.at_s)).and_then(|left| {
            // However fast all prompts are together, one prompt gets one token at a time.
            let alone_s = expected.longest * self.lately(STEP_WINDOW_S).token_s()?;
            Some((left * lately.seconds / (lately.prefilled + lately.generated)).max(alone_s))
        });
        Estimate {
            share: left.map(|left| done / (done + left).max(1.0)),
            prompt_rate: lately.prefilled / lately.seconds,
            generated_rate: lately.generated / lately.seconds,
            left_s,
            at_most: counted.ended == 0,
        }
    }

    fn remember(&mut self, counted: &Counted, generating: usize) {
        let last = self.recent.back().copied().unwrap_or_default();
        self.recent.push_back(Moment {
            at_s: counted.at_s,
            prefilled: counted.prefilled,
            generated: counted.generated,
            generating_s: last.generating_s + self.generating as f64 * (counted.at_s - last.at_s),
        });
        self.generating = generating;
        if counted.generated > 0 {
            self.generating_since_s.get_or_insert(counted.at_s);
        }
        // The first of them lies before the window, or is the beginning.
        while self.recent.get(1).is_some_and(|moment| moment.at_s <= counted.at_s - WINDOW_S) {
            self.recent.pop_front();
        }
    }

    fn has_begun(&self, now_s: f64) -> bool {
        self.generating_since_s.is_some_and(|since_s| now_s - since_s >= BEGINNING_S)
    }

    /// The last `window_s` seconds, or as many as there are.
    fn lately(&self, window_s: f64) -> Lately {
        let now = self.recent.back().copied().unwrap_or_default();
        let before = self.recent.iter().rev().find(|moment| moment.at_s <= now.at_s - window_s);
        let then = before.copied().unwrap_or_default();
        Lately {
            seconds: (now.at_s - then.at_s).max(1e-9),
            prefilled: (now.prefilled - then.prefilled) as f64,
            generated: (now.generated - then.generated) as f64,
            generating_s: now.generating_s - then.generating_s,
        }
    }
}

impl Lately {
    /// Seconds from one token of a prompt to its next once no prompt prefills any more; `None` if there were no
    /// tokens. A step takes less time without prefill, but not in proportion to its rows: this is half-way between
    /// the two.
    fn token_s(&self) -> Option<f64> {
        let generated_share = self.generated / (self.prefilled + self.generated);
        let without_prefill = (1.0 + generated_share) / 2.0;
        (self.generated > 0.0).then(|| self.generating_s / self.generated * without_prefill)
    }
}

fn expected(counted: &Counted) -> Expected {
    let mut expected = Expected { tokens: 0.0, longest: 0.0, generating: 0 };
    for standing in &counted.inside {
        let further = further(counted, standing);
        expected.tokens += f64::from(standing.prompt_left) + further;
        expected.longest = expected.longest.max(further);
        expected.generating += usize::from(standing.generated > 0);
    }
    expected
}

/// Tokens that a prompt is still expected to generate. If no completion has ended by itself so far, it is all that
/// the prompt may generate. Otherwise completions are assumed to end after each token with the same probability,
/// estimated from all tokens so far. Tokens of unfinished completions count too, because finished ones alone would
/// favour short completions.
fn further(counted: &Counted, standing: &PromptStanding) -> f64 {
    let room = f64::from(standing.generated_max.saturating_sub(standing.generated));
    if counted.ended == 0 {
        return room;
    }
    let mean = counted.generated as f64 / counted.ended as f64;
    let mean = mean.max(OUTLIVED_SHARE * f64::from(standing.generated)).max(1.0);
    mean * (1.0 - (-room / mean).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line of a made-up job: tokens of its prompt, of its completion, and what that may have at most.
    #[derive(Clone, Copy)]
    struct Line {
        prompt: u32,
        generates: u32,
        at_most: u32,
    }

    /// The estimates during a job on a made-up engine with `seats` seats, and the seconds that were left then. A step
    /// takes 20 milliseconds, and another for every two rows; 256 rows of prefill fit into one.
    fn follow(lines: &[Line], seats: usize) -> Vec<(Estimate, f64)> {
        let mut waiting: VecDeque<Line> = lines.iter().copied().collect();
        let mut inside: Vec<(Line, u32, u32)> = Vec::new();
        let mut counted = Counted::default();
        let mut pace = Pace::default();
        let (mut estimates, mut done) = (Vec::new(), 0);
        while !waiting.is_empty() || !inside.is_empty() {
            while inside.len() < seats
                && let Some(line) = waiting.pop_front()
            {
                inside.push((line, 0, 0));
            }
            let mut room = 256;
            let mut rows = 0;
            for (line, prefilled, generated) in &mut inside {
                if *prefilled < line.prompt {
                    let chunk = (line.prompt - *prefilled).min(room);
                    room -= chunk;
                    rows += chunk;
                    *prefilled += chunk;
                    counted.prefilled += u64::from(chunk);
                } else {
                    rows += 1;
                    *generated += 1;
                    counted.generated += 1;
                }
            }
            counted.at_s += 0.02 + 0.0005 * f64::from(rows);
            inside.retain(|(line, _, generated)| {
                let over = *generated == line.generates;
                done += u64::from(over);
                counted.ended += u64::from(over && line.generates < line.at_most);
                !over
            });
            counted.inside = inside
                .iter()
                .map(|(line, prefilled, generated)| PromptStanding {
                    prompt_left: line.prompt - prefilled,
                    generated: *generated,
                    generated_max: line.at_most,
                })
                .collect();
            let unread = Some(waiting.len() as u64);
            let lines = Lines { done, open: inside.len() as u64, unread };
            estimates.push((pace.look(&counted, lines), counted.at_s));
        }
        let end_s = counted.at_s;
        estimates.into_iter().map(|(estimate, at_s)| (estimate, end_s - at_s)).collect()
    }

    /// All estimates of the time left, beside what was left.
    fn times(followed: &[(Estimate, f64)]) -> Vec<(f64, f64)> {
        followed.iter().filter_map(|(estimate, left)| Some((estimate.left_s?, *left))).collect()
    }

    /// The most that an estimate of the time left exceeds an earlier one, in seconds.
    fn climb(followed: &[(Estimate, f64)]) -> f64 {
        let mut least = f64::INFINITY;
        let mut climb = 0.0f64;
        for (estimated, _) in times(followed) {
            least = least.min(estimated);
            climb = climb.max(estimated - least);
        }
        climb
    }

    const SHORT: Line = Line { prompt: 20, generates: 32, at_most: 32 };

    #[test]
    fn a_hundred_equal_lines_progress_from_the_beginning() {
        let followed = follow(&[Line { prompt: 64, generates: 128, at_most: 128 }; 100], 100);
        let shares: Vec<f64> = followed.iter().filter_map(|(estimate, _)| estimate.share).collect();
        assert!(shares.is_sorted(), "progress went back");
        let (half, _) = followed[followed.len() / 2];
        assert!((0.4..0.7).contains(&half.share.expect("a file")), "{half:?}");
        assert!(shares.last().is_some_and(|share| *share > 0.999));
        // They are as long as they may be, which is known all the time. A token takes longer while others prefill, and
        // less once the first of them end: so it may be too much, but hardly too little.
        for (estimated, left) in times(&followed) {
            let fits = (0.85 * left - 0.3..1.75 * left + 0.3).contains(&estimated);
            assert!(fits, "{estimated} for {left}");
        }
    }

    #[test]
    fn one_long_line_does_not_make_the_time_left_climb() {
        // Either its limit is its length, as expected; or the limit is unknown and it outlives all
        // others.
        for (at_most, end_early) in [(600, false), (2000, true)] {
            let short = Line { at_most: if end_early { 2000 } else { 32 }, ..SHORT };
            let mut lines = vec![short; 99];
            lines.insert(10, Line { generates: 600, at_most, ..SHORT });
            let followed = follow(&lines, 100);
            let total = followed[0].1;
            let climb = climb(&followed);
            assert!(climb < 0.3 * total, "climbs by {climb} s in a job of {total} s");
        }
    }

    #[test]
    fn unread_lines_are_like_those_that_were_read() {
        let lines = [Line { prompt: 100, generates: 40, at_most: 1000 }; 400];
        let followed = follow(&lines, 50);
        let middle = &followed[followed.len() / 4..3 * followed.len() / 4];
        for (estimate, left) in middle {
            let estimated = estimate.left_s.expect("a file, and tokens are generated");
            assert!((estimated / left - 1.0).abs() < 0.25, "{estimated} for {left}");
            assert!(!estimate.at_most);
            assert!(estimate.prompt_rate > 1.5 * estimate.generated_rate, "{estimate:?}");
        }
    }

    #[test]
    fn a_stream_has_rates_and_no_end() {
        let counted = Counted { at_s: 2.0, prefilled: 100, generated: 50, ..Counted::default() };
        let estimate = Pace::default().look(&counted, Lines { done: 3, open: 1, unread: None });
        let expected = Estimate {
            share: None,
            prompt_rate: 50.0,
            generated_rate: 25.0,
            left_s: None,
            at_most: true,
        };
        assert_eq!(estimate, expected);
    }
}
