//! The simulator's priority queue: a four-way heap keyed (time or rank, sequence), so that equal keys keep their order.

/// A key whose order is that of `major`, then of `sequence`.
pub fn key(major: u64, sequence: u64) -> u128 {
    (u128::from(major) << 64) | u128::from(sequence)
}

/// A key for a moment in time; times are never negative, so their bits order as they do.
pub fn time_key(seconds: f64, sequence: u64) -> u128 {
    debug_assert!(seconds >= 0.0);
    key(seconds.to_bits(), sequence)
}

/// The time of a [`time_key`].
pub fn time_of(key: u128) -> f64 {
    f64::from_bits((key >> 64) as u64)
}

/// A queue whose smallest key leaves first.
#[derive(Clone, Debug)]
pub struct Heap<T> {
    items: Vec<(u128, T)>,
}

impl<T> Default for Heap<T> {
    fn default() -> Self {
        Self { items: Vec::new() }
    }
}

const CHILDREN: usize = 4;

impl<T: Copy> Heap<T> {
    /// Adds an item.
    pub fn push(&mut self, key: u128, item: T) {
        let mut place = self.items.len();
        self.items.push((key, item));
        while place > 0 {
            let parent = (place - 1) / CHILDREN;
            if self.items[parent].0 <= key {
                break;
            }
            self.items[place] = self.items[parent];
            place = parent;
        }
        self.items[place] = (key, item);
    }

    /// The smallest key.
    pub fn first(&self) -> Option<u128> {
        self.items.first().map(|(key, _)| *key)
    }

    /// Removes the item with the smallest key.
    pub fn pop(&mut self) -> Option<(u128, T)> {
        let last = self.items.pop()?;
        let Some(&first) = self.items.first() else { return Some(last) };
        let count = self.items.len();
        let mut place = 0;
        loop {
            let start = place * CHILDREN + 1;
            if start >= count {
                break;
            }
            let smallest = match self.items.get(start..start + CHILDREN) {
                // Without branches, because the smallest child is unpredictable.
                Some(&[(first, _), (second, _), (third, _), (fourth, _)]) => {
                    let (left, right) = (usize::from(second < first), usize::from(fourth < third));
                    let (low, high) = (first.min(second), third.min(fourth));
                    start + if high < low { 2 + right } else { left }
                }
                _ => (start..count).min_by_key(|&child| self.items[child].0).unwrap_or(start),
            };
            if self.items[smallest].0 >= last.0 {
                break;
            }
            self.items[place] = self.items[smallest];
            place = smallest;
        }
        self.items[place] = last;
        Some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn leaves_in_order_of_time_then_sequence() {
        let (mut heap, mut random) = (Heap::default(), Random::new(1));
        let mut expected: Vec<(u128, u32)> = (0..1000u32)
            .map(|index| (time_key(random.below(50) as f64 * 0.1, u64::from(index)), index))
            .collect();
        expected.iter().for_each(|&(key, item)| heap.push(key, item));
        expected.sort();
        let left: Vec<_> = std::iter::from_fn(|| heap.pop()).collect();
        assert_eq!(left, expected);
    }
}
