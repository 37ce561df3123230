//! What `glinthawk bench planner` times: events per second, and a cluster far larger than any available
//! one.

use crate::calculus::{NetworkLink, RowTraffic};
use crate::catalogue::Catalogue;
use crate::cluster::Cluster;
use crate::configuration::{Configuration, Contexts, Disturbance, Group, Rules, Slice};
use crate::error::PlanError;
use crate::kernels::KernelTimes;
use crate::report::{SettledReport, simulate};
use crate::search::{Found, search};
use crate::shape::Shape;
use crate::space::{PlannedJob, Settings, Space};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

const PAPER_CLUSTER: &str = include_str!("../data/clusters/t4-epyc.toml");

/// A timed simulation.
#[derive(Clone, Debug)]
pub struct Timed {
    /// What it simulated.
    pub name: String,
    /// Its result.
    pub report: SettledReport,
    /// Seconds it took.
    pub seconds: f64,
}

impl Timed {
    /// Events processed per second on one core.
    pub fn events_per_second(&self) -> f64 {
        self.report.events as f64 / self.seconds
    }

    /// One line for a terminal.
    pub fn render(&self) -> String {
        format!(
            "{}: {} events in {:.2} s, {:.1} million events/s; {:.0} tokens/s simulated",
            self.name,
            self.report.events,
            self.seconds,
            self.events_per_second() / 1e6,
            self.report.tokens_per_second
        )
    }
}

/// Times one simulation.
pub fn timed(name: &str, configuration: &Configuration) -> Timed {
    let start = Instant::now();
    let report = simulate(configuration);
    Timed { name: name.to_owned(), report, seconds: start.elapsed().as_secs_f64() }
}

/// `tier1` T4 nodes with one layer each and `tier2` CPU nodes per T4, every one of them simulated on its own with
/// jitter and stragglers.
pub fn large_cluster(tier1: usize, tier2: usize, flights: usize) -> Configuration {
    let shape = Shape {
        name: format!("llama2-70b with {tier1} layers"),
        layers: tier1,
        ..Shape::llama2_70b()
    };
    let catalogue = Catalogue::built_in();
    let kernels = |name: &str| {
        Arc::new(KernelTimes::analytic(
            catalogue.get(name).expect("the catalogue has the paper's devices"),
            &shape,
        ))
    };
    let (t4, cpu) = (kernels("t4"), kernels("epyc-7v12-16"));
    let slice = Slice {
        layers: 1,
        tier1: t4,
        local_rows: 0,
        tier2: vec![Group { kernels: cpu, nodes: tier2, rows: 16 }],
    };
    Configuration {
        slices: vec![slice; tier1],
        shape,
        flights,
        contexts: Contexts::Fixed(2048.0),
        hop: NetworkLink::new(2.0, 8.0),
        inter: NetworkLink::new(2.0, 8.0),
        tier2_bandwidth: 1e9,
        traffic: RowTraffic::ResidualHome,
        rules: Rules::Full,
        disturbance: Disturbance { jitter: 0.05, straggler_share: 0.01, straggler_extra: 0.5 },
        seed: 1,
    }
}

/// The paper's search: 80 T4 and 80 CPU nodes, batches to 4,096, for throughput; what it found and its seconds.
pub fn paper_search() -> Result<(Found, f64), PlanError> {
    let shape = Shape::llama2_70b();
    let start = Instant::now();
    let cluster = Cluster::parse("t4-epyc.toml", PAPER_CLUSTER, Path::new("."), &shape)?;
    let settings = Settings {
        rules: Rules::Paper,
        traffic: RowTraffic::StateObject,
        local_shares: vec![0.0],
        ..Settings::default()
    };
    let space = Space::new(cluster, PlannedJob::longest(&shape, 2048.0, 3.0), settings);
    let found = search(&space, true)?;
    Ok((found, start.elapsed().as_secs_f64()))
}
