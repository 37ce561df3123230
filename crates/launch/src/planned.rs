//! A plan's part of a specification.

use crate::opened::Opened;
use crate::profiles;
use crate::specification::{Specification, Topology};
use glinthawk_model::even_slices;
use glinthawk_plan::{Catalogue, Plan, PlanError};
use std::path::Path;

/// A plan and the file it came from.
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    path: String,
}

impl Planned {
    /// Reads a plan.
    pub fn read(path: &Path) -> Result<Self, PlanError> {
        Ok(Self { plan: Plan::read(path)?, path: path.display().to_string() })
    }

    /// The plan as a specification; of the other one it takes only what a plan does not say.
    pub fn specification(&self, other: Specification) -> Result<Specification, PlanError> {
        let plan = &self.plan;
        if plan.slices != even_slices(plan.slices.iter().sum(), plan.tier1) {
            let problem = "this program cuts layers as evenly as they go, longer slices first";
            return Err(self.wrong("slices", problem.to_owned()));
        }
        let (batch, context) = match plan.tier2 {
            0 => (plan.local_rows, &plan.tier1_context),
            _ => (plan.batch, &plan.tier2_context),
        };
        // One node alone is this process, whose messages are function calls.
        let alone = plan.tier1 == 1 && plan.tier2 == 0 && other.topology.listen.is_none();
        let nodes = |field, count| self.number(field, count).map(|count| (!alone).then_some(count));
        Ok(Specification {
            model: plan.model.clone(),
            batch: Some(self.number("batch", batch)?),
            flights: Some(self.number("flights", plan.flights)?),
            chunk: Some(self.number("chunk", plan.chunk)?),
            context_memory_bytes: Some(context.bytes),
            context_max: Some(self.number("max_context", plan.max_context)?),
            topology: Topology {
                tier1: nodes("tier1", plan.tier1)?,
                tier2: nodes("tier2", plan.tier2)?,
                hybrid: plan.tier2 > 0 && plan.local_rows > 0,
                ..other.topology
            },
            ..other
        })
    }

    /// Rejects the plan for a model of another depth.
    pub fn check_layers(&self, layers: usize) -> Result<(), PlanError> {
        self.plan.check_layers(&self.path, layers)
    }

    /// The plan's devices, if they are not those that this run has, as far as can be told.
    pub fn elsewhere(&self, opened: &Opened, topology: &Topology) -> Option<String> {
        let here = Here {
            gpu: opened.gpu_of(0).map(|device| device.name().to_owned()),
            machine: profiles::machine(),
            alone: topology.listen.is_none(),
        };
        let kernels = &self.plan.forecast.kernels;
        let mut names: Vec<&str> =
            kernels.iter().filter_map(|kernels| Some(kernels.split_once(": ")?.0)).collect();
        names.dedup();
        let mut kernels = kernels.iter().enumerate();
        kernels.any(|(tier, kernels)| here.lacks(tier == 0, kernels)).then(|| names.join(" and "))
    }

    /// Dollars per second, where the plan knows the rent.
    pub(crate) fn usd_per_second(&self) -> Option<f64> {
        Some(self.plan.forecast.job_usd? / self.plan.forecast.job_seconds)
    }

    fn number(&self, field: &str, value: usize) -> Result<u32, PlanError> {
        let fits = u32::try_from(value).ok().filter(|value| *value <= 1 << 24);
        fits.ok_or_else(|| self.wrong(field, format!("{value} is more than this program runs")))
    }

    fn wrong(&self, field: &str, problem: String) -> PlanError {
        PlanError::field(&self.path, field, problem)
    }
}

/// What a run has to compute on.
struct Here {
    /// The GPU of Tier 1, as a profile names it.
    gpu: Option<String>,
    /// This machine, as a profile names it.
    machine: String,
    /// Whether no workers from elsewhere join.
    alone: bool,
}

impl Here {
    /// Whether this is not the device that a plan's kernel times are of, such as `t4: analytic (…)`.
    fn lacks(&self, tier1: bool, kernels: &str) -> bool {
        let Some((name, source)) = kernels.split_once(": ") else { return false };
        let gpu = self.gpu.as_ref().filter(|_| tier1);
        if source.starts_with("measured on ") {
            return self.alone && name != gpu.unwrap_or(&self.machine);
        }
        // Of the devices in the catalogue, those by NVIDIA are GPUs.
        let catalogue = Catalogue::built_in();
        let device = catalogue.get(name);
        device.is_some_and(|device| device.title.starts_with("NVIDIA") != gpu.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolved::Resolved;
    use crate::specification::CHUNK_DEFAULT;
    use glinthawk_cluster::Crowd;
    use glinthawk_model::catalogue;
    use glinthawk_plan::{
        Cluster, Length, Objective, PlannedJob, SearchLimits, Settings, Shape, Space, Workload,
        forecast, propose,
    };

    const CHUNK: usize = CHUNK_DEFAULT as usize;

    #[test]
    fn devices_of_a_plan_are_told_from_those_here() {
        let check = |kernels: &str, gpu: bool, alone: bool, lacks: bool| {
            let gpu = gpu.then(|| "NVIDIA H200".to_owned());
            let here = Here { gpu, machine: "a Xeon, 2 cores".to_owned(), alone };
            assert_eq!(here.lacks(true, kernels), lacks, "{kernels}, {alone}");
        };
        let (t4, epyc) = ("t4: analytic (a roofline)", "epyc-7v12-16: analytic (a roofline)");
        check(t4, false, true, true);
        check(t4, false, false, true);
        check(t4, true, true, false);
        check(epyc, false, true, false);
        check(epyc, true, true, true);
        let (xeon, other) =
            ("a Xeon, 2 cores: measured on a Xeon, 2 cores", "a Ryzen, 8 cores: measured on it");
        check(xeon, false, true, false);
        check(xeon, true, true, true);
        check("NVIDIA H200: measured on it", true, true, false);
        check("NVIDIA H200: measured on it", false, true, true);
        check(other, false, true, true);
        check(other, false, false, false);
        check("mine: analytic (a roofline)", false, true, false);
        let gpu = Some("NVIDIA H200".to_owned());
        let both = Here { gpu, machine: "a Xeon, 2 cores".to_owned(), alone: true };
        assert!(!both.lacks(false, xeon) && both.lacks(false, other), "Tier 2 is the cores");
    }

    /// Some of a workload's prompts with short completions, and its longest prompt.
    fn shortened(workload: &Workload, context_max: usize) -> Workload {
        let (workload, _) = workload.within(context_max).expect("some prompts fit");
        let all = workload.lengths();
        let longest = all.iter().max_by_key(|length| length.prompt).expect("there are prompts");
        let some = all.iter().step_by(all.len() / 40).chain([longest]);
        let short = some.map(|length| Length { output: length.output.min(30), ..*length });
        Workload::new(&workload.name, short.collect()).expect("valid")
    }

    /// Goes as far with a plan as `run` does before it loads weights or starts a process.
    fn accept(path: &Path) {
        let planned = Planned::read(path).expect("valid");
        let specification = planned.specification(Specification::new("")).expect("it can be run");
        let opened = Opened::open(&specification, &|_| ()).expect("a dummy model opens");
        planned.check_layers(opened.model.config().layers).expect("its layers are the model's");
        let resolved = Resolved::new(&specification, &opened, Crowd::UNKNOWN).expect("it is known");
        resolved.lane_pages(&opened).expect("a context fits");
    }

    #[test]
    fn run_accepts_what_plan_writes_and_its_time_is_that_of_its_forecast() {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../plan/data");
        let list = std::fs::read_to_string(data.join("plans.csv")).expect("it is there");
        let folder = tempfile::tempdir().expect("a folder");
        for line in list.lines().skip(1) {
            let fields: Vec<&str> = line.split(',').collect();
            let [cluster, model, workload, objective, _] = fields[..] else { panic!("{line}") };
            let opened = catalogue::resolve(model, &mut |_| ()).expect("a dummy model").open();
            let shape = Shape::of(model, opened.expect("a known shape").config());
            let cluster = Cluster::read(&data.join(format!("clusters/{cluster}.toml")), &shape);
            let cluster = cluster.expect("a valid cluster");
            let workload = Workload::read_csv(&data.join(format!("lengths/{workload}.csv")));
            let workload = shortened(&workload.expect("valid"), shape.context_max);
            let objective = match objective {
                "throughput" => Objective::Throughput,
                "cost" => Objective::Cost,
                _ => Objective::Deadline { seconds: 3600.0 },
            };
            let space =
                Space::new(cluster, PlannedJob::of(&shape, &workload, CHUNK), Settings::default());
            let limits = SearchLimits { per_site: 1, forecasts: 4, events: 4_000_000 };
            let proposal = propose(&space, objective, &workload, CHUNK, limits).expect("found");
            if let Objective::Deadline { seconds } = objective {
                assert!(proposal.best.seconds() <= seconds, "{line}");
            }
            for (index, trial) in proposal.front.iter().enumerate() {
                let path = folder.path().join(format!("{index}.toml"));
                trial.plan.write(&path).expect("written");
                accept(&path);
                let plan = Plan::read(&path).expect("a plan");
                let deployment = plan.deployment("plan", &space.cluster, &shape).expect("it fits");
                let seconds = forecast(&deployment, &workload, None).seconds;
                assert_eq!(seconds, plan.forecast.job_seconds, "{line}");
            }
        }
    }
}
