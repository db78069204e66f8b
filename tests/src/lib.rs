//! Several hosts on one machine, for the tests of the whole system.
//!
//! A [`Testbed`] is a small cluster without virtual machines, systemd or containers: each host is a network, a mount
//! and a UTS namespace, and a virtual bridge joins them. All hosts share one private process-id namespace, the disk
//! and `/tmp`; each has its own hostname, addresses, mounts and `/run`.
//!
//! ```no_run
//! use std::time::Duration;
//! use ondeck_testbed::{Testbed, wait_until};
//!
//! # fn main() -> anyhow::Result<()> {
//! let bed = Testbed::builder().host("ctl").hosts("n", 4).build()?;
//! assert_eq!(bed.host("n1").ok(&["hostname"]), "n1\n");
//! let server = bed.host("n2").command("some-server");
//! let mut server = bed.host("n2").spawn_daemon(server, &bed.dir().join("server.log"))?;
//! wait_until(Duration::from_secs(5), "the server listens", || !bed.host("n2").listening().is_empty());
//! bed.host("n2").cut();
//! # Ok(())
//! # }
//! ```
//!
//! # Nothing is left behind
//!
//! Nothing of a bed is pinned in the filesystem or made in the machine's own namespaces: it lives as long as its
//! processes do, and these hang on one thread. The chain, from the test to a program in a host:
//!
//! ```text
//! test process ── pipe ──> supervisor ──> init (process 1) ──> one holder per host
//!       └── enter ──> a program in a host
//! ```
//!
//! - The test process holds the write end of a pipe. When it ends, by whatever death, the kernel closes the pipe;
//!   init reads the end of file and exits.
//! - When process 1 of a process-id namespace exits, the kernel kills every process in it, background ones included.
//! - Mount and network namespaces, with the mounts and interfaces in them, vanish with their last process.
//!
//! A death signal tied to the test process (`PR_SET_PDEATHSIG`) would not do: it fires when the *thread* that
//! started the child ends, and Rust runs each test in a thread of its own. It is used only between the
//! single-threaded processes of the chain: supervisor to init, `enter` to its program.
//!
//! Dropping the [`Testbed`] takes the same road, and waits until the last process is gone. Only its temporary
//! directory, `/tmp/ondeck-testbed.<process id>.XXXXXX`, outlives a SIGKILL; `make clean-testbed` removes it.
//!
//! # Layout
//!
//! - [`bed`]: building and dropping the whole
//! - [`host`]: one host: running programs in it, cutting it off, crashing it
//! - [`daemon`]: a program that is left running in a host
//! - [`observe`]: what a host looks like from outside: processes, mounts, listening sockets
//! - [`mute`]: a filesystem of a user's that never answers
//! - [`processor`]: a share of a processor that a program has at most
//! - [`ceph`]: a CephFS that a site has
//! - [`munge`]: the authentication daemon that Slurm needs
//! - [`users`]: the ordinary users that every host knows
//! - [`slurm`]: a Slurm cluster on the hosts
//! - [`inside`]: what the binary does as supervisor, init and holder
//! - [`enter`]: what the binary does to run one program in a host
//! - [`plan`]: what the test process and init tell each other

pub mod bed;
pub mod ceph;
mod control;
pub mod daemon;
#[doc(hidden)]
pub mod enter;
pub mod host;
#[doc(hidden)]
pub mod inside;
pub mod munge;
pub mod mute;
pub mod observe;
#[doc(hidden)]
pub mod plan;
pub mod processor;
pub mod slurm;
pub mod users;
mod wait;

pub use bed::{Builder, Testbed};
pub use ceph::CephServers;
pub use daemon::Daemon;
pub use host::{Host, Ran};
pub use observe::{Mount, Process};
pub use processor::CpuLimit;
pub use rustix::process::{Pid, Signal};
pub use slurm::{Slurm, SlurmSetup};
pub use users::User;
pub use wait::{Outcome, wait_until};

/// Whether a bed can be built by this user on this machine; if not, the test that asks is skipped, with the reason.
///
/// For the first line of a test: `if !ondeck_testbed::available() { return; }`.
pub fn available() -> bool {
    match bed::check() {
        Ok(()) => true,
        Err(error) => {
            ondeck_skip::skipped(format_args!("{error:#}"));
            false
        }
    }
}
