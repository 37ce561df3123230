//! Peers that have the cluster's secret and do what no honest node does.

use crate::cluster_support::{HANGS, TOKEN};
use glinthawk_cluster::net::{Config, Controller, Event, Peer, Token};
use glinthawk_cluster::{Control, LocalProcess, Offer, Role};
use glinthawk_compute::Isa;
use glinthawk_flight::{Buffer, Kind, Message, Pool};
use std::sync::Arc;
use std::time::Instant;

/// A dispatcher that gives out roles of its own.
pub struct FalseDispatcher {
    pub controller: Controller,
    pub address: String,
}

impl FalseDispatcher {
    /// The worker that joins.
    pub fn joined(&self) -> Peer {
        match self.controller.recv(HANGS) {
            Some(Event::Joined { peer, .. }) => peer,
            other => panic!("expected a worker, got {other:?}"),
        }
    }
}

/// A peer of a dispatcher, or of a worker.
pub struct Liar {
    pub controller: Controller,
    pub peer: Peer,
}

fn controller() -> Controller {
    let config = Config::new("liar", Token::new(TOKEN), Arc::new(Pool::new(8)));
    Controller::start(config).expect("a thread")
}

impl Liar {
    /// Waits for workers.
    pub fn dispatcher() -> FalseDispatcher {
        let controller = controller();
        let address = controller.listen("127.0.0.1:0").expect("a port").to_string();
        FalseDispatcher { controller, address }
    }

    /// Shakes hands.
    pub fn join(address: &str) -> Self {
        let controller = controller();
        let (peer, _) = controller.connect(address).expect("it has the secret");
        Self { controller, peer }
    }

    pub fn say(&self, control: &Control) {
        self.send(self.peer, control.message(Buffer::default()));
    }

    /// Sends, or was sent away already.
    pub fn send(&self, peer: Peer, message: Message) {
        _ = self.controller.send(peer, message);
    }

    /// Offers to work like one of the others, and waits for its role. Those that do not wish for a place come first.
    pub fn offer(&self, tier: u8) -> Role {
        self.offer_as(tier, Some(LocalProcess { place: 9, id: 0 }))
    }

    pub fn offer_as(&self, tier: u8, local: Option<LocalProcess>) -> Role {
        let port = self.controller.listen("127.0.0.1:0").expect("a port").port();
        let isa = Isa::detect();
        self.say(&Control::Offer(Offer {
            tier: Some(tier),
            local,
            threads: 1,
            kind: isa.kind(),
            gpu: None,
            page_positions: isa.page_positions().to_vec(),
            memory_bytes: 16 << 20,
            port,
        }));
        loop {
            match Control::read(&self.next(Kind::Control)) {
                Ok(Control::Role(role)) => return *role,
                // A neighbour may have its role already, and be here first.
                Ok(Control::Introduce(..)) => {}
                other => panic!("expected a role, got {other:?}"),
            }
        }
    }

    /// Takes the place of its role, on Tier 2; returns its Tier-1 node.
    pub fn be_ready(&self, role: &Role) -> Option<Peer> {
        let neighbour = role.dial.as_ref().map(|(address, pass)| {
            let (tier1, _) = self.controller.connect(address).expect("a Tier-1 node");
            self.send(tier1, Control::Introduce(role.lane, *pass).message(Buffer::default()));
            tier1
        });
        self.say(&Control::Ready);
        neighbour
    }

    /// The next message of a kind.
    pub fn next(&self, kind: Kind) -> Message {
        let started = Instant::now();
        while started.elapsed() < HANGS {
            match self.controller.recv(HANGS) {
                Some(Event::Message { message, .. }) if message.kind() == kind => return message,
                Some(Event::Lost { reason, .. }) => panic!("no {kind}, but {reason}"),
                _ => {}
            }
        }
        panic!("no {kind}")
    }

    /// Waits until the peer has sent it away.
    pub fn expect_dismissed(&self, peer: Peer) {
        let started = Instant::now();
        while started.elapsed() < HANGS {
            if let Some(Event::Lost { peer: lost, .. }) = self.controller.recv(HANGS)
                && lost == peer
            {
                return;
            }
        }
        panic!("it was not sent away");
    }
}
