//! What all requests of a mount share.

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fuser::{FileAttr, FopenFlags, INodeNo, Notifier, ReplyEntry};

use super::KEPT;
use super::convert::{self, ONLY};
use super::directories::Directories;
use super::give_back::GivesBack;
use super::passthrough::PassthroughFiles;
use super::processor::Processors;
use super::set_id::SetIdFiles;
use crate::message::{Attributes, Caller, Client, Ino, Named, Opened, Service};
use crate::settings::Writes;

/// What the kernel can do, as far as it makes a difference here.
#[derive(Clone, Copy, Debug, Default)]
pub struct Kernel {
    /// Reads files of the store by itself (Linux 6.9).
    pub passthrough: bool,
    /// Maps files that are opened with `FOPEN_DIRECT_IO` (Linux 6.6).
    pub maps_direct: bool,
}

/// What all requests of a mount share.
#[derive(Default)]
pub struct Shared {
    pub(super) kernel: OnceLock<Kernel>,
    pub service: OnceLock<Arc<dyn Service>>,
    pub(super) notifier: OnceLock<Notifier>,
    pub(super) directories: Directories,
    pub(super) passthrough: PassthroughFiles,
    pub(super) set_id: SetIdFiles,
    pub processors: Arc<Processors>,
    pub(super) writes: Writes,
    pub(super) gives_back: OnceLock<GivesBack>,
}

impl Client for Shared {
    fn give_back(&self, names: Vec<Named>) {
        if let Some(gives_back) = self.gives_back.get() {
            gives_back.ask(names);
        }
    }
}

impl Shared {
    pub fn new(writes: Writes) -> Shared {
        Shared { writes, ..Shared::default() }
    }

    /// What the kernel can do; nothing before it has told.
    pub fn kernel(&self) -> Kernel {
        self.kernel.get().copied().unwrap_or_default()
    }

    /// Tells who answers. To be called once, before the first request.
    pub fn begin(&self, service: Arc<dyn Service>, notifier: Notifier) {
        // A second one would be another mount's.
        let _ = (self.service.set(service), self.notifier.set(notifier));
    }

    /// Tells who has the kernel give names back. To be called once.
    pub fn gives_back(&self, gives_back: GivesBack) {
        // As in `begin`.
        let _ = self.gives_back.set(gives_back);
    }

    /// Has the kernel ask again for the attributes of a file.
    pub fn forget_attributes(&self, ino: Ino) {
        let Some(notifier) = self.notifier.get() else { return };
        // An offset below zero: its data stays. A file that the kernel does not know is fine.
        if let Err(error) = notifier.inval_inode(INodeNo(ino), -1, 0)
            && error.raw_os_error() != Some(libc::ENOENT)
        {
            tracing::debug!(ino, %error, "the kernel keeps attributes");
        }
    }

    /// Who asks for a change of something.
    pub fn caller(&self, from: &fuser::Request, of: INodeNo) -> Caller {
        let is_outside =
            |group| from.uid() != 0 && from.gid() != group && !convert::groups_of(from).contains(&group);
        let outsider = self.set_id.group(of.0).is_some_and(is_outside);
        Caller { uid: from.uid(), gid: from.gid(), thread: from.pid(), outsider }
    }

    /// To be called after a file was written to in a way that takes its set-uid and set-gid bits away.
    pub fn privileges_ended(&self, ino: Ino) {
        if self.set_id.take(ino) {
            self.forget_attributes(ino);
        }
    }

    /// Attributes for the kernel, and how long it may keep them.
    pub fn attributes(&self, of: &Attributes) -> (FileAttr, Duration) {
        self.set_id.note(of);
        let kept = if self.passthrough.is_writable(of.ino) { Duration::ZERO } else { KEPT };
        (convert::attributes(of), kept)
    }

    pub fn entry(&self, reply: ReplyEntry, entry: &Attributes) {
        let (attributes, kept) = self.attributes(entry);
        reply.entry_with_ttls(&kept, &KEPT, &attributes, ONLY);
    }

    /// How a file is opened that passes through here.
    pub fn direct(&self) -> FopenFlags {
        if self.kernel().maps_direct {
            FopenFlags::FOPEN_DIRECT_IO
        } else {
            // Maps matter more than speed: the page cache is used, and written through.
            FopenFlags::empty()
        }
    }

    /// How an open file is served.
    pub fn served(
        &self,
        ino: Ino,
        opened: &Opened,
        register: impl FnOnce(&std::fs::File) -> io::Result<fuser::BackingId>,
    ) -> (FopenFlags, Option<Arc<fuser::BackingId>>) {
        // close(2) of a file that was only read has nothing to report.
        let unreported = if opened.writable { FopenFlags::empty() } else { FopenFlags::FOPEN_NOFLUSH };
        let Some(file) = &opened.passthrough else { return (self.direct() | unreported, None) };
        match self.passthrough.open(ino, opened.handle, opened.writable, || register(file)) {
            // Writes come here, and only maps go to the store.
            Ok(id) if opened.writable && !opened.unasked => (FopenFlags::FOPEN_DIRECT_IO, Some(id)),
            Ok(id) => (unreported, Some(id)),
            Err(error) => {
                // The kernel accepts this beside handles with passthrough as long as it is not mapped.
                tracing::warn!(ino, %error, "the kernel can't read a file by itself: it is read through the server");
                (self.direct() | unreported, None)
            }
        }
    }
}
