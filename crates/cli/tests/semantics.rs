//! What docs/semantics.md says of each system call, carried out on a cache. What "works" there is done on a plain directory of
//! the same ext4, too, and gives the same.

#![allow(clippy::unwrap_used)]

mod cached;
mod scene;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, RenameFlags, SeekFrom as Seeking};
use rustix::io::Errno;
use rustix::mm::MapFlags;

use cached::{Map, Mounted, sh};
use scene::wait_until;

/// Where the kernel writes by itself.
const WRITES: &str = "cli/tests/cache_writes.rs";

/// Who is not root and nobody else here.
const SOMEBODY: u32 = 20_001;

/// How a row of the page is shown to be true.
enum Check {
    /// The same is seen in an empty directory of a cache and in one of the disk.
    Same(fn(&Path) -> String),
    /// On a cache.
    Cache(fn(&Case)),
    /// On a cache that is mounted for it.
    Own(fn(&Row)),
    /// By another test, in this file of the crates.
    Test(&'static str, &'static str),
}

use Check::{Cache, Own, Same, Test};

/// A row of the page.
struct Row {
    call: String,
    says: String,
}

impl Row {
    /// That it was refused as the page says.
    #[track_caller]
    fn refuses<T: std::fmt::Debug>(&self, result: Result<T, Errno>, error: Errno, name: &str) {
        assert_eq!(result.unwrap_err(), error);
        assert!(self.says.contains(name), "the page does not speak of {name}: {}", self.says);
    }
}

/// An empty directory of a cache for a row.
struct Case<'a> {
    row: &'a Row,
    mounted: &'a Mounted,
    dir: PathBuf,
    backing: PathBuf,
}

impl Case<'_> {
    #[track_caller]
    fn refuses<T: std::fmt::Debug>(&self, result: Result<T, Errno>, error: Errno, name: &str) {
        self.row.refuses(result, error, name);
    }

    fn file(&self, content: &[u8]) -> PathBuf {
        let path = self.dir.join("file");
        fs::write(&path, content).unwrap();
        path
    }

    fn flush(&self) {
        self.mounted.ondeck(&["flush", "fast"]);
    }

    /// Waits until nothing is open: the kernel says so some time after a close, and what is open decides how a file is opened.
    fn wait_closed(&self) {
        wait_until("nothing is open", || self.figure("open_files") == 0);
    }

    /// A figure of the cache's status.
    fn figure(&self, name: &str) -> u64 {
        self.mounted.status()["status"][name].as_u64().unwrap_or_else(|| panic!("no {name}"))
    }
}

/// All rows of the page, in its order, by their first cell.
const CHECKS: &[(&str, Check)] = &[
    ("`open`, `read`, `write`, `pread`, `pwrite`, `sendfile`", Same(reads_and_writes)),
    ("`O_APPEND` by several", Same(appends)),
    ("`O_TRUNC`, `truncate`, `ftruncate`", Same(truncates)),
    ("`O_DIRECT`", Cache(direct)),
    ("`O_SYNC`, `O_DSYNC`, `RWF_SYNC`, `RWF_DSYNC`", Own(synced_writes)),
    ("`O_TMPFILE`", Cache(unnamed)),
    ("`O_NOATIME`", Same(without_atime)),
    ("`preadv2` with `RWF_NOWAIT`", Cache(no_wait)),
    ("a write beyond `--max-file-size`, or 2 PiB", Own(too_large)),
    (
        "a write while the cache is full",
        Test("cli/tests/cache.rs", "writers_that_wait_for_a_disk_that_hangs_can_be_killed"),
    ),
    (
        "a write while the backing directory is full, too",
        Test(
            "cachefs/tests/full.rs",
            "a_writer_of_more_than_fits_is_told_what_the_disk_says_and_others_are_not_kept",
        ),
    ),
    ("`copy_file_range`", Same(copies_ranges)),
    ("`FICLONE`, `FICLONERANGE`", Cache(clones)),
    ("`splice`, `readahead`, `posix_fadvise`, `sync_file_range`", Same(advises)),
    ("a reader by passthrough, then a writer", Cache(reader_then_writer)),
    ("a private map; a shared map for reading", Same(maps)),
    ("a shared map for writing, and `read`, `write` by the same or another process", Same(shared_maps)),
    ("a map of a file that is unlinked", Same(unlinked_map)),
    ("a file that is open for writing beside a passthrough reader", Cache(writer_beside_reader)),
    (
        "`sendfile`, `splice` out of a file that is open for reading and writing beside a passthrough reader",
        Cache(sends_beside_reader),
    ),
    ("more than half of the capacity open by passthrough", Cache(half_is_open)),
    (
        "a write, and `stat`, reads and maps by anybody",
        Test(WRITES, "what_the_kernel_writes_is_seen_at_once_and_comes_to_the_backing_directory"),
    ),
    (
        "a write when the store is full",
        Test(WRITES, "a_full_store_is_told_to_who_filled_it_and_the_cache_goes_on"),
    ),
    (
        "a write beyond the capacity",
        Test(WRITES, "what_was_written_beyond_the_capacity_is_counted_and_others_wait_for_it"),
    ),
    (
        "readers, writers, `O_SYNC`, truncation, `unlink` and `rename` of a file that is open",
        Test(WRITES, "opens_of_one_file_agree_however_they_are_mixed"),
    ),
    (
        "a write to a file with set-uid or set-gid bits",
        Test(WRITES, "a_write_takes_set_id_bits_away_and_times_that_are_set_stay"),
    ),
    (
        "a kill of the server while a file is open",
        Test(WRITES, "a_file_that_is_open_when_the_server_is_killed_has_all_that_was_written"),
    ),
    (
        "`fsync` with `--sync fsync`, and `flush`, of an open file",
        Test(WRITES, "fsync_brings_an_open_file_to_the_backing_directory_and_so_does_a_flush"),
    ),
    ("`fallocate`, mode 0", Cache(allocates)),
    ("`FALLOC_FL_KEEP_SIZE`", Cache(allocates_behind_the_end)),
    ("`FALLOC_FL_PUNCH_HOLE`, `FALLOC_FL_ZERO_RANGE`", Same(punches)),
    ("`FALLOC_FL_COLLAPSE_RANGE`, `FALLOC_FL_INSERT_RANGE`, `FALLOC_FL_UNSHARE_RANGE`", Cache(collapses)),
    ("`SEEK_DATA`, `SEEK_HOLE`", Same(seeks)),
    ("`FIEMAP`", Cache(fiemap)),
    ("`st_blocks`", Cache(blocks)),
    ("`mkdir`, `rmdir`, `unlink`, `symlink`, `readlink`, `link`", Same(names)),
    ("`rename`, also over a file that is open; `RENAME_NOREPLACE`, `RENAME_EXCHANGE`", Same(renames)),
    ("`RENAME_WHITEOUT`", Cache(whiteout)),
    ("an open file without a name: `fstat`, `read`, `write`", Same(nameless)),
    ("`linkat` of one that has lost its last name", Same(links_nameless)),
    ("a name that begins with `.ondeck-cache-`", Cache(reserved_names)),
    ("names that are not UTF-8; 255 bytes", Same(strange_names)),
    ("`mknod`", Cache(special_files)),
    ("`readdir` while the directory changes", Cache(lists_while_changing)),
    ("`inotify`", Cache(notifies)),
    ("`name_to_handle_at`", Same(handles)),
    ("`chmod`, `chown`, `utimensat` with nanoseconds, also before 1970", Same(attributes)),
    (
        "`chown` to neither an owner nor a group, of somebody else's file",
        Test("cli/tests/cache_users.rs", "who_is_not_the_owner_takes_nothing_away_by_an_empty_chown"),
    ),
    ("atime", Cache(access_times)),
    ("mtime", Cache(modification_times)),
    ("ctime", Cache(change_times)),
    ("birth time (`statx`)", Cache(birth_times)),
    ("inode numbers", Own(inode_numbers)),
    ("`..` in the list of a directory's entries", Cache(parents)),
    ("the size of a new directory", Cache(directory_size)),
    ("`st_blksize`", Cache(block_size)),
    ("set-uid and set-gid bits, file capabilities", Same(privileges)),
    ("extended attributes", Same(extended_attributes)),
    ("ACLs", Same(access_control_lists)),
    ("`FS_IOC_GETFLAGS`, `FS_IOC_SETFLAGS` (`lsattr`, `chattr`)", Cache(flags)),
    ("other `ioctl`s", Cache(controls)),
    ("`statfs`", Cache(space)),
    ("`flock`, `fcntl` locks, locks of open file descriptions", Same(locks)),
    ("`fsync`, `fdatasync`, also of directories", Own(syncs)),
    ("`sync`, `syncfs`", Cache(does_not_sync_all)),
    ("`close`", Own(closes)),
    (
        "another user, with `--user`, root included",
        Test("cli/tests/cache.rs", "only_its_user_reaches_a_cache_and_only_what_that_user_may"),
    ),
    (
        "the user with another primary group (`newgrp`, `sg`), or in a set-uid or set-gid program, with `--user`",
        Test("cli/tests/cache.rs", "only_its_user_reaches_a_cache_and_only_what_that_user_may"),
    ),
    ("any user with `--allow-other`", Own(all_users)),
    ("`mount` inside a cache", Own(mounts_inside)),
    ("`swapon` of a file", Cache(swaps)),
    ("`execve`", Same(executes)),
    (
        "everything after the server was killed",
        Test("cli/tests/cache.rs", "what_a_killed_server_had_is_there_when_the_cache_is_mounted_again"),
    ),
];

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The rows of the page's tables.
fn page() -> Vec<Row> {
    let page = fs::read_to_string(crates().parent().unwrap().join("docs/semantics.md")).unwrap();
    let mut rows = Vec::new();
    for line in page.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [call, says] = cells[..] else { panic!("not two cells: {line}") };
        // The heads of the tables.
        if says != "on a cache" {
            rows.push(Row { call: call.to_owned(), says: says.to_owned() });
        }
    }
    rows
}

#[test]
fn each_row_of_the_page_is_checked_and_nothing_else() {
    let rows: Vec<String> = page().into_iter().map(|row| row.call).collect();
    let checks: Vec<&str> = CHECKS.iter().map(|(call, _)| *call).collect();
    assert_eq!(rows, checks);
    for (call, check) in CHECKS {
        if let Test(file, name) = check {
            let source = fs::read_to_string(crates().join(file)).unwrap();
            assert!(source.contains(&format!("fn {name}()")), "{call}: no test {name} in {file}");
        }
    }
}

/// An ext4 on a loop device, of which one directory is behind a cache.
struct Disk {
    at: PathBuf,
    backing: PathBuf,
}

impl Disk {
    /// To be called for a directory that is to be behind a cache.
    fn new(backing: &Path) -> Disk {
        let (image, at) = (backing.with_extension("image"), backing.with_extension("disk"));
        fs::create_dir(&at).unwrap();
        sh(
            Path::new("/"),
            &format!(
                "truncate -s 300M {image}; mkfs.ext4 -q {image}; mount -o loop {image} {at}
                 mkdir {at}/backing {at}/plain; mount --bind {at}/backing {backing}",
                image = image.display(),
                at = at.display(),
                backing = backing.display(),
            ),
        );
        Disk { at, backing: backing.to_owned() }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        sh(Path::new("/"), &format!("umount -l {} {}", self.backing.display(), self.at.display()));
    }
}

#[test]
fn the_page_is_true() {
    let mut disk = None;
    let Some(mounted) = Mounted::with(&[], |backing| disk = Some(Disk::new(backing))) else { return };
    let disk = disk.unwrap();
    let mut wrong = Vec::new();
    let page = page();
    for (number, (row, (_, check))) in page.iter().zip(CHECKS).enumerate() {
        let dir = |below: &Path| {
            let dir = below.join(format!("row-{number}"));
            fs::create_dir(&dir).unwrap();
            dir
        };
        let checked = catch_unwind(AssertUnwindSafe(|| match check {
            Same(act) => {
                let on_disk = act(&dir(&disk.at.join("plain")));
                assert_eq!(act(&dir(&mounted.fast)), on_disk, "the cache is on the left");
            }
            Cache(act) => {
                let dir = dir(&mounted.fast);
                let backing = mounted.backing.join(dir.file_name().unwrap());
                act(&Case { row, mounted: &mounted, dir, backing });
            }
            Own(act) => act(row),
            Test(..) => {}
        }));
        if checked.is_err() {
            wrong.push(&row.call);
        }
    }
    mounted.ondeck(&["unmount", "fast"]);
    assert!(wrong.is_empty(), "not so: {wrong:#?}");
}

#[test]
fn the_page_is_true_where_the_kernel_writes() {
    let mut disk = None;
    let options = ["--writes", "passthrough"];
    let Some(mounted) = Mounted::with(&options, |backing| disk = Some(Disk::new(backing))) else { return };
    let disk = disk.unwrap();
    let mut wrong = Vec::new();
    for (number, (call, check)) in CHECKS.iter().enumerate() {
        let Same(act) = check else { continue };
        let dir = |below: &Path| {
            let dir = below.join(format!("row-{number}"));
            fs::create_dir(&dir).unwrap();
            dir
        };
        let checked = catch_unwind(AssertUnwindSafe(|| {
            let on_disk = act(&dir(&disk.at.join("plain")));
            assert_eq!(act(&dir(&mounted.fast)), on_disk, "the cache is on the left");
        }));
        if checked.is_err() {
            wrong.push(call);
        }
    }
    mounted.ondeck(&["unmount", "fast"]);
    assert!(wrong.is_empty(), "not so: {wrong:#?}");
}

/// What a call gave, or its error.
fn told<T: std::fmt::Debug>(result: Result<T, Errno>) -> String {
    match result {
        Ok(value) => format!("{value:?}"),
        Err(error) => format!("{error}"),
    }
}

fn open(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, flags, Mode::from_raw_mode(0o644))
}

fn create(path: &Path) -> File {
    File::options().create(true).read(true).write(true).truncate(false).open(path).unwrap()
}

fn listed(dir: &Path) -> BTreeSet<Vec<u8>> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().as_bytes().to_owned()).collect()
}

fn reads_and_writes(dir: &Path) -> String {
    let file = create(&dir.join("file"));
    file.write_all_at(b"0123456789", 0).unwrap();
    file.write_all_at(b"xy", 3).unwrap();
    file.write_all_at(b"end", 3_000_000).unwrap();
    let mut two = [0; 2];
    file.read_exact_at(&mut two, 3).unwrap();
    let copy = create(&dir.join("copy"));
    let mut offset = 0;
    while rustix::fs::sendfile(&copy, &file, Some(&mut offset), 1 << 20).unwrap() > 0 {}
    let copied = fs::read(dir.join("copy")).unwrap();
    assert_eq!(copied, fs::read(dir.join("file")).unwrap());
    let mut behind = [0; 10];
    format!("{two:?} {} {:?}", copied.len(), file.read_at(&mut behind, 3_000_003).unwrap())
}

fn appends(dir: &Path) -> String {
    let path = dir.join("log");
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let path = &path;
            scope.spawn(move || {
                let mut file = File::options().create(true).append(true).open(path).unwrap();
                for line in 0..200 {
                    file.write_all(format!("{writer} {line:03}\n").as_bytes()).unwrap();
                }
            });
        }
    });
    let log = fs::read_to_string(&path).unwrap();
    let lines: BTreeSet<&str> = log.lines().collect();
    format!("{} {}", log.len(), lines.len())
}

fn truncates(dir: &Path) -> String {
    let path = dir.join("file");
    fs::write(&path, vec![7; 10_000]).unwrap();
    let file = create(&path);
    file.set_len(5_000).unwrap();
    file.set_len(6_000).unwrap();
    let content = fs::read(&path).unwrap();
    assert!(content[..5_000].iter().all(|byte| *byte == 7) && content[5_000..].iter().all(|byte| *byte == 0));
    sh(dir, "truncate -s 3 file");
    let cut = fs::metadata(&path).unwrap().len();
    File::create(&path).unwrap();
    format!("{} {cut} {}", content.len(), file.metadata().unwrap().len())
}

fn direct(case: &Case) {
    let file = File::from(open(&case.file(b"1234567"), OFlags::RDWR | OFlags::DIRECT).unwrap());
    file.write_all_at(b"odd", 1).unwrap();
    let mut read = [0; 5];
    file.read_exact_at(&mut read, 1).unwrap();
    assert_eq!(&read, b"odd56");
}

fn synced_writes(_: &Row) {
    for (mode, reaches) in [("fsync", true), ("close", true), ("interval=60s", false)] {
        let Some(mounted) = Mounted::with(&["--sync", mode], |_| ()) else { return };
        for (name, flag) in [("sync", OFlags::SYNC), ("dsync", OFlags::DSYNC)] {
            let flags = OFlags::CREATE | OFlags::RDWR | flag;
            let file = File::from(open(&mounted.fast.join(name), flags).unwrap());
            file.write_all_at(b"synced", 0).unwrap();
            let found = fs::read(mounted.backing.join(name)).ok();
            assert_eq!(found.as_deref(), reaches.then_some(b"synced".as_slice()), "{mode} {name}");
        }
        let file = create(&mounted.fast.join("one"));
        let content = [std::io::IoSlice::new(b"synced")];
        rustix::io::pwritev2(&file, &content, 0, rustix::io::ReadWriteFlags::DSYNC).unwrap();
        assert_eq!(mounted.backing.join("one").exists(), reaches, "{mode}");
    }
}

fn unnamed(case: &Case) {
    case.refuses(open(&case.dir, OFlags::TMPFILE | OFlags::RDWR), Errno::OPNOTSUPP, "EOPNOTSUPP");
}

fn without_atime(dir: &Path) -> String {
    fs::write(dir.join("file"), "content").unwrap();
    let mut content = String::new();
    let mut file = File::from(open(&dir.join("file"), OFlags::RDONLY | OFlags::NOATIME).unwrap());
    file.read_to_string(&mut content).unwrap();
    content
}

fn no_wait(case: &Case) {
    let path = case.file(b"content");
    // It goes through the server because somebody writes.
    let writer = create(&path);
    let mut buffer = [0; 7];
    let mut buffers = [std::io::IoSliceMut::new(&mut buffer)];
    let read = rustix::io::preadv2(&writer, &mut buffers, 0, rustix::io::ReadWriteFlags::NOWAIT);
    case.refuses(read, Errno::OPNOTSUPP, "EOPNOTSUPP");
}

fn too_large(row: &Row) {
    let Some(mounted) = Mounted::with(&["--max-file-size", "1MiB"], |_| ()) else { return };
    let file = create(&mounted.fast.join("file"));
    file.write_all_at(&vec![1; 1 << 20], 0).unwrap();
    row.refuses(rustix::io::pwrite(&file, b"more", 1 << 20), Errno::FBIG, "EFBIG");
    assert_eq!(rustix::io::pwrite(&file, &[2; 100], (1 << 20) - 10), Ok(10), "what fits is written");
    row.refuses(rustix::fs::ftruncate(&file, (1 << 20) + 1), Errno::FBIG, "EFBIG");
    let Some(mounted) = Mounted::new() else { return };
    let file = create(&mounted.fast.join("file"));
    row.refuses(rustix::io::pwrite(&file, b"more", 2 << 50), Errno::FBIG, "EFBIG");
    rustix::fs::ftruncate(&file, 2 << 50).unwrap();
    row.refuses(rustix::fs::ftruncate(&file, (2 << 50) + 1), Errno::FBIG, "EFBIG");
}

fn copies_ranges(dir: &Path) -> String {
    fs::write(dir.join("from"), (0..200_000_u32).map(|at| at as u8).collect::<Vec<_>>()).unwrap();
    let (from, to) = (create(&dir.join("from")), create(&dir.join("to")));
    let (mut from_at, mut to_at) = (1_000, 5);
    let mut copied = 0;
    while copied < 150_000 {
        copied +=
            rustix::fs::copy_file_range(&from, Some(&mut from_at), &to, Some(&mut to_at), 150_000 - copied)
                .unwrap();
    }
    assert_eq!(fs::read(dir.join("to")).unwrap()[5..], fs::read(dir.join("from")).unwrap()[1_000..151_000]);
    format!("{from_at} {to_at}")
}

fn clones(case: &Case) {
    let from = create(&case.file(&[1; 8192]));
    let to = create(&case.dir.join("clone"));
    case.refuses(rustix::fs::ioctl_ficlone(&to, &from), Errno::OPNOTSUPP, "EOPNOTSUPP");
}

fn advises(dir: &Path) -> String {
    fs::write(dir.join("file"), [5; 10_000]).unwrap();
    let file = create(&dir.join("file"));
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let flags = rustix::pipe::SpliceFlags::empty();
    let moved = rustix::pipe::splice(&file, Some(&mut 5), &writer, None, 100, flags).unwrap();
    let mut content = [0; 100];
    File::from(reader).read_exact(&mut content).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    // SAFETY: a descriptor that is open, and no memory.
    let (ahead, range) = unsafe {
        (
            libc::readahead(file.as_raw_fd(), 0, 4096),
            libc::sync_file_range(file.as_raw_fd(), 0, 4096, libc::SYNC_FILE_RANGE_WRITE),
        )
    };
    format!("{moved} {ahead} {range} {}", content == [5; 100])
}

fn maps(dir: &Path) -> String {
    let path = dir.join("file");
    fs::write(&path, [1; 10_000]).unwrap();
    let file = create(&path);
    let (private, shared) =
        (Map::new(&file, 10_000, true, MapFlags::PRIVATE), Map::new(&file, 10_000, false, MapFlags::SHARED));
    private.set(5, 9);
    let before = (private.get(5), shared.get(5), shared.get(9_999));
    file.write_all_at(&[4], 6).unwrap();
    format!("{before:?} {} {:?}", shared.get(6), &fs::read(&path).unwrap()[4..7])
}

fn shared_maps(dir: &Path) -> String {
    let path = dir.join("file");
    fs::write(&path, [1; 10_000]).unwrap();
    let file = create(&path);
    let map = Map::new(&file, 10_000, true, MapFlags::SHARED);
    map.set(5_000, 2);
    let mut own = [0; 1];
    file.read_exact_at(&mut own, 5_000).unwrap();
    // Another process.
    let others = sh(
        dir,
        "tail -c +5001 file | head -c 1 | od -An -tu1; printf '\\004' | dd of=file bs=1 seek=7 conv=notrunc status=none",
    );
    format!("{own:?} {} {}", others.trim(), map.get(7))
}

fn unlinked_map(dir: &Path) -> String {
    let path = dir.join("file");
    fs::write(&path, [3; 10_000]).unwrap();
    let file = create(&path);
    let map = Map::new(&file, 10_000, true, MapFlags::SHARED);
    fs::remove_file(&path).unwrap();
    drop(file);
    map.set(1, 8);
    format!("{} {}", map.get(1), map.get(9_999))
}

fn reader_then_writer(case: &Case) {
    let path = case.file(&[1; 100_000]);
    case.wait_closed();
    let reader = File::open(&path).unwrap();
    assert_eq!(case.figure("pinned"), 102_400, "it is read by passthrough");
    let mut byte = [0];
    reader.read_exact_at(&mut byte, 70_000).unwrap();
    create(&path).write_all_at(&[2], 70_000).unwrap();
    reader.read_exact_at(&mut byte, 70_000).unwrap();
    assert_eq!(byte, [2]);
}

fn writer_beside_reader(case: &Case) {
    case.flush();
    let others = case.figure("resident");
    let path = case.file(&[1; 4096]);
    create(&path).set_len(1 << 20).unwrap();
    case.wait_closed();
    let reader = File::open(&path).unwrap();
    assert_eq!((case.figure("resident") - others, case.figure("dirty")), (4096, 4096));
    let writer = create(&path);
    assert_eq!(case.figure("resident") - others, 1 << 20, "all of it takes memory");
    drop(writer);
    wait_until("the kernel says that it is closed", || case.figure("dirty") == 1 << 20);
    drop(reader);
}

fn sends_beside_reader(case: &Case) {
    let path = case.file(&[1; 8192]);
    case.wait_closed();
    let reader = File::open(&path).unwrap();
    let (file, copy) = (create(&path), create(&case.dir.join("copy")));
    let sent = |at: u64| rustix::fs::sendfile(&copy, &file, Some(&mut at.clone()), 4096);
    case.refuses(sent(0), Errno::INVAL, "EINVAL");
    let (_reader, writer) = rustix::pipe::pipe().unwrap();
    let spliced =
        rustix::pipe::splice(&file, Some(&mut 0), &writer, None, 100, rustix::pipe::SpliceFlags::empty());
    case.refuses(spliced, Errno::INVAL, "EINVAL");
    // What else copies sees what a map has written.
    let map = Map::new(&file, 8192, true, MapFlags::SHARED);
    for value in 2..20 {
        map.set(5_000, value);
        let copied = rustix::fs::copy_file_range(&file, Some(&mut 4096), &copy, Some(&mut 0), 4096).unwrap();
        assert_eq!((copied, fs::read(case.dir.join("copy")).unwrap()[904]), (4096, value));
    }
    // A reader's own handle sends, too.
    map.set(5_001, 1);
    assert_eq!(rustix::fs::sendfile(&copy, &reader, Some(&mut 0), 8192).unwrap(), 8192);
    drop(map);
}

fn half_is_open(case: &Case) {
    let files: Vec<PathBuf> = (0..6).map(|number| case.dir.join(number.to_string())).collect();
    for path in &files {
        fs::write(path, vec![1; 4 << 20]).unwrap();
    }
    case.flush();
    case.wait_closed();
    let open: Vec<File> = files.iter().map(|path| File::open(path).unwrap()).collect();
    let pinned = case.figure("pinned");
    assert!((12 << 20..=16 << 20).contains(&pinned), "{pinned} of 32 MiB");
    for file in open {
        let mut content = Vec::new();
        (&file).read_to_end(&mut content).unwrap();
        assert_eq!(content, vec![1; 4 << 20]);
    }
}

fn allocates(case: &Case) {
    let file = create(&case.dir.join("file"));
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 1 << 30).unwrap();
    let about = file.metadata().unwrap();
    assert_eq!((about.len(), about.blocks()), (1 << 30, 0));
}

fn allocates_behind_the_end(case: &Case) {
    let file = create(&case.dir.join("file"));
    rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 1 << 45).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 0);
}

fn punches(dir: &Path) -> String {
    let path = dir.join("file");
    fs::write(&path, vec![6; 100_000]).unwrap();
    let file = create(&path);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 5_000, 20_000).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::ZERO_RANGE, 50_000, 60_000).unwrap();
    let content = fs::read(&path).unwrap();
    let zeros: Vec<usize> = (1..content.len()).filter(|at| content[*at] != content[at - 1]).collect();
    format!("{} {zeros:?}", content.len())
}

fn collapses(case: &Case) {
    let file = create(&case.file(&[1; 20_000]));
    for how in [FallocateFlags::COLLAPSE_RANGE, FallocateFlags::INSERT_RANGE, FallocateFlags::UNSHARE_RANGE] {
        case.refuses(rustix::fs::fallocate(&file, how, 4096, 4096), Errno::OPNOTSUPP, "EOPNOTSUPP");
    }
}

fn seeks(dir: &Path) -> String {
    let file = create(&dir.join("file"));
    file.write_all_at(&[1; 4096], 40_960).unwrap();
    file.set_len(200_000).unwrap();
    let seek = |to| told(rustix::fs::seek(&file, to));
    format!(
        "{} {} {} {} {} {}",
        seek(Seeking::Data(0)),
        seek(Seeking::Hole(0)),
        seek(Seeking::Hole(40_961)),
        seek(Seeking::Data(50_000)),
        seek(Seeking::Hole(200_000)),
        seek(Seeking::Data(300_000)),
    )
}

fn fiemap(case: &Case) {
    const FS_IOC_FIEMAP: libc::Ioctl = 0xC020_660B_u32 as libc::Ioctl;
    let file = create(&case.file(&[1; 20_000]));
    let mut asked = [0_u64, u64::MAX, 0, 0];
    // SAFETY: the structure of 32 bytes that is asked with, without room for extents.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP, &raw mut asked) };
    assert_eq!(answer, -1);
    case.refuses::<()>(Err(last_error()), Errno::OPNOTSUPP, "EOPNOTSUPP");
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap()
}

fn blocks(case: &Case) {
    let path = case.file(&[1; 20_000]);
    assert_eq!(fs::metadata(&path).unwrap().blocks(), 40, "five pages are resident");
    create(&path).set_len(1 << 30).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().blocks(), 40);
    case.flush();
    case.mounted.ondeck(&["evict", path.to_str().unwrap()]);
    let shown = fs::metadata(&path).unwrap().blocks();
    let on_disk = fs::metadata(case.backing.join("file")).unwrap().blocks();
    assert_eq!(shown, on_disk);
}

fn names(dir: &Path) -> String {
    fs::create_dir(dir.join("a")).unwrap();
    fs::write(dir.join("a/file"), "content").unwrap();
    fs::hard_link(dir.join("a/file"), dir.join("hard")).unwrap();
    symlink("a/file", dir.join("soft")).unwrap();
    let seen = format!(
        "{} {:?} {:?}",
        fs::metadata(dir.join("hard")).unwrap().nlink(),
        fs::read_link(dir.join("soft")).unwrap(),
        fs::read_to_string(dir.join("soft")).unwrap(),
    );
    let unlink = |name: &str, flags| told(rustix::fs::unlinkat(CWD, dir.join(name), flags));
    let refused = [
        unlink("a", AtFlags::REMOVEDIR),
        unlink("a", AtFlags::empty()),
        unlink("hard", AtFlags::REMOVEDIR),
        told(rustix::fs::mkdir(dir.join("hard"), Mode::RWXU)),
        told(rustix::fs::symlink("x", dir.join("hard"))),
        told(rustix::fs::link(dir.join("a"), dir.join("b"))),
        told(rustix::fs::link(dir.join("hard"), dir.join("soft"))),
        unlink("none", AtFlags::empty()),
    ];
    fs::remove_file(dir.join("a/file")).unwrap();
    fs::remove_dir(dir.join("a")).unwrap();
    format!("{seen} {refused:?} {:?}", listed(dir))
}

fn renames(dir: &Path) -> String {
    fs::write(dir.join("old"), "old").unwrap();
    fs::write(dir.join("new"), "new").unwrap();
    let mut open = File::open(dir.join("old")).unwrap();
    fs::rename(dir.join("new"), dir.join("old")).unwrap();
    let mut content = String::new();
    open.read_to_string(&mut content).unwrap();
    assert_eq!((content.as_str(), open.metadata().unwrap().nlink()), ("old", 0));
    fs::create_dir_all(dir.join("d/e")).unwrap();
    let rename = |from: &str, to: &str, flags| {
        told(rustix::fs::renameat_with(CWD, dir.join(from), CWD, dir.join(to), flags))
    };
    fs::write(dir.join("d/f"), "f").unwrap();
    let done = [
        rename("old", "d/f", RenameFlags::NOREPLACE),
        rename("old", "d/f", RenameFlags::EXCHANGE),
        rename("d", "d/e/g", RenameFlags::empty()),
        rename("d", "old", RenameFlags::empty()),
        rename("old", "d", RenameFlags::empty()),
        rename("d/e", "moved", RenameFlags::empty()),
        rename("none", "x", RenameFlags::empty()),
        rename("d", "moved", RenameFlags::EXCHANGE),
    ];
    format!(
        "{done:?} {:?} {:?} {:?}",
        fs::read_to_string(dir.join("old")).unwrap(),
        fs::read_to_string(dir.join("moved/f")).unwrap(),
        listed(dir)
    )
}

fn whiteout(case: &Case) {
    let path = case.file(b"");
    let renamed = rustix::fs::renameat_with(CWD, &path, CWD, case.dir.join("to"), RenameFlags::WHITEOUT);
    case.refuses(renamed, Errno::INVAL, "EINVAL");
}

fn nameless(dir: &Path) -> String {
    let path = dir.join("file");
    fs::write(&path, "content").unwrap();
    let mut file = create(&path);
    fs::remove_file(&path).unwrap();
    file.write_all_at(b"CON", 0).unwrap();
    file.write_all_at(&[1; 100], 2_000_000).unwrap();
    let mut content = [0; 7];
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_exact(&mut content).unwrap();
    let about = file.metadata().unwrap();
    format!("{content:?} {} {} {:?}", about.nlink(), about.len(), listed(dir))
}

fn links_nameless(dir: &Path) -> String {
    let path = dir.join("file");
    fs::write(&path, "content").unwrap();
    let file = create(&path);
    fs::remove_file(&path).unwrap();
    let of = format!("/proc/self/fd/{}", file.as_raw_fd());
    told(rustix::fs::linkat(CWD, of, CWD, dir.join("again"), AtFlags::SYMLINK_FOLLOW))
}

fn reserved_names(case: &Case) {
    let (from, name) = (case.file(b""), case.dir.join(".ondeck-cache-x"));
    case.refuses(open(&name, OFlags::CREATE | OFlags::RDWR), Errno::INVAL, "EINVAL");
    case.refuses(rustix::fs::mkdir(&name, Mode::RWXU), Errno::INVAL, "EINVAL");
    case.refuses(rustix::fs::rename(&from, &name), Errno::INVAL, "EINVAL");
    case.refuses(rustix::fs::link(&from, &name), Errno::INVAL, "EINVAL");
    case.refuses(rustix::fs::symlink("x", &name), Errno::INVAL, "EINVAL");
    case.flush();
    fs::write(case.backing.join(".ondeck-cache-y"), "").unwrap();
    assert!(!case.dir.join(".ondeck-cache-y").exists());
    fs::remove_file(case.backing.join(".ondeck-cache-y")).unwrap();
}

fn strange_names(dir: &Path) -> String {
    let longest = vec![b'n'; 255];
    for name in [b"\xff\xfe\n".as_slice(), b" ", b"-rf", &longest] {
        fs::write(dir.join(OsStr::from_bytes(name)), "x").unwrap();
    }
    let too_long = OsStr::from_bytes(&[b'n'; 256]).to_owned();
    format!("{:?} {}", listed(dir), told(rustix::fs::stat(dir.join(too_long)).map(|_| ())))
}

fn special_files(case: &Case) {
    let make = |name: &str, kind, device| {
        rustix::fs::mknodat(CWD, case.dir.join(name), kind, Mode::from_raw_mode(0o600), device).unwrap();
        fs::symlink_metadata(case.dir.join(name)).unwrap()
    };
    make("pipe", FileType::Fifo, 0);
    let listened = std::os::unix::net::UnixListener::bind(case.dir.join("socket")).unwrap();
    std::os::unix::net::UnixStream::connect(case.dir.join("socket")).unwrap();
    drop(listened);
    let passed = sh(&case.dir, "echo through > pipe & cat pipe");
    assert_eq!(passed, "through\n");
    let zero = make("zero", FileType::CharacterDevice, rustix::fs::makedev(1, 5));
    assert_eq!(zero.rdev(), rustix::fs::makedev(1, 5));
    case.refuses(open(&case.dir.join("zero"), OFlags::RDONLY), Errno::ACCESS, "EACCES");
    case.flush();
    let on_disk = fs::symlink_metadata(case.backing.join("zero")).unwrap();
    assert_eq!((on_disk.rdev(), on_disk.mode()), (zero.rdev(), zero.mode()));
}

fn lists_while_changing(case: &Case) {
    for name in ["a", "b"] {
        fs::write(case.dir.join(name), "").unwrap();
    }
    let mut entries = rustix::fs::Dir::read_from(File::open(&case.dir).unwrap()).unwrap();
    let mut list = |names: &mut BTreeSet<String>| {
        while let Some(entry) = entries.read() {
            names.insert(entry.unwrap().file_name().to_str().unwrap().to_owned());
            // The first time round, as soon as reading has begun.
            fs::write(case.dir.join("c"), "").unwrap();
            let _absent_the_second_time = fs::remove_file(case.dir.join("a"));
        }
        entries.rewind();
    };
    let (mut first, mut second) = (BTreeSet::new(), BTreeSet::new());
    list(&mut first);
    list(&mut second);
    // It may be left out: it was removed before it was shown.
    first.remove("a");
    assert_eq!(first, [".", "..", "b"].map(String::from).into());
    assert_eq!(second, [".", "..", "b", "c"].map(String::from).into());
}

fn notifies(case: &Case) {
    use rustix::fs::inotify::{CreateFlags, Reader, WatchFlags, add_watch, init};
    case.flush();
    let watch = init(CreateFlags::NONBLOCK).unwrap();
    add_watch(&watch, &case.dir, WatchFlags::CREATE).unwrap();
    fs::write(case.backing.join("behind"), "").unwrap();
    fs::write(case.dir.join("here"), "").unwrap();
    let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
    let mut reader = Reader::new(&watch, &mut buffer);
    assert_eq!(reader.next().unwrap().file_name().unwrap().to_str(), Ok("here"));
    assert_eq!(reader.next().unwrap_err(), Errno::AGAIN);
}

fn handles(dir: &Path) -> String {
    #[repr(C)]
    struct Answer {
        bytes: u32,
        kind: i32,
        handle: [u8; 128],
    }
    let path = std::ffi::CString::new(dir.as_os_str().as_bytes()).unwrap();
    let (mut answer, mut mount) = (Answer { bytes: 128, kind: 0, handle: [0; 128] }, 0);
    // SAFETY: the kernel writes no more than the bytes that it is told of.
    let done = unsafe {
        let handle = (&raw mut answer).cast();
        libc::name_to_handle_at(libc::AT_FDCWD, path.as_ptr(), handle, &raw mut mount, 0)
    };
    format!("{done}")
}

fn attributes(dir: &Path) -> String {
    let path = dir.join("file");
    fs::write(&path, "").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o4751)).unwrap();
    std::os::unix::fs::chown(&path, Some(SOMEBODY), Some(SOMEBODY + 1)).unwrap();
    let time = |tv_sec, tv_nsec| rustix::fs::Timespec { tv_sec, tv_nsec };
    for (last_access, last_modification) in
        [(time(-5, 123_456_789), time(1, 1)), (time(7_000_000_000, 0), time(-1, 999_999_999))]
    {
        let times = rustix::fs::Timestamps { last_access, last_modification };
        rustix::fs::utimensat(CWD, &path, &times, AtFlags::empty()).unwrap();
    }
    // To nobody else, which takes set-id bits away, too.
    let other = dir.join("other");
    fs::write(&other, "").unwrap();
    fs::set_permissions(&other, fs::Permissions::from_mode(0o6456)).unwrap();
    std::os::unix::fs::chown(&other, None, None).unwrap();
    let other = fs::metadata(&other).unwrap().mode();
    let about = fs::metadata(&path).unwrap();
    format!(
        "{other:o} {:o} {} {} {}.{} {}.{}",
        about.mode(),
        about.uid(),
        about.gid(),
        about.atime(),
        about.atime_nsec(),
        about.mtime(),
        about.mtime_nsec()
    )
}

fn access_times(case: &Case) {
    let path = case.file(b"content");
    sh(&case.dir, "touch -a -d '2001-02-03 04:05:06.5' file");
    fs::read(&path).unwrap();
    case.flush();
    for path in [path, case.backing.join("file")] {
        let about = fs::metadata(path).unwrap();
        assert_eq!((about.atime_nsec(), about.atime() < 1_000_000_000), (500_000_000, true));
    }
}

fn modification_times(case: &Case) {
    let path = case.file(b"content");
    fs::create_dir(case.dir.join("d")).unwrap();
    fs::write(case.dir.join("d/new"), "").unwrap();
    case.flush();
    for name in ["file", "d"] {
        let (here, behind) =
            (fs::metadata(case.dir.join(name)).unwrap(), fs::metadata(case.backing.join(name)).unwrap());
        assert_eq!((here.mtime(), here.mtime_nsec()), (behind.mtime(), behind.mtime_nsec()), "{name}");
    }
    let before = fs::metadata(&path).unwrap().modified().unwrap();
    wait_until("the kernel's clock goes on", || {
        fs::write(&path, "more").unwrap();
        fs::metadata(&path).unwrap().modified().unwrap() > before
    });
}

fn change_times(case: &Case) {
    let path = case.file(b"content");
    let ctime = |path: &Path| {
        let about = fs::metadata(path).unwrap();
        (about.ctime(), about.ctime_nsec())
    };
    let before = ctime(&path);
    wait_until("the kernel's clock goes on", || {
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        ctime(&path) > before
    });
    let here = ctime(&path);
    case.flush();
    assert_eq!(ctime(&path), here);
    assert!(ctime(&case.backing.join("file")) >= here);
}

fn birth_times(case: &Case) {
    let asked = rustix::fs::StatxFlags::BTIME;
    let about = rustix::fs::statx(CWD, case.file(b""), AtFlags::empty(), asked).unwrap();
    assert_eq!(about.stx_mask & asked.bits(), 0);
}

fn inode_numbers(_: &Row) {
    let there = |backing: &Path| fs::write(backing.join("there"), "").unwrap();
    let Some(mounted) = Mounted::with(&[], there) else { return };
    let number = |path: PathBuf| fs::metadata(path).unwrap().ino();
    assert_eq!(number(mounted.fast.join("there")), number(mounted.backing.join("there")));
    assert_ne!(fs::metadata(&mounted.fast).unwrap().dev(), fs::metadata(&mounted.backing).unwrap().dev());
    fs::write(mounted.fast.join("new"), "").unwrap();
    let here = number(mounted.fast.join("new"));
    mounted.ondeck(&["flush", "fast"]);
    assert_eq!(number(mounted.fast.join("new")), here);
    let on_disk = number(mounted.backing.join("new"));
    mounted.ondeck(&["unmount", "fast"]);
    mounted.ondeck(&["mount", "--backing", "backing", "--capacity", "32MiB", "fast"]);
    assert_eq!(number(mounted.fast.join("new")), on_disk);
}

fn parents(case: &Case) {
    let mut entries = rustix::fs::Dir::read_from(File::open(&case.dir).unwrap()).unwrap();
    let names: Vec<_> =
        std::iter::from_fn(|| entries.read()).map(|entry| entry.unwrap().file_name().to_owned()).collect();
    assert_eq!(names, [c".".to_owned(), c"..".to_owned()]);
}

fn directory_size(case: &Case) {
    fs::create_dir(case.dir.join("d")).unwrap();
    assert_eq!(fs::metadata(case.dir.join("d")).unwrap().len(), 4096);
    assert!(case.row.says.contains("4096"));
}

fn block_size(case: &Case) {
    assert_eq!(fs::metadata(case.file(b"")).unwrap().blksize(), 128 << 10);
    assert!(case.row.says.contains("128 KiB"));
}

fn privileges(dir: &Path) -> String {
    let path = dir.join("file");
    fs::write(&path, "content").unwrap();
    // cap_net_raw+ep, as setcap(8) writes it.
    let capability = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let attribute = "security.capability";
    rustix::fs::setxattr(&path, attribute, &capability, rustix::fs::XattrFlags::empty()).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
    let mut value = [0; 64];
    let before = told(rustix::fs::getxattr(&path, attribute, &mut value));
    fs::write(&path, "by root").unwrap();
    format!(
        "{before} {} {:o}",
        told(rustix::fs::getxattr(&path, attribute, &mut value)),
        fs::metadata(&path).unwrap().mode()
    )
}

fn extended_attributes(dir: &Path) -> String {
    use rustix::fs::XattrFlags;
    let path = dir.join("file");
    fs::write(&path, "").unwrap();
    let set = |name: &str, flags| told(rustix::fs::setxattr(&path, name, b"value", flags));
    let done = [
        set("user.one", XattrFlags::empty()),
        set("user.one", XattrFlags::CREATE),
        set("user.two", XattrFlags::REPLACE),
        set("trusted.one", XattrFlags::empty()),
        set("security.one", XattrFlags::empty()),
        set("other.one", XattrFlags::empty()),
        // More than a block, and than is left of it.
        told(rustix::fs::setxattr(&path, "user.large", &[7; 60_000], XattrFlags::empty())),
        told(rustix::fs::setxattr(&path, "user.rest", &[7; 4000], XattrFlags::empty())),
        told(rustix::fs::setxattr(&path, "user.half", &[7; 2000], XattrFlags::empty())),
        told(rustix::fs::removexattr(&path, "user.none")),
    ];
    let mut names = vec![0; 1000];
    let length = rustix::fs::listxattr(&path, &mut names).unwrap();
    let names: BTreeSet<&[u8]> = names[..length].split(|byte| *byte == 0).collect();
    let mut value = [0; 3];
    format!("{done:?} {names:?} {}", told(rustix::fs::getxattr(&path, "user.one", &mut value)))
}

fn access_control_lists(dir: &Path) -> String {
    sh(
        dir,
        "setfacl -m u:20001:rx,d:u:20001:rwx,d:g:20002:r .; umask 077; mkdir d; touch f d/g
         chmod 640 f; setfacl -m g:20003:rw d/g; getfacl -n . d f d/g; ls -ld d f d/g | cut -c 1-11",
    )
}

fn flags(case: &Case) {
    let file = File::open(case.file(b"")).unwrap();
    case.refuses(rustix::fs::ioctl_getflags(&file), Errno::NOTTY, "ENOTTY");
    let set = rustix::fs::ioctl_setflags(&file, rustix::fs::IFlags::NOATIME);
    case.refuses(set, Errno::NOTTY, "ENOTTY");
}

fn controls(case: &Case) {
    let file = File::open(case.file(b"")).unwrap();
    case.refuses(rustix::termios::tcgetattr(&file).map(|_| ()), Errno::NOTTY, "ENOTTY");
}

fn space(case: &Case) {
    let figures = |path: &Path| {
        let space = rustix::fs::statvfs(path).unwrap();
        (space.f_bsize, space.f_blocks, space.f_files, space.f_namemax)
    };
    assert_eq!(figures(&case.dir), figures(&case.mounted.backing));
}

fn locks(dir: &Path) -> String {
    use rustix::fs::FlockOperation::{NonBlockingLockExclusive, NonBlockingLockShared};
    let path = dir.join("file");
    let (one, other) = (create(&path), create(&path));
    let mut seen = vec![
        told(rustix::fs::flock(&one, NonBlockingLockShared)),
        told(rustix::fs::flock(&other, NonBlockingLockShared)),
        told(rustix::fs::flock(&other, NonBlockingLockExclusive)),
    ];
    let lock = |file: &File, how| {
        // SAFETY: a structure of integers.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = libc::F_WRLCK as i16;
        lock.l_len = 10;
        // SAFETY: a descriptor that is open, and a whole structure.
        unsafe { libc::fcntl(file.as_raw_fd(), how, &raw const lock) }
    };
    seen.push(format!("{} {}", lock(&one, libc::F_OFD_SETLK), lock(&other, libc::F_OFD_SETLK)));
    let (one, other) = (create(&dir.join("posix")), create(&dir.join("posix")));
    seen.push(lock(&one, libc::F_SETLK).to_string());
    // SAFETY: the child makes two system calls.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let got = lock(&other, libc::F_SETLK);
        // SAFETY: it ends the process.
        unsafe { libc::_exit(if got == 0 { 0 } else { 7 }) }
    }
    let mut status = 0;
    // SAFETY: a place for the status.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    seen.push(libc::WEXITSTATUS(status).to_string());
    seen.join(", ")
}

fn syncs(_: &Row) {
    for (mode, reaches) in [("fsync", true), ("close", true), ("interval=60s", false)] {
        let Some(mounted) = Mounted::with(&["--sync", mode], |_| ()) else { return };
        let writer = create(&mounted.fast.join("file"));
        writer.write_all_at(b"content", 0).unwrap();
        rustix::fs::fdatasync(&writer).unwrap();
        assert_eq!(fs::read(mounted.backing.join("file")).is_ok_and(|found| found == b"content"), reaches);
        writer.write_all_at(b"CONTENT", 0).unwrap();
        writer.sync_all().unwrap();
        assert_eq!(fs::read(mounted.backing.join("file")).is_ok_and(|found| found == b"CONTENT"), reaches);
        fs::create_dir(mounted.fast.join("d")).unwrap();
        fs::write(mounted.fast.join("d/new"), "").unwrap();
        fs::rename(mounted.fast.join("d/new"), mounted.fast.join("d/renamed")).unwrap();
        File::open(mounted.fast.join("d")).unwrap().sync_all().unwrap();
        assert_eq!(mounted.backing.join("d/renamed").exists(), reaches);
    }
}

fn does_not_sync_all(case: &Case) {
    let path = case.file(b"content");
    let file = File::open(&path).unwrap();
    rustix::fs::syncfs(&file).unwrap();
    assert!(!case.backing.join("file").exists());
}

fn closes(_: &Row) {
    for (mode, reaches) in [("close", true), ("fsync", false)] {
        let mut disk = None;
        let prepare = |backing: &Path| disk = Some(Disk::new(backing));
        let Some(mounted) = Mounted::with(&["--sync", mode, "--age", "60s"], prepare) else { return };
        fs::write(mounted.fast.join("file"), "content").unwrap();
        let found = fs::read(mounted.backing.join("file")).is_ok_and(|found| found == b"content");
        assert_eq!(found, reaches, "{mode}");
    }
    // What could not be written back is told once.
    let mut small = None;
    let prepare = |backing: &Path| small = Some(scene::Mounted::tmpfs(backing, "size=1m"));
    let Some(mounted) = Mounted::with(&[], prepare) else { return };
    let path = mounted.fast.join("file");
    fs::write(&path, vec![1; 2 << 20]).unwrap();
    let file = create(&path);
    assert!(!mounted.scene.ondeck(&["cache", "flush", "fast"]).status().unwrap().success());
    let close = |file: &File| {
        let copy = rustix::io::dup(file).unwrap();
        // SAFETY: the copy is this one's, and given up by it.
        unsafe { libc::close(std::os::fd::IntoRawFd::into_raw_fd(copy)) }
    };
    assert_eq!((close(&file), last_error()), (-1, Errno::NOSPC));
    assert_eq!(close(&file), 0);
    small.unwrap().remount(false, "size=10m");
    mounted.ondeck(&["flush", "fast"]);
}

fn all_users(_: &Row) {
    use std::os::unix::process::CommandExt;
    let Some(mounted) = Mounted::with(&["--allow-other"], |_| ()) else { return };
    mounted.run(
        "echo all > all; echo none > none; chmod 600 none; echo acl > acl; chmod 600 acl
         setfacl -m u:20001:r acl; chmod 777 .; echo set > set; chmod 6777 set",
    );
    let script = "cd \"$0\"; cat all acl; ! cat none 2> /dev/null; echo mine > mine; echo more >> set";
    let mut command = Command::new("sh");
    command.args(["-ec", script]).arg(&mounted.fast).uid(SOMEBODY).gid(SOMEBODY);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "all\nacl\n");
    assert_eq!(mounted.run("stat -c '%u %g' mine; stat -c %a set"), "20001 20001\n777\n");
    mounted.ondeck(&["unmount", "fast"]);
    assert_eq!(sh(&mounted.backing, "stat -c '%u %g' mine; stat -c %a set"), "20001 20001\n777\n");
}

fn mounts_inside(_: &Row) {
    let Some(mounted) = Mounted::new() else { return };
    fs::create_dir(mounted.fast.join("d")).unwrap();
    {
        let _inside = scene::Mounted::tmpfs(&mounted.fast.join("d"), "size=1m");
        let output = mounted.scene.ondeck(&["cache", "unmount", "fast"]).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(told.contains("in use"), "{told}");
    }
    mounted.ondeck(&["unmount", "fast"]);
}

fn swaps(case: &Case) {
    let path = case.file(&vec![0; 1 << 20]);
    sh(&case.dir, "chmod 600 file; mkswap -q file");
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: a path that ends.
    assert_eq!(unsafe { libc::swapon(path.as_ptr(), 0) }, -1);
    case.refuses::<()>(Err(last_error()), Errno::INVAL, "EINVAL");
}

fn executes(dir: &Path) -> String {
    sh(dir, "printf '#!/bin/sh\\necho ran\\n' > script; chmod 755 script");
    sh(dir, "./script; cp /bin/echo .; ./echo hello")
}
