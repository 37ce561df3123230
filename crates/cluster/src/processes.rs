//! Local worker processes: started, pinned to their share of the cores, with their logs relayed,
//! and always ended.

use crate::error::ClusterError;
use glinthawk_compute::allowed_cores;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long workers have to leave after the dispatcher's goodbye.
const FAREWELL: Duration = Duration::from_secs(5);
/// How long those that do not hear it, because they have not joined yet, are waited for.
const GOODBYE_HEARD: Duration = Duration::from_millis(500);

/// The environment variable that holds the cluster's secret.
pub const TOKEN_VARIABLE: &str = "GLINTHAWK_TOKEN";

/// How often a worker that ends early is started again.
const RESTARTS_MAX: u32 = 8;

/// Pause between two looks at the workers.
const LOOK: Duration = Duration::from_millis(50);

/// Worker processes of this machine.
pub struct Processes {
    workers: Arc<Mutex<Vec<Worker>>>,
    /// Whether workers that end are started again.
    restarting: bool,
}

struct Worker {
    name: String,
    command: Command,
    child: Child,
    restarts: u32,
    /// When it was started last.
    started: Instant,
}

impl Worker {
    fn start(name: String, mut command: Command) -> Result<Self, ClusterError> {
        let child = spawn(&name, &mut command)?;
        Ok(Self { name, command, child, restarts: 0, started: Instant::now() })
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>, ClusterError> {
        self.child.try_wait().map_err(ClusterError::io("cannot look after workers"))
    }

    /// Starts a worker again that has failed, or was asked to leave. One that ends soon, or cannot be started, has to wait,
    /// each time twice as long: what stopped it may pass.
    fn revive(&mut self) -> Result<(), ClusterError> {
        if self.restarts > RESTARTS_MAX
            || self.ended()?.is_none()
            || self.started.elapsed() < LOOK * (1 << self.restarts)
        {
            return Ok(());
        }
        self.started = Instant::now();
        self.restarts += 1;
        if self.restarts > RESTARTS_MAX {
            let worker = &self.name;
            tracing::warn!(worker, "was started again {RESTARTS_MAX} times, and is not any more");
            return Ok(());
        }
        self.child = spawn(&self.name, &mut self.command)?;
        Ok(())
    }
}

fn spawn(name: &str, command: &mut Command) -> Result<Child, ClusterError> {
    let refused = || ClusterError::io(format!("cannot start worker {name}"));
    let mut child = command.spawn().map_err(refused())?;
    if let Err(error) = relay(name, &mut child) {
        // Nobody would read its log.
        _ = child.kill();
        _ = child.wait();
        return Err(refused()(error));
    }
    Ok(child)
}

/// Starts workers again that end, until it is dropped.
pub struct Restarts {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Restarts {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the thread that looks after workers had panicked");
        }
    }
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
        let mut started = Vec::new();
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
                // It ends with this process, whose end it reads there.
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                // Ctrl-C is for the dispatcher, which ends its workers in good order.
                .process_group(0);
            if let Some(bytes) = memory_bytes {
                command.args(["--context-memory", &bytes.to_string()]);
            }
            started.push(Worker::start(name, command)?);
        }
        Ok(Self { workers: Arc::new(Mutex::new(started)), restarting: false })
    }

    /// Ends a worker, by its id, that nobody needs any more; one that is stopped too. It may be started again.
    pub fn end(&self) -> impl Fn(u32) + Send + 'static {
        let workers = Arc::clone(&self.workers);
        move |id| {
            let mut workers = workers.lock().expect("no panic with the workers");
            if let Some(worker) = workers.iter_mut().find(|worker| worker.child.id() == id) {
                // It may have ended by itself, which is as well.
                _ = worker.child.kill();
            }
        }
    }

    /// Starts workers again that end from now on, each so many times.
    pub fn restart(&mut self) -> Result<Restarts, ClusterError> {
        self.restarting = true;
        let (stop, workers) = (Arc::new(AtomicBool::new(false)), Arc::clone(&self.workers));
        let stopped = Arc::clone(&stop);
        let watch = move || {
            while !stopped.load(Ordering::Relaxed) {
                let mut workers = workers.lock().expect("no panic with the workers");
                for worker in workers.iter_mut() {
                    if let Err(error) = worker.revive() {
                        tracing::warn!(%error);
                    }
                }
                drop(workers);
                std::thread::sleep(LOOK);
            }
        };
        let thread = std::thread::Builder::new().name("workers".to_owned()).spawn(watch);
        let thread = thread.map_err(ClusterError::io("cannot start a thread"))?;
        Ok(Restarts { stop, thread: Some(thread) })
    }

    /// Fails if a worker has ended and is not started again.
    pub fn check(&self) -> Result<(), ClusterError> {
        for worker in self.workers().iter_mut() {
            let is_final = !self.restarting || worker.restarts >= RESTARTS_MAX;
            if let Some(status) = worker.ended()?
                && is_final
            {
                return Err(ClusterError::Failed {
                    name: worker.name.clone(),
                    reason: format!("its process ended: {status}"),
                });
            }
        }
        Ok(())
    }

    fn workers(&self) -> MutexGuard<'_, Vec<Worker>> {
        self.workers.lock().expect("no panic with the workers")
    }
}

impl Drop for Processes {
    /// Workers leave when the dispatcher does, or when they read the end of this process; those that have not are ended.
    fn drop(&mut self) {
        let started = Instant::now();
        for Worker { name, child, .. } in self.workers().iter_mut() {
            while started.elapsed() < FAREWELL && matches!(child.try_wait(), Ok(None)) {
                if started.elapsed() > GOODBYE_HEARD {
                    drop(child.stdin.take());
                }
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
fn relay(name: &str, child: &mut Child) -> std::io::Result<()> {
    let Some(stderr) = child.stderr.take() else { return Ok(()) };
    let name = name.to_owned();
    let read = move || {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            // Nobody may be listening there.
            _ = writeln!(std::io::stderr(), "[{name}] {line}");
        }
    };
    std::thread::Builder::new().spawn(read).map(drop)
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
