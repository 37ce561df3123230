//! Which places of a cluster have a node, and what follows for lanes when one comes or goes. The dispatcher's process
//! alone decides this; nodes are told.
//!
//! A place is hosted, vacant, or a node is loading there. A lane is closed when contexts of it are lost, and opened again
//! when all its places and all Tier-1 nodes of its pipeline are hosted. While a Tier-1 node is missing, the other lanes
//! of its pipeline rest: their contexts are kept, and their steps are launched again when it has a host.

use std::collections::{BTreeMap, BTreeSet};

/// A node's place in a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// Its pipeline.
    pub pipeline: usize,
    /// Its slice.
    pub slice: usize,
    /// Its lane of the first strand; `None` is the slice's Tier-1 node.
    pub lane: Option<u32>,
}

/// The shape of a cluster, as far as its places depend on it.
#[derive(Clone, Copy, Debug)]
pub struct RosterShape {
    /// Pipelines.
    pub pipelines: usize,
    /// Slices of each.
    pub slices: usize,
    /// Attention workers of each slice: lanes of one strand.
    pub workers: u32,
    /// Whether the first of them is the Tier-1 node itself.
    pub tier1_attends: bool,
    /// Strands of each pipeline.
    pub strands: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Hosted,
    Vacant,
    Loading,
}

/// What a node brings that has become ready.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Back {
    /// Lanes that are opened again, without contexts.
    pub opened: Vec<u32>,
    /// Lanes that rested and go on with their contexts: their steps are launched again.
    pub resumed: Vec<u32>,
}

/// See the module's head.
pub struct Roster {
    shape: RosterShape,
    places: BTreeMap<Place, Standing>,
    closed: BTreeSet<u32>,
    /// How often each lane was opened again.
    generations: BTreeMap<u32, u64>,
}

impl RosterShape {
    fn lanes_of_worker(&self, first: u32) -> impl Iterator<Item = u32> {
        let workers = self.workers;
        (0..self.strands).map(move |strand| first + strand * workers)
    }

    fn lanes_of(&self, pipeline: usize) -> impl Iterator<Item = u32> {
        let lanes = self.strands * self.workers;
        pipeline as u32 * lanes..(pipeline as u32 + 1) * lanes
    }

    /// The lanes of a pipeline's first strand that have Tier-2 nodes.
    fn tier2_lanes(&self, pipeline: usize) -> impl Iterator<Item = u32> {
        let first = pipeline as u32 * self.strands * self.workers;
        first + u32::from(self.tier1_attends)..first + self.workers
    }

    fn pipeline_of(&self, lane: u32) -> usize {
        (lane / (self.strands * self.workers)) as usize
    }

    /// The place on a slice where a lane's contexts are.
    fn place_of(&self, lane: u32, slice: usize) -> Place {
        let pipeline = self.pipeline_of(lane);
        let worker = lane % self.workers;
        let first = pipeline as u32 * self.strands * self.workers;
        let is_own = self.tier1_attends && worker == 0;
        Place { pipeline, slice, lane: (!is_own).then_some(first + worker) }
    }

    /// Every place.
    pub fn places(&self) -> impl Iterator<Item = Place> {
        (0..self.pipelines).flat_map(move |pipeline| {
            (0..self.slices).flat_map(move |slice| {
                let tier2 = self.tier2_lanes(pipeline).map(Some);
                let lanes = std::iter::once(None).chain(tier2);
                lanes.map(move |lane| Place { pipeline, slice, lane })
            })
        })
    }
}

impl Roster {
    /// A cluster with a node at every place.
    pub fn hosted(shape: RosterShape) -> Self {
        Self::with(shape, Standing::Hosted)
    }

    /// A cluster at its start: a node loads at every place.
    pub fn loading(shape: RosterShape) -> Self {
        Self::with(shape, Standing::Loading)
    }

    fn with(shape: RosterShape, standing: Standing) -> Self {
        let places = shape.places().map(|place| (place, standing)).collect();
        Self { shape, places, closed: BTreeSet::new(), generations: BTreeMap::new() }
    }

    /// Whether every place has a node that is ready.
    pub fn is_complete(&self) -> bool {
        self.places.values().all(|standing| *standing == Standing::Hosted)
    }

    /// A node is gone, or is given up. It may have been loading. Returns the lanes that are closed with it.
    pub fn lose(&mut self, place: Place) -> Vec<u32> {
        let before = self.places.insert(place, Standing::Vacant);
        if before != Some(Standing::Hosted) {
            return Vec::new();
        }
        let first = match place.lane {
            None if self.shape.tier1_attends => self.shape.lanes_of(place.pipeline).next(),
            lane => lane,
        };
        let lanes = first.into_iter().flat_map(|first| self.shape.lanes_of_worker(first));
        lanes.filter(|lane| self.closed.insert(*lane)).collect()
    }

    /// The places that a node has connections with.
    pub fn neighbours(&self, place: Place) -> impl Iterator<Item = Place> {
        self.places.keys().copied().filter(move |other| {
            other.pipeline == place.pipeline
                && match (place.lane, other.lane) {
                    (None, None) => other.slice.abs_diff(place.slice) == 1,
                    (Some(_), Some(_)) => false,
                    _ => other.slice == place.slice,
                }
        })
    }

    /// The place on a slice where a lane's contexts are.
    pub fn place_of(&self, lane: u32, slice: usize) -> Place {
        self.shape.place_of(lane, slice)
    }

    /// The places that a lane's steps pass through.
    pub fn way(&self, lane: u32) -> BTreeSet<Place> {
        let places = (0..self.shape.slices).flat_map(|slice| {
            let contexts = self.shape.place_of(lane, slice);
            [Place { lane: None, ..contexts }, contexts]
        });
        places.collect()
    }

    /// Whether a place has a node that is ready.
    pub fn is_hosted(&self, place: Place) -> bool {
        self.places.get(&place) == Some(&Standing::Hosted)
    }

    /// Whether a node is loading at a place.
    pub fn is_loading(&self, place: Place) -> bool {
        self.places.get(&place) == Some(&Standing::Loading)
    }

    /// The places that may be given to a node now, Tier-1 nodes first. A Tier-2 node is of use once its Tier-1 node is
    /// there, or loads.
    pub fn wanted(&self) -> Vec<Place> {
        let is_vacant = |place: &Place| self.places[place] == Standing::Vacant;
        let vacant = self.places.keys().copied().filter(is_vacant);
        let (tier1, mut tier2): (Vec<Place>, Vec<Place>) =
            vacant.partition(|place| place.lane.is_none());
        tier2.retain(|place| !is_vacant(&Place { lane: None, ..*place }));
        [tier1, tier2].concat()
    }

    /// A node begins to load at a vacant place.
    ///
    /// # Panics
    /// If the place is not vacant.
    pub fn load(&mut self, place: Place) {
        let before = self.places.insert(place, Standing::Loading);
        assert_eq!(before, Some(Standing::Vacant), "{place:?} is given away twice");
    }

    /// The node that was loading is ready.
    ///
    /// # Panics
    /// If none was loading there.
    pub fn ready(&mut self, place: Place) -> Back {
        let before = self.places.insert(place, Standing::Hosted);
        assert_eq!(before, Some(Standing::Loading), "{place:?} is ready without loading");
        if self.rests(place.pipeline) {
            return Back::default();
        }
        let lanes = || self.shape.lanes_of(place.pipeline);
        let resumed = lanes().filter(|lane| place.lane.is_none() && !self.closed.contains(lane));
        let is_whole = |lane: &u32| {
            (0..self.shape.slices).all(|slice| self.is_hosted(self.shape.place_of(*lane, slice)))
        };
        let opened: Vec<u32> =
            lanes().filter(|lane| self.closed.contains(lane) && is_whole(lane)).collect();
        let resumed = resumed.collect();
        self.closed.retain(|lane| !opened.contains(lane));
        for lane in &opened {
            *self.generations.entry(*lane).or_default() += 1;
        }
        Back { opened, resumed }
    }

    /// Whether a Tier-1 node of a pipeline is missing.
    pub fn rests(&self, pipeline: usize) -> bool {
        (0..self.shape.slices).any(|slice| !self.is_hosted(Place { pipeline, slice, lane: None }))
    }

    /// Whether steps of a lane can be computed now.
    pub fn is_open(&self, lane: u32) -> bool {
        !self.closed.contains(&lane) && !self.rests(self.shape.pipeline_of(lane))
    }

    /// Closes the lanes of a pipeline that rests: nobody came in time, and their prompts should not wait longer.
    pub fn close(&mut self, pipeline: usize) -> Vec<u32> {
        self.shape.lanes_of(pipeline).filter(|lane| self.closed.insert(*lane)).collect()
    }

    /// How often a lane was opened again: the generation of its steps.
    pub fn generation(&self, lane: u32) -> u64 {
        self.generations.get(&lane).copied().unwrap_or(0)
    }

    /// The newest generation of each of a pipeline's lanes whose contexts are lost. A new Tier-1 node may still get
    /// steps of them.
    pub fn generations_lost(&self, pipeline: usize) -> Vec<(u32, u64)> {
        let lost = |lane: u32| match self.closed.contains(&lane) {
            true => Some((lane, self.generation(lane))),
            false => Some((lane, self.generation(lane).checked_sub(1)?)),
        };
        self.shape.lanes_of(pipeline).filter_map(lost).collect()
    }

    /// Whether a lane is closed.
    pub fn is_closed(&self, lane: u32) -> bool {
        self.closed.contains(&lane)
    }

    /// Whether all lanes are closed.
    pub fn all_closed(&self) -> bool {
        (0..self.shape.pipelines)
            .all(|pipeline| self.shape.lanes_of(pipeline).all(|lane| self.closed.contains(&lane)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(slice: usize, lane: Option<u32>) -> Place {
        Place { pipeline: 0, slice, lane }
    }

    fn roster(tier1_attends: bool, strands: u32) -> Roster {
        Roster::hosted(RosterShape { pipelines: 1, slices: 2, workers: 2, tier1_attends, strands })
    }

    #[test]
    fn a_lane_is_opened_when_all_its_places_are_hosted() {
        let mut roster = roster(false, 2);
        assert_eq!(roster.lose(place(0, Some(1))), [1, 3], "one lane of each strand");
        assert_eq!(roster.lose(place(1, Some(1))), [], "they are closed already");
        assert_eq!(roster.wanted(), [place(0, Some(1)), place(1, Some(1))]);
        roster.load(place(0, Some(1)));
        assert_eq!(roster.wanted(), [place(1, Some(1))]);
        assert_eq!(roster.ready(place(0, Some(1))), Back::default(), "the other is missing");
        roster.load(place(1, Some(1)));
        let back = roster.ready(place(1, Some(1)));
        assert_eq!(back, Back { opened: vec![1, 3], resumed: vec![] });
    }

    #[test]
    fn a_pipeline_rests_without_a_tier1_node_and_keeps_its_contexts() {
        let mut roster = roster(false, 1);
        assert_eq!(roster.lose(place(1, None)), []);
        assert!(roster.rests(0) && !roster.is_open(0) && !roster.is_closed(0));
        roster.lose(place(1, Some(0)));
        assert_eq!(roster.wanted(), [place(1, None)], "its Tier-2 node comes later");
        let neighbours: Vec<Place> = roster.neighbours(place(1, None)).collect();
        assert_eq!(neighbours, [place(0, None), place(1, Some(0)), place(1, Some(1))]);
        roster.load(place(1, None));
        assert_eq!(roster.wanted(), [place(1, Some(0))], "both can load at a time");
        let back = roster.ready(place(1, None));
        assert_eq!(back, Back { opened: vec![], resumed: vec![1] });
        roster.load(place(1, Some(0)));
        assert_eq!(roster.ready(place(1, Some(0))).opened, [0]);
    }

    #[test]
    fn own_lanes_are_lost_with_their_node() {
        let mut roster = roster(true, 1);
        assert_eq!(roster.lose(place(0, None)), [0]);
        roster.load(place(0, None));
        assert_eq!(roster.lose(place(0, None)), [], "it had loaded nothing");
        assert_eq!(roster.close(0), [1], "nobody came in time");
        assert!(roster.all_closed());
        roster.lose(place(1, None));
        for slice in [0, 1] {
            roster.load(place(slice, None));
            let opened = roster.ready(place(slice, None)).opened;
            assert_eq!(opened, if slice == 0 { vec![] } else { vec![0, 1] });
        }
    }

    #[test]
    fn a_cluster_is_complete_when_all_have_loaded() {
        let shape =
            RosterShape { pipelines: 1, slices: 1, workers: 1, tier1_attends: false, strands: 1 };
        let mut roster = Roster::loading(shape);
        assert_eq!(roster.wanted(), []);
        roster.lose(place(0, Some(0)));
        assert_eq!(roster.ready(place(0, None)), Back { opened: vec![], resumed: vec![0] });
        assert!(!roster.is_complete());
        roster.load(place(0, Some(0)));
        assert_eq!(roster.ready(place(0, Some(0))), Back::default(), "nothing was lost");
        assert!(roster.is_complete() && roster.is_open(0));
    }
}
