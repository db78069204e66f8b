//! Lustre's `lfs`: what a layout is called there.
//!
//! - [`setstripe`]: the options of `lfs setstripe`, in both directions
//! - [`getstripe`]: what `lfs getstripe` shows
//!
//! Not run on a real Lustre: the options are compared with what a real `lfs` took and refused, and with the bytes that it
//! would have sent (`tests/lfs-vectors.tsv`); the output is as its source prints it (2.15).

pub mod getstripe;
pub mod setstripe;

pub use getstripe::GetstripeError;
pub use setstripe::{OptionError, Setstripe};
