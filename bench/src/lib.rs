//! What the benchmark and the demo's program share: reproducible bytes, and sizes as people write
//! them. The benchmark itself is `main.rs`, where the map of its modules is.

pub mod random;
pub mod size;
