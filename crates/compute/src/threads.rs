//! The kernels' thread pool: pinned threads, fork-join in microseconds, no allocation and no lock in
//! the steady state. Threads spin for a moment after a job and then sleep, so that an idle pool
//! leaves its cores to others.

use crate::ComputeError;
use std::cell::{Cell, UnsafeCell};
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle, Thread};

/// Spins before a waiting thread sleeps: some tens of microseconds, longer than the gaps between
/// the kernels of a step, shorter than anything a user would notice on another thread.
const SPINS_BEFORE_SLEEP: u32 = 4000;

type Job = *const (dyn Fn(usize, usize) + Sync);

/// Keeps the atomics of different threads on different cache lines.
#[repr(align(128))]
struct Padded<T>(T);

struct Shared {
    /// Counts jobs; a change is the signal to start. The job of number `n` is in `job` meanwhile.
    started: Padded<AtomicUsize>,
    /// How often a waiting thread looks before it sleeps.
    spins: u32,
    /// Workers that have not finished the current job.
    running: Padded<AtomicUsize>,
    /// Whether worker `i + 1` sleeps, or is about to.
    asleep: Vec<Padded<AtomicBool>>,
    job: UnsafeCell<Option<Job>>,
    caller: UnsafeCell<Option<Thread>>,
    panicked: AtomicBool,
    stopping: AtomicBool,
    /// Held while a job runs; callers on other threads wait for it.
    taken: AtomicBool,
}

// SAFETY: `job` and `caller` are written only by the holder of `taken` while no worker runs
// (`running` is zero), and read by workers only between the change of `started` (release/acquire)
// and their decrement of `running`.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// A pool of threads that run one closure together, the caller among them.
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    cores: Vec<usize>,
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

impl Threads {
    /// A pool of `count` participants: the caller and `count - 1` threads of its own. If the process
    /// has exactly `count` cores, each is pinned to one. With cores to spare, the system places them
    /// better, because it knows what else is running.
    pub fn new(count: usize) -> Result<Self, ComputeError> {
        assert!(count > 0, "a pool has at least its caller");
        let cores = allowed_cores();
        // If threads share cores, a spinning thread keeps the threads it waits for from working.
        let spins = if count > cores.len() { 0 } else { SPINS_BEFORE_SLEEP };
        let cores = Some(cores).filter(|cores| cores.len() == count).unwrap_or_default();
        let shared = Arc::new(Shared {
            started: Padded(AtomicUsize::new(0)),
            spins,
            running: Padded(AtomicUsize::new(0)),
            asleep: (1..count).map(|_| Padded(AtomicBool::new(false))).collect(),
            job: UnsafeCell::new(None),
            caller: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            taken: AtomicBool::new(false),
        });
        let mut threads = Self { shared, workers: Vec::with_capacity(count - 1), cores };
        for index in 1..count {
            let shared = Arc::clone(&threads.shared);
            let core = threads.cores.get(index).copied();
            let worker = thread::Builder::new().name(format!("kernel-{index}")).spawn(move || {
                pin(core);
                work(&shared, index, count);
            });
            threads.workers.push(worker.map_err(ComputeError::Thread)?);
        }
        Ok(threads)
    }

    /// Participants, the caller included.
    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Pins the calling thread to the pool's first core. Meant for the thread that will call `run`.
    pub fn pin_caller(&self) {
        pin(self.cores.first().copied());
    }

    /// Runs `task(thread_index, thread_count)` once on every participant and returns when all are done.
    pub fn run<F: Fn(usize, usize) + Sync>(&self, task: F) {
        let count = self.count();
        if count == 1 {
            return task(0, 1);
        }
        assert!(!INSIDE.get(), "a task of the pool may not start another");
        while self
            .shared
            .taken
            .compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            thread::yield_now();
        }
        let erased: &(dyn Fn(usize, usize) + Sync) = &task;
        // SAFETY: only the lifetime changes; `task` outlives the job because `run` waits below for
        // every worker, even if the caller's own part panics.
        let job: Job =
            unsafe { std::mem::transmute::<&(dyn Fn(usize, usize) + Sync), Job>(erased) };
        // SAFETY: `taken` is held and `running` is zero: no worker reads these now.
        unsafe {
            *self.shared.job.get() = Some(job);
            if (*self.shared.caller.get())
                .as_ref()
                .is_none_or(|caller| caller.id() != thread::current().id())
            {
                *self.shared.caller.get() = Some(thread::current());
            }
        }
        self.shared.running.0.store(count - 1, Ordering::Relaxed);
        // Sequentially consistent with the sleepers' flag: either the worker sees the new job
        // before it sleeps, or we see that it is asleep.
        self.shared.started.0.fetch_add(1, Ordering::SeqCst);
        for (worker, asleep) in self.workers.iter().zip(&self.shared.asleep) {
            if asleep.0.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        INSIDE.set(true);
        let own = catch_unwind(AssertUnwindSafe(|| task(0, count)));
        INSIDE.set(false);
        self.join();
        let panicked = self.shared.panicked.swap(false, Ordering::Relaxed);
        self.shared.taken.store(false, Ordering::Release);
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        assert!(!panicked, "a kernel thread panicked");
    }

    /// Runs `task(index)` for every index below `tasks`; the next free participant takes the next
    /// index.
    pub fn for_each<F: Fn(usize) + Sync>(&self, tasks: usize, task: F) {
        if tasks <= 1 || self.count() == 1 {
            return (0..tasks).for_each(task);
        }
        let next = AtomicUsize::new(0);
        self.run(|_, _| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= tasks {
                    return;
                }
                task(index);
            }
        });
    }

    fn join(&self) {
        let mut spins = 0;
        while self.shared.running.0.load(Ordering::Acquire) != 0 {
            spins += 1;
            if spins < self.shared.spins {
                spin_loop();
            } else {
                // The last worker unparks us; a token left over from an earlier job only costs a turn.
                thread::park();
            }
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        self.shared.started.0.fetch_add(1, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker's panic was already reported by the `run` that met it.
            _ = worker.join();
        }
    }
}

fn work(shared: &Shared, index: usize, count: usize) {
    INSIDE.set(true);
    let mut seen = 0;
    loop {
        seen = await_job(shared, index, seen);
        if shared.stopping.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: the job was published before `started` changed and stays until `running` is zero.
        let (job, caller) = unsafe {
            ((*shared.job.get()).expect("a started job"), (*shared.caller.get()).clone())
        };
        // SAFETY: `run` keeps the closure alive until this worker has decremented `running`.
        let task = unsafe { &*job };
        if catch_unwind(AssertUnwindSafe(|| task(index, count))).is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        if shared.running.0.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(caller) = caller
        {
            caller.unpark();
        }
    }
}

/// Waits until the count of started jobs differs from `seen`; returns it.
fn await_job(shared: &Shared, index: usize, seen: usize) -> usize {
    for _ in 0..shared.spins {
        let started = shared.started.0.load(Ordering::Acquire);
        if started != seen {
            return started;
        }
        spin_loop();
    }
    let asleep = &shared.asleep[index - 1].0;
    asleep.store(true, Ordering::SeqCst);
    loop {
        let started = shared.started.0.load(Ordering::SeqCst);
        if started != seen {
            asleep.store(false, Ordering::Relaxed);
            return started;
        }
        thread::park();
    }
}

/// The cores this process may use, at least one.
#[cfg(target_os = "linux")]
pub fn allowed_cores() -> Vec<usize> {
    use rustix::thread::{CpuSet, sched_getaffinity};
    let set = sched_getaffinity(None);
    let allowed = set.map(|set| (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect());
    allowed.ok().filter(|cores: &Vec<usize>| !cores.is_empty()).unwrap_or_else(|| vec![0])
}

#[cfg(target_os = "linux")]
fn pin(core: Option<usize>) {
    use rustix::thread::{CpuSet, sched_setaffinity};
    let Some(core) = core else { return };
    let mut set = CpuSet::new();
    set.set(core);
    // A refusal costs speed, never correctness.
    _ = sched_setaffinity(None, &set);
}

/// The cores this process may use, at least one.
#[cfg(not(target_os = "linux"))]
pub fn allowed_cores() -> Vec<usize> {
    vec![0]
}

#[cfg(not(target_os = "linux"))]
fn pin(_core: Option<usize>) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_participant_runs_every_job_once() {
        for count in [1, 2, 3] {
            let threads = Threads::new(count).unwrap();
            let runs: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..500 {
                threads.run(|index, of| {
                    assert_eq!(of, count);
                    runs[index].fetch_add(1, Ordering::Relaxed);
                });
            }
            assert!(runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 500));
        }
    }

    #[test]
    fn sleeping_threads_wake() {
        let threads = Threads::new(2).unwrap();
        let sum = AtomicUsize::new(0);
        for _ in 0..20 {
            thread::sleep(std::time::Duration::from_millis(1));
            threads.for_each(10, |index| {
                sum.fetch_add(index, Ordering::Relaxed);
            });
        }
        assert_eq!(sum.load(Ordering::Relaxed), 20 * 45);
    }

    #[test]
    fn callers_on_two_threads_take_turns() {
        let threads = Arc::new(Threads::new(2).unwrap());
        let sum = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        threads.run(|_, _| {
                            sum.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(sum.load(Ordering::Relaxed), 800);
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_pool_survives() {
        let threads = Threads::new(2).unwrap();
        for guilty in [0, 1] {
            let result = catch_unwind(AssertUnwindSafe(|| {
                threads.run(|index, _| assert_ne!(index, guilty))
            }));
            assert!(result.is_err());
        }
        threads.run(|_, _| {});
    }
}
