//! The network fabric, as the dispatcher sees it: launches out, tokens home, nodes that may die.

use crate::control::Control;
use crate::error::ClusterError;
use crate::fabric::{Fabric, WAIT};
use crate::net::{Controller, Event, LostReason, Peer};
use crate::report::NodeReport;
use crate::wire;
use glinthawk_flight::{Buffer, Kind, Message};
use glinthawk_protocol::{Home, Launch};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long nodes have to say what they did.
const REPORT_PATIENCE: Duration = Duration::from_secs(20);

/// How long to look for the node that is gone when another one fails.
const CAUSE_PATIENCE: Duration = Duration::from_secs(1);

/// Worker processes that have their roles.
pub struct RemoteFabric {
    controller: Controller,
    first: Peer,
    names: BTreeMap<Peer, String>,
    /// Came home while reports were waited for.
    homes: Vec<Home>,
}

impl RemoteFabric {
    pub(crate) fn new(controller: Controller, first: Peer, names: BTreeMap<Peer, String>) -> Self {
        Self { controller, first, names, homes: Vec::new() }
    }

    /// Takes an event; returns a worker's reports if it carried them.
    fn take(&mut self, event: Event) -> Result<Option<(Peer, Vec<NodeReport>)>, ClusterError> {
        match event {
            Event::Message { message, .. } if message.kind() == Kind::Home => {
                self.homes.push(wire::read_home(&message)?);
            }
            Event::Message { peer, message, .. } => match Control::read(&message)? {
                Control::Reported(reports) => return Ok(Some((peer, reports))),
                Control::Failed(reason) => {
                    let name = name_of(&self.names, peer);
                    return Err(self.cause(ClusterError::Failed { name, reason }));
                }
                other => tracing::warn!(%peer, message = ?other, "unexpected message"),
            },
            Event::Joined { peer, .. } => {
                tracing::warn!(%peer, "a worker came too late to have a role")
            }
            Event::Lost { peer, reason } if self.names.contains_key(&peer) => {
                return Err(ClusterError::Lost {
                    name: name_of(&self.names, peer),
                    reason: reason.to_string(),
                });
            }
            Event::Lost { .. } => {}
        }
        Ok(None)
    }

    fn send(&self, peer: Peer, message: Message) -> Result<(), ClusterError> {
        self.controller.send(peer, message).map_err(|error| self.cause(error.into()))
    }

    /// Finds the error to report instead of this one, which may only be a consequence: neighbours
    /// of a node that died fail too, and sometimes say so before its own connection does.
    fn cause(&self, error: ClusterError) -> ClusterError {
        let started = Instant::now();
        loop {
            match self.controller.recv(CAUSE_PATIENCE.saturating_sub(started.elapsed())) {
                // A node that fails says goodbye; a node that died does not.
                Some(Event::Lost { reason: LostReason::Goodbye, .. }) => {}
                Some(Event::Lost { peer, reason }) if self.names.contains_key(&peer) => {
                    let (name, reason) = (name_of(&self.names, peer), reason.to_string());
                    return ClusterError::Lost { name, reason };
                }
                Some(_) => {}
                None => return error,
            }
        }
    }
}

impl Fabric for RemoteFabric {
    fn launch(&mut self, launch: Launch) -> Result<(), ClusterError> {
        self.send(self.first, wire::launch(&launch))
    }

    fn advance(&mut self, homes: &mut Vec<Home>) -> Result<(), ClusterError> {
        let mut wait = if self.homes.is_empty() { WAIT } else { Duration::ZERO };
        while let Some(event) = self.controller.recv(wait) {
            self.take(event)?;
            wait = Duration::ZERO;
        }
        homes.append(&mut self.homes);
        Ok(())
    }

    fn reports(&mut self) -> Result<Vec<NodeReport>, ClusterError> {
        for &peer in self.names.keys() {
            self.send(peer, Control::Report.message(Buffer::default()))?;
        }
        let mut reports = BTreeMap::new();
        let started = Instant::now();
        while reports.len() < self.names.len() {
            if let Some(event) = self.controller.recv(WAIT)
                && let Some((peer, report)) = self.take(event)?
            {
                reports.insert(peer, report);
            }
            if started.elapsed() > REPORT_PATIENCE {
                let missing = self.names.iter().find(|(peer, _)| !reports.contains_key(peer));
                let name = missing.map_or_else(String::new, |(_, name)| name.clone());
                return Err(ClusterError::Lost { name, reason: "it does not report".to_owned() });
            }
        }
        let mut reports: Vec<NodeReport> = reports.into_values().flatten().collect();
        reports.sort_by(|a, b| (a.tier, &a.name).cmp(&(b.tier, &b.name)));
        Ok(reports)
    }
}

/// The name of a peer's role.
pub(crate) fn name_of(names: &BTreeMap<Peer, String>, peer: Peer) -> String {
    names.get(&peer).cloned().unwrap_or_else(|| peer.to_string())
}
