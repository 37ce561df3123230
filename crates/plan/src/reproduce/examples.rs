//! The worked examples of the paper's sections on context memory, and where it contradicts itself.

use crate::calculus::{
    Link, Traffic, context_bytes, flights_pipeline, flights_pipeline_as_tabled, flights_tensor,
    flights_two_tier, inter_tier_transit, largest_batch, prompts_in,
};
use crate::shape::{GIB, MIB, Shape};

use super::calibration::{Anchors, RTT_MS, Testbed};
use super::comparison::{Comparison, Section, Standing, Table};

const STAGE_SECONDS: f64 = 0.48e-3;
const T4_USABLE_GIB: f64 = 14.75;

/// sec:kvcalc and app:kvcalc.
pub(crate) fn worked_examples() -> Section {
    let shape = Shape::llama2_70b();
    let link = Link::new(RTT_MS, 8.0);
    let (exact, rounded) = (link.transit(16.0 * 1024.0), 1e-3);
    let prompt = context_bytes(&shape, 2048.0);
    let free = 10.0 * (T4_USABLE_GIB * GIB - 8.0 * shape.layer_bytes());
    let prompts = prompts_in(free, &shape, 2048.0);
    let pipeline = flights_pipeline(10, 80, exact, Anchors::LAYER_SECONDS);
    let tensor = flights_tensor(10, rounded, STAGE_SECONDS);
    let number = |what: &str, paper: f64, ours: usize| {
        Comparison::new(what, paper, ours as f64, 0, "", Standing::Arithmetic)
    };
    Section {
        label: "sec:kvcalc, app:kvcalc",
        title: "Worked examples",
        comparisons: vec![
            Comparison::new("M, one prompt of 2,048 tokens", 640.0, prompt / MIB, 0, " MiB", Standing::Arithmetic),
            Comparison::new("BM, 128 prompts", 80.0, 128.0 * prompt / GIB, 0, " GiB", Standing::Arithmetic),
            Comparison::new("t_n, one row between T4s", 1.0, exact * 1e3, 0, " ms", Standing::Arithmetic),
            number("C_max/M, contexts on 10 T4", 32.0, prompts),
            number("IF_pp(1) at K = 10", 20.0, pipeline),
            number("largest batch, pipeline", 1.0, largest_batch(prompts, 4096, |_| pipeline)),
            number("largest batch, pipeline without latency", 3.0, largest_batch(prompts, 4096, |_| 10)),
            Comparison::new("IF_tp slope, t_n/t_c,min", 2.08, rounded / STAGE_SECONDS, 2, "", Standing::Arithmetic),
            number("IF_tp(1) at K = 10, t_n rounded to 1 ms", 22.0, tensor),
            number("largest batch, tensor", 1.0, largest_batch(prompts, 4096, |_| tensor)),
            number("largest batch, tensor without latency", 32.0, largest_batch(prompts, 4096, |_| 1)),
        ],
        tables: Vec::new(),
        notes: vec![
            "The text does not derive the 32 contexts; they come out exactly if a T4 offers 14.75 GiB to a program and eight layers (12.75 GiB) lie on each."
                .to_owned(),
        ],
        figures: Vec::new(),
    }
}

/// table:llama2-tier2-overhead.
pub(crate) fn tier2_overhead(testbed: &Testbed) -> Section {
    let (tier1, cpu) = (testbed.kernels("t4"), testbed.kernels("epyc-7v12-16"));
    let link = Link::new(RTT_MS, 8.0);
    let mut comparisons = Vec::new();
    let mut rows = Vec::new();
    for (nodes, batch, paper) in [(1, 72, 3), (2, 62, 3), (4, 63, 3), (8, 79, 3), (16, 80, 2)] {
        let all = nodes * batch;
        let attention = cpu.attention(batch, 2048.0);
        let transit = inter_tier_transit(&testbed.shape, Traffic::StateObject, &link, all as f64);
        let compute = tier1.fused(all);
        let ours = flights_two_tier(attention, transit, compute);
        let what = format!("IF_gh at K' = {nodes}, B = {batch}");
        comparisons.push(Comparison::new(
            what,
            f64::from(paper),
            ours as f64,
            0,
            "",
            Standing::HeldOut,
        ));
        let ms = |seconds: f64| format!("{:.1} ms", seconds * 1e3);
        rows.push(vec![
            nodes.to_string(),
            all.to_string(),
            ms(attention),
            ms(transit),
            ms(compute),
            format!("{:.3}", 1.0 + (attention + transit) / compute),
        ]);
    }
    let header = ["K'", "Tier-1 batch", "t_c2,att", "t_n", "t_c1,no-att", "before rounding up"];
    Section {
        label: "table:llama2-tier2-overhead",
        title: "Flights that hide Tier 2",
        comparisons,
        tables: vec![Table::new(&header, rows)],
        notes: vec![
            "At the paper's batches, with the calibrated kernels. Its batches themselves depend on its profiles. \
             The last row is decided by 2%: the time away from Tier 1 and the time on it are nearly equal there."
                .to_owned(),
        ],
        figures: Vec::new(),
    }
}

/// Where the paper contradicts itself: both values and the reason.
pub(crate) fn contradictions() -> Section {
    let shape = Shape::llama2_70b();
    let transit = Link::new(RTT_MS, 8.0).transit(16.0 * 1024.0);
    let row = |place: &str, one: String, other: String, reason: &str| {
        vec![place.to_owned(), one, other, reason.to_owned()]
    };
    let layer = Anchors::LAYER_SECONDS;
    let h200 = 131.0 * GIB - shape.model_bytes();
    let state_object = Traffic::StateObject.out_bytes(&shape) * 8.0;
    let rows = vec![
        row(
            "sec:kvc_single, M := 2NSD_kv",
            format!("{:.0} MiB by the formula", 2.0 * 80.0 * 2048.0 * 1024.0 / MIB),
            format!("{:.0} MiB in the text", context_bytes(&shape, 2048.0) / MIB),
            "the formula counts values; at two bytes each it is 4NSD_kv, which the text's figure and its 4D_kv bytes per token and layer use",
        ),
        row(
            "IF_pp, text against table:context_summary",
            format!("{} with K t_n/(N t_c)", flights_pipeline(10, 80, transit, layer)),
            format!("{} with N t_n/(K t_c)", flights_pipeline_as_tabled(10, 80, transit, layer)),
            "the table exchanges N and K; a node computes N/K layers per hop, so the text is right",
        ),
        row(
            "sec:kvc_strawman, IF_pp(1) ≈ ⌈0.022K+1⌉",
            format!("{:.4}K", 1e-3 / (80.0 * layer)),
            "0.022K in the text".to_owned(),
            "1 ms/(80 × 5.6 ms) is ten times smaller, and the factor K is missing; at K = 10 both round up to 2, times 10 is the stated 20",
        ),
        row(
            "app:kvcalc, IF_tp(1) at K = 10",
            format!("{} with t_n = 1.016 ms", flights_tensor(10, transit, STAGE_SECONDS)),
            format!("{} with t_n ≈ 1 ms", flights_tensor(10, 1e-3, STAGE_SECONDS)),
            "the text rounds t_n before it multiplies",
        ),
        row(
            "table:app:op_char, values moved per row",
            "7D+3D_h+2D_kv, the sum of the table's rows".to_owned(),
            "8D+3D_h+2D_kv in its total".to_owned(),
            "an addition error of one D",
        ),
        row(
            "sec:kvc_strawman, contexts beside the weights on one H200",
            format!("{} of 2,048 tokens in 131 GiB (141 GB)", prompts_in(h200, &shape, 2048.0)),
            "one in the text".to_owned(),
            "not derived there; memory for activations would have to take the rest",
        ),
        row(
            "sec:eval_summary against table:inter_bw, Tier-2 egress per node",
            "less than 1 Gbps in the text".to_owned(),
            "1.49 and 1.02 Gbps in the table (16+16, 16+32)".to_owned(),
            "true only of the rows with three CPU nodes per GPU",
        ),
        row(
            "sec:overview, 10K prompts per second on a T4",
            "4 Gbps in the text".to_owned(),
            format!("{:.2} Gbps", 10_000.0 * state_object / 1e9),
            "10,000 × 2(2D+2D_kv) bytes; table:inter_bw has 2.94 Gbps at that rate",
        ),
        row(
            "algo:simu_double, which batch a node takes",
            "the earliest stage in the listing's comment".to_owned(),
            "the latest stage in the text".to_owned(),
            "the text says why: later layers first keep the pipeline fed; the simulator here follows the text",
        ),
        row(
            "app:simulation, throughput B × IF/TBT",
            "B rows per flight".to_owned(),
            "K'B rows per flight in sec:config".to_owned(),
            "Tier 1 runs K'B rows; the simulator here counts those",
        ),
        row(
            "sec:eval_e2e, over half of the time per token pending “in all these cases”",
            "25% with one CPU per GPU, by the paper's own figures".to_owned(),
            "“more than 50%”".to_owned(),
            "37 flights × 112 rows at 1,138 tokens/s are 45.5 ms per layer; attention that bounds 1,138 tokens/s takes 19.7 ms of it and the T4 some 14 ms (calibrated)",
        ),
    ];
    Section {
        label: "throughout",
        title: "Where the paper contradicts itself",
        comparisons: Vec::new(),
        tables: vec![Table::new(&["place", "one value", "the other", "reason"], rows)],
        notes: Vec::new(),
        figures: Vec::new(),
    }
}
