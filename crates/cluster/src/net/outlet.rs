//! The sending side of a connection: a bounded queue, and a writer that any thread may use.
//! Never blocks on the socket.

use super::channel::Channel;
use super::config::{Config, LinkShape};
use super::event::{LostReason, SendError};
use super::link::Link;
use super::stats::PeerCounters;
use glinthawk_flight::{HEADER_BYTES, Kind, Limits, Message, Pool};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// A message up to this long, and with nothing before it, is written by the thread that sends it:
/// waking the sending thread would take longer than the write. On a line, one of any length is.
const INLINE_BYTES: usize = 128 << 10;
/// Messages are taken from the link into one vectored write up to this much; what still waits can
/// be overtaken by a deeper layer.
const STAGED_BYTES: usize = 256 << 10;
const STAGED_MESSAGES: usize = 16;
/// A blocked socket that takes less than this in the time of a stall is as good as one that takes nothing.
const PROGRESS_BYTES: usize = 64 << 10;

/// Everything on its way to one peer. Shared by the senders, the sending thread and the network thread.
pub(super) struct Outlet {
    pub(super) channel: Channel,
    pub(super) counters: Arc<PeerCounters>,
    pub(super) limits: Limits,
    pool: Arc<Pool>,
    queue_bytes_max: usize,
    inline_bytes_max: usize,
    /// Locked briefly, also while the writer is.
    queue: Mutex<Queue>,
    room: Condvar,
    /// Locked while sealing and writing; never waited for by a sender.
    writer: Mutex<Writer>,
    /// Whether the writer's `blocked_since` is set, for threads that must not wait for the writer.
    blocked: AtomicBool,
}

struct Queue {
    link: Link,
    /// Bytes in the link and the writer.
    bytes: usize,
    /// Senders that wait for room.
    waiting: usize,
    closed: bool,
    /// The last message is a goodbye.
    leaving: bool,
}

/// A message with its header's bytes. Its checksum is made by the thread that writes it.
struct Sealed {
    head: [u8; HEADER_BYTES],
    message: Message,
}

struct Writer {
    staged: VecDeque<Sealed>,
    staged_bytes: usize,
    /// Bytes of the staged messages that the socket has taken.
    written: usize,
    /// Since when the socket has taken next to nothing of what is staged: less than `PROGRESS_BYTES`.
    blocked_since: Option<Instant>,
    /// What it has taken since then.
    taken_since: usize,
    /// When the socket last took bytes.
    spoke_at: Instant,
    failed: Option<LostReason>,
}

impl Outlet {
    pub(super) fn new(
        channel: Channel,
        counters: Arc<PeerCounters>,
        limits: Limits,
        config: &Config,
        line: u16,
    ) -> Self {
        Self {
            inline_bytes_max: if line > 0 { usize::MAX } else { INLINE_BYTES },
            channel,
            counters,
            limits,
            pool: Arc::clone(&config.pool),
            queue_bytes_max: config.bounds.queue_bytes_max,
            queue: Mutex::new(Queue {
                link: Link::new(),
                bytes: 0,
                waiting: 0,
                closed: false,
                leaving: false,
            }),
            room: Condvar::new(),
            writer: Mutex::new(Writer {
                staged: VecDeque::with_capacity(STAGED_MESSAGES),
                staged_bytes: 0,
                written: 0,
                blocked_since: None,
                taken_since: 0,
                spoke_at: Instant::now(),
                failed: None,
            }),
            blocked: AtomicBool::new(false),
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("no panic while a queue is locked")
    }

    /// Queues a message once there is room, and writes it at once if that is quicker than waking
    /// the sending thread. Returns whether the sending thread must look after the rest.
    pub(super) fn send(&self, message: Message) -> Result<bool, SendError> {
        let peer = self.counters.peer;
        message.check(&self.limits).map_err(|source| SendError::OverLimit { peer, source })?;
        let bytes = message.header().wire_bytes();
        let mut queue = self.queue();
        // A message larger than the bound passes alone.
        while !queue.closed && queue.bytes > 0 && queue.bytes + bytes > self.queue_bytes_max {
            queue.waiting += 1;
            queue = self.room.wait(queue).expect("no panic while a queue is locked");
            queue.waiting -= 1;
        }
        if queue.closed {
            return Err(SendError::Gone(peer));
        }
        let alone = queue.bytes == 0 && bytes <= self.inline_bytes_max;
        queue.bytes += bytes;
        let now = Instant::now();
        queue.link.push(message, now);
        drop(queue);
        if self.is_blocked() {
            // The sending thread already waits for the socket.
            return Ok(false);
        }
        if alone
            && let Ok(mut writer) = self.writer.try_lock()
            && !self.write_alone(&mut writer, now)
        {
            return Ok(true);
        }
        Ok(self.is_left())
    }

    /// Whether something was left for the sending thread that it may have found locked. Asked when the writer is free again:
    /// another thread may have queued a message meanwhile that it could not write because of us, or a goodbye.
    fn is_left(&self) -> bool {
        let queue = self.queue();
        !queue.link.is_empty() || queue.leaving
    }

    /// Writes what there is; `false` if the sending thread must see to it that the rest is written.
    fn write_alone(&self, writer: &mut Writer, now: Instant) -> bool {
        self.write_out(writer, now);
        writer.blocked_since.is_none() && writer.failed.is_none()
    }

    pub(super) fn queued_bytes(&self) -> usize {
        self.queue().bytes
    }

    pub(super) fn set_shape(&self, shape: LinkShape) {
        self.queue().link.set_shape(shape);
    }

    /// Takes no more messages, and wakes threads that wait for room.
    pub(super) fn close(&self) {
        let mut queue = self.queue();
        (queue.closed, queue.leaving) = (true, false);
        drop(queue);
        self.room.notify_all();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.queue().closed
    }

    /// Ends the connection at once, whoever reads from it.
    pub(super) fn cut(&self) {
        self.close();
        // If this fails, the connection is gone already.
        _ = self.channel.stream.shutdown(Shutdown::Both);
    }
}

/// The side of the two threads behind it. While another one writes, that takes care of the rest.
impl Outlet {
    /// When there will be something to write; a blocked socket says so itself.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let writer = self.writer.try_lock().ok()?;
        match (&writer.failed, writer.blocked_since) {
            (Some(_), _) => Some(now),
            (None, Some(_)) => None,
            (None, None) => self.queue().link.due(),
        }
    }

    /// Whether the sending thread must wait for the socket to take more.
    pub(super) fn is_blocked(&self) -> bool {
        self.blocked.load(Ordering::Acquire)
    }

    /// Since when the socket has taken next to nothing of what waits for it.
    pub(super) fn blocked_since(&self) -> Option<Instant> {
        self.writer.try_lock().ok().and_then(|writer| writer.blocked_since)
    }

    /// Writes what the link releases until the socket takes no more.
    pub(super) fn transmit(&self, now: Instant) -> Result<(), LostReason> {
        let Ok(mut writer) = self.writer.try_lock() else { return Ok(()) };
        if writer.failed.is_none() {
            self.write_out(&mut writer, now);
        }
        writer.failed.clone().map_or(Ok(()), Err)
    }

    /// Sends a sign of life if nothing was sent for `interval`. Goes past the link: an artificial
    /// delay must not make a node look dead. Returns whether the sending thread must look after the rest.
    pub(super) fn heartbeat(&self, now: Instant, interval: Duration) -> bool {
        let Ok(mut writer) = self.writer.try_lock() else { return false };
        let quiet = now.saturating_duration_since(writer.spoke_at);
        if !writer.staged.is_empty() || quiet < interval {
            return false;
        }
        writer.stage(Message::heartbeat());
        let is_written = self.write_alone(&mut writer, now);
        drop(writer);
        !is_written || self.is_left()
    }

    /// Queues a goodbye after everything else, and takes no more messages.
    pub(super) fn say_goodbye(&self, now: Instant) {
        let mut queue = self.queue();
        queue.link.push(Message::goodbye(), now);
        (queue.closed, queue.leaving) = (true, true);
        drop(queue);
        self.room.notify_all();
    }

    /// Whether nothing will be written any more. After a goodbye, this says so to the other end.
    pub(super) fn is_over(&self) -> bool {
        let queue = self.queue();
        if !queue.closed || !queue.leaving {
            return queue.closed;
        }
        let is_queued = !queue.link.is_empty();
        drop(queue);
        let is_over =
            !is_queued && self.writer.try_lock().is_ok_and(|writer| writer.staged.is_empty());
        if is_over {
            // If this fails, the connection is broken and the next read says so.
            _ = self.channel.stream.shutdown(Shutdown::Write);
        }
        is_over
    }

    fn write_out(&self, writer: &mut Writer, now: Instant) {
        while self.fill(writer, now) {
            let wanted = writer.staged_bytes - writer.written;
            match writer.write(&self.channel) {
                Ok(written) => {
                    writer.spoke_at = now;
                    writer.written += written;
                    let blocked = written < wanted;
                    writer.note_taken(written, blocked, now);
                    self.blocked.store(blocked, Ordering::Release);
                    self.retire(writer);
                    if blocked {
                        return;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    writer.blocked_since.get_or_insert(now);
                    self.blocked.store(true, Ordering::Release);
                    return;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    writer.failed = Some(LostReason::Broken(error.to_string()));
                    return;
                }
            }
        }
    }

    /// Takes messages from the link for the next write; false when there is nothing to write.
    fn fill(&self, writer: &mut Writer, now: Instant) -> bool {
        while writer.staged_bytes < STAGED_BYTES && writer.staged.len() < STAGED_MESSAGES {
            // The queue is free again while the message is sealed.
            let Some(message) = self.queue().link.pop(now) else { break };
            writer.stage(message);
        }
        !writer.staged.is_empty()
    }

    /// Lets go of the messages that are wholly written; their payloads return to the pool.
    fn retire(&self, writer: &mut Writer) {
        let mut bytes_gone = 0;
        while let Some(Sealed { message, .. }) = writer.unstage_written() {
            self.counters.sent[message.kind().index()].count(message.header());
            // Heartbeats and goodbyes are the controller's own: no `send` paid for them.
            if !matches!(message.kind(), Kind::Heartbeat | Kind::Goodbye) {
                bytes_gone += message.header().wire_bytes();
            }
            self.pool.give(message.into_payload());
        }
        let mut queue = self.queue();
        queue.bytes -= bytes_gone;
        // Waking a sender for each message that leaves would cost more than sending it.
        let wake = queue.waiting > 0 && queue.bytes <= self.queue_bytes_max / 2;
        drop(queue);
        if wake {
            self.room.notify_all();
        }
    }
}

impl Writer {
    /// The socket took this many bytes, and all of them unless it is blocked.
    fn note_taken(&mut self, bytes: usize, blocked: bool, now: Instant) {
        self.taken_since += bytes;
        if !blocked {
            (self.blocked_since, self.taken_since) = (None, 0);
        } else if self.blocked_since.is_none() || self.taken_since >= PROGRESS_BYTES {
            (self.blocked_since, self.taken_since) = (Some(now), 0);
        }
    }

    fn stage(&mut self, message: Message) {
        self.staged_bytes += message.header().wire_bytes();
        self.staged.push_back(Sealed { head: message.seal(), message });
    }

    fn unstage_written(&mut self) -> Option<Sealed> {
        let bytes = self.staged.front()?.message.header().wire_bytes();
        if bytes > self.written {
            return None;
        }
        self.written -= bytes;
        self.staged_bytes -= bytes;
        self.staged.pop_front()
    }

    /// One vectored write of everything staged and not yet written.
    fn write(&self, channel: &Channel) -> io::Result<usize> {
        let mut slices = [IoSlice::new(&[]); 3 * STAGED_MESSAGES];
        let mut used = 0;
        for Sealed { head, message } in &self.staged {
            for part in [head.as_slice(), message.table(), message.payload().bytes()] {
                if !part.is_empty() {
                    slices[used] = IoSlice::new(part);
                    used += 1;
                }
            }
        }
        let mut slices = &mut slices[..used];
        IoSlice::advance_slices(&mut slices, self.written);
        channel.write_vectored(slices)
    }
}
