//! Shards that wait for a node: the deepest stage first, and among equals the one that arrived
//! first.

/// The end of a list.
const NONE: u32 = u32::MAX;

/// The queues of identical nodes; a shard is in at most one of them.
#[derive(Debug)]
pub(crate) struct Queues {
    /// Stages of a node.
    stages: usize,
    words: usize,
    /// First and last shard of every node's every stage.
    ends: Vec<(u32, u32)>,
    /// Which stages of a node have shards.
    waiting: Vec<u64>,
    /// The shards before and behind each shard.
    before: Vec<u32>,
    behind: Vec<u32>,
}

impl Queues {
    /// Queues for `nodes` nodes with up to `stages` stages, and `shards` shards.
    pub fn new(nodes: usize, stages: usize, shards: usize) -> Self {
        let words = stages.div_ceil(64);
        Self {
            stages,
            words,
            ends: vec![(NONE, NONE); nodes * stages],
            waiting: vec![0; nodes * words],
            before: vec![NONE; shards],
            behind: vec![NONE; shards],
        }
    }

    /// Adds a shard that waits for a stage of a node, counted from the node's first.
    pub fn push(&mut self, node: usize, stage: usize, shard: u32) {
        self.behind[shard as usize] = NONE;
        let (first, last) = &mut self.ends[node * self.stages + stage];
        self.before[shard as usize] = *last;
        if *first == NONE {
            *first = shard;
            self.waiting[node * self.words + stage / 64] |= 1 << (stage % 64);
        } else {
            self.behind[*last as usize] = shard;
        }
        *last = shard;
    }

    /// The deepest stage of a node that has shards.
    pub fn deepest(&self, node: usize) -> Option<usize> {
        let words = &self.waiting[node * self.words..(node + 1) * self.words];
        let word = words.iter().rposition(|&word| word != 0)?;
        Some(word * 64 + 63 - words[word].leading_zeros() as usize)
    }

    /// The shard that arrived first among those that wait for a stage.
    pub fn first(&self, node: usize, stage: usize) -> Option<u32> {
        Some(self.ends[node * self.stages + stage].0).filter(|&shard| shard != NONE)
    }

    /// The shard behind a shard that waits.
    pub fn next(&self, shard: u32) -> Option<u32> {
        Some(self.behind[shard as usize]).filter(|&shard| shard != NONE)
    }

    /// Removes a shard that waits for a stage.
    pub fn remove(&mut self, node: usize, stage: usize, shard: u32) {
        let (before, behind) = (self.before[shard as usize], self.behind[shard as usize]);
        let (first, last) = &mut self.ends[node * self.stages + stage];
        match before {
            NONE => *first = behind,
            before => self.behind[before as usize] = behind,
        }
        match behind {
            NONE => *last = before,
            behind => self.before[behind as usize] = before,
        }
        if *first == NONE {
            self.waiting[node * self.words + stage / 64] &= !(1 << (stage % 64));
        }
    }

    /// Removes the first shard of a stage.
    pub fn pop(&mut self, node: usize, stage: usize) -> Option<u32> {
        let shard = self.first(node, stage)?;
        self.remove(node, stage, shard);
        Some(shard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deepest_stage_leaves_first_and_equals_keep_their_order() {
        let mut queues = Queues::new(2, 130, 10);
        for (shard, stage) in [(0, 3), (1, 129), (2, 3), (3, 64), (4, 129)] {
            queues.push(1, stage, shard);
        }
        assert_eq!(queues.deepest(0), None);
        let mut left = Vec::new();
        while let Some(stage) = queues.deepest(1) {
            left.push((stage, queues.pop(1, stage).expect("it waits")));
        }
        assert_eq!(left, [(129, 1), (129, 4), (64, 3), (3, 0), (3, 2)]);
    }
}
