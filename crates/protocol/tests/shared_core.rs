//! A Tier-1 node on a core that all nodes share: the parts of a flight wait for each other, but not for ever.

use glinthawk_protocol::{
    Attended, Launch, Merge, Parcel, Row, ShardId, StepId, Tier1Node, Tier1Work,
};

const LAYERS: u32 = 2;
/// What every batch takes.
const BATCH_NS: u64 = 10;

/// The node, its clock, and the lanes whose shards attend, each with its step and layer.
struct Bench {
    node: Tier1Node<()>,
    now_ns: u64,
    attending: Vec<Attended>,
}

impl Bench {
    /// After two laps of a flight on these lanes.
    fn new(lanes: &[u32]) -> Self {
        let node = Tier1Node::new(LAYERS, 256, Merge::SharedCore);
        let mut bench = Self { node, now_ns: 1000, attending: Vec::new() };
        bench.lap(lanes, 1);
        bench.lap(lanes, 2);
        bench
    }

    /// The step of this number of a lane's shard enters.
    fn enter(&mut self, lane: u32, epoch: u64) {
        let step = StepId { shard: ShardId { flight: 0, lane }, epoch };
        let rows = vec![Row { slot: 0, position: 0, page: 0, token: 0 }];
        let launch = Launch { step, rows, shared: Vec::new(), samples: Vec::new() };
        assert!(self.node.arrive(launch, ()));
    }

    /// Attention of these lanes is done.
    fn attend(&mut self, lanes: &[u32]) {
        for attended in std::mem::take(&mut self.attending) {
            match lanes.contains(&attended.step.shard.lane) {
                true => assert!(self.node.attended(attended, ())),
                false => self.attending.push(attended),
            }
        }
    }

    /// Computes what the node wants to now; the lanes of it.
    fn compute(&mut self) -> Vec<u32> {
        let Some(work) = self.node.start(self.now_ns, 1) else { return Vec::new() };
        let lanes = lanes(&work);
        self.now_ns += BATCH_NS;
        let attending = &mut self.attending;
        self.node.computed(work, self.now_ns, |_, parcel| match parcel {
            Parcel::Attend(attend, ()) => {
                attending.push(Attended { step: attend.step, layer: attend.layer });
            }
            Parcel::Home(_) | Parcel::Launch(..) => {}
            Parcel::Attended(..) => panic!("Tier 1 attends to nothing"),
        });
        lanes
    }

    /// The node does nothing until it has waited long enough.
    fn wait(&mut self) {
        assert!(self.compute().is_empty());
        self.now_ns = self.node.patient_until_ns().expect("it waits");
    }

    /// The whole flight goes through.
    fn lap(&mut self, lanes: &[u32], epoch: u64) {
        lanes.iter().for_each(|lane| self.enter(*lane, epoch));
        assert_eq!(self.compute(), lanes);
        self.stay(lanes);
    }

    /// What has entered goes through all layers.
    fn stay(&mut self, lanes: &[u32]) {
        for _ in 0..LAYERS {
            self.attend(lanes);
            assert_eq!(self.compute(), lanes);
        }
    }
}

fn lanes(work: &Tier1Work<()>) -> Vec<u32> {
    let mut lanes: Vec<u32> = work.tasks.iter().map(|task| task.launch.step.shard.lane).collect();
    lanes.sort_unstable();
    lanes
}

#[test]
fn a_flight_that_comes_in_parts_is_computed_together() {
    let mut bench = Bench::new(&[0, 1, 2]);
    bench.enter(1, 3);
    assert!(bench.compute().is_empty(), "the others are on their way");
    bench.enter(0, 3);
    bench.enter(2, 3);
    assert_eq!(bench.compute(), [0, 1, 2]);
    bench.attend(&[2]);
    assert!(bench.compute().is_empty(), "the others attend");
    bench.attend(&[0, 1]);
    assert_eq!(bench.compute(), [0, 1, 2]);
}

#[test]
fn a_shard_that_fell_behind_catches_up() {
    let mut bench = Bench::new(&[0, 1]);
    bench.enter(0, 3);
    bench.enter(1, 3);
    assert_eq!(bench.compute(), [0, 1]);
    bench.attend(&[0]);
    bench.wait();
    assert_eq!(bench.compute(), [0], "it has waited long enough");
    bench.attend(&[0]);
    assert_eq!(bench.compute(), [0], "it waits once in a lap");
    bench.enter(0, 4);
    assert!(bench.compute().is_empty(), "it waits again in the next");
    bench.attend(&[1]);
    assert_eq!(bench.compute(), [1]);
    bench.attend(&[1]);
    assert_eq!(bench.compute(), [1]);
    bench.enter(1, 4);
    assert_eq!(bench.compute(), [0, 1]);
}

#[test]
fn a_shard_that_does_not_come_again_is_awaited_once() {
    let mut bench = Bench::new(&[0, 1]);
    bench.enter(0, 3);
    assert!(bench.compute().is_empty());
    let waited_ns = bench.node.patient_until_ns().expect("it waits") - bench.now_ns;
    assert_eq!(waited_ns, (1 + u64::from(LAYERS)) * BATCH_NS, "as long as the flight stays");
    bench.now_ns += waited_ns;
    assert_eq!(bench.compute(), [0]);
    bench.stay(&[0]);
    bench.lap(&[0], 4);
}

#[test]
fn a_shard_whose_attention_never_comes_delays_two_laps() {
    let mut bench = Bench::new(&[0, 1]);
    bench.enter(0, 3);
    bench.enter(1, 3);
    assert_eq!(bench.compute(), [0, 1]);
    bench.attend(&[0]);
    bench.wait();
    assert_eq!(bench.compute(), [0]);
    bench.attend(&[0]);
    assert_eq!(bench.compute(), [0]);
    bench.enter(0, 4);
    bench.wait();
    assert_eq!(bench.compute(), [0]);
    bench.stay(&[0]);
    bench.lap(&[0], 5);
}

#[test]
fn a_lap_in_which_the_process_was_stopped_makes_no_long_wait() {
    let mut bench = Bench::new(&[0, 1]);
    bench.enter(0, 3);
    bench.enter(1, 3);
    assert_eq!(bench.compute(), [0, 1]);
    bench.now_ns += 1_000_000;
    bench.stay(&[0, 1]);
    bench.enter(0, 4);
    assert!(bench.compute().is_empty());
    let until_ns = bench.node.patient_until_ns().expect("it waits");
    assert!(until_ns - bench.now_ns < 1000);
}
