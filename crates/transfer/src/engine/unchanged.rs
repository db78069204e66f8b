//! Files that need not be copied again, by what the manifest says of them.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use rustix::fs::Stat;

use super::{At, Engine, Worker};
use crate::attributes;
use crate::checksum::Checksum;
use crate::dir;
use crate::manifest::{ManifestEntry, Previous};
use crate::verify;

impl Engine<'_> {
    /// The manifest's entry of a file that need not be copied again, if the target still matches it.
    pub(super) fn already_there(
        &self,
        at: &At<'_>,
        file: BorrowedFd<'_>,
        source: &Stat,
        found: &Stat,
        worker: &mut Worker,
    ) -> Option<ManifestEntry> {
        let previous = self.previous()?;
        let entry = previous.find(&self.recorded_path(at))?;
        let as_wanted = match (entry.kind, &entry.checksum, self.options.checksum) {
            // The checksum stands with the name that was met first, which may be another one this time.
            (b'h', _, _) | (b'f', None, Checksum::None) => true,
            (b'f', Some((checksum, _)), wanted) => *checksum == wanted,
            _ => false,
        };
        (as_wanted
            && entry.describes(source)
            && self.options.again_from.is_none_or(|from| {
                // A directory that is renamed takes its files to other paths, and changes no time of theirs.
                ({ source.st_ctime }, source.st_ctime_nsec as i64) < from
                    && entry.inode == Some(crate::manifest::inode(source))
            })
            && attributes::is_regular(found)
            && found.st_size == source.st_size
            && crate::manifest::mtime(found) == entry.mtime
            && (!self.options.recheck || self.still_has(file, source, &entry, worker)))
        .then_some(entry)
    }

    /// Whether a source file still has the content that was recorded.
    fn still_has(
        &self,
        file: BorrowedFd<'_>,
        source: &Stat,
        entry: &ManifestEntry,
        worker: &mut Worker,
    ) -> bool {
        entry.checksum.is_some_and(|(checksum, recorded)| {
            verify::digest_of(file, source.st_size as u64, checksum, &mut worker.buffer)
                .is_ok_and(|digest| digest == recorded)
        })
    }

    /// The path under which the manifest knows an entry: the target's.
    fn recorded_path(&self, at: &At<'_>) -> Vec<u8> {
        dir::join(at.parent, self.target_name(at.name).to_bytes())
    }

    fn previous(&self) -> Option<&Previous> {
        self.manifest.as_ref()?.previous()
    }

    /// A file that was there already.
    pub(super) fn unchanged(&self, at: &At<'_>, stat: &Stat, recorded: bool) {
        if recorded && let Some(previous) = self.previous() {
            previous.confirm(&self.recorded_path(at));
        }
        self.counts.unchanged.fetch_add(1, Ordering::Relaxed);
        self.count_done(stat);
        if stat.st_nlink > 1 {
            self.settle_links(at, stat, Some(self.target_name(at.name)));
        }
    }
}
