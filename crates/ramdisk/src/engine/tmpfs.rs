//! The RAM of one node, for programs on that node: no process, no network, the speed of memory.

use std::path::Path;

use ondeck_core::{Bytes, EngineKind, Layout, NodeName};

use super::{Build, DATA_DEVICE, Engine, Phase, View};
use crate::{EngineError, mounts};

pub(super) struct Tmpfs;

impl Engine for Tmpfs {
    fn kind(&self) -> EngineKind {
        EngineKind::Tmpfs
    }

    fn programs(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    fn accepts(&self, layout: &Layout) -> Result<(), EngineError> {
        if let Some(other) = layout.clients.iter().find(|client| layout.server_on(client).is_none()) {
            return Err(not_there(layout, other));
        }
        match layout.servers.len() {
            1 if layout.replicas == 1 && layout.metadata_device.is_none() => Ok(()),
            1 => Err(EngineError::Refused("tmpfs has one copy of the data, on one device".into())),
            nodes => Err(EngineError::Refused(format!(
                "tmpfs is the RAM of one node and {nodes} were named; use --engine gluster or ceph"
            ))),
        }
    }

    fn smallest_share(&self) -> Bytes {
        Bytes(1 << 20)
    }

    fn process_memory(&self, _layout: &Layout, _server: usize, _share: Bytes) -> Bytes {
        Bytes::ZERO
    }

    fn ports(&self, _layout: &Layout, _server: usize) -> usize {
        0
    }

    fn phases(&self) -> &'static [Phase] {
        &[]
    }

    fn start(&self, _phase: usize, _build: &Build) -> Result<(), EngineError> {
        Ok(())
    }

    fn serves(&self, _phase: usize, _build: &Build) -> Result<bool, EngineError> {
        Ok(true)
    }

    fn mount(&self, build: &Build, at: &Path) -> Result<(), EngineError> {
        if build.me.is_none() {
            return Err(EngineError::Refused("tmpfs can be mounted on its own node only".into()));
        }
        let target = mounts::Target::open(at, None).map_err(|error| EngineError::io("open", at, error))?;
        mounts::bind(&build.runtime_dir.path(DATA_DEVICE), &target)
            .map_err(|error| EngineError::io("mount on", at, error))
    }

    fn view(&self, _build: &Build) -> Result<View, EngineError> {
        // The kernel itself serves it.
        Ok(View::default())
    }
}

fn not_there(layout: &Layout, client: &NodeName) -> EngineError {
    EngineError::Refused(format!(
        "tmpfs can be mounted on its own node {} only, not on {client}; use --engine gluster or ceph",
        layout.servers[0].node
    ))
}
