//! `simulate`: one configuration in detail.

use crate::args::SimulateArgs;
use crate::folder::{file_uses, require_folder};
use crate::progress::say;
use crate::{models, units, workloads};
use anyhow::{Context, bail};
use glinthawk_jobs::refuse_collisions;
use glinthawk_launch::{GPU_NODE_BATCH, LaunchError};
use glinthawk_model::even_slices;
use glinthawk_plan::shape::GIB;
use glinthawk_plan::{
    Catalogue, Cluster, Configuration, Contexts, Deployment, Disturbance, Forecast, Group,
    KernelTimes, NetworkLink, OwnLane, Place, Plan, Profile, RowTraffic, Rules, SettledReport,
    Shape, Slice, Workload, forecast, simulate_traced,
};
use glinthawk_protocol::{PAGE_POSITIONS, lane_pages};
use serde::Serialize;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

/// What `--json` prints.
#[derive(Serialize)]
struct Simulated {
    settled: SettledReport,
    job: Option<Forecast>,
}

/// What `--json` prints of a plan.
#[derive(Serialize)]
struct Planned {
    job: Forecast,
}

/// A node of a tier.
struct Node {
    kernels: Arc<KernelTimes>,
    /// Bytes, where they are known: of a device of the catalogue.
    memory: Option<f64>,
}

/// Simulates a configuration and says what it does.
pub fn simulate(args: &SimulateArgs) -> anyhow::Result<ExitCode> {
    refuse_collisions(&file_uses(&[
        ("--plan", args.plan.as_deref(), false),
        ("--cluster", args.cluster.as_deref(), false),
        ("--profile", args.profile.as_deref(), false),
        ("--tier2-profile", args.tier2_profile.as_deref(), false),
        ("--workload", args.workload.as_deref(), false),
        ("--trace", args.trace.as_deref(), true),
    ]))?;
    require_folder("--trace", args.trace.as_deref())?;
    if let (Some(plan), Some(cluster)) = (&args.plan, &args.cluster) {
        return simulate_plan(args, plan, cluster);
    }
    if args.hybrid && args.tier2 == 0 {
        bail!(LaunchError::NoTier2("--hybrid"));
    }
    if args.context_memory.len() > 1 && !args.hybrid {
        bail!(LaunchError::ContextMemories);
    }
    let model = models::resolve(&args.model)?.open()?;
    let shape = Shape::of(model.name(), model.config());
    let tier1 = node(args.profile.as_deref(), args.device.as_deref(), &shape)?;
    let Some(tier1) = tier1 else { bail!("give --profile FILE.json or --device NAME") };
    let other = node(args.tier2_profile.as_deref(), args.tier2_device.as_deref(), &shape)?;
    let tier2 = other.unwrap_or_else(|| Node { kernels: Arc::clone(&tier1.kernels), ..tier1 });
    if args.tier1 as usize > shape.layers {
        bail!("--tier1 {} is more than the model's {} layers", args.tier1, shape.layers);
    }
    let context_memory = context_memory(args, &shape, &tier1, &tier2)?;
    let workload = workloads::read(args.workload.as_deref(), args.prompts.as_deref(), &args.model)?;
    let context_max = args.max_context.unwrap_or(model.config().context_max as u32);
    let workload = workload.map(|all| workloads::within(&all, context_max as usize)).transpose()?;
    let (tier1, tier2) = (tier1.kernels, tier2.kernels);
    let configuration = configuration(args, &shape, &tier1, &tier2, workload.as_ref());
    let (settled, mut trace) = simulate_traced(&configuration);
    let job = match &workload {
        Some(workload) => {
            trace = glinthawk_plan::Trace::default();
            let slots = args.flights() * args.batch();
            let pages = pages(args, &shape, context_max, (context_memory, slots))?;
            let mut deployment = deployment(args, &shape, (context_max, pages), &tier1, &tier2);
            if args.hybrid && tier1.on_device() && !tier2.on_device() {
                let batch = args.batch.unwrap_or(GPU_NODE_BATCH);
                let own = args.context_memory.first().map(|bytes| *bytes as f64);
                let held = (own.or(context_memory), args.tier1 * batch);
                let pages = self::pages(args, &shape, context_max, held)?;
                deployment.own_lane = Some(OwnLane { batch, pages });
            }
            Some(forecast(&deployment, workload, Some(&mut trace)))
        }
        None => None,
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &Simulated { settled, job })?;
        writeln!(out)?;
    } else {
        writeln!(out, "kernels               {}", tier1.provenance())?;
        match args.lanes {
            1 => writeln!(out, "settled, with every flight full:")?,
            lanes => writeln!(out, "settled, with every flight full, each of {lanes} lanes:")?,
        }
        out.write_all(settled.render().as_bytes())?;
        if let Some(job) = &job {
            out.write_all(job.render().as_bytes())?;
        }
    }
    if workload.is_none() {
        say_what_does_not_fit(args, &shape, context_memory);
    }
    write_trace(args, &trace)
}

/// The job of a plan on its cluster, by the forecast that `plan` chooses by.
fn simulate_plan(args: &SimulateArgs, path: &Path, cluster: &Path) -> anyhow::Result<ExitCode> {
    let plan = Plan::read(path)?;
    let model = models::resolve(&plan.model)?.open()?;
    let shape = Shape::of(&plan.model, model.config());
    let cluster = Cluster::read(cluster, &shape)?;
    let deployment = plan.deployment(&path.display().to_string(), &cluster, &shape)?;
    let workload = workloads::read(args.workload.as_deref(), args.prompts.as_deref(), &plan.model)?;
    let workload = workload.context("give the plan's job: --workload or --prompts")?;
    let workload = workloads::within(&workload, plan.max_context)?;
    let mut trace = glinthawk_plan::Trace::default();
    let job = forecast(&deployment, &workload, Some(&mut trace));
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &Planned { job })?;
        writeln!(out)?;
    } else {
        for kernels in &plan.forecast.kernels {
            writeln!(out, "kernels               {kernels}")?;
        }
        out.write_all(job.render().as_bytes())?;
        writeln!(out, "the plan says         {:.2} s", plan.forecast.job_seconds)?;
    }
    write_trace(args, &trace)
}

fn write_trace(args: &SimulateArgs, trace: &glinthawk_plan::Trace) -> anyhow::Result<ExitCode> {
    if let Some(path) = &args.trace {
        let mut text = Vec::new();
        trace.write(&mut text)?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        say(format_args!("timeline in {}", path.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Memory for contexts of each attention worker, where something says how much there is; an error where the weights do
/// not fit beside them.
fn context_memory(
    args: &SimulateArgs,
    shape: &Shape,
    tier1: &Node,
    tier2: &Node,
) -> anyhow::Result<Option<f64>> {
    let weights = shape.heaviest_slice(args.tier1 as usize);
    let mut left = tier1.memory.map(|memory| memory - weights);
    if let Some(memory) = tier1.memory.filter(|memory| weights > *memory) {
        let (device, nodes) = (args.device.as_deref().unwrap_or("node"), args.tier1);
        let (needed, memory) = (weights / GIB, memory / GIB);
        bail!(
            "the model does not fit on --tier1 {nodes}: {needed:.1} GiB of weights on one {device} of {memory:.2} GiB; {}",
            shape.nodes_needed(memory * GIB)
        );
    }
    if args.tier2 > 0 {
        let local = left.filter(|_| args.hybrid);
        left = tier2.memory.into_iter().chain(local).reduce(f64::min);
    }
    Ok(args.context_memory.last().map(|bytes| *bytes as f64).or(left))
}

/// Pages of each attention worker: what its memory holds, and no more than could ever be used.
fn pages(
    args: &SimulateArgs,
    shape: &Shape,
    context_max: u32,
    (context_memory, slots): (Option<f64>, u32),
) -> anyhow::Result<u32> {
    let held = context_memory.map(|bytes| pages_in(args, shape, bytes));
    lane_pages(held.unwrap_or(u64::MAX), context_max, slots.into(), PAGE_POSITIONS).with_context(|| {
        format!(
            "an attention worker has memory for {} positions, less than one context of {context_max} tokens: \
             give --max-context, --context-memory, or more nodes",
            held.unwrap_or_default() * u64::from(PAGE_POSITIONS)
        )
    })
}

/// Pages that a lane has if an attention worker has so much memory.
fn pages_in(args: &SimulateArgs, shape: &Shape, bytes: f64) -> u64 {
    let page_bytes = shape.page_bytes(shape.layers.div_ceil(args.tier1 as usize));
    (bytes / f64::from(args.lanes) / page_bytes) as u64
}

/// Says so if the figure for full flights is one of more contexts than there is memory for.
fn say_what_does_not_fit(args: &SimulateArgs, shape: &Shape, context_memory: Option<f64>) {
    let Some(bytes) = context_memory else { return };
    let held = pages_in(args, shape, bytes) / u64::from(args.context.div_ceil(PAGE_POSITIONS));
    let wanted = u64::from(args.flights()) * u64::from(args.batch());
    if wanted > held {
        say(format_args!(
            "this is with {} contexts of {} tokens on each attention worker, whose memory holds {}: give fewer rows \
             (--batch, --flights), or a job (--prompts, --workload), which keeps to the memory",
            units::count(wanted),
            units::count(args.context.into()),
            units::count(held)
        ));
    }
}

/// A profile's kernels, or a device's and its memory.
fn node(
    profile: Option<&Path>,
    device: Option<&str>,
    shape: &Shape,
) -> anyhow::Result<Option<Node>> {
    let mut memory = None;
    let kernels = match (profile, device) {
        (Some(path), _) => {
            let profile = Profile::read(path)?;
            profile.check_shape(&path.display().to_string(), shape)?;
            KernelTimes::Measured(Box::new(profile))
        }
        (None, Some(name)) => {
            let catalogue = Catalogue::built_in();
            let device = catalogue
                .get(name)
                .with_context(|| format!("no device `{name}`; known: {}", catalogue.names()))?;
            memory = Some(device.memory_gib.value * GIB);
            KernelTimes::analytic(device, shape)
        }
        (None, None) => return Ok(None),
    };
    Ok(Some(Node { kernels: Arc::new(kernels), memory }))
}

fn configuration(
    args: &SimulateArgs,
    shape: &Shape,
    tier1: &Arc<KernelTimes>,
    tier2: &Arc<KernelTimes>,
    workload: Option<&Workload>,
) -> Configuration {
    let (batch, nodes) = (args.batch() as usize, args.tier2 as usize);
    let groups = match nodes {
        0 => Vec::new(),
        _ => vec![Group { kernels: Arc::clone(tier2), nodes, rows: batch }],
    };
    let slice = |layers| Slice {
        layers,
        tier1: Arc::clone(tier1),
        local_rows: if nodes == 0 || args.hybrid { batch } else { 0 },
        tier2: groups.clone(),
    };
    let bandwidth = args.bandwidth.map_or(f64::INFINITY, |rate| rate as f64);
    let delay = args.delay.unwrap_or_default().as_secs_f64();
    let contexts = match workload {
        Some(workload) => Contexts::Mixed(workload.mixture(args.chunk as usize)),
        None => Contexts::Fixed(args.context.into()),
    };
    Configuration {
        shape: shape.clone(),
        slices: even_slices(shape.layers, args.tier1 as usize).into_iter().map(slice).collect(),
        flights: args.flights() as usize,
        contexts,
        hop: NetworkLink { rtt_seconds: 0.0, bandwidth: f64::INFINITY },
        inter: NetworkLink { rtt_seconds: 2.0 * delay, bandwidth },
        tier2_bandwidth: bandwidth,
        traffic: RowTraffic::ResidualHome,
        rules: Rules::Full,
        disturbance: Disturbance::default(),
        seed: 1,
    }
}

fn deployment(
    args: &SimulateArgs,
    shape: &Shape,
    (context_max, lane_pages): (u32, u32),
    tier1: &Arc<KernelTimes>,
    tier2: &Arc<KernelTimes>,
) -> Deployment {
    let local_lane = args.tier2 == 0 || args.hybrid;
    Deployment {
        shape: shape.clone(),
        slices: even_slices(shape.layers, args.tier1 as usize),
        tier2: args.tier2 as usize,
        local_lane,
        own_lane: None,
        own_first: None,
        strands: args.lanes as usize,
        crowding: [1.0; 2],
        batch: args.batch(),
        flights: args.flights(),
        chunk: args.chunk,
        context_max,
        lane_pages,
        page_positions: PAGE_POSITIONS,
        whole_flights: false,
        greedy: !args.sampled,
        tier1: Arc::clone(tier1),
        tier2_kernels: Arc::clone(tier2),
        delay_seconds: args.delay.unwrap_or_default().as_secs_f64(),
        bandwidth: args.bandwidth.map_or(f64::INFINITY, |rate| rate as f64),
        port: f64::INFINITY,
        hop: NetworkLink { rtt_seconds: 0.0, bandwidth: f64::INFINITY },
        place: match args.cores {
            Some(cores) => Place::SharedCores(cores as usize),
            None if args.tier1 == 1 && args.tier2 == 0 => Place::OneProcess,
            None => Place::OwnMachines,
        },
    }
}
