//! The paper's evaluation, regenerated: ours beside theirs wherever the text states a number.

mod calibration;
mod prototype;

pub use calibration::Testbed;

/// scratch
pub fn scratch() {
    let start = std::time::Instant::now();
    let bed = Testbed::calibrated().expect("good");
    println!("calibrated in {:?}", start.elapsed());
    println!("{:?}\n{:?}", bed.device("t4").efficiency, bed.device("epyc-7v12-16").efficiency);
    for (name, paper) in [
        ("9xT4_27xCPU_B255", 1096.0),
        ("16xT4_16xCPU_B112", 1138.0),
        ("16xT4_32xCPU_B116", 1557.0),
        ("16xT4_48xCPU_B246", 1992.0),
        ("16xT4_B14", 1992.0 / 5.9),
        ("27xT4_B23", 0.0),
        ("12xT4_36xCPU_B249", 0.0),
        ("2K/L70B_16xT4_B11", 0.0),
    ] {
        let e = bed.experiment(name);
        let r = crate::report::simulate(&bed.configuration(e, 2048.0));
        println!(
            "{name}: {:.1} paper {paper} {:+.1}% {:?} flights {} tpt {:.2}s pending {:.0}%",
            r.tokens_per_second,
            100.0 * (r.tokens_per_second / paper - 1.0),
            r.bottleneck,
            r.flights,
            r.time_per_token.total(),
            100.0 * r.time_per_token.pending() / r.time_per_token.total()
        );
    }
    for (a, k, b, e, paper) in [
        ("a100-40", 4, "rtx6000", 2, 1705.0),
        ("a100-40", 4, "a6000", 1, 1738.0),
        ("h100-80", 2, "t4", 10, 2286.0),
    ] {
        let (space, site, _) = bed.pairing(a, k, b, e).expect("fits");
        let best = crate::search::best_at(&space, &site).expect("x");
        println!(
            "{k}x{a}+{e}x{b}: {best:?} {:+.1}% share {:.3}",
            100.0 * (best.tokens_per_second / paper - 1.0),
            best.candidate.local_rows as f64 / best.candidate.rows() as f64
        );
    }
    for s in ["2K", "4K", "8K", "16K"] {
        for e in bed.experiments.iter().filter(|e| e.name.starts_with(&format!("{s}/"))) {
            let context = 1024.0 * s.trim_end_matches('K').parse::<f64>().expect("n");
            let mut e = e.clone();
            if e.tier2 == 0 {
                e.rows = e.contexts / (e.contexts / e.rows).max(1);
            }
            let r = crate::report::simulate(&bed.configuration(&e, context));
            println!(
                "{}: {:.1} per gpu {:.3} {:?} flights {}",
                e.name,
                r.tokens_per_second,
                r.tokens_per_second / e.tier1 as f64,
                r.bottleneck,
                r.flights
            );
        }
    }
}
