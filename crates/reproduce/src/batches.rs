//! The batches that the paper's search picked, beside those that ours picks on the same nodes and contexts.

use crate::calibration::{LONGEST, Testbed};
use crate::comparison::{Comparison, Section, Standing, Table, Test};
use crate::examples::OVERHEADS;
use crate::prototype::Experiment;
use glinthawk_plan::Evaluation;

/// The paper's end-to-end configurations on 16 T4: with 0, 1, 2 and 3 CPU nodes each.
pub(crate) const ON_16_T4: [&str; 4] =
    ["16xT4_B14", "16xT4_16xCPU_B112", "16xT4_32xCPU_B116", "16xT4_48xCPU_B246"];

/// A batch of the paper and ours, on the same nodes and contexts.
struct Pick {
    what: String,
    /// The paper's configuration.
    theirs: Experiment,
    ours: Evaluation,
    /// Tokens per second of the paper's configuration here.
    at_theirs: f64,
}

impl Pick {
    fn of(testbed: &Testbed, what: String, theirs: Experiment) -> Option<Self> {
        let ours = testbed.optimum(theirs.tier1, theirs.tier2, theirs.contexts)?;
        let at_theirs = testbed.rate(&theirs, LONGEST);
        Some(Self { what, theirs, ours, at_theirs })
    }

    fn comparison(&self) -> Comparison {
        let (theirs, ours) = (self.theirs.rows as f64, self.ours.candidate.rows() as f64);
        let standing = Standing::HeldOut(Test::Batch);
        Comparison::new(self.what.clone(), theirs, ours, 0, " rows", standing)
    }

    fn row(&self) -> Vec<String> {
        let (theirs, ours) = (&self.theirs, &self.ours);
        let words = |rows, flights, rate| format!("{rows} rows, {flights} flights: {rate:.0}");
        vec![
            self.what.clone(),
            words(theirs.rows, theirs.flights(), self.at_theirs),
            words(ours.candidate.rows(), ours.candidate.flights, ours.tokens_per_second),
            format!("{:.0}%", 100.0 * self.at_theirs / ours.tokens_per_second),
        ]
    }
}

/// Contexts that a CPU node seats on 9 T4 in the published configurations: 1.5 times what 108 GiB hold.
const CONTEXTS_ON_9_T4: usize = 2304;

fn picks(testbed: &Testbed) -> Vec<Pick> {
    let mut found = Vec::new();
    for name in ON_16_T4 {
        let theirs = testbed.experiment(name).clone();
        let what = match theirs.tier2 {
            0 => "batch on 16 T4".to_owned(),
            each => format!("batch on 16 T4 + {} CPU", each * theirs.tier1),
        };
        found.extend(Pick::of(testbed, what, theirs));
    }
    for (tier2, batch, _) in OVERHEADS {
        let nine = testbed.experiment("9xT4_27xCPU_B255").clone();
        let rows = tier2 * batch;
        let theirs = Experiment { tier2, rows, batch, contexts: CONTEXTS_ON_9_T4, ..nine };
        found.extend(Pick::of(testbed, format!("Tier-1 batch at K' = {tier2}"), theirs));
    }
    found
}

/// The batches of sec:eval_e2e and table:llama2-tier2-overhead.
pub(crate) fn batches(testbed: &Testbed) -> Section {
    let picks = picks(testbed);
    let reached = picks.iter().map(|pick| pick.at_theirs / pick.ours.tokens_per_second);
    let (least, most) = reached
        .fold((f64::INFINITY, 0.0f64), |(least, most), share| (least.min(share), most.max(share)));
    let header = ["batch", "the paper's: tokens/s here", "ours: tokens/s", "theirs over ours"];
    Section {
        label: "sec:eval_e2e, table:llama2-tier2-overhead",
        title: "Batches that the search picks",
        comparisons: picks.iter().map(Pick::comparison).collect(),
        tables: vec![Table::new(&header, picks.iter().map(Pick::row).collect())],
        notes: vec![
            format!(
                "Our search on the paper's nodes, with as many contexts on each as the prototype had. Throughput changes less than \
                 the batch: the paper's batches reach {:.0}% to {:.0}% of our best (last column), and where the peak lies depends \
                 on profiles that we do not have.",
                100.0 * least,
                100.0 * most
            ),
            "On 16 T4 alone we miss the batch with the hop per slice that this page uses, and hit it with a hop after every layer: \
             see How often a single tier sends. For table:llama2-tier2-overhead the paper does not say K; 9 T4 are assumed, on \
             which the published data has its K' = 8 row exactly."
                .to_owned(),
        ],
        ..Section::default()
    }
}
