//! The plan file: what `glinthawk plan` writes and `glinthawk run --plan` executes.

use crate::bound::Bottleneck;
use crate::cluster::Cluster;
use crate::error::{PlanError, read_text, write_text};
use crate::forecast::{Deployment, Place};
use crate::shape::{GIB, Shape};
use glinthawk_protocol::{PAGE_POSITIONS, lane_pages};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The version of the file format this code reads and writes.
pub const PLAN_VERSION: u32 = 2;

/// Context memory of the nodes of one tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContextBudget {
    /// Bytes for contexts on each node.
    pub bytes: u64,
    /// Pages (32 positions of one layer) that fit into them.
    pub pages: u64,
    /// Prompts expected to be seated at once.
    pub seats: usize,
}

/// What the forecast of the job says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanForecast {
    /// Prompt and generated tokens per second, over the whole job.
    pub tokens_per_second: f64,
    /// Seconds from one token of a prompt to its next, on average.
    pub seconds_per_token: f64,
    /// What limits throughput.
    pub bottleneck: Bottleneck,
    /// Seconds from the job's first prompt to its last token.
    pub job_seconds: f64,
    /// Dollars for it, if the rent is known.
    pub job_usd: Option<f64>,
    /// Where the kernel times come from, Tier 1 first.
    pub kernels: Vec<String>,
}

/// A plan: (K, K', B), flights, chunk, budgets, and who hosts what.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// File format version.
    pub version: u32,
    /// The model.
    pub model: String,
    /// Tier-1 nodes (K).
    pub tier1: usize,
    /// Tier-2 nodes per Tier-1 node (K'); 0 is single-tier.
    pub tier2: usize,
    /// Which `[[tier2]]` of the cluster file the Tier-2 nodes are, counted from 0.
    pub pool: usize,
    /// Rows per Tier-2 node and flight (B); 0 in a single tier.
    pub batch: usize,
    /// Rows per flight that attend on Tier 1 itself: all in a single tier, else none or as many as on a Tier-2 node.
    pub local_rows: usize,
    /// Flights in the air.
    pub flights: usize,
    /// Input tokens of a prompt that go in one step.
    pub chunk: usize,
    /// Longest context in tokens.
    pub max_context: usize,
    /// Layers of each slice, in order.
    pub slices: Vec<usize>,
    /// Context memory of each Tier-1 node.
    pub tier1_context: ContextBudget,
    /// Context memory of each Tier-2 node.
    pub tier2_context: ContextBudget,
    /// What to expect.
    pub forecast: PlanForecast,
}

impl Plan {
    /// Reads and checks a plan.
    pub fn read(path: &Path) -> Result<Self, PlanError> {
        Self::parse(&path.display().to_string(), &read_text(path)?)
    }

    /// Parses and checks a plan; `path` is for messages.
    pub fn parse(path: &str, text: &str) -> Result<Self, PlanError> {
        let plan: Self = toml::from_str(text).map_err(|error| PlanError::Syntax {
            path: path.to_owned(),
            message: error.to_string(),
        })?;
        plan.check(path)?;
        Ok(plan)
    }

    /// The plan as TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a plan is plain data")
    }

    /// Writes the plan as TOML.
    pub fn write(&self, path: &Path) -> Result<(), PlanError> {
        write_text(path, &self.to_toml())
    }

    /// Rows of a Tier-1 batch.
    pub fn rows(&self) -> usize {
        self.tier2 * self.batch + self.local_rows
    }

    /// Rejects a plan for a model of another depth, naming the field.
    pub fn check_layers(&self, path: &str, layers: usize) -> Result<(), PlanError> {
        let planned: usize = self.slices.iter().sum();
        if planned == layers {
            return Ok(());
        }
        Err(PlanError::field(
            path,
            "slices",
            format!("hold {planned} layers, the model has {layers}"),
        ))
    }

    /// The plan on its cluster, as a forecast sees it; `path` is for messages.
    pub fn deployment(
        &self,
        path: &str,
        cluster: &Cluster,
        shape: &Shape,
    ) -> Result<Deployment, PlanError> {
        let wrong = |field: &str, problem: String| PlanError::field(path, field, problem);
        self.check_layers(path, shape.layers)?;
        let number = |field: &str, value: usize| {
            u32::try_from(value).map_err(|_| wrong(field, format!("{value} is too many")))
        };
        if self.tier1 > cluster.tier1.nodes {
            let problem = format!("is {}, the cluster has {}", self.tier1, cluster.tier1.nodes);
            return Err(wrong("tier1", problem));
        }
        let pool = match cluster.tier2.get(self.pool) {
            Some(pool) => pool,
            None if self.tier2 == 0 => &cluster.tier1,
            None => {
                let problem = format!("is {}, the cluster has {}", self.pool, cluster.tier2.len());
                return Err(wrong("pool", problem));
            }
        };
        if self.tier2 > 0 && self.tier1 * self.tier2 > pool.nodes {
            let (needed, nodes) = (self.tier1 * self.tier2, pool.nodes);
            let problem = format!("needs {needed} Tier-2 nodes in all, the cluster has {nodes}");
            return Err(wrong("tier2", problem));
        }
        let local_lane = self.local_rows > 0;
        let context = if self.tier2 == 0 { &self.tier1_context } else { &self.tier2_context };
        for (index, &layers) in self.slices.iter().enumerate() {
            let weights = shape.slice_bytes(layers, index == 0, index + 1 == self.tier1);
            let contexts = if local_lane { context.bytes as f64 } else { 0.0 };
            // Bytes in the plan are whole ones.
            if weights + contexts > cluster.tier1.memory + 1.0 {
                let (needed, memory) = ((weights + contexts) / GIB, cluster.tier1.memory / GIB);
                let problem = format!(
                    "slice {index} needs {needed:.1} GiB with its contexts, a node has {memory:.1} GiB"
                );
                return Err(wrong("slices", problem));
            }
        }
        let batch = if self.tier2 == 0 { self.local_rows } else { self.batch };
        let context_max = number("max_context", self.max_context)?;
        let most = *self.slices.iter().max().expect("a plan has slices");
        let held = (context.bytes as f64 / shape.page_bytes(most)) as u64;
        let Some(lane_pages) =
            lane_pages(held, context_max, (self.flights * batch) as u64, PAGE_POSITIONS)
        else {
            let problem = format!("holds no context of {} tokens", self.max_context);
            return Err(wrong("tier2_context.bytes", problem));
        };
        Ok(Deployment {
            shape: shape.clone(),
            slices: self.slices.clone(),
            tier2: self.tier2,
            local_lane,
            own_lane: None,
            own_first: None,
            strands: 1,
            crowding: [1.0; 2],
            batch: number("batch", batch)?,
            flights: number("flights", self.flights)?,
            chunk: number("chunk", self.chunk)?,
            context_max,
            lane_pages,
            page_positions: PAGE_POSITIONS,
            whole_flights: false,
            greedy: true,
            tier1: cluster.tier1.kernels.clone(),
            tier2_kernels: pool.kernels.clone(),
            delay_seconds: cluster.inter.rtt_seconds / 2.0,
            bandwidth: pool.link.bandwidth,
            port: cluster.inter.bandwidth,
            hop: cluster.tier1.link,
            place: match (self.tier1, self.tier2) {
                (1, 0) => Place::OneProcess,
                _ => Place::OwnMachines,
            },
        })
    }

    fn check(&self, path: &str) -> Result<(), PlanError> {
        let wrong = |field: &str, problem: String| Err(PlanError::field(path, field, problem));
        if self.version != PLAN_VERSION {
            return wrong(
                "version",
                format!("is {}, this program reads {PLAN_VERSION}", self.version),
            );
        }
        let least = [
            ("tier1", self.tier1),
            ("flights", self.flights),
            ("chunk", self.chunk),
            ("max_context", self.max_context),
        ];
        for (field, value) in least {
            if value == 0 {
                return wrong(field, "must be at least 1".to_owned());
            }
        }
        if self.tier2 > 0 && self.batch == 0 {
            return wrong("batch", format!("must be at least 1 with tier2 = {}", self.tier2));
        }
        if self.tier2 == 0 && self.batch > 0 {
            return wrong(
                "batch",
                "must be 0 without Tier-2 nodes; local_rows is the batch then".to_owned(),
            );
        }
        if self.rows() == 0 {
            return wrong("local_rows", "must be at least 1 in a single tier".to_owned());
        }
        if self.tier2 > 0 && self.local_rows > 0 && self.local_rows != self.batch {
            let (local, batch) = (self.local_rows, self.batch);
            let problem =
                format!("is {local}: all attention workers have the same rows, so 0 or {batch}");
            return wrong("local_rows", problem);
        }
        if self.slices.len() != self.tier1 {
            return wrong(
                "slices",
                format!("are {}, but tier1 = {}", self.slices.len(), self.tier1),
            );
        }
        if self.slices.contains(&0) {
            return wrong("slices", "must hold at least one layer each".to_owned());
        }
        let tiers = [
            ("tier1_context", &self.tier1_context, self.local_rows),
            ("tier2_context", &self.tier2_context, self.tier2 * self.batch),
        ];
        for (field, budget, rows) in tiers {
            if rows > 0 && budget.seats == 0 {
                return wrong(
                    &format!("{field}.seats"),
                    format!("must be at least 1 for {rows} rows per flight"),
                );
            }
        }
        for (field, value) in [
            ("forecast.tokens_per_second", self.forecast.tokens_per_second),
            ("forecast.job_seconds", self.forecast.job_seconds),
        ] {
            if !(value.is_finite() && value > 0.0) {
                return wrong(field, "must be above 0".to_owned());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            version: PLAN_VERSION,
            model: "llama2-70b".to_owned(),
            tier1: 2,
            tier2: 3,
            pool: 0,
            batch: 8,
            local_rows: 0,
            flights: 6,
            chunk: 64,
            max_context: 2048,
            slices: vec![40, 40],
            tier1_context: ContextBudget { bytes: 0, pages: 0, seats: 0 },
            tier2_context: ContextBudget { bytes: 1 << 30, pages: 16384, seats: 48 },
            forecast: PlanForecast {
                tokens_per_second: 100.0,
                seconds_per_token: 1.5,
                bottleneck: Bottleneck::Tier1Compute,
                job_seconds: 60.0,
                job_usd: None,
                kernels: vec!["analytic".to_owned()],
            },
        }
    }

    #[test]
    fn a_plan_survives_its_file() {
        let plan = plan();
        assert_eq!(Plan::parse("p.toml", &plan.to_toml()).expect("valid"), plan);
        assert!(plan.check_layers("p.toml", 80).is_ok());
        let error = plan.check_layers("p.toml", 32).unwrap_err().to_string();
        assert_eq!(error, "p.toml: slices: hold 80 layers, the model has 32");
    }

    #[test]
    fn bad_plans_name_the_field() {
        let good = plan().to_toml();
        let cases = [
            ("version = 2", "version = 7", "version: is 7"),
            ("tier1 = 2", "tier1 = 0", "tier1: must be at least 1"),
            ("tier1 = 2", "tier1 = 3", "slices: are 2, but tier1 = 3"),
            ("batch = 8", "batch = 0", "batch: must be at least 1 with tier2 = 3"),
            ("tier2 = 3", "tier2 = 0", "batch: must be 0 without Tier-2 nodes"),
            ("flights = 6", "flights = 0", "flights: must be at least 1"),
            ("local_rows = 0", "local_rows = 5", "local_rows: is 5: all attention workers have"),
            ("slices = [40, 40]", "slices = [80, 0]", "slices: must hold at least one layer each"),
            (
                "seats = 48",
                "seats = 0",
                "tier2_context.seats: must be at least 1 for 24 rows per flight",
            ),
        ];
        for (from, to, expected) in cases {
            let text = good.replacen(from, to, 1);
            assert_ne!(text, good, "{from} is in the file");
            let error = Plan::parse("p.toml", &text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("p.toml: {expected}")), "{error}");
        }
        for (from, to, named) in [
            ("flights = 6", "flight = 6", "flight"),
            ("chunk = 64", "chunk = -1", "chunk"),
            ("model = ", "modell = ", "modell"),
        ] {
            let error = Plan::parse("p.toml", &good.replacen(from, to, 1)).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
