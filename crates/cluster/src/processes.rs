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
    /// How many cores it has; processes share cores where there are too few.
    pub cores: usize,
    /// Memory for contexts; `None` is what a GPU has left.
    pub memory_bytes: Option<u64>,
}

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
        let mut cores_left = allowed_cores().into_iter().cycle();
        for LocalWorker { tier, device, cores, memory_bytes } in workers {
            let place = places[tier - 1];
            places[tier - 1] += 1;
            let name = format!("tier{tier}-{place}");
            let cores = cores_left.by_ref().take(*cores);
            let cores: Vec<String> = cores.map(|core| core.to_string()).collect();
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
