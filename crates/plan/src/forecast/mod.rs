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
mod deployment;
mod expected;
mod machine;
mod network;
mod processes;
mod strands;

pub use deployment::{Deployment, OwnLane, Place};
pub use expected::Forecast;

use crate::trace::Trace;
use crate::workload::{Common, Length, Workload};
use machine::Machine;
use strands::strand_share;

/// Prompts per seat that are simulated. The rest of a longer job follows at the pace of the last of them.
const PROMPTS_PER_SEAT: usize = 4;

/// Seats that a small cluster is taken to have, so that enough of its job is simulated.
const SEATS_MIN: usize = 16;

/// Prompts that are sampled in a row, if some have something in common: those that begin alike are often neighbours.
const SAMPLED_IN_A_ROW: usize = 64;

/// By how many spreads the slowest of some strands is slower than their average, over the logarithm of their number:
/// about what a normal distribution has.
const SLOWEST: f64 = 0.64;

/// Visits of shards to layers up to which every layer is simulated by itself.
const VISITS_MAX: f64 = 25_000_000.0;

/// The same in a rough forecast.
const VISITS_ROUGH: f64 = 4_000_000.0;

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
    match deployment.strands {
        1 => forecast_strand(deployment, workload, grain, trace),
        _ => side_by_side(deployment, workload, grain, trace),
    }
}

/// The same for one of the strands, and its part of the prompts.
fn forecast_strand(
    deployment: &Deployment,
    workload: &Workload,
    grain: impl Fn(&Deployment, &[Length]) -> usize,
    trace: Option<&mut Trace>,
) -> Forecast {
    let lengths = workload.lengths();
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
            let shared = (long.tokens_shared - short.tokens_shared) / (long_rows - short_rows);
            long.tokens_shared += shared * (workload.rows() - long_rows);
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
        forecast.tokens_shared /= forecast.share_simulated;
    }
    forecast.tokens = tokens;
    forecast
}

/// Forecasts one strand's part of the prompts, and counts all strands' work in that time. The job takes as long as the
/// slowest of them.
fn side_by_side(
    deployment: &Deployment,
    workload: &Workload,
    grain: impl Fn(&Deployment, &[Length]) -> usize,
    trace: Option<&mut Trace>,
) -> Forecast {
    let (lengths, strands) = (workload.lengths(), deployment.strands);
    let share = Workload::new(&workload.name, strand_share(lengths, strands));
    let share = share.expect("lengths that were valid");
    let strand = forecast_strand(deployment, &share, grain, trace);
    let (times, count) = (strands as f64, strands as u64);
    let slowest = 1.0 + SLOWEST * times.ln() * deployment.tier1.spread();
    Forecast {
        seconds: slowest * strand.seconds,
        tokens: workload.rows() + lengths.len() as f64,
        tokens_shared: times * strand.tokens_shared,
        steps: count * strand.steps,
        step_seconds: times * strand.step_seconds,
        tier1_shard_seconds: times * strand.tier1_shard_seconds,
        queueing_seconds: times * strand.queueing_seconds,
        tier1_seconds: strand.tier1_seconds.repeat(strands),
        tier2_seconds: strand.tier2_seconds.repeat(strands),
        tier1_batches: count * strand.tier1_batches,
        tier1_rows: count * strand.tier1_rows,
        tier1_bytes: times * strand.tier1_bytes,
        tier2_bytes: times * strand.tier2_bytes,
        preemptions: count * strand.preemptions,
        ..strand
    }
}

/// `count` of the lengths, evenly from all over the job; a few in a row where they have something in common.
fn sample(lengths: &[Length], count: usize) -> Vec<Length> {
    let alike = lengths.iter().any(|length| length.common != Common::default());
    let row = if alike { SAMPLED_IN_A_ROW.min(count) } else { 1 };
    let rows = count.div_ceil(row);
    (0..count).map(|index| lengths[index / row * lengths.len() / rows + index % row]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calculus::NetworkLink;
    use crate::kernels::KernelTimes;
    use crate::profile::tests::linear;
    use crate::profile::{Point, Profile};
    use crate::shape::Shape;
    use std::sync::Arc;

    fn deployment(tier2: usize, place: Place) -> Deployment {
        let mut shape = Shape::llama2_70b();
        shape.layers = 4;
        let kernels = Arc::new(KernelTimes::Measured(Box::new(linear(1e-3, 1e-5))));
        Deployment {
            shape,
            slices: vec![4],
            tier2,
            local_lane: tier2 == 0,
            own_lane: None,
            own_first: None,
            strands: 1,
            crowding: [1.0; 2],
            batch: 8,
            flights: 1,
            chunk: 64,
            context_max: 512,
            lane_pages: 8 * 32,
            page_positions: 16,
            whole_flights: false,
            greedy: true,
            tier1: Arc::clone(&kernels),
            tier2_kernels: kernels,
            delay_seconds: 0.0,
            bandwidth: f64::INFINITY,
            port: f64::INFINITY,
            hop: NetworkLink { rtt_seconds: 0.0, bandwidth: f64::INFINITY },
            place,
        }
    }

    fn length(prompt: usize, output: usize) -> Length {
        Length { prompt, output, ..Length::default() }
    }

    fn seconds(deployment: &Deployment, prompts: usize, prompt: usize, output: usize) -> f64 {
        let workload = Workload::uniform(prompt, output, prompts).expect("valid");
        forecast(deployment, &workload, None).seconds
    }

    #[test]
    fn one_prompt_takes_the_sum_of_its_kernels() {
        let deployment = deployment(0, Place::OneProcess);
        let kernels = &deployment.tier1;
        let step = |rows: usize, attention: f64| {
            kernels.pre_seconds(rows)
                + 3.0 * kernels.fused_seconds(rows)
                + kernels.post_seconds(rows)
                + kernels.classify_seconds(1)
                + 4.0 * attention
        };
        let expected = step(6, kernels.prefill_seconds(6, 6.0))
            + (7..9)
                .map(|context| step(1, kernels.attention_seconds(1, f64::from(context))))
                .sum::<f64>();
        let got = seconds(&deployment, 1, 6, 3);
        assert!((got / expected - 1.0).abs() < 1e-9, "{got} against {expected}");
    }

    #[test]
    fn delay_adds_two_ways_for_each_layer_and_step() {
        let near = deployment(1, Place::OwnMachines);
        let far = Deployment { delay_seconds: 0.01, ..near.clone() };
        // One token in and five out: five steps of four layers.
        let added = seconds(&far, 1, 1, 5) - seconds(&near, 1, 1, 5);
        assert!((added - 5.0 * 4.0 * 0.02).abs() < 1e-9, "{added}");
    }

    #[test]
    fn a_devices_copies_are_part_of_the_way() {
        let without = deployment(1, Place::OwnMachines);
        let KernelTimes::Measured(profile) = &*without.tier1 else { unreachable!() };
        let copies = |seconds| vec![Point { batch: 8, seconds, spread: 0.0 }];
        let (to_host, to_device) = (copies(0.01), copies(0.02));
        let profile = Box::new(Profile { to_host, to_device, ..*profile.clone() });
        let tier1 = Arc::new(KernelTimes::Measured(profile));
        let with = Deployment { tier1, ..without.clone() };
        let added = seconds(&with, 1, 1, 5) - seconds(&without, 1, 1, 5);
        assert!((added - 5.0 * 4.0 * 0.03).abs() < 1e-9, "{added}");
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
        let far =
            Deployment { hop: NetworkLink { rtt_seconds: 0.1, bandwidth: 1e6 }, ..near.clone() };
        // Five steps, each with one hop of a row and one way home.
        let bytes = 76.0 + crate::RowTraffic::ResidualHome.hop_bytes(&near.shape);
        let added = seconds(&far, 1, 1, 5) - seconds(&near, 1, 1, 5);
        assert!((added - 5.0 * (0.1 + bytes / 1e6)).abs() < 1e-9, "{added}");
    }

    #[test]
    fn one_layer_may_stand_for_several() {
        let lengths = (0..400).map(|index| length(20 + index % 90, 10 + index % 70));
        let workload = Workload::new("mixed", lengths.collect()).expect("valid");
        let base = deployment(3, Place::OwnMachines);
        let shape = Shape { layers: 24, ..base.shape.clone() };
        let base = Deployment { shape, delay_seconds: 1e-3, ..base };
        for (slices, flights, local_lane, tier2) in [
            (vec![24], 1, false, 3),
            (vec![24], 4, false, 3),
            (vec![24], 3, true, 2),
            (vec![12, 12], 2, false, 3),
            (vec![12, 12], 8, false, 2),
            (vec![8, 8, 8], 3, true, 0),
            (vec![8, 8, 8], 12, true, 1),
        ] {
            let hop = NetworkLink { rtt_seconds: 1e-3, bandwidth: 1e8 };
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
        let deployment = deployment(0, Place::OneProcess);
        let (some, many) = (seconds(&deployment, 100, 10, 20), seconds(&deployment, 1000, 10, 20));
        assert!((many / some / 10.0 - 1.0).abs() < 0.03, "{many} {some}");
    }

    #[test]
    fn what_prompts_have_in_common_is_computed_once() {
        let deployment = deployment(0, Place::OneProcess);
        let job = |common: Common| {
            let lengths = (0..40).map(|_| Length { common, ..length(400, 4) });
            let workload = Workload::new("alike", lengths.collect()).expect("valid");
            forecast(&deployment, &workload, None)
        };
        let apart = job(Common::default());
        assert_eq!(apart.tokens_shared, 0.0);
        // All but one find 368 tokens, or whole pages before the last token of the same prompt.
        let alike = job(Common { tokens: 368, text: 7, again: false });
        assert_eq!((alike.tokens_shared, alike.tokens), (39.0 * 368.0, apart.tokens));
        let again = job(Common { tokens: 0, text: 0, again: true });
        assert_eq!(again.tokens_shared, 39.0 * 384.0);
        assert!(alike.seconds < 0.4 * apart.seconds, "{} {}", alike.seconds, apart.seconds);
        assert!(again.seconds < alike.seconds, "{} {}", again.seconds, alike.seconds);
        assert_eq!(alike.share_simulated, 1.0);
    }

    #[test]
    fn strands_that_share_a_core_attend_later() {
        let roomy = deployment(1, Place::OwnMachines);
        let crowded = Deployment { crowding: [1.0, 3.0], ..roomy.clone() };
        // Five steps of four layers, each with attention that takes three times as long.
        let attention: f64 =
            (1..=5).map(|context| roomy.tier1.attention_seconds(1, context as f64)).sum();
        let added = seconds(&crowded, 1, 1, 5) - seconds(&roomy, 1, 1, 5);
        assert!((added - 2.0 * 4.0 * attention).abs() < 1e-9, "{added} {attention}");
    }

    #[test]
    fn strands_share_the_prompts() {
        let one = deployment(0, Place::OneProcess);
        let two = Deployment { strands: 2, ..one.clone() };
        let half = seconds(&one, 20, 10, 20);
        assert_eq!(seconds(&two, 40, 10, 20), half);
        let workload = Workload::uniform(10, 20, 40).expect("valid");
        let together = forecast(&two, &workload, None);
        assert_eq!(together.tokens, 40.0 * 30.0);
        let alternating = [length(10, 5), length(10, 60)];
        let halves = Workload::new("halves", alternating.repeat(10)).expect("valid");
        let all = Workload::new("all", alternating.repeat(20)).expect("valid");
        let half = forecast(&one, &halves, None).seconds;
        let both = forecast(&two, &all, None).seconds;
        assert!((both / half - 1.0).abs() < 0.02, "{both} {half}");
        assert_eq!(together.tier1_seconds.len(), 2);
    }

    #[test]
    fn own_lanes_are_not_left_behind() {
        // Tier 1 always has work for the other lane.
        let without = Deployment { flights: 3, ..deployment(1, Place::OwnMachines) };
        let with = Deployment { local_lane: true, ..without.clone() };
        for prompts in [6, 12, 24, 48] {
            let took = |deployment: &Deployment| seconds(deployment, prompts, 100, 20);
            let (with, without) = (took(&with), took(&without));
            assert!(with < 1.02 * without, "{prompts} prompts: {with} s, without {without} s");
        }
    }

    #[test]
    fn an_own_lane_is_filled_first() {
        let beside = deployment(1, Place::OwnMachines);
        let attended = |pages| {
            let own_lane = Some(OwnLane { batch: 64, pages });
            let hybrid = Deployment { local_lane: true, own_lane, ..beside.clone() };
            let workload = Workload::uniform(16, 16, 48).expect("valid");
            forecast(&hybrid, &workload, None).tier2_seconds
        };
        assert_eq!(attended(96)[1], 0.0, "all have room on the own lane");
        assert!(attended(32)[1] > 0.0);
    }

    #[test]
    fn scarce_pages_cost_time() {
        let roomy = deployment(0, Place::OneProcess);
        let scarce = Deployment { lane_pages: 40, ..roomy.clone() };
        let workload = Workload::uniform(100, 200, 32).expect("valid");
        let (roomy, scarce) =
            (forecast(&roomy, &workload, None), forecast(&scarce, &workload, None));
        assert_eq!(roomy.preemptions, 0);
        assert!(scarce.seconds > 1.2 * roomy.seconds);
    }
}
