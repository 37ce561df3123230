//! A dispatcher that launches a shard's next step while one is in the air, over a device that knows the tokens in
//! between: every prompt gets the completion that it gets without.

use glinthawk_protocol::virtual_time::model;
use glinthawk_protocol::{
    Biases, Completion, Dispatcher, DispatcherAction, DispatcherConfig, DispatcherEvent, Finish,
    Generated, Home, Launch, Merge, Prompt, PromptId, Row, Sampling, TOKEN_NONE, TOKEN_PENDING,
};
use std::collections::{BTreeMap, VecDeque};

/// Positions of a page.
const PAGE: u32 = 16;

/// A small seeded generator (splitmix64).
struct Random(u64);

impl Random {
    fn within(&mut self, low: u64, high: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        low + model::mix(self.0, 99) % (high - low + 1)
    }
}

/// A device with the contexts of all slots, in pages; steps run in the order of their launches.
#[derive(Default)]
struct Device {
    tables: BTreeMap<u32, Vec<u32>>,
    /// (page, offset) → token
    stored: BTreeMap<(u32, u32), u32>,
    /// The token that was picked last for each slot.
    picked: BTreeMap<u32, u32>,
    pending: usize,
}

impl Device {
    fn bind(&mut self, row: &Row) {
        let (table, number) = (self.tables.entry(row.slot).or_default(), row.position / PAGE);
        table.truncate(number as usize);
        assert_eq!(table.len(), number as usize, "a row without those before it");
        table.push(row.page);
    }

    fn run(&mut self, launch: &Launch) -> Home {
        launch.shared.iter().for_each(|row| self.bind(row));
        for row in &launch.rows {
            self.pending += usize::from(row.token == TOKEN_PENDING);
            let token = match row.token {
                TOKEN_PENDING => self.picked[&row.slot],
                token => token,
            };
            self.bind(row);
            self.stored.insert((row.page, row.position % PAGE), token);
        }
        let tokens = launch.samples.iter().map(|sample| {
            let row = launch.rows[sample.row as usize];
            assert_eq!(sample.position, row.position + 1);
            let table = &self.tables[&row.slot];
            let mut hash = sample.sampling.seed;
            for position in 0..=row.position {
                let page = table[(position / PAGE) as usize];
                let token = self.stored[&(page, position % PAGE)];
                hash = model::mix(hash, u64::from(token) + 1);
            }
            for &(token, bias) in &sample.biases {
                hash = model::mix(hash, u64::from(token) ^ u64::from(bias.to_bits()));
            }
            let token = if hash % 997 < 5 { TOKEN_NONE } else { (hash % 23) as u32 };
            self.picked.insert(row.slot, token);
            Generated { token, logprob: 0.0, alternatives: Vec::new() }
        });
        Home { step: launch.step, tokens: tokens.collect() }
    }
}

/// Runs prompts, each submitted at a step; a watcher keeps two tokens less once it has seen token 5 four tokens in.
fn run(
    config: &DispatcherConfig,
    prompts: &[(usize, Prompt)],
) -> (BTreeMap<PromptId, Completion>, usize, usize) {
    let mut dispatcher = Dispatcher::new(config.clone());
    let mut device = Device::default();
    let (mut air, mut actions) = (VecDeque::new(), Vec::new());
    let (mut finished, mut seen) = (BTreeMap::new(), BTreeMap::<PromptId, Vec<u32>>::new());
    let mut steps = 0;
    let mut waiting = prompts.iter().peekable();
    while waiting.peek().is_some() || !dispatcher.is_idle() {
        while let Some((_, prompt)) = waiting.next_if(|(step, _)| *step <= steps) {
            dispatcher.submit(prompt.clone(), steps as u64).expect("it fits");
        }
        dispatcher.fill(&mut actions);
        dispatcher.fill(&mut actions);
        steps += 1;
        for action in actions.drain(..) {
            let DispatcherAction::Launch(launch) = action else { panic!("only launches") };
            air.push_back(device.run(&launch));
        }
        assert!(air.len() <= 2 * config.flights as usize);
        let Some(home) = air.pop_front() else { continue };
        dispatcher.on(DispatcherEvent::Home(home), steps as u64, &mut actions);
        let mut stops = Vec::new();
        for action in actions.drain(..) {
            match action {
                DispatcherAction::Launch(_) => panic!("nothing is launched before it is filled"),
                DispatcherAction::Finish(completion) => {
                    assert!(finished.insert(completion.id, completion).is_none(), "twice");
                }
                DispatcherAction::Token(id, token) => {
                    let seen = seen.entry(id).or_default();
                    seen.push(token.token);
                    if seen.len() > 3 && token.token == 5 {
                        stops.push(DispatcherEvent::Stop(id, seen.len() - 2));
                    }
                }
            }
        }
        for stop in stops {
            dispatcher.on(stop, steps as u64, &mut actions);
        }
        for action in actions.drain(..) {
            let DispatcherAction::Finish(completion) = action else { panic!("only ends") };
            assert!(finished.insert(completion.id, completion).is_none(), "twice");
        }
    }
    (finished, device.pending, steps)
}

fn scenario(seed: u64) -> (DispatcherConfig, Vec<(usize, Prompt)>) {
    let mut random = Random(seed);
    let context_max = random.within(20, 120) as u32;
    let pages = u64::from(context_max.div_ceil(16));
    let config = DispatcherConfig {
        flights: random.within(1, 2) as u32,
        slices: 1,
        pipelines: 1,
        weights_positions: 100,
        batch: random.within(1, 24) as u32,
        own_lane: None,
        filled_first: None,
        chunk: random.within(1, 40) as u32,
        lane_pages: vec![random.within(pages, pages * 8) as u32],
        context_max,
        oversubscription: random.within(1, 8) as f32,
        merge: Merge::Ready,
        page_positions: PAGE,
        nodes_apart: false,
        run_ahead: false,
        drafts: None,
        sharing: false,
    };
    let penalised = random.within(0, 3) == 0;
    let beginning: Vec<u32> = (0..context_max).map(|_| random.within(0, 22) as u32).collect();
    let prompts = (0..random.within(1, 30)).map(|_| {
        let given = random.within(1, u64::from(context_max) - 1);
        let alike = random.within(0, given) as usize;
        let mut tokens: Vec<u32> = (0..given).map(|_| random.within(0, 22) as u32).collect();
        tokens[..alike].copy_from_slice(&beginning[..alike]);
        let presence_penalty = if penalised && random.within(0, 5) == 0 { 0.5 } else { 0.0 };
        let sampling = Sampling { seed: random.within(0, 1 << 40), ..Sampling::default() };
        let prompt = Prompt {
            tokens,
            tokens_max: random.within(1, 100) as u32,
            stop_ids: if random.within(0, 3) == 0 { Vec::new() } else { vec![0] },
            sampling,
            biases: Biases { presence_penalty, ..Biases::default() },
            watched: random.within(0, 2) == 0,
            priority: random.within(0, 2) as i32 - 1,
        };
        (random.within(0, 30) as usize, prompt)
    });
    let mut prompts: Vec<(usize, Prompt)> = prompts.collect();
    prompts.sort_by_key(|(step, _)| *step);
    (config, prompts)
}

#[test]
fn completions_do_not_depend_on_running_ahead() {
    let (mut pending, mut shared, mut without) = (0, 0, 0);
    for seed in 0..400 {
        let (config, prompts) = scenario(seed);
        let (mut expected, none, _) = run(&config, &prompts);
        assert_eq!(none, 0, "seed {seed}: every token is known");
        for sharing in [false, true] {
            let ahead = DispatcherConfig { run_ahead: true, sharing, ..config.clone() };
            let (found, some, _) = run(&ahead, &prompts);
            // Names are given in the order of submission, which is the same.
            assert_eq!(found.len(), prompts.len(), "seed {seed}");
            for (id, completion) in found {
                let expected = expected.get_mut(&id).expect("the same names");
                expected.shared = completion.shared;
                assert_eq!(completion, *expected, "seed {seed}");
                assert!(completion.tokens.iter().all(|generated| generated.token < 23));
                without += usize::from(completion.finish == Finish::NoToken);
                shared += completion.shared;
            }
            pending += some;
        }
    }
    assert!(pending > 10_000, "{pending} rows were launched before their token was known");
    assert!(shared > 10_000, "{shared} tokens were shared");
    assert!(without > 100, "{without} prompts ended without a token");
}

#[test]
fn a_step_is_launched_ahead_of_every_token_but_the_first() {
    let config = DispatcherConfig {
        flights: 1,
        slices: 1,
        pipelines: 1,
        weights_positions: 100,
        batch: 8,
        own_lane: None,
        filled_first: None,
        chunk: 8,
        lane_pages: vec![64],
        context_max: 128,
        oversubscription: 1.0,
        merge: Merge::Ready,
        page_positions: PAGE,
        nodes_apart: false,
        run_ahead: true,
        drafts: None,
        sharing: true,
    };
    let prompt = Prompt { tokens: vec![1, 2, 3], tokens_max: 20, ..Prompt::default() };
    let (finished, pending, steps) = run(&config, &[(0, prompt.clone())]);
    assert_eq!(finished[&PromptId(0)].finish, Finish::Length);
    assert_eq!((pending, steps), (19, 20), "nothing is computed beyond the last token");
    // Who looks back at its tokens waits for them.
    let sampling = Sampling { repetition_penalty: 1.1, ..Sampling::default() };
    let (_, pending, steps) = run(&config, &[(0, Prompt { sampling, ..prompt })]);
    assert_eq!((pending, steps), (0, 20));
}
