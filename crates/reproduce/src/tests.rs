//! The page is what the code writes; every number's standing is pinned, and so is why it has it.

use super::*;
use crate::calibration::{Anchors, LONGEST, PAIRS};
use glinthawk_plan::Bottleneck;
use glinthawk_plan::Rules;
use glinthawk_plan::simulate;

fn reproduction() -> &'static Reproduction {
    static ONCE: std::sync::OnceLock<Reproduction> = std::sync::OnceLock::new();
    ONCE.get_or_init(|| Reproduction::run().expect("the built-in data is good"))
}

fn found(what: &str) -> &'static Comparison {
    let mut all = reproduction().comparisons();
    all.find(|comparison| comparison.what == what)
        .unwrap_or_else(|| panic!("{what} is not compared"))
}

#[test]
fn the_page_and_its_plots_are_what_the_code_writes() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    reproduction().write(folder.path()).expect("written");
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let files = |folder: &Path| {
        let entries = std::fs::read_dir(folder.join("reproduction")).expect("a folder");
        let mut names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(files(folder.path()), files(&docs), "docs/reproduction has other plots");
    let plots = files(&docs).into_iter().map(|name| Path::new("reproduction").join(name));
    for file in plots.chain(["reproduction.md".into()]) {
        let read = |folder: &Path| std::fs::read_to_string(folder.join(&file)).expect("readable");
        let (ours, written) = (read(folder.path()), read(&docs));
        for (ours, written) in ours.lines().zip(written.lines()) {
            assert_eq!(ours, written, "{}: run `glinthawk reproduce`", file.display());
        }
        assert_eq!(ours.len(), written.len(), "{}", file.display());
    }
}

#[test]
fn only_these_numbers_are_held_out() {
    let held_out = |test: Test| {
        let all = reproduction().comparisons();
        let kept = all.filter(|comparison| comparison.standing == Standing::HeldOut(test));
        kept.map(|comparison| comparison.what.as_str()).collect::<Vec<_>>()
    };
    let rates = [
        "t_c,min, the smallest stage at batch 1",
        "throughput, 12 T4 + 36 CPU over 27 T4",
        "2 H100 + 20 T4",
        "throughput per GPU at 16K over a single tier",
    ];
    assert_eq!(held_out(Test::Rate), rates);
    assert_eq!(held_out(Test::Flights).len(), 5);
    assert_eq!(held_out(Test::Batch).len(), 9);
    let count = |keep: &dyn Fn(Standing) -> bool| {
        reproduction().comparisons().filter(|comparison| keep(comparison.standing)).count()
    };
    assert_eq!(count(&|standing| standing == Standing::Anchor), 5);
    assert_eq!(count(&|standing| matches!(standing, Standing::Follows(_))), 9);
}

#[test]
fn what_follows_needs_no_simulation_of_its_own() {
    let close = |what: &str, ours: f64, mark: f64| {
        let error = found(what).ours / ours - 1.0;
        assert!(error.abs() < mark, "{what}: {} against {ours}", found(what).ours);
        assert!(matches!(found(what).standing, Standing::Follows(_)), "{what}");
    };
    // The line through 5.6 ms at one row and 246 rows at 1,992 tokens/s.
    let slope = (246.0 / (Anchors::T4_BOUND * 5.0) - Anchors::LAYER_SECONDS) / 245.0;
    let line =
        |rows: f64, layers: f64| rows / layers / (Anchors::LAYER_SECONDS + slope * (rows - 1.0));
    close("9 T4 + 27 CPU", line(255.0, 9.0), 0.01);
    close("16 T4 + 32 CPU", line(116.0, 5.0), 0.01);
    // The same A100s bound both pairs.
    close("4 A100 + 4 A6000", Anchors::A100_BOUND, 0.01);
    for pair in &PAIRS[..2] {
        let best = reproduction().testbed.pairing(pair).expect("it fits");
        assert_eq!(best.bottleneck, Bottleneck::Tier1Compute, "{}", pair.name);
    }
    // Prices: a T4 node $1,956.29, a CPU node $700.83.
    let price = |cpu: f64| 1.0 + cpu * 700.83 / 1956.29;
    let at_16k = found("throughput per GPU at 16K over a single tier").ours;
    close("cost per token/s at 16K", at_16k / price(16.0), 0.001);
    let over = found("throughput, 16 T4 + 48 CPU over 16 T4").ours;
    close("cost per token/s, 16 T4 over 16 T4 + 48 CPU", over / price(3.0), 0.001);
    // Little's law: 50 flights of 246 rows against 29 of 14.
    let rows = 50.0 * 246.0 / (29.0 * 14.0);
    close("throughput, 16 T4 + 48 CPU over 16 T4", rows / Anchors::TIME_PER_TOKEN, 0.001);
}

#[test]
fn the_t4s_limit_the_measured_rows_that_the_cpu_was_not_fitted_to() {
    let testbed = &reproduction().testbed;
    for name in ["9xT4_27xCPU_B255", "16xT4_32xCPU_B116", "16xT4_48xCPU_B246"] {
        let run = simulate(&testbed.configuration(testbed.experiment(name), LONGEST));
        assert_eq!(run.bottleneck, Bottleneck::Tier1Compute, "{name}");
    }
}

#[test]
fn numbers_keep_their_marks() {
    for (what, mark) in [
        ("9 T4 + 27 CPU", 0.03),
        ("16 T4 + 32 CPU", 0.03),
        ("4 A100 + 4 A6000", 0.03),
        ("2 H100 + 20 T4", 0.10),
        ("throughput, 16 T4 + 16 CPU over 16 T4", 0.03),
        ("throughput, 16 T4 + 48 CPU over 16 T4", 0.03),
        ("throughput per GPU at 16K over a single tier", 0.03),
        ("cost per token/s at 16K", 0.05),
        ("cost per token/s, 16 T4 over 16 T4 + 48 CPU", 0.03),
        ("t_c,min, the smallest stage at batch 1", 0.10),
    ] {
        let one = found(what);
        assert!(one.error().abs() <= mark, "{what}: {} against {}", one.ours, one.paper);
    }
    for one in reproduction().comparisons() {
        let round = |value: f64| format!("{value:.0$}", one.digits);
        match one.standing {
            Standing::Arithmetic => assert_eq!(round(one.ours), round(one.paper), "{}", one.what),
            Standing::Anchor => assert!(one.error().abs() < 0.02, "{}: {}", one.what, one.ours),
            Standing::HeldOut(Test::Flights) => assert_eq!(one.ours, one.paper, "{}", one.what),
            _ => {}
        }
    }
}

#[test]
fn the_ratio_over_27_t4_lies_between_the_two_readings() {
    let testbed = &reproduction().testbed;
    let listing = Testbed { rules: Rules::Listing, ..testbed.clone() };
    let ratio = |testbed: &Testbed| {
        let rate = |name| testbed.rate(testbed.experiment(name), LONGEST);
        rate("12xT4_36xCPU_B249") / rate("27xT4_B23")
    };
    assert_eq!(format!("{:.1} {:.1}", ratio(testbed), ratio(&listing)), "1.8 2.6");
}

#[test]
fn with_a_hop_after_every_layer_the_search_picks_the_prototypes_single_tiers() {
    let testbed = &reproduction().testbed;
    let listing = Testbed { rules: Rules::Listing, ..testbed.clone() };
    for (name, picked) in [("16xT4_B14", (14, 29)), ("20xT4_B18", (18, 36))] {
        let theirs = testbed.experiment(name);
        assert_eq!((theirs.rows, theirs.flights()), picked, "{name}");
        let pick = |testbed: &Testbed| {
            let best = testbed.optimum(theirs.tier1, 0, theirs.contexts).expect("it fits");
            (best.candidate.rows(), best.candidate.flights)
        };
        assert_eq!(pick(&listing), picked, "{name}");
        assert_ne!(pick(testbed), picked, "{name}");
    }
}

#[test]
fn statements_are_judged_by_their_cases() {
    for (cases, expected) in [
        (&[true, true][..], "holds"),
        (&[true, false], "in part"),
        (&[false], "does not hold"),
        (&[], "not testable here"),
    ] {
        assert_eq!(Statement::new("x", String::new(), cases).holds, expected);
    }
    let verdicts: Vec<_> = reproduction().statements().map(|one| (one.claim, one.holds)).collect();
    for (start, expected) in [
        ("half of the wait", "in part"),
        ("more than half of the time", "in part"),
        ("the products do not saturate", "in part"),
        ("the single tier is on par", "not testable here"),
        ("simulation matches", "not testable here"),
        ("each pair has more", "holds"),
        ("each pair costs less", "holds"),
        ("tens of milliseconds", "in part"),
        ("more Tier-2 nodes", "holds"),
    ] {
        let found = verdicts.iter().find(|(claim, _)| claim.starts_with(start));
        assert_eq!(found.map(|(_, holds)| *holds), Some(expected), "{start}");
    }
}
