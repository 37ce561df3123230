//! Cores that processes share: kernels split a core evenly, and what the network does comes before them.

use std::collections::VecDeque;

/// Something that occupies a core for some seconds of its time.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Task<T> {
    seconds_left: f64,
    then: T,
}

/// One core, or the cores that one process has to itself. `T` is what follows a task.
#[derive(Clone, Debug)]
pub(super) struct Core<T> {
    /// Short work of network threads and the dispatcher: woken from sleep, it goes first, one at a time.
    urgent: VecDeque<Task<T>>,
    /// Kernels: the system gives each process an equal part.
    kernels: Vec<Task<T>>,
    /// Up to when the tasks' time is accounted for.
    now: f64,
    /// Counts changes: a foreseen end that was foreseen before the last change is void.
    pub version: u64,
}

impl<T: Copy> Core<T> {
    pub fn new() -> Self {
        Self { urgent: VecDeque::new(), kernels: Vec::new(), now: 0.0, version: 0 }
    }

    /// Tasks on the core.
    pub fn load(&self) -> usize {
        self.urgent.len() + self.kernels.len()
    }

    pub fn add_urgent(&mut self, now: f64, seconds: f64, then: T) {
        self.advance(now);
        self.urgent.push_back(Task { seconds_left: seconds, then });
    }

    pub fn add_kernel(&mut self, now: f64, seconds: f64, then: T) {
        self.advance(now);
        self.kernels.push(Task { seconds_left: seconds, then });
    }

    /// When the next task ends if nothing is added before.
    pub fn next_end(&self) -> Option<f64> {
        if let Some(task) = self.urgent.front() {
            return Some(self.now + task.seconds_left);
        }
        let least = self.kernels.iter().map(|task| task.seconds_left).reduce(f64::min)?;
        Some(self.now + least * self.kernels.len() as f64)
    }

    /// Takes off the task that ends now.
    pub fn end(&mut self, now: f64) -> T {
        self.advance(now);
        if let Some(task) = self.urgent.pop_front() {
            return task.then;
        }
        let shortest = (0..self.kernels.len()).min_by(|&one, &other| {
            self.kernels[one].seconds_left.total_cmp(&self.kernels[other].seconds_left)
        });
        self.kernels.remove(shortest.expect("an end is foreseen only where there is a task")).then
    }

    fn advance(&mut self, now: f64) {
        let elapsed = now - self.now;
        (self.now, self.version) = (now, self.version + 1);
        if let Some(task) = self.urgent.front_mut() {
            task.seconds_left = (task.seconds_left - elapsed).max(0.0);
            return;
        }
        let share = elapsed / self.kernels.len().max(1) as f64;
        for task in &mut self.kernels {
            task.seconds_left = (task.seconds_left - share).max(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_share_and_the_network_goes_first() {
        let mut core = Core::new();
        core.add_kernel(0.0, 2.0, 'a');
        assert_eq!(core.next_end(), Some(2.0));
        core.add_kernel(1.0, 2.0, 'b');
        // One second of `a` is left, at half the pace.
        assert_eq!(core.next_end(), Some(3.0));
        core.add_urgent(2.0, 0.5, 'n');
        assert_eq!(core.next_end(), Some(2.5));
        assert_eq!(core.end(2.5), 'n');
        assert_eq!(core.next_end(), Some(3.5));
        assert_eq!(core.end(3.5), 'a');
        // `b` had half a second before the message and half after it; one is left.
        assert_eq!(core.next_end(), Some(4.5));
        assert_eq!(core.end(4.5), 'b');
        assert_eq!((core.next_end(), core.load()), (None, 0));
    }
}
