//! What the first client writes and every other one must read.

use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use ondeck_core::Bytes;
use ondeck_ramdisk::engine::{CLIENT, DATA};
use ondeck_ramdisk::{Build, EngineError, engine};

use super::RamDisk;
use crate::hang::within;

/// Beside the owner's directory, where only root looks: what the check wrote.
const CHECK: &str = ".ondeck-check";

impl RamDisk {
    pub(super) fn check(&self, build: &Build) -> Result<(), EngineError> {
        let engine = engine(build.layout.engine);
        let root = self.runtime_dir.path(CLIENT);
        let data = root.join(DATA);
        if !self.is_mounted()? {
            return engine.init_root(build, &data);
        }
        let check = root.join(CHECK);
        let wanted = check_content(build);
        let (owner, made) = (build.layout.owner, data.clone());
        within(build.until, "the first write and read", move || {
            match fs::DirBuilder::new().mode(0o700).create(&made) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                    return Err(EngineError::io("make", &made, error));
                }
                _ => {}
            }
            let write = || -> std::io::Result<()> {
                let mut file =
                    OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&check)?;
                file.write_all(&wanted)?;
                file.sync_all()
            };
            write().map_err(|error| EngineError::io("write", &check, error))?;
            read_check(&check, &wanted)
        })?;
        engine.init_root(build, &data)?;
        let owned = data.clone();
        within(build.until, "the owner's directory", move || {
            std::os::unix::fs::chown(&owned, Some(owner.uid), Some(owner.gid))
                .map_err(|error| EngineError::io("change the owner of", &owned, error))
        })
    }

    /// Refuses to show a filesystem of which a part is missing.
    pub(super) fn is_whole(&self, build: &Build) -> Result<(), EngineError> {
        let (check, wanted) = (self.runtime_dir.path(CLIENT).join(CHECK), check_content(build));
        within(build.until, "reading what the first client wrote", move || read_check(&check, &wanted))?;
        if let Some((size, _)) = self.filesystem()? {
            let promised = build.layout.capacity();
            // A client that sees a part of the servers is given a part of the size.
            if size < Bytes(promised.0 / 100 * 99) {
                return Err(EngineError::Check(format!(
                    "the filesystem has {size} where {promised} were built: a server is missing"
                )));
            }
        }
        Ok(())
    }
}

/// What the check writes: 4 KiB that follow from the secret, so that every client knows them.
fn check_content(build: &Build) -> Vec<u8> {
    build.client_secret().derive("check").repeat(128)
}

fn read_check(path: &Path, wanted: &[u8]) -> Result<(), EngineError> {
    let mut found = Vec::new();
    fs::File::open(path)
        .and_then(|mut file| file.read_to_end(&mut found))
        .map_err(|error| EngineError::io("read", path, error))?;
    if found != wanted {
        return Err(EngineError::Check(format!("{} has other bytes than were written", path.display())));
    }
    Ok(())
}
