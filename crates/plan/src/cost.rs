//! What nodes cost: rent if it is known, else price, else just their number.

use crate::cluster::{Cluster, DevicePool};

/// What a cost is counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CostUnit {
    /// US dollars per hour.
    UsdPerHour,
    /// US dollars of equipment.
    Usd,
    /// Nodes; no price is known.
    Nodes,
}

/// Costs of one node of each pool, all in one unit.
#[derive(Clone, Debug, PartialEq)]
pub struct Prices {
    /// The unit.
    pub unit: CostUnit,
    tier1: f64,
    tier2: Vec<f64>,
}

impl Prices {
    /// The best unit in which every pool of the cluster has a cost.
    pub fn of(cluster: &Cluster) -> Self {
        let all = |price: &dyn Fn(&DevicePool) -> Option<f64>| {
            let tier2: Option<Vec<f64>> = cluster.tier2.iter().map(price).collect();
            Some((price(&cluster.tier1)?, tier2?))
        };
        let known = all(&|pool| pool.usd_per_hour).map(|prices| (CostUnit::UsdPerHour, prices));
        let known =
            known.or_else(|| all(&|pool| pool.price_usd).map(|prices| (CostUnit::Usd, prices)));
        let (unit, (tier1, tier2)) =
            known.unwrap_or((CostUnit::Nodes, (1.0, vec![1.0; cluster.tier2.len()])));
        Self { unit, tier1, tier2 }
    }

    /// Cost of K Tier-1 nodes with K' nodes of a pool each.
    pub fn cost(&self, tier1: usize, tier2: usize, pool: usize) -> f64 {
        let each = if tier2 == 0 { 0.0 } else { self.tier2[pool] };
        tier1 as f64 * (self.tier1 + tier2 as f64 * each)
    }
}

impl CostUnit {
    /// What a job of `seconds` costs on nodes of `cost`: dollars where there is a rent, else what the nodes cost.
    pub fn spend(self, cost: f64, seconds: f64) -> f64 {
        match self {
            Self::UsdPerHour => cost * seconds / 3600.0,
            Self::Usd | Self::Nodes => cost,
        }
    }

    /// What a job costs, in words.
    pub fn spend_words(self, spend: f64) -> String {
        match self {
            Self::UsdPerHour => format!("${spend:.2}"),
            Self::Usd | Self::Nodes => self.words(spend),
        }
    }

    /// A cost in words.
    pub fn words(self, cost: f64) -> String {
        match self {
            Self::UsdPerHour => format!("${cost:.2}/h"),
            Self::Usd => format!("${cost:.0} to buy"),
            Self::Nodes => format!("{cost:.0} nodes"),
        }
    }

    /// Cost against throughput in words: dollars per million tokens, or the paper's dollars per token/s.
    pub fn efficiency(self, cost: f64, tokens_per_second: f64) -> String {
        match self {
            Self::UsdPerHour => {
                format!("${:.3}/M tokens", dollars_per_million(cost, tokens_per_second))
            }
            Self::Usd => format!("${:.2} per token/s", cost / tokens_per_second),
            Self::Nodes => format!("{:.1} tokens/s per node", tokens_per_second / cost),
        }
    }
}

/// Dollars per million tokens at a rent of `usd_per_hour`.
pub fn dollars_per_million(usd_per_hour: f64, tokens_per_second: f64) -> f64 {
    usd_per_hour / 3600.0 / tokens_per_second * 1e6
}
