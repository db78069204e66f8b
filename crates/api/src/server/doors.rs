//! Who may have how many connections.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ondeck_ramdisk::tcp::own_addresses;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;

use super::connection::converse;
use super::{Daemon, Peer, lock};

/// How long this machine's addresses are believed. Only root changes them.
const BELIEVED: Duration = Duration::from_secs(10);

/// Of whom there may be so many connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Origin {
    /// By the Unix socket.
    User(Option<u32>),
    /// Over TCP, by whichever of its addresses: a user can call from all of 127.0.0.0/8.
    ThisMachine,
    Host(Ipv4Addr),
    /// The first half of an IPv6 address: a host has as many of the rest as it wants.
    Network([u16; 4]),
}

impl Origin {
    pub(super) fn of(address: IpAddr, is_own: impl FnOnce(IpAddr) -> bool) -> Origin {
        let address = address.to_canonical();
        if address.is_loopback() || is_own(address) {
            return Origin::ThisMachine;
        }
        match address {
            IpAddr::V4(address) => Origin::Host(address),
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                Origin::Network([a, b, c, d])
            }
        }
    }
}

/// The ways in by one socket. Root has one of its own, so that ordinary users can't keep it out; of the other one, nobody
/// has more than a quarter.
pub(super) struct Doors {
    root: Door,
    others: Door,
    /// How many connections of the others there are from where.
    origins: Arc<Mutex<HashMap<Origin, usize>>>,
    own: Mutex<OwnAddresses>,
    /// The most of one origin.
    each: usize,
}

struct Door {
    /// Connections that may be there, served or waiting for that; more are closed.
    held: Arc<Semaphore>,
    /// Connections that may be served.
    served: Arc<Semaphore>,
}

impl Door {
    pub(super) fn new(connections: usize) -> Door {
        Door {
            held: Arc::new(Semaphore::new(connections * 2)),
            served: Arc::new(Semaphore::new(connections)),
        }
    }
}

impl Doors {
    pub(super) fn new(connections: usize) -> Doors {
        Doors {
            root: Door::new(connections),
            others: Door::new(connections),
            origins: Arc::default(),
            own: Mutex::default(),
            each: (connections / 4).max(1),
        }
    }

    /// Serves a connection when its turn comes. One too many is closed at once: accepting never waits.
    pub(super) fn let_in<I>(&self, daemon: &Arc<Daemon>, peer: Peer, stream: I)
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let door = if peer.is_root() { &self.root } else { &self.others };
        let Ok(held) = Arc::clone(&door.held).try_acquire_owned() else { return };
        let mut slot = None;
        if !peer.is_root() {
            let Some(one) = self.count(self.origin(peer)) else { return };
            slot = Some(one);
        }
        let (served, daemon) = (Arc::clone(&door.served), Arc::clone(daemon));
        tokio::spawn(async move {
            let _held = (held, slot);
            // The semaphore is never closed.
            let _served = served.acquire_owned().await;
            converse(daemon, peer, stream).await;
        });
    }

    fn origin(&self, peer: Peer) -> Origin {
        match peer {
            Peer::Local(uid) => Origin::User(uid),
            Peer::Remote(from) => Origin::of(from.ip(), |address| lock(&self.own).contains(address)),
        }
    }

    fn count(&self, origin: Origin) -> Option<OriginSlot> {
        let mut origins = lock(&self.origins);
        let number = origins.entry(origin).or_default();
        if *number >= self.each {
            return None;
        }
        *number += 1;
        Some(OriginSlot { origin, origins: Arc::clone(&self.origins) })
    }
}

/// The addresses of this machine's interfaces.
#[derive(Default)]
struct OwnAddresses {
    known: Vec<IpAddr>,
    until: Option<Instant>,
}

impl OwnAddresses {
    fn contains(&mut self, address: IpAddr) -> bool {
        let now = Instant::now();
        if self.until.is_none_or(|until| now >= until) {
            self.until = Some(now + BELIEVED);
            match own_addresses() {
                Ok(known) => self.known = known,
                // Those of before are still the best guess.
                Err(error) => tracing::error!(%error, "can't read the addresses of this machine"),
            }
        }
        self.known.contains(&address)
    }
}

/// The place that a connection takes among those of its origin.
struct OriginSlot {
    origin: Origin,
    origins: Arc<Mutex<HashMap<Origin, usize>>>,
}

impl Drop for OriginSlot {
    fn drop(&mut self) {
        let mut origins = lock(&self.origins);
        if let Some(number) = origins.get_mut(&self.origin) {
            *number -= 1;
            if *number == 0 {
                origins.remove(&self.origin);
            }
        }
    }
}
