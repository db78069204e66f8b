//! No filesystem at all: every step takes the time and fails the way it is told. It lends not one byte.

use std::path::Path;
use std::time::{Duration, Instant};

use ondeck_core::allocation::Misbehaviour;
use ondeck_core::{Bytes, EngineKind, Layout};

use super::{Build, Engine, On, Phase, View};
use crate::EngineError;

pub(super) struct Simulated;

/// Takes a step's time, and fails or hangs if it was told to.
pub(super) fn pretend(step: &str, build: &Build) -> Result<(), EngineError> {
    let Some(simulation) = &build.layout.simulation else { return Ok(()) };
    let here = build.me.map(|index| &build.layout.servers[index].node);
    let fault = simulation
        .faults
        .iter()
        .find(|fault| fault.step == step && (fault.node.is_none() || fault.node.as_ref() == here));
    if let Some(fault) = fault {
        match fault.how {
            Misbehaviour::Fail => return Err(EngineError::Refused(format!("simulated failure of `{step}`"))),
            Misbehaviour::Hang => return build.runtime_dir.wait(build.until, step, || Ok(None)),
        }
    }
    let end = Instant::now() + Duration::from_millis(simulation.delay_ms);
    build.runtime_dir.wait(build.until, step, || Ok((Instant::now() >= end).then_some(())))
}

impl Engine for Simulated {
    fn kind(&self) -> EngineKind {
        EngineKind::Simulated
    }

    fn programs(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    fn accepts(&self, _layout: &Layout) -> Result<(), EngineError> {
        Ok(())
    }

    fn smallest_share(&self) -> Bytes {
        Bytes(1)
    }

    fn uses_device(&self, _layout: &Layout) -> bool {
        false
    }

    fn process_memory(&self, _layout: &Layout, _server: usize, _share: Bytes) -> Bytes {
        Bytes::ZERO
    }

    fn ports(&self, _layout: &Layout, _server: usize) -> usize {
        1
    }

    fn phases(&self) -> &'static [Phase] {
        &[Phase { name: "servers", on: On::Every }]
    }

    fn start(&self, _phase: usize, build: &Build) -> Result<(), EngineError> {
        pretend("start", build)
    }

    fn serves(&self, _phase: usize, build: &Build) -> Result<bool, EngineError> {
        pretend("serve", build).map(|()| true)
    }

    fn mount(&self, build: &Build, _at: &Path) -> Result<(), EngineError> {
        pretend("mount", build)
    }

    fn init_root(&self, build: &Build, _data: &Path) -> Result<(), EngineError> {
        pretend("check", build)
    }

    fn view(&self, _build: &Build) -> Result<View, EngineError> {
        Ok(View::default())
    }
}
