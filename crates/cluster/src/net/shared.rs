//! What the network thread and the sending thread share with the node's other threads: commands to the first and what it
//! hears, what the second has to write, and the accounting that bounds all of it.

use super::config::{Config, Identity, LinkShape, NodeId};
use super::connection::Connection;
use super::event::{Event, LostReason, Peer, SendError};
use super::handshake::HandshakeError;
use super::lines::{Heard, Lines};
use super::outlet::Outlet;
use super::stats::{PeerCounters, PeerStats};
use glinthawk_flight::{Message, Pool};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, PipeWriter, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// What the network thread is asked to do.
pub(super) enum Command {
    Listen(TcpListener),
    Adopt(Arc<Outlet>),
    /// See to it that a line is read at the other end.
    AdoptLine(Arc<Outlet>),
    /// A connection of the peer has ended.
    Ended(Peer, LostReason),
    /// The peer's events were taken: read from it again.
    Resume(Peer),
    /// The peer was struck: close its connection.
    Dismiss(Peer),
    /// Run on these cores only.
    KeepTo(Vec<usize>),
    Shutdown,
    /// A shutdown without a word to anyone.
    Vanish,
}

pub(super) struct Shared {
    gate: Mutex<Gate>,
    inbox: Mutex<Inbox>,
    waker: PipeWriter,
    outgoing: Mutex<Outgoing>,
    sender_waker: PipeWriter,
    counters: Mutex<Vec<Arc<PeerCounters>>>,
    pool: Arc<Pool>,
    own_node: NodeId,
    /// Lines that a peer may have.
    lines_max: AtomicU16,
    peers_max: usize,
    inbox_bytes_max: usize,
}

/// The way in to the network thread.
#[derive(Default)]
struct Gate {
    commands: Vec<Command>,
    doors: HashMap<Peer, Door>,
    peers_seen: u32,
    /// The network thread waits in `poll` and must be woken.
    sleeping: bool,
    stopped: bool,
}

/// The way in to the sending thread.
#[derive(Default)]
struct Outgoing {
    news: OutgoingNews,
    /// Something was left for it in an outlet, or an outlet is over.
    nudged: bool,
    /// It waits in `poll` and must be woken.
    sleeping: bool,
    stopped: bool,
}

/// What the sending thread does not know yet.
#[derive(Default)]
pub(super) struct OutgoingNews {
    pub(super) outlets: Vec<Arc<Outlet>>,
    /// The cores it shall run on.
    pub(super) cores: Option<Vec<usize>>,
}

/// Where a peer is, from the end of its handshake to the end of its connection.
struct Door {
    node: NodeId,
    /// None for the moment between the two.
    outlet: Option<Arc<Outlet>>,
    lines: BTreeMap<u16, Arc<Outlet>>,
}

/// Says which letter box a message goes to.
type Sorter = Box<dyn Fn(&Message) -> usize + Send>;

/// The way out.
struct Inbox {
    /// One for each thread that receives; events that are not messages go to the first.
    boxes: Vec<LetterBox>,
    sorter: Sorter,
    unread: HashMap<Peer, Unread>,
    stopped: bool,
}

#[derive(Default)]
struct LetterBox {
    events: VecDeque<Event>,
    /// Threads in `recv` that wait for an event.
    waiting: usize,
    mail: Arc<Condvar>,
    /// If lines lead here, the thread waits for them, and for the bell.
    lines: Option<(Arc<Mutex<Lines>>, Arc<PipeWriter>)>,
    /// Lines that the thread does not know yet.
    added: Vec<Connection>,
}

/// Wakes a thread that waits at a letter box.
enum Waker {
    Mail(Arc<Condvar>),
    Bell(Arc<PipeWriter>),
}

impl Waker {
    fn wake(self) {
        match self {
            Self::Mail(mail) => mail.notify_all(),
            // A pipe has room for more bytes than there are events before the thread reads them. If the write fails, the
            // thread is gone.
            Self::Bell(bell) => _ = (&*bell).write(&[1]),
        }
    }
}

#[derive(Default)]
struct Unread {
    bytes: usize,
    paused: bool,
}

impl Shared {
    pub(super) fn new(config: &Config, waker: PipeWriter, sender_waker: PipeWriter) -> Self {
        Self {
            gate: Mutex::default(),
            inbox: Mutex::new(Inbox {
                boxes: vec![LetterBox::default()],
                sorter: Box::new(|_| 0),
                unread: HashMap::new(),
                stopped: false,
            }),
            waker,
            outgoing: Mutex::default(),
            sender_waker,
            counters: Mutex::default(),
            pool: Arc::clone(&config.pool),
            own_node: config.identity.node,
            lines_max: AtomicU16::new(0),
            peers_max: config.bounds.peers_max,
            inbox_bytes_max: config.bounds.inbox_bytes_max,
        }
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().expect("no panic while the gate is locked")
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().expect("no panic while the inbox is locked")
    }

    pub(super) fn command(&self, command: Command) {
        let mut gate = self.gate();
        gate.commands.push(command);
        self.wake(gate);
    }

    fn wake(&self, mut gate: MutexGuard<'_, Gate>) {
        let asleep = std::mem::take(&mut gate.sleeping);
        drop(gate);
        if asleep {
            // A pipe has room for far more bytes than there are threads to write one, so this does
            // not block. It fails only if the network thread is gone, and then there is nothing to
            // wake.
            _ = (&self.waker).write(&[1]);
        }
    }

    fn outlet(&self, peer: Peer) -> Result<Arc<Outlet>, SendError> {
        let gate = self.gate();
        if gate.stopped {
            return Err(SendError::Stopped);
        }
        let outlet = gate.doors.get(&peer).and_then(|door| door.outlet.as_ref());
        outlet.map(Arc::clone).ok_or(SendError::Gone(peer))
    }

    /// The line to a peer, or the first connection if there is no such line.
    fn line(&self, peer: Peer, line: usize) -> Result<Arc<Outlet>, SendError> {
        let gate = self.gate();
        let door = gate.doors.get(&peer);
        let line = u16::try_from(line).ok().and_then(|line| door?.lines.get(&line));
        match line {
            Some(line) => Ok(Arc::clone(line)),
            None => {
                drop(gate);
                self.outlet(peer)
            }
        }
    }

    pub(super) fn send(&self, line: usize, peer: Peer, message: Message) -> Result<(), SendError> {
        if self.line(peer, line)?.send(message)? {
            self.nudge();
        }
        Ok(())
    }

    /// The sending thread looks at all outlets.
    pub(super) fn nudge(&self) {
        self.tell_sender(|outgoing| outgoing.nudged = true);
    }

    fn outgoing(&self) -> MutexGuard<'_, Outgoing> {
        self.outgoing.lock().expect("no panic while what goes out is locked")
    }

    fn tell_sender(&self, tell: impl FnOnce(&mut Outgoing)) {
        let mut outgoing = self.outgoing();
        tell(&mut outgoing);
        let asleep = std::mem::take(&mut outgoing.sleeping);
        drop(outgoing);
        if asleep {
            // As for the network thread.
            _ = (&self.sender_waker).write(&[1]);
        }
    }

    /// Keeps both threads to these cores.
    pub(super) fn keep_to(&self, cores: Vec<usize>) {
        self.tell_sender(|outgoing| outgoing.news.cores = Some(cores.clone()));
        self.command(Command::KeepTo(cores));
    }

    pub(super) fn queued_bytes(&self, peer: Peer) -> usize {
        self.outlet(peer).map_or(0, |outlet| outlet.queued_bytes())
    }

    /// Shapes the link to a peer, if it is still there.
    pub(super) fn shape(&self, peer: Peer, shape: LinkShape) {
        if let Ok(outlet) = self.outlet(peer) {
            outlet.set_shape(shape);
        }
    }

    /// From now on, there are so many letter boxes, and `sorter` says which one a message goes to.
    pub(super) fn sort(&self, boxes: usize, sorter: Sorter) {
        let mut inbox = self.inbox();
        let boxes = boxes.max(inbox.boxes.len());
        inbox.boxes.resize_with(boxes, LetterBox::default);
        inbox.sorter = sorter;
    }

    pub(super) fn recv(&self, letter_box: usize, timeout: Duration) -> Option<Event> {
        let deadline = Instant::now().checked_add(timeout);
        let mut inbox = self.inbox();
        loop {
            if let Some(event) = inbox.boxes[letter_box].events.pop_front() {
                let resume = inbox.account(&event, self.inbox_bytes_max);
                drop(inbox);
                if let Some(peer) = resume {
                    self.command(Command::Resume(peer));
                }
                return Some(event);
            }
            let left = match deadline {
                None => Duration::MAX,
                Some(deadline) => deadline.saturating_duration_since(Instant::now()),
            };
            if inbox.stopped {
                return None;
            }
            let letters = &mut inbox.boxes[letter_box];
            if let Some((lines, _)) = &letters.lines {
                let (lines, added) = (Arc::clone(lines), std::mem::take(&mut letters.added));
                letters.waiting += 1;
                drop(inbox);
                let mut lines = lines.lock().expect("no panic while lines are locked");
                lines.add(added);
                let heard = lines.next(left, &self.pool);
                drop(lines);
                inbox = self.inbox();
                inbox.boxes[letter_box].waiting -= 1;
                match heard {
                    Some(Heard::Message(event)) => return Some(event),
                    Some(Heard::Ended(peer, reason)) => {
                        drop(inbox);
                        self.command(Command::Ended(peer, reason));
                        inbox = self.inbox();
                    }
                    None if left.is_zero() && inbox.boxes[letter_box].events.is_empty() => {
                        return None;
                    }
                    None => {}
                }
                continue;
            }
            if left.is_zero() {
                return None;
            }
            inbox.boxes[letter_box].waiting += 1;
            let mail = Arc::clone(&inbox.boxes[letter_box].mail);
            let woken = mail.wait_timeout(inbox, left);
            inbox = woken.expect("no panic while the inbox is locked").0;
            inbox.boxes[letter_box].waiting -= 1;
        }
    }

    /// Puts an event into a letter box.
    pub(super) fn post(&self, letter_box: usize, event: Event) {
        let mut inbox = self.inbox();
        if let Event::Message { peer, .. } = &event {
            inbox.unread.entry(*peer).or_default().bytes += wire_bytes(&event);
        }
        let waiting = inbox.put(letter_box, event);
        drop(inbox);
        waiting.into_iter().for_each(Waker::wake);
    }

    pub(super) fn stats(&self) -> Vec<PeerStats> {
        let counters = self.counters.lock().expect("no panic while the counters are locked");
        counters.iter().map(|counters| counters.read()).collect()
    }

    /// Makes a node whose handshake succeeded a peer, unless it already is one.
    pub(super) fn enrol(
        &self,
        identity: Identity,
        address: SocketAddr,
    ) -> Result<Arc<PeerCounters>, HandshakeError> {
        let node = identity.node;
        let mut gate = self.gate();
        if node == self.own_node || gate.doors.values().any(|door| door.node == node) {
            return Err(HandshakeError::Connected { node });
        }
        if gate.doors.len() >= self.peers_max {
            return Err(HandshakeError::Full { peers_max: self.peers_max });
        }
        let peer = Peer(gate.peers_seen);
        gate.peers_seen += 1;
        gate.doors.insert(peer, Door { node, outlet: None, lines: BTreeMap::new() });
        drop(gate);
        let counters = Arc::new(PeerCounters::new(peer, identity, address));
        let mut all = self.counters.lock().expect("no panic while the counters are locked");
        all.push(Arc::clone(&counters));
        Ok(counters)
    }

    /// The peer can be sent to from now on.
    pub(super) fn open(&self, outlet: &Arc<Outlet>) {
        if let Some(door) = self.gate().doors.get_mut(&outlet.counters.peer) {
            door.outlet = Some(Arc::clone(outlet));
        }
        self.tell_sender(|outgoing| outgoing.news.outlets.push(Arc::clone(outlet)));
    }

    /// Who a peer is, and where.
    pub(super) fn identity(&self, peer: Peer) -> Option<(NodeId, SocketAddr)> {
        let gate = self.gate();
        let door = gate.doors.get(&peer)?;
        Some((door.node, door.outlet.as_ref()?.counters.address))
    }

    pub(super) fn allow_lines(&self, lines: u16) {
        self.lines_max.store(lines, Ordering::Relaxed);
    }

    /// Whose line it would be, if a connected node has a place for it.
    pub(super) fn owner_of_line(
        &self,
        node: NodeId,
        line: u16,
    ) -> Result<Arc<PeerCounters>, HandshakeError> {
        let lines_max = self.lines_max.load(Ordering::Relaxed);
        let gate = self.gate();
        let owner = gate.doors.values().find(|door| door.node == node).and_then(|door| {
            let outlet = door.outlet.as_ref().filter(|_| (1..=lines_max).contains(&line))?;
            Some(Arc::clone(&outlet.counters))
        });
        owner.ok_or(HandshakeError::Line { node, line })
    }

    /// Readies the letter box of a line.
    pub(super) fn ready(&self, line: u16) -> io::Result<()> {
        let mut inbox = self.inbox();
        let boxes = inbox.boxes.len().max(usize::from(line) + 1);
        inbox.boxes.resize_with(boxes, LetterBox::default);
        let letters = &mut inbox.boxes[usize::from(line)];
        if letters.lines.is_none() {
            let (reader, writer) = io::pipe()?;
            letters.lines = Some((Arc::new(Mutex::new(Lines::new(reader))), Arc::new(writer)));
            // It waits for the bell from now on.
            letters.mail.notify_all();
        }
        Ok(())
    }

    /// From now on, what is sent on this line goes here, and what comes from here goes into its letter box, which is ready.
    /// One that the dialler gave up before it was welcome is replaced. `false` if the peer is gone.
    pub(super) fn attach(&self, line: u16, outlet: &Arc<Outlet>) -> bool {
        let connection = Connection::new(Arc::clone(outlet), Instant::now());
        let mut inbox = self.inbox();
        let letters = &mut inbox.boxes[usize::from(line)];
        letters.added.push(connection);
        let waker = letters.waker();
        drop(inbox);
        let mut gate = self.gate();
        let door = gate.doors.get_mut(&outlet.counters.peer);
        let replaced = door.map(|door| door.lines.insert(line, Arc::clone(outlet)));
        drop(gate);
        replaced.iter().flatten().for_each(|before| before.cut());
        let is_there = replaced.is_some();
        match is_there {
            true => self.tell_sender(|outgoing| outgoing.news.outlets.push(Arc::clone(outlet))),
            false => outlet.cut(),
        }
        waker.into_iter().for_each(Waker::wake);
        is_there
    }
}

/// The network thread's side.
impl Shared {
    /// Takes the commands given so far.
    pub(super) fn take_commands(&self, into: &mut Vec<Command>) {
        let mut gate = self.gate();
        gate.sleeping = false;
        std::mem::swap(&mut gate.commands, into);
    }

    /// Whether the thread may sleep: nothing waits for it, and what comes will wake it.
    pub(super) fn doze(&self) -> bool {
        let mut gate = self.gate();
        gate.sleeping = gate.commands.is_empty();
        gate.sleeping
    }

    /// Hands a peer's messages to the receiving thread; returns whether the peer must be paused.
    pub(super) fn deliver(&self, peer: Peer, messages: &mut Vec<Event>) -> bool {
        let mut inbox = self.inbox();
        let unread = inbox.unread.entry(peer).or_default();
        unread.bytes += messages.iter().map(wire_bytes).sum::<usize>();
        unread.paused = unread.bytes > self.inbox_bytes_max;
        let pause = unread.paused;
        let mut waiting = Vec::new();
        for event in messages.drain(..) {
            let letter_box = match &event {
                Event::Message { message, .. } => (inbox.sorter)(message),
                Event::Joined { .. } | Event::Lost { .. } => 0,
            };
            waiting.extend(inbox.put(letter_box, event));
        }
        drop(inbox);
        waiting.into_iter().for_each(Waker::wake);
        pause
    }

    /// The connection is gone: no more sending to it.
    pub(super) fn strike(&self, peer: Peer) {
        let Some(door) = self.gate().doors.remove(&peer) else { return };
        door.outlet.iter().for_each(|outlet| outlet.close());
        door.lines.values().for_each(|line| line.cut());
        // The sending thread lets go of them, or they would stay open.
        self.nudge();
        if door.lines.is_empty() {
            return;
        }
        // Those that no thread has taken yet.
        for letters in &mut self.inbox().boxes {
            letters.added.retain(|line| line.outlet.counters.peer != peer);
        }
    }

    /// The network thread ends: nothing may wait for it any more, and no peer can be reached.
    pub(super) fn stop(&self) {
        let mut gate = self.gate();
        gate.stopped = true;
        gate.commands.clear();
        let left: Vec<Peer> = gate.doors.keys().copied().collect();
        drop(gate);
        for peer in &left {
            self.strike(*peer);
        }
        let mut inbox = self.inbox();
        let lost = |peer| Event::Lost { peer, reason: LostReason::Stopped };
        inbox.boxes[0].events.extend(left.into_iter().map(lost));
        inbox.stopped = true;
        let wakers: Vec<Waker> = inbox.boxes.iter().filter_map(LetterBox::waker).collect();
        drop(inbox);
        wakers.into_iter().for_each(Waker::wake);
        self.tell_sender(|outgoing| outgoing.stopped = true);
    }
}

/// The sending thread's side.
impl Shared {
    /// What it does not know yet; `None` if it shall end.
    pub(super) fn take_outgoing(&self) -> Option<OutgoingNews> {
        let mut outgoing = self.outgoing();
        (outgoing.sleeping, outgoing.nudged) = (false, false);
        (!outgoing.stopped).then(|| std::mem::take(&mut outgoing.news))
    }

    /// Whether it may sleep: nothing waits for it, and what comes will wake it.
    pub(super) fn may_sleep(&self) -> bool {
        let mut outgoing = self.outgoing();
        let OutgoingNews { outlets, cores } = &outgoing.news;
        let is_idle = outlets.is_empty() && cores.is_none() && !outgoing.nudged;
        outgoing.sleeping = is_idle && !outgoing.stopped;
        outgoing.sleeping
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.outgoing().stopped
    }
}

impl LetterBox {
    /// Wakes the thread that waits here, if one does.
    fn waker(&self) -> Option<Waker> {
        (self.waiting > 0).then(|| match &self.lines {
            Some((_, bell)) => Waker::Bell(Arc::clone(bell)),
            None => Waker::Mail(Arc::clone(&self.mail)),
        })
    }
}

impl Inbox {
    /// Puts an event into a letter box; returns what wakes the thread that waits for it, if one does.
    fn put(&mut self, letter_box: usize, event: Event) -> Option<Waker> {
        let letter_box = &mut self.boxes[letter_box];
        letter_box.events.push_back(event);
        if letter_box.events.len() == 1 { letter_box.waker() } else { None }
    }

    /// Takes an event's bytes off its peer's account; returns the peer if it may be read again.
    fn account(&mut self, event: &Event, bytes_max: usize) -> Option<Peer> {
        let Event::Message { peer, .. } = event else { return None };
        let unread = self.unread.get_mut(peer)?;
        unread.bytes -= wire_bytes(event);
        let resume = unread.paused && unread.bytes <= bytes_max / 2;
        if resume {
            unread.paused = false;
        }
        if unread.bytes == 0 {
            self.unread.remove(peer);
        }
        resume.then_some(*peer)
    }
}

fn wire_bytes(event: &Event) -> usize {
    match event {
        Event::Message { message, .. } => message.header().wire_bytes(),
        Event::Joined { .. } | Event::Lost { .. } => 0,
    }
}
