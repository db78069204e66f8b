//! `instance.json`: what a cache is, for those who find it later.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use ondeck_transfer::credentials::User;
use serde::{Deserialize, Serialize};

use crate::settings::Settings;

/// The version of the record that this release writes, and the only one that it reads.
const VERSION: u32 = 1;

/// A user by whose rights a backing directory is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheUser {
    /// The login name.
    pub name: String,
    /// The user id.
    pub uid: u32,
    /// The primary group.
    pub gid: u32,
    /// All groups.
    pub groups: Vec<u32>,
}

impl From<User> for CacheUser {
    fn from(user: User) -> CacheUser {
        CacheUser { name: user.name, uid: user.uid, gid: user.gid, groups: user.groups }
    }
}

impl From<CacheUser> for User {
    fn from(user: CacheUser) -> User {
        User { name: user.name, uid: user.uid, gid: user.gid, groups: user.groups, home: PathBuf::from("/") }
    }
}

/// Where a directory is in its filesystem, which may be mounted several times.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The filesystem's device.
    pub device: (u32, u32),
    /// The path from its root.
    #[serde(with = "path")]
    pub path: PathBuf,
}

impl Place {
    /// Whether one of two directories is in the other, or both are the same.
    pub fn overlaps(&self, other: &Place) -> bool {
        self.device == other.device
            && (self.path.starts_with(&other.path) || other.path.starts_with(&self.path))
    }
}

/// What a cache is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    /// Where it is mounted.
    #[serde(with = "path")]
    pub mount_point: PathBuf,
    /// The directory behind it.
    #[serde(with = "path")]
    pub backing: PathBuf,
    /// Device and inode of that directory: a path can lead elsewhere one day.
    pub backing_id: (u64, u64),
    /// Where that directory is in its filesystem, by whatever mount it is named.
    #[serde(default)]
    pub place: Option<Place>,
    /// Whose it is; nobody: root's.
    pub user: Option<CacheUser>,
    /// Whether all users may use it.
    pub others: bool,
    /// How it works.
    pub settings: Settings,
    /// The start of the machine (`/proc/sys/kernel/random/boot_id`) that its store belongs to.
    pub boot: String,
    /// The process that serves it.
    pub server: u32,
    /// Bytes and changes that the backing directory lacked a moment ago.
    pub unwritten: u64,
    /// The inode and the length of its journal a moment ago, while there was something unwritten. A journal that is replaced is another
    /// inode, and otherwise it only grows.
    #[serde(default)]
    pub journal: Option<(u64, u64)>,
    /// Whether the backing directory was reached read-only: the mount that is kept of it always is.
    #[serde(default)]
    pub read_only: bool,
    /// Whether programs may have used it since it was made, and it has not ended in an orderly way.
    #[serde(default)]
    pub open: bool,
    /// The run of `ondeck run` that alone sees it, if it is one's.
    #[serde(default)]
    pub run: Option<String>,
    /// What an earlier cache at this place has lost, as long as nobody was told.
    #[serde(default)]
    pub lost_before: Option<String>,
}

impl Record {
    /// That of a cache that is being made by this process.
    pub fn new(
        mount_point: &Path,
        backing: &Path,
        backing_id: (u64, u64),
        user: Option<CacheUser>,
        others: bool,
        settings: Settings,
        run: Option<String>,
    ) -> io::Result<Record> {
        Ok(Record {
            version: VERSION,
            mount_point: mount_point.to_owned(),
            backing: backing.to_owned(),
            backing_id,
            place: None,
            user,
            others,
            settings,
            boot: boot()?,
            server: std::process::id(),
            unwritten: 0,
            journal: None,
            read_only: false,
            open: false,
            run,
            lost_before: None,
        })
    }

    /// What may be lost if the store of this cache is gone, and what was lost before it and not told; nothing of one that was never
    /// used, or has ended in order.
    pub fn lost(&self) -> Option<String> {
        let all: Vec<String> = self.lost_before.iter().cloned().chain(self.lost_now()).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    fn lost_now(&self) -> Option<String> {
        if !self.open && self.unwritten == 0 {
            return None;
        }
        let how = match boot() {
            Ok(boot) if boot != self.boot => "the machine started again",
            _ => "its store was unmounted",
        };
        let (at, backing) = (self.mount_point.display(), self.backing.display());
        // The record is a moment old.
        let what = match self.unwritten {
            0 => format!("what was changed just before may not have been written to {backing}"),
            count => format!("{count} bytes or changes had not been written to {backing}"),
        };
        Some(format!("the cache that was at {at} is lost, because {how}: {what}"))
    }
}

/// Which start of the machine this is.
pub fn boot() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Reads a record, if there is one.
pub fn read(path: &Path) -> io::Result<Option<Record>> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let Version { version } = serde_json::from_slice(&text)?;
    if version != VERSION {
        let text = format!("{} has version {version}, and this ondeck knows {VERSION} only", path.display());
        return Err(io::Error::new(io::ErrorKind::Unsupported, text));
    }
    Ok(Some(serde_json::from_slice(&text)?))
}

/// Writes a record, whole or not at all.
pub fn write(path: &Path, record: &Record) -> io::Result<()> {
    let partial = path.with_extension("json.partial");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
    file.write_all(&serde_json::to_vec_pretty(record)?)?;
    // The directory of records may be on a disk, and outlive the machine's RAM.
    file.sync_all()?;
    fs::rename(&partial, path)
}

/// Paths in JSON: text, or the bytes of one that is none.
pub mod path {
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        match path.to_str() {
            Some(text) => text.serialize(to),
            None => path.as_os_str().as_bytes().serialize(to),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Path {
            Text(String),
            Bytes(Vec<u8>),
        }
        Ok(match Path::deserialize(from)? {
            Path::Text(text) => PathBuf::from(text),
            Path::Bytes(bytes) => PathBuf::from(OsString::from_vec(bytes)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ondeck_core::Bytes;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn what_an_earlier_cache_has_lost_is_told_until_it_was() {
        let settings = Settings::new(Bytes(1 << 30));
        let at = Path::new("/mnt/fast");
        let mut record = Record::new(at, at, (1, 2), None, false, settings, None).unwrap();
        assert_eq!(record.lost(), None);
        record.lost_before = Some("the one before is lost".into());
        assert_eq!(record.lost().unwrap(), "the one before is lost");
        record.open = true;
        assert!(
            record.lost().unwrap().starts_with("the one before is lost; the cache that was at /mnt/fast")
        );
    }

    #[test]
    fn a_record_is_read_as_it_was_written_whatever_bytes_its_paths_have() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("instance.json");
        assert_eq!(read(&path).unwrap(), None);
        let odd = Path::new(std::ffi::OsStr::from_bytes(b"/shared/\xff"));
        let settings = Settings::new(Bytes(1 << 30));
        let record =
            Record::new(Path::new("/mnt/fast"), odd, (1, 2), None, false, settings, Some("0badcafe".into()));
        let record = record.unwrap();
        write(&path, &record).unwrap();
        assert_eq!(read(&path).unwrap(), Some(record));
        let text = fs::read_to_string(&path).unwrap().replace("\"version\": 1", "\"version\": 9");
        fs::write(&path, text).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("version 9"));
    }
}
