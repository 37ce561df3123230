//! Choosing the cluster before paying for it: hardware catalogue, profiles, calculus, simulator, planner, cost.
//!
//! A [`Profile`] or a roofline of a [`catalogue::DeviceKind`] gives [`KernelTimes`]; a [`Configuration`] places them;
//! [`simulate`] runs it in virtual time; the planner searches over configurations of a cluster.

#![forbid(unsafe_code)]

mod admission;
pub mod bench;
mod bound;
pub mod calculus;
mod candidate;
pub mod catalogue;
mod choice;
mod cluster;
mod configuration;
mod cost;
mod curve;
mod error;
mod estimate;
mod forecast;
mod heap;
mod kernels;
mod plan;
pub mod profile;
mod program;
mod proposal;
mod queue;
mod quick;
mod random;
mod report;
mod search;
pub mod shape;
mod simulator;
mod space;
mod table;
mod trace;
mod words;
mod workload;

pub use admission::Admission;
pub use bound::Bottleneck;
pub use calculus::{NetworkLink, RowTraffic};
pub use candidate::{Candidate, Evaluation};
pub use catalogue::{Catalogue, DeviceKind};
pub use choice::{Choice, Chosen, FRONT_STEP, Objective, SearchLimits, Trial, Work, front};
pub use cluster::{Cluster, DevicePool};
pub use configuration::{Configuration, Contexts, Disturbance, Group, Rules, Slice};
pub use cost::{CostUnit, Prices, dollars_per_million};
pub use error::PlanError;
pub use forecast::{Deployment, Forecast, OwnLane, Place, forecast};
pub use kernels::{KernelTimes, Roofline};
pub use plan::{ContextBudget, PLAN_VERSION, Plan, PlanForecast};
pub use profile::Profile;
pub use proposal::{Neighbour, Proposal, propose};
pub use random::Random;
pub use report::{SettledReport, TokenTime, TrafficRates, simulate, simulate_traced};
pub use search::{Effort, Found, best_at, search};
pub use shape::Shape;
pub use space::{PlannedJob, Settings, Site, Space};
pub use trace::Trace;
pub use workload::{Clipped, Common, Held, Length, Mixture, Workload};
