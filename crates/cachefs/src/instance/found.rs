//! What an earlier server has left of a cache.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::start::{Plan, StartError};
use super::{Instance, Record};

/// What an earlier server left.
pub enum Found {
    Nothing,
    /// A store, with what it holds.
    Store(Box<Record>),
    /// A record whose store is gone.
    Lost(Box<Record>),
}

/// Looks what is left of the cache of a plan.
pub fn find(instance: &Instance, plan: &Plan) -> Result<Found, StartError> {
    let look = |error: io::Error| {
        StartError::Failed(format!(
            "can't tell what an earlier cache at {} left: {error}",
            plan.mount_point.display()
        ))
    };
    let record = match instance.record() {
        Ok(record) => record,
        // Another release's says itself what to do.
        Err(error) if error.kind() == io::ErrorKind::Unsupported => return Err(look(error)),
        Err(error) => {
            let what = format!(
                "the record {}, which says which directory the data belongs to, can't be understood: {error}",
                instance.record_path().display()
            );
            return Err(unknown(plan, instance, &what));
        }
    };
    match (record, instance.has_store().map_err(look)?) {
        (Some(record), _) if record.mount_point != plan.mount_point => Err(StartError::Refused(format!(
            "the cache at {} has the same number as {}: choose another mount point",
            record.mount_point.display(),
            plan.mount_point.display()
        ))),
        (Some(record), true) => {
            let held = Held::by(&instance.store()).map_err(look)?;
            if held.data && !held.journal {
                return Err(unknown(
                    plan,
                    instance,
                    "its journal is missing: nobody can say what the data is",
                ));
            }
            if let Some(missing) = cut_off(instance, &record).map_err(look)? {
                let what = format!(
                    "the last {missing} bytes of its journal are missing: nobody can say what of the data they told. To recover what is \
                     before them, and lose the rest, write `\"journal\": null` in {} and do the same again",
                    instance.record_path().display()
                );
                return Err(unknown(plan, instance, &what));
            }
            Ok(Found::Store(Box::new(record)))
        }
        (Some(record), false) => Ok(Found::Lost(Box::new(record))),
        (None, _) if instance.may_hold_data().map_err(look)? => {
            let what = format!(
                "the record {} is missing: nobody can say which directory the data belongs to",
                instance.record_path().display()
            );
            Err(unknown(plan, instance, &what))
        }
        (None, _) => Ok(Found::Nothing),
    }
}

/// How many bytes the journal lacks that it had when the record was written last. One that was cut where a record of it ends looks
/// whole by itself.
fn cut_off(instance: &Instance, record: &Record) -> io::Result<Option<u64>> {
    let Some((inode, length)) = record.journal else { return Ok(None) };
    match fs::symlink_metadata(instance.store().join("journal")) {
        Ok(found) if found.ino() == inode => {
            Ok(length.checked_sub(found.len()).filter(|missing| *missing > 0))
        }
        Ok(_) => Ok(None),
        // Nothing was in the store yet that it would tell of.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// That nothing can be done with a store.
fn unknown(plan: &Plan, instance: &Instance, why: &str) -> StartError {
    let (at, store) = (plan.mount_point.display(), instance.store());
    StartError::Refused(format!(
        "an earlier cache at {at} has left a store, {}, that may hold data that nobody else has, and {why}. Put back what is \
         missing, from a copy if there is one; or copy away what you need of the store, and give the data up by `ondeck cache \
         unmount --force-lose {at}`",
        store.display()
    ))
}

impl Instance {
    /// Whether there is a store with something in it. One that has no record then has lost it: a record is written before
    /// anything is put into a store, and removed after the store.
    ///
    /// # Errors
    /// If the table of mounts or the store can't be read.
    pub fn may_hold_data(&self) -> io::Result<bool> {
        if !self.has_store()? {
            return Ok(false);
        }
        let held = Held::by(&self.store())?;
        Ok(held.data || held.journal)
    }
}

/// What a store has.
struct Held {
    journal: bool,
    /// Files with data.
    data: bool,
}

impl Held {
    fn by(store: &Path) -> io::Result<Held> {
        let mut held = Held { journal: store.join("journal").try_exists()?, data: false };
        for entry in fs::read_dir(store)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() && fs::read_dir(entry.path())?.next().is_some() {
                held.data = true;
            }
        }
        Ok(held)
    }
}
