//! A GPU as a backend: the work of either tier, layer by layer. All kernels go through the device's one stream, in the
//! order of the calls.

use super::PAGE;
use super::activations::{CudaBuffer, CudaMark, Travel};
use super::device::{CudaDevice, Half};
use super::layers::{Layers, Rows};
use super::module::Module;
use super::pages::{Cuts, Pages};
use super::picked::{Picker, PicksAt};
use super::staged::Staged;
use super::weights::{address, allocate};
use crate::source::{ContextSpec, SliceSpec, WeightSource};
use crate::{
    AttendRow, Backend, ComputeError, ContextKernels, ShardIn, ShardOut, Threads, WeightKernels,
};
use cudarc::driver::CudaSlice;
use glinthawk_flight::{Buffer, Generated, Pool, Row, Sample};
use glinthawk_model::{Model, ModelConfig};
use half::bf16;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Batches whose inputs the host can be ahead.
const STAGED_BATCHES: usize = 8;

/// A GPU, for one model.
#[derive(Clone)]
pub struct CudaBackend {
    /// The device.
    pub device: CudaDevice,
    /// For reading weights.
    pub threads: Arc<Threads>,
    travel: Arc<Travel>,
    module: Arc<Mutex<Option<Arc<Module>>>>,
}

impl CudaBackend {
    /// A backend over a device; a `pinned_pool` makes its copies fast.
    pub fn new(device: CudaDevice, threads: Arc<Threads>, pool: Arc<Pool>) -> Self {
        let travel = Arc::new(Travel::new(&device, pool));
        Self { device, threads, travel, module: Arc::default() }
    }

    /// The kernels, compiled once.
    fn module(&self, config: &ModelConfig) -> Result<Arc<Module>, ComputeError> {
        let mut compiled = self.module.lock().expect("no panic while held");
        if let Some(module) = &*compiled {
            return Ok(Arc::clone(module));
        }
        if self.device.half == Half::F16 {
            let reason = "it computes in f16, and other nodes in bf16".to_owned();
            return Err(self.device.error("be a node of a cluster", reason));
        }
        let module = Arc::new(Module::new(&self.device, config)?);
        *compiled = Some(Arc::clone(&module));
        Ok(module)
    }

    pub(crate) fn load(
        &self,
        source: &dyn WeightSource,
        spec: &SliceSpec,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<CudaWeights, ComputeError> {
        let (device, config, threads) = (&self.device, source.config(), &self.threads);
        let (rows, context_max) = (spec.batch_rows, config.context_max);
        let module = self.module(config)?;
        let mut progress = spec.progress(config, progress);
        let mut layers =
            Layers::load(device, &module, source, spec, context_max, threads, &mut progress)?;
        let picker = match spec.classifies {
            true => Some(Picker::new(device, config.vocab, rows)?),
            false => None,
        };
        let words = STAGED_BATCHES * ROW_WORDS * rows;
        let words = words + picker.as_ref().map_or(0, |picker| picker.words(&[]));
        let staged = Staged::new(device, words)?;
        let batch = allocate(device, "the residual", rows * config.hidden)?;
        let attended = allocate(device, "activations", rows * config.query_width())?;
        let (at, attended_at) = (address(&batch, device), address(&attended, device));
        layers.tune(rows, attended_at, at, picker.as_ref().map(Picker::logits_at))?;
        let slab = allocate(device, "the residual slab", spec.slab_rows * config.hidden)?;
        let picked = VecDeque::new();
        Ok(CudaWeights { layers, picker, picked, staged, slab, batch, attended })
    }
}

impl Backend for CudaBackend {
    // One that runs, one that waits behind it, and one that the host may be busy with meanwhile.
    const WORKS_AHEAD: usize = 3;
    type Mark = CudaMark;
    type Buffer = CudaBuffer;
    type Weights = CudaWeights;
    type Context = CudaContext;

    fn weights(
        &self,
        model: &Model,
        spec: &SliceSpec,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<CudaWeights, ComputeError> {
        self.load(model, spec, progress)
    }

    fn page_positions(&self) -> &'static [u32] {
        &[PAGE as u32]
    }

    fn context(
        &self,
        config: &ModelConfig,
        spec: &ContextSpec,
    ) -> Result<CudaContext, ComputeError> {
        let module = self.module(config)?;
        let pages = Pages::new(&self.device, &module, config, spec)?;
        Ok(CudaContext {
            device: self.device.clone(),
            staged: Staged::new(&self.device, 2 * pages.words_max())?,
            pages,
            changed: Vec::new(),
            rows: Vec::new(),
            cuts: None,
            spare: Vec::new(),
        })
    }

    fn take(&self, len_bytes: usize) -> Result<CudaBuffer, ComputeError> {
        self.travel.take(len_bytes)
    }

    fn give(&self, buffer: CudaBuffer) {
        self.travel.give(buffer);
    }

    fn to_device(&self, buffer: Buffer) -> Result<CudaBuffer, ComputeError> {
        self.travel.to_device(buffer)
    }

    fn to_host(&self, buffer: CudaBuffer) -> Result<Buffer, ComputeError> {
        self.travel.to_host(buffer)
    }

    fn mark(&self) -> Result<CudaMark, ComputeError> {
        self.travel.mark()
    }

    fn is_done(&self, mark: &CudaMark) -> Result<bool, ComputeError> {
        self.travel.is_done(mark)
    }

    fn elapsed(&self, from: &CudaMark, to: &CudaMark) -> Result<Duration, ComputeError> {
        self.travel.elapsed(from, to)
    }
}

/// Words of a row on its way to the device.
const ROW_WORDS: usize = size_of::<Row>() / size_of::<u32>();

/// Tier 1's work on a GPU.
pub struct CudaWeights {
    layers: Layers,
    /// Where the slice classifies.
    picker: Option<Picker>,
    /// What was picked before that, and not asked for yet.
    picked: VecDeque<Vec<Generated>>,
    staged: Staged,
    /// (slab_rows, hidden)
    slab: CudaSlice<f32>,
    /// Shards that stand apart in the slab, side by side: (rows, hidden).
    batch: CudaSlice<f32>,
    /// Their attention: (rows, query_width).
    attended: CudaSlice<bf16>,
}

/// Whether products can take a matrix there: their algorithms were chosen for places like this.
fn is_aligned(address: u64) -> bool {
    address.is_multiple_of(256)
}

impl CudaWeights {
    fn slab_at(&self, row: usize) -> u64 {
        address(&self.slab, &self.layers.device) + (row * self.row_bytes()) as u64
    }

    fn row_bytes(&self) -> usize {
        self.layers.config.hidden * size_of::<f32>()
    }

    /// Copies between shards' places in the slab and their places side by side.
    fn copy_shards(&self, slabs: &[Range<usize>], back: bool) -> Result<u64, ComputeError> {
        let batch = address(&self.batch, &self.layers.device);
        let mut at = batch;
        for slab in slabs.iter().filter(|slab| !slab.is_empty()) {
            let (there, bytes) = (self.slab_at(slab.start), slab.len() * self.row_bytes());
            let (to, from) = if back { (there, at) } else { (at, there) };
            self.layers.device.copy(to, from, bytes)?;
            at += bytes as u64;
        }
        Ok(batch)
    }

    /// Where the residual of shards stands as one batch: one shard's is in the slab itself, if products can take it there.
    fn gather(&self, slabs: &[Range<usize>]) -> Result<u64, ComputeError> {
        match slabs {
            [slab] if is_aligned(self.slab_at(slab.start)) => Ok(self.slab_at(slab.start)),
            _ => self.copy_shards(slabs, false),
        }
    }

    /// Sends words that describe rows; returns where they stand.
    fn send(&mut self, rows: impl ExactSizeIterator<Item = Row>) -> Result<u64, ComputeError> {
        self.staged.begin(ROW_WORDS * rows.len())?;
        let words = |row: Row| [row.slot, row.position, row.page, row.token];
        let at = self.staged.place(rows.flat_map(words))?;
        self.staged.send()?;
        Ok(at)
    }

    /// Logits of slab rows.
    #[cfg(test)]
    pub(crate) fn logits(&mut self, rows: &[u32]) -> Vec<f32> {
        let slab = self.slab_at(0);
        let picker = self.picker.as_mut().expect("the last slice classifies");
        picker.all_logits(&mut self.layers, slab, rows)
    }
}

impl WeightKernels for CudaWeights {
    type Buffer = CudaBuffer;

    fn embed(&mut self, slab: Range<usize>, tokens: &[u32]) -> Result<(), ComputeError> {
        let row = |&token: &u32| Row { slot: 0, position: 0, page: 0, token };
        let rows = self.send(tokens.iter().map(row))?;
        self.layers.embed(rows, 0, slab.len(), self.slab_at(slab.start))
    }

    fn put_residual(
        &mut self,
        slab: Range<usize>,
        residual: &CudaBuffer,
    ) -> Result<(), ComputeError> {
        let (device, to) = (&self.layers.device, self.slab_at(slab.start));
        device.copy(to, address(&residual.memory, device), residual.len_bytes)
    }

    fn get_residual(
        &mut self,
        slab: Range<usize>,
        residual: &mut CudaBuffer,
    ) -> Result<(), ComputeError> {
        let (device, from) = (&self.layers.device, self.slab_at(slab.start));
        device.copy(address(&residual.memory, device), from, residual.len_bytes)
    }

    fn pre_attention(
        &mut self,
        layer: usize,
        shards: &mut [ShardOut<'_, CudaBuffer>],
    ) -> Result<(), ComputeError> {
        let slabs: Vec<Range<usize>> = shards.iter().map(|shard| shard.slab.clone()).collect();
        let count = slabs.iter().map(Range::len).sum();
        if count == 0 {
            return Ok(());
        }
        let positions: Vec<u32> =
            shards.iter().flat_map(|shard| shard.positions).copied().collect();
        let row = |&position: &u32| Row { slot: 0, position, page: 0, token: 0 };
        let rows = self.send(positions.iter().map(row))?;
        let residual = self.gather(&slabs)?;
        self.layers.project(layer, count, residual)?;
        let mut first = 0;
        for shard in shards {
            let rows = rows + (first * size_of::<Row>()) as u64;
            let qkv = address(&shard.qkv.memory, &self.layers.device);
            self.layers.rotate(layer, rows, (first, shard.slab.len()), qkv, 0)?;
            first += shard.slab.len();
        }
        Ok(())
    }

    fn post_attention(
        &mut self,
        layer: usize,
        shards: &[ShardIn<'_, CudaBuffer>],
    ) -> Result<(), ComputeError> {
        let slabs: Vec<Range<usize>> = shards.iter().map(|shard| shard.slab.clone()).collect();
        let count = slabs.iter().map(Range::len).sum();
        if count == 0 {
            return Ok(());
        }
        let device = self.layers.device.clone();
        let residual = self.gather(&slabs)?;
        let row_bytes = self.layers.config.query_width() * size_of::<bf16>();
        let from = |shard: &ShardIn<'_, CudaBuffer>| {
            address(&shard.attended.memory, &device) + (shard.first * row_bytes) as u64
        };
        let attended = match shards {
            [shard] if is_aligned(from(shard)) => from(shard),
            _ => {
                let together = address(&self.attended, &device);
                let mut at = together;
                for shard in shards.iter().filter(|shard| !shard.slab.is_empty()) {
                    let len_bytes = shard.slab.len() * row_bytes;
                    device.copy(at, from(shard), len_bytes)?;
                    at += len_bytes as u64;
                }
                together
            }
        };
        self.layers.feed_forward(layer, count, Rows { residual, attended })?;
        if residual != self.slab_at(slabs[0].start) {
            self.copy_shards(&slabs, true)?;
        }
        Ok(())
    }

    fn classify(&mut self, rows: &[usize], samples: &[Sample]) -> Result<(), ComputeError> {
        let (slab, picker) = (self.slab_at(0), self.picker.as_mut());
        let picker = picker.expect("the last slice classifies");
        if picker.is_full() {
            self.picked.push_back(picker.tokens()?);
        }
        let rows: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
        self.staged.begin(picker.words(samples))?;
        let picks = picker.stage(&rows, samples, &mut self.staged)?;
        self.staged.send()?;
        picker.submit(&mut self.layers, PicksAt::AmongRows(slab), picks, None)
    }

    fn tokens(&mut self) -> Result<Vec<Generated>, ComputeError> {
        match self.picked.pop_front() {
            Some(picked) => Ok(picked),
            None => self.picker.as_mut().expect("the last slice classifies").tokens(),
        }
    }
}

/// Tier 2's work on a GPU.
pub struct CudaContext {
    device: CudaDevice,
    pages: Pages,
    staged: Staged,
    /// Slots and numbers of pages that were bound anew.
    changed: Vec<(u32, usize)>,
    /// The last batch, and where the device has it: every layer attends the same rows.
    rows: Vec<Row>,
    cuts: Option<Cuts>,
    /// Of the batch before, so that nothing is allocated for the next.
    spare: Vec<Row>,
}

impl CudaContext {
    /// A row that the kernels know where to store.
    fn row(&mut self, slot: u32, position: u32) -> Row {
        let page = self.pages.known().page(slot, position as usize / PAGE);
        Row { slot, position, page, token: 0 }
    }

    /// Sends rows and how their attention is cut up, and enters pages that were bound anew.
    fn stage(&mut self, rows: &[Row]) -> Result<Cuts, ComputeError> {
        let bound = self.changed.len();
        self.staged.begin(self.pages.words_max() + ROW_WORDS * bound)?;
        let cuts = self.pages.stage(rows, &mut self.staged)?;
        let known = self.pages.known();
        let words = |(slot, number): (u32, usize)| {
            [slot, (number * PAGE) as u32, known.page(slot, number), 0]
        };
        let changed: Vec<u32> = self.changed.drain(..).flat_map(words).collect();
        let changed = self.staged.place(changed)?;
        self.staged.send()?;
        self.pages.bind(changed, bound)?;
        Ok(cuts)
    }
}

impl ContextKernels for CudaContext {
    type Buffer = CudaBuffer;

    fn bind(&mut self, slot: u32, first: usize, pages: &[u32]) -> Result<(), ComputeError> {
        for (number, &page) in (first..).zip(pages) {
            // Every layer binds what the first one did.
            if self.pages.known().enter(slot, number, page) {
                self.changed.push((slot, number));
            }
        }
        Ok(())
    }

    fn attend(
        &mut self,
        layer: usize,
        rows: &[AttendRow],
        qkv: &CudaBuffer,
        attended: &mut CudaBuffer,
    ) -> Result<(), ComputeError> {
        if rows.is_empty() {
            return Ok(());
        }
        let mut batch = std::mem::take(&mut self.spare);
        batch.clear();
        batch.extend(rows.iter().map(|row| self.row(row.slot, row.position)));
        let known = self.changed.is_empty() && batch == self.rows;
        let cuts = match self.cuts.take().filter(|_| known) {
            Some(cuts) => cuts,
            None => self.stage(&batch)?,
        };
        let at = |buffer: &CudaBuffer| address(&buffer.memory, &self.device);
        self.pages.append(layer, &cuts, batch.len(), at(qkv))?;
        self.pages.attend(layer, &cuts, at(attended))?;
        self.cuts = Some(cuts);
        self.spare = std::mem::replace(&mut self.rows, batch);
        Ok(())
    }
}
