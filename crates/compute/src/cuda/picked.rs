//! The tokens of a batch: logits a portion at a time, picks on the device, and on the host what it cannot pick.

use super::device::CudaDevice;
use super::layers::{LOGIT_ROWS, Layers};
use super::module::Arg;
use super::pick::{Draw, LIST_WORDS_PER_ROW, Ways};
use super::staged::{Staged, pinned};
use super::weights::{address, allocate};
use crate::sample::sample;
use crate::{ComputeError, Threads};
use cudarc::driver::{CudaSlice, PinnedHostSlice};
use glinthawk_flight::{Generated, Sample};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Where tokens are picked.
pub(super) struct Picker {
    device: CudaDevice,
    vocab: usize,
    rows: usize,
    /// For sampling on the host.
    threads: Arc<Threads>,
    /// (LOGIT_ROWS, vocab)
    logits: CudaSlice<f32>,
    /// (rows)
    tokens: CudaSlice<u32>,
    /// Where they arrive.
    tokens_here: PinnedHostSlice<u32>,
    logits_here: PinnedHostSlice<f32>,
    submitted: Option<Submitted>,
}

/// Picks that the device was given.
struct Submitted {
    samples: Vec<Sample>,
    ways: Ways,
    /// Rows that end in a token, on the device: first greedy ones, then drawn ones, then the host's.
    picked: u64,
}

/// Picks on their way to the device.
pub(super) struct Picks {
    samples: Vec<Sample>,
    ways: Ways,
    draws: u64,
    picked: u64,
    lists: u64,
}

impl Picker {
    /// For batches of up to `rows` rows.
    pub(super) fn new(
        device: &CudaDevice,
        vocab: usize,
        rows: usize,
        threads: &Arc<Threads>,
    ) -> Result<Self, ComputeError> {
        Ok(Self {
            logits: allocate(device, "logits", LOGIT_ROWS * vocab)?,
            tokens: allocate(device, "tokens", rows)?,
            tokens_here: pinned(device, rows)?,
            logits_here: pinned(device, LOGIT_ROWS * vocab)?,
            submitted: None,
            threads: Arc::clone(threads),
            device: device.clone(),
            vocab,
            rows,
        })
    }

    /// Where logits are made.
    pub(super) fn logits_at(&self) -> u64 {
        address(&self.logits, &self.device)
    }

    /// Words that [`Self::stage`] places at most.
    pub(super) fn words_max(&self) -> usize {
        (size_of::<Draw>() / size_of::<u32>() + 1 + LIST_WORDS_PER_ROW) * self.rows
    }

    /// Places what the device must know among what is sent: a sample for each of these rows of the residual.
    pub(super) fn stage(
        &self,
        rows: &[u32],
        samples: &[Sample],
        staged: &mut Staged,
    ) -> Result<Picks, ComputeError> {
        assert!(self.submitted.is_none(), "the tokens of the last step were not taken");
        assert!(samples.len() <= self.rows, "{} samples of {}", samples.len(), self.rows);
        let ways = Ways::of(samples, LIST_WORDS_PER_ROW * self.rows);
        Ok(Picks {
            draws: staged.place(bytemuck::cast_slice(&ways.draws).iter().copied())?,
            picked: staged.place(ways.order().map(|index| rows[index]))?,
            lists: staged.place(ways.lists.iter().copied())?,
            samples: samples.to_vec(),
            ways,
        })
    }

    /// Has the device pick what it can, and does not wait.
    pub(super) fn submit(
        &mut self,
        layers: &mut Layers,
        residual: u64,
        picks: Picks,
    ) -> Result<(), ComputeError> {
        let Picks { samples, ways, draws, picked, lists } = picks;
        let (greedy, drawn) = (ways.greedy.len(), ways.drawn.len());
        let word = size_of::<u32>() as u64;
        let (logits, tokens) = (self.logits_at(), address(&self.tokens, &self.device));
        for (start, count) in portions(0..greedy) {
            layers.classify(residual, picked + start as u64 * word, count, logits)?;
            let args = [logits, tokens + start as u64 * word].map(Arg::Address);
            layers.module.launch(&layers.module.argmax, (count as u32, 1, 1), &args)?;
        }
        for (start, count) in portions(greedy..greedy + drawn) {
            layers.classify(residual, picked + start as u64 * word, count, logits)?;
            let draws = draws + ((start - greedy) * size_of::<Draw>()) as u64;
            let args = [draws, lists, logits, tokens + start as u64 * word].map(Arg::Address);
            layers.module.launch(&layers.module.sample, (count as u32, 1, 1), &args)?;
        }
        let failed = || self.device.failed("finish a step");
        if greedy + drawn > 0 {
            let tokens = &mut self.tokens_here.as_mut_slice().map_err(failed())?[..greedy + drawn];
            let from = self.tokens.slice(..greedy + drawn);
            self.device.stream.memcpy_dtoh(&from, tokens).map_err(failed())?;
        }
        self.submitted = Some(Submitted { samples, ways, picked });
        Ok(())
    }

    /// Waits for what was submitted; gives a token for each of its samples.
    pub(super) fn tokens(
        &mut self,
        layers: &mut Layers,
        residual: u64,
    ) -> Result<Vec<Generated>, ComputeError> {
        let Submitted { samples, ways, picked } =
            self.submitted.take().expect("picks were submitted");
        self.device.synchronize()?;
        let failed = || self.device.failed("finish a step");
        let by_device = ways.greedy.len() + ways.drawn.len();
        let tokens = &self.tokens_here.as_slice().map_err(failed())?[..by_device];
        let mut generated: Vec<Option<Generated>> = vec![None; samples.len()];
        for (index, &token) in ways.greedy.iter().chain(&ways.drawn).zip(tokens) {
            let token = Generated { token, logprob: 0.0, alternatives: Vec::new() };
            generated[*index] = Some(token);
        }
        for (start, count) in portions(by_device..samples.len()) {
            let rows = picked + (start * size_of::<u32>()) as u64;
            layers.classify(residual, rows, count, self.logits_at())?;
            let hosted = &ways.hosted[start - by_device..][..count];
            self.pick_here(hosted, &samples, &mut generated)?;
        }
        Ok(generated.into_iter().map(|token| token.expect("every sample went some way")).collect())
    }

    /// Takes the logits that were just made, and samples from them here.
    fn pick_here(
        &mut self,
        hosted: &[usize],
        samples: &[Sample],
        generated: &mut [Option<Generated>],
    ) -> Result<(), ComputeError> {
        let failed = || self.device.failed("take logits from it");
        let values = hosted.len() * self.vocab;
        let logits = &mut self.logits_here.as_mut_slice().map_err(failed())?[..values];
        let from = self.logits.slice(..values);
        self.device.stream.memcpy_dtoh(&from, logits).map_err(failed())?;
        self.device.synchronize()?;
        let rows = logits.chunks_exact_mut(self.vocab);
        let slots: Vec<_> = rows.map(|logits| Mutex::new((logits, None))).collect();
        self.threads.for_each(hosted.len(), |index| {
            let mut slot = slots[index].lock().expect("no panic while sampling");
            slot.1 = Some(sample(slot.0, &samples[hosted[index]]));
        });
        for (slot, &index) in slots.into_iter().zip(hosted) {
            generated[index] = slot.into_inner().expect("no panic while sampling").1;
        }
        Ok(())
    }

    /// Logits of rows of a residual, (rows, vocab).
    #[cfg(test)]
    pub(super) fn all_logits(
        &mut self,
        layers: &mut Layers,
        residual: u64,
        rows: &[u32],
    ) -> Vec<f32> {
        let stream = Arc::clone(&self.device.stream);
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
