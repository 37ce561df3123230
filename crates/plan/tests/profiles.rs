//! The measured profiles that ship with the planner, and forecasts from them beside what was measured.

use glinthawk_model::ModelConfig;
use glinthawk_plan::profile::{Point, interpolate};
use glinthawk_plan::shape::GIB;
use glinthawk_plan::{
    Deployment, KernelTimes, NetworkLink, OwnLane, Place, Profile, Shape, Workload, forecast,
};
use glinthawk_protocol::{PAGE_POSITIONS, lane_pages};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How far measurements may fall where they should rise.
const NOISE: f64 = 0.05;
/// The same for attention: a small kernel on a GPU may vary by 5 of 48 µs.
const ATTENTION_NOISE: f64 = 0.1;
/// How far a forecast may be off.
const ERROR_MAX: f64 = 0.1;
/// Rows of a flight on the own lane of a GPU beside CPUs.
const OWN_BATCH: u32 = 1024;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/profiles")
}

/// A profile and the shape of its model.
fn read(name: &str) -> (Profile, Shape) {
    let path = folder().join(format!("{name}.json"));
    let profile = Profile::read(&path).expect("a valid profile");
    let model = profile.shape.model.strip_prefix("dummy:").expect("a dummy model").to_owned();
    let shape = Shape::of(&model, &ModelConfig::shape(&model).expect("a known shape"));
    profile.check_shape(name, &shape).expect("the shape it was measured for");
    (profile, shape)
}

fn check_rises(name: &str, curve: &[Point], from: usize, noise: f64) {
    for pair in curve.windows(2).filter(|pair| pair[0].batch >= from) {
        let [low, high] = pair else { unreachable!() };
        assert!(high.seconds > low.seconds * (1.0 - noise), "{name}: {low:?}, {high:?}");
    }
}

#[test]
fn times_rise_with_rows_and_contexts() {
    for name in [
        "h200-llama3-8b",
        "h200-llama2-70b",
        "xeon-amx-16-smollm2-135m",
        "xeon-amx-16-llama3-8b",
        "xeon-amx-13-llama3-8b",
    ] {
        let (profile, _) = read(name);
        // Below that, reading the weights takes as long as computing, and other kernels are chosen.
        for curve in [&profile.pre, &profile.post, &profile.fused, &profile.classify] {
            check_rises(name, curve, 128, NOISE);
        }
        for curve in &profile.attention {
            check_rises(name, &curve.points, 16, ATTENTION_NOISE);
        }
        for pair in profile.attention.windows(2).filter(|pair| pair[0].context >= 64) {
            // Of few rows, a call takes longer than the kernel.
            for point in pair[1].points.iter().filter(|point| point.batch >= 16) {
                let shorter = interpolate(&pair[0].points, point.batch);
                let rises = point.seconds > shorter * (1.0 - ATTENTION_NOISE);
                assert!(rises, "{name}: {} {point:?}", pair[1].context);
            }
        }
        let on_gpu = profile.provenance.instruction_set.starts_with("cuda-");
        assert_eq!(KernelTimes::Measured(Box::new(profile)).on_device(), on_gpu);
    }
}

#[test]
fn forecasts_are_near_what_was_measured() {
    let runs = std::fs::read_to_string(folder().join("runs.csv")).expect("it is there");
    for run in runs.lines().skip(1) {
        let fields: Vec<&str> = run.splitn(3, ',').collect();
        let [name, tier2_name, numbers] = fields[..] else { panic!("{run}") };
        let numbers: Vec<usize> =
            numbers.split(',').map(|number| number.parse().expect("a number")).collect();
        let [
            tier2,
            own_mib,
            mib,
            flights,
            prompts,
            input,
            output,
            batch,
            chunk,
            context_max,
            measured,
        ] = numbers[..]
        else {
            panic!("{run}")
        };
        let (profile, shape) = read(name);
        let pages = |mib: usize, slots: usize| {
            let held = mib as f64 * GIB / 1024.0 / shape.page_bytes(shape.layers);
            let pages = lane_pages(held as u64, context_max as u32, slots as u64, PAGE_POSITIONS);
            pages.unwrap_or_else(|| panic!("{run}: not one context fits"))
        };
        let hybrid = tier2 > 0 && own_mib > 0;
        let own_pages = || pages(own_mib, OWN_BATCH as usize);
        let kernels = |profile| Arc::new(KernelTimes::Measured(Box::new(profile)));
        let deployment = Deployment {
            slices: vec![shape.layers],
            tier2,
            local_lane: own_mib > 0,
            own_lane: hybrid.then(|| OwnLane { batch: OWN_BATCH, pages: own_pages() }),
            own_first: None,
            strands: 1,
            crowding: [1.0; 2],
            batch: batch as u32,
            flights: flights as u32,
            chunk: chunk as u32,
            context_max: context_max as u32,
            lane_pages: pages(if tier2 == 0 { own_mib } else { mib }, flights * batch),
            page_positions: PAGE_POSITIONS,
            whole_flights: false,
            greedy: true,
            tier1: kernels(profile),
            tier2_kernels: kernels(read(tier2_name).0),
            delay_seconds: 0.0,
            bandwidth: f64::INFINITY,
            port: f64::INFINITY,
            hop: NetworkLink { rtt_seconds: 0.0, bandwidth: f64::INFINITY },
            place: match tier2 {
                0 => Place::OneProcess,
                _ => Place::OwnMachines,
            },
            shape,
        };
        let job = Workload::uniform(input, output, prompts).expect("valid");
        let rate = forecast(&deployment, &job, None).tokens_per_second();
        let off = rate / measured as f64 - 1.0;
        assert!(off.abs() < ERROR_MAX, "{run}: {rate:.0}, {:+.1}%", 100.0 * off);
    }
}
