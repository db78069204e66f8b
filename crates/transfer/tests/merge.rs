//! A copy into a directory that others write to: what a policy is promised.

#![allow(clippy::unwrap_used)]

use std::ffi::{CStr, CString};
use std::fs;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use ondeck_transfer::merge::{Changes, DirectoryAction, EntryAction, EntryContext, MergePolicy, Merged};
use ondeck_transfer::{Monitor, Options, Progress, Roots, TargetRoot, stage_roots};
use rustix::fs::{Stat, Timespec};

/// Two directories that are there.
fn roots(from: &Path, to: &Path) -> Roots {
    let open = |path: &Path| -> OwnedFd { fs::File::open(path).unwrap().into() };
    Roots {
        source: open(from),
        target: TargetRoot::Existing(open(to)),
        source_path: from.to_owned(),
        target_path: to.to_owned(),
    }
}

/// Lets somebody else write an entry right after the target was looked at, and keeps what it is shown.
struct Rival {
    target: PathBuf,
}

impl Rival {
    fn writes(&self, path: &Path) {
        fs::write(self.target.join(path), "theirs").unwrap();
    }
}

impl MergePolicy for Rival {
    fn entry(&self, entry: &EntryContext<'_>) -> EntryAction {
        let path = entry.path();
        let name = entry.name.to_bytes();
        if path.contains(&b'/') {
            return EntryAction::Copy;
        }
        let replaced = entry.target.is_some_and(|target| target.st_size as usize == "older".len());
        if entry.target.is_none() || replaced {
            self.writes(Path::new(std::ffi::OsStr::from_bytes(&path)));
            return EntryAction::Copy;
        }
        EntryAction::Beside(CString::new([name, b".ours"].concat()).unwrap())
    }

    fn directory(&self, path: &[u8], _: BorrowedFd<'_>, target: Option<&Stat>) -> DirectoryAction {
        match target {
            _ if path.is_empty() => DirectoryAction::Merge { delete: true, attributes: false },
            None => {
                self.writes(Path::new(std::ffi::OsStr::from_bytes(path)));
                DirectoryAction::Merge { delete: false, attributes: false }
            }
            Some(_) if path == b"directory" => DirectoryAction::Beside(c"directory.ours".to_owned()),
            Some(_) => DirectoryAction::Refuse("somebody else was quicker"),
        }
    }

    fn may_delete(&self, _: &[u8], _: &Stat) -> bool {
        false
    }

    fn xattr_name(&self, name: &CStr) -> Option<CString> {
        Some(name.to_owned())
    }

    fn placed(&self, _: &[u8], _: &Stat) {}
}

#[test]
fn what_somebody_writes_while_an_entry_is_copied_is_never_replaced() {
    let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (from, to) = (source.path(), target.path());
    fs::write(from.join("file"), "ours").unwrap();
    fs::write(from.join("large"), vec![7; 70 << 20]).unwrap();
    fs::write(from.join("changed"), "ours").unwrap();
    fs::write(to.join("changed"), "older").unwrap();
    symlink("ours", from.join("symlink")).unwrap();
    fs::write(from.join("link-1"), "ours").unwrap();
    fs::hard_link(from.join("link-1"), from.join("link-2")).unwrap();
    fs::create_dir(from.join("directory")).unwrap();
    fs::write(from.join("directory/inside"), "ours").unwrap();
    fs::create_dir(from.join("refused")).unwrap();

    let failures = std::sync::Mutex::new(Vec::new());
    let event = |event: ondeck_transfer::Event<'_>| {
        if let ondeck_transfer::Event::Failed(error) = event {
            failures.lock().unwrap().push(error.to_string());
        }
    };
    let options = Options { tag: Some("test".to_owned()), delete: true, ..Options::default() };
    let monitor = Monitor { progress: &Progress::default(), event: &event };
    stage_roots(roots(from, to), &options, Some(&Rival { target: to.to_owned() }), &monitor).unwrap();

    for name in ["file", "large", "changed", "symlink", "link-1", "link-2"] {
        assert_eq!(fs::read(to.join(name)).unwrap(), b"theirs", "{name}");
        let ours = to.join(format!("{name}.ours"));
        match name {
            "symlink" => assert_eq!(fs::read_link(ours).unwrap(), Path::new("ours")),
            "large" => assert_eq!(fs::read(ours).unwrap().len(), 70 << 20),
            _ => assert_eq!(fs::read(ours).unwrap(), b"ours", "{name}"),
        }
    }
    assert_eq!(fs::read(to.join("directory")).unwrap(), b"theirs");
    assert_eq!(fs::read(to.join("directory.ours/inside")).unwrap(), b"ours");
    assert_eq!(fs::read(to.join("refused")).unwrap(), b"theirs");
    let failures = failures.into_inner().unwrap();
    assert_eq!(failures.len(), 1, "{failures:?}");
    assert!(failures[0].contains("somebody else was quicker"), "{failures:?}");
    let left: Vec<_> = fs::read_dir(to)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .filter(|name| name.as_bytes().starts_with(b"."))
        .collect();
    // The next attempt goes on with it.
    assert_eq!(left, [".refused.ondeck-partial-test"]);
}

/// Copies everything but what is called `skipped`, and lets nothing be deleted.
struct Careful;

impl MergePolicy for Careful {
    fn entry(&self, entry: &EntryContext<'_>) -> EntryAction {
        if entry.name.to_bytes() == b"skipped" { EntryAction::Skip } else { EntryAction::Copy }
    }

    fn directory(&self, _: &[u8], _: BorrowedFd<'_>, _: Option<&Stat>) -> DirectoryAction {
        DirectoryAction::Merge { delete: false, attributes: false }
    }

    fn may_delete(&self, _: &[u8], _: &Stat) -> bool {
        false
    }

    fn xattr_name(&self, name: &CStr) -> Option<CString> {
        Some(name.to_owned())
    }

    fn placed(&self, _: &[u8], _: &Stat) {}
}

/// A copy that was killed leaves new directories under temporary names, with entries in them that are not complete.
#[test]
fn nothing_that_a_killed_copy_left_unfinished_is_shown_with_the_directory() {
    let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (from, to) = (source.path(), target.path());
    fs::create_dir_all(from.join("sub/deep")).unwrap();
    let left = to.join(".sub.ondeck-partial-test");
    fs::create_dir_all(left.join("deep/gone")).unwrap();
    for name in ["deep/copied", "deep/skipped", "skipped"] {
        fs::write(from.join("sub").join(name), "whole").unwrap();
        fs::write(left.join(name), "").unwrap();
    }
    for name in ["deep/lost", "deep/gone/lost", "lost"] {
        fs::write(left.join(name), "").unwrap();
    }
    fs::write(to.join("theirs"), "theirs").unwrap();
    let options = Options { tag: Some("test".to_owned()), delete: true, ..Options::default() };
    let monitor = Monitor { progress: &Progress::default(), event: &|_| {} };
    stage_roots(roots(from, to), &options, Some(&Careful), &monitor).unwrap();
    let names = |path: &Path| -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    assert_eq!(names(to), ["sub", "theirs"]);
    assert_eq!(names(&to.join("sub")), ["deep"]);
    assert_eq!(names(&to.join("sub/deep")), ["copied"]);
    assert_eq!(fs::read(to.join("sub/deep/copied")).unwrap(), b"whole");
}

/// Changes some attributes of the directories that were there.
struct Changing;

impl MergePolicy for Changing {
    fn entry(&self, _: &EntryContext<'_>) -> EntryAction {
        EntryAction::Copy
    }

    fn directory(&self, _: &[u8], _: BorrowedFd<'_>, _: Option<&Stat>) -> DirectoryAction {
        DirectoryAction::Merge { delete: false, attributes: false }
    }

    fn may_delete(&self, _: &[u8], _: &Stat) -> bool {
        false
    }

    fn xattr_name(&self, name: &CStr) -> Option<CString> {
        Some(name.to_owned())
    }

    fn changes(&self, merged: &Merged<'_>) -> std::io::Result<Changes> {
        if merged.path == b"quiet" {
            // Its time as it was before something was put into it.
            assert!(merged.target.st_mtime > merged.entered.st_mtime);
            let tv_nsec = merged.entered.st_mtime_nsec as _;
            let modified = Some(Timespec { tv_sec: merged.entered.st_mtime, tv_nsec });
            return Ok(Changes { modified, ..Changes::default() });
        }
        if merged.path != b"changed" {
            return Ok(Changes::default());
        }
        Ok(Changes {
            mode: Some(0o1711),
            accessed: Some(Timespec { tv_sec: 5, tv_nsec: 6 }),
            modified: Some(Timespec { tv_sec: 3, tv_nsec: 4 }),
            xattrs: vec![
                (c"user.set".to_owned(), Some(b"now".to_vec())),
                (c"user.removed".to_owned(), None),
                (c"user.never-there".to_owned(), None),
            ],
            ..Changes::default()
        })
    }

    fn placed(&self, _: &[u8], _: &Stat) {}
}

#[test]
fn a_directory_that_was_there_gets_the_attributes_that_the_policy_says_and_no_others() {
    let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (from, to) = (source.path(), target.path());
    let flags = rustix::fs::XattrFlags::empty();
    for name in ["changed", "quiet", "left"] {
        for side in [from, to] {
            fs::create_dir(side.join(name)).unwrap();
        }
        fs::write(from.join(name).join("new"), "new").unwrap();
        rustix::fs::setxattr(from.join(name), "user.source", b"s", flags).unwrap();
        for xattr in ["user.kept", "user.removed", "user.set"] {
            rustix::fs::setxattr(to.join(name), xattr, b"before", flags).unwrap();
        }
        fs::set_permissions(to.join(name), fs::Permissions::from_mode(0o750)).unwrap();
        fs::File::open(to.join(name))
            .unwrap()
            .set_modified(UNIX_EPOCH + Duration::from_nanos(7_000_000_008))
            .unwrap();
    }
    let options = Options { tag: Some("test".to_owned()), delete: true, ..Options::default() };
    let monitor = Monitor { progress: &Progress::default(), event: &|_| {} };
    let summary = stage_roots(roots(from, to), &options, Some(&Changing), &monitor).unwrap();
    assert_eq!(summary.errors, 0);

    let xattr = |name: &str, xattr: &str| {
        let mut value = [0_u8; 16];
        let length = rustix::fs::getxattr(to.join(name), xattr, &mut value);
        length.ok().map(|length| String::from_utf8(value[..length].to_vec()).unwrap())
    };
    let stat = |name: &str| fs::metadata(to.join(name)).unwrap();
    assert_eq!(stat("changed").permissions().mode() & 0o7777, 0o1711);
    assert_eq!((stat("changed").mtime(), stat("changed").mtime_nsec()), (3, 4));
    assert_eq!((stat("changed").atime(), stat("changed").atime_nsec()), (5, 6));
    assert_eq!(xattr("changed", "user.set").as_deref(), Some("now"));
    assert_eq!(xattr("changed", "user.removed"), None);
    assert_eq!((stat("quiet").mtime(), stat("quiet").mtime_nsec()), (7, 8));
    for name in ["quiet", "left"] {
        assert_eq!(stat(name).permissions().mode() & 0o7777, 0o750);
        assert_eq!(xattr(name, "user.set").as_deref(), Some("before"));
    }
    for name in ["changed", "quiet", "left"] {
        assert_eq!(xattr(name, "user.kept").as_deref(), Some("before"));
        assert_eq!(xattr(name, "user.source"), None);
        assert_eq!(fs::read(to.join(name).join("new")).unwrap(), b"new");
    }
    assert!(stat("left").mtime() > 7);
}
