//! How a step's tokens are picked: by a search for the likeliest, by a draw on the device, or on the host where a
//! request asks for log-probabilities.

use crate::sample::uniform;
use bytemuck::{Pod, Zeroable};
use glinthawk_flight::Sample;

/// Words of penalised and biased tokens that a step can send, for each of its rows.
pub(super) const LIST_WORDS_PER_ROW: usize = 512;

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
    padding: u32,
    draw: f64,
}

/// A step's samples by the way they go; the numbers are places among the samples.
#[derive(Debug, Default)]
pub(super) struct Ways {
    /// The likeliest token is all that is asked for.
    pub(super) greedy: Vec<usize>,
    /// Drawn on the device.
    pub(super) drawn: Vec<usize>,
    /// Sampled on the host.
    pub(super) hosted: Vec<usize>,
    /// For each of `drawn`.
    pub(super) draws: Vec<Draw>,
    /// The draws' penalised tokens, and biased tokens with their biases.
    pub(super) lists: Vec<u32>,
}

impl Ways {
    /// Sorts samples; those whose lists would exceed `words_max` words in all go to the host.
    pub(super) fn of(samples: &[Sample], words_max: usize) -> Self {
        let mut ways = Self::default();
        for (index, sample) in samples.iter().enumerate() {
            let penalised =
                if sample.sampling.repetition_penalty == 1.0 { 0 } else { sample.repeated.len() };
            let words = penalised + 2 * sample.biases.len();
            if sample.sampling.logprobs.is_some() || ways.lists.len() + words > words_max {
                ways.hosted.push(index);
            } else if sample.sampling.temperature == 0.0 && words == 0 {
                ways.greedy.push(index);
            } else {
                ways.draw(index, sample, penalised);
            }
        }
        ways
    }

    fn draw(&mut self, index: usize, sample: &Sample, penalised: usize) {
        let repeated = self.lists.len() as u32;
        self.lists.extend_from_slice(&sample.repeated[..penalised]);
        let biases = self.lists.len() as u32;
        let words = sample.biases.iter().flat_map(|(token, bias)| [*token, bias.to_bits()]);
        self.lists.extend(words);
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
            padding: 0,
            draw: uniform(sample.sampling.seed, sample.position),
        });
    }

    /// Places among the samples in the order in which tokens are made: likeliest, drawn, hosted.
    pub(super) fn order(&self) -> impl Iterator<Item = usize> {
        [&self.greedy, &self.drawn, &self.hosted].into_iter().flatten().copied()
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
            with(10, &|_| {}),
            with(11, &|sample| sample.sampling.temperature = 0.8),
            with(12, &|sample| sample.sampling.logprobs = Some(0)),
            with(13, &|sample| sample.sampling.repetition_penalty = 1.1),
            with(14, &|sample| sample.biases = vec![(3, 1.0), (4, 2.0)]),
        ];
        let ways = Ways::of(&samples, 5);
        assert_eq!(
            (ways.greedy.len(), &ways.drawn[..], &ways.hosted[..]),
            (1, &[1, 3][..], &[2, 4][..])
        );
        assert_eq!(ways.lists, [5, 6]);
        assert_eq!(ways.order().collect::<Vec<_>>(), [0, 1, 3, 2, 4]);
        assert_eq!(Ways::of(&samples, 6).lists.len(), 6, "all lists fit");
    }
}
