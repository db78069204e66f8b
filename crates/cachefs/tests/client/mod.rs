//! A program that uses a cache without a mount: by messages.

#![allow(dead_code, clippy::unwrap_used, reason = "each test uses some of it")]

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Component, Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ondeck_cachefs::Owner;
use ondeck_cachefs::message::{
    Attributes, Caller, Change, Handle, Ino, New, OpenMode, ROOT, Replace, Reply, Request, Service, SetTime,
    Time,
};
use ondeck_cachefs::settings::Settings;
use ondeck_transfer::credentials::User;
use rustix::fs::{Mode, OFlags};

/// A cache over a directory of its own, with a store of its own.
pub struct Cache {
    owner: Option<Arc<Owner>>,
    settings: Settings,
    /// By whose rights it reaches the backing directory, if not the test's.
    user: Option<User>,
    backing: PathBuf,
    store: PathBuf,
    /// Those of them that are removed with it.
    temporary: Vec<tempfile::TempDir>,
    /// What it has references of until its next step, as a program has that uses a path.
    held: Mutex<Vec<(Ino, u64)>>,
}

/// An open file.
pub struct Open {
    pub ino: Ino,
    pub handle: Handle,
    /// What the kernel writes to by itself.
    unasked: Option<Arc<fs::File>>,
}

/// A tmpfs with limits of its own.
pub struct Small(tempfile::TempDir);

impl Small {
    /// `None` where there can't be one.
    pub fn new(options: &str) -> Option<Small> {
        if !rustix::process::geteuid().is_root() {
            ondeck_skip::skipped("it needs root, to mount a small filesystem");
            return None;
        }
        // A name by which `make clean-testbed` knows whose it was.
        let prefix = format!("ondeck-test.{}.", std::process::id());
        let dir = tempfile::Builder::new().prefix(&prefix).tempdir().unwrap();
        let flags = rustix::mount::MountFlags::empty();
        let options = std::ffi::CString::new(options).unwrap();
        rustix::mount::mount("ondeck-test", dir.path(), "tmpfs", flags, &*options).unwrap();
        Some(Small(dir))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Has it take no changes, or take them again.
    pub fn set_read_only(&self, to: bool) {
        let flags = if to { rustix::mount::MountFlags::RDONLY } else { rustix::mount::MountFlags::empty() };
        rustix::mount::mount_remount(self.path(), flags, c"").unwrap();
    }

    /// Changes the limits.
    pub fn change(&self, options: &str) {
        let options = std::ffi::CString::new(options).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount_remount(self.path(), flags, &*options).unwrap();
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // A test that has failed says more than this would.
        let _ = rustix::mount::unmount(self.path(), rustix::mount::UnmountFlags::DETACH);
    }
}

/// Nothing takes so long.
const PATIENCE: Duration = Duration::from_secs(60);

type Result<T> = std::result::Result<T, i32>;

fn caller() -> Caller {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    Caller { uid, gid, thread: 0, outsider: false }
}

impl Cache {
    pub fn new(settings: Settings) -> Cache {
        Cache::over(settings, tempfile::tempdir_in("/dev/shm").unwrap())
    }

    pub fn over(settings: Settings, backing: tempfile::TempDir) -> Cache {
        let store = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut cache = Cache::at(settings, backing.path(), store.path());
        cache.temporary = vec![backing, store];
        cache
    }

    pub fn at(settings: Settings, backing: &Path, store: &Path) -> Cache {
        let (backing, store) = (backing.to_owned(), store.to_owned());
        let (temporary, held) = (Vec::new(), Mutex::default());
        let mut cache = Cache { owner: None, settings, user: None, backing, store, temporary, held };
        cache.open_owner();
        cache
    }

    /// One of a user's, over a directory of that user's; `None` where there can't be one.
    pub fn of_user(settings: Settings, uid: u32, backing: tempfile::TempDir) -> Option<Cache> {
        if !rustix::process::geteuid().is_root() {
            ondeck_skip::skipped("it needs root, to become another user");
            return None;
        }
        std::os::unix::fs::chown(backing.path(), Some(uid), Some(uid)).unwrap();
        let store = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut cache = Cache::of_user_at(settings, uid, backing.path(), store.path());
        cache.temporary = vec![backing, store];
        Some(cache)
    }

    /// The same at given places.
    pub fn of_user_at(settings: Settings, uid: u32, backing: &Path, store: &Path) -> Cache {
        let (name, home) = (format!("user-{uid}"), PathBuf::from("/"));
        let user = Some(User { name, uid, gid: uid, groups: vec![uid], home });
        let (backing, store) = (backing.to_owned(), store.to_owned());
        let (temporary, held) = (Vec::new(), Mutex::default());
        let mut cache = Cache { owner: None, settings, user, backing, store, temporary, held };
        cache.open_owner();
        cache
    }

    fn open_owner(&mut self) {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let backing = rustix::fs::open(&self.backing, flags, Mode::empty()).unwrap();
        self.owner =
            Some(Owner::open(backing, &self.store, self.user.clone(), false, self.settings.clone()).unwrap());
    }

    pub fn owner(&self) -> &Arc<Owner> {
        self.owner.as_ref().unwrap()
    }

    pub fn backing(&self) -> &Path {
        &self.backing
    }

    pub fn store(&self) -> &Path {
        &self.store
    }

    /// As if what serves the cache was killed: nothing is written back, and another one goes on.
    pub fn replace(&mut self) {
        self.held.get_mut().unwrap().clear();
        self.owner.take().unwrap().stop();
        self.open_owner();
    }

    /// Ends the cache, and begins one with another store.
    pub fn forget_everything(&mut self) {
        self.held.get_mut().unwrap().clear();
        self.owner.take().unwrap().stop();
        let store = tempfile::tempdir_in("/dev/shm").unwrap();
        self.store = store.path().to_owned();
        self.temporary.push(store);
        self.open_owner();
    }

    pub fn flush(&self) {
        let until = Instant::now() + PATIENCE;
        let done = self.owner().flush(&mut |_| Instant::now() < until);
        assert_eq!(done, Ok(()), "{:#?}", self.owner().status());
    }

    pub fn evict(&self) {
        self.owner().evict(Path::new("")).unwrap();
    }

    /// Has names be forgotten that take too much.
    pub fn forget_names(&self) {
        self.give_back();
        self.owner().forget_names();
    }

    pub fn ask(&self, request: Request<'_>) -> Result<Reply> {
        let what = format!("{request:?}").chars().take(200).collect::<String>();
        let (tell, told) = channel();
        self.owner().ask(caller(), request, Box::new(move |answer| drop(tell.send(answer))));
        let answer =
            told.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{what}: {:#?}", self.owner().status()));
        answer.map_err(rustix::io::Errno::raw_os_error)
    }

    fn lookup(&self, parent: Ino, name: &OsString) -> Result<Attributes> {
        match self.ask(Request::Lookup { parent, name: name.clone() })? {
            Reply::Entry(found) => {
                self.held.lock().unwrap().push((found.ino, 1));
                Ok(found)
            }
            other => panic!("{other:?}"),
        }
    }

    /// Gives the references of the former step back.
    fn give_back(&self) {
        let held = std::mem::take(&mut *self.held.lock().unwrap());
        self.owner().forget(&held);
    }

    fn parent(&self, path: &Path) -> Result<(Ino, OsString)> {
        let mut dir = ROOT;
        let mut parts: Vec<OsString> = (path.components())
            .map(|part| match part {
                Component::Normal(name) => name.to_owned(),
                other => panic!("{other:?}"),
            })
            .collect();
        let last = parts.pop().unwrap();
        for part in parts {
            let found = self.lookup(dir, &part)?;
            match found.mode & libc::S_IFMT {
                libc::S_IFDIR => dir = found.ino,
                // As the path to the plain directory is followed.
                libc::S_IFLNK => return Err(libc::ENOENT),
                _ => return Err(libc::ENOTDIR),
            }
        }
        Ok((dir, last))
    }

    pub fn attributes(&self, path: impl AsRef<Path>) -> Result<Attributes> {
        self.give_back();
        self.find(path.as_ref())
    }

    fn find(&self, path: &Path) -> Result<Attributes> {
        let (parent, name) = self.parent(path)?;
        self.lookup(parent, &name)
    }

    fn make(&self, path: &Path, new: New, mode: u32) -> Result<()> {
        self.give_back();
        let (parent, name) = self.parent(path)?;
        match self.ask(Request::Make { parent, name, new, mode, umask: 0, open: None })? {
            Reply::Entry(found) => self.owner().forget(&[(found.ino, 1)]),
            other => panic!("{other:?}"),
        }
        Ok(())
    }

    pub fn create(&self, path: impl AsRef<Path>, mode: u32) -> Result<()> {
        self.make(path.as_ref(), New::File, mode)
    }

    pub fn make_directory(&self, path: &str, mode: u32) -> Result<()> {
        self.make(Path::new(path), New::Directory, mode)
    }

    pub fn symlink(&self, path: &str, to: &str) -> Result<()> {
        self.make(Path::new(path), New::Symlink(to.into()), 0o777)
    }

    pub fn special(&self, path: &str, kind: u32) -> Result<()> {
        self.make(Path::new(path), New::Special(kind, 0), 0o600)
    }

    fn file(&self, path: &str) -> Result<Ino> {
        let found = self.attributes(path)?;
        match found.mode & libc::S_IFMT {
            libc::S_IFDIR => Err(libc::EISDIR),
            libc::S_IFREG => Ok(found.ino),
            _ => Err(libc::ELOOP),
        }
    }

    pub fn open(&self, path: &str) -> Result<Open> {
        self.open_as(path, OpenMode { write: true, truncate: false, unasked: true })
    }

    pub fn open_as(&self, path: &str, mode: OpenMode) -> Result<Open> {
        let ino = self.file(path)?;
        match self.ask(Request::Open { ino, mode })? {
            Reply::Opened(opened) => {
                let unasked = opened.passthrough.filter(|_| opened.unasked);
                // As long as it is open.
                let kept = self.held.lock().unwrap().pop();
                assert_eq!(kept, Some((ino, 1)));
                Ok(Open { ino, handle: opened.handle, unasked })
            }
            other => panic!("{other:?}"),
        }
    }

    pub fn close(&self, open: Open) {
        self.ask(Request::Close { ino: open.ino, handle: open.handle }).unwrap();
        self.ask(Request::Release { ino: open.ino, handle: open.handle }).unwrap();
        self.owner().forget(&[(open.ino, 1)]);
    }

    pub fn write_open(&self, open: &Open, offset: u64, data: &[u8]) -> Result<()> {
        if let Some(file) = &open.unasked {
            file.write_all_at(data, offset).unwrap();
            return Ok(());
        }
        for (index, data) in data.chunks(1 << 20).enumerate() {
            let offset = offset + ((index as u64) << 20);
            let write = Request::Write {
                ino: open.ino,
                handle: open.handle,
                offset,
                data: data.into(),
                kill_privileges: false,
            };
            match self.ask(write)? {
                Reply::Written(count) => assert_eq!(count as usize, data.len()),
                other => panic!("{other:?}"),
            }
        }
        Ok(())
    }

    pub fn write(&self, path: &str, offset: u64, data: &[u8]) -> Result<()> {
        let open = self.open(path)?;
        let done = self.write_open(&open, offset, data);
        self.close(open);
        done
    }

    pub fn read_open(&self, open: &Open, offset: u64, length: usize) -> Result<Vec<u8>> {
        let mut data = Vec::new();
        while data.len() < length {
            let size = (length - data.len()).min(1 << 20) as u32;
            let offset = offset + data.len() as u64;
            match self.ask(Request::Read { ino: open.ino, handle: open.handle, offset, size })? {
                Reply::Data(more) if more.is_empty() => break,
                Reply::Data(more) => data.extend(more),
                other => panic!("{other:?}"),
            }
        }
        Ok(data)
    }

    pub fn read(&self, path: &str, offset: u64, length: usize) -> Result<Vec<u8>> {
        let open = self.open_as(path, OpenMode::default())?;
        let data = self.read_open(&open, offset, length);
        self.close(open);
        data
    }

    fn change(&self, path: &str, change: Change) -> Result<()> {
        let ino = self.attributes(path)?.ino;
        self.ask(Request::Change { ino, change }).map(drop)
    }

    pub fn truncate(&self, path: &str, size: u64) -> Result<()> {
        self.file(path)?;
        self.change(path, Change { size: Some(size), ..Change::default() })
    }

    pub fn set_mode(&self, path: &str, mode: u32) -> Result<()> {
        self.change(path, Change { mode: Some(mode), ..Change::default() })
    }

    pub fn set_owner(&self, path: &str, uid: u32, gid: u32) -> Result<()> {
        self.change(path, Change { uid: Some(uid), gid: Some(gid), ..Change::default() })
    }

    pub fn set_times(&self, path: &str, secs: i64, nanos: u32) -> Result<()> {
        let time = Some(SetTime::To(Time { secs, nanos }));
        self.change(path, Change { atime: time, mtime: time, ..Change::default() })
    }

    pub fn set_xattr(&self, path: &str, name: &str, value: &[u8]) -> Result<()> {
        let ino = self.attributes(path)?.ino;
        self.ask(Request::SetXattr { ino, name: name.into(), value: value.to_vec(), flags: 0 }).map(drop)
    }

    pub fn remove_xattr(&self, path: &str, name: &str) -> Result<()> {
        let ino = self.attributes(path)?.ino;
        self.ask(Request::RemoveXattr { ino, name: name.into() }).map(drop)
    }

    pub fn xattr(&self, path: &str, name: &str) -> Result<Vec<u8>> {
        let ino = self.attributes(path)?.ino;
        match self.ask(Request::GetXattr { ino, name: name.into() })? {
            Reply::Data(value) => Ok(value),
            other => panic!("{other:?}"),
        }
    }

    pub fn sync(&self, path: &str) -> Result<()> {
        let ino = self.attributes(path)?.ino;
        self.ask(Request::Sync { ino, data_only: false }).map(drop)
    }

    pub fn seek(&self, path: &str, offset: u64, hole: bool) -> Result<u64> {
        let ino = self.file(path)?;
        match self.ask(Request::Seek { ino, handle: 0, offset, hole })? {
            Reply::Offset(found) => Ok(found),
            other => panic!("{other:?}"),
        }
    }

    pub fn punch(&self, path: &str, offset: u64, length: u64) -> Result<()> {
        let open = self.open(path)?;
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let done = self.ask(Request::Allocate { ino: open.ino, handle: open.handle, offset, length, mode });
        self.close(open);
        done.map(drop)
    }

    pub fn unlink(&self, path: &str) -> Result<()> {
        self.give_back();
        let (parent, name) = self.parent(Path::new(path))?;
        self.ask(Request::Unlink { parent, name }).map(drop)
    }

    pub fn remove_directory(&self, path: &str) -> Result<()> {
        self.give_back();
        let (parent, name) = self.parent(Path::new(path))?;
        self.ask(Request::RemoveDirectory { parent, name }).map(drop)
    }

    pub fn rename(&self, from: &str, to: &str, flags: u32) -> Result<()> {
        self.give_back();
        let (parent, name) = self.parent(Path::new(from))?;
        let (to_parent, to_name) = self.parent(Path::new(to))?;
        let replace = match flags {
            libc::RENAME_NOREPLACE => Replace::No,
            libc::RENAME_EXCHANGE => Replace::Exchange,
            _ => Replace::Yes,
        };
        self.ask(Request::Rename { parent, name, to_parent, to_name, replace }).map(drop)
    }

    pub fn link(&self, from: &str, to: &str) -> Result<()> {
        let ino = self.attributes(from)?.ino;
        let (parent, name) = self.parent(Path::new(to))?;
        match self.ask(Request::Link { ino, parent, name })? {
            Reply::Entry(found) => self.owner().forget(&[(found.ino, 1)]),
            other => panic!("{other:?}"),
        }
        Ok(())
    }

    pub fn list(&self, path: &str) -> Result<Vec<OsString>> {
        let ino = if path.is_empty() { ROOT } else { self.attributes(path)?.ino };
        match self.ask(Request::List { ino })? {
            Reply::Listed(entries) => {
                let mut names: Vec<_> = entries.iter().map(|entry| entry.name.clone()).collect();
                names.sort();
                Ok(names)
            }
            other => panic!("{other:?}"),
        }
    }

    /// All that programs see, by path.
    pub fn tree(&self) -> BTreeMap<PathBuf, Attributes> {
        let mut found = BTreeMap::new();
        let mut stack = vec![PathBuf::new()];
        while let Some(dir) = stack.pop() {
            for name in self.list(dir.to_str().unwrap()).unwrap() {
                let path = dir.join(name);
                let attributes = self.attributes(&path).unwrap();
                if attributes.mode & libc::S_IFMT == libc::S_IFDIR {
                    stack.push(path.clone());
                }
                found.insert(path, attributes);
            }
        }
        found
    }

    /// Kinds, modes and contents of all that programs see, by path.
    pub fn contents(&self) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
        let content = |path: &PathBuf, attributes: &Attributes| match attributes.mode & libc::S_IFMT {
            libc::S_IFREG => self.read(path.to_str().unwrap(), 0, attributes.size as usize).unwrap(),
            _ => Vec::new(),
        };
        self.tree()
            .into_iter()
            .map(|(path, found)| (path.clone(), (found.mode, content(&path, &found))))
            .collect()
    }

    /// Makes a plain directory like what programs see, hard links included.
    pub fn copy_to(&self, root: &Path) {
        use std::os::unix::fs::PermissionsExt;
        let mut links: BTreeMap<Ino, PathBuf> = BTreeMap::new();
        for (path, found) in self.tree() {
            let to = root.join(&path);
            if found.mode & libc::S_IFMT == libc::S_IFDIR {
                fs::create_dir(&to).unwrap();
            } else if let Some(former) = links.get(&found.ino) {
                fs::hard_link(former, &to).unwrap();
            } else {
                fs::write(&to, self.read(path.to_str().unwrap(), 0, found.size as usize).unwrap()).unwrap();
                links.insert(found.ino, to.clone());
            }
            fs::set_permissions(&to, fs::Permissions::from_mode(found.mode & 0o7777)).unwrap();
        }
    }

    /// Checks that the backing directory shows what programs saw.
    pub fn assert_backing_shows(&self, shown: &BTreeMap<PathBuf, Attributes>) {
        for (path, expected) in shown {
            let found = fs::symlink_metadata(self.backing().join(path)).unwrap();
            let what = path.display();
            assert_eq!(
                (found.mtime(), found.mtime_nsec()),
                (expected.mtime.secs, i64::from(expected.mtime.nanos)),
                "{what}"
            );
            assert_eq!(found.mode(), expected.mode, "{what}");
            assert_eq!((found.uid(), found.gid()), (expected.uid, expected.gid), "{what}");
        }
    }
}

/// Checks that two trees are equal: names, kinds, contents, holes, modes, links and attributes.
pub fn same_trees(found: &Path, expected: &Path) {
    let list = |root: &Path| -> BTreeMap<PathBuf, fs::Metadata> {
        let mut all = BTreeMap::new();
        let mut stack = vec![PathBuf::new()];
        while let Some(dir) = stack.pop() {
            for entry in fs::read_dir(root.join(&dir)).unwrap() {
                let path = dir.join(entry.unwrap().file_name());
                let found = fs::symlink_metadata(root.join(&path)).unwrap();
                if found.is_dir() {
                    stack.push(path.clone());
                }
                all.insert(path, found);
            }
        }
        all
    };
    let (left, right) = (list(found), list(expected));
    assert_eq!(left.keys().collect::<Vec<_>>(), right.keys().collect::<Vec<_>>(), "the names");
    for (path, expected_data) in &right {
        let found_data = &left[path];
        let what = path.display();
        assert_eq!(found_data.mode(), expected_data.mode(), "the mode of {what}");
        if !expected_data.is_dir() {
            assert_eq!(found_data.nlink(), expected_data.nlink(), "the links of {what}");
        }
        let (a, b) = (found.join(path), expected.join(path));
        if expected_data.is_symlink() {
            assert_eq!(fs::read_link(&a).unwrap(), fs::read_link(&b).unwrap(), "the target of {what}");
            continue;
        }
        let xattr = |path: &Path| {
            let mut value = [0_u8; 16];
            let length = rustix::fs::getxattr(path, "user.test", value.as_mut_slice()).ok()?;
            Some(value[..length].to_vec())
        };
        assert_eq!(xattr(&a), xattr(&b), "the attribute of {what}");
        if expected_data.is_file() {
            assert_eq!(found_data.len(), expected_data.len(), "the size of {what}");
            let (left, right) = (fs::read(&a).unwrap(), fs::read(&b).unwrap());
            let differs = left.iter().zip(&right).position(|(a, b)| a != b);
            assert_eq!(differs, None, "the first byte of {what} that differs");
            assert_eq!(found_data.blocks(), expected_data.blocks(), "the blocks of {what}");
        }
    }
}
