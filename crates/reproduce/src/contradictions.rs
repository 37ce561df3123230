//! Where the paper contradicts itself or says what its own figures do not give: both values and the reason.

use crate::calibration::{Anchors, CPU, RTT_MS, Testbed};
use crate::comparison::{Section, Table};
use crate::examples::STAGE_SECONDS;
use glinthawk_plan::calculus::{
    NetworkLink, RowTraffic, context_bytes, flights_pipeline, flights_pipeline_as_tabled,
    flights_tensor, prompts_in,
};
use glinthawk_plan::shape::{GIB, MIB, Shape};

/// The table of contradictions.
pub(crate) fn contradictions(testbed: &Testbed) -> Section {
    let shape = Shape::llama2_70b();
    let transit = NetworkLink::new(RTT_MS, 8.0).transit(16.0 * 1024.0);
    let row = |place: &str, one: String, other: String, reason: &str| {
        vec![place.to_owned(), one, other, reason.to_owned()]
    };
    let layer = Anchors::LAYER_SECONDS;
    let h200 = 131.0 * GIB - shape.model_bytes();
    let state_object = RowTraffic::StateObject.out_bytes(&shape) * 8.0;
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
        pending(testbed),
        vec![
            "sec:eval_summary, FLOPs of 12 T4 over those of 36 CPU nodes".to_owned(),
            format!("{:.0}× by the datasheets", flops_ratio(testbed)),
            "45× in the text".to_owned(),
            "not derived there; the T4's matrix units against the CPU's two FMA units per core"
                .to_owned(),
        ],
        seats(testbed),
    ];
    Section {
        title: "Where the paper contradicts itself",
        tables: vec![Table::new(&["place", "one value", "the other", "reason"], rows)],
        ..Section::default()
    }
}

/// The pending share with one CPU node per GPU, from the paper's own throughput and batch.
fn pending(testbed: &Testbed) -> Vec<String> {
    let run = testbed.experiment("16xT4_16xCPU_B112");
    let layers = testbed.shape.layers as f64;
    let per_layer = run.in_air() / Anchors::CPU_BOUND / layers;
    // Attention bounds the throughput, so a node attends to a batch in the time that a batch takes to come by.
    let attention = run.rows as f64 / Anchors::CPU_BOUND / (layers / run.tier1 as f64);
    let products = testbed.kernels("t4").fused_seconds(run.rows);
    vec![
        "sec:eval_e2e, over half of the time per token pending “in all these cases”".to_owned(),
        format!(
            "{:.0}% with one CPU node per GPU, by the paper's own figures",
            100.0 * (1.0 - (attention + products) / per_layer)
        ),
        "“more than 50%”".to_owned(),
        format!(
            "{} flights of {} rows at 1,138 tokens/s spend {:.1} ms per layer; the attention that bounds 1,138 \
             tokens/s takes {:.1} ms of that, and the T4 {:.0} ms (calibrated)",
            run.flights(),
            run.rows,
            per_layer * 1e3,
            attention * 1e3,
            products * 1e3
        ),
    ]
}

fn flops_ratio(testbed: &Testbed) -> f64 {
    let (t4, cpu) = (testbed.device("t4"), testbed.device(CPU));
    12.0 * t4.matrix_tflops.value / (36.0 * cpu.vector_tflops.value)
}

/// Contexts that the published two-tier configurations seat, over those that 108 GiB hold in full.
fn seats(testbed: &Testbed) -> Vec<String> {
    let ratio = |name: &str| {
        let run = testbed.experiment(name);
        let layers = testbed.shape.layers.div_ceil(run.tier1) as f64;
        let bytes = layers * testbed.shape.context_bytes_per_layer() * 2048.0;
        format!("{:.2}×", run.contexts as f64 / (108.0 * GIB / bytes))
    };
    vec![
        "app:simulation, oversubscription of Tier 2's memory".to_owned(),
        format!(
            "{} (10 T4) and {} (20 T4) of what 108 GiB hold, in the published configurations",
            ratio("10xT4_30xCPU_B243"),
            ratio("20xT4_60xCPU_B243")
        ),
        "3× in the text".to_owned(),
        "both come out if contexts took four bytes a value on the CPUs, or half of the memory; not stated".to_owned(),
    ]
}
