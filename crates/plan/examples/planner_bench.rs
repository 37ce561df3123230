//! Times the planner: the paper's search, the event loop, and a cluster of 1,000 Tier-1 and 20,000 Tier-2 nodes.

use glinthawk_plan::PlanError;
use glinthawk_plan::bench::{large_cluster, paper_search, timed};

/// The most memory the process has held, where the system tells.
fn memory_peak() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM"));
    line.map_or("unknown".to_owned(), |line| line.trim_start_matches("VmHWM:").trim().to_owned())
}

fn main() -> Result<(), PlanError> {
    let (found, seconds) = paper_search()?;
    println!("80 T4 + 80 CPU: {seconds:.2} s, {:?}; {:?}", found.effort, found.best);
    println!("{}", timed("100 x 5, 300 flights", &large_cluster(100, 5, 300)).render());
    println!("{}", timed("1,000 x 20, 1,500 flights", &large_cluster(1000, 20, 1500)).render());
    println!("peak memory {}", memory_peak());
    Ok(())
}
