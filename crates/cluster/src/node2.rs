//! A Tier-2 node on the network: rows in, attention output back.

use crate::error::ClusterError;
use crate::net::Peer;
use crate::news::WorkerNews;
use crate::payload::Payload;
use crate::station::{Heard, IDLE, Station};
use crate::tier2::Tier2Worker;
use crate::wire;
use glinthawk_compute::{Backend, CpuBackend, CpuContext};
use glinthawk_flight::Kind;
use glinthawk_protocol::Tier2Node;
use std::time::Duration;

/// The attention worker of a lane, for a slice's layers.
pub(crate) fn attention_worker(
    station: &Station,
    lane: u32,
) -> Result<Tier2Worker<CpuBackend>, ClusterError> {
    let role = &station.role;
    let config = &role.config;
    let layers = role.layout.layers(config.layers, role.slice).len();
    let pages = role.lane_pages[lane as usize];
    let context =
        station.backend.context(config, layers, pages as usize, role.layout.context_type)?;
    let page_bytes = CpuContext::page_bytes(config, layers, role.layout.context_type) as u64;
    (station.news)(WorkerNews::Contexts(u64::from(pages) * page_bytes));
    let node = Tier2Node::new(role.layout.slots(), pages);
    let name = format!("tier2-{}-{lane}", role.slice);
    Ok(Tier2Worker::new(
        name,
        node,
        station.backend.clone(),
        context,
        config.query_width(),
        role.trace,
    ))
}

/// Runs a Tier-2 node to its end.
pub(crate) fn run(station: &Station, lane: u32) -> Result<(), ClusterError> {
    let mut worker = attention_worker(station, lane)?;
    station.backend.threads.pin_caller();
    let tier1 =
        station.dial_neighbour(Some(lane))?.expect("a Tier-2 node has a Tier-1 node to dial");
    station.shape(tier1);
    let ready = station.ready()?;
    serve(station, &mut worker, tier1)?;
    station.done(worker.report(), ready);
    Ok(())
}

fn serve(
    station: &Station,
    worker: &mut Tier2Worker<CpuBackend>,
    tier1: Peer,
) -> Result<(), ClusterError> {
    loop {
        while let Some(heard) = station.hear(Duration::ZERO)? {
            if take(station, worker, tier1, heard)? {
                return Ok(());
            }
        }
        worker.start()?;
        match worker.finish()? {
            Some((attended, Payload::Host(output))) => {
                let rows = output.len_bytes() / (2 * station.role.config.query_width());
                station.controller.send(tier1, wire::attended(&attended, rows, output))?;
            }
            Some((_, Payload::Device(_))) => unreachable!("rows that came in a message go in one"),
            None => {
                if let Some(heard) = station.hear(IDLE)?
                    && take(station, worker, tier1, heard)?
                {
                    return Ok(());
                }
            }
        }
    }
}

/// Takes an event; `true` ends the node.
fn take(
    station: &Station,
    worker: &mut Tier2Worker<CpuBackend>,
    tier1: Peer,
    heard: Heard,
) -> Result<bool, ClusterError> {
    match heard {
        Heard::Message(peer, message, arrived)
            if peer == tier1 && message.kind() == Kind::Attend =>
        {
            let needed = message.rows() * station.role.config.qkv_width() * 2;
            if message.payload().len_bytes() != needed {
                let got = message.payload().len_bytes();
                return Err(ClusterError::Control(format!(
                    "rows with {got} bytes of q, k, v, not {needed}"
                )));
            }
            let attend = wire::read_attend(&message);
            worker.take(attend, Payload::Host(message.into_payload()), arrived)?;
        }
        Heard::Message(peer, message, _) => {
            return Err(ClusterError::Control(format!(
                "a Tier-2 node was sent {} by {peer}",
                message.kind()
            )));
        }
        Heard::ReportWanted => station.send_reports(vec![worker.report()])?,
        Heard::Lost(_, error) => return Err(error),
        Heard::Over => return Ok(true),
        Heard::LaneLost(_) | Heard::Nothing => {}
    }
    Ok(false)
}
