//! What was tried besides: other readings of the paper, other anchors, another form of the kernels.

use crate::batches::ON_16_T4;
use crate::calibration::{Anchors, AttentionAnchor, LONGEST, PAIRS, Testbed};
use crate::comparison::{Comparison, Section, Standing, Table};
use crate::prototype::Experiment;
use glinthawk_plan::PlanError;
use glinthawk_plan::Rules;

/// The numbers that another calibration changes.
#[derive(Clone, Debug)]
pub(crate) struct Trial {
    name: String,
    /// Batch and flights that our search picks on 16 T4.
    picked: (usize, usize),
    on_27_t4: f64,
    /// Throughput of 12 T4 + 36 CPU over 27 T4.
    over_27_t4: f64,
    /// Throughput per GPU at 16K over 80 T4.
    at_16k: f64,
    /// 16 T4 with 16 and with 48 CPU nodes over 16 T4.
    over_16_t4: [f64; 2],
    /// 2 H100 + 20 T4.
    h100: f64,
}

impl Trial {
    fn of(name: impl Into<String>, testbed: &Testbed) -> Self {
        let rate = |name: &str, context| testbed.rate(testbed.experiment(name), context);
        let (single, on_27_t4) = (testbed.experiment(ON_16_T4[0]), rate("27xT4_B23", LONGEST));
        let best = testbed.optimum(single.tier1, 0, single.contexts);
        let on_16 = rate(ON_16_T4[0], LONGEST);
        let per_gpu = |name: &str| rate(name, 16384.0) / testbed.experiment(name).tier1 as f64;
        Self {
            name: name.into(),
            picked: best.map_or((0, 0), |best| (best.candidate.rows(), best.candidate.flights)),
            on_27_t4,
            over_27_t4: rate("12xT4_36xCPU_B249", LONGEST) / on_27_t4,
            at_16k: per_gpu("16K/L70B_9xT4_144xCPU_B32") / per_gpu("16K/L70B_80xT4_B3"),
            over_16_t4: [ON_16_T4[1], ON_16_T4[3]].map(|name| rate(name, LONGEST) / on_16),
            h100: testbed.pairing(&PAIRS[2]).map_or(0.0, |best| best.tokens_per_second),
        }
    }

    fn row(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            format!("{} rows, {} flights", self.picked.0, self.picked.1),
            format!("{:.0}", self.on_27_t4),
            format!("{:.1}×", self.over_27_t4),
            format!("{:.1}×", self.at_16k),
            format!("{:.0} ({:+.1}%)", self.h100, 100.0 * (self.h100 / 2286.0 - 1.0)),
        ]
    }
}

/// Everything that was tried.
#[derive(Clone, Debug)]
pub(crate) struct Trials {
    readings: Vec<Trial>,
    /// The prototype's batch and flights on 27 T4.
    run_27_t4: (usize, usize),
    /// 27 T4 in the listing's reading with our search's batch: batch, flights, tokens per second.
    on_27_t4: Option<(usize, usize, f64)>,
    /// 27 T4 in that reading with the prototype's batch: what no run exceeds.
    bound_27_t4: f64,
    /// The prototype's single tiers: T4s, its batch, what our search picks with each reading.
    singles: Vec<[String; 4]>,
    anchors: Vec<Trial>,
    backwards: Trial,
}

impl Trials {
    pub fn run(testbed: &Testbed) -> Result<Self, PlanError> {
        let to = |anchor, rules| Testbed::calibrated_to(anchor, rules);
        let same = Testbed { rules: Rules::Listing, ..testbed.clone() };
        let anchor = AttentionAnchor::TimePerToken;
        let refitted = to(anchor(Anchors::TIME_PER_TOKEN), Rules::Listing)?;
        let readings = vec![
            Trial::of("a hop per slice (the text)", testbed),
            Trial::of("a hop after every layer (the listing), same kernels", &same),
            Trial::of("a hop after every layer, T4 attention fitted anew", &refitted),
        ];
        let run = testbed.experiment("27xT4_B23");
        let best = same.optimum(run.tier1, 0, run.contexts);
        let on_27_t4 = best
            .map(|best| (best.candidate.rows(), best.candidate.flights, best.tokens_per_second));
        let bound_27_t4 =
            glinthawk_plan::simulate(&same.configuration(run, LONGEST)).bound_tokens_per_second;
        let ends = [Anchors::TIME_PER_TOKEN - 0.05, Anchors::TIME_PER_TOKEN + 0.05];
        let mut anchors = Vec::new();
        for end in ends {
            anchors.push(Trial::of(format!("{end:.2}×"), &to(anchor(end), Rules::Paper)?));
        }
        let backwards = to(AttentionAnchor::LongSequences(16.3), Rules::Paper)?;
        let backwards = Trial::of("16.3× at 16K instead of 5.2×", &backwards);
        let singles = singles(testbed, &same);
        let run_27_t4 = (run.rows, run.flights());
        Ok(Self { readings, run_27_t4, on_27_t4, bound_27_t4, singles, anchors, backwards })
    }
}

/// The prototype's end-to-end single tiers beside what our search picks with a hop per slice and per layer.
fn singles(slice: &Testbed, layer: &Testbed) -> Vec<[String; 4]> {
    let count = |number: usize, what: &str| {
        if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
    };
    let words = |rows, flights| format!("{}, {}", count(rows, "row"), count(flights, "flight"));
    let pick = |testbed: &Testbed, run: &Experiment| {
        let best = testbed.optimum(run.tier1, 0, run.contexts);
        best.map_or("none".to_owned(), |best| words(best.candidate.rows(), best.candidate.flights))
    };
    let mut runs: Vec<&Experiment> = slice.experiments.iter().collect();
    runs.retain(|run| run.group == "E2E" && run.tier2 == 0);
    runs.sort_by_key(|run| (run.tier1, run.rows));
    let row = |run: &Experiment| {
        let theirs = words(run.rows, run.flights());
        [format!("{} T4", run.tier1), theirs, pick(slice, run), pick(layer, run)]
    };
    runs.into_iter().map(row).collect()
}

const HEADER: [&str; 6] = [
    "variant",
    "our search on 16 T4 (paper: 14 rows, 29 flights)",
    "27 T4, tokens/s",
    "12 T4 + 36 CPU over 27 T4 (paper: 2.2×)",
    "per GPU at 16K (paper: 16.3×)",
    "2 H100 + 20 T4 (paper: 2286)",
];

/// How often a single tier sends.
fn readings(trials: &Trials) -> Section {
    let [slice, layer, _] = &trials.readings[..] else { unreachable!("three readings") };
    let over = |rate: f64| layer.over_27_t4 * layer.on_27_t4 / rate;
    let searched = trials.on_27_t4.map_or(String::new(), |(rows, flights, rate)| {
        format!(
            " With the batch that our search picks for that reading, {rows} rows and {flights} flights, they would run at \
             {rate:.0}, and the ratio would be {:.1}×.",
            over(rate)
        )
    });
    let singles = [
        "single tier",
        "the prototype",
        "our search, a hop per slice",
        "our search, a hop after every layer",
    ];
    let same = |column: usize| trials.singles.iter().filter(|row| row[1] == row[column]).count();
    Section {
        label: "algo:simu_single, sec:kvc_strawman, fig:motivate_example",
        title: "How often a single tier sends",
        tables: vec![
            Table::new(&HEADER, trials.readings.iter().map(Trial::row).collect()),
            Table::new(&singles, trials.singles.iter().map(|row| row.to_vec()).collect()),
        ],
        notes: vec![
            format!(
                "The paper's text passes a batch through all layers of a node and then sends it on. Its listing sends after every \
                 layer, also where the next layer is on the same node. The measured 2.2× lies between the two: {:.1}× \
                 with a hop per slice, {:.1}× with one after every layer. The difference is not transfer time. 27 T4 \
                 run {} rows in {} flights. With a hop after every layer these flights bunch, and {:.0} tokens/s are left of the \
                 {:.0} that the GPUs could do.{searched}",
                slice.over_27_t4,
                layer.over_27_t4,
                trials.run_27_t4.0,
                trials.run_27_t4.1,
                layer.on_27_t4,
                trials.bound_27_t4
            ),
            format!(
                "Neither reading gives 2.2×, and nothing here decides why. The page's tables use the hop per slice, because the text \
                 describes the prototype that was measured. The search that chose its batches seems to have used the other one: \
                 of the {} published single tiers it picks {} exactly, the hop per slice {} (second table).",
                trials.singles.len(),
                same(3),
                same(2)
            ),
        ],
        ..Section::default()
    }
}

/// The two digits of the 5.2× anchor, and its exchange for 16.3×.
fn anchors(trials: &Trials) -> Section {
    let rows = trials.anchors.iter().chain([&trials.backwards]).map(Trial::row).collect();
    let backwards = |index: usize, paper: f64| {
        Comparison::ratio(
            ["3.4× on 16 T4 from 16.3×", "5.9× on 16 T4 from 16.3×"][index],
            paper,
            trials.backwards.over_16_t4[index],
            Standing::Follows("16.3× from 5.2×, read backwards"),
        )
    };
    Section {
        title: "Other anchors for the GPUs' attention",
        comparisons: vec![backwards(0, 3.4), backwards(1, 5.9)],
        tables: vec![Table::new(&HEADER, rows)],
        notes: vec![
            "5.2× has two digits: the first two variants are the ends of what rounds to it. The third fits the GPUs' attention \
             to 16.3× instead. That 3.4× and 5.9× then come out is the same relation as 16.3× from 5.2×, so it is no \
             second test."
                .to_owned(),
        ],
        ..Section::default()
    }
}

/// Load and multiply hidden behind each other instead of added up.
fn longer_of_both(testbed: &Testbed) -> Section {
    let (anchor, other) = (testbed.experiment(ON_16_T4[3]), testbed.experiment(ON_16_T4[2]));
    let layers = (testbed.shape.layers / anchor.tier1) as f64;
    let multiply = 1.0 / (Anchors::T4_BOUND * layers);
    let rows = other.rows as f64;
    let longer = rows / layers / Anchors::LAYER_SECONDS.max(rows * multiply);
    let sum = rows / layers / testbed.kernels("t4").fused_seconds(other.rows);
    Section {
        title: "Loading and multiplying at the same time",
        notes: vec![format!(
            "A matrix product could also take the longer of loading its weights and multiplying, not the sum. Fitted to the \
             same two anchors, that puts 16 T4 + 32 CPU at {longer:.0} tokens/s, {:+.0}% from the paper's 1,557; the sum \
             puts it at {sum:.0}, {:+.0}%. This is what chose the sum. So 1,557 was used to choose the form of the \
             kernels, one more reason not to count it as held out.",
            100.0 * (longer / 1557.0 - 1.0),
            100.0 * (sum / 1557.0 - 1.0)
        )],
        ..Section::default()
    }
}

/// What was tried.
pub(crate) fn sections(testbed: &Testbed, trials: &Trials) -> Vec<Section> {
    vec![readings(trials), anchors(trials), longer_of_both(testbed)]
}
