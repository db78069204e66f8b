//! The scheduler beside a real Slurm: real batch jobs of ordinary users on a cluster of one controller, four RSA nodes
//! and four compute nodes, with real data compared byte by byte.

#![allow(clippy::unwrap_used)]

mod accounts;
mod aids;
#[path = "../shared/binary.rs"]
mod binary;
mod classifier;
mod cluster;
mod crowd;
mod doctor;
mod documents;
mod endings;
mod faults;
mod heterogeneous;
mod inside;
mod inside_lost;
mod inside_submit;
mod io_nodes;
mod isolation;
mod jobs;
mod journals;
mod late;
mod layout_arrays;
mod layout_history;
mod layouts;
mod life;
mod lives;
mod loads;
mod merge;
mod neighbours;
mod numbers;
mod order;
mod places;
mod reload;
mod restarts;
mod room;
mod scripts;
mod shapes;
mod shares;
mod simulate;
mod soak;
mod switch;
mod thesis;
mod timeline;
