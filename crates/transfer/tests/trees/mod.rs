//! Random trees of all kinds of entries, and a comparison of everything that a copy must keep.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;

use proptest::prelude::*;
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, Timespec, Timestamps, Uid, XattrFlags};

/// What every entry has.
#[derive(Clone, Debug)]
pub struct Common {
    pub mode: u32,
    pub owner: (u32, u32),
    pub mtime: (i64, i64),
    pub xattr: Option<Vec<u8>>,
    pub acl: bool,
}

#[derive(Clone, Debug)]
pub enum Kind {
    /// Pieces of data and of hole, in KiB.
    File(Vec<(bool, u16)>, u16),
    Directory(Vec<(Vec<u8>, Entry)>),
    Symlink(Vec<u8>),
    Fifo,
    Socket,
    Device,
    /// A further name of a file made earlier.
    HardLink(usize),
}

#[derive(Clone, Debug)]
pub struct Entry {
    pub kind: Kind,
    pub common: Common,
}

fn common() -> impl Strategy<Value = Common> {
    (
        0_u32..0o10000,
        (prop_oneof![Just(0_u32), 1_u32..70_000], prop_oneof![Just(0_u32), 1_u32..70_000]),
        (-1_000_000_000_i64..4_000_000_000, 0_i64..1_000_000_000),
        proptest::option::weighted(0.3, proptest::collection::vec(any::<u8>(), 0..300)),
        proptest::bool::weighted(0.2),
    )
        .prop_map(|(mode, owner, mtime, xattr, acl)| Common { mode, owner, mtime, xattr, acl })
}

/// A name: any bytes but NUL and slash, also such as are not UTF-8.
fn name() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>().prop_map(|b| if b == 0 || b == b'/' { b'_' } else { b }), 1..40)
        .prop_map(|name| if name.iter().all(|b| *b == b'.') { b"dots".to_vec() } else { name })
}

fn leaf() -> impl Strategy<Value = Kind> {
    prop_oneof![
        6 => (proptest::collection::vec((any::<bool>(), 0_u16..40), 0..5), 0_u16..2000)
            .prop_map(|(pieces, tail)| Kind::File(pieces, tail)),
        1 => name().prop_map(Kind::Symlink),
        1 => Just(Kind::Fifo),
        1 => Just(Kind::Socket),
        1 => Just(Kind::Device),
        2 => any::<usize>().prop_map(Kind::HardLink),
    ]
}

/// The root of a random tree.
pub fn tree() -> impl Strategy<Value = Entry> {
    let entry = (leaf(), common()).prop_map(|(kind, common)| Entry { kind, common });
    let nested = entry.prop_recursive(5, 60, 8, |inner| {
        (proptest::collection::vec((name(), inner), 0..8), common())
            .prop_map(|(entries, common)| Entry { kind: Kind::Directory(entries), common })
    });
    (proptest::collection::vec((name(), nested), 0..12), common())
        .prop_map(|(entries, common)| Entry { kind: Kind::Directory(entries), common })
}

/// Whether this process may make devices and give files away.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Makes `entry` at `path`.
pub fn make(path: &Path, entry: &Entry) {
    make_below(path, entry, &mut Vec::new());
}

fn make_below(path: &Path, entry: &Entry, files: &mut Vec<std::path::PathBuf>) {
    let special = |kind| {
        rustix::fs::mknodat(
            CWD,
            path,
            kind,
            Mode::RUSR,
            if kind == FileType::CharacterDevice { 0x103 } else { 0 },
        )
        .unwrap();
    };
    match &entry.kind {
        Kind::File(pieces, tail) => {
            let file = fs::File::create(path).unwrap();
            let mut offset = 0;
            for (data, kib) in pieces {
                let length = u64::from(*kib) * 1024;
                if *data {
                    let content: Vec<u8> = (0..length).map(|i| (i * 7 + offset + 1) as u8).collect();
                    file.write_all_at(&content, offset).unwrap();
                }
                offset += length;
            }
            file.set_len(offset + u64::from(*tail)).unwrap();
            files.push(path.to_owned());
        }
        Kind::Directory(entries) => {
            fs::create_dir(path).unwrap();
            let mut seen = std::collections::HashSet::new();
            for (name, entry) in entries {
                if seen.insert(name.clone()) {
                    make_below(&path.join(OsString::from_vec(name.clone())), entry, files);
                }
            }
        }
        Kind::Symlink(target) => {
            std::os::unix::fs::symlink(OsString::from_vec(target.clone()), path).unwrap();
        }
        Kind::Fifo => special(FileType::Fifo),
        Kind::Socket => special(FileType::Socket),
        Kind::Device if is_root() => special(FileType::CharacterDevice),
        Kind::Device => special(FileType::Fifo),
        Kind::HardLink(which) if !files.is_empty() => {
            // The first name's attributes hold for all.
            return fs::hard_link(&files[which % files.len()], path).unwrap();
        }
        Kind::HardLink(_) => fs::write(path, b"first").unwrap(),
    }
    let common = &entry.common;
    let symlink = matches!(entry.kind, Kind::Symlink(_));
    if is_root() {
        let (uid, gid) = common.owner;
        rustix::fs::chownat(
            CWD,
            path,
            Some(Uid::from_raw(uid)),
            Some(Gid::from_raw(gid)),
            AtFlags::SYMLINK_NOFOLLOW,
        )
        .unwrap();
    }
    if !symlink {
        // A user must be able to read what is to be copied.
        let readable = if is_root() { 0 } else { 0o700 };
        fs::set_permissions(path, fs::Permissions::from_mode(common.mode | readable)).unwrap();
        if common.acl && !matches!(entry.kind, Kind::Socket) {
            rustix::fs::setxattr(path, "system.posix_acl_access", &acl(), XattrFlags::empty()).unwrap();
            if matches!(entry.kind, Kind::Directory(_)) {
                rustix::fs::setxattr(path, "system.posix_acl_default", &acl(), XattrFlags::empty()).unwrap();
            }
        }
    }
    if let Some(value) = &common.xattr {
        if matches!(entry.kind, Kind::File(..) | Kind::Directory(_)) {
            rustix::fs::lsetxattr(path, "user.test", value, XattrFlags::empty()).unwrap();
        } else if is_root() {
            rustix::fs::lsetxattr(path, "trusted.test", value, XattrFlags::empty()).unwrap();
        }
    }
    let time = Timespec { tv_sec: common.mtime.0, tv_nsec: common.mtime.1 as _ };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

/// `u::rw-,u:12345:r--,g::---,m::r--,o::---` in the kernel's form.
fn acl() -> Vec<u8> {
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in
        [(1_u16, 6_u16, u32::MAX), (2, 4, 12_345), (4, 0, u32::MAX), (16, 4, u32::MAX), (32, 0, u32::MAX)]
    {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

/// All that a copy must keep of one entry.
#[derive(Debug, PartialEq, Eq)]
pub struct Look {
    mode: u32,
    owner: (u32, u32),
    mtime: (i64, i64),
    size: u64,
    device: u64,
    content: Vec<u8>,
    holes: Vec<bool>,
    xattrs: BTreeMap<CString, Vec<u8>>,
    /// The first path, in order, that is the same inode.
    same_as: Option<Vec<u8>>,
}

/// Looks at every entry below `root`, the root included (as the empty path).
pub fn look(root: &Path) -> BTreeMap<Vec<u8>, Look> {
    let mut looks = BTreeMap::new();
    look_below(root, root, &mut looks);
    let mut first: HashMap<u64, Vec<u8>> = HashMap::new();
    for (path, (inode, look)) in &mut looks {
        if look.mode & 0o170_000 != 0o040_000 {
            look.same_as = first.get(inode).cloned();
            first.entry(*inode).or_insert_with(|| path.clone());
        }
    }
    looks.into_iter().map(|(path, (_, look))| (path, look)).collect()
}

fn look_below(root: &Path, path: &Path, looks: &mut BTreeMap<Vec<u8>, (u64, Look)>) {
    let metadata = fs::symlink_metadata(path).unwrap();
    let kind = metadata.file_type();
    let relative = path.strip_prefix(root).unwrap().as_os_str().as_bytes().to_vec();
    let (mut content, mut holes) = (Vec::new(), Vec::new());
    if kind.is_file() {
        content = fs::read(path).unwrap();
        // Holes of whole 4 KiB blocks; which of them a filesystem reports may differ at the edges, so only large
        // ones count.
        let file = fs::File::open(path).unwrap();
        let length = metadata.len();
        for block in 0..length / 65_536 {
            let start = block * 65_536;
            let data = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(start)).unwrap_or(length);
            holes.push(data >= start + 65_536);
        }
    } else if kind.is_symlink() {
        content = fs::read_link(path).unwrap().into_os_string().into_vec();
    }
    let mut list = vec![0; 4096];
    let length = rustix::fs::llistxattr(path, &mut list[..]).unwrap_or(0);
    let mut xattrs = BTreeMap::new();
    for name in list[..length].split_inclusive(|b| *b == 0) {
        let name = CString::from_vec_with_nul(name.to_vec()).unwrap();
        let mut value = vec![0; 4096];
        let length = rustix::fs::lgetxattr(path, &*name, &mut value[..]).unwrap();
        value.truncate(length);
        xattrs.insert(name, value);
    }
    let look = Look {
        mode: metadata.mode(),
        owner: (metadata.uid(), metadata.gid()),
        mtime: (metadata.mtime(), metadata.mtime_nsec()),
        size: if kind.is_dir() { 0 } else { metadata.len() },
        device: metadata.rdev(),
        content,
        holes,
        xattrs,
        same_as: None,
    };
    looks.insert(relative, (metadata.ino(), look));
    if kind.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            look_below(root, &entry.unwrap().path(), looks);
        }
    }
}

/// Fails with the first difference between two trees.
pub fn assert_same(left: &Path, right: &Path) {
    let (left, right) = (look(left), look(right));
    let names = |looks: &BTreeMap<Vec<u8>, Look>| -> Vec<String> {
        looks.keys().map(|path| String::from_utf8_lossy(path).into_owned()).collect()
    };
    assert_eq!(names(&left), names(&right));
    for (path, look) in &left {
        let other = &right[path];
        let path = String::from_utf8_lossy(path);
        assert_eq!(look.content.len(), other.content.len(), "{path}: length");
        assert!(look.content == other.content, "{path}: content differs");
        let attributes = |look: &Look| {
            format!(
                "mode {:o} owner {:?} mtime {:?} device {} size {} holes {:?} same as {:?} xattrs {:?}",
                look.mode,
                look.owner,
                look.mtime,
                look.device,
                look.size,
                look.holes,
                look.same_as,
                look.xattrs
                    .iter()
                    .map(|(name, value)| format!(
                        "{name:?} of {} bytes, sum {}",
                        value.len(),
                        value.iter().map(|b| u64::from(*b)).sum::<u64>()
                    ))
                    .collect::<Vec<_>>()
            )
        };
        assert_eq!(attributes(look), attributes(other), "{path}");
    }
}
