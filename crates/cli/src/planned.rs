//! A plan's part of the options of `run`.

use crate::args::{ClusterArgs, EngineArgs, RunArgs};
use glinthawk_plan::{Plan, PlanError, even_slices};
use std::path::Path;

/// A plan and the file it came from.
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    path: String,
}

impl Planned {
    /// Reads the plan that the options name, if they name one.
    pub fn read(path: Option<&Path>) -> Result<Option<Self>, PlanError> {
        let Some(path) = path else { return Ok(None) };
        Ok(Some(Self { plan: Plan::read(path)?, path: path.display().to_string() }))
    }

    /// The options with the plan's figures in their place.
    pub fn options(&self, args: &RunArgs) -> Result<(EngineArgs, ClusterArgs), PlanError> {
        let plan = &self.plan;
        if plan.tier2 > 0 && plan.local_rows > 0 && plan.local_rows != plan.batch {
            let (local, batch) = (plan.local_rows, plan.batch);
            let problem = format!(
                "is {local}: this program gives all attention workers the same rows, 0 or batch = {batch}"
            );
            return Err(self.wrong("local_rows", problem));
        }
        if plan.slices != even_slices(plan.slices.iter().sum(), plan.tier1) {
            let problem = "this program cuts layers as evenly as they go, longer slices first";
            return Err(self.wrong("slices", problem.to_owned()));
        }
        let (batch, context) = match plan.tier2 {
            0 => (plan.local_rows, &plan.tier1_context),
            _ => (plan.batch, &plan.tier2_context),
        };
        let engine = EngineArgs {
            model: plan.model.clone(),
            batch: Some(self.number("batch", batch)?),
            flights: Some(self.number("flights", plan.flights)?),
            chunk: self.number("chunk", plan.chunk)?,
            context_memory: Some(context.bytes),
            max_context: Some(self.number("max_context", plan.max_context)?),
            ..args.engine.clone()
        };
        // One node alone is this process, whose messages are function calls.
        let alone = plan.tier1 == 1 && plan.tier2 == 0 && args.cluster.listen.is_none();
        let nodes = |field, count| self.number(field, count).map(|count| (!alone).then_some(count));
        let cluster = ClusterArgs {
            tier1: nodes("tier1", plan.tier1)?,
            tier2: nodes("tier2", plan.tier2)?,
            hybrid: plan.tier2 > 0 && plan.local_rows > 0,
            ..args.cluster.clone()
        };
        Ok((engine, cluster))
    }

    /// Rejects the plan for a model of another depth.
    pub fn check_layers(&self, layers: usize) -> Result<(), PlanError> {
        self.plan.check_layers(&self.path, layers)
    }

    /// Dollars per second, where the plan knows the rent.
    pub fn usd_per_second(&self) -> Option<f64> {
        let forecast = &self.plan.forecast;
        Some(forecast.job_usd? / forecast.job_seconds.filter(|seconds| *seconds > 0.0)?)
    }

    fn number(&self, field: &str, value: usize) -> Result<u32, PlanError> {
        let fits = u32::try_from(value).ok().filter(|value| *value <= 1 << 24);
        fits.ok_or_else(|| self.wrong(field, format!("{value} is more than this program runs")))
    }

    fn wrong(&self, field: &str, problem: String) -> PlanError {
        PlanError::field(&self.path, field, problem)
    }
}
