//! Names that the kernel keeps, and that the owner wants to forget.
//!
//! The kernel is told by a thread of its own: before Linux 6.18 it locks the directory of a name that it drops, and may have to wait
//! until it has an answer of ours to something else that is done there. Since then it drops what nobody uses without a lock.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use fuser::{INodeNo, Notifier};
use rustix::io::Errno;

use crate::message::Named;

/// Lists of names that wait for the kernel at most: the owner asks again for those of others.
const LISTS: usize = 16;

/// `FUSE_NOTIFY_PRUNE` of <linux/fuse.h>, which fuser does not know.
const PRUNE: u32 = 9;

/// Has the kernel give names back.
pub struct GivesBack(SyncSender<Vec<Named>>);

impl GivesBack {
    /// Begins to, by the device of a mount. The thread ends with this.
    ///
    /// # Errors
    /// If no thread can be started, or there are no more descriptors.
    pub fn begin(device: BorrowedFd<'_>, notifier: Notifier) -> io::Result<GivesBack> {
        let device = device.try_clone_to_owned()?;
        let (tell, told) = sync_channel(LISTS);
        std::thread::Builder::new()
            .name("give-back".to_owned())
            .spawn(move || run(&device, &notifier, &told))?;
        Ok(GivesBack(tell))
    }

    /// Has these be given back, unless nobody uses them. Never waits.
    pub fn ask(&self, names: Vec<Named>) {
        // The kernel may be slow: these are asked for again then.
        let _ = self.0.try_send(names);
    }
}

fn run(device: &OwnedFd, notifier: &Notifier, told: &Receiver<Vec<Named>>) {
    let mut prunes = true;
    for names in told {
        if prunes {
            match prune(device, &names) {
                Err(Errno::INVAL) => prunes = false,
                // The mount may be gone.
                Err(error) => tracing::debug!(%error, "the kernel keeps names"),
                Ok(()) => {}
            }
        }
        if !prunes {
            drop_entries(notifier, &names);
        }
    }
}

/// Has the kernel drop what nobody uses of these.
fn prune(device: &OwnedFd, names: &[Named]) -> Result<(), Errno> {
    let message = pruning(names);
    rustix::io::write(device.as_fd(), &message).map(drop)
}

/// The message: a header with length, code and no number of a request; how many they are, and their numbers.
fn pruning(names: &[Named]) -> Vec<u8> {
    let length = 32 + 8 * names.len();
    let mut message = Vec::with_capacity(length);
    message.extend((length as u32).to_ne_bytes());
    message.extend(PRUNE.to_ne_bytes());
    message.extend(0_u64.to_ne_bytes());
    message.extend((names.len() as u32).to_ne_bytes());
    message.extend([0; 12]);
    for named in names {
        message.extend(named.ino.to_ne_bytes());
    }
    message
}

/// Has the kernel drop the names of files: of directories it would do so even if somebody works in them, who would not find where
/// they are any more.
fn drop_entries(notifier: &Notifier, names: &[Named]) {
    for named in names.iter().filter(|named| !named.is_dir) {
        if let Err(error) = notifier.inval_entry(INodeNo(named.parent), &named.name) {
            tracing::debug!(%error, "the kernel keeps a name");
        }
    }
}
