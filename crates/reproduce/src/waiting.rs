//! How long prompts take from their first token to their last, on 16 T4: the appendix's latency plots.

use crate::comparison::{Section, Table};
use crate::throughput::EndToEnd;
use glinthawk_plan::PlanError;
use glinthawk_plan::SettledReport;
use glinthawk_plan::{Length, Workload};

const LENGTHS: &str = include_str!("../../plan/data/lengths/sharegpt-first-turn.csv");
const CONTEXT_MAX: usize = 2048;
/// The whiskers, sides and middle of the paper's boxes.
const PERCENTILES: [usize; 5] = [5, 25, 50, 75, 95];

/// Passes through the model that prompts take, sorted.
#[derive(Clone, Debug)]
pub(crate) struct Passes {
    to_first: Vec<usize>,
    to_last: Vec<usize>,
}

impl Passes {
    /// The paper's workload, as far as it fits into 2,048 tokens.
    pub fn of_the_workload() -> Result<Self, PlanError> {
        let workload = Workload::parse_csv("sharegpt-first-turn.csv", LENGTHS)?;
        let fits = |length: &&Length| length.prompt + length.output <= CONTEXT_MAX;
        let fitting: Vec<Length> = workload.lengths().iter().filter(fits).copied().collect();
        let sorted = |passes: &dyn Fn(&Length) -> usize| {
            let mut all: Vec<usize> = fitting.iter().map(passes).collect();
            all.sort_unstable();
            all
        };
        // One input token per pass; the last of them brings the first output token.
        Ok(Self {
            to_first: sorted(&|length| length.prompt),
            to_last: sorted(&|length| length.rows()),
        })
    }
}

/// A percentile of sorted values: the smallest that at least that many percent do not exceed.
fn percentile(sorted: &[usize], percent: usize) -> usize {
    sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1]
}

/// fig:e2e_tpit, fig:e2e_tpot, fig:e2e_ttft, fig:e2e_first_2_last.
pub(crate) fn latencies(runs: &EndToEnd, passes: &Passes) -> Section {
    let row = |(tier2, report): (usize, &SettledReport)| {
        let seconds = report.time_per_token.total();
        let minutes = |sorted: &[usize]| {
            let of = |&percent: &usize| percentile(sorted, percent) as f64 * seconds / 60.0;
            let words: Vec<String> =
                PERCENTILES.iter().map(of).map(|minutes| format!("{minutes:.1}")).collect();
            words.join(" / ")
        };
        vec![
            tier2.to_string(),
            format!("{seconds:.2} s"),
            minutes(&passes.to_first),
            minutes(&passes.to_last),
        ]
    };
    let header = [
        "CPU nodes per GPU",
        "per input token and per output token",
        "to the first token, minutes",
        "from start to end, minutes",
    ];
    Section {
        label: "app:eval, fig:e2e_tpit, fig:e2e_tpot, fig:e2e_ttft, fig:e2e_first_2_last",
        title: "Latencies of the appendix",
        tables: vec![Table::new(&header, runs.reports.iter().enumerate().map(row).collect())],
        notes: vec![format!(
            "Percentiles 5 / 25 / 50 / 75 / 95, as the paper's boxes have them, over the {} prompts of ShareGPT first turns that \
             fit into {CONTEXT_MAX} tokens. The paper gives these plots without numbers, so there is nothing to compare but their \
             shape. The prototype treats input and output tokens alike, one per pass: so both take the time per token, and \
             they are steady, as the paper says; the spread of the other two is the spread of the prompts' lengths, as it \
             says too. Both are built into this reckoning, so it does not test them. Waiting before the first pass is left \
             out, as in the paper.",
            passes.to_first.len()
        )],
        ..Section::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_a_hundred_are_their_ranks() {
        let sorted: Vec<usize> = (1..=100).collect();
        for percent in PERCENTILES {
            assert_eq!(percentile(&sorted, percent), percent);
        }
        assert_eq!(percentile(&[7], 5), 7);
        assert_eq!(percentile(&[1, 2, 3], 50), 2);
    }
}
