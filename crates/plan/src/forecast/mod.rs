//! How long a job takes: the real dispatcher and nodes run it in virtual time over a profile's kernels, with its
//! beginning, its prefill, its preemptions and its end, and with processes that share cores.
//!
//! The planner's simulator (`simulator.rs`) knows only the settled state and is fast enough to search with; this is
//! for the one job that will be run.
//!
//! A large cluster makes many events for each step of a shard: two messages and two kernels a layer. Where a job would
//! take minutes to simulate, one simulated layer stands for several: it takes as long as they do together in kernels,
//! on links and in messages, so a step takes as long as before. Shards that visit Tier 1 less often, and stay longer,
//! meet there more often: where Tier 1 is the limit and its batches are small, two layers as one make a forecast up to
//! a sixth too fast, and more layers up to a third. So the planner searches with such rough forecasts, but what it
//! chooses, and all that `simulate` and `run` say, comes from forecasts that merge layers only in enormous jobs. A
//! forecast says when it was made so.

mod cores;
mod machine;
mod network;
mod processes;

use std::fmt::Write;
use std::sync::Arc;

use serde::Serialize;

use crate::bound::Bottleneck;
use crate::calculus::NetworkLink;
use crate::kernels::KernelTimes;
use crate::shape::Shape;
use crate::trace::Trace;
use crate::workload::{Length, Workload};
use glinthawk_protocol::Merge;
use machine::Machine;

/// Prompts per seat that are simulated. The rest of a longer job follows at the pace of the last of them.
const PROMPTS_PER_SEAT: usize = 4;

/// Seats that a small cluster is taken to have, so that enough of its job is simulated.
const SEATS_MIN: usize = 16;

/// Visits of shards to layers up to which every layer is simulated by itself.
const VISITS_MAX: f64 = 25_000_000.0;

/// The same in a rough forecast.
const VISITS_ROUGH: f64 = 4_000_000.0;

/// What each node has to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// All nodes are one process, messages are function calls.
    OneProcess {
        /// Lanes that compute side by side, each with its part of the prompts.
        lanes: usize,
    },
    /// Every node is a process, pinned in turn to one of this many cores of one machine.
    SharedCores(usize),
    /// Every node has its own machine.
    OwnMachines,
}

/// An engine and where it runs, as far as a forecast needs to know.
#[derive(Clone, Debug)]
pub struct Deployment {
    /// The model.
    pub shape: Shape,
    /// Layers of each Tier-1 node.
    pub slices: Vec<usize>,
    /// Tier-2 nodes for each Tier-1 node.
    pub tier2: usize,
    /// Whether Tier-1 nodes attend too.
    pub local_lane: bool,
    /// Rows of a flight on each attention worker (B).
    pub batch: u32,
    /// Flights in the air.
    pub flights: u32,
    /// Prefill rows of one prompt in a step.
    pub chunk: u32,
    /// Positions a context may have.
    pub context_max: u32,
    /// Pages of each attention worker.
    pub lane_pages: u32,
    /// Whether Tier 1 waits for whole flights.
    pub whole_flights: bool,
    /// Whether tokens are the likeliest ones, else drawn.
    pub greedy: bool,
    /// Kernels of Tier 1, and of everything in one process.
    pub tier1: Arc<KernelTimes>,
    /// Kernels of Tier 2.
    pub tier2_kernels: Arc<KernelTimes>,
    /// Delay between the tiers, one way, in seconds.
    pub delay: f64,
    /// Bytes per second between a Tier-1 and a Tier-2 node, each direction; infinite if nothing limits it.
    pub bandwidth: f64,
    /// Bytes per second between a Tier-1 node and all its Tier-2 nodes together, each direction.
    pub port: f64,
    /// From slice to slice, each on a machine of its own.
    pub hop: NetworkLink,
    /// What the nodes share.
    pub place: Place,
}

impl Deployment {
    /// Attention workers of each slice.
    pub fn lanes(&self) -> usize {
        self.tier2 + usize::from(self.local_lane)
    }

    fn merge(&self) -> Merge {
        if self.whole_flights { Merge::WholeFlights } else { Merge::Ready }
    }

    fn seats(&self) -> usize {
        self.batch as usize * self.flights as usize * self.lanes()
    }

    /// Layers that one simulated layer stands for, so that a job of these lengths makes no more visits.
    fn grain(&self, lengths: &[Length], visits_max: f64) -> usize {
        let steps = |length: &Length| length.steps(self.chunk as usize) as f64;
        let all: f64 = lengths.iter().map(steps).sum();
        let longest = lengths.iter().map(steps).fold(0.0, f64::max);
        // While there are enough prompts every step of a shard carries a batch of them, then fewer and fewer.
        let shards = f64::from(self.flights) * self.lanes() as f64;
        let shard_steps = (all / f64::from(self.batch) + shards * longest).min(all);
        let most = *self.slices.iter().max().expect("there is a slice");
        let visits = |grain: usize| {
            shard_steps
                * self.slices.iter().map(|layers| layers.div_ceil(grain) as f64).sum::<f64>()
        };
        (1..=most).find(|&grain| visits(grain) <= visits_max).unwrap_or(most)
    }
}

/// What a job is expected to do.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Forecast {
    /// From the first prompt to the last token.
    pub seconds: f64,
    /// Prompt and generated tokens.
    pub tokens: f64,
    /// Fraction of the job that was simulated; the rest follows at its pace.
    pub share_simulated: f64,
    /// Steps of shards that were simulated.
    pub steps: u64,
    /// Seconds of all these steps together.
    pub step_seconds: f64,
    /// Seconds that shards were in Tier 1's kernels.
    pub tier1_shard_seconds: f64,
    /// Seconds that shards waited for kernels.
    pub queueing_seconds: f64,
    /// Seconds that each Tier-1 node's kernels ran.
    pub tier1_seconds: Vec<f64>,
    /// Seconds that each attention worker's kernels ran, slice by slice.
    pub tier2_seconds: Vec<f64>,
    /// Batches of all Tier-1 nodes.
    pub tier1_batches: u64,
    /// Rows in them.
    pub tier1_rows: u64,
    /// Bytes that Tier-1 nodes send to other processes.
    pub tier1_bytes: f64,
    /// Bytes that Tier-2 nodes send.
    pub tier2_bytes: f64,
    /// Prompts whose context is dropped because pages run out, and computed again.
    pub preemptions: u64,
    /// Seconds of the part that was simulated.
    pub simulated_seconds: f64,
    /// Layers that one simulated layer stood for: 1, unless the job would have taken too long to simulate.
    pub layers_as_one: usize,
    rows_done: u64,
    /// Events of the simulation.
    pub events: u64,
}

impl Forecast {
    fn new(tier1: usize, tier2: usize) -> Self {
        Self { tier1_seconds: vec![0.0; tier1], tier2_seconds: vec![0.0; tier2], ..Self::default() }
    }

    /// Prompt and generated tokens per second.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens / self.seconds
    }

    /// What is busiest on `deployment`; latency where nothing is busy for most of the time.
    pub fn bottleneck(&self, deployment: &Deployment) -> Bottleneck {
        let most = |seconds: &[f64]| seconds.iter().copied().fold(0.0, f64::max);
        let lanes = deployment.lanes();
        let own = usize::from(deployment.local_lane);
        let remote: Vec<f64> =
            self.tier2_seconds.chunks(lanes).flat_map(|of| &of[own..]).copied().collect();
        let local = self.tier2_seconds.chunks(lanes).map(|of| of[..own].iter().sum::<f64>());
        let tier1: Vec<f64> =
            self.tier1_seconds.iter().zip(local).map(|(own, attention)| own + attention).collect();
        let slices = deployment.slices.len() as f64;
        let out = self.tier1_bytes.max(self.tier2_bytes) / slices;
        let loads = [
            (most(&tier1), Bottleneck::Tier1Compute),
            (most(&remote), Bottleneck::Tier2Compute),
            (out / deployment.port, Bottleneck::InterTierLink),
            (out / deployment.tier2.max(1) as f64 / deployment.bandwidth, Bottleneck::Tier2Link),
        ];
        let busiest = loads.into_iter().max_by(|one, other| one.0.total_cmp(&other.0));
        match busiest {
            Some((seconds, what)) if 2.0 * seconds > self.simulated_seconds => what,
            _ => Bottleneck::Latency,
        }
    }

    /// The forecast as text for a terminal.
    pub fn render(&self) -> String {
        let mut text = String::new();
        let mut say = |name: &str, value: String| {
            writeln!(text, "{name:<22}{value}").expect("writing to a string does not fail");
        };
        say("the job", format!("{:.2} s, {:.1} tokens/s", self.seconds, self.tokens_per_second()));
        if self.layers_as_one > 1 {
            let layers = self.layers_as_one;
            say(
                "  simulated",
                format!("{layers} layers as one, which may be up to a third too fast"),
            );
        }
        if self.share_simulated < 1.0 {
            let share = 100.0 * self.share_simulated;
            say("  simulated", format!("{share:.1}% of it; the rest follows at the same pace"));
        }
        let steps = self.steps.max(1) as f64;
        let tier2: f64 = self.tier2_seconds.iter().sum();
        let network = self.step_seconds - self.tier1_shard_seconds - tier2 - self.queueing_seconds;
        let parts = [
            ("  a step", self.step_seconds),
            ("    Tier-1 compute", self.tier1_shard_seconds),
            ("    Tier-2 compute", tier2),
            ("    queueing", self.queueing_seconds),
            ("    network", network.max(0.0)),
        ];
        for (name, seconds) in parts {
            say(name, format!("{:9.2} ms", seconds / steps * 1e3));
        }
        let share = |seconds: &f64| format!("{:.1}%", 100.0 * seconds / self.simulated_seconds);
        let shares = |all: &[f64]| all.iter().map(share).collect::<Vec<_>>().join(" ");
        say("  Tier-1 busy", shares(&self.tier1_seconds));
        say("  attention busy", shares(&self.tier2_seconds));
        let rows = self.tier1_rows as f64 / self.tier1_batches.max(1) as f64;
        say("  Tier-1 batch", format!("{rows:.1} rows on average"));
        let rate = |bytes: f64| bytes * 8.0 / self.simulated_seconds / 1e9;
        say(
            "  traffic",
            format!(
                "{:.3} Gbps from Tier 1, {:.3} Gbps from Tier 2",
                rate(self.tier1_bytes),
                rate(self.tier2_bytes)
            ),
        );
        say("  preemptions", self.preemptions.to_string());
        text
    }
}

/// Forecasts `workload` on `deployment`; `trace` collects which node is busy when.
pub fn forecast(
    deployment: &Deployment,
    workload: &Workload,
    trace: Option<&mut Trace>,
) -> Forecast {
    let grain = |deployment: &Deployment, lengths: &[Length]| deployment.grain(lengths, VISITS_MAX);
    forecast_with(deployment, workload, grain, trace)
}

/// A forecast to search with: of a large job it is up to a third too fast, seldom too slow.
pub(crate) fn forecast_roughly(deployment: &Deployment, workload: &Workload) -> Forecast {
    let grain =
        |deployment: &Deployment, lengths: &[Length]| deployment.grain(lengths, VISITS_ROUGH);
    forecast_with(deployment, workload, grain, None)
}

/// The same with a choice of how many layers a simulated one stands for.
fn forecast_with(
    deployment: &Deployment,
    workload: &Workload,
    grain: impl Fn(&Deployment, &[Length]) -> usize,
    trace: Option<&mut Trace>,
) -> Forecast {
    let lengths = workload.lengths();
    if let Place::OneProcess { lanes } = deployment.place
        && lanes > 1
    {
        return side_by_side(deployment, workload, lanes, trace);
    }
    let enough = PROMPTS_PER_SEAT * deployment.seats().max(SEATS_MIN);
    let tokens = workload.rows() + lengths.len() as f64;
    let (mut forecast, rows) = if lengths.len() <= 2 * enough {
        let grain = grain(deployment, lengths);
        (Machine::new(deployment, lengths, grain, trace).run(), workload.rows())
    } else {
        // Run two jobs of the same mixture, one twice as long. Every further half takes as long as the second
        // half.
        let (short, long) = (sample(lengths, enough), sample(lengths, 2 * enough));
        let rows =
            |lengths: &[Length]| lengths.iter().map(|length| length.rows() as f64).sum::<f64>();
        let (short_rows, long_rows) = (rows(&short), rows(&long));
        let grain = grain(deployment, &long);
        let short = Machine::new(deployment, &short, grain, None).run();
        let mut long = Machine::new(deployment, &long, grain, trace).run();
        long.simulated_seconds = long.seconds;
        let cut = |forecast: &Forecast, rows: f64| (forecast.rows_done as f64) < rows;
        if !cut(&short, short_rows) && !cut(&long, long_rows) {
            let pace = (long.seconds - short.seconds) / (long_rows - short_rows);
            long.seconds += pace * (workload.rows() - long_rows);
            long.share_simulated = long_rows / workload.rows();
            long.tokens = tokens;
            return long;
        }
        (long, workload.rows())
    };
    // A job that was cut off is assumed to continue at its own pace.
    forecast.simulated_seconds = forecast.seconds;
    forecast.share_simulated = (forecast.rows_done as f64 / rows).min(1.0);
    if forecast.share_simulated > 0.0 {
        forecast.seconds /= forecast.share_simulated;
    }
    forecast.tokens = tokens;
    forecast
}

/// Forecasts one lane's part of the prompts, and counts all lanes' work in that time.
fn side_by_side(
    deployment: &Deployment,
    workload: &Workload,
    lanes: usize,
    trace: Option<&mut Trace>,
) -> Forecast {
    let lengths = workload.lengths();
    // Take a different one of every few prompts each time, because lengths may alternate.
    let mine = |(index, _): &(usize, &Length)| (index + index / lanes).is_multiple_of(lanes);
    let share = lengths.iter().enumerate().filter(mine).map(|(_, length)| *length).collect();
    let share = Workload::new(&workload.name, share).expect("lengths that were valid");
    let one = Deployment { place: Place::OneProcess { lanes: 1 }, ..deployment.clone() };
    let lane = forecast(&one, &share, trace);
    let (times, count) = (lanes as f64, lanes as u64);
    Forecast {
        tokens: workload.rows() + lengths.len() as f64,
        steps: count * lane.steps,
        step_seconds: times * lane.step_seconds,
        tier1_shard_seconds: times * lane.tier1_shard_seconds,
        queueing_seconds: times * lane.queueing_seconds,
        tier1_seconds: lane.tier1_seconds.repeat(lanes),
        tier2_seconds: lane.tier2_seconds.repeat(lanes),
        tier1_batches: count * lane.tier1_batches,
        tier1_rows: count * lane.tier1_rows,
        preemptions: count * lane.preemptions,
        ..lane
    }
}

/// `count` of the lengths, evenly from all over the job.
fn sample(lengths: &[Length], count: usize) -> Vec<Length> {
    (0..count).map(|index| lengths[index * lengths.len() / count]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::tests::linear;

    fn deployment(tier2: usize, place: Place) -> Deployment {
        let mut shape = Shape::llama2_70b();
        shape.layers = 4;
        let kernels = Arc::new(KernelTimes::Measured(Box::new(linear(1e-3, 1e-5))));
        Deployment {
            shape,
            slices: vec![4],
            tier2,
            local_lane: tier2 == 0,
            batch: 8,
            flights: 1,
            chunk: 64,
            context_max: 512,
            lane_pages: 8 * 32,
            whole_flights: false,
            greedy: true,
            tier1: Arc::clone(&kernels),
            tier2_kernels: kernels,
            delay: 0.0,
            bandwidth: f64::INFINITY,
            port: f64::INFINITY,
            hop: NetworkLink { rtt: 0.0, bandwidth: f64::INFINITY },
            place,
        }
    }

    fn seconds(deployment: &Deployment, prompts: usize, prompt: usize, output: usize) -> f64 {
        let workload = Workload::uniform(prompt, output, prompts).expect("valid");
        forecast(deployment, &workload, None).seconds
    }

    #[test]
    fn one_prompt_takes_the_sum_of_its_kernels() {
        let deployment = deployment(0, Place::OneProcess { lanes: 1 });
        let kernels = &deployment.tier1;
        let step = |rows: usize, attention: f64| {
            kernels.pre(rows)
                + 3.0 * kernels.fused(rows)
                + kernels.post(rows)
                + kernels.classify(1)
                + 4.0 * attention
        };
        let expected = step(6, kernels.prefill(6, 6.0))
            + (7..9).map(|context| step(1, kernels.attention(1, f64::from(context)))).sum::<f64>();
        let got = seconds(&deployment, 1, 6, 3);
        assert!((got / expected - 1.0).abs() < 1e-9, "{got} against {expected}");
    }

    #[test]
    fn delay_adds_two_ways_for_each_layer_and_step() {
        let near = deployment(1, Place::OwnMachines);
        let far = Deployment { delay: 0.01, ..near.clone() };
        // One token in and five out: five steps of four layers.
        let added = seconds(&far, 1, 1, 5) - seconds(&near, 1, 1, 5);
        assert!((added - 5.0 * 4.0 * 0.02).abs() < 1e-9, "{added}");
    }

    #[test]
    fn bandwidth_is_shared_by_the_rows_of_a_shard() {
        let wide = deployment(1, Place::OwnMachines);
        let narrow = Deployment { bandwidth: 1e6, ..wide.clone() };
        let added = seconds(&narrow, 1, 1, 2) - seconds(&wide, 1, 1, 2);
        let shape = &wide.shape;
        let traffic = crate::RowTraffic::ResidualHome;
        let bytes = traffic.out_bytes(shape) + traffic.back_bytes(shape) + 2.0 * 76.0;
        assert!((added - 2.0 * 4.0 * bytes / 1e6).abs() < 1e-9, "{added}");
    }

    #[test]
    fn tier2_nodes_share_their_tier1_nodes_port() {
        let wide = deployment(4, Place::OwnMachines);
        let narrow = Deployment { bandwidth: 1e6, ..wide.clone() };
        let shared = Deployment { port: 1e6, ..wide.clone() };
        // Four prompts, one on each node: their messages cross four links, or one port.
        let took = |deployment: &Deployment| seconds(deployment, 4, 1, 40);
        let (apart, together) = (took(&narrow) - took(&wide), took(&shared) - took(&wide));
        assert!(together > 2.0 * apart, "{together} against {apart}");
    }

    #[test]
    fn hops_between_slices_take_their_time() {
        let near = Deployment { slices: vec![2, 2], ..deployment(1, Place::OwnMachines) };
        let far = Deployment { hop: NetworkLink { rtt: 0.1, bandwidth: 1e6 }, ..near.clone() };
        // Five steps, each with one hop of a row and one way home.
        let bytes = 76.0 + crate::RowTraffic::ResidualHome.hop_bytes(&near.shape);
        let added = seconds(&far, 1, 1, 5) - seconds(&near, 1, 1, 5);
        assert!((added - 5.0 * (0.1 + bytes / 1e6)).abs() < 1e-9, "{added}");
    }

    #[test]
    fn one_layer_may_stand_for_several() {
        let lengths =
            (0..400).map(|index| Length { prompt: 20 + index % 90, output: 10 + index % 70 });
        let workload = Workload::new("mixed", lengths.collect()).expect("valid");
        let base = deployment(3, Place::OwnMachines);
        let shape = Shape { layers: 24, ..base.shape.clone() };
        let base = Deployment { shape, delay: 1e-3, ..base };
        for (slices, flights, local_lane, tier2) in [
            (vec![24], 1, false, 3),
            (vec![24], 4, false, 3),
            (vec![24], 3, true, 2),
            (vec![12, 12], 2, false, 3),
            (vec![12, 12], 8, false, 2),
            (vec![8, 8, 8], 3, true, 0),
            (vec![8, 8, 8], 12, true, 1),
        ] {
            let hop = NetworkLink { rtt: 1e-3, bandwidth: 1e8 };
            let one = Deployment {
                slices: slices.clone(),
                flights,
                local_lane,
                tier2,
                hop,
                ..base.clone()
            };
            let fine = forecast_with(&one, &workload, |_, _| 1, None);
            let coarse = forecast_with(&one, &workload, |_, _| 2, None);
            assert_eq!((fine.layers_as_one, coarse.layers_as_one), (1, 2));
            let off = coarse.seconds / fine.seconds - 1.0;
            assert!(
                (-0.17..0.06).contains(&off),
                "{slices:?} x {tier2}, {flights} flights: {off:+.3}"
            );
            assert!(5 * coarse.events < 4 * fine.events, "{} {}", coarse.events, fine.events);
        }
    }

    #[test]
    fn processes_on_one_core_take_turns() {
        let apart = Deployment { flights: 4, ..deployment(1, Place::SharedCores(2)) };
        let together = Deployment { place: Place::SharedCores(1), ..apart.clone() };
        let workload = Workload::uniform(300, 40, 64).expect("valid");
        let (apart, together) =
            (forecast(&apart, &workload, None), forecast(&together, &workload, None));
        let work = |forecast: &Forecast| forecast.seconds;
        assert!(work(&together) > 1.3 * work(&apart), "{} {}", together.seconds, apart.seconds);
        // Nothing is idle on one core except for the network, which costs nothing here.
        let busy = forecast_work(&apart);
        assert!((together.seconds / busy - 1.0).abs() < 0.2, "{} {busy}", together.seconds);
    }

    fn forecast_work(forecast: &Forecast) -> f64 {
        forecast.tier1_seconds.iter().chain(&forecast.tier2_seconds).sum()
    }

    #[test]
    fn a_long_job_goes_on_at_the_pace_of_a_shorter_one() {
        let deployment = deployment(0, Place::OneProcess { lanes: 1 });
        let (some, many) = (seconds(&deployment, 100, 10, 20), seconds(&deployment, 1000, 10, 20));
        assert!((many / some / 10.0 - 1.0).abs() < 0.03, "{many} {some}");
    }

    #[test]
    fn lanes_share_the_prompts() {
        let one = deployment(0, Place::OneProcess { lanes: 1 });
        let two = Deployment { place: Place::OneProcess { lanes: 2 }, ..one.clone() };
        let half = seconds(&one, 20, 10, 20);
        assert_eq!(seconds(&two, 40, 10, 20), half);
        let workload = Workload::uniform(10, 20, 40).expect("valid");
        let together = forecast(&two, &workload, None);
        assert_eq!(together.tokens, 40.0 * 30.0);
        let alternating = [Length { prompt: 10, output: 5 }, Length { prompt: 10, output: 60 }];
        let halves = Workload::new("halves", alternating.repeat(10)).expect("valid");
        let all = Workload::new("all", alternating.repeat(20)).expect("valid");
        let half = forecast(&one, &halves, None).seconds;
        let both = forecast(&two, &all, None).seconds;
        assert!((both / half - 1.0).abs() < 0.02, "{both} {half}");
        assert_eq!(together.tier1_seconds.len(), 2);
    }

    #[test]
    fn scarce_pages_cost_time() {
        let roomy = deployment(0, Place::OneProcess { lanes: 1 });
        let scarce = Deployment { lane_pages: 40, ..roomy.clone() };
        let workload = Workload::uniform(100, 200, 32).expect("valid");
        let (roomy, scarce) =
            (forecast(&roomy, &workload, None), forecast(&scarce, &workload, None));
        assert_eq!(roomy.preemptions, 0);
        assert!(scarce.seconds > 1.2 * roomy.seconds);
    }
}
