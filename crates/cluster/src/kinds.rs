//! What the nodes of a cluster compute on: their bits depend on it.

use std::collections::BTreeMap;
use std::fmt;

/// The kind of device (an instruction set) of every node, by the node's name.
#[derive(Clone, Debug)]
pub struct Kinds(BTreeMap<String, String>);

impl Kinds {
    pub(crate) fn new(nodes: impl Iterator<Item = (String, String)>) -> Self {
        Self(nodes.collect())
    }

    /// Whether bits depend on the node that computes them.
    pub fn are_mixed(&self) -> bool {
        let mut kinds = self.0.values();
        let first = kinds.next();
        kinds.any(|kind| Some(kind) != first)
    }
}

/// One name for a cluster of one kind: what a single process of that kind is called. Otherwise every node with its
/// kind.
impl fmt::Display for Kinds {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (false, Some(kind)) = (self.are_mixed(), self.0.values().next()) {
            return formatter.write_str(kind);
        }
        for (index, (node, kind)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(formatter, "{comma}{node} {kind}")?;
        }
        Ok(())
    }
}
