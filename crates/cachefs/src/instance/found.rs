//! What an earlier server has left of a cache.

use std::fs;
use std::io;
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
    let record = instance.record().map_err(look)?;
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

/// That nothing can be done with a store.
fn unknown(plan: &Plan, instance: &Instance, why: &str) -> StartError {
    let (at, store) = (plan.mount_point.display(), instance.store());
    StartError::Refused(format!(
        "an earlier cache at {at} has left a store, {}, that may hold data that nobody else has, and {why}. Put back what is \
         missing, or give the data up by `ondeck cache unmount --force-lose {at}`",
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
