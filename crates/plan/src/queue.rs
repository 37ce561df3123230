//! Shards that wait for a node: the deepest step first, and among equals the one that arrived
//! first.

/// The end of a list.
const NONE: u32 = u32::MAX;

/// The queues of identical nodes; a shard is in at most one of them.
#[derive(Debug)]
pub(crate) struct Queues {
    /// Steps of a node.
    steps: usize,
    words: usize,
    /// First and last shard of every node's every step.
    ends: Vec<(u32, u32)>,
    /// Which steps of a node have shards.
    waiting: Vec<u64>,
    /// The shard behind each shard.
    behind: Vec<u32>,
}

impl Queues {
    /// Queues for `nodes` nodes with up to `steps` steps, and `shards` shards.
    pub fn new(nodes: usize, steps: usize, shards: usize) -> Self {
        let words = steps.div_ceil(64);
        Self {
            steps,
            words,
            ends: vec![(NONE, NONE); nodes * steps],
            waiting: vec![0; nodes * words],
            behind: vec![NONE; shards],
        }
    }

    /// Adds a shard that waits for a step of a node, counted from the node's first.
    pub fn push(&mut self, node: usize, step: usize, shard: u32) {
        self.behind[shard as usize] = NONE;
        let (first, last) = &mut self.ends[node * self.steps + step];
        if *first == NONE {
            *first = shard;
            self.waiting[node * self.words + step / 64] |= 1 << (step % 64);
        } else {
            self.behind[*last as usize] = shard;
        }
        *last = shard;
    }

    /// The deepest step of a node that has shards.
    pub fn deepest(&self, node: usize) -> Option<usize> {
        let words = &self.waiting[node * self.words..(node + 1) * self.words];
        let word = words.iter().rposition(|&word| word != 0)?;
        Some(word * 64 + 63 - words[word].leading_zeros() as usize)
    }

    /// The shard that arrived first among those that wait for a step.
    pub fn first(&self, node: usize, step: usize) -> Option<u32> {
        Some(self.ends[node * self.steps + step].0).filter(|&shard| shard != NONE)
    }

    /// Removes the first shard of a step.
    pub fn pop(&mut self, node: usize, step: usize) -> Option<u32> {
        let shard = self.first(node, step)?;
        let next = self.behind[shard as usize];
        self.ends[node * self.steps + step].0 = next;
        if next == NONE {
            self.waiting[node * self.words + step / 64] &= !(1 << (step % 64));
        }
        Some(shard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deepest_step_leaves_first_and_equals_keep_their_order() {
        let mut queues = Queues::new(2, 130, 10);
        for (shard, step) in [(0, 3), (1, 129), (2, 3), (3, 64), (4, 129)] {
            queues.push(1, step, shard);
        }
        assert_eq!(queues.deepest(0), None);
        let mut left = Vec::new();
        while let Some(step) = queues.deepest(1) {
            left.push((step, queues.pop(1, step).expect("it waits")));
        }
        assert_eq!(left, [(129, 1), (129, 4), (64, 3), (3, 0), (3, 2)]);
    }
}
