//! The other engines of the paper's comparison, as far as their layout decides: who holds which layers, who waits for whom.

use crate::batches::ON_16_T4;
use crate::calibration::{LONGEST, RTT_MS, Testbed};
use crate::comparison::{Section, Statement, Table};
use crate::prototype::Experiment;
use glinthawk_plan::calculus::NetworkLink;

/// Ways to split the model over 16 T4 that the paper measured, all with the contexts of its single tier.
struct Layout {
    name: &'static str,
    rows: usize,
    flights: usize,
    tokens_per_second: f64,
}

/// One flight per GPU: 16-way pipeline parallelism as vLLM and TensorRT-LLM run it.
fn pipeline(testbed: &Testbed, single: &Experiment) -> Layout {
    let rows = single.contexts / single.tier1;
    let layout = Experiment { rows, batch: rows, contexts: rows * single.tier1, ..single.clone() };
    Layout {
        name: "vLLM or TensorRT-LLM, 16-way pipeline",
        rows,
        flights: layout.flights(),
        tokens_per_second: testbed.rate(&layout, LONGEST),
    }
}

/// Four stages of four GPUs, which exchange their parts of every layer twice and wait for it (table:context_summary).
fn tensor(testbed: &Testbed, single: &Experiment) -> Layout {
    let (stages, shards) = (4, single.tier1 / 4);
    let rows = single.contexts / stages;
    let t4 = testbed.kernels("t4");
    let link = NetworkLink::new(RTT_MS, 8.0);
    let bytes = (rows * testbed.shape.hidden * testbed.shape.value_bytes) as f64;
    let exchange = link.transit(bytes);
    let compute = (t4.fused_seconds(rows) + t4.attention_seconds(rows, LONGEST)) / shards as f64;
    let layers = (testbed.shape.layers / stages) as f64;
    let stage = layers * (compute + 2.0 * exchange) + exchange;
    Layout {
        name: "vLLM, 4-way pipeline of 4-way tensor parallelism",
        rows,
        flights: stages,
        tokens_per_second: rows as f64 / stage,
    }
}

/// The vLLM and TensorRT-LLM baselines of fig:e2e_thr.
pub(crate) fn baselines(testbed: &Testbed) -> Section {
    let single = testbed.experiment(ON_16_T4[0]);
    let own = Layout {
        name: "single tier, the prototype's batch",
        rows: single.rows,
        flights: single.flights(),
        tokens_per_second: testbed.rate(single, LONGEST),
    };
    let layouts = [pipeline(testbed, single), tensor(testbed, single)];
    let row = |layout: &Layout| {
        vec![
            layout.name.to_owned(),
            format!("{} rows, {} flights", layout.rows, layout.flights),
            format!("{:.0}", layout.tokens_per_second),
            format!("{:.2}×", layout.tokens_per_second / own.tokens_per_second),
        ]
    };
    let found: Vec<String> = layouts
        .iter()
        .map(|layout| format!("{:.1}×", layout.tokens_per_second / own.tokens_per_second))
        .collect();
    let rows = std::iter::once(&own).chain(&layouts).map(row).collect();
    let header = ["layout on 16 T4", "batch", "tokens/s", "over the single tier"];
    Section {
        label: "sec:eval:baselines, fig:e2e_thr",
        title: "The vLLM and TensorRT-LLM baselines",
        statements: vec![Statement::new(
            "the single tier is on par with or better than vLLM and TensorRT-LLM",
            format!(
                "their layouts alone would allow {} of the single tier; their kernels are unknown",
                found.join(" and ")
            ),
            &[],
        )],
        tables: vec![Table::new(&header, rows)],
        notes: vec![
            format!(
                "The text has no number for these engines, only that statement and, in the appendix, a tenfold difference to \
                 “some baselines”, which would put them at {:.2} of the single tier (5.9 over 10). We did not run them on T4s. The \
                 table says what their layouts allow with the prototype's kernels and the {} contexts of its single tier: a \
                 flight per GPU, or parts of a layer on four GPUs that exchange their results twice per layer over 8 Gbps and \
                 wait for them.",
                5.9 / 10.0,
                single.contexts
            ),
            "So the prototype's single tier owes nothing to its layout. What the engines lost on T4s against this table lies in \
             their kernels, their scheduling or their memory, none of which is modelled here."
                .to_owned(),
        ],
        ..Section::default()
    }
}
