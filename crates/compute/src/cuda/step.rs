//! A model on a device, and a whole step of it: tokens in, tokens out. Nothing visits the host in between.

use super::PAGE;
use super::attention::{Combined, Cut, Tiling, Unit};
use super::device::CudaDevice;
use super::module::{Arg, Module, ROTATE_BLOCKS};
use super::pick::{Draw, LIST_WORDS_PER_ROW, Ways};
use super::product::{Into, Operands, Products, Shape};
use super::weights::{Weights, address, allocate, upload};
use crate::rope::Rope;
use crate::sample::sample;
use crate::source::{WeightSource, check_shape};
use crate::{ComputeError, Threads};
use cudarc::driver::{CudaSlice, PinnedHostSlice};
use glinthawk_flight::{Generated, Row, Sample};
use glinthawk_model::{Model, ModelConfig};
use half::bf16;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Rows whose logits are made at a time.
const LOGIT_ROWS: usize = 256;
/// Memory for the partial results of attention.
const PARTIAL_BYTES: usize = 64 << 20;

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

/// Activations on the device.
struct Activations {
    /// (rows, hidden)
    residual: CudaSlice<f32>,
    /// (rows, hidden)
    normed: CudaSlice<bf16>,
    /// (rows, qkv_width), then (rows, 2, feed_forward)
    wide: CudaSlice<bf16>,
    /// (rows, query_width)
    query: CudaSlice<bf16>,
    /// (rows, query_width)
    attended: CudaSlice<bf16>,
    /// (rows, feed_forward)
    activated: CudaSlice<bf16>,
    /// (LOGIT_ROWS, vocab)
    logits: CudaSlice<f32>,
    /// (rows)
    tokens: CudaSlice<u32>,
    /// (partials, kv_heads, head_dim)
    partial_out: CudaSlice<f32>,
    /// (partials, kv_heads, 2)
    partial_sums: CudaSlice<f32>,
}

/// A model on a device, its contexts, and all that a step needs: nothing is allocated once it runs.
pub struct CudaModel {
    device: CudaDevice,
    config: ModelConfig,
    limits: StepLimits,
    module: Module,
    products: Products,
    weights: Weights,
    /// For each layer (pages, 2, kv_heads, 16, head_dim).
    pages: Vec<CudaSlice<bf16>>,
    /// (slots, pages of the longest context)
    tables: CudaSlice<u32>,
    /// (positions, 2, head_dim / 2): cosines, then sines
    angles: CudaSlice<f32>,
    activations: Activations,
    cut: Cut,
    tiling: Tiling,
    /// For sampling on the host.
    threads: Arc<Threads>,
    /// What the host sends for a step, in words: rows, units, tiles, and how tokens are picked.
    staging: PinnedHostSlice<u32>,
    inputs: CudaSlice<u32>,
    /// Where tokens and logits arrive.
    tokens: PinnedHostSlice<u32>,
    logits: PinnedHostSlice<f32>,
    submitted: Option<Submitted>,
}

/// A step that the device was given.
struct Submitted {
    samples: Vec<Sample>,
    ways: Ways,
    /// Rows that end in a token, on the device: first greedy ones, then drawn ones, then the host's.
    picked: u64,
}

/// Where a step's inputs stand on the device.
struct Inputs {
    rows: u64,
    many: u64,
    few: u64,
    combined: u64,
    draws: u64,
    picked: u64,
    lists: u64,
}

impl CudaModel {
    /// Bytes of one page in all layers.
    pub fn page_bytes(config: &ModelConfig) -> usize {
        2 * PAGE * config.kv_width() * config.layers * size_of::<bf16>()
    }

    /// Bytes that a model takes beside its contexts.
    pub fn bytes_beside_pages(config: &ModelConfig, limits: &StepLimits) -> usize {
        let row = 4 * config.hidden
            + 2 * (config.hidden + 2 * config.query_width() + config.feed_forward)
            + 2 * config.qkv_width().max(2 * config.feed_forward);
        let logits = 4 * LOGIT_ROWS * config.vocab;
        let table = 4 * limits.slots * limits.context.div_ceil(PAGE);
        let angles = 4 * limits.context * config.head_dim;
        // The products' workspace, the context of the driver, and what fragments.
        let spare = 1 << 30;
        2 * config.parameter_count()
            + limits.rows * row
            + logits
            + PARTIAL_BYTES
            + table
            + angles
            + spare
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
        let config = source.config().clone();
        check_shape(&config)?;
        check_alignment(&config)?;
        let total = 2 * config.parameter_count() as u64;
        let mut done = 0;
        let mut progress = |bytes| {
            done += bytes;
            progress(done.min(total), total);
        };
        let module = Module::new(device, &config)?;
        let weights = Weights::load(device, source, threads, &mut progress)?;
        let mut rope = Rope::new(&config);
        rope.reach(limits.context as u32 - 1);
        let angles: Vec<f32> =
            (0..limits.context as u32).flat_map(|at| rope.angles(at).to_vec()).collect();
        let layer_pages = limits.pages * 2 * PAGE * config.kv_width();
        let pages = (0..config.layers).map(|_| allocate(device, "contexts", layer_pages));
        let pages = pages.collect::<Result<_, _>>()?;
        let draw_words = size_of::<Draw>() / size_of::<u32>();
        let words_per_row = 4 + draw_words + 1 + LIST_WORDS_PER_ROW;
        let cut = Cut {
            group: config.heads / config.kv_heads,
            kv_heads: config.kv_heads,
            processors: device.processors()?,
            partials: PARTIAL_BYTES / (config.kv_heads * (config.head_dim + 2) * size_of::<f32>()),
        };
        // Each row can be a tile, and each pair with a partial a split.
        let units = size_of::<Unit>() * (limits.rows + cut.partials / cut.group)
            + size_of::<Combined>() * limits.rows;
        let words = words_per_row * limits.rows + units / size_of::<u32>();
        let pinned = |len| {
            // SAFETY: what is read was written before.
            let memory = unsafe { device.context.alloc_pinned_with_flags(len, 0) };
            memory.map_err(device.failed("allocate a pinned buffer"))
        };
        let logits = {
            // SAFETY: as above.
            let memory =
                unsafe { device.context.alloc_pinned_with_flags(LOGIT_ROWS * config.vocab, 0) };
            memory.map_err(device.failed("allocate a pinned buffer"))?
        };
        let mut loaded = Self {
            products: Products::new(device)?,
            module,
            weights,
            pages,
            tables: allocate(device, "page tables", limits.slots * limits.context.div_ceil(PAGE))?,
            angles: upload(device, &angles)?,
            activations: Activations::new(device, &config, &limits, cut.partials)?,
            cut,
            tiling: Tiling::default(),
            staging: pinned(words)?,
            inputs: allocate(device, "a step's inputs", words)?,
            tokens: pinned(limits.rows)?,
            logits,
            submitted: None,
            threads: Arc::clone(threads),
            device: device.clone(),
            config,
            limits,
        };
        loaded.tune()?;
        Ok(loaded)
    }

    /// Fills all pages with NaN.
    #[cfg(test)]
    pub(crate) fn poison_pages(&mut self) {
        let len = self.pages[0].len();
        for pages in &mut self.pages {
            self.device.stream.memcpy_htod(&vec![bf16::NAN; len], pages).unwrap();
        }
    }

    /// Logits of the first rows of the last step, (rows, vocab).
    #[cfg(test)]
    pub(crate) fn last_logits(&mut self, rows: usize) -> Vec<f32> {
        let stream = Arc::clone(&self.device.stream);
        let list: Vec<u32> = (0..rows as u32).collect();
        let list = stream.clone_htod(&list).unwrap();
        let at = address(&list, &self.device);
        let mut logits = Vec::new();
        for (start, count) in portions(0..rows) {
            self.classify(at + (start * size_of::<u32>()) as u64, count).unwrap();
            let some = self.activations.logits.slice(..count * self.config.vocab);
            logits.extend(stream.clone_dtoh(&some).unwrap());
        }
        logits
    }

    /// Has the device run rows through all layers and pick a token for each sample, and does not wait.
    /// The tokens of a step are taken before the next is submitted.
    pub fn submit(&mut self, rows: &[Row], samples: &[Sample]) -> Result<(), ComputeError> {
        assert!(self.submitted.is_none(), "the tokens of the last step were not taken");
        self.check(rows);
        let ways = Ways::of(samples, LIST_WORDS_PER_ROW * self.limits.rows);
        let inputs = self.send(rows, &ways, &ways.rows(samples))?;
        let count = rows.len() as u32;
        let stride = self.limits.context.div_ceil(PAGE) as u32;
        let tables = Arg::Address(address(&self.tables, &self.device));
        let row_args = Arg::Address(inputs.rows);
        let residual = Arg::Address(address(&self.activations.residual, &self.device));
        let embedding = Arg::Address(address(&self.weights.embedding, &self.device));
        let module = &self.module;
        module.launch(
            &module.bind_pages,
            (count, 1, 1),
            &[row_args, tables, Arg::Number(stride)],
        )?;
        module.launch(&module.embed, (count, 1, 1), &[row_args, embedding, residual])?;
        for layer in 0..self.config.layers {
            self.layer(layer, rows.len(), &inputs)?;
        }
        self.pick(&inputs, &ways)?;
        let samples = samples.to_vec();
        self.submitted = Some(Submitted { samples, ways, picked: inputs.picked });
        Ok(())
    }

    /// Waits for the step that was submitted; gives a token for each of its samples.
    pub fn tokens(&mut self) -> Result<Vec<Generated>, ComputeError> {
        let Submitted { samples, ways, picked } =
            self.submitted.take().expect("a step was submitted");
        let failed = || self.device.failed("finish a step");
        self.device.stream.synchronize().map_err(failed())?;
        let by_device = ways.greedy.len() + ways.drawn.len();
        let tokens = &self.tokens.as_slice().map_err(failed())?[..by_device];
        let mut generated: Vec<Option<Generated>> = vec![None; samples.len()];
        for (index, &token) in ways.greedy.iter().chain(&ways.drawn).zip(tokens) {
            let token = Generated { token, logprob: 0.0, alternatives: Vec::new() };
            generated[*index] = Some(token);
        }
        for (start, count) in portions(by_device..samples.len()) {
            self.classify(picked + (start * size_of::<u32>()) as u64, count)?;
            let hosted = &ways.hosted[start - by_device..][..count];
            self.pick_on_host(hosted, &samples, &mut generated)?;
        }
        Ok(generated.into_iter().map(|token| token.expect("every sample went some way")).collect())
    }

    fn check(&self, rows: &[Row]) {
        assert!(rows.len() <= self.limits.rows, "{} rows of {}", rows.len(), self.limits.rows);
        for row in rows {
            let fits = (row.slot as usize) < self.limits.slots
                && (row.page as usize) < self.limits.pages
                && (row.position as usize) < self.limits.context
                && (row.token as usize) < self.config.vocab;
            assert!(fits, "row {row:?} is outside what the device was given");
        }
    }

    /// Sends what a step needs to know, in one copy.
    fn send(&mut self, rows: &[Row], ways: &Ways, picked: &[u32]) -> Result<Inputs, ComputeError> {
        self.tiling = Tiling::of(rows, &self.cut);
        let failed = || self.device.failed("send a step to it");
        let staging = self.staging.as_mut_slice().map_err(failed())?;
        let mut used = 0;
        let mut place = |words: &mut dyn Iterator<Item = u32>| {
            let start = used;
            for word in words {
                staging[used] = word;
                used += 1;
            }
            (start * size_of::<u32>()) as u64
        };
        let base = address(&self.inputs, &self.device);
        let words = |row: &Row| [row.slot, row.position, row.page, row.token];
        let inputs = Inputs {
            rows: base + place(&mut rows.iter().flat_map(words)),
            many: base + place(&mut bytemuck::cast_slice(&self.tiling.many).iter().copied()),
            few: base + place(&mut bytemuck::cast_slice(&self.tiling.few).iter().copied()),
            combined: base
                + place(&mut bytemuck::cast_slice(&self.tiling.combined).iter().copied()),
            draws: base + place(&mut bytemuck::cast_slice(&ways.draws).iter().copied()),
            picked: base + place(&mut picked.iter().copied()),
            lists: base + place(&mut ways.lists.iter().copied()),
        };
        let mut into = self.inputs.slice_mut(..used);
        self.device.stream.memcpy_htod(&staging[..used], &mut into).map_err(failed())?;
        Ok(inputs)
    }

    fn layer(&mut self, layer: usize, rows: usize, inputs: &Inputs) -> Result<(), ComputeError> {
        let device = self.device.clone();
        let at = |slice: &CudaSlice<bf16>| address(slice, &device);
        let float = |slice: &CudaSlice<f32>| address(slice, &device);
        let optional = |slice: &Option<CudaSlice<f32>>| slice.as_ref().map_or(0, float);
        let [qkv, output, gate_up, down] = shapes(&self.config);
        let count = rows as u32;
        let weights = &self.weights.layers[layer];
        let act = &self.activations;
        let (residual, normed, wide) = (float(&act.residual), at(&act.normed), at(&act.wide));
        let (query, attended, activated) = (at(&act.query), at(&act.attended), at(&act.activated));
        let operands = |weights, inputs, outputs| Operands { weights, inputs, outputs };
        let norm = |weight: u64| [residual, 0, weight, normed].map(Arg::Address);
        let module = &self.module;

        module.launch(&module.norm_rows, (count, 1, 1), &norm(float(&weights.attention_norm)))?;
        self.products.multiply(qkv, rows, operands(at(&weights.qkv), normed, wide))?;
        let bias = optional(&weights.qkv_bias);
        let head_norms = optional(&weights.head_norms);
        let pages = at(&self.pages[layer]);
        let args = [inputs.rows, wide, bias, head_norms, float(&self.angles), query, pages];
        module.launch(&module.rotate, (count, ROTATE_BLOCKS, 1), &args.map(Arg::Address))?;
        self.attend(pages, inputs)?;
        self.products.multiply(output, rows, operands(at(&weights.output), attended, residual))?;

        module.launch(
            &module.norm_rows,
            (count, 1, 1),
            &norm(float(&weights.feed_forward_norm)),
        )?;
        self.products.multiply(gate_up, rows, operands(at(&weights.gate_up), normed, wide))?;
        let columns = self.config.feed_forward.div_ceil(8 * 256) as u32;
        module.launch(
            &module.activate,
            (columns, count, 1),
            &[wide, activated].map(Arg::Address),
        )?;
        self.products.multiply(down, rows, operands(at(&weights.down), activated, residual))
    }

    fn attend(&self, pages: u64, inputs: &Inputs) -> Result<(), ComputeError> {
        let (module, act) = (&self.module, &self.activations);
        let address_of = |slice: &CudaSlice<bf16>| address(slice, &self.device);
        let float = |slice: &CudaSlice<f32>| address(slice, &self.device);
        let kv_heads = self.config.kv_heads as u32;
        let stride = self.limits.context.div_ceil(PAGE) as u32;
        let (attended, out, sums) =
            (address_of(&act.attended), float(&act.partial_out), float(&act.partial_sums));
        let tables = address(&self.tables, &self.device);
        let before = [address_of(&act.query), pages, tables].map(Arg::Address);
        let after = [attended, out, sums].map(Arg::Address);
        let shared = [&before[..], &[Arg::Number(stride)], &after].concat();

        let count = self.tiling.many.len() as u32;
        let args = [&[Arg::Address(inputs.many), Arg::Number(count)], &shared[..]].concat();
        let blocks = (count * kv_heads).min(module.many_blocks);
        module.launch(&module.attend_many, (blocks, 1, 1), &args)?;
        let args = [&[Arg::Address(inputs.few)], &shared[..]].concat();
        let blocks = self.tiling.few.len() as u32 * kv_heads;
        module.launch(&module.attend_few, (blocks, 1, 1), &args)?;
        let args = [inputs.combined, out, sums, attended].map(Arg::Address);
        let grid = (self.tiling.combined.len() as u32, kv_heads, 1);
        module.launch(&module.combine, grid, &args)
    }

    /// Logits of the rows whose token the device picks, some at a time; and the tokens.
    fn pick(&mut self, inputs: &Inputs, ways: &Ways) -> Result<(), ComputeError> {
        let (greedy, drawn) = (ways.greedy.len(), ways.drawn.len());
        let word = size_of::<u32>() as u64;
        let logits = address(&self.activations.logits, &self.device);
        let tokens = address(&self.activations.tokens, &self.device);
        for (start, count) in portions(0..greedy) {
            self.classify(inputs.picked + start as u64 * word, count)?;
            let args = [logits, tokens + start as u64 * word].map(Arg::Address);
            self.module.launch(&self.module.argmax, (count as u32, 1, 1), &args)?;
        }
        for (start, count) in portions(greedy..greedy + drawn) {
            self.classify(inputs.picked + start as u64 * word, count)?;
            let draws = inputs.draws + ((start - greedy) * size_of::<Draw>()) as u64;
            let args = [draws, inputs.lists, logits, tokens + start as u64 * word];
            self.module.launch(
                &self.module.sample,
                (count as u32, 1, 1),
                &args.map(Arg::Address),
            )?;
        }
        let failed = || self.device.failed("finish a step");
        let tokens = &mut self.tokens.as_mut_slice().map_err(failed())?[..greedy + drawn];
        let from = self.activations.tokens.slice(..greedy + drawn);
        self.device.stream.memcpy_dtoh(&from, tokens).map_err(failed())
    }

    /// Takes the logits that were just made, and samples from them here.
    fn pick_on_host(
        &mut self,
        hosted: &[usize],
        samples: &[Sample],
        generated: &mut [Option<Generated>],
    ) -> Result<(), ComputeError> {
        let failed = || self.device.failed("take logits from it");
        let values = hosted.len() * self.config.vocab;
        let logits = &mut self.logits.as_mut_slice().map_err(failed())?[..values];
        let stream = &self.device.stream;
        let from = self.activations.logits.slice(..values);
        stream.memcpy_dtoh(&from, logits).map_err(failed())?;
        stream.synchronize().map_err(failed())?;
        let rows = logits.chunks_exact_mut(self.config.vocab);
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

    /// Logits of `count` rows that a list on the device names.
    fn classify(&mut self, rows: u64, count: usize) -> Result<(), ComputeError> {
        let device = &self.device;
        let act = &self.activations;
        let (residual, normed) = (address(&act.residual, device), address(&act.normed, device));
        let norm = address(&self.weights.final_norm, device);
        let args = [residual, rows, norm, normed].map(Arg::Address);
        self.module.launch(&self.module.norm_rows, (count as u32, 1, 1), &args)?;
        let matrix = self.weights.classifier.as_ref().unwrap_or(&self.weights.embedding);
        let operands = Operands {
            weights: address(matrix, device),
            inputs: normed,
            outputs: address(&act.logits, device),
        };
        self.products.multiply(classifier(&self.config), count, operands)
    }

    /// Chooses the products' algorithms, on buffers that hold nothing yet.
    fn tune(&mut self) -> Result<(), ComputeError> {
        let device = self.device.clone();
        let at = |slice: &CudaSlice<bf16>| address(slice, &device);
        let act = &self.activations;
        let (normed, wide, attended, activated) =
            (at(&act.normed), at(&act.wide), at(&act.attended), at(&act.activated));
        let (residual, logits) = (address(&act.residual, &device), address(&act.logits, &device));
        let layer = &self.weights.layers[0];
        let classify = self.weights.classifier.as_ref().unwrap_or(&self.weights.embedding);
        let [qkv, output, gate_up, down] = shapes(&self.config);
        let rows = self.limits.rows;
        let cases = [
            (qkv, rows, at(&layer.qkv), normed, wide),
            (output, rows, at(&layer.output), attended, residual),
            (gate_up, rows, at(&layer.gate_up), normed, wide),
            (down, rows, at(&layer.down), activated, residual),
            (classifier(&self.config), rows.min(LOGIT_ROWS), at(classify), normed, logits),
        ];
        for (shape, rows, weights, inputs, outputs) in cases {
            self.products.tune(shape, rows, Operands { weights, inputs, outputs })?;
        }
        Ok(())
    }
}

impl Activations {
    fn new(
        device: &CudaDevice,
        config: &ModelConfig,
        limits: &StepLimits,
        partials: usize,
    ) -> Result<Self, ComputeError> {
        let rows = limits.rows;
        let wide = config.qkv_width().max(2 * config.feed_forward);
        let activations = |width| allocate(device, "activations", rows * width);
        let pairs = partials * config.kv_heads;
        Ok(Self {
            residual: allocate(device, "the residual", rows * config.hidden)?,
            normed: allocate(device, "activations", rows.max(LOGIT_ROWS) * config.hidden)?,
            wide: activations(wide)?,
            query: activations(config.query_width())?,
            attended: activations(config.query_width())?,
            activated: activations(config.feed_forward)?,
            logits: allocate(device, "logits", LOGIT_ROWS * config.vocab)?,
            tokens: allocate(device, "tokens", rows)?,
            partial_out: allocate(device, "partial attention", pairs * config.head_dim)?,
            partial_sums: allocate(device, "partial attention", 2 * pairs)?,
        })
    }
}

/// A range in portions of [`LOGIT_ROWS`] at most: where each starts, and its length.
fn portions(range: Range<usize>) -> impl Iterator<Item = (usize, usize)> {
    let end = range.end;
    range.step_by(LOGIT_ROWS).map(move |start| (start, LOGIT_ROWS.min(end - start)))
}

/// The products of a layer: q/k/v, output, gate and up, down.
fn shapes(config: &ModelConfig) -> [Shape; 4] {
    let shape = |outputs, inputs, into| Shape { outputs, inputs, into };
    let (hidden, feed_forward) = (config.hidden, config.feed_forward);
    [
        shape(config.qkv_width(), hidden, Into::Bf16),
        shape(hidden, config.query_width(), Into::AddF32),
        shape(2 * feed_forward, hidden, Into::Bf16),
        shape(hidden, feed_forward, Into::AddF32),
    ]
}

fn classifier(config: &ModelConfig) -> Shape {
    Shape { outputs: config.vocab, inputs: config.hidden, into: Into::F32 }
}

/// Fails for shapes whose rows are not aligned for vector loads.
fn check_alignment(config: &ModelConfig) -> Result<(), ComputeError> {
    let widths = [("hidden", config.hidden), ("feed_forward", config.feed_forward)];
    for (name, width) in widths {
        if !width.is_multiple_of(8) {
            let what = format!("{name} {width} is not a multiple of 8, which a GPU needs");
            return Err(ComputeError::Shape { what });
        }
    }
    Ok(())
}
