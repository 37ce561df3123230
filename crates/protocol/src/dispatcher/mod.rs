//! The dispatcher: seats prompts in flights, binds their contexts to lanes, counts every page,
//! and turns tokens that come home into completions. It decides everything that two nodes would
//! have to agree on, and does no I/O.

mod check;
mod config;
mod drafts;
mod entry;
mod fill;
mod flights;
mod hashes;
mod lanes;
mod need;
mod newcomers;
mod pages;
mod sharing;
mod stragglers;

pub use config::{DispatcherConfig, LaneShape, OVERSUBSCRIPTION, lane_flights};
pub use drafts::DRAFTS_MAX;
pub use hashes::page_hashes;
pub use pages::lane_pages;

use crate::histogram::Histogram;
use crate::message::{Home, Launch};
use crate::prompt::{Completion, Finish, Prompt, PromptId};
use drafts::{DraftCosts, Guesses, LOOK_MAX};
use entry::Entry;
#[cfg(doc)]
use glinthawk_flight::TOKEN_PENDING;
use glinthawk_flight::{Generated, ShardId, StepId, TOKEN_NONE, pages_for};
use pages::PagePool;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Prompts that wait at least, so that a small cluster is not starved by a slow reader.
const WAITING_MIN: usize = 16;
/// Completions of the length expected at first that count beside those seen.
const COMPLETIONS_ASSUMED: u64 = 16;
/// Steps of a lane over which their time is averaged.
const STEPS_AVERAGED: u64 = 8;
/// A prompt that outlived the expectation is expected to go on for a page and this part of what it has.
const OUTLIVED_PART: u32 = 4;

/// What happens to the dispatcher.
pub enum DispatcherEvent {
    /// The watcher of a prompt wants its completion to end after this many tokens.
    Stop(PromptId, usize),
    /// A shard came home.
    Home(Home),
    /// A step is lost, or given up: its shard is launched again with the same rows. Nothing happens
    /// where it came home or was given up before.
    Relaunch(StepId),
    /// A lane's contexts are gone. Its prompts are computed again elsewhere.
    LaneLost(u32),
    /// All nodes of a lane that was lost are there again, with no contexts.
    LaneOpened(u32),
    /// A lane is to be lost soon: no further context begins there.
    LaneLeaving(u32),
}

/// What the dispatcher wants done.
#[derive(Debug)]
pub enum DispatcherAction {
    /// Send to slice 0.
    Launch(Launch),
    /// A watched prompt has a new token.
    Token(PromptId, Generated),
    /// A prompt is finished.
    Finish(Completion),
}

/// Why a prompt cannot be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// No tokens in, or none asked for.
    Empty,
    /// More tokens than a context may have, with room for one more.
    TooLong {
        /// Tokens of the prompt.
        tokens: u32,
        /// Positions a context may have here.
        context_max: u32,
    },
}

impl std::fmt::Display for Rejection {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Empty => write!(formatter, "the prompt has no tokens, or none are asked for"),
            Self::TooLong { tokens, context_max } => {
                write!(
                    formatter,
                    "the prompt has {tokens} tokens, and a context has {context_max} positions"
                )
            }
        }
    }
}

impl std::error::Error for Rejection {}

/// Counters of a run.
#[derive(Clone, Default)]
pub struct DispatcherStats {
    /// Prompts finished.
    pub prompts: u64,
    /// Input tokens of the finished prompts.
    pub prompt_tokens: u64,
    /// Tokens generated for the finished prompts.
    pub generated_tokens: u64,
    /// Input tokens computed or shared, of finished and unfinished prompts. None counts twice.
    pub prefilled: u64,
    /// Input tokens that were not computed, because another prompt's pages held them.
    pub shared: u64,
    /// Tokens generated, for finished and unfinished prompts.
    pub sampled: u64,
    /// Tokens that were drafted.
    pub drafted: u64,
    /// Those of them that were right: each saved a step of its prompt, unless a watcher ended it before.
    pub drafts_right: u64,
    /// Rows that came home, of finished and unfinished prompts.
    pub rows_computed: u64,
    /// Prompts whose context was dropped because pages ran out, or because a faster lane was free, to be recomputed.
    pub preemptions: u64,
    /// Prompts whose context was lost with its lane, to be recomputed.
    pub prompts_lost: u64,
    /// Rows computed a second time because of either.
    pub rows_recomputed: u64,
    /// Prompts that went on in another flight of their lane.
    pub regrouped: u64,
    /// Steps that were given up and launched again.
    pub relaunches: u64,
    /// Submission to first token.
    pub time_to_first_token: Histogram,
    /// Mean time between a prompt's tokens after the first.
    pub time_per_output_token: Histogram,
    /// Most pages in use at once, over all lanes.
    pub pages_used_max: u32,
}

/// How far a prompt inside is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptStanding {
    /// Input tokens that were never computed yet.
    pub prompt_left: u32,
    /// Tokens generated so far.
    pub generated: u32,
    /// Tokens it may generate in all.
    pub generated_max: u32,
}

/// Prompts with rows in a launch, with the number of rows and how many of the last ones end in a token.
type Aboard = Vec<(PromptId, u32, u32)>;

/// A flight's part on one lane.
#[derive(Default)]
struct ShardState {
    /// Launches so far.
    epoch: u64,
    in_air: bool,
    /// When the step in the air was launched.
    launched_ns: u64,
    /// Seated prompts, oldest first.
    seated: Vec<PromptId>,
    /// Who is in the launch that is in the air.
    aboard: Aboard,
    /// Who is in the launch after it, if that is in the air too.
    ahead: Option<Aboard>,
}

struct Lane {
    pages: PagePool,
    slots_free: Vec<u32>,
    /// How often it was opened again.
    generation: u64,
    lost: bool,
    /// Whether no further context begins there.
    leaving: bool,
    /// How long its steps take; `None` before the first came home. It falls at once and rises slowly, because steps in
    /// which prompts begin take longer than those that follow.
    step_ns: Option<u64>,
    /// How many times as long its steps take as those of the others, in thousandths.
    slowness: u64,
    /// Who computes the page with a hash.
    computing: HashMap<u64, PromptId>,
    /// How many of the lane's prompts have a page with a hash, or will.
    promised: HashMap<u64, u32>,
}

/// What decides whose turn it is: the priority, then the order of submission. The lowest goes first,
/// the highest makes way.
type Rank = (i32, PromptId);

/// The state machine; see the module's head.
pub struct Dispatcher {
    config: DispatcherConfig,
    /// Positions a context may have here: the model's limit or the smallest lane's pages.
    context_max: u32,
    entries: HashMap<PromptId, Entry>,
    /// Waiting prompts by rank: preempted ones come before younger ones by themselves.
    queue: BTreeSet<Rank>,
    shards: BTreeMap<ShardId, ShardState>,
    lanes: Vec<Lane>,
    /// Where tokens are drafted.
    guesses: Option<(Guesses, DraftCosts)>,
    submitted: u64,
    /// When something happened last.
    now_ns: u64,
    stats: DispatcherStats,
}

impl Dispatcher {
    /// A dispatcher with nothing to do.
    ///
    /// # Panics
    /// If the configuration has no flight, row, chunk, lane, page or position of a page.
    pub fn new(config: DispatcherConfig) -> Self {
        assert!(config.flights > 0 && config.batch > 0 && config.chunk > 0);
        assert!(config.slices > 0 && config.pipelines > 0 && config.weights_positions > 0);
        assert!(config.page_positions > 0, "pages without positions");
        assert!(!config.lane_pages.is_empty() && config.oversubscription >= 1.0);
        let pages_min = *config.lane_pages.iter().min().expect("not empty");
        assert!(pages_min > 0, "a lane without pages");
        let context_fits = pages_min.saturating_mul(config.page_positions);
        let context_max = config.context_max.min(context_fits);
        let lanes: Vec<Lane> =
            (0..config.lane_pages.len() as u32).map(|lane| Lane::new(&config, lane, 0)).collect();
        let shards = (0..lanes.len() as u32)
            .flat_map(|lane| config.flights_of(lane).map(move |flight| ShardId { flight, lane }))
            .map(|shard| (shard, ShardState::default()))
            .collect();
        let costs = |rows| DraftCosts::new(config.weights_positions, rows);
        let drafts = config.drafts.filter(|_| !config.run_ahead);
        let guesses = drafts.map(|rows| (Guesses::new(), costs(rows)));
        Self {
            config,
            context_max,
            guesses,
            entries: HashMap::new(),
            queue: BTreeSet::new(),
            shards,
            lanes,
            submitted: 0,
            now_ns: 0,
            stats: DispatcherStats::default(),
        }
    }

    /// Whether another prompt should be submitted now. Enough prompts should wait to fill every free
    /// seat and the shards that come home next.
    pub fn wants_prompts(&self) -> bool {
        let (mut rows, mut seats) = (0, 0);
        for lane in self.lanes_used() {
            let shape = self.config.lane_shape(lane);
            rows += shape.batch as usize;
            seats += shape.slots() as usize;
        }
        let seated = self.entries.len() - self.queue.len();
        let free = seats.saturating_sub(seated);
        self.queue.len() < free.max(rows).max(WAITING_MIN)
    }

    /// Whether no prompt is inside.
    pub fn is_idle(&self) -> bool {
        self.entries.is_empty()
    }

    /// Prompts inside, seated or waiting.
    pub fn prompt_ids(&self) -> Vec<PromptId> {
        self.entries.keys().copied().collect()
    }

    /// How far every prompt inside is, in no order.
    pub fn standings(&self) -> impl Iterator<Item = PromptStanding> {
        self.entries.values().map(|entry| PromptStanding {
            prompt_left: entry.prompt.tokens.len() as u32 - entry.prefilled,
            generated: entry.generated.len() as u32,
            generated_max: entry.prompt.tokens_max,
        })
    }

    /// Positions a context may have here.
    pub fn context_max(&self) -> u32 {
        self.context_max
    }

    /// Counters so far.
    pub fn stats(&self) -> &DispatcherStats {
        &self.stats
    }

    /// Takes an event at time `now_ns`; appends the resulting actions. No new step is launched before
    /// [`fill`].
    ///
    /// [`fill`]: Self::fill
    pub fn on(&mut self, event: DispatcherEvent, now_ns: u64, actions: &mut Vec<DispatcherAction>) {
        self.now_ns = now_ns;
        match event {
            DispatcherEvent::Stop(id, kept) => self.stop(id, kept, now_ns, actions),
            DispatcherEvent::Home(home) => self.home(home, now_ns, actions),
            DispatcherEvent::Relaunch(step) => self.relaunch(step, actions),
            DispatcherEvent::LaneLost(lane) => self.lose_lane(lane, now_ns, actions),
            DispatcherEvent::LaneOpened(lane) => self.open_lane(lane),
            DispatcherEvent::LaneLeaving(lane) => self.lanes[lane as usize].leaving = true,
        }
        self.count_pages();
    }

    fn count_pages(&mut self) {
        let used: u32 = self.lanes.iter().map(|lane| lane.pages.used()).sum();
        assert!(used == 0 || !self.entries.is_empty(), "{used} pages are held by no prompt");
        self.stats.pages_used_max = self.stats.pages_used_max.max(used);
    }

    /// Takes a prompt at time `now_ns` and gives it a name. Exactly one `Finish` follows.
    pub fn submit(&mut self, mut prompt: Prompt, now_ns: u64) -> Result<PromptId, Rejection> {
        let tokens = u32::try_from(prompt.tokens.len()).unwrap_or(u32::MAX);
        if tokens == 0 || prompt.tokens_max == 0 {
            return Err(Rejection::Empty);
        }
        if tokens >= self.context_max {
            return Err(Rejection::TooLong { tokens, context_max: self.context_max });
        }
        prompt.tokens_max = prompt.tokens_max.min(self.context_max - tokens);
        let id = PromptId(self.submitted);
        self.submitted += 1;
        self.now_ns = now_ns;
        self.queue.insert((prompt.priority, id));
        let hashes = if self.config.sharing {
            page_hashes(&prompt.tokens, self.config.page_positions)
        } else {
            Vec::new()
        };
        self.entries.insert(id, Entry::new(id, prompt, hashes, now_ns));
        Ok(id)
    }

    fn stop(
        &mut self,
        id: PromptId,
        kept: usize,
        now_ns: u64,
        actions: &mut Vec<DispatcherAction>,
    ) {
        // The prompt may have ended by itself in the meantime.
        let entry = self.entries.get_mut(&id).filter(|entry| entry.over.is_none());
        let Some(entry) = entry else { return };
        assert!(
            kept <= entry.generated.len(),
            "prompt {id:?} stopped after tokens it does not have"
        );
        entry.stop_after = Some(kept);
        if entry.seat.as_ref().is_none_or(|seat| seat.rows_in_air == 0) {
            self.finish(id, Finish::Stop, now_ns, actions);
        }
    }

    fn home(&mut self, home: Home, now_ns: u64, actions: &mut Vec<DispatcherAction>) {
        let Some(state) = self.in_air(home.step) else { return };
        state.in_air = state.ahead.is_some();
        let next = state.ahead.take().unwrap_or_default();
        let aboard = std::mem::replace(&mut state.aboard, next);
        let took_ns = now_ns.saturating_sub(std::mem::replace(&mut state.launched_ns, now_ns));
        let step_ns = &mut self.lanes[home.step.shard.lane as usize].step_ns;
        let before_ns = step_ns.unwrap_or(took_ns);
        let mean_ns = (before_ns * (STEPS_AVERAGED - 1) + took_ns) / STEPS_AVERAGED;
        *step_ns = Some(mean_ns.min(took_ns));
        self.weigh(home.step.shard.lane);
        let samples: u32 = aboard.iter().map(|(_, _, samples)| samples).sum();
        assert_eq!(
            samples as usize,
            home.tokens.len(),
            "a step of {:?} came home with other samples",
            home.step
        );
        let mut tokens = home.tokens.into_iter();
        let page_positions = self.config.page_positions;
        for (id, rows, samples) in aboard {
            let entry =
                self.entries.get_mut(&id).expect("a prompt aboard is kept until it is home");
            self.stats.rows_computed += u64::from(rows);
            let seat = entry.seat.as_mut().expect("a prompt aboard is seated");
            let drafts = std::mem::take(&mut seat.drafts);
            let mut picked: Vec<Generated> = tokens.by_ref().take(samples as usize).collect();
            picked.truncate(entry.kept(&drafts, &picked));
            let stored = rows - (samples - picked.len() as u32);
            self.stats.drafted += drafts.len() as u64;
            self.stats.drafts_right += picked.len().saturating_sub(1) as u64;
            let seat = entry.seat.as_mut().expect("a prompt aboard is seated");
            let again = entry.reached.clamp(seat.computed, seat.computed + stored) - seat.computed;
            self.stats.rows_recomputed += u64::from(again);
            let given = entry.prompt.tokens.len() as u32;
            let news = entry.reached.max(seat.computed).min(given);
            seat.computed += stored;
            seat.told = pages_for(seat.computed, page_positions);
            seat.rows_in_air -= rows;
            seat.tokens_in_air -= samples;
            let in_air = seat.rows_in_air > 0;
            let news = news..seat.computed.min(given);
            entry.reached = entry.reached.max(seat.computed);
            let lane = &mut self.lanes[home.step.shard.lane as usize];
            sharing::publish(entry, id, lane, page_positions);
            let seat = entry.seat.as_ref().expect("it is still seated");
            let prefilled = seat.computed.min(given);
            self.stats.prefilled += u64::from(prefilled.saturating_sub(entry.prefilled));
            entry.prefilled = entry.prefilled.max(prefilled);
            let stopped = entry.stop_after.map(|_| (Finish::Stop, now_ns));
            let mut over = entry.over.or(stopped);
            if let Some((guesses, _)) = &mut self.guesses {
                for position in news {
                    guesses.learn(&entry.tokens_before(position + 1, LOOK_MAX + 1), false);
                }
            }
            for generated in picked {
                if over.is_some() {
                    break;
                }
                if generated.token == TOKEN_NONE {
                    over = Some((Finish::NoToken, now_ns));
                    break;
                }
                if entry.prompt.watched {
                    actions.push(DispatcherAction::Token(id, generated.clone()));
                }
                self.stats.sampled += 1;
                over = entry.push(generated, now_ns).map(|finish| (finish, now_ns));
                if let Some((guesses, _)) = &mut self.guesses {
                    guesses.learn(&entry.tokens_before(entry.len(), LOOK_MAX + 1), true);
                }
            }
            match over {
                // What was launched ahead is of no use any more, but it is still on its way.
                Some(_) if in_air => entry.over = over,
                Some((finish, over_ns)) => self.finish(id, finish, over_ns, actions),
                None => {}
            }
        }
    }

    /// The shard of a step that is in the air; `None` if it came home or was given up.
    fn in_air(&mut self, step: StepId) -> Option<&mut ShardState> {
        let state = self.shards.get_mut(&step.shard)?;
        let epoch = state.epoch - u64::from(state.ahead.is_some());
        (state.in_air && epoch == step.epoch).then_some(state)
    }

    /// Launches a step's rows under a new epoch. They are the same rows: so their pages stay with their
    /// prompts until the new step is home, and by then every Tier-2 node of the lane has seen its epoch
    /// and refuses what is left of the old one.
    fn relaunch(&mut self, step: StepId, actions: &mut Vec<DispatcherAction>) {
        if self.in_air(step).is_some() {
            assert!(!self.config.run_ahead, "{step:?} is lost, and another may depend on it");
            self.stats.relaunches += 1;
            actions.push(DispatcherAction::Launch(self.launch(step.shard)));
        }
    }

    fn finish(
        &mut self,
        id: PromptId,
        finish: Finish,
        now_ns: u64,
        actions: &mut Vec<DispatcherAction>,
    ) {
        self.unseat(id);
        let entry = self.entries.remove(&id).expect("the caller has it");
        self.queue.remove(&entry.rank());
        let stats = &mut self.stats;
        stats.prompts += 1;
        stats.prompt_tokens += entry.prompt.tokens.len() as u64;
        if let Some(first_ns) = entry.first_token_ns {
            stats.time_to_first_token.record(first_ns - entry.submitted_ns);
            let later_tokens = entry.generated.len() as u64 - 1;
            if let Some(mean_ns) = (now_ns - first_ns).checked_div(later_tokens) {
                stats.time_per_output_token.record(mean_ns);
            }
        }
        let completion = entry.complete(finish);
        stats.generated_tokens += completion.tokens.len() as u64;
        actions.push(DispatcherAction::Finish(completion));
    }

    /// Takes a prompt's seat and pages away; its rows must be home.
    fn unseat(&mut self, id: PromptId) {
        let entry = self.entries.get_mut(&id).expect("the caller has it");
        let Some(seat) = entry.seat.take() else { return };
        assert_eq!(
            seat.rows_in_air, 0,
            "prompt {id:?} loses its pages while its rows are in the air"
        );
        let lane = &mut self.lanes[seat.shard.lane as usize];
        sharing::withdraw(&entry.hashes, &seat, id, lane);
        lane.pages.give(seat.pages);
        lane.slots_free.push(seat.slot);
        let state = self.shards.get_mut(&seat.shard).expect("seats are in shards");
        state.seated.retain(|seated| *seated != id);
    }

    /// Drops a prompt's context; its tokens are kept and it waits to be seated again.
    fn drop_context(&mut self, id: PromptId) {
        self.queue.insert(self.entries[&id].rank());
        self.unseat(id);
    }

    /// Tokens that a prompt is expected to generate beside those it has.
    fn more_expected(&self, entry: &Entry) -> u32 {
        let Prompt { tokens_max: longest, stop_ids, watched, .. } = &entry.prompt;
        let so_far = entry.generated.len() as u32;
        let outlived = so_far + so_far / OUTLIVED_PART + self.config.page_positions;
        let generated = match stop_ids.is_empty() && !watched {
            true => *longest, // nothing can end it before
            false => self.generated_expected(*longest).max(outlived).min(*longest),
        };
        generated - so_far
    }

    /// Tokens that a completion is expected to have: those generated so far, for each completion that ended. Tokens of
    /// completions that go on count, else the first to end, which are short, would tell.
    fn generated_expected(&self, longest: u32) -> u32 {
        let at_first = (longest as f32 / self.config.oversubscription) as u64;
        let DispatcherStats { sampled, prompts, .. } = self.stats;
        let expected = (COMPLETIONS_ASSUMED * at_first + sampled) / (COMPLETIONS_ASSUMED + prompts);
        u32::try_from(expected).unwrap_or(u32::MAX)
    }
}
