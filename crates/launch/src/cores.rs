//! Cores of local processes: they share all of them strand by strand, or each gets some by what it has to do.

use crate::error::LaunchError;
use crate::machine;
use crate::opened::Opened;
use crate::profiles;
use crate::specification::{Specification, flights_default};
use glinthawk_cluster::{Crowd, Layout};
use glinthawk_compute::{Isa, allowed_cores};
use glinthawk_model::ModelConfig;
use glinthawk_plan::{Catalogue, KernelTimes, RowTraffic, Shape};

/// Cores of a process on a GPU that others need cores beside: one gives it work, one is the network's.
const GPU_CORES: usize = 2;

/// The device of the catalogue that stands for a machine without a profile.
const STANDS_FOR_AMX: &str = "xeon-amx-2";
const STANDS_FOR_OTHERS: &str = "epyc-7v12-16";

/// Which cores the processes of a layout have, and what follows from it for the layout.
pub(crate) struct Placement {
    pub layout: Layout,
    /// Cores of each local process, Tier 1 first.
    pub cores: Vec<usize>,
    /// Whether the processes share all cores, strand by strand.
    pub shares_cores: bool,
    /// Whether contexts are expected on Tier-2 nodes.
    pub uses_tier2: bool,
}

impl Placement {
    /// Places a layout's processes. In a hybrid on cores, Tier 2 is used if Tier 1 has no memory for all contexts.
    pub(crate) fn new(
        specification: &Specification,
        opened: &Opened,
        mut layout: Layout,
        isa: Isa,
        memory_bytes: Option<u64>,
        crowd: Crowd,
    ) -> Result<Self, LaunchError> {
        let (config, topology) = (opened.model.config(), &specification.topology);
        let here = allowed_cores().len();
        let on_cores = !opened.has_gpu() && topology.listen.is_none();
        let own_bytes = topology.own_memory_bytes().or(memory_bytes).unwrap_or(0);
        let seats = here * layout.batch as usize;
        let suffices = layout.tier1_attends
            && layout.contexts_held(config, own_bytes, crowd) >= crowd.prompts.min(seats);
        let uses_tier2 = layout.tier2 > 0 && !(on_cores && suffices);
        layout.own_first = layout.tier2 > 0 && !uses_tier2;
        let least = |bytes: u64| if topology.hybrid { bytes.min(own_bytes) } else { bytes };
        let memory_bytes = memory_bytes.map(least);
        let cores = of_processes(specification, opened, &layout, isa, memory_bytes, crowd)?;
        let is_everywhere = !cores.is_empty() && cores.iter().all(|own| *own == here);
        let shares_cores = on_cores && !uses_tier2 && is_everywhere;
        let flights = match (shares_cores, layout.own_first) {
            // A core is never idle while one of its slices has work, and one batch is better than two halves.
            (true, _) => 1,
            (false, true) => flights_default(layout.slices as u32, 0),
            (false, false) => layout.flights,
        };
        layout.flights = specification.flights.unwrap_or(flights);
        // Workers from elsewhere settle it when they are there.
        if let (true, Some(bytes)) = (on_cores, memory_bytes) {
            let threads = match fewest(&cores[..layout.nodes().0.min(cores.len())]) {
                Some(threads) => threads,
                None => machine::threads(specification.threads)?,
            };
            layout = match shares_cores {
                true => with_shared_cores(layout, config, threads, bytes, crowd),
                false => layout.with_strands(config, threads, bytes, crowd),
            };
        }
        Ok(Self { layout, cores, shares_cores, uses_tier2 })
    }
}

/// The cores of the process that has the fewest.
pub(crate) fn fewest(cores: &[usize]) -> Option<usize> {
    cores.iter().copied().min()
}

/// Cores of each local process: those that were asked for; else all, if Tier 2 has nothing to do and every core then has a
/// strand of its own in each process; else what each needs. A core that a strand's slices share is never idle while one of
/// them has work.
fn of_processes(
    specification: &Specification,
    opened: &Opened,
    layout: &Layout,
    isa: Isa,
    memory_bytes: Option<u64>,
    crowd: Crowd,
) -> Result<Vec<usize>, LaunchError> {
    let (tier1, tier2) = layout.nodes();
    let here = allowed_cores().len();
    if let Some((first, second)) = specification.topology.cores {
        let counts = [vec![first as usize; tier1], vec![second as usize; tier2]].concat();
        let wanted = counts.iter().sum();
        return match wanted <= here {
            true => Ok(counts),
            false => Err(LaunchError::TooManyCores { wanted, here }),
        };
    }
    if opened.local.is_empty() || specification.topology.is_one_process() {
        return Ok(Vec::new());
    }
    let config = opened.model.config();
    let memory_bytes = memory_bytes.unwrap_or(u64::MAX);
    let shared = with_shared_cores(layout.clone(), config, here, memory_bytes, crowd);
    // Where tiers send each other rows of every layer, their network threads would wait for cores.
    let is_one_tier = layout.tier2 == 0 || layout.own_first;
    if is_one_tier && !opened.has_gpu() && shared.strands == here {
        return Ok(vec![here; opened.local.len()]);
    }
    let kernels = thread_kernels(config, opened.model.name(), isa);
    let mut counts = vec![(here / opened.local.len()).max(1); opened.local.len()];
    // How many rows a batch has depends on the strands, and those on the cores.
    for _ in 0..2 {
        let threads = counts[..tier1].iter().copied().min().unwrap_or(1);
        let layout = layout.clone().with_strands(config, threads, memory_bytes, crowd);
        let needs = needs(&layout, config, &kernels, crowd).into_iter().zip(&opened.local);
        let needs: Vec<_> = needs.map(|(need, (_, gpu))| gpu.is_none().then_some(need)).collect();
        counts = share_out(here, &needs);
    }
    Ok(counts)
}

/// A layout with as many strands as promise to be worthwhile where every process has all of these cores. No flight is
/// needed there to keep a node busy while another one computes: prompts come together in few.
fn with_shared_cores(
    layout: Layout,
    config: &ModelConfig,
    cores: usize,
    memory_bytes: u64,
    crowd: Crowd,
) -> Layout {
    let flights = layout.flights;
    let layout = Layout { flights: 1, ..layout };
    Layout { flights, ..layout.with_strands(config, cores, memory_bytes, crowd) }
}

/// What one thread's kernels take here: as a profile says, or roughly.
pub(crate) fn thread_kernels(config: &ModelConfig, name: &str, isa: Isa) -> KernelTimes {
    match profiles::kept(config, &profiles::of_cores(isa, 1)) {
        Some(profile) => KernelTimes::Measured(Box::new(profile)),
        None => {
            let stands = if isa == Isa::Amx { STANDS_FOR_AMX } else { STANDS_FOR_OTHERS };
            let catalogue = Catalogue::built_in();
            let device = catalogue.get(stands).expect("it is in the catalogue");
            KernelTimes::analytic(device, &Shape::of(name, config))
        }
    }
}

/// What every process of a layout has to do for a prompt, in seconds of a thread: Tier 1 first, then Tier 2, slice by
/// slice.
fn needs(layout: &Layout, config: &ModelConfig, kernels: &KernelTimes, crowd: Crowd) -> Vec<f64> {
    let Crowd { prompts, input, output } = crowd;
    let batch = layout.batch as usize;
    let workers = if layout.own_first { 1 } else { layout.attention_workers() };
    let shards = layout.pipelines * layout.strands * workers * layout.flights as usize;
    let rows = crowd.rows_per_step((prompts / shards).clamp(1, batch), batch).clamp(1, batch);
    // Tier 1 merges the shards of a flight.
    let merged = rows * workers;
    let (tokens, each, together) = ((input + output) as f64, rows as f64, merged as f64);
    let chunk = (layout.chunk as usize).min(input).max(1);
    let attention = input as f64 / chunk as f64 * kernels.prefill_seconds(chunk, chunk as f64)
        + output as f64 / each * kernels.attention_seconds(rows, (input + output / 2) as f64);
    let (overheads, shape) = (kernels.overheads(), Shape::of("", config));
    let bytes =
        RowTraffic::ResidualHome.out_bytes(&shape) + RowTraffic::ResidualHome.back_bytes(&shape);
    let messages =
        tokens * (overheads.byte_seconds * bytes + 2.0 * overheads.message_seconds / each);
    let share = if layout.own_first { 0.0 } else { 1.0 / workers as f64 };
    let remote = share * layout.tier2 as f64;
    let own = 1.0 - remote;
    let layers = |slice: usize| layout.layers(config.layers, slice % layout.slices).len() as f64;
    let (tier1, tier2) = layout.nodes();
    let first = (0..tier1).map(|slice| {
        let is_last = slice % layout.slices + 1 == layout.slices;
        let classify = output as f64 / together * kernels.classify_seconds(merged);
        let layer = tokens / together * kernels.fused_seconds(merged) + own * attention;
        layers(slice) * (layer + remote * messages) + if is_last { classify } else { 0.0 }
    });
    let second =
        (0..tier2).map(|node| layers(node / layout.tier2) * share * (attention + messages));
    first.chain(second).collect()
}

/// Cores of each process, at least one: a few for those on a GPU, which need nothing (`None`), and the others by their
/// needs, so that the busiest is as little busy as can be. One that has nothing to do shares another's core.
fn share_out(cores: usize, needs: &[Option<f64>]) -> Vec<usize> {
    let on_gpus = needs.iter().filter(|need| need.is_none()).count();
    let on_cores = needs.len() - on_gpus;
    let has_few = on_cores > 0 && on_gpus * GPU_CORES + on_cores <= cores;
    let few = |need: &Option<f64>| if has_few && need.is_none() { GPU_CORES } else { 1 };
    let mut counts: Vec<usize> = needs.iter().map(few).collect();
    let idle = needs.iter().filter(|need| **need == Some(0.0)).count();
    let left = cores.saturating_sub(counts.iter().sum::<usize>() - idle);
    let need = |need: Option<f64>| if on_cores > 0 { need.unwrap_or(0.0) } else { 1.0 };
    for _ in 0..left {
        let load = |index: &usize| need(needs[*index]) / counts[*index] as f64;
        let busiest = (0..needs.len()).rev().max_by(|one, other| load(one).total_cmp(&load(other)));
        counts[busiest.expect("there is a process")] += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use glinthawk_compute::ContextType;

    #[test]
    fn processes_have_cores_by_their_needs() {
        let check = |cores, needs: &[Option<f64>], expected: &[usize]| {
            assert_eq!(share_out(cores, needs), expected, "{cores} cores for {needs:?}");
        };
        let some = |need| Some(need);
        check(4, &[some(1.0), some(1.0)], &[2, 2]);
        check(16, &[some(3.0), some(1.0)], &[12, 4]);
        check(16, &[some(100.0), some(1.0), some(1.0), some(1.0)], &[13, 1, 1, 1]);
        check(2, &[some(9.0), some(1.0), some(1.0)], &[1, 1, 1]);
        check(8, &[None, some(1.0)], &[2, 6]);
        check(8, &[some(1.0), None, some(1.0)], &[3, 2, 3]);
        check(8, &[None, None], &[4, 4]);
        check(2, &[None, some(1.0)], &[1, 1]);
        check(16, &[some(1.0), some(1.0), some(0.0), some(0.0)], &[8, 8, 1, 1]);
    }

    #[test]
    fn long_contexts_need_cores_in_tier_2() {
        let config = ModelConfig::shape("llama3-8b").expect("a known shape");
        let kernels = thread_kernels(&config, "llama3-8b", Isa::Portable);
        let cores = |input, output, tier1_attends, tier2| {
            let layout = Layout {
                pipelines: 1,
                slices: 1,
                tier2,
                tier1_attends,
                strands: 1,
                batch: 256,
                flights: 3,
                own_batch: None,
                own_first: false,
                chunk: 256,
                page_positions: 16,
                context_max: 8192,
                context_type: ContextType::Bf16,
                whole_flights: false,
                sharing: true,
            };
            let crowd = Crowd { prompts: 1024, input, output };
            let needs = needs(&layout, &config, &kernels, crowd);
            share_out(16, &needs.into_iter().map(Some).collect::<Vec<_>>())
        };
        let (short, long) = (cores(64, 64, false, 1), cores(64, 8000, false, 1));
        assert!(short[1] < long[1], "{short:?} {long:?}");
        let (apart, together) = (cores(64, 8000, false, 1), cores(64, 8000, true, 1));
        assert!(together[1] < apart[1], "Tier 1 attends for half: {apart:?} {together:?}");
    }
}
