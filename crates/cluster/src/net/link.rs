//! What waits to be sent to one peer: deepest layer first and, if a shape is given, held back like a
//! link of that bandwidth and delay. It has no clock: the caller passes the time.

use super::config::LinkShape;
use glinthawk_flight::{Kind, Message};
use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};
use std::time::{Duration, Instant};

/// The queue in front of a socket, and the artificial link between the two.
///
/// A message waits until the link is free, occupies it for its length over the bandwidth, and
/// comes out a delay later. Bandwidth is a queue, delay a pipeline: any number of messages may be
/// under way.
pub(super) struct Link {
    shape: LinkShape,
    waiting: BinaryHeap<Waiting>,
    /// Sent, and due at the far end; in order of time.
    under_way: VecDeque<(Instant, Message)>,
    /// When the link has carried everything that was put on it.
    free_at: Option<Instant>,
    sequence: u64,
}

struct Waiting {
    rank: u64,
    sequence: Reverse<u64>,
    message: Message,
}

impl Link {
    pub(super) fn new() -> Self {
        Self {
            shape: LinkShape::default(),
            waiting: BinaryHeap::new(),
            under_way: VecDeque::new(),
            free_at: None,
            sequence: 0,
        }
    }

    /// Applies to what is sent from now on.
    pub(super) fn set_shape(&mut self, shape: LinkShape) {
        self.shape = shape;
    }

    /// Queues a message.
    pub(super) fn push(&mut self, message: Message, now: Instant) {
        self.advance(now);
        if self.waiting.is_empty() {
            // An idle link does not save up bandwidth.
            self.free_at = Some(self.free_at.map_or(now, |free_at| free_at.max(now)));
        }
        let sequence = Reverse(self.sequence);
        self.sequence += 1;
        self.waiting.push(Waiting { rank: rank(&message), sequence, message });
    }

    /// The next message for the socket, if one has arrived there.
    pub(super) fn pop(&mut self, now: Instant) -> Option<Message> {
        if self.shape == LinkShape::default() && self.under_way.is_empty() {
            // The socket itself is the link: choosing as late as possible lets a deeper layer pass.
            return self.waiting.pop().map(|waiting| waiting.message);
        }
        self.advance(now);
        let (due, _) = self.under_way.front()?;
        if *due > now {
            return None;
        }
        self.under_way.pop_front().map(|(_, message)| message)
    }

    /// When `pop` may have something; `None` for an empty link.
    pub(super) fn due(&self) -> Option<Instant> {
        match self.under_way.front() {
            Some((due, _)) => Some(*due),
            // `free_at` is set by the first push.
            None if !self.waiting.is_empty() => self.free_at,
            None => None,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.under_way.is_empty()
    }

    /// Puts on the link what it had time for up to `now`.
    fn advance(&mut self, now: Instant) {
        if self.shape == LinkShape::default() && self.under_way.is_empty() {
            return;
        }
        while let Some(free_at) = self.free_at.filter(|free_at| *free_at <= now) {
            let Some(Waiting { message, .. }) = self.waiting.pop() else { return };
            let carried = free_at + self.carrying_time(message.header().wire_bytes());
            self.free_at = Some(carried);
            // Never before its predecessor, even if the delay was shortened in between.
            let last = self.under_way.back().map_or(carried, |(due, _)| *due);
            self.under_way.push_back(((carried + self.shape.delay).max(last), message));
        }
    }

    fn carrying_time(&self, bytes: usize) -> Duration {
        let Some(bytes_per_second) = self.shape.bytes_per_second else { return Duration::ZERO };
        let nanoseconds = bytes as u128 * 1_000_000_000 / u128::from(bytes_per_second.max(1));
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }
}

/// Control and home messages come before all layers, in the order they were sent; then the deepest
/// layer first; a goodbye comes last.
fn rank(message: &Message) -> u64 {
    match message.kind() {
        Kind::Home | Kind::Control | Kind::Heartbeat => u64::MAX,
        Kind::Attend | Kind::Attended | Kind::Hop | Kind::Launch => 1 + u64::from(message.layer()),
        Kind::Goodbye => 0,
    }
}

impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.rank, self.sequence).cmp(&(other.rank, other.sequence))
    }
}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Waiting {}

#[cfg(test)]
mod tests {
    use super::*;
    use glinthawk_flight::{Buffer, HEADER_BYTES, StepId};

    /// A message of exactly `bytes` bytes on the wire.
    fn message(layer: u32, bytes: usize) -> Message {
        Message::attended(StepId::default(), layer, 1, Buffer::zeroed(bytes - HEADER_BYTES))
    }

    fn control(said: u8) -> Message {
        Message::control(vec![said], Buffer::default())
    }

    /// Pushes (milliseconds, message), then pops at every due time: (milliseconds, layer) in order.
    fn arrivals(shape: LinkShape, pushes: Vec<(u64, Message)>) -> Vec<(u64, u32)> {
        let start = Instant::now();
        let mut link = Link::new();
        link.set_shape(shape);
        let mut arrived = Vec::new();
        let mut pop_until = |link: &mut Link, limit: Option<Instant>| {
            while let Some(due) = link.due().filter(|due| limit.is_none_or(|limit| *due <= limit)) {
                while let Some(message) = link.pop(due) {
                    let at = due.duration_since(start).as_millis() as u64;
                    arrived.push((at, message.layer()));
                }
            }
        };
        for (milliseconds, message) in pushes {
            let now = start + Duration::from_millis(milliseconds);
            pop_until(&mut link, Some(now));
            link.push(message, now);
        }
        pop_until(&mut link, None);
        assert!(link.is_empty());
        arrived
    }

    #[test]
    fn the_deepest_layer_goes_first_and_ties_keep_their_order() {
        let now = Instant::now();
        let mut link = Link::new();
        let messages = [
            Message::goodbye(),
            message(1, 100),
            message(7, 100),
            control(1),
            message(7, 102),
            message(3, 100),
            control(2),
        ];
        for message in messages {
            link.push(message, now);
        }
        let order: Vec<_> = std::iter::from_fn(|| link.pop(now))
            .map(|m| (m.kind(), m.layer(), m.table().first().copied(), m.payload().len_bytes()))
            .collect();
        let expected = [
            (Kind::Control, 0, Some(1), 0),
            (Kind::Control, 0, Some(2), 0),
            (Kind::Attended, 7, None, 36),
            (Kind::Attended, 7, None, 38),
            (Kind::Attended, 3, None, 36),
            (Kind::Attended, 1, None, 36),
            (Kind::Goodbye, 0, None, 0),
        ];
        assert_eq!(order, expected);
    }

    #[test]
    fn delay_is_a_pipeline() {
        let shape = LinkShape { delay: Duration::from_millis(50), bytes_per_second: None };
        let pushes = (0..5).map(|at| (at, message(at as u32, 1000))).collect();
        assert_eq!(arrivals(shape, pushes), [(50, 0), (51, 1), (52, 2), (53, 3), (54, 4)]);
    }

    #[test]
    fn bandwidth_is_a_queue() {
        // 1000 bytes take 10 ms.
        let shape = LinkShape { delay: Duration::ZERO, bytes_per_second: Some(100_000) };
        let pushes = vec![(0, message(1, 1000)), (1, message(2, 1000)), (2, message(3, 2000))];
        // Layer 3 came last but passes layer 2 while layer 1 occupies the link.
        assert_eq!(arrivals(shape, pushes), [(10, 1), (30, 3), (40, 2)]);
    }

    #[test]
    fn an_idle_link_saves_up_nothing() {
        let shape = LinkShape { delay: Duration::from_millis(5), bytes_per_second: Some(100_000) };
        let pushes = vec![(0, message(0, 1000)), (100, message(1, 1000)), (100, message(0, 1000))];
        assert_eq!(arrivals(shape, pushes), [(15, 0), (115, 1), (125, 0)]);
    }

    #[test]
    fn a_late_caller_does_not_slow_the_link() {
        let shape = LinkShape { delay: Duration::ZERO, bytes_per_second: Some(100_000) };
        let start = Instant::now();
        let mut link = Link::new();
        link.set_shape(shape);
        for _ in 0..10 {
            link.push(message(0, 1000), start);
        }
        // Nothing was popped for 95 ms: nine of ten messages have crossed by then.
        let late = start + Duration::from_millis(95);
        assert_eq!(std::iter::from_fn(|| link.pop(late)).count(), 9);
        assert_eq!(link.due(), Some(start + Duration::from_millis(100)));
    }

    #[test]
    fn a_shape_taken_off_keeps_the_order() {
        let start = Instant::now();
        let mut link = Link::new();
        link.set_shape(LinkShape { delay: Duration::from_millis(9), bytes_per_second: None });
        link.push(message(1, 100), start);
        assert!(link.pop(start).is_none());
        link.set_shape(LinkShape::default());
        link.push(message(2, 100), start);
        assert!(link.pop(start).is_none());
        let later = start + Duration::from_millis(9);
        let layers: Vec<_> =
            std::iter::from_fn(|| link.pop(later)).map(|message| message.layer()).collect();
        assert_eq!(layers, [1, 2]);
    }
}
