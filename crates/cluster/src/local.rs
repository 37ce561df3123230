//! The in-process fabric. Each strand is a thread that runs whole steps of its lane by itself, and messages are
//! function calls. Strands share only the weights. Where few rows are left, one more stack of nodes takes all lanes, and
//! all threads compute for it.

use crate::error::ClusterError;
use crate::fabric::{Fabric, FabricEvent, WAIT};
use crate::layout::{Layout, is_large};
use crate::nodes::{self, Nodes, Strand};
use crate::payload::Payload;
use crate::report::{NodeReport, peak_memory_bytes};
use crate::strand::ThreadShares;
use crate::tier1_kernels::Tier1Place;
use crate::tier2_kernels::Tier2Kernels;
use crate::together::Rule;
use crate::turns::TakesTurns;
use glinthawk_compute::{CpuBackend, CpuWeights, Isa, Threads, allowed_cores};
use glinthawk_flight::{Buffer, Pool};
use glinthawk_model::{Model, ModelConfig};
use glinthawk_protocol::{Compute, Home, Launch, Outgoing, Parcel, ShardId, Started, Tier2Node};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// What the kernels of a process run on.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    /// Instruction set.
    pub isa: Isa,
    /// Threads, shared evenly by the strands.
    pub threads: usize,
}

/// Buffers of a strand.
fn pool(layout: &Layout) -> Arc<Pool> {
    Arc::new(Pool::new(4 * layout.attention_workers() * layout.flights as usize))
}

/// All lanes of an engine in one process.
pub struct LocalFabric {
    /// One for each strand, which has the lane of that number; where there are several, one more for all of them.
    stacks: Vec<StackThread>,
    news: Receiver<News>,
    rule: Rule,
    /// Whether the last stack has all lanes.
    together: bool,
    /// Steps that no stack was given yet.
    waiting: Vec<Launch>,
    /// The shards that stacks have: the newest epoch of each, and its rows.
    in_air: BTreeMap<ShardId, (u64, usize)>,
    /// Came home while something else was waited for.
    homes: Vec<Home>,
}

/// A stack's thread and its channel of orders; the thread ends when the channel closes.
struct StackThread {
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

/// A lane's Tier-2 node and its kernels.
type LaneNode = (Tier2Node<Payload<Buffer>>, Tier2Kernels<CpuBackend>);

enum Order {
    Launch(Launch),
    /// To give a lane away, of which no step is in the air.
    Give(u32),
    Take(u32, Box<LaneNode>),
    Report,
}

enum News {
    /// A stack can take orders.
    Ready,
    Homes(Vec<Home>),
    Given(Box<LaneNode>),
    Reports(Vec<NodeReport>),
    Failed(ClusterError),
    Panicked(Box<dyn Any + Send>),
}

/// News that were asked for.
enum Answer {
    Given(Box<LaneNode>),
    Reports(Vec<NodeReport>),
}

impl LocalFabric {
    /// Loads the model (reporting bytes done and the total) and gives every lane `pages` pages.
    pub fn load(
        model: &Model,
        layout: &Layout,
        pages: u32,
        kernels: Kernels,
        trace: bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ClusterError> {
        let shape = (layout.pipelines, layout.slices, layout.tier2);
        assert_eq!(shape, (1, 1, 0), "one process has the whole model");
        let Kernels { isa, threads } = kernels;
        let (strands, config) = (layout.strands, model.config());
        // For the stack of all lanes, they are those of one strand.
        let as_one = Layout { strands: 1, tier2: strands - 1, ..layout.clone() };
        // Threads that share kernels wait for each other, so they do not share cores as well.
        let sharing = Arc::new(Threads::new(threads.min(allowed_cores().len()))?);
        let all = CpuBackend { isa, threads: sharing, pool: pool(&as_one) };
        let weights = Arc::new(nodes::load_slice(model, layout, 0, &all, progress)?);
        let shares = Arc::new(ThreadShares::new(isa, threads, strands)?);
        let (newsagent, news) = channel();
        let mut plans: Vec<StackPlan> = (0..strands)
            .map(|strand| StackPlan {
                config: config.clone(),
                layout: layout.clone(),
                place: Tier1Place::new(layout, (0, strand), 0, trace),
                lane: Some((strand as u32, pages)),
                on: On::Share(Arc::clone(&shares)),
            })
            .collect();
        if strands > 1 {
            plans.push(StackPlan {
                config: config.clone(),
                place: Tier1Place::new(&as_one, (0, 0), 0, trace),
                layout: as_one,
                lane: None,
                on: On::All(all),
            });
        }
        let stacks = plans.into_iter().map(|plan| {
            let (weights, newsagent) = (Arc::clone(&weights), newsagent.clone());
            StackThread::spawn(plan, weights, newsagent)
        });
        let stacks = stacks.collect::<Result<Vec<_>, _>>()?;
        // Once every stack holds the matrices, what loaded them is no longer needed.
        drop(weights);
        let mut fabric = Self {
            stacks,
            news,
            rule: Rule { strands, isa, is_large: is_large(config) },
            together: false,
            waiting: Vec::new(),
            in_air: BTreeMap::new(),
            homes: Vec::new(),
        };
        for _ in 0..fabric.stacks.len() {
            fabric.hear(None)?;
        }
        Ok(fabric)
    }

    /// Waits for the next news from a stack, for a while or without limit; returns what was asked for.
    fn hear(&mut self, wait: Option<Duration>) -> Result<Option<Answer>, ClusterError> {
        let news = match wait {
            Some(wait) => self.news.recv_timeout(wait).ok(),
            None => Some(self.news.recv().expect("a stack says a last word before it goes")),
        };
        match news {
            Some(News::Homes(homes)) => {
                for home in homes {
                    let shard = home.step.shard;
                    if self.in_air.get(&shard).is_some_and(|(epoch, _)| *epoch == home.step.epoch) {
                        self.in_air.remove(&shard);
                    }
                    self.homes.push(home);
                }
            }
            Some(News::Given(node)) => return Ok(Some(Answer::Given(node))),
            Some(News::Reports(reports)) => return Ok(Some(Answer::Reports(reports))),
            Some(News::Failed(error)) => return Err(error),
            Some(News::Panicked(panic)) => resume_unwind(panic),
            Some(News::Ready) | None => {}
        }
        Ok(None)
    }

    /// Waits for what was asked for.
    fn await_answer(&mut self) -> Result<Answer, ClusterError> {
        loop {
            if let Some(answer) = self.hear(None)? {
                return Ok(answer);
            }
        }
    }

    /// Gives a stack an order; a stack that is gone has already said why.
    fn order(&self, stack: usize, order: Order) -> Result<(), ClusterError> {
        let orders = self.stacks[stack].orders.as_ref().expect("there until the end");
        orders.send(order).map_err(|_| ClusterError::Lost {
            name: format!("lane-{stack}"),
            reason: "it has failed".to_owned(),
        })
    }

    /// The stack that has a lane.
    fn stack_of(&self, lane: u32, together: bool) -> usize {
        if together { self.rule.strands } else { lane as usize }
    }

    /// Gives the stacks the steps that wait. If strands should come together or part, the steps wait until all are home.
    fn send_waiting(&mut self) -> Result<(), ClusterError> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let waiting = self.waiting.iter().map(|launch| (launch.step.shard, launch.rows.len()));
        let in_air = self.in_air.iter().map(|(&shard, &(_, rows))| (shard, rows));
        let shards: BTreeMap<ShardId, usize> = in_air.chain(waiting).collect();
        let lanes: BTreeSet<u32> = shards.keys().map(|shard| shard.lane).collect();
        let together = self.rule.is_together(self.together, lanes.len(), shards.values().sum());
        if together != self.together {
            if !self.in_air.is_empty() {
                return Ok(());
            }
            for lane in 0..self.rule.strands as u32 {
                // One that is gone says why itself, and that is heard next.
                _ = self.order(self.stack_of(lane, self.together), Order::Give(lane));
                let Answer::Given(node) = self.await_answer()? else {
                    unreachable!("nothing else was asked for")
                };
                _ = self.order(self.stack_of(lane, together), Order::Take(lane, node));
            }
            self.together = together;
        }
        for launch in std::mem::take(&mut self.waiting) {
            let (shard, epoch) = (launch.step.shard, launch.step.epoch);
            let newest = self.in_air.entry(shard).or_insert((epoch, launch.rows.len()));
            *newest = (*newest).max((epoch, launch.rows.len()));
            // As above.
            _ = self.order(self.stack_of(shard.lane, together), Order::Launch(launch));
        }
        Ok(())
    }
}

impl Fabric for LocalFabric {
    fn launch(&mut self, launch: Launch) -> Result<(), ClusterError> {
        self.waiting.push(launch);
        Ok(())
    }

    fn advance(&mut self, events: &mut Vec<FabricEvent>) -> Result<(), ClusterError> {
        self.send_waiting()?;
        if self.homes.is_empty() {
            self.hear(Some(WAIT))?;
        }
        events.extend(self.homes.drain(..).map(FabricEvent::Home));
        Ok(())
    }

    fn reports(&mut self) -> Result<Vec<NodeReport>, ClusterError> {
        let mut reports = Vec::new();
        for stack in 0..self.stacks.len() {
            self.order(stack, Order::Report)?;
            let Answer::Reports(mut of_stack) = self.await_answer()? else {
                unreachable!("nothing else was asked for")
            };
            // Strands that never came together have nothing to say about it.
            let is_own = stack < self.rule.strands;
            of_stack.retain(|report| is_own || report.batches > 0);
            reports.extend(of_stack);
        }
        reports.sort_by(|a, b| (a.tier, &a.name).cmp(&(b.tier, &b.name)));
        Ok(reports)
    }
}

impl Drop for LocalFabric {
    fn drop(&mut self) {
        for stack in &mut self.stacks {
            stack.orders = None;
        }
        for thread in self.stacks.iter_mut().filter_map(|stack| stack.thread.take()) {
            // Its news says what happened to it.
            _ = thread.join();
        }
    }
}

impl StackThread {
    fn spawn(
        plan: StackPlan,
        weights: Arc<CpuWeights>,
        newsagent: Sender<News>,
    ) -> Result<Self, ClusterError> {
        let (orders, inbox) = channel();
        let name = match plan.on {
            On::Share(_) => format!("strand-{}", plan.place.strand),
            On::All(_) => "together".to_owned(),
        };
        let work = move || {
            let worked = catch_unwind(AssertUnwindSafe(|| {
                Stack::new(plan, weights)?.work(&inbox, &newsagent)
            }));
            // If the receiver is gone, nobody needs the news.
            _ = match worked {
                Ok(Ok(())) => Ok(()),
                Ok(Err(error)) => newsagent.send(News::Failed(error)),
                Err(panic) => newsagent.send(News::Panicked(panic)),
            };
        };
        let thread = thread::Builder::new().name(name).spawn(work);
        let thread = Some(thread.map_err(ClusterError::io("cannot start a thread"))?);
        Ok(Self { orders: Some(orders), thread })
    }
}

/// What a stack's thread builds its nodes from.
struct StackPlan {
    config: ModelConfig,
    layout: Layout,
    place: Tier1Place,
    /// The lane that it has at first, with its pages.
    lane: Option<(u32, u32)>,
    on: On,
}

/// What a stack computes on.
enum On {
    /// A strand's share of the threads.
    Share(Arc<ThreadShares>),
    /// All threads.
    All(CpuBackend),
}

/// Both tiers of a lane, or of all.
struct Stack {
    nodes: Nodes<CpuBackend>,
    backend: CpuBackend,
    /// The same with a single thread, whichever calls.
    each_alone: CpuBackend,
    outbox: Vec<Outgoing<Payload<Buffer>>>,
    /// When its clock began.
    began: Instant,
    /// Its part in the turns on cores.
    _turns: Option<TakesTurns>,
}

impl Stack {
    /// Made on the stack's thread.
    fn new(plan: StackPlan, weights: Arc<CpuWeights>) -> Result<Self, ClusterError> {
        let StackPlan { config, layout, place, lane, on } = plan;
        let (backend, turns) = match on {
            On::Share(shares) => shares.take(place.strand, pool(&layout))?,
            On::All(backend) => {
                backend.threads.pin_caller();
                (backend, None)
            }
        };
        let weights = weights.beside(Arc::clone(&backend.threads), layout.slab_rows())?;
        let strand = Strand { place, lane, layout: &layout, config: &config };
        let nodes = strand.nodes(&backend, Some(weights))?;
        let each_alone = CpuBackend { threads: Arc::new(Threads::new(1)?), ..backend.clone() };
        let began = Instant::now();
        Ok(Self { nodes, backend, each_alone, outbox: Vec::new(), began, _turns: turns })
    }

    /// Executes orders until the channel closes.
    fn work(
        mut self,
        inbox: &Receiver<Order>,
        newsagent: &Sender<News>,
    ) -> Result<(), ClusterError> {
        if newsagent.send(News::Ready).is_err() {
            return Ok(());
        }
        let mut idle = true;
        loop {
            let order = match idle {
                true => inbox.recv().map_err(|_| true),
                false => inbox.try_recv().map_err(|error| error == TryRecvError::Disconnected),
            };
            let told = match order {
                Ok(Order::Launch(launch)) => {
                    let nothing = Payload::received(Buffer::default(), Instant::now());
                    self.nodes.deliver(Parcel::Launch(launch, nothing))?;
                    idle = false;
                    continue;
                }
                Ok(Order::Give(lane)) => {
                    let node = self.nodes.lanes.remove(&lane).expect("the stack has the lane");
                    newsagent.send(News::Given(Box::new(node))).is_ok()
                }
                Ok(Order::Take(lane, node)) => {
                    self.nodes.lanes.insert(lane, *node);
                    true
                }
                Ok(Order::Report) => newsagent.send(News::Reports(self.reports())).is_ok(),
                Err(over) => !over,
            };
            if !told {
                return Ok(());
            }
            idle = !self.advance(newsagent)?;
        }
    }

    /// Computes what is ready; `false` if nothing is.
    fn advance(&mut self, newsagent: &Sender<News>) -> Result<bool, ClusterError> {
        // Nothing is under way now, so no lane waits for another.
        let mut works = self.attend_lanes()?;
        if works.is_empty() {
            works.extend(self.nodes.start(self.now_ns())?);
        }
        if works.is_empty() {
            return Ok(false);
        }
        for work in works {
            self.nodes.finish(work, self.now_ns(), &mut self.outbox)?;
        }
        let mut homes = Vec::new();
        for Outgoing { parcel, .. } in self.outbox.drain(..) {
            match parcel {
                Parcel::Home(home) => homes.push(home),
                parcel => _ = self.nodes.deliver(parcel)?,
            }
        }
        if !homes.is_empty() {
            // If nobody listens, no further order will come either.
            _ = newsagent.send(News::Homes(homes));
        }
        Ok(true)
    }

    /// Attends on the lanes that have rows: side by side, each on one of the threads, if that keeps these busy.
    fn attend_lanes(&mut self) -> Result<Vec<Started<Payload<Buffer>>>, ClusterError> {
        let lanes = self.nodes.take_lanes();
        let rows = || lanes.iter().map(|(work, _)| work.attend.rows.len());
        let (most, all) = (rows().max().unwrap_or(0), rows().sum::<usize>());
        let are_even = 2 * most * lanes.len() <= 3 * all;
        let threads = &self.backend.threads;
        let side_by_side = lanes.len() > 1 && 2 * lanes.len() > threads.count() && are_even;
        let backend = if side_by_side { &self.each_alone } else { &self.backend };
        let attended: Vec<Mutex<_>> =
            lanes.into_iter().map(|(work, kernels)| Mutex::new((work, kernels, Ok(())))).collect();
        let attend = |lane: usize| {
            let (work, kernels, done) = &mut *attended[lane].lock().expect("nobody else has it");
            *done = kernels.go_to(backend).and_then(|()| kernels.start(work));
        };
        match side_by_side {
            true => threads.for_each(attended.len(), attend),
            false => (0..attended.len()).for_each(attend),
        }
        let started = attended.into_iter().map(|attended| {
            let (work, _, done) = attended.into_inner().expect("nobody else has it");
            done.map(|()| Started::Tier2(work))
        });
        started.collect()
    }

    fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    fn reports(&self) -> Vec<NodeReport> {
        let peak_memory_bytes = peak_memory_bytes();
        let mut reports = nodes::reports(&self.nodes);
        reports.iter_mut().for_each(|report| report.peak_memory_bytes = peak_memory_bytes);
        reports
    }
}
