//! What the nodes of a cluster compute on: their bits depend on it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The kind of device (an instruction set, or a kind of GPU) of every node.
#[derive(Clone, Debug)]
pub struct Kinds {
    /// By the node's name.
    nodes: BTreeMap<String, String>,
    /// Of what holds weights.
    weights: BTreeSet<String>,
    /// Of what attends.
    attention: BTreeSet<String>,
}

/// A node, as far as bits depend on it.
pub struct NodeKind {
    /// Its name, such as `tier1-0`.
    pub name: String,
    /// Its kind of device.
    pub kind: String,
    /// Whether it is in Tier 1.
    pub has_weights: bool,
    /// Whether it holds contexts.
    pub attends: bool,
}

impl Kinds {
    /// The kinds of these nodes.
    pub fn new(nodes: impl IntoIterator<Item = NodeKind>) -> Self {
        let nodes: Vec<NodeKind> = nodes.into_iter().collect();
        let kinds = |in_it: fn(&NodeKind) -> bool| {
            nodes.iter().filter(|node| in_it(node)).map(|node| node.kind.clone()).collect()
        };
        let (weights, attention) = (kinds(|node| node.has_weights), kinds(|node| node.attends));
        let nodes = nodes.into_iter().map(|node| (node.name, node.kind)).collect();
        Self { nodes, weights, attention }
    }

    /// Whether bits depend on the node that computes them.
    pub fn are_mixed(&self) -> bool {
        self.weights.len() > 1 || self.attention.len() > 1
    }

    /// What computes: `cpu`, `cuda`, or both.
    pub fn backend(&self) -> &'static str {
        let is_gpu = |kind: &String| kind.starts_with("cuda");
        let mut kinds = self.nodes.values();
        match (kinds.clone().any(is_gpu), kinds.all(is_gpu)) {
            (_, true) => "cuda",
            (false, _) => "cpu",
            _ => "cuda and cpu",
        }
    }
}

/// One name for a cluster of one kind: what a single process of that kind is called. Two, if each tier is of one kind.
/// Otherwise every node with its kind.
impl fmt::Display for Kinds {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (false, Some(weights), Some(attention)) =
            (self.are_mixed(), self.weights.first(), self.attention.first())
        {
            formatter.write_str(weights)?;
            return match weights == attention {
                true => Ok(()),
                false => write!(formatter, ", attention on {attention}"),
            };
        }
        for (index, (node, kind)) in self.nodes.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(formatter, "{comma}{node} {kind}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cluster of a Tier-1 node and Tier-2 nodes of these kinds, as it is called, what computes in it, and whether
    /// bits depend on the node.
    fn check(tier1: &str, hybrid: bool, tier2: &[&str], expected: (&str, &str, bool)) {
        let node = |name: String, kind: &str, has_weights, attends| NodeKind {
            name,
            kind: kind.to_owned(),
            has_weights,
            attends,
        };
        let first = node("tier1-0".to_owned(), tier1, true, hybrid);
        let others = (usize::from(hybrid)..).zip(tier2);
        let others = others.map(|(lane, kind)| node(format!("tier2-0-{lane}"), kind, false, true));
        let kinds = Kinds::new(std::iter::once(first).chain(others));
        let called = kinds.to_string();
        assert_eq!((called.as_str(), kinds.backend(), kinds.are_mixed()), expected);
    }

    #[test]
    fn a_cluster_is_called_by_what_its_bits_depend_on() {
        check("amx", false, &["amx", "amx"], ("amx", "cpu", false));
        check("cuda-sm90", true, &["cuda-sm90"], ("cuda-sm90", "cuda", false));
        let apart = ("cuda-sm90, attention on amx", "cuda and cpu", false);
        check("cuda-sm90", false, &["amx"], apart);
        check("cuda-sm90", false, &["amx", "amx"], apart);
        let hybrid = ("tier1-0 cuda-sm90, tier2-0-1 amx", "cuda and cpu", true);
        check("cuda-sm90", true, &["amx"], hybrid);
        let uneven = ("tier1-0 amx, tier2-0-0 amx, tier2-0-1 avx2", "cpu", true);
        check("amx", false, &["amx", "avx2"], uneven);
    }
}
