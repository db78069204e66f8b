//! Taking mounts away that may hang, be in use, or be moved about by whoever owns a directory above them.

use std::path::Path;
use std::time::{Duration, Instant};

use ondeck_core::Owner;
use ondeck_ramdisk::mounts::TakenAway;
use ondeck_ramdisk::{EngineError, mounts};

use crate::hang::{as_root_or_owner, within};

/// How long an orderly unmount may take before it is forced.
pub(crate) const ORDERLY: Duration = Duration::from_millis(1500);

/// How often a mount is looked for again if its path led elsewhere: somebody may be renaming directories above it.
const LOOKS: usize = 50;

pub(crate) fn all_mounts() -> Result<Vec<mounts::Mount>, EngineError> {
    mounts::mounted().map_err(|error| EngineError::io("read", Path::new("/proc/self/mountinfo"), error))
}

/// Unmounts one mount: in order if it can be, else lazily, whoever still uses it.
pub(crate) fn take_away(mount: &mounts::Mount, owner: Owner) -> Result<(), EngineError> {
    let is_it = |other: &&mounts::Mount| other.id == mount.id && other.device == mount.device;
    let mut orderly = true;
    for _ in 0..LOOKS {
        let all = all_mounts()?;
        let Some(now) = all.iter().find(is_it) else { return Ok(()) };
        // Nobody walks into what a user has mounted on the way: whoever serves it may never answer.
        if let Some(above) = mounts::seen_at(&all, &now.at).filter(|above| above.id != now.id) {
            return Err(EngineError::Refused(format!(
                "something else is mounted over {}, at {}; unmount that first",
                now.at.display(),
                above.at.display()
            )));
        }
        if orderly {
            let one = now.clone();
            let unmounted = within(Instant::now() + ORDERLY, "unmounting", move || {
                as_root_or_owner(owner, || mounts::take_away(&one, false))
                    .map_err(|error| EngineError::io("unmount", &one.at, error))
            });
            match unmounted {
                Ok(TakenAway::Yes) => return Ok(()),
                // By then it is busy no more, or it is taken away all the same.
                Ok(TakenAway::Busy) | Err(_) => orderly = false,
                Ok(TakenAway::Elsewhere) => {}
            }
        } else {
            let one = now.clone();
            let taken = within(Instant::now() + ORDERLY, "unmounting", move || {
                as_root_or_owner(owner, || mounts::take_away(&one, true))
                    .map_err(|error| EngineError::io("unmount", &one.at, error))
            });
            if taken? == TakenAway::Yes {
                return Ok(());
            }
        }
    }
    Err(EngineError::Refused(format!(
        "{} is still mounted: its path changes all the time",
        mount.at.display()
    )))
}
