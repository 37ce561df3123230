//! A peer that has the secret cannot hurt a job: what it may not say costs it its place, if it has one, and the job
//! goes on with the same results. If it held the last lane, the job stops cleanly and the same command continues.

use crate::cluster_support::{Dispatcher, Running, worker};
use crate::common::{Case, mixed_requests};
use crate::liar_support::Liar;
use glinthawk_cluster::{Control, Layout, Link, Role};
use glinthawk_compute::ContextType;
use glinthawk_flight::{Buffer, Kind, Message, ShardId, StepId};
use glinthawk_model::{Model, ModelIdentity};
use std::fs;
use std::net::{TcpListener, TcpStream};

const LINES: u64 = 24;

/// Small batches, so that there are many steps to be disturbed in.
const STEPS: [&str; 4] = ["--batch", "4", "--flights", "2"];

struct Story {
    case: Case,
    expected: Vec<String>,
}

impl Story {
    fn new() -> Self {
        let case = Case::new(mixed_requests(LINES, 4, 12));
        case.run(&[]).expect(0);
        let expected = case.results();
        fs::remove_file(case.output()).expect("the output of one process");
        Self { case, expected }
    }

    fn listen(&self, options: &[&str]) -> Dispatcher {
        Dispatcher::listen(&self.case, "127.0.0.1:0", &[options, &STEPS].concat())
    }

    /// The job ended as if nobody had disturbed it; what the dispatcher said is returned.
    #[track_caller]
    fn expect_done(&self, dispatcher: Dispatcher, honest: Vec<Running>) -> String {
        let finished = dispatcher.running.finish().expect(0);
        for worker in honest {
            worker.finish().expect(0);
        }
        assert!(self.case.results() == self.expected, "other results: {}", finished.stderr);
        fs::remove_file(self.case.output()).expect("the output of the cluster");
        finished.stderr
    }
}

/// What a Tier-2 node does to its Tier-1 node or its dispatcher instead of its work.
type Deed = fn(&Liar, tier1: glinthawk_cluster::net::Peer, asked: &Message, role: &Role);

#[test]
fn a_lie_costs_a_tier2_node_its_place() {
    let story = Story::new();
    let deeds: [(&str, Deed); 9] = [
        ("attended of", |liar, tier1, asked, role| {
            let width = role.config.query_width() * 2;
            let rows = asked.rows() + 1;
            let output = Buffer::zeroed(rows * width);
            liar.send(tier1, Message::attended(asked.step(), asked.layer(), rows, output));
        }),
        ("attended with", |liar, tier1, asked, _| {
            let rows = asked.rows();
            let output = Buffer::zeroed(rows * 2);
            liar.send(tier1, Message::attended(asked.step(), asked.layer(), rows, output));
        }),
        ("was sent attended", |liar, tier1, asked, role| {
            let mut step = asked.step();
            step.shard.lane -= 1;
            let output = Buffer::zeroed(asked.rows() * role.config.query_width() * 2);
            liar.send(tier1, Message::attended(step, asked.layer(), asked.rows(), output));
        }),
        ("was sent launch", |liar, tier1, asked, _| {
            let row = glinthawk_flight::Row { slot: 0, position: 0, page: 0, token: 0 };
            let step = StepId { epoch: 1 << 40, ..asked.step() };
            liar.send(tier1, Message::launch(step, &[row], &[0, 0]));
        }),
        ("was sent control", |liar, tier1, _, role| {
            let again = Control::Introduce(role.lane, role.dial.as_ref().expect("it dials").1);
            liar.send(tier1, again.message(Buffer::default()));
        }),
        ("tokens that another node makes", |liar, _, asked, _| {
            liar.send(liar.peer, Message::home(asked.step(), vec![0]));
        }),
        ("unreadable message", |liar, _, _, _| {
            liar.send(liar.peer, Message::control(vec![255; 40], Buffer::default()));
        }),
        ("control that it may not send", |liar, _, _, _| {
            liar.say(&Control::Leave);
        }),
        ("control that it may not send", |liar, _, _, _| {
            liar.say(&Control::Reported(Vec::new()));
        }),
    ];
    for (expected, deed) in deeds {
        let dispatcher = story.listen(&["--tier1", "1", "--workers", "3"]);
        let honest = ["1", "2"].map(|tier| dispatcher.worker(&["--tier", tier]));
        let liar = Liar::join(&dispatcher.address);
        let role = liar.offer(2);
        assert_eq!(role.lane, Some(1));
        let tier1 = liar.be_ready(&role).expect("it has a Tier-1 node");
        let asked = liar.next(Kind::Attend);
        deed(&liar, tier1, &asked, &role);
        liar.expect_dismissed(liar.peer);
        let said = story.expect_done(dispatcher, honest.into());
        let gone: Vec<&str> =
            said.lines().filter(|line| line.contains("tier2-0-1 is gone")).collect();
        let [line] = gone[..] else { panic!("one line, not: {said}") };
        assert!(line.contains("sent away for") && line.contains(expected), "{expected}: {line}");
    }
}

#[test]
fn a_node_that_does_not_come_to_its_neighbour_loses_its_place() {
    let story = Story::new();
    let dispatcher = story.listen(&["--tier1", "1", "--workers", "3"]);
    let honest = ["1", "2"].map(|tier| dispatcher.worker(&["--tier", tier]));
    let liar = Liar::join(&dispatcher.address);
    assert_eq!(liar.offer(2).lane, Some(1));
    liar.say(&Control::Ready);
    // One that waits takes its place, or nothing would be computed: the cluster was never complete.
    let spare = dispatcher.worker(&["--tier", "2"]);
    liar.expect_dismissed(liar.peer);
    let said = story.expect_done(dispatcher, honest.into_iter().chain([spare]).collect());
    assert!(said.contains("it has not come to tier1-0 for 15s"), "{said}");
}

/// What a Tier-1 node sends instead of a step's tokens.
type Tokens = fn(asked: &Message) -> Message;

const TIER1_LIES: [(&str, Tokens); 4] = [
    ("tokens that were not asked for", |asked| {
        Message::home(asked.step(), encoded(&[(1, 0); 999]))
    }),
    ("tokens that were not asked for", |asked| {
        // No model has that many tokens, however many are due.
        Message::home(asked.step(), encoded(&[(u32::MAX, 0); 1]))
    }),
    ("tokens of a step that was not launched", |asked| {
        Message::home(StepId { epoch: asked.step().epoch + 7, ..asked.step() }, encoded(&[]))
    }),
    ("tokens that another node makes", |asked| {
        let shard = ShardId { lane: 0, ..asked.step().shard };
        Message::home(StepId { shard, ..asked.step() }, encoded(&[]))
    }),
];

/// Tokens as the last slice sends them: token, log-probability of four zero bytes, no alternatives.
fn encoded(tokens: &[(u32, u8)]) -> Vec<u8> {
    let mut bytes = varint(tokens.len() as u64);
    for (token, alternatives) in tokens {
        bytes.extend(varint(u64::from(*token)));
        bytes.extend([0, 0, 0, 0, *alternatives]);
    }
    bytes
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 128 {
        bytes.push(value as u8 | 128);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

#[test]
fn a_lie_costs_a_tier1_node_its_pipeline() {
    let story = Story::new();
    for (expected, lie) in TIER1_LIES {
        let dispatcher = story.listen(&["--pipelines", "2", "--tier1", "1", "--workers", "2"]);
        let honest = dispatcher.worker(&[]);
        let liar = Liar::join(&dispatcher.address);
        let role = liar.offer(1);
        assert_eq!(role.pipeline, 1);
        liar.be_ready(&role);
        let asked = liar.next(Kind::Launch);
        liar.send(liar.peer, lie(&asked));
        liar.expect_dismissed(liar.peer);
        let said = story.expect_done(dispatcher, vec![honest]);
        let line = said.lines().find(|line| line.contains("pipeline1-tier1-0 is gone"));
        let line = line.unwrap_or_else(|| panic!("no line in: {said}"));
        assert!(line.contains("sent away for") && line.contains(expected), "{expected}: {line}");
    }
}

#[test]
fn a_liar_that_holds_the_last_lane_stops_the_job_cleanly() {
    let story = Story::new();
    let dispatcher = story.listen(&["--tier1", "1", "--workers", "1", "--replace-within", "0s"]);
    let liar = Liar::join(&dispatcher.address);
    liar.be_ready(&liar.offer(1));
    let asked = liar.next(Kind::Launch);
    liar.send(liar.peer, TIER1_LIES[0].1(&asked));
    let failed = dispatcher.running.finish().expect(1);
    for part in ["error: worker tier1-0 is gone", "sent away for", "the same command continues"] {
        assert!(failed.stderr.contains(part), "{part}: {}", failed.stderr);
    }
    story.case.run(&[]).expect(0);
    assert!(story.case.results() == story.expected, "other results");
}

#[test]
fn peers_without_a_role_are_sent_away() {
    let story = Story::new();
    let mut dispatcher = story.listen(&["--tier1", "1", "--workers", "3"]);
    // Before there are roles: offers that nobody could mean, and none at all.
    for nonsense in [Control::Ready, Control::Failed("\u{1b}[31m no".to_owned())] {
        let peer = Liar::join(&dispatcher.address);
        peer.say(&nonsense);
        peer.expect_dismissed(peer.peer);
    }
    let honest = ["1", "2"].map(|tier| dispatcher.worker(&["--tier", tier]));
    // One with a role that does nothing, and knows where its Tier-1 node is.
    let idle = Liar::join(&dispatcher.address);
    let role = idle.offer(2);
    let tier1 = role.dial.as_ref().expect("it has a Tier-1 node").0.clone();
    let step = StepId { shard: ShardId { flight: 0, lane: 0 }, epoch: 1 };
    let lies = || {
        [
            Control::Failed("all is lost".to_owned()).message(Buffer::default()),
            Control::Ready.message(Buffer::default()),
            Control::Introduce(None, 0).message(Buffer::default()),
            Control::Introduce(Some(0), 0).message(Buffer::default()),
            Control::Introduce(Some(1), 1).message(Buffer::default()),
            Message::control(vec![255; 40], Buffer::default()),
            Message::control(Vec::new(), Buffer::zeroed(1 << 20)),
            Message::attended(step, 0, 1, Buffer::zeroed(64)),
            Message::home(step, vec![0]),
        ]
    };
    let disturb = |address: &str| {
        for lie in lies() {
            let stranger = Liar::join(address);
            stranger.send(stranger.peer, lie);
            stranger.expect_dismissed(stranger.peer);
            // And one that only comes and goes.
            drop(Liar::join(address));
        }
    };
    // While Tier 1 waits for its lanes, and while the job runs.
    disturb(&tier1);
    idle.be_ready(&role);
    idle.next(Kind::Attend);
    disturb(&tier1);
    disturb(&dispatcher.address);
    assert!(!dispatcher.running.has_ended(), "all was over before it was disturbed");
    drop(idle);
    let said = story.expect_done(dispatcher, honest.into());
    assert!(!said.contains('\u{1b}'), "a peer's words reach the terminal: {said}");
}

#[test]
fn idle_connections_do_not_keep_workers_out() {
    let story = Story::new();
    let dispatcher = story.listen(&["--tier1", "1", "--workers", "2"]);
    let dial = |_| TcpStream::connect(&dispatcher.address).expect("the dispatcher listens");
    let idle: Vec<TcpStream> = (0..400).map(dial).collect();
    let honest = ["1", "2"].map(|tier| dispatcher.worker(&["--tier", tier]));
    let said = story.expect_done(dispatcher, honest.into());
    drop(idle);
    let refused = said.matches("refused a connection").count();
    assert!(refused < 100, "{refused} lines about 400 strangers");
    assert!(said.contains("made way for newer connections"), "{said}");
}

#[test]
fn a_missing_report_costs_only_statistics() {
    let case = Case::new("{\"custom_id\":\"one\",\"prompt\":\"word\",\"max_tokens\":4}\n");
    let options = ["--tier1", "1", "--workers", "3"];
    let dispatcher = Dispatcher::listen(&case, "127.0.0.1:0", &options);
    let honest = ["1", "2"].map(|tier| dispatcher.worker(&["--tier", tier]));
    let silent = Liar::join(&dispatcher.address);
    silent.be_ready(&silent.offer(2));
    let finished = dispatcher.running.finish().expect(0);
    let line = finished.stderr.lines().find(|line| line.contains("did not report"));
    assert!(line.is_some_and(|line| line.contains("tier2-0-1")), "{}", finished.stderr);
    assert_eq!(case.results().len(), 1);
    for worker in honest {
        worker.finish().expect(0);
    }
}

#[test]
fn a_worker_that_dials_its_neighbour_notices_that_the_dispatcher_left() {
    let dispatcher = Liar::dispatcher();
    let running = Running::start(&mut worker(&dispatcher.address, &["--tier", "2"]));
    let peer = dispatcher.joined();
    // It answers nothing, and is never closed.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let layout = Layout {
        pipelines: 1,
        slices: 1,
        tier2: 1,
        tier1_attends: false,
        strands: 1,
        batch: 4,
        flights: 1,
        own_batch: None,
        own_first: false,
        chunk: 4,
        page_positions: 16,
        context_max: 64,
        context_type: ContextType::Bf16,
        whole_flights: false,
        shares_cores: false,
        sharing: true,
        drafts: None,
    };
    let model = Model::dummy("tiny").expect("a shape");
    let role = Role {
        pipeline: 0,
        slice: 0,
        lane: Some(0),
        layout,
        lane_pages: vec![16],
        model: crate::common::TINY.to_owned(),
        identity: ModelIdentity::of_weights(&model, &mut |_, _| ()),
        config: model.config().clone(),
        kind: "portable".to_owned(),
        dial: Some((silent.local_addr().expect("it is bound").to_string(), 1)),
        callers: Vec::new(),
        link: Link::default(),
        trace: false,
    };
    let message = Control::Role(Box::new(role)).message(Buffer::default());
    dispatcher.controller.send(peer, message).expect("the worker is there");
    let (dialled, _) = silent.accept().expect("the worker dials");
    dispatcher.controller.shutdown();
    running.finish().expect(0);
    drop(dialled);
}
