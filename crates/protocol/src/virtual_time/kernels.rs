//! The simulated kernels: the hash model over the slab and the pages of simulated nodes.

use super::model;
use crate::driver::Compute;
use crate::tier1::{Stage, Tier1Work};
use crate::tier2::Tier2Work;
use glinthawk_flight::{Generated, ShardId};
use std::collections::HashMap;
use std::convert::Infallible;

/// A value for each row.
pub(super) type Values = Vec<u64>;

/// A slice's layers.
pub(super) struct Weights {
    pub first_layer: u32,
    pub layers: u32,
    /// Whether the slice classifies.
    pub last: bool,
    /// The residuals of each shard.
    pub slab: HashMap<ShardId, Values>,
}

impl Compute<Tier1Work<Values>> for Weights {
    type Error = Infallible;

    fn start(&mut self, work: &mut Tier1Work<Values>) -> Result<(), Infallible> {
        for task in &mut work.tasks {
            let arrived = std::mem::take(&mut task.payload);
            let slab = self.slab.entry(task.launch.step.shard).or_default();
            match work.stage {
                Stage::Enter if self.first_layer == 0 => {
                    *slab = task.launch.rows.iter().map(|row| model::embed(row.token)).collect();
                }
                Stage::Enter => *slab = arrived,
                Stage::Middle(_) | Stage::Exit => {
                    assert_eq!(arrived.len(), slab.len(), "{:?} was not attended", task.launch);
                    let layer = match work.stage {
                        Stage::Middle(layer) => layer,
                        _ => self.layers - 1,
                    };
                    for (residual, attended) in slab.iter_mut().zip(arrived) {
                        *residual = model::post(*residual, attended, self.first_layer + layer);
                    }
                }
            }
            if self.last && work.stage == Stage::Exit {
                let tokens = task.launch.samples.iter().map(|sample| Generated {
                    token: model::pick(slab[sample.row as usize], sample),
                    logprob: 0.0,
                    alternatives: Vec::new(),
                });
                task.tokens = Some(tokens.collect());
            } else {
                task.payload = slab.clone();
            }
        }
        Ok(())
    }
}

/// A lane's pages on a slice.
pub(super) struct Contexts {
    pub pages: u32,
    pub page_positions: u32,
    /// (layer, page, offset) → value
    pub store: Values,
    /// The pages of each slot.
    pub tables: Vec<Vec<u32>>,
}

impl Compute<Tier2Work<Values>> for Contexts {
    type Error = Infallible;

    fn start(&mut self, work: &mut Tier2Work<Values>) -> Result<(), Infallible> {
        let Tier2Work { attend, payload } = work;
        let page_positions = self.page_positions;
        let place = |page: u32, offset: u32| {
            ((attend.layer * self.pages + page) * page_positions + offset) as usize
        };
        for row in attend.shared.iter().chain(&attend.rows) {
            let table = &mut self.tables[row.slot as usize];
            table.truncate((row.position / page_positions) as usize);
            table.push(row.page);
        }
        for (row, input) in attend.rows.iter().zip(&*payload) {
            self.store[place(row.page, row.position % page_positions)] = *input;
        }
        let output = attend.rows.iter().map(|row| {
            let pages = &self.tables[row.slot as usize];
            let positions = 0..=row.position;
            model::attend(positions.map(|position| {
                let page = pages[(position / page_positions) as usize];
                self.store[place(page, position % page_positions)]
            }))
        });
        *payload = output.collect();
        Ok(())
    }
}
