//! Who calls, and what they may.
//!
//! Roles are bound to hosts: root on a compute node is that node and no more. Administrators are the users that the
//! configuration names, on the hosts that it names; and root on this machine, through the Unix socket.
//!
//! MUNGE vouches for the user, not for the host. The host is known by the connection's address, and any user there could
//! pass on what root of another host sends. So root must call from a port below 1024, which only root can use.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ondeck_api::config::Administrator;
use ondeck_api::wire::{Refusal, RefusalCode};
use ondeck_core::Owner;

/// How long the addresses of the administrators' hosts are believed, and how long it is believed that one has none.
const BELIEVED: Duration = Duration::from_secs(60);
const BELIEVED_UNKNOWN: Duration = Duration::from_secs(2);

/// Who calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// May do everything.
    Administrator,
    /// May look at what is theirs.
    User(u32),
}

impl Caller {
    /// Refuses everybody but administrators.
    ///
    /// # Errors
    /// [`RefusalCode::Forbidden`].
    pub fn must_be_administrator(self) -> Result<(), Refusal> {
        match self {
            Caller::Administrator => Ok(()),
            Caller::User(uid) => Err(Refusal {
                code: RefusalCode::Forbidden,
                message: format!(
                    "user {uid} may not do this: root on this node may, and whoever `administrators` in the agent's \
                     configuration names, from the host that stands there (root from a port below 1024)"
                ),
            }),
        }
    }

    /// Whether the caller may look at what belongs to `owner`.
    pub fn may_see(self, owner: Owner) -> bool {
        match self {
            Caller::Administrator => true,
            Caller::User(uid) => uid == owner.uid,
        }
    }
}

/// The user ids and addresses of the administrators, and until when they are believed.
struct Resolved {
    until: Instant,
    known: Vec<(u32, IpAddr)>,
}

/// The administrators, with their hosts' addresses.
pub struct Administrators {
    named: Vec<Administrator>,
    resolved: Mutex<Option<Resolved>>,
}

impl Administrators {
    /// As the configuration names them.
    pub fn new(named: &[Administrator]) -> Administrators {
        Administrators { named: named.to_vec(), resolved: Mutex::new(None) }
    }

    /// Who calls over TCP from an address, with the user id that MUNGE vouches for. It may ask the name service.
    pub fn caller(&self, uid: u32, from: SocketAddr) -> Caller {
        const FIRST_OPEN_PORT: u16 = 1024;
        if uid == 0 && from.port() >= FIRST_OPEN_PORT {
            return Caller::User(uid);
        }
        let from = from.ip();
        let mut resolved = self.resolved.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let now = Instant::now();
        if resolved.as_ref().is_none_or(|resolved| now >= resolved.until) {
            let (known, all) = self.resolve();
            *resolved = Some(Resolved { until: now + if all { BELIEVED } else { BELIEVED_UNKNOWN }, known });
        }
        let is_one =
            resolved.as_ref().is_some_and(|resolved| resolved.known.contains(&(uid, from.to_canonical())));
        if is_one { Caller::Administrator } else { Caller::User(uid) }
    }

    /// The administrators that the name service knows, and whether these are all.
    fn resolve(&self) -> (Vec<(u32, IpAddr)>, bool) {
        let (mut known, mut all) = (Vec::new(), true);
        for Administrator { user, host } in &self.named {
            let Some(uid) = user_id(user) else {
                tracing::warn!(user, "an administrator is no user of this machine");
                all = false;
                continue;
            };
            match (host.as_str(), 0).to_socket_addrs() {
                Ok(addresses) => known.extend(addresses.map(|address| (uid, address.ip().to_canonical()))),
                Err(error) => {
                    tracing::warn!(host, %error, "the host of an administrator has no address");
                    all = false;
                }
            }
        }
        (known, all)
    }
}

fn user_id(user: &str) -> Option<u32> {
    if user == "root" {
        return Some(0);
    }
    if let Ok(uid) = user.parse() {
        return Some(uid);
    }
    // A static binary can't load the name-service modules that know a site's users.
    let output = std::process::Command::new("id").args(["-u", "--", user]).output().ok()?;
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_elsewhere_is_no_administrator() {
        let administrators = Administrators::new(&[
            Administrator { user: "root".into(), host: "127.0.0.1".into() },
            Administrator { user: "1000".into(), host: "10.0.0.9".into() },
        ]);
        let caller = |uid, from: &str| {
            let from = std::net::SocketAddr::new(from.parse().unwrap(), 700);
            administrators.caller(uid, from)
        };
        assert_eq!(administrators.caller(0, "127.0.0.1:1024".parse().unwrap()), Caller::User(0));
        assert_eq!(caller(0, "127.0.0.1"), Caller::Administrator);
        assert_eq!(caller(0, "10.0.0.9"), Caller::User(0));
        assert_eq!(caller(1000, "10.0.0.9"), Caller::Administrator);
        assert_eq!(caller(1000, "127.0.0.1"), Caller::User(1000));
        assert_eq!(caller(0, "::ffff:127.0.0.1"), Caller::Administrator);
        assert!(
            Caller::User(7).may_see(Owner { uid: 7, gid: 1 })
                && !Caller::User(0).may_see(Owner { uid: 7, gid: 1 })
        );
    }
}
