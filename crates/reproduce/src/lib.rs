//! The paper's evaluation, regenerated: ours beside theirs wherever the text states a number.

#![forbid(unsafe_code)]

mod baselines;
mod batches;
mod calibration;
mod comparison;
mod contradictions;
mod costs;
mod error;
mod examples;
mod figures;
mod page;
mod plots;
mod prototype;
mod sweeps;
#[cfg(test)]
mod tests;
mod throughput;
mod trials;
mod waiting;

use std::path::Path;

pub use calibration::Testbed;
pub use comparison::{Comparison, Section, Standing, Statement, Table, Test};
pub use error::ReproduceError;

/// Everything the reproduction computes.
#[derive(Clone, Debug)]
pub struct Reproduction {
    /// The parts of the paper, in the page's order.
    pub sections: Vec<Section>,
    /// What was tried besides.
    pub trials: Vec<Section>,
    /// Where the paper contradicts itself.
    pub contradictions: Section,
    testbed: Testbed,
    runs: throughput::EndToEnd,
    traffic: Vec<throughput::TrafficRow>,
    costs: Vec<costs::CostPoint>,
    pairings: Vec<costs::Pairing>,
    latencies: Vec<sweeps::LatencyPoint>,
    lengths: Vec<sweeps::LengthPoint>,
}

impl Reproduction {
    /// Calibrates, simulates and compares.
    pub fn run() -> Result<Self, ReproduceError> {
        let testbed = Testbed::calibrated()?;
        let runs = throughput::EndToEnd::simulated(&testbed);
        let traffic = throughput::traffic_rows(&testbed);
        let costs = costs::cost_points(&testbed);
        let pairings = costs::pairings(&testbed);
        let latencies = sweeps::latency_points(&testbed);
        let lengths = sweeps::length_points(&testbed);
        let sections = vec![
            examples::worked_examples(),
            examples::kernel_times(&testbed),
            examples::tier2_overhead(&testbed),
            batches::batches(&testbed),
            costs::motivation(&testbed, &costs),
            throughput::end_to_end(&runs),
            baselines::baselines(&testbed),
            throughput::inter_tier_traffic(&testbed, &traffic),
            costs::alternatives(&pairings),
            sweeps::latency(&testbed, &latencies),
            sweeps::lengths(&lengths),
            waiting::latencies(&runs, &waiting::Passes::of_the_workload()?),
        ];
        let trials = trials::sections(&testbed, &trials::Trials::run(&testbed)?);
        let contradictions = contradictions::contradictions(&testbed);
        Ok(Self {
            sections,
            trials,
            contradictions,
            testbed,
            runs,
            traffic,
            costs,
            pairings,
            latencies,
            lengths,
        })
    }

    /// All comparisons.
    pub fn comparisons(&self) -> impl Iterator<Item = &Comparison> {
        self.sections.iter().chain(&self.trials).flat_map(|section| &section.comparisons)
    }

    /// All statements.
    pub fn statements(&self) -> impl Iterator<Item = &Statement> {
        self.sections.iter().flat_map(|section| &section.statements)
    }

    /// The reproduction for a terminal.
    pub fn render(&self) -> String {
        page::render(self)
    }

    /// Writes `reproduction.md` and its plots in `reproduction/` into `folder`.
    pub fn write(&self, folder: &Path) -> Result<(), ReproduceError> {
        let plots = folder.join("reproduction");
        let write = |path: &Path, text: &str| {
            std::fs::write(path, text).map_err(ReproduceError::write(path))
        };
        std::fs::create_dir_all(&plots).map_err(ReproduceError::write(&plots))?;
        for (name, picture) in self.pictures()? {
            write(&plots.join(format!("{name}.svg")), &picture)?;
        }
        write(&folder.join("reproduction.md"), &page::markdown(self))
    }

    /// The plots by name, as SVG.
    fn pictures(&self) -> Result<Vec<(&'static str, String)>, ReproduceError> {
        let mut pictures = vec![
            figures::profile(&self.testbed)?,
            figures::end_to_end(&self.runs)?,
            figures::time_per_token(&self.runs)?,
            figures::traffic(&self.traffic)?,
            figures::motivation(&self.costs)?,
            figures::latency(&self.latencies)?,
        ];
        pictures.extend(figures::alternatives(&self.pairings)?);
        pictures.extend(figures::lengths(&self.lengths)?);
        Ok(pictures)
    }
}
