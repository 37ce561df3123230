//! The sending thread: writes what senders leave in outlets, as links release it and sockets take it. The network thread
//! reads meanwhile, so that neither copy waits for the other.

use super::lines::LONGEST;
use super::outlet::Outlet;
use super::shared::{Command, Shared};
use crate::processes::keep_to_cores;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, PipeReader, Read};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) struct SendThread {
    shared: Arc<Shared>,
    wakeups: PipeReader,
    /// Of all connections, lines among them. What a line's thread cannot write at once is written here.
    outlets: Vec<Arc<Outlet>>,
}

/// Tells the network thread that this one ended too early, even after a panic.
struct EndGuard(Arc<Shared>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        if !self.0.is_stopped() {
            self.0.command(Command::Vanish);
        }
    }
}

impl SendThread {
    pub(super) fn new(shared: Arc<Shared>, wakeups: PipeReader) -> Self {
        Self { shared, wakeups, outlets: Vec::new() }
    }

    /// Runs until the network thread has ended.
    pub(super) fn run(mut self) {
        let _guard = EndGuard(Arc::clone(&self.shared));
        if let Err(error) = self.serve() {
            tracing::error!(%error, "the sending thread failed");
        }
    }

    fn serve(&mut self) -> io::Result<()> {
        let mut ready = Vec::new();
        while let Some(news) = self.shared.take_outgoing() {
            self.outlets.extend(news.outlets);
            if let Some(cores) = news.cores {
                // A refusal costs speed, never correctness.
                _ = keep_to_cores(&cores);
            }
            let now = Instant::now();
            ready.resize(self.outlets.len(), false);
            let (shared, mut ready_ones) = (&self.shared, ready.drain(..));
            self.outlets.retain(|outlet| {
                let is_due = outlet.due(now).is_some_and(|due| due <= now);
                let is_ready = ready_ones.next() == Some(true);
                if (is_due || is_ready)
                    && let Err(reason) = outlet.transmit(now)
                {
                    shared.command(Command::Ended(outlet.counters.peer, reason));
                    return false;
                }
                !outlet.is_over()
            });
            drop(ready_ones);
            let due = match self.shared.may_sleep() {
                true => self.outlets.iter().filter_map(|outlet| outlet.due(now)).min(),
                false => Some(now),
            };
            let timeout = due.map_or(LONGEST, |due| due.saturating_duration_since(now));
            self.wait(timeout.min(LONGEST), &mut ready)?;
        }
        Ok(())
    }

    /// Sleeps until a blocked socket takes more, or somebody has left something to write; says which sockets are ready.
    fn wait(&self, timeout: Duration, ready: &mut Vec<bool>) -> io::Result<()> {
        let mut descriptors = vec![PollFd::new(&self.wakeups, PollFlags::IN)];
        let blocked: Vec<bool> = self.outlets.iter().map(|outlet| outlet.is_blocked()).collect();
        let outlets = self.outlets.iter().zip(&blocked).filter(|(_, blocked)| **blocked);
        let sockets = outlets.map(|(outlet, _)| &outlet.channel.stream);
        descriptors.extend(sockets.map(|socket| PollFd::new(socket, PollFlags::OUT)));
        let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
        match poll(&mut descriptors, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut flags = descriptors.iter().map(|descriptor| !descriptor.revents().is_empty());
        if flags.next() == Some(true) {
            // The first thread that finds this one asleep writes one byte.
            (&self.wakeups).read_exact(&mut [0])?;
        }
        ready.extend(blocked.into_iter().map(|blocked| blocked && flags.next() == Some(true)));
        Ok(())
    }
}
