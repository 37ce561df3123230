//! `plan` and `reproduce`: the planner's commands.

use crate::args::PlanArgs;
use crate::folder::{file_uses, require_folder};
use crate::progress::say;
use crate::{models, workloads};
use glinthawk_jobs::refuse_collisions;
use glinthawk_plan::{Cluster, PlannedJob, SearchLimits, Settings, Shape, Space, propose};
use glinthawk_reproduce::Reproduction;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

/// Chooses a cluster's shape, says why, and writes the plan if asked.
pub fn plan(args: &PlanArgs) -> anyhow::Result<ExitCode> {
    let objective = args.objective()?;
    refuse_collisions(&file_uses(&[
        ("--cluster", Some(&args.cluster), false),
        ("--workload", Some(&args.workload), false),
        ("--output", args.output.as_deref(), true),
    ]))?;
    require_folder("--output", args.output.as_deref())?;
    let model = models::resolve(&args.model)?.open()?;
    // Keep the name the user gave: `run --plan` finds the model by it.
    let shape = Shape::of(&args.model, model.config());
    let cluster = Cluster::read(&args.cluster, &shape)?;
    let workload = workloads::read_file(&args.workload, &args.model)?;
    let workload = workloads::within(&workload, shape.context_max)?;
    let settings = Settings { batch_max: args.batch_max as usize, ..Settings::default() };
    let start = Instant::now();
    let chunk = args.chunk as usize;
    let space = Space::new(cluster, PlannedJob::of(&shape, &workload, chunk), settings);
    let proposal = propose(&space, objective, &workload, chunk, SearchLimits::default())?;
    let mut out = std::io::stdout().lock();
    out.write_all(proposal.render().as_bytes())?;
    writeln!(out, "planned in {:.1} s", start.elapsed().as_secs_f64())?;
    if let Some(path) = &args.output {
        proposal.plan().write(path)?;
        say(format_args!("plan in {}", path.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the paper's evaluation through the simulator; prints the comparison and writes the page.
pub fn reproduce(folder: &Path) -> anyhow::Result<ExitCode> {
    let reproduction = Reproduction::run()?;
    std::io::stdout().write_all(reproduction.render().as_bytes())?;
    reproduction.write(folder)?;
    say(format_args!("page in {}", folder.join("reproduction.md").display()));
    Ok(ExitCode::SUCCESS)
}
