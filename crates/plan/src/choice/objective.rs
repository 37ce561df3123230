//! What a configuration is judged by.

use crate::cost::CostUnit;
use std::cmp::Ordering;

/// What to optimise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Objective {
    /// Least time for the job, then least cost.
    Throughput,
    /// Least cost for the job: dollars where there is a rent, else price times time.
    Cost,
    /// Cheapest that finishes the job within so many seconds.
    Deadline {
        /// Seconds allowed.
        seconds: f64,
    },
}

/// How good a configuration is; larger pairs are better.
pub(super) type Value = (f64, f64);

pub(super) fn compare(left: Value, right: Value) -> Ordering {
    left.0.total_cmp(&right.0).then(left.1.total_cmp(&right.1))
}

impl Objective {
    /// The value of a job of `seconds` on nodes of `cost`. It never falls when the seconds fall, so the value of a
    /// bound is a bound of the value.
    pub(super) fn value(self, unit: CostUnit, seconds: f64, cost: f64) -> Value {
        let spend = unit.spend(cost, seconds);
        match self {
            Self::Throughput => (-seconds, -spend),
            Self::Cost => (-cost * seconds, -seconds),
            Self::Deadline { seconds: allowed } if seconds <= allowed => (-spend, -seconds),
            Self::Deadline { .. } => (f64::NEG_INFINITY, -seconds),
        }
    }
}
