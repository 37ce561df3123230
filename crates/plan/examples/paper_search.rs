//! The paper's search, timed: 80 T4 and 80 CPU nodes, batches to 4,096.
use std::path::Path;
use std::time::Instant;

use glinthawk_plan::{
    Cluster, Job, Objective, Rules, Settings, Shape, Space, Traffic, front, search,
};

fn main() {
    let shape = Shape::llama2_70b();
    for (nodes, tier2_max) in [(80, usize::MAX), (6400, 80)] {
        let text = format!(
            "[tier1]\ndevice = \"t4\"\nnodes = 80\nbandwidth_gbps = 8\nrtt_ms = 2\n[[tier2]]\ndevice = \"epyc-7v12-16\"\nnodes = {nodes}\nbandwidth_gbps = 8\nrtt_ms = 2\n[inter_tier]\nbandwidth_gbps = 8\nrtt_ms = 2\n"
        );
        for rules in [Rules::Paper, Rules::Full] {
            let cluster = Cluster::parse("example", &text, Path::new("."), &shape).expect("valid");
            let settings = Settings {
                tier2_max,
                rules,
                traffic: if rules == Rules::Paper {
                    Traffic::StateObject
                } else {
                    Traffic::ResidualHome
                },
                local_shares: if rules == Rules::Paper { vec![0.0] } else { vec![0.0, 0.5, 1.0] },
                ..Settings::default()
            };
            let start = Instant::now();
            let space = Space::new(cluster, Job::longest(&shape, 2048.0, 3.0), settings);
            let found = search(&space, Objective::Throughput, true).expect("it fits");
            let seconds = start.elapsed().as_secs_f64();
            println!(
                "{nodes} CPU nodes, {rules:?}: {seconds:.2} s, {:?}; {:?}",
                found.effort, found.best
            );
            let start = Instant::now();
            let (points, effort) = front(&space).expect("it fits");
            println!(
                "    front of {} in {:.2} s, {effort:?}",
                points.len(),
                start.elapsed().as_secs_f64()
            );
        }
    }
}
