//! From the kernel's requests to ours, and from our replies to the kernel's.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, FileHandle, FopenFlags, INodeNo, InitFlags, IoctlFlags,
    KernelConfig, LockOwner, OpenAccMode, OpenFlags, PollEvents, PollFlags, PollNotifier, RenameFlags,
    ReplyAttr, ReplyBmap, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyIoctl, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr, TimeOrNow, WriteFlags,
};
use rustix::io::Errno;

use super::convert::ONLY;
use super::directories::fill;
use super::replies::{attr, data, done, failed, with_attributes, written, xattr};
use super::shared::{Kernel, Shared};
use super::{KEPT, LARGEST, convert};
use crate::message::{Answer, Caller, Change, New, OpenMode, Replace, Reply, Request};
use crate::settings::Writes;

/// The kernel may wait for so many replies to what it does in the background: write dirty pages of maps, release files. Its
/// own default of 16 lets a few delayed writes hold up all releases.
const MOST_IN_BACKGROUND: u16 = 256;

/// The mount, as fuser calls it.
pub struct Filesystem(Arc<Shared>);

impl Filesystem {
    pub fn new(shared: Arc<Shared>) -> Filesystem {
        Filesystem(shared)
    }

    /// Asks the owner. `answer` gets what everything shares, and the answer.
    fn ask(
        &self,
        from: &fuser::Request,
        request: Request<'_>,
        answer: impl FnOnce(&Shared, Result<Reply, Errno>) + Send + 'static,
    ) {
        let caller = Caller { uid: from.uid(), gid: from.gid(), thread: from.pid(), outsider: false };
        self.ask_for(caller, request, answer);
    }

    fn ask_for(
        &self,
        caller: Caller,
        request: Request<'_>,
        answer: impl FnOnce(&Shared, Result<Reply, Errno>) + Send + 'static,
    ) {
        self.0.processors.note(caller.thread);
        let shared = Arc::clone(&self.0);
        let answer: Answer = Box::new(move |result| answer(&shared, result));
        match self.0.service.get() {
            Some(service) => service.ask(caller, request, answer),
            // Requests are read after that.
            None => answer(Err(Errno::IO)),
        }
    }

    /// For requests that are only done or not.
    fn ask_done(&self, from: &fuser::Request, request: Request<'_>, reply: ReplyEmpty) {
        self.ask(from, request, |_, result| done(reply, result));
    }

    fn make(&self, from: &fuser::Request, request: Request<'_>, reply: ReplyEntry) {
        self.ask(from, request, |shared, result| match result {
            Ok(Reply::Entry(entry)) => shared.entry(reply, &entry),
            other => reply.error(failed(other)),
        });
    }
}

fn open_mode(flags: i32) -> OpenMode {
    OpenMode {
        write: OpenFlags(flags).acc_mode() != OpenAccMode::O_RDONLY,
        truncate: flags & libc::O_TRUNC != 0,
        // O_SYNC has this bit, too.
        unasked: flags & libc::O_DSYNC == 0,
    }
}

thread_local! {
    /// What was read last by this worker, whose next reply goes out before it reads again.
    static READ: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl fuser::Filesystem for Filesystem {
    fn init(&mut self, _: &fuser::Request, config: &mut KernelConfig) -> io::Result<()> {
        // Those that a kernel lacks are done without.
        let wanted = [
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            // The owner applies the umask, which a default ACL replaces.
            InitFlags::FUSE_DONT_MASK,
            InitFlags::FUSE_POSIX_ACL,
            // The owner takes set-uid and set-gid bits away at write, truncate and chown.
            match self.0.writes {
                Writes::Server => InitFlags::FUSE_HANDLE_KILLPRIV,
                // The kernel remembers that a file has no capabilities, and does not ask for them before each write.
                Writes::Passthrough => InitFlags::FUSE_HANDLE_KILLPRIV_V2,
            },
            InitFlags::FUSE_PARALLEL_DIROPS,
            // For who wants them: the kernel finds out.
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_CACHE_SYMLINKS,
            InitFlags::FUSE_ASYNC_DIO,
            // Nobody else changes the data: the kernel need not guess from times whether its pages are still right.
            InitFlags::FUSE_EXPLICIT_INVAL_DATA,
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
        ];
        let mut kernel = Kernel::default();
        for flag in wanted {
            let is_there = config.add_capabilities(flag).is_ok();
            kernel.maps_direct |= is_there && flag == InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP;
        }
        kernel.passthrough = kernel.maps_direct
            && config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok()
            && config.set_max_stack_depth(1).is_ok();
        let refused = |nearest: u32| io::Error::other(format!("the least or most is {nearest}"));
        config.set_max_write(LARGEST).map_err(refused)?;
        config.set_max_background(MOST_IN_BACKGROUND).map_err(|nearest| refused(nearest.into()))?;
        // There is one mount for each.
        let _ = self.0.kernel.set(kernel);
        Ok(())
    }

    fn lookup(&self, from: &fuser::Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let request = Request::Lookup { parent: parent.0, name: name.to_owned() };
        self.ask(from, request, |shared, result| match result {
            Ok(Reply::Entry(entry)) => shared.entry(reply, &entry),
            // Also the absence of a name is kept.
            Err(Errno::NOENT) => reply.entry(&KEPT, &convert::absent(), ONLY),
            other => reply.error(failed(other)),
        });
    }

    fn forget(&self, _: &fuser::Request, ino: INodeNo, references: u64) {
        self.0.set_id.forget(ino.0);
        if let Some(service) = self.0.service.get() {
            service.forget(&[(ino.0, references)]);
        }
    }

    fn getattr(&self, from: &fuser::Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.ask(from, Request::Attributes { ino: ino.0 }, |shared, result| attr(shared, reply, result));
    }

    fn setattr(
        &self,
        from: &fuser::Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let change = Change {
            mode: mode.map(|mode| mode & !convert::KIND),
            uid,
            gid,
            size,
            atime: atime.map(convert::set_time),
            mtime: mtime.map(convert::set_time),
        };
        let request = Request::Change { ino: ino.0, change };
        self.ask_for(self.0.caller(from, ino), request, |shared, result| attr(shared, reply, result));
    }

    fn readlink(&self, from: &fuser::Request, ino: INodeNo, reply: ReplyData) {
        self.ask(from, Request::ReadLink { ino: ino.0 }, |_, result| data(reply, result));
    }

    fn mknod(
        &self,
        from: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let new = match mode & convert::KIND {
            libc::S_IFREG | 0 => New::File,
            kind => New::Special(kind, u64::from(rdev)),
        };
        let (parent, name, mode) = (parent.0, name.to_owned(), mode & !convert::KIND);
        self.make(from, Request::Make { parent, name, new, mode, umask, open: None }, reply);
    }

    fn mkdir(
        &self,
        from: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let (parent, name, mode) = (parent.0, name.to_owned(), mode & !convert::KIND);
        self.make(from, Request::Make { parent, name, new: New::Directory, mode, umask, open: None }, reply);
    }

    fn symlink(
        &self,
        from: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let new = New::Symlink(target.as_os_str().to_owned());
        let (parent, name) = (parent.0, name.to_owned());
        self.make(from, Request::Make { parent, name, new, mode: 0o777, umask: 0, open: None }, reply);
    }

    fn link(&self, from: &fuser::Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.make(from, Request::Link { ino: ino.0, parent: parent.0, name: name.to_owned() }, reply);
    }

    fn unlink(&self, from: &fuser::Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.ask_done(from, Request::Unlink { parent: parent.0, name: name.to_owned() }, reply);
    }

    fn rmdir(&self, from: &fuser::Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.ask_done(from, Request::RemoveDirectory { parent: parent.0, name: name.to_owned() }, reply);
    }

    fn rename(
        &self,
        from: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        to_parent: INodeNo,
        to_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let replace = if flags == RenameFlags::empty() {
            Replace::Yes
        } else if flags == RenameFlags::RENAME_NOREPLACE {
            Replace::No
        } else if flags == RenameFlags::RENAME_EXCHANGE {
            Replace::Exchange
        } else {
            // RENAME_WHITEOUT is for overlays.
            return reply.error(fuser::Errno::EINVAL);
        };
        let (name, to_name) = (name.to_owned(), to_name.to_owned());
        let request = Request::Rename { parent: parent.0, name, to_parent: to_parent.0, to_name, replace };
        self.ask_done(from, request, reply);
    }

    fn create(
        &self,
        from: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let open = Some(open_mode(flags));
        let (name, mode) = (name.to_owned(), mode & !convert::KIND);
        let request = Request::Make { parent: parent.0, name, new: New::File, mode, umask, open };
        self.ask(from, request, |shared, result| match result {
            Ok(Reply::Created(entry, opened)) => {
                let (flags, id) = shared.served(entry.ino, &opened, |file| reply.open_backing(file));
                let (attributes, kept) = shared.attributes(&entry);
                let handle = FileHandle(opened.handle);
                match id {
                    Some(id) => reply.created_passthrough(&kept, &attributes, ONLY, handle, flags, &id),
                    None => reply.created(&kept, &attributes, ONLY, handle, flags),
                }
            }
            other => reply.error(failed(other)),
        });
    }

    fn open(&self, from: &fuser::Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let mode = open_mode(flags.0);
        self.ask(from, Request::Open { ino: ino.0, mode }, move |shared, result| match result {
            Ok(Reply::Opened(opened)) => {
                let (flags, id) = shared.served(ino.0, &opened, |file| reply.open_backing(file));
                if mode.truncate {
                    shared.privileges_ended(ino.0);
                }
                if id.is_some() && opened.writable {
                    // What the kernel has of its times was given to keep.
                    shared.forget_attributes(ino.0);
                }
                let handle = FileHandle(opened.handle);
                match id {
                    Some(id) => reply.opened_passthrough(handle, flags, &id),
                    None => reply.opened(handle, flags),
                }
            }
            other => reply.error(failed(other)),
        });
    }

    fn read(
        &self,
        from: &fuser::Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        // A read for the page cache, by sendfile(2) or splice(2) out of a file that is mapped past it: pages would be kept that a
        // map writes to without telling. Programs read the file themselves then.
        if owner.is_none() && self.0.passthrough.is_writable(ino.0) {
            return reply.error(fuser::Errno::EINVAL);
        }
        let resident = |buffer: &mut [u8]| self.0.service.get()?.read_resident(ino.0, offset, buffer);
        let reply = READ.with_borrow_mut(|buffer| {
            let size = size as usize;
            if buffer.len() < size {
                buffer.resize(size, 0);
            }
            match resident(&mut buffer[..size]) {
                Some(length) => {
                    self.0.processors.note(from.pid());
                    reply.data(&buffer[..length]);
                    None
                }
                None => Some(reply),
            }
        });
        let Some(reply) = reply else { return };
        let request = Request::Read { ino: ino.0, handle: handle.0, offset, size };
        self.ask(from, request, |_, result| data(reply, result));
    }

    fn write(
        &self,
        from: &fuser::Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        // O_SYNC has this bit, too; and RWF_DSYNC of one write comes as if the file had been opened so.
        let is_to_be_synced = flags.0 & libc::O_DSYNC != 0;
        let kill_privileges = write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        // A page of a map is written by the kernel, when it likes: nobody waits who could be killed.
        let thread = if write_flags.contains(WriteFlags::FUSE_WRITE_CACHE) { 0 } else { from.pid() };
        let caller = Caller { thread, ..self.0.caller(from, ino) };
        let data = Cow::Borrowed(data);
        let request = Request::Write { ino: ino.0, handle: handle.0, offset, data, kill_privileges };
        self.ask_for(caller, request, move |shared, result| {
            if kill_privileges {
                shared.privileges_ended(ino.0);
            }
            match (result, shared.service.get()) {
                (Ok(Reply::Written(length)), Some(service)) if is_to_be_synced => {
                    let request = Request::Sync { ino: ino.0, data_only: true };
                    let answer = move |result| match result {
                        Ok(Reply::Done) => reply.written(length),
                        other => reply.error(failed(other)),
                    };
                    service.ask(caller, request, Box::new(answer));
                }
                (result, _) => written(reply, result),
            }
        });
    }

    fn flush(
        &self,
        from: &fuser::Request,
        ino: INodeNo,
        handle: FileHandle,
        _: LockOwner,
        reply: ReplyEmpty,
    ) {
        self.ask_done(from, Request::Close { ino: ino.0, handle: handle.0 }, reply);
    }

    fn release(
        &self,
        from: &fuser::Request,
        ino: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        // The kernel has let go of the store's file before it says this.
        let was_mapped = self.0.passthrough.release(handle.0);
        self.ask(from, Request::Release { ino: ino.0, handle: handle.0 }, move |shared, result| {
            if was_mapped {
                shared.forget_attributes(ino.0);
            }
            done(reply, result);
        });
    }

    fn fsync(&self, from: &fuser::Request, ino: INodeNo, _: FileHandle, data_only: bool, reply: ReplyEmpty) {
        self.ask_done(from, Request::Sync { ino: ino.0, data_only }, reply);
    }

    fn opendir(&self, _: &fuser::Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(self.0.directories.open()), FopenFlags::empty());
    }

    fn readdir(
        &self,
        from: &fuser::Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        reply: ReplyDirectory,
    ) {
        let Some(directory) = self.0.directories.get(handle.0) else {
            return reply.error(fuser::Errno::EBADF);
        };
        if let Some(listed) = directory.kept().filter(|_| offset > 0) {
            return fill(reply, ino.0, &listed, offset);
        }
        self.ask(from, Request::List { ino: ino.0 }, move |_, result| match result {
            Ok(Reply::Listed(listed)) => {
                directory.keep(Arc::clone(&listed));
                fill(reply, ino.0, &listed, offset);
            }
            other => reply.error(failed(other)),
        });
    }

    fn readdirplus(
        &self,
        from: &fuser::Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        let Some(directory) = self.0.directories.get(handle.0) else {
            return reply.error(fuser::Errno::EBADF);
        };
        let caller = Caller { uid: from.uid(), gid: from.gid(), thread: from.pid(), outsider: false };
        if let Some(listed) = directory.kept().filter(|_| offset > 0) {
            self.0.processors.note(caller.thread);
            let wanted = (offset, directory.room());
            return with_attributes(&self.0, caller, (directory, ino.0), listed, wanted, reply);
        }
        let shared = Arc::clone(&self.0);
        self.ask_for(caller, Request::List { ino: ino.0 }, move |_, result| match result {
            Ok(Reply::Listed(listed)) => {
                directory.keep(Arc::clone(&listed));
                let wanted = (offset, directory.room());
                with_attributes(&shared, caller, (directory, ino.0), listed, wanted, reply);
            }
            other => reply.error(failed(other)),
        });
    }

    fn releasedir(
        &self,
        _: &fuser::Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.0.directories.release(handle.0);
        reply.ok();
    }

    fn fsyncdir(
        &self,
        from: &fuser::Request,
        ino: INodeNo,
        _: FileHandle,
        data_only: bool,
        reply: ReplyEmpty,
    ) {
        self.ask_done(from, Request::Sync { ino: ino.0, data_only }, reply);
    }

    fn statfs(&self, from: &fuser::Request, _: INodeNo, reply: ReplyStatfs) {
        self.ask(from, Request::Space, |_, result| match result {
            Ok(Reply::Space(space)) => reply.statfs(
                space.blocks,
                space.free,
                space.available,
                space.files,
                space.free_files,
                space.block_size,
                space.name_length,
                space.block_size,
            ),
            other => reply.error(failed(other)),
        });
    }

    fn setxattr(
        &self,
        from: &fuser::Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        let (name, value) = (name.to_owned(), value.to_owned());
        let request = Request::SetXattr { ino: ino.0, name, value, flags };
        self.ask_for(self.0.caller(from, ino), request, |_, result| done(reply, result));
    }

    fn getxattr(&self, from: &fuser::Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let request = Request::GetXattr { ino: ino.0, name: name.to_owned() };
        self.ask(from, request, move |_, result| xattr(reply, size, result));
    }

    fn listxattr(&self, from: &fuser::Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        self.ask(from, Request::ListXattrs { ino: ino.0 }, move |_, result| xattr(reply, size, result));
    }

    fn removexattr(&self, from: &fuser::Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.ask_done(from, Request::RemoveXattr { ino: ino.0, name: name.to_owned() }, reply);
    }

    fn access(&self, _: &fuser::Request, _: INodeNo, _: AccessFlags, reply: ReplyEmpty) {
        // The kernel checks permissions itself: default_permissions.
        reply.error(fuser::Errno::ENOSYS);
    }

    fn bmap(&self, _: &fuser::Request, _: INodeNo, _: u32, _: u64, reply: ReplyBmap) {
        reply.error(fuser::Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        _: &fuser::Request,
        _: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(fuser::Errno::ENOTTY);
    }

    fn poll(
        &self,
        _: &fuser::Request,
        _: INodeNo,
        _: FileHandle,
        _: PollNotifier,
        _: PollEvents,
        _: PollFlags,
        reply: ReplyPoll,
    ) {
        // Files can always be read and written: the kernel says so from now on without asking.
        reply.error(fuser::Errno::ENOSYS);
    }

    fn fallocate(
        &self,
        from: &fuser::Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let request = Request::Allocate { ino: ino.0, handle: handle.0, offset, length, mode };
        self.ask_for(self.0.caller(from, ino), request, move |shared, result| {
            shared.privileges_ended(ino.0);
            done(reply, result);
        });
    }

    fn lseek(
        &self,
        from: &fuser::Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let hole = match whence {
            libc::SEEK_DATA => false,
            libc::SEEK_HOLE => true,
            // The others are the kernel's own business.
            _ => return reply.error(fuser::Errno::EINVAL),
        };
        let Ok(offset) = u64::try_from(offset) else { return reply.error(fuser::Errno::ENXIO) };
        let request = Request::Seek { ino: ino.0, handle: handle.0, offset, hole };
        self.ask(from, request, |_, result| match result {
            Ok(Reply::Offset(offset)) => reply.offset(i64::try_from(offset).unwrap_or(i64::MAX)),
            other => reply.error(failed(other)),
        });
    }

    fn copy_file_range(
        &self,
        from: &fuser::Request,
        source: INodeNo,
        _: FileHandle,
        from_offset: u64,
        target: INodeNo,
        to_handle: FileHandle,
        to_offset: u64,
        length: u64,
        flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        if !flags.is_empty() {
            return reply.error(fuser::Errno::EINVAL);
        }
        let request = Request::CopyRange {
            from: source.0,
            from_offset,
            to: target.0,
            to_handle: to_handle.0,
            to_offset,
            length,
        };
        self.ask_for(self.0.caller(from, target), request, move |shared, result| {
            shared.privileges_ended(target.0);
            written(reply, result);
        });
    }
}
