//! Threads with a core each, which they change in turns. Cores of one machine differ, most of all where others share
//! them, and a job ends with its slowest thread: so each thread has each core for a while. It stays near its memory: cores
//! take turns within a NUMA node.

use crate::error::ClusterError;
use rustix::thread::{CpuSet, Pid, gettid, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// How long a thread has a core: long beside the time in which it fills the core's caches.
const TURN: Duration = Duration::from_millis(100);

/// NUMA nodes that are looked for.
const NODES_MAX: usize = 64;

/// The cores, and the threads that take turns on them.
pub(crate) struct Turns {
    /// NUMA node by NUMA node.
    cores: Vec<Vec<usize>>,
    /// Each with the core where it began.
    threads: Mutex<Vec<(Pid, usize)>>,
}

/// A thread's part in the turns. It must be dropped by the thread itself.
pub(crate) struct TakesTurns {
    turns: Arc<Turns>,
    thread: Pid,
}

impl Turns {
    /// Turns on these cores. They end when nobody takes part any more.
    pub(crate) fn start(cores: Vec<usize>) -> Result<Arc<Self>, ClusterError> {
        let turns = Arc::new(Self { cores: by_node(cores), threads: Mutex::default() });
        let watched = Arc::downgrade(&turns);
        let turn = move || {
            loop {
                thread::sleep(until_next_turn());
                let Some(turns) = watched.upgrade() else { return };
                let threads = turns.threads();
                threads.iter().for_each(|(thread, first)| turns.place(*thread, *first));
            }
        };
        let thread = thread::Builder::new().name("turns".to_owned()).spawn(turn);
        thread.map_err(ClusterError::io("cannot start a thread"))?;
        Ok(turns)
    }

    /// The calling thread takes part from now on, in place of the one that began on this core.
    pub(crate) fn join(self: &Arc<Self>, first: usize) -> TakesTurns {
        let thread = gettid();
        self.threads().push((thread, first));
        self.place(thread, first);
        TakesTurns { turns: Arc::clone(self), thread }
    }

    fn threads(&self) -> MutexGuard<'_, Vec<(Pid, usize)>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a thread on the core whose turn it is.
    fn place(&self, thread: Pid, first: usize) {
        let turn = (now().as_millis() / TURN.as_millis()) as usize;
        let near = self.cores.iter().find(|cores| cores.contains(&first));
        let near = near.expect("a thread begins on one of the cores");
        let place = near.iter().position(|core| *core == first).unwrap_or(0);
        let mut set = CpuSet::new();
        set.set(near[(place + turn) % near.len()]);
        // A refusal costs speed, never correctness.
        _ = sched_setaffinity(Some(thread), &set);
    }
}

impl Drop for TakesTurns {
    fn drop(&mut self) {
        // Its number may soon be another thread's.
        self.turns.threads().retain(|(thread, _)| *thread != self.thread);
    }
}

/// These cores, those of each NUMA node together; all together if the system does not say.
fn by_node(cores: Vec<usize>) -> Vec<Vec<usize>> {
    let is_on = |core: usize, node: usize| {
        Path::new(&format!("/sys/devices/system/cpu/cpu{core}/node{node}")).exists()
    };
    let node_of = |core: &usize| (0..NODES_MAX).find(|node| is_on(*core, *node));
    let mut nodes: BTreeMap<Option<usize>, Vec<usize>> = BTreeMap::new();
    cores.into_iter().for_each(|core| nodes.entry(node_of(&core)).or_default().push(core));
    nodes.into_values().collect()
}

/// The same for all processes of a machine: nodes that begin on one core stay together.
fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

fn until_next_turn() -> Duration {
    let (now, turn) = (now().as_micros(), TURN.as_micros());
    Duration::from_micros((turn - now % turn) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use glinthawk_compute::allowed_cores;
    use std::collections::BTreeSet;
    use std::time::Instant;

    #[test]
    fn a_thread_has_every_core_for_a_while() {
        let all = allowed_cores();
        let turns = Turns::start(all.clone()).unwrap();
        assert_eq!(turns.cores.concat().len(), all.len());
        let near = turns.cores[0].clone();
        let expected: BTreeSet<usize> = near.iter().copied().collect();
        let seen = thread::spawn(move || {
            let part = turns.join(near[0]);
            let (began, mut seen) = (Instant::now(), BTreeSet::new());
            while seen.len() < near.len() {
                assert!(began.elapsed() < Duration::from_secs(60), "only {seen:?}");
                let cores = allowed_cores();
                assert_eq!(cores.len(), 1, "a thread has one core at a time");
                seen.extend(cores);
                thread::sleep(TURN / 4);
            }
            drop(part);
            assert!(turns.threads().is_empty());
            seen
        });
        assert_eq!(seen.join().unwrap(), expected);
    }
}
