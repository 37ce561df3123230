//! `plan` and `reproduce`: the planner's commands.

use crate::args::{ObjectiveArg, PlanArgs};
use crate::{models, workloads};
use anyhow::Context;
use glinthawk_plan::reproduce::Reproduction;
use glinthawk_plan::{Cluster, Job, Objective, Settings, Shape, Space, propose};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// Chooses a cluster's shape, says why, and writes the plan where asked.
pub fn plan(args: &PlanArgs) -> anyhow::Result<ExitCode> {
    let model = models::resolve(&args.model)?.open()?;
    // By the name it was asked for, under which `run --plan` will find it.
    let shape = Shape::of(&args.model, model.config());
    let cluster = Cluster::read(&args.cluster, &shape)?;
    let workload = workloads::read_file(&args.workload, &args.model)?;
    let objective = match args.objective {
        ObjectiveArg::Throughput => Objective::Throughput,
        ObjectiveArg::Cost => Objective::Cost,
        ObjectiveArg::Deadline => Objective::Deadline {
            seconds: args.hours.context("--objective deadline needs --hours")? * 3600.0,
            rows: workload.rows(),
        },
    };
    let settings = Settings { batch_max: args.batch_max, ..Settings::default() };
    let space = Space::new(cluster, Job::of(&shape, &workload, args.chunk), settings);
    let proposal = propose(&space, objective, Some(&workload), args.chunk)?;
    std::io::stdout().write_all(proposal.render().as_bytes())?;
    if let Some(path) = &args.output {
        proposal.plan.write(path)?;
        eprintln!("plan in {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the paper's evaluation through the simulator; prints the comparison and writes the page.
pub fn reproduce(folder: &Path) -> anyhow::Result<ExitCode> {
    let reproduction = Reproduction::run()?;
    std::io::stdout().write_all(reproduction.render().as_bytes())?;
    reproduction.write(folder)?;
    eprintln!("page in {}", folder.join("reproduction.md").display());
    Ok(ExitCode::SUCCESS)
}
