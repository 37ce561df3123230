//! How a step's tokens are picked: by a search for the likeliest, or by a draw.

use crate::sample::uniform;
use bytemuck::{Pod, Zeroable};
use glinthawk_flight::{Sample, Sampling};

/// Words of a penalised token in a list, and of a biased one; as in sample.cu.
const PENALISED_WORDS: usize = 2;
const BIASED_WORDS: usize = 3;
/// Marks a draw without log-probabilities.
const NOT_REPORTED: u32 = u32::MAX;

/// How the device draws one token; as in sample.cu.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Draw {
    scale: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    penalty: f32,
    repeated: u32,
    repeated_end: u32,
    biases: u32,
    biases_end: u32,
    alternatives: u32,
    place: u32,
    padding: u32,
    draw: f64,
}

impl Draw {
    /// Where its log-probabilities are among all that come back, and how many alternatives there are.
    pub(super) fn reported(&self) -> Option<(usize, usize)> {
        let asked = self.alternatives != NOT_REPORTED;
        asked.then_some((self.place as usize, self.alternatives as usize))
    }
}

/// Words that log-probabilities take with so many alternatives: the token's own, the sum, and two for each.
pub(super) fn reported_words(alternatives: usize) -> usize {
    2 + 2 * alternatives
}

/// A step's samples by the way they go; the numbers are places among the samples.
#[derive(Debug, Default)]
pub(super) struct Ways {
    /// The likeliest token is all that is asked for.
    pub(super) greedy: Vec<usize>,
    pub(super) drawn: Vec<usize>,
    /// For each of `drawn`.
    pub(super) draws: Vec<Draw>,
    /// The draws' penalised tokens, and biased tokens with their biases.
    pub(super) lists: Vec<u32>,
    /// Words of log-probabilities that come back.
    pub(super) reported: usize,
}

/// Words of the lists of samples.
pub(super) fn list_words(samples: &[Sample]) -> usize {
    let words = |sample: &Sample| {
        PENALISED_WORDS * penalised(sample).len() + BIASED_WORDS * sample.biases.len()
    };
    samples.iter().map(words).sum()
}

fn penalised(sample: &Sample) -> &[u32] {
    if sample.sampling.repetition_penalty == 1.0 { &[] } else { &sample.repeated }
}

impl Ways {
    /// Sorts samples over a vocabulary.
    pub(super) fn of(samples: &[Sample], vocab: usize) -> Self {
        let mut ways = Self::default();
        for (index, sample) in samples.iter().enumerate() {
            let listed = !penalised(sample).is_empty() || !sample.biases.is_empty();
            let Sampling { temperature, logprobs, .. } = sample.sampling;
            if temperature == 0.0 && !listed && logprobs.is_none() {
                ways.greedy.push(index);
            } else {
                ways.draw(index, sample, vocab);
            }
        }
        ways
    }

    fn draw(&mut self, index: usize, sample: &Sample, vocab: usize) {
        let repeated = self.lists.len() as u32;
        self.lists.extend(penalised(sample).iter().flat_map(|token| [*token, 0]));
        let biases = self.lists.len() as u32;
        let words = sample.biases.iter().flat_map(|(token, bias)| [*token, bias.to_bits(), 0]);
        self.lists.extend(words);
        let place = self.reported as u32;
        let alternatives = sample.sampling.logprobs.map(|count| vocab.min(count.into()));
        self.reported += alternatives.map_or(0, reported_words);
        self.drawn.push(index);
        self.draws.push(Draw {
            // At temperature 0 this is infinite, which the device takes for greedy.
            scale: std::f32::consts::LOG2_E / sample.sampling.temperature,
            top_k: sample.sampling.top_k,
            top_p: sample.sampling.top_p,
            min_p: sample.sampling.min_p,
            penalty: sample.sampling.repetition_penalty,
            repeated,
            repeated_end: biases,
            biases,
            biases_end: self.lists.len() as u32,
            alternatives: alternatives.map_or(NOT_REPORTED, |count| count as u32),
            place,
            padding: 0,
            draw: uniform(sample.sampling.seed, sample.position),
        });
    }

    /// Places among the samples in the order in which tokens are made: likeliest, drawn.
    pub(super) fn order(&self) -> impl Iterator<Item = usize> {
        self.greedy.iter().chain(&self.drawn).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picks_go_their_ways() {
        let with = |row: u32, change: &dyn Fn(&mut Sample)| {
            let mut sample = Sample { row, repeated: vec![5, 6], ..Sample::default() };
            change(&mut sample);
            sample
        };
        let samples = [
            with(11, &|sample| sample.sampling.temperature = 0.8),
            with(10, &|_| {}),
            with(12, &|sample| sample.sampling.logprobs = Some(0)),
            with(13, &|Sample { sampling, .. }| {
                (sampling.repetition_penalty, sampling.logprobs) = (1.1, Some(200))
            }),
            with(14, &|sample| sample.biases = vec![(3, 1.0), (4, 2.0)]),
        ];
        let ways = Ways::of(&samples, 100);
        assert_eq!((&ways.greedy[..], &ways.drawn[..]), (&[1][..], &[0, 2, 3, 4][..]));
        assert_eq!(ways.order().collect::<Vec<_>>(), [1, 0, 2, 3, 4]);
        let (one, two) = (1.0f32.to_bits(), 2.0f32.to_bits());
        assert_eq!(ways.lists, [5, 0, 6, 0, 3, one, 0, 4, two, 0]);
        assert_eq!(ways.lists.len(), list_words(&samples));
        let reported: Vec<_> = ways.draws.iter().map(Draw::reported).collect();
        assert_eq!(reported, [None, Some((0, 0)), Some((2, 100)), None]);
        assert_eq!(ways.reported, 2 + 202);
    }
}
