//! Who is seated where, in virtual time: no more prompts than have room in the end, and none beside a GPU's own lane
//! where that would not pay.

use glinthawk_flight::Row;
use glinthawk_protocol::virtual_time::{
    Costs, Fault, FaultKind, Planted, SimulatedCluster, VirtualRun, Wire, run,
};
use glinthawk_protocol::{DispatcherConfig, LaneShape, Merge, NodeAddress, Prompt, Stage};

/// Every batch takes as long as reading weights. Attention on lanes beside the first takes `beside_ns`.
struct Steady {
    beside_ns: u64,
    /// Rows that attended there in the first layer.
    beside_rows: usize,
}

impl Costs for Steady {
    fn tier1_ns(&mut self, _slice: usize, _stage: Stage, _rows: usize) -> u64 {
        1000
    }

    fn tier2_ns(&mut self, _slice: usize, lane: u32, rows: &[Row]) -> u64 {
        if lane == 0 {
            return 100;
        }
        self.beside_rows += rows.len();
        self.beside_ns
    }

    fn link_ns(&mut self, _link: Wire, _rows: usize) -> (u64, u64) {
        (0, 10)
    }
}

/// Counts the rows that attended on each lane.
struct Counted<'a>(&'a mut [usize; 4]);

impl Costs for Counted<'_> {
    fn tier1_ns(&mut self, _slice: usize, _stage: Stage, _rows: usize) -> u64 {
        1000
    }

    fn tier2_ns(&mut self, _slice: usize, lane: u32, rows: &[Row]) -> u64 {
        self.0[lane as usize] += rows.len();
        100
    }

    fn link_ns(&mut self, _link: Wire, _rows: usize) -> (u64, u64) {
        (0, 10)
    }
}

/// Attention takes as long as it has positions; on the last of four lanes four times as long.
struct OneSlow;

impl Costs for OneSlow {
    fn tier1_ns(&mut self, _slice: usize, _stage: Stage, _rows: usize) -> u64 {
        100
    }

    fn tier2_ns(&mut self, _slice: usize, lane: u32, rows: &[Row]) -> u64 {
        let positions: u64 = rows.iter().map(|row| u64::from(row.position)).sum();
        positions * if lane == 3 { 4 } else { 1 }
    }

    fn link_ns(&mut self, _link: Wire, _rows: usize) -> (u64, u64) {
        (0, 10)
    }
}

fn cluster(lane_pages: Vec<u32>, own_lane: Option<LaneShape>) -> SimulatedCluster {
    SimulatedCluster {
        slice_layers: vec![1],
        tier1_rows_max: 1024,
        works_max: 1,
        dispatcher: DispatcherConfig {
            flights: 1,
            slices: 1,
            pipelines: 1,
            weights_positions: 1_000,
            batch: 64,
            own_lane,
            filled_first: None,
            chunk: 64,
            lane_pages,
            page_positions: 16,
            context_max: 256,
            oversubscription: 3.0,
            merge: Merge::Ready,
            nodes_apart: true,
            run_ahead: false,
            drafts: None,
            sharing: false,
        },
        faults: Vec::new(),
        load_ns: 0,
        replace_within_ns: 0,
        patience_ns: 0..=0,
        planted: None,
    }
}

/// Runs prompts of 16 tokens that may generate 112: eight pages in the end. `stop_ids` may end them before.
fn check(
    cluster: &SimulatedCluster,
    prompts: usize,
    stop_ids: &[u32],
    costs: &mut impl Costs,
) -> VirtualRun {
    let prompt = |number: u32| Prompt {
        tokens: vec![number % 97; 16],
        tokens_max: 112,
        stop_ids: stop_ids.to_vec(),
        ..Prompt::default()
    };
    let prompts = (0..prompts as u32).map(|number| (0, prompt(number))).collect();
    run(cluster, prompts, costs).expect("every prompt ends")
}

#[test]
fn prompts_that_nothing_ends_are_not_seated_without_room() {
    let costs = &mut Steady { beside_ns: 0, beside_rows: 0 };
    let known = check(&cluster(vec![160], None), 100, &[], costs);
    assert!(known.stats.preemptions < 5, "{}", known.stats.preemptions);
    assert!(known.stats.pages_used_max > 140, "{} pages are used", known.stats.pages_used_max);
}

#[test]
fn those_that_go_on_tell_how_long_others_will() {
    let costs = &mut Steady { beside_ns: 0, beside_rows: 0 };
    // A token that is never generated could end them, so that a third is expected at first.
    let run = check(&cluster(vec![160], None), 400, &[u32::MAX], costs);
    let dropped = run.stats.preemptions;
    assert!((1..80).contains(&dropped), "{dropped} were dropped, which the first crowd may be");
}

#[test]
fn lanes_that_share_cores_are_a_reserve() {
    // Two strands with a lane of their own and one beside it each; a lane has room for 20 prompts.
    let rows = |prompts, faults| {
        let mut cluster = cluster(vec![160; 4], None);
        cluster.dispatcher.filled_first = Some(2);
        cluster.faults = faults;
        let mut rows = [0; 4];
        check(&cluster, prompts, &[], &mut Counted(&mut rows));
        rows
    };
    let [one, beside_one, other, beside_other] = rows(80, Vec::new());
    assert_eq!((beside_one, beside_other), (0, 0), "half of them wait");
    assert_eq!(one, other);
    let dies = |lane| Fault {
        node: NodeAddress::Tier2(0, lane),
        at_ns: 20_000,
        kind: FaultKind::Dies { noticed_ns: 0 },
        back_ns: None,
    };
    let [_, beside_one, _, beside_other] = rows(80, vec![dies(0)]);
    assert_eq!((beside_one, beside_other), (0, 0), "one lane is left that prompts wait for");
    let [_, beside_one, _, beside_other] = rows(80, vec![dies(0), dies(2)]);
    assert!(beside_one > 0 && beside_other > 0);
}

#[test]
fn slower_lanes_take_prompts_where_that_pays() {
    let own = Some(LaneShape { flights: 1, batch: 64 });
    // Room for 20 prompts on lane 0 and for others beside it.
    let beside = |room: u32, prompts, beside_ns| {
        let mut costs = Steady { beside_ns, beside_rows: 0 };
        check(&cluster(vec![160, 8 * room], own), prompts, &[], &mut costs);
        costs.beside_rows
    };
    let all = 120 * 127;
    assert!(beside(64, 120, 1000) > all / 3, "{} of {all}", beside(64, 120, 1000));
    // It would not be through with what it begins: those of its first step are recalled.
    assert!(beside(64, 120, 100_000) < all / 20, "{}", beside(64, 120, 100_000));
    // It has room for fewer rows than lane 0 computes at a time.
    assert_eq!(beside(16, 120, 1000), 0);
    assert_eq!(beside(64, 20, 1000), 0, "all fit on lane 0");
}

#[test]
fn a_slow_lane_gets_fewer_contexts() {
    let mut even = cluster(vec![160; 4], None);
    even.planted = Some(Planted::NoClock);
    let weighed = SimulatedCluster { planted: None, ..even.clone() };
    let [even, weighed] = [even, weighed].map(|cluster| check(&cluster, 600, &[], &mut OneSlow));
    assert_eq!(even.stats.generated_tokens, weighed.stats.generated_tokens);
    let (before, after) = (even.end_ns, weighed.end_ns);
    println!("{before} ns if all lanes get the same, {after} ns if a slow one gets fewer contexts");
    assert!(after * 10 < before * 9, "{after} ns instead of {before} ns");
}
