//! A model on a device, and a whole step of it: tokens in, tokens out. Nothing visits the host in between.

use super::PAGE;
use super::device::CudaDevice;
use super::layers::{Layers, Rows};
use super::module::Module;
use super::pages::Pages;
use super::picked::{AHEAD, Keep, Picker, PicksAt};
use super::staged::Staged;
use super::weights::{address, allocate};
use crate::source::{ContextSpec, SliceSpec, WeightSource};
use crate::{ComputeError, ContextType, Threads};
use cudarc::driver::{CudaEvent, CudaSlice};
use glinthawk_flight::{Generated, Row, Sample, TOKEN_PENDING};
use glinthawk_model::{Model, ModelConfig};
use half::bf16;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// The last layer's rows that end in no token are left out if there are so many: with fewer, its products read weights all
/// the same.
const LEFT_OUT_MIN: usize = 128;

/// What a model's buffers are made for.
#[derive(Clone, Copy, Debug)]
pub struct StepLimits {
    /// Rows of a step.
    pub rows: usize,
    /// Prompts with a context.
    pub slots: usize,
    /// Pages of context.
    pub pages: usize,
    /// Positions of a context.
    pub context: usize,
}

/// A model on a device, its contexts, and all that a step needs: nothing is allocated once it runs.
pub struct CudaModel {
    device: CudaDevice,
    layers: Layers,
    pages: Pages,
    picker: Picker,
    /// What idle steps are made of, and those that the device was given.
    idle: VecDeque<Step>,
    submitted: VecDeque<Step>,
    /// (rows, hidden)
    residual: CudaSlice<f32>,
    /// The same of the rows that end in a token, one after the other.
    residual_taken: CudaSlice<f32>,
    /// (rows, query_width)
    attended: CudaSlice<bf16>,
    /// The token that was picked last for each slot: (slots)
    kept: CudaSlice<u32>,
}

/// A step's inputs, its beginning and its end.
struct Step {
    staged: Staged,
    began: CudaEvent,
    ended: CudaEvent,
    rows: usize,
}

/// What a step came to.
pub struct Stepped {
    /// A token for each sample.
    pub tokens: Vec<Generated>,
    /// How long the device worked on it.
    pub busy: Duration,
}

impl StepLimits {
    fn slice(&self, config: &ModelConfig) -> SliceSpec {
        SliceSpec { batch_rows: self.rows, ..SliceSpec::whole(config, self.rows) }
    }

    fn contexts(&self, config: &ModelConfig) -> ContextSpec {
        ContextSpec {
            layers: config.layers,
            pages: self.pages,
            page_positions: PAGE as u32,
            context_type: ContextType::Bf16,
            slots: self.slots,
            context_max: self.context,
            batch_rows: self.rows,
        }
    }
}

impl CudaModel {
    /// Positions of a page.
    pub const PAGE_POSITIONS: u32 = PAGE as u32;

    /// Bytes of one page in all layers.
    pub fn page_bytes(config: &ModelConfig) -> usize {
        2 * PAGE * config.kv_width() * config.layers * size_of::<bf16>()
    }

    /// Bytes that a model takes beside its contexts.
    pub fn bytes_beside_pages(config: &ModelConfig, limits: &StepLimits) -> usize {
        super::bytes_beside_pages(config, &limits.slice(config), &limits.contexts(config))
    }

    /// Puts a model on a device. `progress` hears of bytes done and in all.
    pub fn load(
        model: &Model,
        device: &CudaDevice,
        limits: StepLimits,
        threads: &Arc<Threads>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ComputeError> {
        Self::load_from(model, device, limits, threads, progress)
    }

    pub(crate) fn load_from(
        source: &dyn WeightSource,
        device: &CudaDevice,
        limits: StepLimits,
        threads: &Arc<Threads>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ComputeError> {
        let config = source.config();
        let (slice, contexts) = (limits.slice(config), limits.contexts(config));
        let mut progress = slice.progress(config, progress);
        let module = Arc::new(Module::new(device, config)?);
        let layers =
            Layers::load(device, &module, source, &slice, limits.context, threads, &mut progress)?;
        let pages = Pages::new(device, &module, config, &contexts)?;
        let picker = Picker::new(device, config.vocab, limits.rows)?;
        let step = |_| {
            let staged = Staged::new(device, pages.words_max() + picker.words(&[]))?;
            Ok(Step { staged, began: device.event()?, ended: device.event()?, rows: 0 })
        };
        let mut loaded = Self {
            idle: (0..AHEAD).map(step).collect::<Result<_, ComputeError>>()?,
            submitted: VecDeque::new(),
            kept: allocate(device, "tokens", limits.slots)?,
            residual: allocate(device, "the residual", limits.rows * config.hidden)?,
            residual_taken: allocate(device, "the residual", limits.rows * config.hidden)?,
            attended: allocate(device, "activations", limits.rows * config.query_width())?,
            device: device.clone(),
            layers,
            pages,
            picker,
        };
        let (residual, attended) = loaded.places();
        let logits = Some(loaded.picker.logits_at());
        loaded.layers.tune(limits.rows, attended, residual, logits)?;
        Ok(loaded)
    }

    /// Where the residual and attention's output stand.
    fn places(&self) -> (u64, u64) {
        (address(&self.residual, &self.device), address(&self.attended, &self.device))
    }

    /// Fills all pages with NaN.
    #[cfg(test)]
    pub(crate) fn poison_pages(&mut self) {
        self.pages.poison();
    }

    /// Units of pages that rows of the last step shared.
    #[cfg(test)]
    pub(crate) fn shared_units(&self) -> usize {
        self.pages.shared_units()
    }

    /// Queues an embedding of rows that stand nowhere.
    #[cfg(test)]
    pub(crate) fn embed_nothing(&mut self, rows: usize) -> Result<(), ComputeError> {
        let (residual, _) = self.places();
        self.layers.embed(0x10, 0, rows, residual)
    }

    /// Logits of the first rows of the last step, (rows, vocab), in which all rows ended in a token.
    #[cfg(test)]
    pub(crate) fn last_logits(&mut self, rows: usize) -> Vec<f32> {
        let (residual, _) = self.places();
        let rows: Vec<u32> = (0..rows as u32).collect();
        self.picker.all_logits(&mut self.layers, residual, &rows)
    }

    /// Steps that can be submitted before the tokens of the first are taken.
    pub const AHEAD: usize = AHEAD;

    /// Has the device run rows through all layers and pick a token for each sample, and does not wait. Rows may ask for
    /// the token that the step before picks for their slot. Tables begin with the pages of `shared`, each named by its
    /// first position.
    pub fn submit(
        &mut self,
        rows: &[Row],
        shared: &[Row],
        samples: &[Sample],
    ) -> Result<(), ComputeError> {
        let vocab = self.layers.config.vocab;
        let known = |row: &Row| (row.token as usize) < vocab || row.token == TOKEN_PENDING;
        assert!(rows.iter().all(known), "a token beyond {vocab}");
        let mut step = self.idle.pop_front().expect("the tokens of a step before are taken");
        let failed = || self.device.failed("mark a step");
        let words = self.pages.words_max() + self.picker.words(samples);
        step.staged.restart(words + size_of_val(shared) / size_of::<u32>())?;
        let bound = self.pages.stage_bound(shared, &mut step.staged)?;
        let cuts = self.pages.stage(rows, &mut step.staged)?;
        let picked: Vec<u32> = samples.iter().map(|sample| sample.row).collect();
        let picks = self.picker.stage(&picked, samples, &mut step.staged)?;
        step.began.record(&self.device.stream).map_err(failed())?;
        step.staged.send()?;
        let count = rows.len();
        let (residual, attended) = self.places();
        let (asked, asked_rows) = picks.rows();
        let mut picks_at = PicksAt::AmongRows(residual);
        let kept = address(&self.kept, &self.device);
        self.pages.bind(bound, shared.len())?;
        self.pages.bind(cuts.rows, count)?;
        self.layers.embed(cuts.rows, kept, count, residual)?;
        for layer in 0..self.layers.config.layers {
            let (pages, query) = self.pages.places(layer);
            self.layers.project(layer, count, residual)?;
            self.layers.rotate(layer, cuts.rows, (0, count), query, pages)?;
            self.pages.attend(layer, &cuts, attended)?;
            let all = Rows { residual, attended };
            if layer + 1 < self.layers.config.layers || count < asked + LEFT_OUT_MIN {
                self.layers.feed_forward(layer, count, all)?;
                continue;
            }
            // Queries are not needed any more: what was attended takes their place.
            let taken =
                Rows { residual: address(&self.residual_taken, &self.device), attended: query };
            if asked > 0 {
                self.layers.take_rows(asked_rows, asked, all, taken)?;
                self.layers.feed_forward(layer, asked, taken)?;
            }
            picks_at = PicksAt::Alone(taken.residual);
        }
        let keep = Keep { rows: cuts.rows, kept };
        self.picker.submit(&mut self.layers, picks_at, picks, Some(keep))?;
        step.ended.record(&self.device.stream).map_err(failed())?;
        step.rows = count;
        self.submitted.push_back(step);
        Ok(())
    }

    /// Waits for the step that was submitted first.
    pub fn tokens(&mut self) -> Result<Stepped, ComputeError> {
        let step = self.submitted.pop_front().expect("a step was submitted");
        let ended = step.ended.synchronize();
        ended.map_err(|error| {
            let (rows, layers) = (step.rows, self.layers.config.layers);
            self.device.failed(&format!("finish a step of {rows} rows, {layers} layers"))(error)
        })?;
        let tokens = self.picker.tokens()?;
        let busy_ms = step.began.elapsed_ms(&step.ended);
        let busy_ms = busy_ms.map_err(self.device.failed("time a step"))?;
        self.idle.push_back(step);
        Ok(Stepped { tokens, busy: Duration::from_secs_f32(busy_ms / 1000.0) })
    }
}
