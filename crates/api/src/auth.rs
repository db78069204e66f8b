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

use ondeck_core::Owner;

use crate::config::Administrator;
use crate::wire::{Refusal, RefusalCode};

/// How long the addresses of the administrators' hosts are believed, and how long it is believed that one has none.
const BELIEVED: Duration = Duration::from_secs(60);
const BELIEVED_UNKNOWN: Duration = Duration::from_secs(2);

/// What a caller is to a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// May do everything.
    Administrator,
    /// May look at what is theirs.
    User,
}

/// Who calls, and from where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// What they are to this daemon.
    pub role: Role,
    /// The user id: the kernel vouches for it on the Unix socket, MUNGE over TCP.
    pub uid: u32,
    /// The host they call from; `None` is this machine, by the Unix socket.
    pub address: Option<IpAddr>,
    /// Whether the connection comes from a port below 1024, which only root of that host can use. Never so on the Unix
    /// socket.
    pub privileged_port: bool,
}

impl Caller {
    /// A process of this machine, by the Unix socket.
    pub fn local(uid: u32) -> Caller {
        let role = if uid == 0 { Role::Administrator } else { Role::User };
        Caller { role, uid, address: None, privileged_port: false }
    }

    /// Whether the caller may do everything.
    pub fn is_administrator(self) -> bool {
        self.role == Role::Administrator
    }

    /// Refuses everybody but administrators.
    ///
    /// # Errors
    /// [`RefusalCode::Forbidden`].
    pub fn must_be_administrator(self) -> Result<(), Refusal> {
        match self.role {
            Role::Administrator => Ok(()),
            Role::User => Err(Refusal {
                code: RefusalCode::Forbidden,
                message: format!(
                    "user {} may not do this: root on this node may, and whoever `administrators` in the \
                     configuration names, from the host that stands there (root from a port below 1024)",
                    self.uid
                ),
            }),
        }
    }

    /// Refuses everybody but root of this machine, by the Unix socket.
    ///
    /// # Errors
    /// [`RefusalCode::Forbidden`].
    pub fn must_be_root_here(self) -> Result<(), Refusal> {
        if self.address.is_none() && self.uid == 0 {
            return Ok(());
        }
        let message = format!("user {} may not do this from there: only root of this node may", self.uid);
        Err(Refusal::new(RefusalCode::Forbidden, message))
    }

    /// Refuses everybody but root of this machine or of another one, and administrators.
    ///
    /// # Errors
    /// [`RefusalCode::Forbidden`].
    pub fn must_be_root_somewhere(self) -> Result<(), Refusal> {
        if self.is_administrator() || self.uid == 0 && self.privileged_port {
            return Ok(());
        }
        let message = format!("user {} may not ask this: only root of a node may", self.uid);
        Err(Refusal::new(RefusalCode::Forbidden, message))
    }

    /// Whether the caller may look at what belongs to `owner`.
    pub fn may_see(self, owner: Owner) -> bool {
        match self.role {
            Role::Administrator => true,
            Role::User => self.uid == owner.uid,
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
        let privileged_port = from.port() < FIRST_OPEN_PORT;
        let from = from.ip().to_canonical();
        let is_one = (uid != 0 || privileged_port) && self.is_one(uid, from);
        let role = if is_one { Role::Administrator } else { Role::User };
        Caller { role, uid, address: Some(from), privileged_port }
    }

    fn is_one(&self, uid: u32, from: IpAddr) -> bool {
        let mut resolved = self.resolved.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let now = Instant::now();
        if resolved.as_ref().is_none_or(|resolved| now >= resolved.until) {
            let (known, all) = self.resolve();
            *resolved = Some(Resolved { until: now + if all { BELIEVED } else { BELIEVED_UNKNOWN }, known });
        }
        resolved.as_ref().is_some_and(|resolved| resolved.known.contains(&(uid, from)))
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
        let role = |uid, from: &str| {
            let from = SocketAddr::new(from.parse().unwrap(), 700);
            administrators.caller(uid, from).role
        };
        let unprivileged = administrators.caller(0, "127.0.0.1:1024".parse().unwrap());
        assert_eq!((unprivileged.role, unprivileged.privileged_port), (Role::User, false));
        assert_eq!(role(0, "127.0.0.1"), Role::Administrator);
        assert_eq!(role(0, "10.0.0.9"), Role::User);
        assert_eq!(role(1000, "10.0.0.9"), Role::Administrator);
        assert_eq!(role(1000, "127.0.0.1"), Role::User);
        assert_eq!(role(0, "::ffff:127.0.0.1"), Role::Administrator);
        let from = "[::ffff:10.0.0.9]:700".parse().unwrap();
        let caller = administrators.caller(7, from);
        assert_eq!((caller.address, caller.privileged_port), (Some("10.0.0.9".parse().unwrap()), true));
        let owner = Owner { uid: 7, gid: 1 };
        assert!(caller.may_see(owner) && Caller::local(7).may_see(owner) && Caller::local(0).may_see(owner));
        assert!(!unprivileged.may_see(owner) && !Caller::local(8).may_see(owner));
    }
}
