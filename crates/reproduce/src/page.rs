//! The page `docs/reproduction.md`: what was found, how, part by part, what was tried.

use crate::calibration::Anchors;
use crate::comparison::{Comparison, Standing, Statement, Table, Test};
use crate::{Reproduction, Section};

const OPENING: &str = "# The paper's evaluation, reproduced

This page puts our numbers beside the paper's, by LaTeX label. `glinthawk reproduce` computes it and draws its plots. \
All numbers of ours are computed or simulated: we do not have the paper's hardware, and its kernel profiles were \
never published.

## What was found

";

const STANDINGS: &str = "Every number of the paper has one of four standings:

- **arithmetic**: it follows from formulas, shapes, prices and the prototype's published configurations;
- **anchor**: the kernels were fitted to it, so it agrees because it was made to;
- **follows**: it repeats an anchor, lies on a line through two of them, or is another number divided by prices. It tests nothing \
new;
- **held out**: none of these, so it is a test. The mark is 10%. A whole number of flights is a weak test, because a wide range \
rounds up to it.

Only what is held out counts in the first line above. What the paper says without a number is checked case by case: it holds in \
all, in some (“in part”) or in none.

";

const METHOD: &str = "Each device is a roofline. A matrix product takes load + multiply: bytes of weights over bandwidth \
plus operations over matrix rate. Attention takes the longer of loading the context and computing on it at the vector \
rate, because the paper computes attention in f32 without matrix units. Peaks are the catalogue's. The efficiencies are \
fitted, each to one number of the paper:

";

const METHOD_NOTES: &str = "Everything runs under the paper's rules: its two algorithms, whole flights over links, \
every row attending to the longest context, no classifier, the state object with the residual on the wire. Real contexts were \
shorter; the CPU's fitted efficiency absorbs that. It is the least certain of the five: 16 T4 + 16 CPU has \
just as many flights as it needs, and there the simulated throughput jumps as flights fall into one pattern or another. In \
the other measured rows the T4s are what limits, so little depends on it.

These numbers follow from the anchors:

";

fn percent(share: f64) -> String {
    format!("{:+.1}%", 100.0 * share)
}

fn calibration_table(reproduction: &Reproduction) -> Table {
    let device = |name| &reproduction.testbed.device(name).efficiency;
    let row = |what: &str, peak: &str, share: f64, anchor: String| {
        vec![what.to_owned(), peak.to_owned(), format!("{:.1}%", 100.0 * share), anchor]
    };
    let rows = vec![
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
    ];
    Table::new(&["device", "of its peak", "fitted", "anchor"], rows)
}

fn of(reproduction: &Reproduction, keep: impl Fn(Standing) -> bool) -> Vec<&Comparison> {
    reproduction.comparisons().filter(|comparison| keep(comparison.standing)).collect()
}

fn tests(reproduction: &Reproduction, test: Test) -> Vec<&Comparison> {
    of(reproduction, |standing| standing == Standing::HeldOut(test))
}

fn within(comparisons: &[&Comparison]) -> usize {
    comparisons.iter().filter(|comparison| comparison.within_mark()).count()
}

fn equal(comparisons: &[&Comparison]) -> usize {
    comparisons.iter().filter(|comparison| comparison.ours == comparison.paper).count()
}

/// What was held out, and how it went.
pub(crate) fn verdict(reproduction: &Reproduction) -> String {
    let [rates, flights, batches] =
        [Test::Rate, Test::Flights, Test::Batch].map(|test| tests(reproduction, test));
    let errors: Vec<String> = rates.iter().map(|one| percent(one.error())).collect();
    format!(
        "Held out: {} throughputs and times, {} within 10% ({}); {} whole numbers of flights, {} equal; {} batches, {} \
         within 10%.\n",
        rates.len(),
        within(&rates),
        errors.join(", "),
        flights.len(),
        equal(&flights),
        batches.len(),
        within(&batches)
    )
}

/// The largest error of some comparisons, as the page prints it.
fn largest(comparisons: &[&Comparison]) -> String {
    let errors = comparisons.iter().map(|comparison| comparison.error());
    let largest =
        errors.fold(0.0, |most: f64, error| if error.abs() > most.abs() { error } else { most });
    percent(largest)
}

fn list(comparisons: &[&Comparison], value: impl Fn(&Comparison) -> f64) -> String {
    let words: Vec<String> =
        comparisons.iter().map(|comparison| format!("{:.0}", value(comparison))).collect();
    words.join(", ")
}

/// Everything the page finds, in one table.
fn findings(reproduction: &Reproduction) -> Table {
    let mut rows = Vec::new();
    for comparison in tests(reproduction, Test::Rate) {
        let [paper, ours, error] = comparison.numbers();
        rows.push(vec![comparison.what.clone(), paper, ours, format!("held out, {error}")]);
    }
    let mut group = |test, what: &str, result: &dyn Fn(&[&Comparison]) -> String| {
        let all = tests(reproduction, test);
        let (paper, ours) = (list(&all, |one| one.paper), list(&all, |one| one.ours));
        rows.push(vec![what.to_owned(), paper, ours, result(&all)]);
    };
    group(Test::Flights, "flights that hide Tier 2, K' = 1, 2, 4, 8, 16", &|all| {
        format!("held out, {} of {} equal (weak tests)", equal(all), all.len())
    });
    group(Test::Batch, "rows of the batches that the search picks", &|all| {
        format!("held out, {} of {} within 10%", within(all), all.len())
    });
    let mut count = |what: &str, all: Vec<&Comparison>, result: String| {
        let cells = [what.to_owned(), format!("{} numbers", all.len()), String::new(), result];
        rows.push(cells.to_vec());
    };
    let follows = of(reproduction, |standing| matches!(standing, Standing::Follows(_)));
    let error = largest(&follows);
    count("what follows from anchors", follows, format!("no test; largest error {error}"));
    let anchors = of(reproduction, |standing| standing == Standing::Anchor);
    let error = largest(&anchors);
    count("anchors", anchors, format!("fitted; largest error {error}"));
    let arithmetic = of(reproduction, |standing| standing == Standing::Arithmetic);
    count("arithmetic", arithmetic, "all equal to the paper's digits".to_owned());
    for statement in reproduction.statements() {
        let [claim, ours, holds] = Statement::cells(statement).try_into().expect("three cells");
        rows.push(vec![claim, "stated".to_owned(), ours, holds]);
    }
    Table::new(&["what", "paper", "ours", "result"], rows)
}

fn follows_table(reproduction: &Reproduction) -> Table {
    let follows = of(reproduction, |standing| matches!(standing, Standing::Follows(_)));
    let row = |comparison: &&Comparison| {
        let Standing::Follows(how) = comparison.standing else {
            unreachable!("only these were kept")
        };
        let mut cells = vec![comparison.what.clone()];
        cells.extend(comparison.numbers());
        cells.push(how.to_owned());
        cells
    };
    let header = ["number", "paper", "ours", "error", "from what"];
    Table::new(&header, follows.iter().map(row).collect())
}

/// The reproduction for a terminal.
pub(crate) fn render(reproduction: &Reproduction) -> String {
    let mut text = format!("What was found\n{}\n", findings(reproduction).render());
    text.push_str(&format!("Calibration\n{}\n", calibration_table(reproduction).render()));
    let all = reproduction.sections.iter().chain(&reproduction.trials);
    for section in all.chain([&reproduction.contradictions]) {
        text.push_str(&section.render());
        text.push('\n');
    }
    text + &verdict(reproduction)
}

/// The page.
pub(crate) fn markdown(reproduction: &Reproduction) -> String {
    let mut text = OPENING.to_owned();
    text.push_str(&format!("**{}**\n\n", verdict(reproduction).trim_end()));
    text.push_str(&format!(
        "{}\n## How it was done\n\n{STANDINGS}",
        findings(reproduction).markdown()
    ));
    text.push_str(&format!("{METHOD}{}\n", calibration_table(reproduction).markdown()));
    text.push_str(&format!("{METHOD_NOTES}{}\n", follows_table(reproduction).markdown()));
    let mut part = |title: &str, sections: &[Section]| {
        text.push_str(&format!("## {title}\n\n"));
        for section in sections {
            text.push_str(&section.markdown(3, "reproduction"));
        }
    };
    part("Part by part", &reproduction.sections);
    part("What was tried", &reproduction.trials);
    text.push_str(&reproduction.contradictions.markdown(2, "reproduction"));
    text.trim_end().to_owned() + "\n"
}
