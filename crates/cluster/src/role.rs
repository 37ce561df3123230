//! How a worker takes up its role: it loads weights, meets its neighbours, and makes its nodes, strand by strand.

use crate::control::Role;
use crate::error::ClusterError;
use crate::net::{Event, LostReason};
use crate::news::WorkerNews;
use crate::nodes::{self, Strand};
use crate::report::NodeReport;
use crate::serve::Server;
use crate::station::{IDLE, Station};
use crate::strand::ThreadShares;
use crate::tier1_kernels::Tier1Place;
use crate::weights::model_of;
use glinthawk_compute::{Backend, CpuBackend, CpuWeights};
use glinthawk_flight::{Buffer, Kind, Message};
use glinthawk_protocol::NodeAddress;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, ScopedJoinHandle};
use std::time::Instant;

/// Runs a worker of one strand in its role to its end, on a device.
pub(crate) fn run<B: Backend>(station: &Arc<Station>, backend: B) -> Result<(), ClusterError> {
    let weights = load(station, &backend)?;
    let nodes = strand_of(&station.role, 0).nodes(&backend, weights)?;
    meet(station);
    station.threads.pin_caller();
    let ready = station.ready()?;
    let reports = Server::new(station, 0, backend, nodes).serve()?;
    station.done(total(&reports), ready);
    Ok(())
}

/// The same for several strands, each on a thread of its own. The calling thread tells all of them what the network
/// says that is not for one of them.
pub(crate) fn run_strands(
    station: &Arc<Station>,
    backend: CpuBackend,
    threads: usize,
) -> Result<(), ClusterError> {
    let weights = load(station, &backend)?;
    meet(station);
    let strands = station.role.layout.strands;
    let layout = station.role.layout.clone();
    station.controller.sort(1 + strands, move |message| match message.kind() {
        Kind::Control => 0,
        _ => 1 + layout.strand_of(message.step().shard.lane),
    });
    let shares = &ThreadShares::new(backend.isa, threads, strands)?;
    let (weights, pool) = (weights.as_ref(), &backend.pool);
    let (readied, all_ready) = channel();
    thread::scope(|scope| {
        let work = |strand: usize| {
            let readied = readied.clone();
            let work = move || {
                let (backend, _turns) = shares.take(strand, Arc::clone(pool))?;
                serve_strand(station, strand, backend, weights, readied)
            };
            let thread = thread::Builder::new().name(format!("strand-{strand}"));
            thread.spawn_scoped(scope, work).map_err(ClusterError::io("cannot start a thread"))
        };
        let threads = (0..strands).map(work).collect::<Result<Vec<_>, _>>();
        drop(readied);
        if threads.is_err() {
            dismiss(station);
        }
        // The channel ends early if a strand fails.
        let is_ready = all_ready.iter().take(strands).count() == strands;
        let ready = if is_ready { station.ready() } else { Ok(Instant::now()) };
        let threads = threads?;
        let worked = ready.and_then(|ready| Ok((ready, oversee(station, &threads)?)));
        if worked.is_err() || !is_ready {
            dismiss(station);
        }
        let mut reports = Vec::new();
        for thread in threads {
            reports.extend(thread.join().unwrap_or_else(|panic| resume_unwind(panic))?);
        }
        let (ready, ()) = worked?;
        station.done(total(&reports), ready);
        Ok(())
    })
}

type StrandThread<'scope> = ScopedJoinHandle<'scope, Result<Vec<NodeReport>, ClusterError>>;

fn serve_strand(
    station: &Arc<Station>,
    strand: usize,
    backend: CpuBackend,
    weights: Option<&CpuWeights>,
    readied: Sender<()>,
) -> Result<Vec<NodeReport>, ClusterError> {
    let slab_rows = station.role.layout.slab_rows();
    let beside = |weights: &CpuWeights| weights.beside(Arc::clone(&backend.threads), slab_rows);
    let weights = weights.map(beside).transpose()?;
    let nodes = strand_of(&station.role, strand).nodes(&backend, weights)?;
    // If nobody listens, another strand has failed, and this one is told in a moment.
    _ = readied.send(());
    drop(readied);
    Server::new(station, strand, backend, nodes).serve()
}

/// Passes on what the network says until a strand ends: all end together.
fn oversee(station: &Arc<Station>, threads: &[StrandThread<'_>]) -> Result<(), ClusterError> {
    while !threads.iter().any(ScopedJoinHandle::is_finished) {
        station.heed_leaving()?;
        let Some(event) = station.next(IDLE) else { continue };
        let Some(event) = station.settle(event)? else { continue };
        for letter_box in 1..=threads.len() {
            let copy = match &event {
                Event::Joined { .. } => continue,
                Event::Lost { peer, reason } => Event::Lost { peer: *peer, reason: reason.clone() },
                Event::Message { peer, message, received_at } => {
                    let message = Message::control(message.table().to_vec(), Buffer::default());
                    Event::Message { peer: *peer, message, received_at: *received_at }
                }
            };
            station.controller.post(letter_box, copy);
        }
        if matches!(event, Event::Lost { peer, .. } if peer == station.dispatcher) {
            return Ok(());
        }
    }
    // If it failed, the others must not go on alone.
    dismiss(station);
    Ok(())
}

/// Ends all strands.
fn dismiss(station: &Station) {
    for letter_box in 1..=station.role.layout.strands {
        let (peer, reason) = (station.dispatcher, LostReason::Goodbye);
        station.controller.post(letter_box, Event::Lost { peer, reason });
    }
}

/// What all strands did, as one node.
fn total(reports: &[NodeReport]) -> NodeReport {
    let first = &reports[0];
    let of_tier = reports.iter().filter(|report| report.tier == first.tier);
    let strands = of_tier.clone().count() as u64;
    NodeReport {
        busy_ns: of_tier.clone().map(|report| report.busy_ns).sum::<u64>() / strands,
        batches: of_tier.clone().map(|report| report.batches).sum(),
        rows: of_tier.map(|report| report.rows).sum(),
        ..first.clone()
    }
}

/// A strand of a role.
fn strand_of(role: &Role, strand: usize) -> Strand<'_> {
    let Role { layout, config, pipeline, slice, lane, trace, .. } = role;
    let place = Tier1Place::new(layout, (*pipeline, strand), *slice, *trace);
    let own = place.first_lane;
    let lane = match lane {
        None => layout.tier1_attends.then_some(own),
        Some(first) => layout.lanes_of_worker(*first).nth(strand),
    };
    let lane = lane.map(|lane| (lane, role.lane_pages[lane as usize]));
    Strand { place, lane, layout, config }
}

/// Loads a Tier-1 node's weights, and says how much there is for contexts.
fn load<B: Backend>(
    station: &Arc<Station>,
    backend: &B,
) -> Result<Option<B::Weights>, ClusterError> {
    let role = &station.role;
    let weights = match role.lane {
        Some(_) => None,
        None => {
            let model = model_of(station)?;
            let mut said = false;
            let progress = &mut |_, total| {
                if !std::mem::replace(&mut said, true) {
                    (station.news)(WorkerNews::Loading(&model, total));
                }
            };
            Some(nodes::load_slice(&model, &role.layout, role.slice, backend, progress)?)
        }
    };
    let lanes = (0..role.layout.strands).filter_map(|strand| strand_of(role, strand).lane);
    let pages: u64 = lanes.map(|(_, pages)| u64::from(pages)).sum();
    if pages > 0 {
        let page_bytes = role.layout.page_bytes(&role.config, role.slice);
        (station.news)(WorkerNews::Contexts(pages * page_bytes));
    }
    Ok(weights)
}

/// Begins to meet the neighbours. The dispatcher hears of each that has met, and may name others meanwhile.
fn meet(station: &Arc<Station>) {
    if station.role.lane.is_none() {
        station.neighbours.insert(NodeAddress::Dispatcher, station.dispatcher, 0);
    }
    if let Some((address, pass)) = &station.role.dial {
        station.begin_dial(address.clone(), *pass);
    }
}
