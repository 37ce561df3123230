//! `simulate`: one configuration in detail.

use crate::args::SimulateArgs;
use crate::progress::say;
use crate::{models, workloads};
use anyhow::{Context, bail};
use glinthawk_model::ModelConfig;
use glinthawk_plan::{
    Catalogue, Configuration, Contexts, Deployment, Disturbance, Forecast, Group, Kernels, Link,
    Place, Profile, Report, Rules, Shape, Slice, Traffic, Workload, even_slices, forecast,
    simulate_traced,
};
use serde::Serialize;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

/// What `--json` prints.
#[derive(Serialize)]
struct Simulated {
    settled: Report,
    job: Option<Forecast>,
}

/// Simulates a configuration and says what it does.
pub fn simulate(args: &SimulateArgs) -> anyhow::Result<ExitCode> {
    let model = models::resolve(&args.model)?.open()?;
    let shape = Shape::of(model.name(), model.config());
    let tier1 = kernels(args.profile.as_deref(), args.device.as_deref(), &shape)?;
    let Some(tier1) = tier1 else { bail!("give --profile FILE.json or --device NAME") };
    let other = kernels(args.tier2_profile.as_deref(), args.tier2_device.as_deref(), &shape)?;
    let tier2 = other.unwrap_or_else(|| Arc::clone(&tier1));
    if args.tier1 as usize > shape.layers {
        bail!("--tier1 {} is more than the model's {} layers", args.tier1, shape.layers);
    }
    let workload = workloads::read(args.workload.as_deref(), args.prompts.as_deref(), &args.model)?;
    let configuration = configuration(args, &shape, &tier1, &tier2, workload.as_ref());
    let (settled, mut trace) = simulate_traced(&configuration);
    let job = workload.as_ref().map(|workload| {
        trace = glinthawk_plan::Trace::default();
        let deployment = deployment(args, model.config(), &shape, &tier1, &tier2);
        forecast(&deployment, workload, Some(&mut trace))
    });
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
    if let Some(path) = &args.trace {
        std::fs::write(path, trace.to_json())
            .with_context(|| format!("cannot write {}", path.display()))?;
        say(format_args!("timeline in {}", path.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// A profile's kernels, or a device's.
fn kernels(
    profile: Option<&Path>,
    device: Option<&str>,
    shape: &Shape,
) -> anyhow::Result<Option<Arc<Kernels>>> {
    let kernels = match (profile, device) {
        (Some(path), _) => {
            let profile = Profile::read(path)?;
            profile.check_shape(&path.display().to_string(), shape)?;
            Kernels::Measured(Box::new(profile))
        }
        (None, Some(name)) => {
            let catalogue = Catalogue::built_in();
            let device = catalogue
                .get(name)
                .with_context(|| format!("no device `{name}`; known: {}", catalogue.names()))?;
            Kernels::analytic(device, shape)
        }
        (None, None) => return Ok(None),
    };
    Ok(Some(Arc::new(kernels)))
}

fn configuration(
    args: &SimulateArgs,
    shape: &Shape,
    tier1: &Arc<Kernels>,
    tier2: &Arc<Kernels>,
    workload: Option<&Workload>,
) -> Configuration {
    let (batch, nodes) = (args.batch as usize, args.tier2 as usize);
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
        Some(workload) => Contexts::Fixed(workload.context_mean()),
        None => Contexts::Fixed(args.context.into()),
    };
    Configuration {
        shape: shape.clone(),
        slices: even_slices(shape.layers, args.tier1 as usize).into_iter().map(slice).collect(),
        flights: args.flights() as usize,
        contexts,
        hop: Link { rtt: 0.0, bandwidth: f64::INFINITY },
        inter: Link { rtt: 2.0 * delay, bandwidth },
        tier2_bandwidth: bandwidth,
        traffic: Traffic::ResidualHome,
        rules: Rules::Full,
        disturbance: Disturbance::default(),
        seed: 1,
    }
}

fn deployment(
    args: &SimulateArgs,
    config: &ModelConfig,
    shape: &Shape,
    tier1: &Arc<Kernels>,
    tier2: &Arc<Kernels>,
) -> Deployment {
    let context_max = args.max_context.unwrap_or(config.context_max as u32);
    let local_lane = args.tier2 == 0 || args.hybrid;
    let slots = u64::from(args.flights() * args.batch);
    let pages_useful = slots * u64::from(context_max.div_ceil(16));
    let slice_layers = shape.layers.div_ceil(args.tier1 as usize);
    let page_bytes = 16.0 * shape.context_bytes_per_layer() * slice_layers as f64;
    let pages = args
        .context_memory
        .map_or(pages_useful, |bytes| (bytes as f64 / f64::from(args.lanes) / page_bytes) as u64);
    Deployment {
        shape: shape.clone(),
        slices: even_slices(shape.layers, args.tier1 as usize),
        tier2: args.tier2 as usize,
        local_lane,
        batch: args.batch,
        flights: args.flights(),
        chunk: args.chunk,
        context_max,
        lane_pages: pages.min(pages_useful).max(1) as u32,
        whole_flights: false,
        greedy: !args.sampled,
        tier1: Arc::clone(tier1),
        tier2_kernels: Arc::clone(tier2),
        delay: args.delay.unwrap_or_default().as_secs_f64(),
        bandwidth: args.bandwidth.map_or(f64::INFINITY, |rate| rate as f64),
        place: match args.cores {
            Some(cores) => Place::SharedCores(cores as usize),
            None if args.tier1 == 1 && args.tier2 == 0 => {
                Place::OneProcess { lanes: args.lanes as usize }
            }
            None => Place::OwnMachines,
        },
    }
}
