//! Cores that processes share, as a system's scheduler shares them. Network work goes first. A process that wakes
//! goes before one that has had more of the core, and computes until it sleeps or has had a time slice more than one
//! that waits.

use std::collections::VecDeque;

/// How much more of a core a process may have had than one that waits for it.
const SLICE_SECONDS: f64 = 3e-3;

/// Something that occupies a core for some seconds of its time.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Task<T> {
    seconds_left: f64,
    then: T,
}

/// A process that does not sleep.
#[derive(Clone, Copy, Debug)]
struct Runner<T> {
    process: usize,
    /// What it computes; nothing if it has not looked for work yet.
    task: Option<Task<T>>,
}

/// What happens on a core when its time has come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Turn<T> {
    /// A task is over.
    Ended(T),
    /// A process has the core and looks for work: `compute` or `sleep` follows.
    Looks(usize),
    /// Another process has the core now.
    Switched,
}

/// One core, or the cores that one process has to itself. `T` is what follows a task.
#[derive(Clone, Debug)]
pub(super) struct Core<T> {
    /// Short work of network threads and the dispatcher. It wakes from sleep, so it goes first, one at a
    /// time.
    urgent: VecDeque<Task<T>>,
    /// The first one has the core, the others wait for it.
    runners: Vec<Runner<T>>,
    /// Seconds of the core that each process has had, or is taken to have had.
    used_seconds: Vec<f64>,
    /// The core time that a waking process is assumed to have had: the highest value so far of the minimum among
    /// awake processes.
    floor_seconds: f64,
    /// Up to when the tasks' time is accounted for.
    now_seconds: f64,
    /// Counts changes: a turn that was foreseen before the last change is void.
    pub version: u64,
}

impl<T: Copy> Core<T> {
    pub fn new(processes: usize) -> Self {
        Self {
            urgent: VecDeque::new(),
            runners: Vec::new(),
            used_seconds: vec![0.0; processes],
            floor_seconds: 0.0,
            now_seconds: 0.0,
            version: 0,
        }
    }

    /// Whether nothing wants the core.
    pub fn is_idle(&self) -> bool {
        self.load() == 0
    }

    /// Tasks and processes on the core.
    pub fn load(&self) -> usize {
        self.urgent.len() + self.runners.len()
    }

    pub fn add_urgent(&mut self, now_seconds: f64, seconds: f64, then: T) {
        self.advance(now_seconds);
        self.urgent.push_back(Task { seconds_left: seconds, then });
    }

    /// Wakes a process; `false` if it is awake. Sleep neither earns nor costs core time.
    pub fn wake(&mut self, now_seconds: f64, process: usize) -> bool {
        if self.runners.iter().any(|runner| runner.process == process) {
            return false;
        }
        self.advance(now_seconds);
        self.used_seconds[process] = self.floor_seconds;
        let first = self.runners.first().map(|runner| self.used_seconds[runner.process]);
        let goes_first = first.is_none_or(|first| self.used_seconds[process] <= first);
        let place = if goes_first { 0 } else { self.runners.len() };
        self.runners.insert(place, Runner { process, task: None });
        true
    }

    /// Gives work to the process that looks for it.
    pub fn compute(&mut self, seconds: f64, then: T) {
        self.version += 1;
        self.runners[0].task = Some(Task { seconds_left: seconds, then });
    }

    /// Lets the process that looks for work sleep.
    pub fn sleep(&mut self) {
        self.version += 1;
        self.runners.remove(0);
        self.give_to_least();
    }

    /// When something happens next if nothing is added before.
    pub fn next_turn(&self) -> Option<f64> {
        if let Some(task) = self.urgent.front() {
            return Some(self.now_seconds + task.seconds_left);
        }
        let runner = self.runners.first()?;
        let end = runner.task.map_or(0.0, |task| task.seconds_left);
        Some(self.now_seconds + self.slice_left().map_or(end, |slice| slice.min(end)))
    }

    /// What happens now that was foreseen.
    pub fn turn(&mut self, now_seconds: f64) -> Turn<T> {
        self.advance(now_seconds);
        if let Some(task) = self.urgent.pop_front() {
            return Turn::Ended(task.then);
        }
        let runner = &mut self.runners[0];
        let Some(task) = runner.task else { return Turn::Looks(runner.process) };
        if self.slice_left().is_some_and(|slice| slice < task.seconds_left) {
            self.give_to_least();
            return Turn::Switched;
        }
        self.runners[0].task = None;
        Turn::Ended(task.then)
    }

    /// Seconds after which another process gets the core, if one waits.
    fn slice_left(&self) -> Option<f64> {
        let (first, others) = self.runners.split_first()?;
        let least =
            others.iter().map(|runner| self.used_seconds[runner.process]).reduce(f64::min)?;
        Some((least + SLICE_SECONDS - self.used_seconds[first.process]).max(0.0))
    }

    fn give_to_least(&mut self) {
        let used = |index: &usize| self.used_seconds[self.runners[*index].process];
        let least = (0..self.runners.len()).min_by(|one, other| used(one).total_cmp(&used(other)));
        if let Some(least) = least {
            self.runners.swap(0, least);
        }
    }

    fn advance(&mut self, now_seconds: f64) {
        let elapsed = now_seconds - self.now_seconds;
        (self.now_seconds, self.version) = (now_seconds, self.version + 1);
        if let Some(task) = self.urgent.front_mut() {
            task.seconds_left = (task.seconds_left - elapsed).max(0.0);
        } else if let Some(Runner { process, task: Some(task) }) = self.runners.first_mut() {
            task.seconds_left = (task.seconds_left - elapsed).max(0.0);
            self.used_seconds[*process] += elapsed;
            let least = self.runners.iter().map(|runner| self.used_seconds[runner.process]);
            self.floor_seconds = least
                .reduce(f64::min)
                .map_or(self.floor_seconds, |least| self.floor_seconds.max(least));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The next foreseen turn.
    fn next(core: &mut Core<char>) -> (f64, Turn<char>) {
        let at = core.next_turn().expect("something is foreseen");
        let turn = core.turn(at);
        ((at * 1e6).round() / 1e3, turn)
    }

    #[test]
    fn who_wakes_goes_first_and_the_network_before_everybody() {
        let mut core = Core::new(2);
        core.wake(0.0, 0);
        assert_eq!(next(&mut core), (0.0, Turn::Looks(0)));
        core.compute(2e-3, 'a');
        core.wake(1e-3, 1);
        assert_eq!(next(&mut core), (1.0, Turn::Looks(1)));
        core.compute(0.5e-3, 'b');
        core.add_urgent(1.2e-3, 0.1e-3, 'n');
        assert_eq!(next(&mut core), (1.3, Turn::Ended('n')));
        assert_eq!(next(&mut core), (1.6, Turn::Ended('b')));
        assert_eq!(next(&mut core), (1.6, Turn::Looks(1)));
        core.sleep();
        // A millisecond of `a` was done before.
        assert_eq!(next(&mut core), (2.6, Turn::Ended('a')));
        assert_eq!(next(&mut core), (2.6, Turn::Looks(0)));
        core.sleep();
        assert!(core.is_idle());
        assert_eq!(core.next_turn(), None);
    }

    #[test]
    fn what_was_had_before_a_sleep_does_not_count() {
        let mut core = Core::new(2);
        core.wake(0.0, 0);
        assert_eq!(next(&mut core), (0.0, Turn::Looks(0)));
        core.compute(10.0, 'a');
        assert_eq!(next(&mut core), (10_000.0, Turn::Ended('a')));
        assert_eq!(next(&mut core), (10_000.0, Turn::Looks(0)));
        core.sleep();
        // The other process has had nothing so far, but does not get a lead of ten seconds for
        // that.
        core.wake(11.0, 1);
        assert_eq!(next(&mut core), (11_000.0, Turn::Looks(1)));
        core.compute(1.0, 'b');
        core.wake(11.001, 0);
        assert_eq!(next(&mut core), (11_001.0, Turn::Looks(0)));
        core.compute(1.0, 'c');
        assert_eq!(next(&mut core), (11_004.0, Turn::Switched));
    }

    #[test]
    fn nobody_has_a_slice_more_than_who_waits() {
        let mut core = Core::new(2);
        core.wake(0.0, 0);
        core.wake(0.0, 1);
        assert_eq!(next(&mut core), (0.0, Turn::Looks(1)));
        core.compute(5e-3, 'b');
        assert_eq!(next(&mut core), (3.0, Turn::Switched));
        assert_eq!(next(&mut core), (3.0, Turn::Looks(0)));
        core.compute(10e-3, 'a');
        // Three to catch up, and one more slice.
        assert_eq!(next(&mut core), (9.0, Turn::Switched));
        assert_eq!(next(&mut core), (11.0, Turn::Ended('b')));
        assert_eq!(next(&mut core), (11.0, Turn::Looks(1)));
        core.sleep();
        assert_eq!(next(&mut core), (15.0, Turn::Ended('a')));
    }
}
