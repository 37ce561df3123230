//! Local worker processes: started, pinned to their share of the cores, with their logs relayed,
//! and always ended.

use crate::error::ClusterError;
use glinthawk_compute::allowed_cores;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long workers have to leave by themselves after the dispatcher's goodbye.
const FAREWELL: Duration = Duration::from_secs(5);

/// The environment variable that holds the cluster's secret.
pub const TOKEN_VARIABLE: &str = "GLINTHAWK_TOKEN";

/// Worker processes of this machine.
pub struct Processes {
    children: Vec<(String, Child)>,
}

/// A process to start.
#[derive(Clone, Debug)]
pub struct LocalWorker {
    /// Its tier.
    pub tier: usize,
    /// What it computes on, as `--device` takes it.
    pub device: String,
    /// Whether that is a GPU.
    pub has_gpu: bool,
    /// Memory for contexts; `None` is what a GPU has left.
    pub memory_bytes: Option<u64>,
}

/// Cores of a process on a GPU that others need cores beside: one gives it work, one is the network's.
const GPU_CORES: usize = 2;

impl Processes {
    /// Starts workers as `executable worker --join ADDRESS …`.
    pub fn start(
        executable: &Path,
        workers: &[LocalWorker],
        address: SocketAddr,
        token: &str,
    ) -> Result<Self, ClusterError> {
        let mut processes = Self { children: Vec::new() };
        let mut places = [0, 0];
        for (worker, cores) in workers.iter().zip(shares(&allowed_cores(), workers)) {
            let LocalWorker { tier, device, memory_bytes, .. } = worker;
            let place = places[tier - 1];
            places[tier - 1] += 1;
            let name = format!("tier{tier}-{place}");
            let cores: Vec<String> = cores.iter().map(ToString::to_string).collect();
            let mut command = Command::new(executable);
            command
                .args(["worker", "--join", &address.to_string(), "--tier", &tier.to_string()])
                .args(["--place", &place.to_string(), "--cores", &cores.join(",")])
                .args(["--device", device])
                .env(TOKEN_VARIABLE, token)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                // Ctrl-C is for the dispatcher, which ends its workers in good order.
                .process_group(0);
            if let Some(bytes) = memory_bytes {
                command.args(["--context-memory", &bytes.to_string()]);
            }
            let mut child =
                command.spawn().map_err(ClusterError::io(format!("cannot start worker {name}")))?;
            relay(&name, &mut child);
            processes.children.push((name, child));
        }
        Ok(processes)
    }

    /// Fails if a worker has ended.
    pub fn check(&mut self) -> Result<(), ClusterError> {
        for (name, child) in &mut self.children {
            let ended = child.try_wait().map_err(ClusterError::io("cannot look after workers"))?;
            if let Some(status) = ended {
                return Err(ClusterError::Failed {
                    name: name.clone(),
                    reason: format!("its process ended: {status}"),
                });
            }
        }
        Ok(())
    }
}

impl Drop for Processes {
    /// Workers leave when the dispatcher does; those that have not are ended.
    fn drop(&mut self) {
        let started = Instant::now();
        for (name, child) in &mut self.children {
            while started.elapsed() < FAREWELL && matches!(child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(5));
            }
            if matches!(child.try_wait(), Ok(None)) {
                tracing::warn!(worker = name, "did not leave in time and is ended");
                // It may have ended in between, which is as well.
                _ = child.kill();
                _ = child.wait();
            }
        }
    }
}

/// Passes a worker's log on, each line under its name.
fn relay(name: &str, child: &mut Child) {
    let Some(stderr) = child.stderr.take() else { return };
    let name = name.to_owned();
    std::thread::spawn(move || {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            // Nobody may be listening there.
            _ = writeln!(std::io::stderr(), "[{name}] {line}");
        }
    });
}

/// Cores set apart for processes on GPUs: a few each if others compute on cores, and there are enough.
fn gpu_cores(cores: usize, on_gpus: usize, on_cores: usize) -> Option<usize> {
    let few = on_gpus * GPU_CORES;
    (on_gpus > 0 && on_cores > 0 && few + on_cores <= cores).then_some(few)
}

/// Cores of each process that computes on cores, at least.
pub fn cores_each(cores: usize, on_gpus: usize, on_cores: usize) -> usize {
    let each = match gpu_cores(cores, on_gpus, on_cores) {
        Some(few) => (cores - few) / on_cores,
        None => cores / (on_gpus + on_cores),
    };
    each.max(1)
}

/// The cores of each process. Those on GPUs have a few each, and the others share the rest.
fn shares(cores: &[usize], workers: &[LocalWorker]) -> Vec<Vec<usize>> {
    let on_gpus = workers.iter().filter(|worker| worker.has_gpu).count();
    let on_cores = workers.len() - on_gpus;
    let Some(few) = gpu_cores(cores.len(), on_gpus, on_cores) else {
        return even_shares(cores, workers.len());
    };
    let (few, rest) = cores.split_at(few);
    let mut few = few.chunks(GPU_CORES).map(<[usize]>::to_vec);
    let mut rest = even_shares(rest, on_cores).into_iter();
    let share = |worker: &LocalWorker| if worker.has_gpu { few.next() } else { rest.next() };
    workers.iter().map(share).map(|cores| cores.expect("as many shares as workers")).collect()
}

/// Even shares of cores for `count` processes. With more processes than cores, each gets one core and shares it.
fn even_shares(cores: &[usize], count: usize) -> Vec<Vec<usize>> {
    if count >= cores.len() {
        return (0..count).map(|index| vec![cores[index % cores.len()]]).collect();
    }
    let start = |index: usize| index * cores.len() / count;
    (0..count).map(|index| cores[start(index)..start(index + 1)].to_vec()).collect()
}

/// Keeps this process, and every thread it starts from now on, to these cores.
pub fn keep_to_cores(cores: &[usize]) -> Result<(), ClusterError> {
    let mut set = rustix::thread::CpuSet::new();
    let refused = |source: std::io::Error| {
        let cores: Vec<String> = cores.iter().map(ToString::to_string).collect();
        let allowed: Vec<String> = allowed_cores().iter().map(ToString::to_string).collect();
        let (cores, allowed) = (cores.join(","), allowed.join(","));
        ClusterError::io(format!("cannot keep to cores {cores} (there are {allowed})"))(source)
    };
    for &core in cores {
        if core >= rustix::thread::CpuSet::MAX_CPU {
            return Err(refused(std::io::ErrorKind::InvalidInput.into()));
        }
        set.set(core);
    }
    rustix::thread::sched_setaffinity(None, &set).map_err(|error| refused(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cores of processes, of which `true` ones are on a GPU.
    fn check(cores: usize, on_gpus: &[bool], expected: &[&[usize]]) {
        let worker = |&has_gpu: &bool| LocalWorker {
            tier: 1,
            device: String::new(),
            has_gpu,
            memory_bytes: None,
        };
        let workers: Vec<LocalWorker> = on_gpus.iter().map(worker).collect();
        let cores: Vec<usize> = (0..cores).collect();
        let shares = shares(&cores, &workers);
        assert_eq!(shares, expected, "{on_gpus:?}");
        let on_cores = shares.iter().zip(on_gpus).filter(|(_, on_gpu)| !*on_gpu);
        let fewest = on_cores.clone().map(|(share, _)| share.len()).min();
        let (on_cores, all) = (on_cores.count(), on_gpus.len());
        let each = cores_each(cores.len(), all - on_cores, on_cores);
        assert_eq!(fewest.unwrap_or(each), each, "{on_gpus:?}");
    }

    #[test]
    fn processes_that_compute_on_cores_have_those_that_gpus_leave() {
        check(4, &[false, false], &[&[0, 1], &[2, 3]]);
        check(2, &[false, false, false], &[&[0], &[1], &[0]]);
        check(8, &[true, false], &[&[0, 1], &[2, 3, 4, 5, 6, 7]]);
        check(8, &[false, true, false], &[&[2, 3, 4], &[0, 1], &[5, 6, 7]]);
        check(8, &[true, true], &[&[0, 1, 2, 3], &[4, 5, 6, 7]]);
        check(2, &[true, false], &[&[0], &[1]]);
    }
}
