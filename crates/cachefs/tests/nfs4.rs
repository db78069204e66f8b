//! A filesystem with ACLs of NFSv4, of which a test needs nothing but that it has them. There is no NFS here.

#![allow(clippy::unwrap_used)]

use std::ffi::OsStr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, INodeNo, ReplyAttr, ReplyXattr, Session, SessionACL,
};
use ondeck_cachefs::instance::{Attach, Caches, Plan, StartError, check};
use ondeck_cachefs::settings::{LEAST_CAPACITY, Settings};
use rustix::fs::{Mode, OFlags};

/// A directory of root's that everybody may enter.
struct Directory {
    has_acls: bool,
}

impl fuser::Filesystem for Directory {
    fn getattr(&self, _: &fuser::Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let directory = FileAttr {
            ino,
            size: 0,
            blocks: 0,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: FileType::Directory,
            perm: 0o755,
            nlink: 2,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        };
        reply.attr(&Duration::ZERO, &directory);
    }

    fn getxattr(&self, _: &fuser::Request, _: INodeNo, name: &OsStr, _: u32, reply: ReplyXattr) {
        if self.has_acls && name == "system.nfs4_acl" {
            reply.size(80);
        } else {
            reply.error(Errno::EOPNOTSUPP);
        }
    }
}

/// Such a directory, mounted.
struct Mounted(tempfile::TempDir);

impl Mounted {
    fn new(has_acls: bool) -> Option<Mounted> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
            ondeck_skip::skipped("it needs root and /dev/fuse");
            return None;
        }
        let prefix = format!("ondeck-test.{}.", std::process::id());
        let dir = tempfile::Builder::new().prefix(&prefix).tempdir().unwrap();
        let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        let options = std::ffi::CString::new(options).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("ondeck-test", dir.path(), "fuse", flags, &*options).unwrap();
        let mounted = Mounted(dir);
        let session = Session::from_fd(Directory { has_acls }, device, SessionACL::All, Config::default());
        let session = session.unwrap();
        // Until it is unmounted.
        std::thread::spawn(move || session.run());
        Some(mounted)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A test that has failed says more than this would.
        let _ = rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn a_cache_for_all_users_of_a_directory_with_acls_that_nobody_would_check_is_refused() {
    let base = tempfile::tempdir().unwrap();
    for has_acls in [true, false] {
        let Some(mounted) = Mounted::new(has_acls) else { return };
        let backing = mounted.0.path().canonicalize().unwrap();
        assert_eq!(backing.metadata().unwrap().mode() & 0o7777, 0o755);
        for others in [true, false] {
            let plan = Plan {
                base: Caches::new(base.path()).base().to_owned(),
                mount_point: base.path().join("fast"),
                backing: backing.clone(),
                user: None,
                others,
                settings: Settings::new(LEAST_CAPACITY),
                run: None,
                attach: Attach::Here,
            };
            match check(&plan) {
                Err(StartError::Refused(why)) => {
                    assert!(has_acls && others, "{why}");
                    assert!(why.contains("ACLs of NFSv4") && why.contains("--user"), "{why}");
                }
                Err(StartError::Failed(why)) => panic!("{why}"),
                Ok(()) => assert!(!has_acls || !others),
            }
        }
    }
}
