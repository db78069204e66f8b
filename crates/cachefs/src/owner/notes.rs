//! What is noted in the journal, and when.

use std::collections::BTreeSet;
use std::ffi::OsString;

use super::blocks::Blocks;
use super::inode::{Home, Name, Operation, Seen, dirty};
use super::journal::{HEADER, Image, Record, new_file};
use super::state::State;
use crate::message::{Ino, Time};

impl State {
    /// Sees to it that the journal says what an inode is, and where, and so of the directories above it.
    fn anchor(&mut self, ino: Ino) {
        let mut next = vec![ino];
        let mut names = Vec::new();
        while let Some(ino) = next.pop() {
            if self.journal.known.contains(&ino) {
                continue;
            }
            let Some(inode) = self.inodes.get(&ino) else { continue };
            self.journal.known.insert(ino);
            let image = Image::of(inode);
            if image.parent != 0 && image.parent != ino {
                next.push(image.parent);
            }
            for Home { dir, name } in &image.homes {
                next.push(*dir);
                let leads_here = self.directory(*dir).is_ok_and(|dir| dir.entries.get(name) == Some(&ino));
                if leads_here {
                    names.push(Record::Entry(*dir, name.to_os_string(), ino));
                }
            }
            self.add_image(ino, image);
        }
        // Only now all of the directories are there.
        for name in names {
            self.journal.add(&name);
        }
    }

    fn add_image(&mut self, ino: Ino, mut image: Image) {
        if self.open_there.contains(&ino) {
            image.dirty |= dirty::MODE;
        }
        self.journal.add(&Record::Inode(ino, Box::new(image)));
        // It says how this was left on the backing directory, where it is being changed again.
        if self.passes.get(&ino).is_some_and(|pass| pass.changes) {
            self.journal.add(&Record::Writing(ino));
        }
    }

    /// Ends a record of what is so already.
    fn end_record(&mut self) {
        self.journal.write();
        self.shorten_journal();
    }

    /// Ends a record of what is about to be done. It is done next, and then [`shorten_journal`](State::shorten_journal) is called:
    /// a journal that is made anew in between would say how it was before, and nothing of the record.
    fn announce(&mut self) {
        self.journal.write();
    }

    /// Makes the journal anew if it is long. All that its records have announced must have been done.
    pub fn shorten_journal(&mut self) {
        let short = self.settings.journal.0;
        if short == 0 || self.journal.length > short.max(4 * self.journal.length_at_first) {
            self.checkpoint();
        }
    }

    /// Notes a further name that was found of what the journal knows already: it may be removed or changed next.
    pub fn journal_found(&mut self, ino: Ino, dir: Ino, name: &Name) {
        if !self.journal.known.contains(&ino) {
            return;
        }
        self.anchor(dir);
        if let Some(inode) = self.inodes.get(&ino) {
            let image = Image::of(inode);
            self.add_image(ino, image);
            self.journal.add(&Record::Entry(dir, name.to_os_string(), ino));
            self.end_record();
        }
    }

    /// Has the journal say what an operation is about, before the names are changed: the record will change them again.
    pub fn journal_before(&mut self, operation: &Operation) {
        for ino in operation.inodes() {
            self.anchor(ino);
        }
    }

    /// Adds an operation of the log to the journal. Its names are changed already.
    pub fn journal_operation(&mut self, number: u64) {
        let Some(pending) = self.log.get((number - self.first_pending) as usize) else { return };
        let operation = pending.operation.clone();
        for ino in operation.inodes() {
            self.anchor(ino);
        }
        let at = self.inodes.get(&operation.directories()[0]).map_or_else(Time::now, |dir| dir.mtime);
        self.journal.add(&Record::Operation { number, operation, at, change_names: true, cancelled: false });
        self.end_record();
    }

    /// Notes that an operation is not to be done, because what it made was removed.
    pub fn journal_cancelled(&mut self, number: u64, unlink: Operation, at: Time) {
        self.journal.add(&Record::Cancelled { number, unlink, at });
        self.end_record();
    }

    /// Notes that an operation is about to be carried out: what it is about is in doubt from now on, and nothing else is.
    pub fn journal_begun(&mut self, number: u64) {
        if self.doubtful != number {
            self.doubtful = number;
            self.journal.add(&Record::Begun(number));
            self.end_record();
        }
    }

    /// Announces that an operation of the log is done.
    pub fn announce_applied(&mut self, number: u64, beside: Option<OsString>) {
        self.journal.add(&Record::Applied { number, beside });
        self.announce();
    }

    /// Notes that something was made that is not complete yet; with `changed`, also what it is like now.
    pub fn journal_prepared(&mut self, ino: Ino, home: Home, seen: Seen, changed: bool) {
        self.anchor(ino);
        self.anchor(home.dir);
        self.journal.add(&Record::Prepared { ino, home, seen });
        if let Some(inode) = self.inodes.get(&ino).filter(|_| changed) {
            let image = Image::of(inode);
            self.add_image(ino, image);
        }
        self.end_record();
    }

    /// Notes what an inode is like now.
    pub fn journal_inode(&mut self, ino: Ino) {
        self.anchor(ino);
        if let Some(inode) = self.inodes.get(&ino) {
            let image = Image::of(inode);
            self.add_image(ino, image);
            self.end_record();
        }
    }

    /// Notes that bytes were written.
    pub fn journal_write(&mut self, ino: Ino, begin: u64, end: u64, bits: u8) {
        self.anchor(ino);
        if let Some(inode) = self.inodes.get(&ino) {
            let (mode, size, mtime) = (inode.mode, inode.size, inode.mtime);
            self.journal.add(&Record::Write { ino, begin, end, mode, size, mtime, bits });
            self.end_record();
        }
    }

    /// Announces that the size is changed.
    pub fn announce_size(&mut self, ino: Ino, size: u64, mode: u32, mtime: Time, bits: u8) {
        self.anchor(ino);
        self.journal.add(&Record::Size { ino, size, mode, mtime, bits });
        self.announce();
    }

    /// Announces that a part becomes zeros.
    pub fn announce_zero(&mut self, ino: Ino, begin: u64, end: u64, mtime: Time) {
        self.anchor(ino);
        self.journal.add(&Record::Zero { ino, begin, end, mtime });
        self.announce();
    }

    /// Notes that blocks are dirty.
    pub fn journal_dirty(&mut self, ino: Ino, number: u32, blocks: &Blocks) {
        self.anchor(ino);
        self.journal.add(&Record::Dirty(ino, number, blocks.clone()));
        self.end_record();
    }

    /// Notes that the backing directory has something.
    pub fn journal_clean(&mut self, ino: Ino, extents: Vec<(u32, Blocks)>, bits: u8) {
        if !self.journal.known.contains(&ino) {
            return;
        }
        let Some(inode) = self.inodes.get(&ino) else { return };
        let data = inode.data().map(|data| (data.backing_len, data.cut));
        let seen = inode.seen;
        self.journal.add(&Record::Clean { ino, extents, bits, seen, data });
        self.end_record();
    }

    /// Notes that something is about to be changed on the backing directory, by a pass or who holds it still: whoever goes on after a
    /// kill must not take that for somebody else's work.
    pub fn journal_changes(&mut self, ino: Ino) {
        if let Some(pass) = self.passes.get_mut(&ino) {
            pass.changes = true;
        }
        self.anchor(ino);
        self.journal.add(&Record::Writing(ino));
        self.end_record();
    }

    /// Notes that something has another mode on the backing directory for a moment, or no longer.
    pub fn journal_open(&mut self, ino: Ino, is_open: bool) {
        if is_open {
            self.open_there.insert(ino);
        } else {
            self.open_there.remove(&ino);
        }
        self.journal_inode(ino);
    }

    /// Notes that the kernel writes to a file without asking, or no longer.
    pub fn journal_unasked(&mut self, ino: Ino, is_unasked: bool) {
        self.anchor(ino);
        self.journal.add(&Record::Unasked(ino, is_unasked));
        self.end_record();
    }

    /// Notes that a number is free, with the next record of any kind: until then recovery finds something that is as the
    /// backing directory has it.
    pub fn journal_forgotten(&mut self, ino: Ino) {
        if self.journal.known.remove(&ino) {
            self.journal.add(&Record::Forgotten(ino));
        }
    }

    /// Notes how something was seen on the backing directory.
    pub fn journal_seen(&mut self, ino: Ino) {
        if let Some(seen) = self.inodes.get(&ino).and_then(|inode| inode.seen)
            && self.journal.known.contains(&ino)
        {
            self.journal.add(&Record::Seen(ino, seen));
            self.end_record();
        }
    }

    /// Replaces the journal by one that has only what still counts.
    pub fn checkpoint(&mut self) {
        let known = std::mem::take(&mut self.journal.known);
        self.journal.buffer.clear();
        self.journal.add(&Record::Begins(self.first_pending));
        let mut relevant: BTreeSet<Ino> = self.dirty_by_age.keys().copied().collect();
        relevant.extend(&self.unasked);
        relevant.extend(&self.open_there);
        let mut names = Vec::new();
        // What was cancelled has no names, and may be of what is not there any more.
        for pending in self.log.iter().filter(|pending| !pending.cancelled) {
            relevant.extend(pending.operation.inodes());
            match &pending.operation {
                Operation::Make { dir, name, .. }
                | Operation::Link { dir, name, .. }
                | Operation::Unlink { dir, name, .. } => names.push((*dir, name.clone())),
                Operation::Rename { dir, name, to_dir, to_name, .. }
                | Operation::Exchange { dir, name, to_dir, to_name, .. } => {
                    names.push((*dir, name.clone()));
                    names.push((*to_dir, to_name.clone()));
                }
            }
        }
        for ino in relevant {
            self.anchor(ino);
            let Some(inode) = self.inodes.get(&ino) else { continue };
            let dirty: Vec<(u32, Blocks)> = (inode.data().into_iter().flat_map(|data| &data.extents))
                .map(|(number, extent)| (*number, extent.dirty.with(&extent.flight)))
                .filter(|(_, blocks)| !blocks.is_empty())
                .collect();
            for (number, blocks) in dirty {
                self.journal.add(&Record::Dirty(ino, number, blocks));
            }
            if self.unasked.contains(&ino) {
                self.journal.add(&Record::Unasked(ino, true));
            }
        }
        for (dir, name) in names {
            let now = self.directory(dir).ok().and_then(|dir| dir.entries.get(name.as_os_str()).copied());
            let record = match now {
                Some(ino) => Record::Entry(dir, name, ino),
                None => Record::Gone(dir, name),
            };
            self.journal.add(&record);
        }
        let operations: Vec<Record> = (self.log.iter().enumerate())
            .map(|(index, pending)| Record::Operation {
                number: self.first_pending + index as u64,
                operation: pending.operation.clone(),
                at: Time::default(),
                change_names: false,
                cancelled: pending.cancelled,
            })
            .collect();
        for record in operations {
            self.journal.add(&record);
        }
        if self.doubtful != 0 {
            self.journal.add(&Record::Begun(self.doubtful));
        }
        let content = std::mem::take(&mut self.journal.buffer);
        match new_file(&self.journal.root, &content) {
            Ok(file) => {
                self.journal.file = file;
                self.journal.length = (HEADER.len() + content.len()) as u64;
                self.journal.length_at_first = self.journal.length;
                self.journal.set_aside = 0;
                self.journal.set_room_aside();
            }
            Err(error) if self.journal.runway > 0 && error.raw_os_error() == Some(libc::ENOSPC) => {
                // Programs have filled the store. The long one goes on in the room that is set aside for it.
                tracing::warn!("no room for a shorter journal; it is made later");
                self.journal.known = known;
                self.journal.length_at_first = self.journal.length / 2;
            }
            Err(error) => {
                tracing::error!(%error, "can't replace the cache's journal; changes are refused from now on");
                self.journal.failed = Some(error.to_string());
            }
        }
    }
}
