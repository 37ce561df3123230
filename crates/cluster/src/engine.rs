//! The engine as its users see it: prompts in, tokens and completions out, over any fabric.

use crate::error::ClusterError;
use crate::fabric::Fabric;
use crate::layout::Layout;
use crate::report::NodeReport;
use crate::stats::{RunStats, Setting};
use glinthawk_protocol::{
    Completion, Dispatcher, DispatcherAction, DispatcherEvent, Finish, Generated, Launch, Prompt,
    PromptId, Rejection, Standing, StepId,
};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// What an engine reports.
#[derive(Debug)]
pub enum EngineEvent {
    /// A watched prompt has a new token.
    Token(PromptId, Generated),
    /// A prompt is finished.
    Finished(Completion),
    /// A prompt cannot be run.
    Rejected(PromptId, Rejection),
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
    pub inside: Vec<Standing>,
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
    /// When each step in the air was launched.
    launched: HashMap<StepId, Instant>,
    steps: u64,
    steps_time: Duration,
    /// Nodes that were lost or failed.
    failures: u64,
    /// Completions that ended before they were as long as they might be.
    ended: u64,
}

impl Engine {
    /// An engine over `fabric`, whose lanes have `lane_pages` pages.
    pub fn new(
        fabric: Box<dyn Fabric>,
        layout: &Layout,
        lane_pages: Vec<u32>,
        setting: Setting,
    ) -> Self {
        Self {
            setting,
            dispatcher: Dispatcher::new(layout.dispatcher(lane_pages)),
            fabric,
            launches: Vec::new(),
            events: Vec::new(),
            created: Instant::now(),
            first_submit: None,
            launched: HashMap::new(),
            steps: 0,
            steps_time: Duration::ZERO,
            failures: 0,
            ended: 0,
        }
    }

    /// Positions a context may have here.
    pub fn positions_max(&self) -> u32 {
        self.dispatcher.positions_max()
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

    /// Takes a prompt; exactly one `Finished` or `Rejected` follows.
    pub fn submit(&mut self, prompt: Prompt) {
        self.first_submit.get_or_insert_with(Instant::now);
        self.dispatch(DispatcherEvent::Submit(prompt));
    }

    /// Ends a watched prompt's completion after `tokens_kept` tokens.
    pub fn stop(&mut self, id: PromptId, tokens_kept: usize) {
        self.dispatch(DispatcherEvent::Stop(id, tokens_kept));
    }

    /// Computes one batch, or waits a little for the nodes that do, and returns what happened since
    /// the last call.
    pub fn advance(&mut self) -> Result<Vec<EngineEvent>, ClusterError> {
        let mut homes = Vec::new();
        // Fill here, not when a prompt or a shard arrives: by now the caller has submitted
        // everything there is.
        let mut launches = Vec::new();
        self.dispatcher.fill(&mut launches);
        self.act(launches);
        self.send_launches()?;
        if !self.launched.is_empty() {
            let advanced = self.fabric.advance(&mut homes);
            self.noting_failure(advanced)?;
        }
        for home in homes {
            // An abandoned step is no longer in the air; the dispatcher drops it too.
            if let Some(launched) = self.launched.remove(&home.step) {
                self.steps += 1;
                self.steps_time += launched.elapsed();
            }
            self.dispatch(DispatcherEvent::Home(home));
        }
        Ok(std::mem::take(&mut self.events))
    }

    fn send_launches(&mut self) -> Result<(), ClusterError> {
        for launch in std::mem::take(&mut self.launches) {
            // A shard has one step in the air: an older one was given up.
            self.launched.retain(|step, _| step.shard != launch.step.shard);
            self.launched.insert(launch.step, Instant::now());
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
        self.dispatcher.on(event, self.created.elapsed().as_nanos() as u64, &mut actions);
        self.act(actions);
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
                DispatcherAction::Reject(id, why) => {
                    self.events.push(EngineEvent::Rejected(id, why))
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
        let stats = RunStats::new(setting, dispatcher, &nodes, wall_s, steps, self.failures);
        Ok((stats, nodes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use glinthawk_compute::ContextType;
    use glinthawk_protocol::{Home, Sampling};

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

        fn advance(&mut self, homes: &mut Vec<Home>) -> Result<(), ClusterError> {
            homes.extend(self.homes.pop_front());
            Ok(())
        }

        fn reports(&mut self) -> Result<Vec<NodeReport>, ClusterError> {
            Ok(Vec::new())
        }
    }

    /// An engine over these nodes, with one prompt of three tokens to generate.
    fn engine_over(fabric: Box<dyn Fabric>) -> Engine {
        let layout = Layout {
            slices: 1,
            remote_lanes: 0,
            local_lanes: 1,
            batch: 4,
            flights: 1,
            chunk: 4,
            context_max: 64,
            context_type: ContextType::Bf16,
            whole_flights: false,
        };
        let setting = Setting {
            model: String::new(),
            backend: "none",
            instruction_set: String::new(),
            threads: 1,
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
        let mut engine = Engine::new(fabric, &layout, vec![4], setting);
        engine.submit(Prompt {
            id: PromptId(1),
            tokens: vec![5],
            tokens_max: 3,
            stop_ids: Vec::new(),
            sampling: Sampling::default(),
            watched: false,
        });
        engine
    }

    #[test]
    fn a_home_of_another_epoch_does_not_ground_its_shard() {
        let mut engine = engine_over(Box::new(Confused::default()));
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

        fn advance(&mut self, _homes: &mut Vec<Home>) -> Result<(), ClusterError> {
            let (name, reason) = ("tier2-0-1".to_owned(), "closed".to_owned());
            Err(ClusterError::Lost { name, reason })
        }

        fn reports(&mut self) -> Result<Vec<NodeReport>, ClusterError> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn lost_nodes_are_counted_as_failures() {
        let mut engine = engine_over(Box::new(Gone));
        assert_eq!(engine.stats().expect("reports").0.failures, 0);
        assert!(engine.advance().is_err());
        assert_eq!(engine.stats().expect("reports").0.failures, 1);
    }
}
