//! The staging engine: a fast, verified, resumable copy of a tree that keeps everything a filesystem can hold.
//!
//! # How a copy goes
//!
//! Workers share one last-in-first-out [`work_stack`] of directories and of batches of their entries. A directory of the
//! source and its counterpart in the target are opened once, relative to their parents and never through a symlink;
//! every entry is then reached by its bare name, so neither path length nor a symlink swapped in meanwhile can lead
//! a worker out of either tree. The stack stays small because a directory is read in blocks and its remainder goes
//! to the bottom of its own subtree's work.
//!
//! A name appears in the target only when its content is complete: a file is written under a temporary name and
//! renamed, and a directory that is new as a whole is built under a temporary name and renamed when its last entry
//! is in place, which saves the renames inside it. Checksums are taken from the buffers as they pass, and stand in
//! a [`manifest`] beside size and times. Running the same copy again resumes: what the manifest records and what
//! still matches is not copied again.
//!
//! # Layout
//!
//! - [`stage`], [`Options`], [`Summary`]: the entry point, what it is told, what it tells
//! - `engine`: the workers; `work_stack`: what they do next; `dir`: a pair of directories; `links`: hard links
//! - [`manifest`], [`checksum`], [`verify`], `compare`: what was promised, and how it is checked
//! - [`merge`]: how a caller steers a copy into a directory that others may change meanwhile
//! - `attributes`, `acl`: owner, mode, times, xattrs, ACLs; [`credentials`]: dropping to a user
//! - [`survey`]: walking a tree without copying it; [`identity`]: what a file is, whatever it is called; [`whereabouts()`]: whether a path still leads to what was opened
//! - [`pack`]: many small files as one archive, and back
//! - [`progress`], `throttle`, `exclude`: watching it, slowing it, leaving things out

mod acl;
mod attributes;
pub mod checksum;
mod compare;
pub mod credentials;
mod dir;
mod engine;
mod error;
mod exclude;
pub mod identity;
mod links;
pub mod manifest;
pub mod merge;
mod options;
pub mod pack;
pub mod progress;
pub mod survey;
mod throttle;
pub mod verify;
mod whereabouts;
mod work_stack;

pub use attributes::{Ownership, closed_by_another, copy_directory_attributes, xattrs_at, xattrs_of};
pub use checksum::Checksum;
pub use engine::{Roots, Summary, TargetRoot, stage, stage_roots};
pub use error::{EntryError, StageError};
pub use exclude::Exclude;
pub use options::{Gate, Options};
pub use progress::{Event, Monitor, Progress};
pub use whereabouts::{Whereabouts, whereabouts};
