//! The page `docs/reproduction.md` and the words around the tables.

use super::calibration::Anchors;
use super::comparison::{Comparison, Standing};
use super::{Reproduction, Section};

const OPENING: &str = "# The paper's evaluation, reproduced

Ours beside theirs wherever the text states a number, by LaTeX label. `glinthawk reproduce` makes this page and its \
plots. Everything of ours in the tables and plots is computed or simulated: the hardware is the paper's, not ours.

Standing of a number:

- **arithmetic**: follows from formulas, shapes, prices and the prototype's published configurations;
- **anchor**: the kernels were fitted to it, so it agrees because it was made to;
- **linked**: tied to an anchor by arithmetic, so no test of the kernels;
- **held out**: neither, so a test. The mark is 10%.

";

const METHOD: &str = "The paper's kernel profiles were never published. Each device is a roofline: a matrix product \
takes load + multiply, bytes of weights over bandwidth plus operations over matrix rate; attention takes the longer \
of loading the context and computing on it at the vector rate (the paper computes attention in f32, without matrix \
units). Peaks are the catalogue's; the efficiencies are fitted, one number of the paper for each:";

const METHOD_NOTES: &str = "Everything runs under the paper's rules: its two algorithms, whole flights over links, \
every row attending to the longest context (so that the CPU's fitted efficiency also absorbs that real contexts were \
shorter), no classifier, the state object with the residual on the wire. The CPU's efficiency is the \
least certain: 16 T4 + 16 CPU has just as many flights as it needs, and there the simulated throughput jumps as \
flights fall into one pattern or another. In every other row the CPU is not what limits, so little depends on it.

That load and multiply add up, rather than hide behind each other, is what the held-out 16 T4 + 32 CPU row shows: with \
the longer of the two instead, both batches are bound by multiplying and the same anchors put it at 1,992 tokens/s, 28% too high.";

pub(crate) fn calibration_rows(reproduction: &Reproduction) -> Vec<Vec<String>> {
    let device = |name| &reproduction.testbed.device(name).efficiency;
    let row = |what: &str, peak: &str, share: f64, anchor: String| {
        vec![what.to_owned(), peak.to_owned(), format!("{:.1}%", 100.0 * share), anchor]
    };
    vec![
        row(
            "T4 (and other GPUs), weights and contexts",
            "memory bandwidth",
            device("t4").weights_bandwidth,
            format!("t_c = {:.1} ms at batch 1 (sec:kvc_strawman)", Anchors::LAYER_SECONDS * 1e3),
        ),
        row(
            "T4 (and RTX 6000, A6000), products",
            "matrix rate",
            device("t4").matrix,
            format!("{:.0} tokens/s on 16 T4 + 48 CPU (table:inter_bw)", Anchors::T4_BOUND),
        ),
        row(
            "EPYC 7V12, attention",
            "memory bandwidth",
            device("epyc-7v12-16").context_bandwidth,
            format!("{:.0} tokens/s on 16 T4 + 16 CPU (table:inter_bw)", Anchors::CPU_BOUND),
        ),
        row(
            "T4 (and other GPUs), attention",
            "vector rate",
            device("t4").vector,
            format!("time per token {}× (fig:e2e_tot)", Anchors::TIME_PER_TOKEN),
        ),
        row(
            "A100 (and H100), products",
            "matrix rate",
            device("a100-40").matrix,
            format!("{:.0} tokens/s on 4 A100 + 8 RTX 6000 (table:inter_bw)", Anchors::A100_BOUND),
        ),
    ]
}

const CALIBRATION_HEADER: [&str; 4] = ["device", "of its peak", "fitted", "anchor"];

fn calibration_section(reproduction: &Reproduction) -> Section {
    let table = super::Table::new(&CALIBRATION_HEADER, calibration_rows(reproduction));
    let ends = reproduction.sensitivity.iter();
    let rows = ends.map(|(ratio, rate)| {
        vec![
            format!("{ratio:.2}×"),
            format!("{rate:.0}"),
            format!("{:+.1}%", 100.0 * (rate / 2286.0 - 1.0)),
        ]
    });
    let spread = super::Table::new(
        &["time-per-token anchor", "2 H100 + 20 T4, tokens/s", "error"],
        rows.collect(),
    );
    Section {
        label: "calibration",
        title: "Calibration",
        comparisons: Vec::new(),
        tables: vec![table, spread],
        notes: METHOD_NOTES.split("\n\n").map(str::to_owned).collect(),
        figures: Vec::new(),
    }
}

/// The calibration for a terminal.
pub(crate) fn calibration_text(reproduction: &Reproduction) -> String {
    calibration_section(reproduction).render()
}

/// What was held out, and how it went.
pub(crate) fn verdict(reproduction: &Reproduction) -> String {
    let held_out: Vec<&Comparison> = reproduction
        .comparisons()
        .filter(|comparison| comparison.standing == Standing::HeldOut)
        .collect();
    let missed: Vec<String> = held_out
        .iter()
        .filter(|comparison| !comparison.within_mark())
        .map(|comparison| format!("{} ({:+.1}%)", comparison.what, 100.0 * comparison.error()))
        .collect();
    let within = held_out.len() - missed.len();
    let misses = if missed.is_empty() { "none".to_owned() } else { missed.join("; ") };
    format!("Held out: {within} of {} within 10%. Missed: {misses}.\n", held_out.len())
}

/// The page.
pub(crate) fn markdown(reproduction: &Reproduction) -> String {
    let mut text = OPENING.to_owned();
    text.push_str(&format!("**{}**\n\n", verdict(reproduction).trim_end()));
    let calibration = calibration_section(reproduction).markdown("reproduction");
    let calibration = calibration.replacen("`calibration`\n", &format!("{METHOD}\n"), 1);
    text.push_str(&calibration);
    for section in &reproduction.sections {
        text.push_str(&section.markdown("reproduction"));
    }
    text.trim_end().to_owned() + "\n"
}
