//! A worker that has a role: its connections, its threads, and the events it receives.

use crate::complaints::Complaints;
use crate::control::{Control, Link, Role};
use crate::error::ClusterError;
use crate::neighbours::Neighbours;
use crate::net::{
    ConnectError, Controller, Event, HandshakeError, LINES_MAX, LinkShape, LostReason, Peer,
    SendError,
};
use crate::news::WorkerNews;
use crate::report::{NodeReport, peak_memory_bytes};
use glinthawk_compute::Threads;
use glinthawk_flight::{Buffer, HEADER_BYTES, Kind, Message};
use glinthawk_protocol::NodeAddress;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a worker tries to reach its dispatcher or its neighbour.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Pause after the first try. Each later one is twice as long, up to a limit.
const RETRY: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// The longest that an introduction is.
const INTRODUCTION_BYTES_MAX: usize = 64;

/// The longest that an idle node sleeps.
pub(crate) const IDLE: Duration = Duration::from_secs(1);

/// What every role needs.
pub(crate) struct Station {
    pub controller: Arc<Controller>,
    pub dispatcher: Peer,
    pub role: Role,
    pub neighbours: Neighbours,
    /// Set when somebody wants it to leave.
    pub leaving: Arc<AtomicBool>,
    /// Whether the dispatcher knows of that.
    pub said_leaving: AtomicBool,
    /// The threads of its kernels.
    pub threads: Arc<Threads>,
    /// Hears what this worker does.
    pub news: fn(WorkerNews<'_>),
    /// Introductions, and what the dispatcher said, that arrived while waiting for something else.
    pub stash: Mutex<VecDeque<Event>>,
    /// Keeps strangers out of the log.
    pub complaints: Mutex<Complaints>,
}

/// What a role does with an event.
pub(crate) enum Heard {
    /// A message of the data plane.
    Message(Peer, Message, Instant),
    /// The dispatcher wants the report.
    ReportWanted,
    /// A lane's contexts are gone, up to this generation of it.
    LaneLost(u32, u64),
    /// The dispatcher misses a step of this lane.
    Asked(u32),
    /// The job is over.
    Over,
    /// Nothing that concerns the role.
    Nothing,
}

impl Station {
    /// The next event for the whole process, waiting for at most `wait`.
    pub(crate) fn next(&self, wait: Duration) -> Option<Event> {
        let stashed = self.stash.lock().expect("no panic with the stash").pop_front();
        stashed.or_else(|| self.controller.recv(wait))
    }

    /// What the next event in a letter box means, waiting for at most `wait`. The first one is the whole process's.
    pub(crate) fn hear(
        self: &Arc<Self>,
        letter_box: usize,
        wait: Duration,
    ) -> Result<Option<Heard>, ClusterError> {
        let event = match letter_box {
            0 => match self.next(wait) {
                Some(event) => self.settle(event)?,
                None => None,
            },
            _ => self.controller.recv_in(letter_box, wait),
        };
        event.map(|event| self.understand(event)).transpose()
    }

    /// Does what an event means for the process's neighbours. What is left of it is for the role.
    pub(crate) fn settle(self: &Arc<Self>, event: Event) -> Result<Option<Event>, ClusterError> {
        match &event {
            Event::Message { peer, message, .. } if message.kind() == Kind::Control => {
                match *peer == self.dispatcher {
                    true => self.obey(&Control::read(message)?)?,
                    false => return self.meet(*peer, message).map(|()| None),
                }
            }
            Event::Lost { peer, reason } if *peer != self.dispatcher => {
                self.lose(*peer, reason)?;
                return Ok(None);
            }
            _ => {}
        }
        Ok(Some(event))
    }

    fn obey(self: &Arc<Self>, control: &Control) -> Result<(), ClusterError> {
        let lane = self.role.lane;
        let replaced = match control {
            Control::Await(caller, pass) if lane.is_none() => {
                let replaced = self.neighbours.expect(&self.role, (*caller, *pass));
                self.tell_dispatcher(&Control::Awaiting(*pass))?;
                replaced
            }
            Control::Dial(address, pass) => self.begin_dial(address.clone(), *pass),
            _ => None,
        };
        if let Some(peer) = replaced {
            // What its last host still says is of no use.
            self.controller.dismiss(peer);
        }
        Ok(())
    }

    /// The node that this process dials.
    fn dialled(&self) -> NodeAddress {
        NodeAddress::Tier1(self.role.slice + usize::from(self.role.lane.is_none()))
    }

    /// Dials a neighbour, on a thread of its own; returns the one that it replaces.
    pub(crate) fn begin_dial(self: &Arc<Self>, address: String, pass: u64) -> Option<Peer> {
        let replaced = self.neighbours.begin_dial(self.dialled(), pass);
        let station = Arc::clone(self);
        let dial = move || station.redial(&address, pass);
        if let Err(error) = std::thread::Builder::new().spawn(dial) {
            let reason = format!("cannot start a thread: {error}");
            // If the dispatcher is gone, that is among the events.
            _ = self.tell_dispatcher(&Control::LinkLost(pass, reason));
        }
        replaced
    }

    fn redial(&self, address: &str, pass: u64) {
        let dialled = dial(&self.controller, address, PATIENCE)
            .and_then(|peer| self.add_lines(peer).map(|()| peer));
        let done = match dialled {
            Ok(peer) if self.neighbours.end_dial(self.dialled(), peer, pass) => {
                // One that was lost before it was known here was not heard of by anybody.
                self.greet(peer, pass).or_else(|error| {
                    self.neighbours.remove(peer);
                    self.tell_dispatcher(&Control::LinkLost(pass, error.to_string()))
                })
            }
            Ok(peer) => {
                self.controller.dismiss(peer);
                Ok(())
            }
            Err(error) => self.tell_dispatcher(&Control::LinkLost(pass, error.to_string())),
        };
        if let Err(error) = done {
            // The dispatcher is gone, which is among the events.
            tracing::info!(%error, "a neighbour was not met");
        }
    }

    /// Makes a line for every strand, if there are several. An artificial link is one connection.
    fn add_lines(&self, peer: Peer) -> Result<(), ClusterError> {
        if self.role.link != Link::default() {
            return Ok(());
        }
        // A strand without a line uses the first connection.
        (1..=lines_of(self.role.layout.strands)).try_for_each(|line| {
            let added = insist(PATIENCE, || self.controller.add_line(peer, line));
            added.inspect_err(|_| self.controller.dismiss(peer))
        })
    }

    /// Says who is calling, to a neighbour that was dialled.
    fn greet(&self, peer: Peer, pass: u64) -> Result<(), ClusterError> {
        let introduction = Control::Introduce(self.role.lane, pass);
        self.controller.send(peer, introduction.message(Buffer::default()))?;
        if self.role.lane.is_some() {
            self.shape(peer);
        }
        Ok(())
    }

    /// Takes control of another peer than the dispatcher: the introduction of a neighbour, or nothing that it may say.
    fn meet(&self, peer: Peer, message: &Message) -> Result<(), ClusterError> {
        if let Some((node, _)) = self.neighbours.known(peer) {
            let lie = format!("{} was sent control by {node:?}", self.role.name());
            return self.send_away(peer, ClusterError::Control(lie));
        }
        let introduced = match Control::read(message) {
            Ok(Control::Introduce(caller, pass)) => {
                self.neighbours.introduce(&self.role, peer, (caller, pass))
            }
            _ => None,
        };
        match introduced {
            Some(NodeAddress::Tier2(..)) => self.shape(peer),
            Some(_) => {}
            None => {
                self.dismiss(peer, &"no introduction of a neighbour");
                return Ok(());
            }
        }
        let pass = self.neighbours.known(peer).map(|(_, pass)| pass);
        pass.map_or(Ok(()), |pass| self.tell_dispatcher(&Control::Met(pass)))
    }

    /// A lie costs a neighbour its place. The dispatcher's word counts, and a Tier-2 node that tells lies of its Tier-1
    /// node loses its own place: so it cannot cost more than that.
    pub(crate) fn send_away(&self, peer: Peer, lie: ClusterError) -> Result<(), ClusterError> {
        match self.neighbours.known(peer) {
            None => {}
            Some((NodeAddress::Dispatcher, _)) => return Err(lie),
            Some(_) if self.role.lane.is_some() => return Err(lie),
            Some((_, pass)) => {
                self.neighbours.remove(peer);
                let reason = format!("it was sent away for {lie}");
                self.tell_dispatcher(&Control::LinkLost(pass, reason))?;
            }
        }
        self.dismiss(peer, &lie);
        Ok(())
    }

    /// A neighbour is gone. A Tier-1 node says so: if only the connection broke, nobody else knows. A Tier-2 node waits
    /// for its next one.
    fn lose(&self, peer: Peer, reason: &LostReason) -> Result<(), ClusterError> {
        let Some((_, pass)) = self.neighbours.remove(peer) else { return Ok(()) };
        // Neighbours leave when the dispatcher does; its goodbye is on the way.
        if *reason == LostReason::Goodbye || self.role.lane.is_some() {
            return Ok(());
        }
        let reason = format!("its neighbour {} heard: {reason}", self.role.name());
        self.tell_dispatcher(&Control::LinkLost(pass, reason))
    }

    /// Tells the dispatcher, once, that this worker is wanted to leave.
    pub(crate) fn heed_leaving(&self) -> Result<(), ClusterError> {
        let is_wanted = self.leaving.load(Ordering::Relaxed);
        if is_wanted && !self.said_leaving.swap(true, Ordering::Relaxed) {
            (self.news)(WorkerNews::Leaving);
            self.tell_dispatcher(&Control::Leaving)?;
        }
        Ok(())
    }

    fn understand(&self, event: Event) -> Result<Heard, ClusterError> {
        match event {
            Event::Joined { .. } => Ok(Heard::Nothing),
            Event::Message { peer, message, .. }
                if message.kind() == Kind::Control && peer == self.dispatcher =>
            {
                match Control::read(&message)? {
                    Control::Report => Ok(Heard::ReportWanted),
                    Control::LaneLost(lane, generation) => Ok(Heard::LaneLost(lane, generation)),
                    Control::Ask(lane) => Ok(Heard::Asked(lane)),
                    Control::Leave => Ok(Heard::Over),
                    Control::Await(..) | Control::Dial(..) => Ok(Heard::Nothing),
                    other => Err(ClusterError::Control(format!("a worker was sent {other:?}"))),
                }
            }
            Event::Message { peer, message, received_at } => {
                Ok(Heard::Message(peer, message, received_at))
            }
            Event::Lost { peer, reason }
                if peer == self.dispatcher
                    && (reason == LostReason::Goodbye
                        || self.said_leaving.load(Ordering::Relaxed)) =>
            {
                Ok(Heard::Over)
            }
            Event::Lost { peer, reason } if peer == self.dispatcher => {
                Err(ClusterError::DispatcherLost(reason.to_string()))
            }
            Event::Lost { .. } => Ok(Heard::Nothing),
        }
    }

    /// Sends a peer away that has no business here, or did not keep to it.
    pub(crate) fn dismiss(&self, peer: Peer, reason: &dyn std::fmt::Display) {
        self.controller.dismiss(peer);
        let mut complaints = self.complaints.lock().expect("no panic with the complaints");
        if complaints.may_write(Instant::now()) {
            tracing::warn!(%peer, %reason, "sent a peer away");
        }
    }

    /// Keeps what came while something else was waited for.
    pub(crate) fn keep(&self, event: Event) {
        let mut stash = self.stash.lock().expect("no panic with the stash");
        if matches!(event, Event::Message { peer, .. } if peer == self.dispatcher) {
            return stash.push_back(event);
        }
        keep_introduction(&self.controller, &mut stash, event);
    }

    /// Tells the dispatcher. If it is gone, that is among the events, and how.
    pub(crate) fn tell_dispatcher(&self, control: &Control) -> Result<(), ClusterError> {
        sent(self.controller.send(self.dispatcher, control.message(Buffer::default())))
    }

    /// Says that it can begin, here and to the dispatcher.
    pub(crate) fn ready(&self) -> Result<Instant, ClusterError> {
        self.tell_dispatcher(&Control::Ready)?;
        (self.news)(WorkerNews::Ready);
        Ok(Instant::now())
    }

    /// Says what was done since it was ready.
    pub(crate) fn done(&self, mut report: NodeReport, ready: Instant) {
        report.set_traffic(&self.controller.stats());
        (self.news)(WorkerNews::Done(&report, ready.elapsed()));
    }

    /// Makes the link to a node of the other tier as slow as requested.
    pub(crate) fn shape(&self, peer: Peer) {
        let Link { delay, bytes_per_second } = self.role.link;
        if delay > Duration::ZERO || bytes_per_second.is_some() {
            self.controller.shape(peer, LinkShape { delay, bytes_per_second });
        }
    }

    /// Sends a strand's reports. The first of a process's strands has its traffic, with its first report.
    pub(crate) fn send_reports(
        &self,
        mut reports: Vec<NodeReport>,
        is_first: bool,
    ) -> Result<(), ClusterError> {
        if is_first {
            reports[0].set_traffic(&self.controller.stats());
            reports[0].peak_memory_bytes = peak_memory_bytes();
        }
        self.tell_dispatcher(&Control::Reported(reports))
    }
}

/// What became of a message. That its receiver is gone is learned from the events.
pub(crate) fn sent(outcome: Result<(), SendError>) -> Result<(), ClusterError> {
    match outcome {
        Err(SendError::Gone(_) | SendError::Stopped) => Ok(()),
        other => Ok(other?),
    }
}

/// Dials until something answers or the time is up.
pub(crate) fn dial(
    controller: &Controller,
    address: &str,
    patience: Duration,
) -> Result<Peer, ClusterError> {
    insist(patience, || controller.connect(address)).map(|(peer, _)| peer)
}

/// The lines of a process of so many strands with each neighbour.
pub(crate) fn lines_of(strands: usize) -> u16 {
    match strands {
        1 => 0,
        _ => u16::try_from(strands).map_or(LINES_MAX, |strands| strands.min(LINES_MAX)),
    }
}

/// Tries until it works, cannot work, or the time is up.
fn insist<T>(
    patience: Duration,
    connect: impl Fn() -> Result<T, ConnectError>,
) -> Result<T, ClusterError> {
    let started = Instant::now();
    let mut retry = RETRY;
    loop {
        match connect() {
            Ok(done) => return Ok(done),
            Err(error) if may_work_later(&error) && started.elapsed() < patience => {
                std::thread::sleep(retry);
                retry = (2 * retry).min(RETRY_MAX);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether something else than an answer was in the way: nothing listens yet, or too many want to be heard at once.
fn may_work_later(error: &ConnectError) -> bool {
    use HandshakeError::{Closed, Io, Timeout};
    match error {
        ConnectError::Unreachable { .. } => true,
        ConnectError::Handshake { source, .. } => {
            matches!(source, Timeout { .. } | Closed { .. } | Io(_))
        }
        ConnectError::Resolve { .. } | ConnectError::Gone(_) => false,
    }
}

/// Keeps a neighbour's introduction until a worker is ready for it: one short message of each peer. A neighbour has
/// no more to say by then, so a peer that does is sent away.
pub(crate) fn keep_introduction(
    controller: &Controller,
    stash: &mut VecDeque<Event>,
    event: Event,
) {
    let is_of =
        |of: Peer| move |event: &Event| matches!(event, Event::Message { peer, .. } if *peer == of);
    match &event {
        Event::Joined { .. } => {}
        Event::Lost { peer, .. } => {
            let of_peer = is_of(*peer);
            stash.retain(|event| !of_peer(event));
        }
        Event::Message { peer, message, .. } => {
            let is_introduction = message.kind() == Kind::Control
                && message.header().wire_bytes() <= HEADER_BYTES + INTRODUCTION_BYTES_MAX;
            if is_introduction && !stash.iter().any(is_of(*peer)) {
                stash.push_back(event);
            } else {
                controller.dismiss(*peer);
                let of_peer = is_of(*peer);
                stash.retain(|event| !of_peer(event));
            }
        }
    }
}
