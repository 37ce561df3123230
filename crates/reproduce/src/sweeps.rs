//! Round trips between the tiers and longer sequences.

use crate::calibration::{CPU, LONGEST, Testbed};
use crate::comparison::{Comparison, Section, Standing, Statement, Table, Test};
use crate::costs::node_price;

/// A point of fig:rtt_thr.
#[derive(Clone, Debug)]
pub(crate) struct LatencyPoint {
    pub induced_ms: f64,
    pub tier2: usize,
    pub rows: usize,
    /// Of the throughput without induced latency.
    pub share: f64,
}

/// fig:rtt_thr: the prototype's configurations under induced latency.
pub(crate) fn latency_points(testbed: &Testbed) -> Vec<LatencyPoint> {
    let all = testbed.experiments.iter().filter(|experiment| experiment.group == "micro_latency");
    let rate = |experiment| testbed.rate(experiment, LONGEST);
    let whole = rate(testbed.experiment("0ms_OPT_L70B_9xT4_27xCPU_B255"));
    let mut points: Vec<LatencyPoint> = all
        .map(|experiment| LatencyPoint {
            induced_ms: experiment.induced_ms,
            tier2: experiment.tier2,
            rows: experiment.rows,
            share: rate(experiment) / whole,
        })
        .collect();
    points.sort_by(|left, right| {
        left.induced_ms.total_cmp(&right.induced_ms).then(left.tier2.cmp(&right.tier2))
    });
    points
}

fn latency_statements(points: &[LatencyPoint]) -> Vec<Statement> {
    let best = |ms: f64, keep: &dyn Fn(&LatencyPoint) -> bool| {
        let at = points.iter().filter(|point| point.induced_ms == ms && keep(point));
        at.map(|point| point.share).fold(0.0, f64::max)
    };
    let tens: Vec<(f64, f64)> =
        [10.0, 20.0, 50.0].map(|ms| (ms, best(ms, &|point| point.tier2 <= 3))).to_vec();
    let words = |&(ms, share): &(f64, f64)| format!("{:.0}% at {ms:.0} ms", 100.0 * share);
    let hundreds: Vec<[f64; 3]> = [100.0, 150.0, 200.0]
        .map(|ms| [ms, best(ms, &|point| point.tier2 == 3), best(ms, &|_| true)])
        .to_vec();
    let won = |&[ms, few, many]: &[f64; 3]| {
        format!("{:.0}% becomes {:.0}% at {ms:.0} ms", 100.0 * few, 100.0 * many)
    };
    vec![
        Statement::new(
            "tens of milliseconds between the tiers cost little",
            tens.iter().map(words).collect::<Vec<_>>().join(", "),
            &tens.iter().map(|&(_, share)| share >= 0.95).collect::<Vec<_>>(),
        ),
        Statement::new(
            "more Tier-2 nodes win back what a longer round trip costs",
            hundreds.iter().map(won).collect::<Vec<_>>().join(", "),
            &hundreds.iter().map(|&[_, few, many]| many > 1.2 * few).collect::<Vec<_>>(),
        ),
    ]
}

/// fig:rtt_thr.
pub(crate) fn latency(testbed: &Testbed, points: &[LatencyPoint]) -> Section {
    let row = |point: &LatencyPoint| {
        let LatencyPoint { induced_ms, tier2, rows, share } = point;
        vec![
            format!("{induced_ms:.0} ms"),
            tier2.to_string(),
            rows.to_string(),
            format!("{:.0}%", 100.0 * share),
        ]
    };
    let header =
        ["induced round trip", "CPU nodes per T4", "Tier-1 batch", "throughput of that without"];
    let flights = testbed.experiment("0ms_OPT_L70B_9xT4_27xCPU_B255").flights();
    Section {
        label: "fig:rtt_thr",
        title: "Latency between the tiers",
        statements: latency_statements(points),
        tables: vec![Table::new(&header, points.iter().map(row).collect())],
        notes: vec![format!(
            "The prototype's configurations on 9 T4, with its batches. The figure has no numbers in the text; a loss of up to 5% \
             counts as little, a fifth more than three nodes reach as won back. From 20 ms the \
             simulation loses more than the paper says. Its {flights} flights are then just as many as the round trip \
             needs at the longest contexts, and flights that bunch leave gaps. Real contexts were shorter, which left the \
             prototype room."
        )],
        figures: vec![("rtt_thr", "Throughput under induced latency between the tiers")],
        ..Section::default()
    }
}

/// fig:seqlen_thr and fig:seqlen_cost at one length.
#[derive(Clone, Debug)]
pub(crate) struct LengthPoint {
    pub tokens: usize,
    pub tier2: usize,
    /// Tokens per second and GPU: two tiers, 80 T4, 16 T4.
    pub per_gpu: [f64; 3],
    /// Dollars per token/s of the same.
    pub cost: [f64; 3],
}

/// fig:seqlen_thr and fig:seqlen_cost, simulated.
pub(crate) fn length_points(testbed: &Testbed) -> Vec<LengthPoint> {
    let (t4, cpu) = (node_price(testbed.device("t4")), node_price(testbed.device(CPU)));
    let lengths = [2usize, 4, 8, 16];
    let point = |&thousands: &usize| {
        let prefix = format!("{thousands}K/");
        let at_length =
            || testbed.experiments.iter().filter(|experiment| experiment.name.starts_with(&prefix));
        let two =
            at_length().find(|experiment| experiment.tier2 > 0).expect("in the published data");
        let single = |nodes| {
            at_length()
                .find(|experiment| experiment.tier2 == 0 && experiment.tier1 == nodes)
                .expect("published")
        };
        let chosen = [two, single(80), single(16)];
        let per_gpu = chosen.map(|experiment| {
            let context = (thousands * 1024) as f64;
            testbed.rate(experiment, context) / experiment.tier1 as f64
        });
        let price = [t4 + two.tier2 as f64 * cpu, t4, t4];
        let cost = [0, 1, 2].map(|index| price[index] / per_gpu[index]);
        LengthPoint { tokens: thousands * 1024, tier2: two.tier2, per_gpu, cost }
    };
    lengths.iter().map(point).collect()
}

/// fig:seqlen_thr, fig:seqlen_cost.
pub(crate) fn lengths(points: &[LengthPoint]) -> Section {
    let last = points.last().expect("there are lengths");
    let row = |point: &LengthPoint| {
        let mut cells = vec![format!("{}K", point.tokens / 1024), point.tier2.to_string()];
        cells.extend(point.per_gpu.iter().map(|rate| format!("{rate:.2}")));
        cells.push(format!("{:.1}×", point.per_gpu[0] / point.per_gpu[1]));
        cells.push(format!("{:.1}×", point.cost[1] / point.cost[0]));
        cells
    };
    let header = [
        "context",
        "CPU nodes per T4",
        "tokens/s per T4, 9 T4 + CPU",
        "80 T4",
        "16 T4",
        "over 80 T4",
        "cheaper by",
    ];
    Section {
        label: "fig:seqlen_thr, fig:seqlen_cost",
        title: "Longer sequences",
        comparisons: vec![
            Comparison::ratio(
                "throughput per GPU at 16K over a single tier",
                16.3,
                last.per_gpu[0] / last.per_gpu[1],
                Standing::HeldOut(Test::Rate),
            ),
            Comparison::ratio(
                "cost per token/s at 16K",
                2.4,
                last.cost[1] / last.cost[0],
                Standing::Follows("16.3× over the price ratio"),
            ),
        ],
        tables: vec![Table::new(&header, points.iter().map(row).collect())],
        notes: vec![
            "The baseline is the better of the published single-tier configurations, 80 T4. Throughput is per GPU, so \
             their number does not matter; each has one layer, so it hops after every layer in either reading. Kernels \
             are the ones calibrated at 2K; attention scales with the context."
                .to_owned(),
        ],
        figures: vec![
            ("seqlen_thr", "Throughput per T4 against the sequence length"),
            ("seqlen_cost", "Cost per token/s against the sequence length"),
        ],
        ..Section::default()
    }
}
