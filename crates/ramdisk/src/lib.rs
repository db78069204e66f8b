//! Filesystems in RAM, and how a process comes to see them.
//!
//! On one machine, for one program, [`tmpfs`] mounts a RAM disk, sized and with huge pages, in [`namespace`]s of its
//! own, so that nobody else sees it and nothing is left behind when the last process in them has ended: a private mount
//! namespace and, for an ordinary user, a user namespace with an identity mapping in which they may mount. [`mounts`]
//! shows directories of the RAM disk at the paths that the program already uses. [`memory`] says how much RAM may be
//! used at all.
//!
//! On many nodes an [`Engine`] builds it: the agent of each node makes the [`device`]s, starts the servers and mounts
//! the clients in a [`RuntimeDir`] of its own for each RAM disk.
//!
//! # Layout
//!
//! - [`memory`]: RAM that is free, memory cgroups counted
//! - [`namespace`]: private namespaces, made once and entered by every later helper process
//! - [`tmpfs`]: the RAM disk of one machine
//! - [`mounts`]: bind mounts, overlays, unmounting
//! - [`probe`]: what this kernel and this user can do, for `ondeck doctor`
//! - [`engine`]: what an engine is, and the engines: one file each
//! - [`runtime_dir`]: the directory and the processes of a RAM disk on one node; [`mark`]: how they are known again
//! - [`device`]: what the data lies on: RAM, or a directory of an SSD
//! - [`processes`]: the machine's processes, and how they are looked at
//! - [`holders`]: who has files open on a filesystem
//! - [`secret`]: the secret of an incarnation, and the keys that follow from it
//! - [`tcp`]: whether a connection was lost, and the machine's own addresses

pub mod device;
pub mod engine;
mod error;
pub mod holders;
pub mod mark;
pub mod memory;
pub mod mounts;
pub mod namespace;
pub mod probe;
pub mod processes;
pub mod runtime_dir;
pub mod secret;
pub mod tcp;
pub mod tmpfs;

pub use device::Device;
pub use engine::{Build, Engine, On, Phase, View, engine};
pub use error::EngineError;
pub use runtime_dir::RuntimeDir;
pub use secret::Secret;
