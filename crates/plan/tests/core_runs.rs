//! Forecasts from a profile of 16 cores beside what was measured there, in one process and in local clusters.

use glinthawk_model::{ModelConfig, even_slices};
use glinthawk_plan::{
    Deployment, KernelTimes, NetworkLink, Place, Profile, Shape, Workload, forecast,
};
use std::path::Path;
use std::sync::Arc;

/// How far forecasts may be off: half of them, and each.
const MEDIAN_MAX: f64 = 0.05;
const ERROR_MAX: f64 = 0.15;
/// Cores of the machine.
const CORES: usize = 16;
/// Pages of a lane: enough for all prompts.
const PAGES: u32 = 1 << 16;

#[test]
fn forecasts_of_cores_are_near_what_was_measured() {
    check("data/profiles/xeon-amx-16-smollm2-135m.json", "data/profiles/core-runs.csv");
}

/// Of an earlier build, which did not let processes share all cores.
#[test]
fn forecasts_of_processes_on_cores_of_their_own_are_near_what_was_measured() {
    check("tests/data/cores-apart.json", "tests/data/cores-apart.csv");
}

/// Holds forecasts from a profile to runs that were measured right after it.
fn check(profile: &str, runs: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = ModelConfig::shape("smollm2-135m").expect("a known shape");
    let shape = Shape::of("smollm2-135m", &config);
    let profile = Profile::read(&folder.join(profile)).expect("valid");
    let kernels = Arc::new(KernelTimes::Measured(Box::new(profile)));
    let runs = std::fs::read_to_string(folder.join(runs)).expect("it is there");
    let error = |run: &str| {
        let fields: Vec<&str> = run.split(',').collect();
        let number = |index: usize| fields[index].parse::<usize>().expect("a number");
        let (tier1, tier2, strands) = (number(0), number(1), number(3));
        let own_first = fields[2] == "true";
        let deployment = Deployment {
            shape: shape.clone(),
            slices: even_slices(shape.layers, tier1),
            tier2,
            local_lane: tier2 == 0 || own_first,
            own_lane: None,
            own_first: own_first.then_some(PAGES),
            strands,
            crowding: [1.0, (strands as f64 / number(4) as f64).max(1.0)],
            batch: number(7) as u32,
            flights: number(6) as u32,
            chunk: 256,
            context_max: 8192,
            lane_pages: PAGES,
            page_positions: 16,
            whole_flights: false,
            greedy: true,
            tier1: kernels.clone(),
            tier2_kernels: kernels.clone(),
            delay_seconds: 0.0,
            bandwidth: f64::INFINITY,
            port: f64::INFINITY,
            hop: NetworkLink { rtt_seconds: 0.0, bandwidth: f64::INFINITY },
            place: match fields[5] {
                "one-process" => Place::OneProcess,
                "shared-cores" => Place::SharedCores(1),
                "one-core-each" => Place::SharedCores(CORES),
                "own-cores" => Place::OwnMachines,
                other => panic!("{other}"),
            },
        };
        let job = Workload::uniform(number(9), number(10), number(8)).expect("valid");
        let off = forecast(&deployment, &job, None).tokens_per_second() / number(11) as f64 - 1.0;
        println!("{run}: {:+.1}%", 100.0 * off);
        assert!(off.abs() < ERROR_MAX, "{run}: {:+.1}%", 100.0 * off);
        off.abs()
    };
    let mut errors: Vec<f64> = runs.lines().skip(1).map(error).collect();
    errors.sort_by(f64::total_cmp);
    assert!(errors[errors.len() / 2] < MEDIAN_MAX, "{errors:?}");
}
