//! The newest epoch of every name, kept on disk: a late request must not build again what was destroyed.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::{Duration, Instant};

use ondeck_core::{Epoch, RamDiskName};

use super::recovery::StartError;
use super::{Node, RamDiskTable};

/// The file with the newest epoch of every name.
const EPOCHS: &str = "epochs.json";

/// How long the epoch of a destroyed RAM disk is remembered. Credentials are refused long before.
const REMEMBERED: Duration = Duration::from_secs(24 * 3600);

impl Node {
    /// The epochs that an earlier agent kept. It keeps none before the first RAM disk.
    pub(super) fn load_epochs(&self) -> Result<BTreeMap<RamDiskName, Epoch>, StartError> {
        let path = self.state.join(EPOCHS);
        let read = match std::fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            read => read.and_then(|text| Ok(serde_json::from_slice(&text)?)),
        };
        read.map_err(|source| StartError::Epochs { path, source })
    }

    pub(super) fn save_epochs(&self, known: &mut RamDiskTable) {
        let RamDiskTable { ramdisks, epochs, noted, .. } = known;
        let now = Instant::now();
        epochs.retain(|name, _| {
            let since = noted.entry(name.clone()).or_insert(now);
            if ramdisks.contains_key(name) {
                *since = now;
            }
            now.duration_since(*since) < REMEMBERED
        });
        noted.retain(|name, _| epochs.contains_key(name));
        let partial = self.state.join(format!("{EPOCHS}.partial"));
        let write = || -> std::io::Result<()> {
            let mut file = std::fs::File::create(&partial)?;
            file.write_all(&serde_json::to_vec(&*epochs)?)?;
            // A torn file would keep the next agent from starting.
            file.sync_all()?;
            std::fs::rename(&partial, self.state.join(EPOCHS))
        };
        if let Err(error) = write() {
            tracing::error!(%error, "can't keep the epochs; after a restart late requests are not refused");
        }
    }
}
