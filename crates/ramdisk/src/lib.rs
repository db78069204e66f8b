//! Filesystems in RAM, and how a process comes to see them.
//!
//! On one machine the engine is tmpfs: [`tmpfs`] mounts it, sized and with huge pages. It is mounted in
//! [`namespace`]s of its own, so that nobody else sees it and nothing is left behind when the last process in them
//! has ended: a private mount namespace and, for an ordinary user, a user namespace with an identity mapping in
//! which they may mount. [`mounts`] shows directories of the RAM disk at the paths that the program already uses.
//! [`memory`] says how much RAM may be used at all.
//!
//! # Layout
//!
//! - [`memory`]: RAM that is free, memory cgroups counted
//! - [`namespace`]: private namespaces, made once and entered by every later helper process
//! - [`tmpfs`]: the RAM disk of one machine
//! - [`mounts`]: bind mounts, overlays, unmounting
//! - [`probe`]: what this kernel and this user can do, for `ondeck doctor`

pub mod memory;
pub mod mounts;
pub mod namespace;
pub mod probe;
pub mod tmpfs;
