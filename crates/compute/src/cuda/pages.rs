//! Contexts on a device: pages, the tables that name them, and attention over them.

use super::PAGE;
use super::attention::{Combined, Cut, Member, Tiling, Unit};
use super::device::CudaDevice;
use super::module::{Arg, Module};
use super::staged::Staged;
use super::tables::Tables;
use super::weights::{address, allocate};
use crate::source::ContextSpec;
use crate::{ComputeError, ContextType};
use cudarc::driver::CudaSlice;
use glinthawk_flight::Row;
use glinthawk_model::ModelConfig;
use half::bf16;
use std::sync::Arc;

/// Memory for the partial results of attention.
pub(super) const PARTIAL_BYTES: usize = 64 << 20;

/// Words of a pair's partial sums: each of four lanes has a maximum and a sum.
const SUM_WORDS: usize = 8;

/// Pages of every layer, and what attention needs beside them.
pub(super) struct Pages {
    device: CudaDevice,
    module: Arc<Module>,
    kv_heads: usize,
    limits: ContextSpec,
    /// For each layer (pages, 2, kv_heads, 16, head_dim).
    layers: Vec<CudaSlice<bf16>>,
    /// (slots, pages of the longest context)
    tables: CudaSlice<u32>,
    /// The tables as the device has them once it has bound all that was staged.
    known: Tables,
    /// (rows, query_width)
    query: CudaSlice<bf16>,
    /// (partials, kv_heads, head_dim)
    partial_out: CudaSlice<f32>,
    /// (partials, kv_heads, 4, 2)
    partial_sums: CudaSlice<f32>,
    cut: Cut,
    tiling: Tiling,
    /// What it is of: every layer of a step comes with the same rows.
    tiled: (Vec<Row>, u64),
}

/// Where a batch's rows and the units of its attention stand on the device.
pub(super) struct Cuts {
    pub(super) rows: u64,
    many: u64,
    shared: u64,
    members: u64,
    few: u64,
    combined: u64,
}

fn row_words(row: &Row) -> [u32; 4] {
    [row.slot, row.position, row.page, row.token]
}

impl Pages {
    pub(super) fn new(
        device: &CudaDevice,
        module: &Arc<Module>,
        config: &ModelConfig,
        limits: &ContextSpec,
    ) -> Result<Self, ComputeError> {
        if limits.context_type != ContextType::Bf16 {
            let what = format!("{} contexts on a GPU", limits.context_type);
            return Err(ComputeError::Shape { what });
        }
        limits.check_pages(&[PAGE as u32], "a GPU")?;
        let layer = limits.pages * 2 * PAGE * config.kv_width();
        let layers = (0..limits.layers).map(|_| allocate(device, "contexts", layer));
        let cut = Cut {
            group: config.heads / config.kv_heads,
            kv_heads: config.kv_heads,
            processors: device.processors()?,
            shares: config.sliding_window.is_none(),
            halves: module.hopper && config.sliding_window.is_none(),
            partials: PARTIAL_BYTES
                / (config.kv_heads * (config.head_dim + SUM_WORDS) * size_of::<f32>()),
        };
        let pairs = cut.partials * config.kv_heads;
        let known = Tables::new(limits.slots, limits.context_max);
        let query = limits.batch_rows * config.query_width();
        Ok(Self {
            layers: layers.collect::<Result<_, _>>()?,
            tables: allocate(device, "page tables", limits.slots * known.width())?,
            known,
            query: allocate(device, "activations", query)?,
            partial_out: allocate(device, "partial attention", pairs * config.head_dim)?,
            partial_sums: allocate(device, "partial attention", SUM_WORDS * pairs)?,
            cut,
            tiling: Tiling::default(),
            tiled: (Vec::new(), 0),
            device: device.clone(),
            module: Arc::clone(module),
            kv_heads: config.kv_heads,
            limits: limits.clone(),
        })
    }

    /// Words that [`Self::stage`] places at most.
    pub(super) fn words_max(&self) -> usize {
        // Each row can be a tile, and each pair with a partial a split, of its own or shared.
        let rows = self.limits.batch_rows;
        let units = size_of::<Unit>() * (rows + 2 * self.cut.partials / self.cut.group)
            + (size_of::<Combined>() + size_of::<Member>()) * rows;
        rows * size_of::<Row>() / size_of::<u32>() + units / size_of::<u32>()
    }

    /// Cuts up the attention of rows, and places both among what is sent.
    pub(super) fn stage(
        &mut self,
        rows: &[Row],
        staged: &mut Staged,
    ) -> Result<Cuts, ComputeError> {
        assert!(rows.len() <= self.limits.batch_rows, "{} rows are too many", rows.len());
        self.check(rows);
        self.enter(rows);
        let version = self.known.version();
        if (&self.tiled.0[..], self.tiled.1) != (rows, version) {
            self.tiling = Tiling::of(rows, &self.known, &self.cut);
            self.tiled = (rows.to_vec(), version);
        }
        let Tiling { many, shared, members, few, combined } = &self.tiling;
        Ok(Cuts {
            rows: staged.place(rows.iter().flat_map(row_words))?,
            many: staged.place(bytemuck::cast_slice(many).iter().copied())?,
            shared: staged.place(bytemuck::cast_slice(shared).iter().copied())?,
            members: staged.place(bytemuck::cast_slice(members).iter().copied())?,
            few: staged.place(bytemuck::cast_slice(few).iter().copied())?,
            combined: staged.place(bytemuck::cast_slice(combined).iter().copied())?,
        })
    }

    /// Places rows whose pages are to be bound among what is sent.
    pub(super) fn stage_bound(
        &mut self,
        rows: &[Row],
        staged: &mut Staged,
    ) -> Result<u64, ComputeError> {
        self.check(rows);
        self.enter(rows);
        staged.place(rows.iter().flat_map(row_words))
    }

    fn check(&self, rows: &[Row]) {
        let limits = &self.limits;
        for row in rows {
            let fits = (row.slot as usize) < limits.slots
                && (row.page as usize) < limits.pages
                && (row.position as usize) < limits.context_max;
            assert!(fits, "row {row:?} is outside what the device was given");
        }
    }

    /// Notes which pages rows are stored in.
    fn enter(&mut self, rows: &[Row]) {
        for row in rows {
            self.known.enter(row.slot, row.position as usize / PAGE, row.page);
        }
    }

    /// The tables as the host knows them.
    pub(super) fn known(&mut self) -> &mut Tables {
        &mut self.known
    }

    /// Units of pages that rows of the last step shared.
    #[cfg(test)]
    pub(super) fn shared_units(&self) -> usize {
        self.tiling.shared.len()
    }

    /// Enters the pages of `count` rows into their slots' tables.
    pub(super) fn bind(&self, rows: u64, count: usize) -> Result<(), ComputeError> {
        let tables = address(&self.tables, &self.device);
        let args = [Arg::Address(rows), Arg::Address(tables), self.table_width()];
        self.module.launch(&self.module.bind_pages, (count as u32, 1, 1), &args)
    }

    fn table_width(&self) -> Arg {
        Arg::Number(self.known.width() as u32)
    }

    /// Where a layer's pages stand, and where attention finds its queries.
    pub(super) fn places(&self, layer: usize) -> (u64, u64) {
        (address(&self.layers[layer], &self.device), address(&self.query, &self.device))
    }

    /// Stores the rotated k and v of the rows that were staged last, and takes their q.
    pub(super) fn append(
        &self,
        layer: usize,
        cuts: &Cuts,
        count: usize,
        qkv: u64,
    ) -> Result<(), ComputeError> {
        let (pages, query) = self.places(layer);
        let args = [cuts.rows, qkv, query, pages].map(Arg::Address);
        self.module.launch(&self.module.append, (count as u32, 1, 1), &args)
    }

    /// Attends the rows that were staged last, whose queries, keys and values are in their places.
    pub(super) fn attend(
        &self,
        layer: usize,
        cuts: &Cuts,
        attended: u64,
    ) -> Result<(), ComputeError> {
        let module = &self.module;
        let kv_heads = self.kv_heads as u32;
        let (pages, query) = self.places(layer);
        let float = |slice: &CudaSlice<f32>| address(slice, &self.device);
        let (out, sums) = (float(&self.partial_out), float(&self.partial_sums));
        let tables = address(&self.tables, &self.device);
        let before = [query, pages, tables].map(Arg::Address);
        let places = |into| {
            let after = [into, out, sums].map(Arg::Address);
            [&before[..], &[self.table_width()], &after].concat()
        };
        let many = |kernel, units, count: usize, into| {
            let units = [Arg::Address(units), Arg::Number(count as u32)];
            let blocks = (count as u32 * kv_heads).min(module.many_blocks);
            module.launch(kernel, (blocks, 1, 1), &[&units, &places(into)[..]].concat())
        };
        let Tiling { many: whole, shared, .. } = &self.tiling;
        many(&module.attend_many, cuts.many, whole.len(), attended)?;
        many(&module.attend_shared, cuts.shared, shared.len(), cuts.members)?;
        let args = [&[Arg::Address(cuts.few)], &places(attended)[..]].concat();
        let blocks = self.tiling.few.len() as u32 * kv_heads;
        module.attend_few(blocks, &args)?;
        let args = [cuts.combined, out, sums, attended].map(Arg::Address);
        let grid = (self.tiling.combined.len() as u32, kv_heads, 1);
        module.launch(&module.combine, grid, &args)
    }

    /// Fills all pages with NaN.
    #[cfg(test)]
    pub(super) fn poison(&mut self) {
        for pages in &mut self.layers {
            let nothing = vec![bf16::NAN; pages.len()];
            self.device.stream.memcpy_htod(&nothing, pages).unwrap();
        }
    }
}
