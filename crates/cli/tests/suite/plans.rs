//! The planner on whole jobs: eight clusters and workloads, each planned, and its plan simulated again from its file.
//!
//! It takes minutes, so it runs only when asked for, and prints a table:
//! `cargo test --release -p glinthawk --test suite plans -- --ignored --nocapture`

use crate::common::{Finished, glinthawk};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::Instant;
use tempfile::TempDir;

#[test]
#[ignore = "takes minutes: cargo test --release -p glinthawk --test suite plans -- --ignored"]
fn a_plans_job_time_is_the_forecast_of_its_file() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../plan/data");
    let list = fs::read_to_string(data.join("plans.csv")).expect("it is there");
    let folder = TempDir::new().expect("a folder");
    println!("cluster | model | workload | objective | plan | plan's job | forecast | took");
    for line in list.lines().skip(1) {
        let fields: Vec<&str> = line.split(',').collect();
        let [name, model, workload, objective, hours] = fields[..] else { panic!("{line}") };
        let cluster = data.join(format!("clusters/{name}.toml"));
        let lengths = data.join(format!("lengths/{workload}.csv"));
        let path = folder.path().join(format!("{name}.toml"));
        let start = Instant::now();
        let mut command = glinthawk(["plan", "--model", model, "--objective", objective]);
        command.arg("--cluster").arg(&cluster).arg("--workload").arg(&lengths).arg("-o").arg(&path);
        if !hours.is_empty() {
            command.args(["--hours", hours]);
        }
        let planned = Finished::of(&mut command).expect(0);
        let took = start.elapsed().as_secs_f64();
        let plan: toml::Table = fs::read_to_string(&path).expect("written").parse().expect("TOML");
        let said = plan["forecast"]["job_seconds"].as_float().expect("seconds");
        let mut command = glinthawk(["simulate", "--json", "--plan"]);
        command.arg(&path).arg("--cluster").arg(&cluster).arg("--workload").arg(&lengths);
        let simulated = Finished::of(&mut command).expect(0);
        let job: Value = serde_json::from_str(&simulated.stdout).expect("JSON");
        let seconds = job["job"]["seconds"].as_f64().expect("seconds");
        let best = planned.stdout.lines().next().expect("a first line");
        println!(
            "{name} | {model} | {workload} | {objective} {hours} | {} | {said:.1} s | {seconds:.1} s | {took:.0} s",
            best.rsplit("  ").next().unwrap_or(best)
        );
        assert!((said / seconds - 1.0).abs() < 0.1, "{line}: {said} s against {seconds} s");
        if let Ok(hours) = hours.parse::<f64>() {
            assert!(said <= hours * 3600.0, "{line}: {said} s");
        }
    }
}
