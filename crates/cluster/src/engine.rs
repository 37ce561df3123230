//! The engine as its users see it: prompts in, tokens and completions out, over any fabric.

use crate::error::ClusterError;
use crate::fabric::{Fabric, FabricEvent};
use crate::layout::Layout;
use crate::report::NodeReport;
use crate::stats::{RunStats, Setting};
use glinthawk_model::ModelConfig;
use glinthawk_protocol::{
    Back, Completion, Dispatcher, DispatcherAction, DispatcherConfig, DispatcherEvent, Finish,
    Generated, Home, Launch, Prompt, PromptId, PromptStanding, Rejection, StepId,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// How long a lane is slow before somebody is told.
const SLOW_FOR: Duration = Duration::from_secs(10);

/// What an engine reports.
#[derive(Debug)]
pub enum EngineEvent {
    /// A watched prompt has a new token.
    Token(PromptId, Generated),
    /// A prompt is finished.
    Finished(Completion),
}

/// What an engine has done up to some moment, and how far the prompts inside are.
#[derive(Clone, Debug, Default)]
pub struct Counted {
    /// The moment: seconds since the first prompt was submitted.
    pub at_s: f64,
    /// Prompt tokens computed.
    pub prefilled: u64,
    /// Tokens generated.
    pub generated: u64,
    /// Completions that ended by themselves, before they were as long as they might be.
    pub ended: u64,
    /// Prompts that are not finished.
    pub inside: Vec<PromptStanding>,
}

/// A dispatcher over a fabric.
pub struct Engine {
    setting: Setting,
    dispatcher: Dispatcher,
    fabric: Box<dyn Fabric>,
    launches: Vec<Launch>,
    events: Vec<EngineEvent>,
    created: Instant,
    first_submit: Option<Instant>,
    /// When each step in the air was launched, and how many tokens it comes home with.
    launched: HashMap<StepId, (Instant, usize)>,
    steps: u64,
    steps_time: Duration,
    /// Nodes that were lost or failed.
    failures: u64,
    /// Nodes that took a lost one's place.
    replaced: u64,
    /// Completions that ended before they were as long as they might be.
    ended: u64,
    /// Lanes that are slow: since when, until it was said.
    slow_lanes: BTreeMap<u32, Option<Instant>>,
}

impl Engine {
    /// An engine over `fabric`, whose lanes have `lane_pages` pages.
    pub fn new(
        fabric: Box<dyn Fabric>,
        model: &ModelConfig,
        layout: &Layout,
        lane_pages: Vec<u32>,
        setting: Setting,
    ) -> Self {
        // Contexts on cores are read slowly enough for drafts.
        let drafts = layout.drafts.filter(|_| setting.backend == "cpu");
        Self {
            setting,
            dispatcher: Dispatcher::new(DispatcherConfig {
                run_ahead: fabric.runs_ahead(),
                drafts,
                ..layout.dispatcher(model, lane_pages)
            }),
            fabric,
            launches: Vec::new(),
            events: Vec::new(),
            created: Instant::now(),
            first_submit: None,
            launched: HashMap::new(),
            steps: 0,
            steps_time: Duration::ZERO,
            failures: 0,
            replaced: 0,
            ended: 0,
            slow_lanes: BTreeMap::new(),
        }
    }

    /// Positions a context may have here.
    pub fn context_max(&self) -> u32 {
        self.dispatcher.context_max()
    }

    /// Whether another prompt should be submitted now.
    pub fn wants_prompts(&self) -> bool {
        self.dispatcher.wants_prompts()
    }

    /// Whether nothing is in the air.
    pub fn is_grounded(&self) -> bool {
        self.launched.is_empty()
    }

    /// Whether no prompt is inside.
    pub fn is_idle(&self) -> bool {
        self.dispatcher.is_idle()
    }

    /// Takes a prompt and gives it a name; exactly one `Finished` follows.
    pub fn submit(&mut self, prompt: Prompt) -> Result<PromptId, Rejection> {
        self.first_submit.get_or_insert_with(Instant::now);
        self.dispatcher.submit(prompt, self.now_ns())
    }

    /// Ends a watched prompt's completion after `tokens_kept` tokens.
    pub fn stop(&mut self, id: PromptId, tokens_kept: usize) {
        self.dispatch(DispatcherEvent::Stop(id, tokens_kept));
    }

    /// Computes one batch, or waits a little for the nodes that do, and returns what happened since
    /// the last call.
    pub fn advance(&mut self) -> Result<Vec<EngineEvent>, ClusterError> {
        let mut happened = Vec::new();
        // Fill here, not when a prompt or a shard arrives: by now the caller has submitted
        // everything there is.
        let mut launches = Vec::new();
        self.dispatcher.fill(&mut launches);
        if self.fabric.runs_ahead() {
            self.dispatcher.fill(&mut launches);
        }
        self.act(launches);
        self.send_launches()?;
        let drained = self.dispatcher.lanes_drained();
        if !drained.is_empty() {
            self.fabric.drained(&drained);
        }
        // Where nothing is in the air, the prompts inside wait for a node.
        if !self.dispatcher.is_idle() {
            let advanced = self.fabric.advance(&mut happened);
            self.noting_failure(advanced)?;
        }
        for event in happened {
            match event {
                FabricEvent::Home(home) => self.home(home)?,
                FabricEvent::NodeLost { lanes, error } => self.lose_node(&lanes, error),
                FabricEvent::NodeLeft { name, lanes } => {
                    self.lose_lanes(&lanes);
                    tracing::warn!("{name} has left");
                }
                FabricEvent::Astray(step) => {
                    tracing::warn!("a step of lane {} is astray: launched again", step.shard.lane);
                    self.dispatch(DispatcherEvent::Relaunch(step));
                }
                FabricEvent::LanesClosed(lanes) => {
                    self.lose_lanes(&lanes);
                    let left = self.left();
                    tracing::warn!(
                        "no worker came in time: what waited is computed again on {left}"
                    );
                }
                FabricEvent::LanesLeaving(lanes) => {
                    lanes
                        .iter()
                        .for_each(|lane| self.dispatch(DispatcherEvent::LaneLeaving(*lane)));
                }
                FabricEvent::NodeBack { name, after, back } => self.go_on(&name, after, &back),
            }
        }
        self.tell_of_slow_lanes();
        Ok(std::mem::take(&mut self.events))
    }

    fn tell_of_slow_lanes(&mut self) {
        let slow: BTreeSet<u32> = self.dispatcher.lanes_slow().collect();
        self.slow_lanes.retain(|lane, _| slow.contains(lane));
        for lane in slow {
            let since = self.slow_lanes.entry(lane).or_insert_with(|| Some(Instant::now()));
            if since.take_if(|since| since.elapsed() >= SLOW_FOR).is_some() {
                tracing::warn!("the nodes of lane {lane} are slow: it gets fewer contexts");
            }
        }
    }

    fn home(&mut self, home: Home) -> Result<(), ClusterError> {
        // An abandoned step is no longer in the air; the dispatcher drops it too.
        if let Some((launched, tokens)) = self.launched.remove(&home.step) {
            if home.tokens.len() != tokens {
                let got = home.tokens.len();
                return Err(ClusterError::Control(format!(
                    "a step came home with {got} tokens, not {tokens}"
                )));
            }
            self.steps += 1;
            self.steps_time += launched.elapsed();
        }
        self.dispatch(DispatcherEvent::Home(home));
        Ok(())
    }

    /// A node is gone. Lanes are left, or are opened again when it has another host.
    fn lose_node(&mut self, lanes: &[u32], error: ClusterError) {
        self.failures += 1;
        self.lose_lanes(lanes);
        let (node, reason) = match error {
            ClusterError::Lost { name, reason } => (name, reason),
            ClusterError::Failed { name, reason } => (name, reason),
            other => (format!("a node of lanes {lanes:?}"), other.to_string()),
        };
        let left = self.left();
        match lanes.len() {
            0 => tracing::warn!("{node} is gone ({reason}): another worker can take its place"),
            _ => tracing::warn!(
                "{node} is gone ({reason}): its prompts are computed again on {left}"
            ),
        }
    }

    fn left(&self) -> String {
        match self.dispatcher.lanes_left() {
            0 => "the next worker that takes its place".to_owned(),
            left => format!("the other {left} of {} lanes", self.dispatcher.lanes()),
        }
    }

    fn lose_lanes(&mut self, lanes: &[u32]) {
        self.launched.retain(|step, _| !lanes.contains(&step.shard.lane));
        for &lane in lanes {
            self.dispatch(DispatcherEvent::LaneLost(lane));
        }
    }

    /// A place has a node again: lanes are opened, and steps that nobody carries are launched again.
    fn go_on(&mut self, name: &str, after: Duration, back: &Back) {
        self.replaced += 1;
        for &lane in &back.opened {
            self.dispatch(DispatcherEvent::LaneOpened(lane));
        }
        let is_back = |step: &&StepId| back.resumed.contains(&step.shard.lane);
        let mut steps: Vec<StepId> = self.launched.keys().filter(is_back).copied().collect();
        steps.sort_unstable();
        for &step in &steps {
            self.dispatch(DispatcherEvent::Relaunch(step));
        }
        let (seconds, opened) = (after.as_secs_f64(), back.opened.len());
        tracing::warn!(
            "{name} has a node again after {seconds:.1} s (lanes opened: {opened}, steps launched again: {})",
            steps.len()
        );
    }

    fn send_launches(&mut self) -> Result<(), ClusterError> {
        for launch in std::mem::take(&mut self.launches) {
            // A shard has one step in the air, or two if it runs ahead: older ones were given up.
            let oldest = launch.step.epoch - u64::from(self.fabric.runs_ahead());
            self.launched.retain(|step, _| step.shard != launch.step.shard || step.epoch >= oldest);
            self.launched.insert(launch.step, (Instant::now(), launch.samples.len()));
            let launched = self.fabric.launch(launch);
            self.noting_failure(launched)?;
        }
        Ok(())
    }

    fn noting_failure(&mut self, outcome: Result<(), ClusterError>) -> Result<(), ClusterError> {
        if let Err(ClusterError::Lost { .. } | ClusterError::Failed { .. }) = outcome {
            self.failures += 1;
        }
        outcome
    }

    fn dispatch(&mut self, event: DispatcherEvent) {
        let mut actions = Vec::new();
        self.dispatcher.on(event, self.now_ns(), &mut actions);
        self.act(actions);
    }

    fn now_ns(&self) -> u64 {
        self.created.elapsed().as_nanos() as u64
    }

    fn act(&mut self, actions: Vec<DispatcherAction>) {
        for action in actions {
            match action {
                DispatcherAction::Launch(launch) => self.launches.push(launch),
                DispatcherAction::Token(id, token) => {
                    self.events.push(EngineEvent::Token(id, token))
                }
                DispatcherAction::Finish(completion) => {
                    self.ended += u64::from(completion.finish == Finish::Stop);
                    self.events.push(EngineEvent::Finished(completion))
                }
            }
        }
    }

    /// What was done so far, unfinished prompts included.
    pub fn count(&self) -> Counted {
        let stats = self.dispatcher.stats();
        Counted {
            at_s: self.wall_s(),
            prefilled: stats.prefilled,
            generated: stats.sampled,
            ended: self.ended,
            inside: self.dispatcher.standings().collect(),
        }
    }

    /// Seconds since the first prompt was submitted.
    pub fn wall_s(&self) -> f64 {
        self.first_submit.map_or(0.0, |start| start.elapsed().as_secs_f64())
    }

    /// What the run and every node did so far.
    pub fn stats(&mut self) -> Result<(RunStats, Vec<NodeReport>), ClusterError> {
        let wall_s = self.wall_s();
        let nodes = self.fabric.reports()?;
        let steps = (self.steps, self.steps_time.as_secs_f64());
        let dispatcher = self.dispatcher.stats();
        let setting = self.setting.clone();
        let mut stats = RunStats::new(
            setting,
            dispatcher,
            &nodes,
            wall_s,
            steps,
            (self.failures, self.replaced),
        );
        stats.lane_shares = self.dispatcher.lane_shares();
        Ok((stats, nodes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use glinthawk_compute::ContextType;

    /// Nodes that answer every launch with tokens of the steps before and after it, then with its own.
    #[derive(Default)]
    struct Confused {
        homes: std::collections::VecDeque<Home>,
    }

    impl Fabric for Confused {
        fn launch(&mut self, launch: Launch) -> Result<(), ClusterError> {
            let token = Generated { token: 9, logprob: 0.0, alternatives: Vec::new() };
            let tokens = vec![token; launch.samples.len()];
            for epoch in [launch.step.epoch - 1, launch.step.epoch + 1, launch.step.epoch] {
                let step = StepId { epoch, ..launch.step };
                self.homes.push_back(Home { step, tokens: tokens.clone() });
            }
            Ok(())
        }

        fn advance(&mut self, events: &mut Vec<FabricEvent>) -> Result<(), ClusterError> {
            events.extend(self.homes.pop_front().map(FabricEvent::Home));
            Ok(())
        }

        fn reports(&mut self) -> Result<Vec<NodeReport>, ClusterError> {
            Ok(Vec::new())
        }
    }

    /// An engine over these nodes, with one prompt of three tokens to generate.
    fn engine_over(fabric: Box<dyn Fabric>, lanes: usize) -> Engine {
        let layout = Layout {
            pipelines: 1,
            slices: 1,
            tier2: 0,
            tier1_attends: true,
            strands: lanes,
            batch: 4,
            flights: 1,
            own_batch: None,
            own_first: false,
            chunk: 4,
            context_max: 64,
            page_positions: 16,
            context_type: ContextType::Bf16,
            whole_flights: false,
            shares_cores: false,
            sharing: true,
            drafts: None,
        };
        let setting = Setting {
            model: String::new(),
            backend: "none",
            instruction_set: String::new(),
            threads: 1,
            pipelines: 1,
            tier1_nodes: 1,
            tier2_nodes: 0,
            tier1_attends: true,
            lanes: 1,
            batch: layout.batch,
            flights: layout.flights,
            chunk: layout.chunk,
            context_memory_bytes: 0,
            context_type: "bf16",
            page_bytes: 0,
            max_context: layout.context_max,
        };
        let model = ModelConfig::shape("llama3-8b").expect("a known shape");
        let mut engine = Engine::new(fabric, &model, &layout, vec![4; lanes], setting);
        let prompt = Prompt { tokens: vec![5], tokens_max: 3, ..Prompt::default() };
        engine.submit(prompt).expect("it fits");
        engine
    }

    #[test]
    fn a_home_of_another_epoch_does_not_ground_its_shard() {
        let mut engine = engine_over(Box::new(Confused::default()), 1);
        // Three tokens, three answers to each of their launches, one an advance.
        let mut finished = 0;
        for _ in 0..9 {
            assert!(!engine.is_idle(), "the prompt ended early");
            finished += engine.advance().expect("nothing fails").len();
        }
        assert!(engine.is_idle() && engine.is_grounded() && finished == 1);
        assert_eq!(engine.steps, 3, "only steps that came home are counted");
    }

    /// Nodes that are gone.
    struct Gone;

    impl Fabric for Gone {
        fn launch(&mut self, _launch: Launch) -> Result<(), ClusterError> {
            Ok(())
        }

        fn advance(&mut self, _events: &mut Vec<FabricEvent>) -> Result<(), ClusterError> {
            let (name, reason) = ("tier2-0-1".to_owned(), "closed".to_owned());
            Err(ClusterError::Lost { name, reason })
        }

        fn reports(&mut self) -> Result<Vec<NodeReport>, ClusterError> {
            Ok(Vec::new())
        }
    }

    /// One lane of two is lost with the first step on it; the other answers.
    #[derive(Default)]
    struct LosesLane {
        launches: Vec<Launch>,
        lost: bool,
    }

    impl Fabric for LosesLane {
        fn launch(&mut self, launch: Launch) -> Result<(), ClusterError> {
            assert!(!self.lost || launch.step.shard.lane == 1, "a lost lane is left alone");
            self.launches.push(launch);
            Ok(())
        }

        fn advance(&mut self, events: &mut Vec<FabricEvent>) -> Result<(), ClusterError> {
            for Launch { step, samples, .. } in self.launches.drain(..) {
                if step.shard.lane == 0 {
                    self.lost = true;
                    let (name, reason) = ("tier2-0-0".to_owned(), "closed".to_owned());
                    let error = ClusterError::Lost { name, reason };
                    events.push(FabricEvent::NodeLost { lanes: vec![0], error });
                    continue;
                }
                let token = Generated { token: 9, logprob: 0.0, alternatives: Vec::new() };
                let tokens = vec![token; samples.len()];
                events.push(FabricEvent::Home(Home { step, tokens }));
            }
            Ok(())
        }

        fn reports(&mut self) -> Result<Vec<NodeReport>, ClusterError> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn a_lost_lane_costs_its_contexts_only() {
        let mut engine = engine_over(Box::new(LosesLane::default()), 2);
        let mut finished = Vec::new();
        while !engine.is_idle() {
            finished.extend(engine.advance().expect("a lane is left"));
        }
        let [EngineEvent::Finished(completion)] = &finished[..] else { panic!("{finished:?}") };
        assert_eq!(completion.tokens.len(), 3);
        assert_eq!(engine.stats().expect("reports").0.failures, 1);
        let mut alone = engine_over(Box::new(LosesLane::default()), 1);
        for _ in 0..3 {
            assert!(alone.advance().expect("it waits for a lane").is_empty());
        }
    }

    /// Nodes that forget a token.
    struct Forgetful(Option<StepId>);

    impl Fabric for Forgetful {
        fn launch(&mut self, launch: Launch) -> Result<(), ClusterError> {
            self.0 = Some(launch.step);
            Ok(())
        }

        fn advance(&mut self, events: &mut Vec<FabricEvent>) -> Result<(), ClusterError> {
            let home = self.0.take().map(|step| Home { step, tokens: Vec::new() });
            events.extend(home.map(FabricEvent::Home));
            Ok(())
        }

        fn reports(&mut self) -> Result<Vec<NodeReport>, ClusterError> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn a_step_without_its_tokens_is_an_error() {
        let mut engine = engine_over(Box::new(Forgetful(None)), 1);
        let error = engine.advance().expect_err("a token is missing").to_string();
        assert!(error.contains("0 tokens, not 1"), "{error}");
    }

    #[test]
    fn an_engine_can_be_driven_from_any_thread() {
        fn needs_send<T: Send>(_: T) {}
        needs_send(engine_over(Box::new(Gone), 1));
    }

    #[test]
    fn lost_nodes_are_counted_as_failures() {
        let mut engine = engine_over(Box::new(Gone), 1);
        assert_eq!(engine.stats().expect("reports").0.failures, 0);
        assert!(engine.advance().is_err());
        assert_eq!(engine.stats().expect("reports").0.failures, 1);
    }
}
