//! The tokens of a batch: logits a portion at a time, and picks from them. Tokens come back, and the log-probabilities
//! that were asked for.

use super::device::CudaDevice;
use super::layers::{LOGIT_ROWS, Layers};
use super::module::{Arg, KEEP_THREADS};
use super::pick::{Draw, Ways, list_words, reported_words};
use super::staged::{Staged, pinned};
use super::weights::{address, allocate};
use crate::ComputeError;
use cudarc::driver::{CudaEvent, CudaSlice, PinnedHostSlice};
use glinthawk_flight::{Generated, Sample};
use std::collections::VecDeque;
use std::ops::Range;

/// Batches that can be submitted before the tokens of the first are taken.
pub(super) const AHEAD: usize = 2;
/// Alternatives for which every row has room.
const ALTERNATIVES: usize = 20;

/// Where tokens are picked.
pub(super) struct Picker {
    device: CudaDevice,
    vocab: usize,
    rows: usize,
    /// (LOGIT_ROWS, vocab)
    logits: CudaSlice<f32>,
    /// (rows)
    tokens: CudaSlice<u32>,
    /// (rows, words of log-probabilities)
    reported: CudaSlice<f32>,
    /// Where batches arrive in turn.
    arrivals: VecDeque<Arrival>,
    submitted: VecDeque<(Ways, Arrival)>,
}

/// Where a batch's tokens and log-probabilities arrive, and when.
struct Arrival {
    tokens: PinnedHostSlice<u32>,
    reported: PinnedHostSlice<f32>,
    done: CudaEvent,
}

/// Picks on their way to the device.
pub(super) struct Picks {
    ways: Ways,
    draws: u64,
    picked: u64,
    lists: u64,
}

impl Picks {
    /// How many there are, and the list of their rows on the device.
    pub(super) fn rows(&self) -> (usize, u64) {
        (self.ways.greedy.len() + self.ways.drawn.len(), self.picked)
    }
}

/// Where the residual of picks stands: among that of all rows, or alone and in their order.
#[derive(Clone, Copy)]
pub(super) enum PicksAt {
    AmongRows(u64),
    Alone(u64),
}

/// Where a step's rows stand, and the tokens that are kept by slot for the next.
pub(super) struct Keep {
    pub(super) rows: u64,
    pub(super) kept: u64,
}

impl Picker {
    /// For batches of up to `rows` rows.
    pub(super) fn new(
        device: &CudaDevice,
        vocab: usize,
        rows: usize,
    ) -> Result<Self, ComputeError> {
        let reported = rows * reported_words(ALTERNATIVES);
        let arrival = |_| {
            Ok(Arrival {
                tokens: pinned(device, rows)?,
                reported: pinned(device, reported)?,
                done: device.event()?,
            })
        };
        Ok(Self {
            logits: allocate(device, "logits", LOGIT_ROWS * vocab)?,
            tokens: allocate(device, "tokens", rows)?,
            reported: allocate(device, "log-probabilities", reported)?,
            arrivals: (0..AHEAD).map(arrival).collect::<Result<_, ComputeError>>()?,
            submitted: VecDeque::new(),
            device: device.clone(),
            vocab,
            rows,
        })
    }

    /// Where logits are made.
    pub(super) fn logits_at(&self) -> u64 {
        address(&self.logits, &self.device)
    }

    /// Whether tokens must be taken before more is submitted.
    pub(super) fn is_full(&self) -> bool {
        self.arrivals.is_empty()
    }

    /// Words that [`Self::stage`] places at most.
    pub(super) fn words(&self, samples: &[Sample]) -> usize {
        (size_of::<Draw>() / size_of::<u32>() + 1) * self.rows + list_words(samples)
    }

    /// Places what the device must know among what is sent: a sample for each of these rows of the residual.
    pub(super) fn stage(
        &self,
        rows: &[u32],
        samples: &[Sample],
        staged: &mut Staged,
    ) -> Result<Picks, ComputeError> {
        assert!(samples.len() <= self.rows, "{} samples of {}", samples.len(), self.rows);
        let ways = Ways::of(samples, self.vocab);
        if ways.reported > self.reported.len() {
            let what = format!("more than {ALTERNATIVES} alternatives for every token on a GPU");
            return Err(ComputeError::Shape { what });
        }
        Ok(Picks {
            draws: staged.place(bytemuck::cast_slice(&ways.draws).iter().copied())?,
            picked: staged.place(ways.order().map(|index| rows[index]))?,
            lists: staged.place(ways.lists.iter().copied())?,
            ways,
        })
    }

    /// Has the device pick, and does not wait.
    pub(super) fn submit(
        &mut self,
        layers: &mut Layers,
        at: PicksAt,
        picks: Picks,
        keep: Option<Keep>,
    ) -> Result<(), ComputeError> {
        let (count, _) = picks.rows();
        let Picks { ways, draws, picked, lists } = picks;
        let greedy = ways.greedy.len();
        let word = size_of::<u32>() as u64;
        let row_bytes = (layers.config.hidden * size_of::<f32>()) as u64;
        let rows_at = |start: usize| match at {
            PicksAt::AmongRows(residual) => (residual, picked + start as u64 * word),
            PicksAt::Alone(residual) => (residual + start as u64 * row_bytes, 0),
        };
        let (logits, tokens) = (self.logits_at(), address(&self.tokens, &self.device));
        let reported = address(&self.reported, &self.device);
        for (start, count) in portions(0..greedy) {
            let (residual, rows) = rows_at(start);
            layers.classify(residual, rows, count, logits)?;
            let args = [logits, tokens + start as u64 * word].map(Arg::Address);
            layers.module.launch(&layers.module.argmax, (count as u32, 1, 1), &args)?;
        }
        for (start, count) in portions(greedy..count) {
            let (residual, rows) = rows_at(start);
            layers.classify(residual, rows, count, logits)?;
            let draws = draws + ((start - greedy) * size_of::<Draw>()) as u64;
            let grid = (count as u32, 1, 1);
            if ways.reported > 0 {
                let args = [draws, logits, reported].map(Arg::Address);
                layers.module.launch(&layers.module.report, grid, &args)?;
            }
            let args = [draws, lists, logits, tokens + start as u64 * word, reported];
            layers.module.launch(&layers.module.sample, grid, &args.map(Arg::Address))?;
        }
        if let Some(Keep { rows, kept }) = keep {
            let [rows, picked, tokens, kept] = [rows, picked, tokens, kept].map(Arg::Address);
            let args = [rows, picked, tokens, kept, Arg::Number(count as u32)];
            let grid = (count.div_ceil(KEEP_THREADS as usize) as u32, 1, 1);
            layers.module.launch(&layers.module.keep_tokens, grid, &args)?;
        }
        self.fetch(ways)
    }

    /// Has what was picked copied home.
    fn fetch(&mut self, ways: Ways) -> Result<(), ComputeError> {
        let failed = || self.device.failed("copy tokens from it");
        let stream = &self.device.stream;
        let mut arrival =
            self.arrivals.pop_front().expect("the tokens of a batch before are taken");
        let (count, words) = (ways.greedy.len() + ways.drawn.len(), ways.reported);
        if count > 0 {
            let here = &mut arrival.tokens.as_mut_slice().map_err(failed())?[..count];
            stream.memcpy_dtoh(&self.tokens.slice(..count), here).map_err(failed())?;
        }
        if words > 0 {
            let here = &mut arrival.reported.as_mut_slice().map_err(failed())?[..words];
            stream.memcpy_dtoh(&self.reported.slice(..words), here).map_err(failed())?;
        }
        arrival.done.record(stream).map_err(failed())?;
        self.submitted.push_back((ways, arrival));
        Ok(())
    }

    /// Waits for the batch that was submitted first; gives a token for each of its samples.
    pub(super) fn tokens(&mut self) -> Result<Vec<Generated>, ComputeError> {
        let (ways, arrival) = self.submitted.pop_front().expect("picks were submitted");
        let failed = || self.device.failed("finish its work");
        arrival.done.synchronize().map_err(failed())?;
        let plain = Generated { token: 0, logprob: 0.0, alternatives: Vec::new() };
        let mut generated = vec![plain; ways.greedy.len() + ways.drawn.len()];
        let tokens = arrival.tokens.as_slice().map_err(failed())?;
        for (index, &token) in ways.order().zip(tokens) {
            generated[index].token = token;
        }
        let reported = arrival.reported.as_slice().map_err(failed())?;
        for (&index, draw) in ways.drawn.iter().zip(&ways.draws) {
            let Some((place, alternatives)) = draw.reported() else { continue };
            let words = &reported[place..place + reported_words(alternatives)];
            let (own, log_total) = (words[0], words[1]);
            generated[index].logprob = own - log_total;
            let alternative = |pair: &[f32]| (pair[0].to_bits(), pair[1] - log_total);
            generated[index].alternatives = words[2..].chunks_exact(2).map(alternative).collect();
        }
        self.arrivals.push_back(arrival);
        Ok(generated)
    }

    /// Logits of rows of a residual, (rows, vocab).
    #[cfg(test)]
    pub(super) fn all_logits(
        &mut self,
        layers: &mut Layers,
        residual: u64,
        rows: &[u32],
    ) -> Vec<f32> {
        let stream = std::sync::Arc::clone(&self.device.stream);
        let list = stream.clone_htod(rows).unwrap();
        let at = address(&list, &self.device);
        let mut logits = Vec::new();
        for (start, count) in portions(0..rows.len()) {
            let rows = at + (start * size_of::<u32>()) as u64;
            layers.classify(residual, rows, count, self.logits_at()).unwrap();
            let some = self.logits.slice(..count * self.vocab);
            logits.extend(stream.clone_dtoh(&some).unwrap());
        }
        logits
    }
}

/// A range in portions of [`LOGIT_ROWS`] at most: where each starts, and its length.
fn portions(range: Range<usize>) -> impl Iterator<Item = (usize, usize)> {
    let end = range.end;
    range.step_by(LOGIT_ROWS).map(move |start| (start, LOGIT_ROWS.min(end - start)))
}
