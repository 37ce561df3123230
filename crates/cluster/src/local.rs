//! The in-process fabric. Each strand is a thread that runs whole steps of its lane by itself, and messages are
//! function calls. Strands share only the weights.

use crate::error::ClusterError;
use crate::fabric::{Fabric, FabricEvent, WAIT};
use crate::layout::Layout;
use crate::nodes::{self, Nodes, Strand};
use crate::payload::Payload;
use crate::report::{NodeReport, peak_memory_bytes};
use crate::strand::ThreadShares;
use crate::tier1_kernels::Tier1Place;
use crate::turns::TakesTurns;
use glinthawk_compute::{CpuBackend, CpuWeights, Isa, Threads};
use glinthawk_flight::{Buffer, Pool};
use glinthawk_model::{Model, ModelConfig};
use glinthawk_protocol::{Home, Launch, Outgoing, Parcel};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
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
    Arc::new(Pool::new(4 * layout.flights as usize))
}

/// All lanes of an engine in one process.
pub struct LocalFabric {
    lanes: Vec<Lane>,
    news: Receiver<News>,
    /// Came home while something else was waited for.
    homes: Vec<Home>,
}

/// A lane's thread and its channel of orders; the thread ends when the channel closes.
struct Lane {
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

enum Order {
    Launch(Launch),
    Report,
}

enum News {
    /// A lane can take orders.
    Ready,
    Home(Home),
    Reports(Vec<NodeReport>),
    Failed(ClusterError),
    Panicked(Box<dyn Any + Send>),
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
        let all = CpuBackend { isa, threads: Arc::new(Threads::new(threads)?), pool: pool(layout) };
        let weights = Arc::new(nodes::load_slice(model, layout, 0, &all, progress)?);
        let shares = Arc::new(ThreadShares::new(isa, threads, layout.strands)?);
        let (newsagent, news) = channel();
        let mut lanes = Vec::new();
        for strand in 0..layout.strands {
            let (orders, inbox) = channel();
            let plan = StrandPlan {
                config: model.config().clone(),
                layout: layout.clone(),
                place: Tier1Place::new(layout, (0, strand), 0, trace),
                pages,
                shares: Arc::clone(&shares),
            };
            let (weights, newsagent) = (Arc::clone(&weights), newsagent.clone());
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
            let thread = thread::Builder::new().name(format!("strand-{strand}")).spawn(work);
            let thread = Some(thread.map_err(ClusterError::io("cannot start a thread"))?);
            lanes.push(Lane { orders: Some(orders), thread });
        }
        // Once every lane holds the matrices, the threads that loaded them are no longer needed.
        drop((weights, all));
        let mut fabric = Self { lanes, news, homes: Vec::new() };
        for _ in 0..fabric.lanes.len() {
            fabric.hear(None)?;
        }
        Ok(fabric)
    }

    /// Waits for the next news from a lane, for a while or without limit; returns reports if it was one.
    fn hear(&mut self, wait: Option<Duration>) -> Result<Vec<NodeReport>, ClusterError> {
        let news = match wait {
            Some(wait) => self.news.recv_timeout(wait).ok(),
            None => Some(self.news.recv().expect("a lane says a last word before it goes")),
        };
        match news {
            Some(News::Home(home)) => self.homes.push(home),
            Some(News::Reports(reports)) => return Ok(reports),
            Some(News::Failed(error)) => return Err(error),
            Some(News::Panicked(panic)) => resume_unwind(panic),
            Some(News::Ready) | None => {}
        }
        Ok(Vec::new())
    }

    /// Gives a lane an order; a lane that is gone has already said why.
    fn order(&self, lane: usize, order: Order) -> Result<(), ClusterError> {
        let orders = self.lanes[lane].orders.as_ref().expect("there until the end");
        orders.send(order).map_err(|_| ClusterError::Lost {
            name: format!("lane-{lane}"),
            reason: "it has failed".to_owned(),
        })
    }
}

impl Fabric for LocalFabric {
    fn launch(&mut self, launch: Launch) -> Result<(), ClusterError> {
        // A lane that is gone says why itself, and that is read next.
        _ = self.order(launch.step.shard.lane as usize, Order::Launch(launch));
        Ok(())
    }

    fn advance(&mut self, events: &mut Vec<FabricEvent>) -> Result<(), ClusterError> {
        if self.homes.is_empty() {
            self.hear(Some(WAIT))?;
        }
        events.extend(self.homes.drain(..).map(FabricEvent::Home));
        Ok(())
    }

    fn reports(&mut self) -> Result<Vec<NodeReport>, ClusterError> {
        for lane in 0..self.lanes.len() {
            self.order(lane, Order::Report)?;
        }
        let mut reports = Vec::new();
        while reports.len() < 2 * self.lanes.len() {
            reports.extend(self.hear(None)?);
        }
        reports.sort_by(|a, b| (a.tier, &a.name).cmp(&(b.tier, &b.name)));
        Ok(reports)
    }
}

impl Drop for LocalFabric {
    fn drop(&mut self) {
        for lane in &mut self.lanes {
            lane.orders = None;
        }
        for thread in self.lanes.iter_mut().filter_map(|lane| lane.thread.take()) {
            // Its news says what happened to it.
            _ = thread.join();
        }
    }
}

/// What a strand's thread builds its nodes from.
struct StrandPlan {
    config: ModelConfig,
    layout: Layout,
    place: Tier1Place,
    pages: u32,
    shares: Arc<ThreadShares>,
}

/// Both tiers of one lane.
struct Stack {
    nodes: Nodes<CpuBackend>,
    outbox: Vec<Outgoing<Payload<Buffer>>>,
    /// When its clock began.
    began: Instant,
    /// Its part in the turns on cores.
    _turns: Option<TakesTurns>,
}

impl Stack {
    /// Made on the strand's thread.
    fn new(plan: StrandPlan, weights: Arc<CpuWeights>) -> Result<Self, ClusterError> {
        let StrandPlan { config, layout, place, pages, shares } = plan;
        let (backend, turns) = shares.take(place.strand, pool(&layout))?;
        let weights = weights.beside(Arc::clone(&backend.threads), layout.slab_rows())?;
        let lane = Some((place.first_lane, pages));
        let strand = Strand { place, lane, layout: &layout, config: &config };
        let nodes = strand.nodes(&backend, Some(weights))?;
        Ok(Self { nodes, outbox: Vec::new(), began: Instant::now(), _turns: turns })
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
        // Its flights have one shard each, so it never waits for others.
        let Some(work) = self.nodes.start(self.now_ns())? else { return Ok(false) };
        self.nodes.finish(work, self.now_ns(), &mut self.outbox)?;
        for Outgoing { parcel, .. } in self.outbox.drain(..) {
            match parcel {
                // If nobody listens, no further order will come either.
                Parcel::Home(home) => _ = newsagent.send(News::Home(home)),
                parcel => _ = self.nodes.deliver(parcel)?,
            }
        }
        Ok(true)
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
