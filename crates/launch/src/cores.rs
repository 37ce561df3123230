//! Cores of local processes: they share all of them strand by strand, or each gets some by what it has to do.

use crate::error::LaunchError;
use crate::machine;
use crate::opened::Opened;
use crate::profiles;
use crate::rough::{Between, promised};
use crate::specification::{Specification, flights_default};
use glinthawk_cluster::{Crowd, Layout, Link};
use glinthawk_compute::{Isa, allowed_cores};
use glinthawk_model::ModelConfig;
use glinthawk_plan::{Catalogue, KernelTimes, RowTraffic, Shape};
use std::sync::Arc;

/// Cores of a process on a GPU that others need cores beside: one gives it work, two are the network's.
const GPU_CORES: usize = 3;

/// What is left of tokens per second where two tiers share one machine's cores, with the same rows in a batch: 62 to 67%.
const LEFT_BY_MESSAGES: f64 = 0.65;
/// Rows of a batch from which computing them takes about as long as reading the weights.
const WEIGHTS_ROWS: f64 = 64.0;

/// Prompts of a strand up to which a job is forecast, to find out whether Tier 2 needs more than its part of the work. In a
/// longer one, some prompts begin while others generate, all the time.
const PROMPTS_OF_PHASES: usize = 256;
/// How many times more cores Tier 2 may get than its part of the work asks for.
const MORE_TO_TIER2: [f64; 3] = [2.0, 4.0, 8.0];
/// A gain below this is not worth other cores than the work asks for.
const GAIN_MIN: f64 = 0.05;

/// The device of the catalogue that stands for a machine without a profile.
const STANDS_FOR_AMX: &str = "xeon-amx-2";
const STANDS_FOR_OTHERS: &str = "epyc-7v12-16";

/// Which cores the processes of a layout have, and what follows from it for the layout.
pub(crate) struct Placement {
    pub layout: Layout,
    /// Cores of each local process, Tier 1 first.
    pub cores: Vec<usize>,
    /// Whether contexts are expected on Tier-2 nodes.
    pub uses_tier2: bool,
}

impl Placement {
    /// Places a layout's processes. In a hybrid on cores, Tier 2 is used if its memory makes batches so much fuller that
    /// messages are worth it.
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
        let all_bytes = memory_bytes.unwrap_or(u64::MAX);
        let pays = || tier2_pays(&layout, config, here, [own_bytes, all_bytes], crowd);
        let uses_tier2 = layout.tier2 > 0 && !(on_cores && layout.tier1_attends && !pays());
        layout.own_first = layout.tier2 > 0 && !uses_tier2;
        let least = |bytes: u64| if topology.hybrid { bytes.min(own_bytes) } else { bytes };
        let job = Job { layout: &layout, isa, memory: [least(all_bytes), all_bytes], crowd };
        let memory_bytes = memory_bytes.map(least);
        let cores = of_processes(specification, opened, &job)?;
        let is_everywhere = !cores.is_empty() && cores.iter().all(|own| *own == here);
        layout.shares_cores =
            on_cores && is_everywhere && may_share_cores(&layout, topology.link());
        let flights = match (layout.shares_cores, layout.own_first) {
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
            layout = match layout.shares_cores {
                true => with_shared_cores(layout, config, threads, bytes, crowd),
                false => layout.with_strands(config, threads, bytes, crowd),
            };
        }
        Ok(Self { layout, cores, uses_tier2 })
    }
}

/// The cores of the process that has the fewest.
pub(crate) fn fewest(cores: &[usize]) -> Option<usize> {
    cores.iter().copied().min()
}

/// Whether processes that have the same cores may have few flights there. Messages of nodes on the same cores come at once,
/// unless they are held back.
fn may_share_cores(layout: &Layout, link: Link) -> bool {
    let is_one_tier = layout.tier2 == 0 || layout.own_first;
    is_one_tier || !layout.tier1_attends && link == Link::default()
}

/// Cores of each local process: those that were asked for; else all, if they may share them and take turns; else what each
/// needs. A core that a strand's nodes share is never idle while one of them has work.
fn of_processes(
    specification: &Specification,
    opened: &Opened,
    job: &Job<'_>,
) -> Result<Vec<usize>, LaunchError> {
    let Job { layout, isa, memory: [memory_bytes, _], crowd } = *job;
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
    let shared = with_shared_cores(layout.clone(), config, here, memory_bytes, crowd);
    // Threads that share a kernel wait for each other, and must not wait for the threads of another node.
    let takes_turns = shared.strands == here || specification.flights.is_none_or(|all| all == 1);
    let is_one_tier = layout.tier2 == 0 || layout.own_first;
    let link = specification.topology.link();
    if may_share_cores(layout, link) && !opened.has_gpu() && takes_turns {
        return Ok(vec![here; opened.local.len()]);
    }
    let kernels = Arc::new(thread_kernels(config, opened.model.name(), isa));
    let usual = job.cores(opened, &kernels, 1.0);
    let strands = job.stranded(config, &usual).strands;
    if is_one_tier || opened.has_gpu() || crowd.prompts > PROMPTS_OF_PHASES * strands {
        return Ok(usual);
    }
    let between = Between {
        delay_seconds: link.delay.as_secs_f64(),
        bandwidth: link.bytes_per_second.map_or(f64::INFINITY, |rate| rate as f64),
    };
    let rate = |cores: &[usize]| job.promised(config, &kernels, cores, between).unwrap_or(0.0);
    let others = MORE_TO_TIER2.map(|more| job.cores(opened, &kernels, more));
    let others = others.into_iter().filter(|cores| *cores != usual);
    let others = others.map(|cores| (rate(&cores), cores));
    let best = others.max_by(|(one, _), (other, _)| one.total_cmp(other));
    let enough = |best: &(f64, _)| best.0 > (1.0 + GAIN_MIN) * rate(&usual);
    Ok(best.filter(enough).map_or(usual, |(_, cores)| cores))
}

/// What is placed.
struct Job<'a> {
    layout: &'a Layout,
    isa: Isa,
    /// Bytes for contexts of the attention worker that has the least, and of a Tier-2 node.
    memory: [u64; 2],
    crowd: Crowd,
}

impl Job<'_> {
    /// The layout with the strands that it has on these cores.
    fn stranded(&self, config: &ModelConfig, cores: &[usize]) -> Layout {
        let threads = fewest(&cores[..self.layout.nodes().0]).unwrap_or(1);
        self.layout.clone().with_strands(config, threads, self.memory[0], self.crowd)
    }

    /// Cores by what each process has to do, where what Tier 2 has to do counts so many times.
    fn cores(&self, opened: &Opened, kernels: &KernelTimes, more: f64) -> Vec<usize> {
        let (config, (tier1, _)) = (opened.model.config(), self.layout.nodes());
        let here = allowed_cores().len();
        let mut counts = vec![(here / opened.local.len()).max(1); opened.local.len()];
        // How many rows a batch has depends on the strands, and those on the cores.
        for _ in 0..2 {
            let needs = needs(&self.stranded(config, &counts), config, kernels, self.crowd);
            let needs = needs.into_iter().enumerate().zip(&opened.local);
            let needs = needs.map(|((node, need), (_, gpu))| {
                gpu.is_none().then_some(if node < tier1 { need } else { more * need })
            });
            counts = share_out(here, &needs.collect::<Vec<_>>());
        }
        counts
    }

    /// Tokens per second that it promises on these cores.
    fn promised(
        &self,
        config: &ModelConfig,
        kernels: &Arc<KernelTimes>,
        cores: &[usize],
        between: Between,
    ) -> Option<f64> {
        let (tier1, tier2) = cores.split_at(self.layout.nodes().0);
        let threads = [fewest(tier1)?, fewest(tier2)?];
        let layout = self.stranded(config, cores);
        promised(&layout, config, kernels, self.crowd, threads, self.memory[1], between)
    }
}

/// Whether Tier-2 nodes with so much memory, beside Tier-1 nodes with some of their own, make batches so much fuller that
/// messages are worth it.
fn tier2_pays(
    layout: &Layout,
    config: &ModelConfig,
    cores: usize,
    [own_bytes, bytes]: [u64; 2],
    crowd: Crowd,
) -> bool {
    let own = layout.contexts_held(config, own_bytes, crowd);
    let all = own + layout.tier2 * layout.contexts_held(config, bytes, crowd);
    let alone = Layout { tier2: 0, ..layout.clone() };
    let strands = with_shared_cores(alone, config, cores, own_bytes, crowd).strands;
    let rate = |held: usize, batch: usize| {
        let together = crowd.prompts.div_ceil(layout.pipelines).min(held) / strands;
        let rows = crowd.rows_per_step(together.clamp(1, batch), batch) as f64;
        rows / (rows + WEIGHTS_ROWS)
    };
    let batch = layout.batch as usize;
    LEFT_BY_MESSAGES * rate(all, batch * layout.attention_workers()) > rate(own, batch)
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
    let Crowd { prompts, input, output, .. } = crowd;
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
        check(8, &[None, some(1.0)], &[3, 5]);
        check(8, &[some(1.0), None, some(1.0)], &[3, 3, 2]);
        check(8, &[None, None], &[4, 4]);
        check(2, &[None, some(1.0)], &[1, 1]);
        check(16, &[some(1.0), some(1.0), some(0.0), some(0.0)], &[8, 8, 1, 1]);
    }

    fn layout(tier1_attends: bool, tier2: usize) -> Layout {
        Layout {
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
            context_max: 2048,
            context_type: ContextType::Bf16,
            whole_flights: false,
            shares_cores: false,
            sharing: true,
            drafts: None,
        }
    }

    #[test]
    fn tiers_share_cores_unless_messages_are_held_back() {
        let slow = Link { delay: std::time::Duration::from_millis(2), ..Link::default() };
        let check = |tier1_attends, tier2, own_first, link, expected| {
            let layout = Layout { own_first, ..layout(tier1_attends, tier2) };
            assert_eq!(may_share_cores(&layout, link), expected);
        };
        check(true, 0, false, slow, true);
        check(false, 1, false, Link::default(), true);
        check(false, 1, false, slow, false);
        check(true, 1, false, Link::default(), false);
        check(true, 1, true, slow, true);
    }

    #[test]
    fn tier_2_is_used_where_its_memory_is_worth_messages() {
        let check = |shape: &str, crowd: Crowd, own: usize| {
            let config = ModelConfig::shape(shape).expect("a known shape");
            let layout = layout(true, 1);
            let pages = layout.pages_for((crowd.input + crowd.output) as u32);
            let own_bytes = own as u64 * pages * layout.page_bytes(&config, 0);
            tier2_pays(&layout, &config, 16, [own_bytes, 1 << 36], crowd)
        };
        let many = Crowd { prompts: 1024, input: 128, output: 64, alike: false };
        assert!(!check("smollm2-135m", many, 1024), "all fit");
        assert!(!check("smollm2-135m", many, 512), "batches of half are nearly as good");
        assert!(check("smollm2-135m", many, 64));
        let long = Crowd { prompts: 12, input: 1024, output: 128, alike: false };
        assert!(check("llama3-8b", long, 3));
        assert!(!check("llama3-8b", long, 12), "all fit");
    }

    #[test]
    fn prompts_that_generate_at_once_need_cores_in_tier_2() {
        let config = ModelConfig::shape("llama3-8b").expect("a known shape");
        let kernels = Arc::new(thread_kernels(&config, "llama3-8b", Isa::Amx));
        let layout = layout(false, 1);
        let crowd = Crowd { prompts: 12, input: 1024, output: 128, alike: false };
        let job = Job { layout: &layout, isa: Isa::Amx, memory: [1 << 36; 2], crowd };
        let between = Between { delay_seconds: 0.0, bandwidth: f64::INFINITY };
        let rate = |cores: [usize; 2]| job.promised(&config, &kernels, &cores, between);
        let [one, some, many] = [[15, 1], [13, 3], [4, 12]].map(rate);
        assert!(some > one && some > many, "{one:?} {some:?} {many:?}");
    }

    #[test]
    fn long_contexts_need_cores_in_tier_2() {
        let config = ModelConfig::shape("llama3-8b").expect("a known shape");
        let kernels = thread_kernels(&config, "llama3-8b", Isa::Portable);
        let cores = |input, output, tier1_attends, tier2| {
            let layout = layout(tier1_attends, tier2);
            let crowd = Crowd { prompts: 1024, input, output, alike: false };
            let needs = needs(&layout, &config, &kernels, crowd);
            share_out(16, &needs.into_iter().map(Some).collect::<Vec<_>>())
        };
        let (short, long) = (cores(64, 64, false, 1), cores(64, 8000, false, 1));
        assert!(short[1] < long[1], "{short:?} {long:?}");
        let (apart, together) = (cores(64, 8000, false, 1), cores(64, 8000, true, 1));
        assert!(together[1] < apart[1], "Tier 1 attends for half: {apart:?} {together:?}");
    }
}
