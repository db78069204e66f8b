//! The time that the schedule goes by: it passes as the machine's own clock does, whatever somebody sets the wall clock to.
//!
//! The schedule keeps points in time over restarts of the daemon, so it counts milliseconds since 1970 ([`Time`]). Read from
//! the wall clock, a clock that is set forward by hours would end all tasks at once, and one that is set back would keep
//! them for hours more. So the wall clock is read once, when a journal begins. From then on the time is the kernel's clock
//! since boot (CLOCK_BOOTTIME, which nobody sets, and which counts while the machine sleeps) and a shift that the journal
//! keeps. Another boot has a clock of its own: only then the wall clock is asked how long the machine was down, by how far
//! it was behind or ahead before; and the time never goes back behind what the journal has noted.
//!
//! The two may differ, then. What is told to people, and what the workload manager says, is by the wall clock: [`shown`]
//! and [`of_wall_clock`] translate at the edge. A point that was noted while the wall clock was wrong is shown rightly as
//! soon as the clock is right.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ondeck_core::schedule::Time;

/// How often it is looked whether somebody has set the wall clock.
const INTERVAL: Duration = Duration::from_secs(10);

/// A wall clock that was set by less than this needs no word.
const SET_BY_MS: i64 = 2000;

/// What the journal keeps of the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptClock {
    /// Which boot of which machine; nothing if that could not be told.
    pub boot: Option<i64>,
    /// The schedule's time less the time since that boot, in milliseconds.
    pub shift_ms: i64,
    /// How far the schedule's time was ahead of the wall clock.
    pub ahead_ms: i64,
}

/// What the machine's clocks say.
#[derive(Clone, Copy, Debug)]
struct Reading {
    boot: Option<i64>,
    since_boot_ms: i64,
    wall_ms: i64,
}

/// The wall clock, with which the time of a new journal begins.
pub(crate) fn wall_clock() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    Time(since.map_or(0, |since| since.as_millis() as u64))
}

impl Reading {
    fn now() -> Reading {
        let since_boot_ms = ondeck_api::host::since_boot_ms() as i64;
        // A wall clock before 1970 is one of 1970.
        let wall_ms = wall_clock().0 as i64;
        Reading { boot: *BOOT.get_or_init(boot), since_boot_ms, wall_ms }
    }
}

static BOOT: OnceLock<Option<i64>> = OnceLock::new();
static CLOCK: OnceLock<Clock> = OnceLock::new();
/// How far the schedule's time is ahead of the wall clock as it was last looked at: the same for all of an answer.
static AHEAD_MS: AtomicI64 = AtomicI64::new(0);

/// Which boot this is: as much of the kernel's random number for it as an integer of SQLite holds.
fn boot() -> Option<i64> {
    let path = "/proc/sys/kernel/random/boot_id";
    let read = std::fs::read_to_string(path).and_then(|text| {
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).take(15).collect();
        i64::from_str_radix(&digits, 16).map_err(std::io::Error::other)
    });
    // It is taken for another boot than any that is known: the wall clock is asked.
    read.inspect_err(|error| tracing::warn!(%error, path, "can't tell whether the machine was started anew"))
        .ok()
}

/// The time since boot, and what makes the schedule's time of it.
#[derive(Clone, Copy, Debug)]
struct Clock {
    shift_ms: i64,
}

impl Clock {
    /// Goes on from what a journal has kept, and not before the last time that it has noted.
    fn go_on(kept: Option<KeptClock>, last: Time, now: Reading) -> Clock {
        let shift_ms = match kept {
            Some(kept) if kept.boot.is_some() && kept.boot == now.boot => kept.shift_ms,
            Some(kept) => now.wall_ms.saturating_add(kept.ahead_ms) - now.since_boot_ms,
            None => now.wall_ms - now.since_boot_ms,
        };
        let last = i64::try_from(last.0).unwrap_or(i64::MAX);
        Clock { shift_ms: shift_ms.max(last - now.since_boot_ms) }
    }

    fn time(self, now: Reading) -> Time {
        Time(u64::try_from(now.since_boot_ms.saturating_add(self.shift_ms)).unwrap_or(0))
    }

    fn ahead_ms(self, now: Reading) -> i64 {
        now.since_boot_ms + self.shift_ms - now.wall_ms
    }
}

fn clock() -> Clock {
    // Without a journal, in tests, it begins with the wall clock.
    *CLOCK.get_or_init(|| Clock::go_on(None, Time(0), Reading::now()))
}

/// Begins to count, once in the life of a daemon.
pub(crate) fn begin(kept: Option<KeptClock>, last: Time) -> KeptClock {
    let now = Reading::now();
    let clock = *CLOCK.get_or_init(|| Clock::go_on(kept, last, now));
    let ahead_ms = clock.ahead_ms(now);
    if ahead_ms.abs() >= SET_BY_MS {
        AHEAD_MS.store(ahead_ms, Ordering::Relaxed);
        tracing::info!(ahead_ms, "the wall clock was set since the journal began; limits do not go by it");
    }
    KeptClock { boot: now.boot, shift_ms: clock.shift_ms, ahead_ms }
}

/// The time, for the schedule. It never goes back.
pub(crate) fn now() -> Time {
    clock().time(Reading::now())
}

/// Milliseconds since 1970 by the wall clock, as it goes now (within [`SET_BY_MS`]), of a point in the schedule's time.
pub(crate) fn shown(time: Time) -> u64 {
    time.0.saturating_add_signed(AHEAD_MS.load(Ordering::Relaxed).saturating_neg())
}

/// The schedule's time of a second since 1970 by the wall clock, as it goes now.
pub(crate) fn of_wall_clock(seconds: u64) -> u64 {
    seconds.saturating_add_signed(AHEAD_MS.load(Ordering::Relaxed) / 1000)
}

/// Notes how far the wall clock is off whenever somebody has set it, for the next boot, and tells of it. `keep` writes to
/// the journal.
pub(crate) async fn watch<E: std::fmt::Display + Send + 'static>(
    mut kept: KeptClock,
    keep: impl Fn(KeptClock) -> Result<(), E> + Send + Sync + 'static,
) {
    let keep = Arc::new(keep);
    loop {
        tokio::time::sleep(INTERVAL).await;
        let ahead_ms = clock().ahead_ms(Reading::now());
        let set_by_ms = kept.ahead_ms - ahead_ms;
        if set_by_ms.abs() < SET_BY_MS {
            continue;
        }
        tracing::warn!(
            set_by_ms,
            "somebody set the wall clock; limits and deadlines go by the time that passes"
        );
        AHEAD_MS.store(ahead_ms, Ordering::Relaxed);
        let (keep, now) = (Arc::clone(&keep), KeptClock { ahead_ms, ..kept });
        let noted = tokio::task::spawn_blocking(move || keep(now)).await;
        match noted {
            Ok(Ok(())) => kept = now,
            // The next look tries again.
            Ok(Err(error)) => tracing::error!(%error, "how far the wall clock is off can't be kept"),
            Err(error) => tracing::error!(%error, "how far the wall clock is off can't be kept"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const HOUR: i64 = 3_600_000;
    const WALL: i64 = 1_795_000_000_000;

    fn reading(boot: i64, since_boot_ms: i64, wall_ms: i64) -> Reading {
        Reading { boot: Some(boot), since_boot_ms, wall_ms }
    }

    fn kept(clock: Clock, now: Reading) -> KeptClock {
        KeptClock { boot: now.boot, shift_ms: clock.shift_ms, ahead_ms: clock.ahead_ms(now) }
    }

    #[test]
    fn a_wall_clock_that_is_set_by_hours_changes_no_time() {
        let begin = reading(1, 1000, WALL);
        let clock = Clock::go_on(None, Time(0), begin);
        assert_eq!(clock.time(begin), Time(WALL as u64));
        for set_by in [-30 * HOUR, -1, 0, 5 * HOUR] {
            let later = reading(1, 61_000, WALL + 60_000 + set_by);
            assert_eq!(clock.time(later), Time(WALL as u64 + 60_000));
            // A daemon that is started anew in the same boot counts on.
            let next = Clock::go_on(Some(kept(clock, begin)), clock.time(begin), later);
            assert_eq!(next.time(later), clock.time(later));
            // What is shown is right by the clock as it is now.
            let noted_ms = clock.time(begin).0 as i64 - next.ahead_ms(later);
            assert_eq!(noted_ms, WALL + set_by);
        }
    }

    #[test]
    fn another_boot_asks_the_wall_clock_how_long_the_machine_was_down_and_never_goes_back() {
        let begin = reading(1, 1000, WALL);
        let clock = Clock::go_on(None, Time(0), begin);
        // Set back by three hours, then down for one.
        let set = reading(1, 10_000, WALL + 9_000 - 3 * HOUR);
        let next = reading(2, 5_000, set.wall_ms + HOUR);
        let after = Clock::go_on(Some(kept(clock, set)), clock.time(set), next);
        assert_eq!(after.time(next).since(clock.time(set)), Duration::from_secs(3600));
        // A clock that has lost its battery.
        let reset = reading(3, 5_000, 0);
        let after = Clock::go_on(Some(kept(clock, begin)), Time(WALL as u64 + 77), reset);
        assert_eq!(after.time(reset), Time(WALL as u64 + 77));
        let later = reading(3, 6_000, WALL + HOUR);
        assert_eq!(after.time(later), Time(WALL as u64 + 1077));
        // A former version's journal, whose clock was ahead.
        let former = Clock::go_on(None, Time((WALL + 2 * HOUR) as u64), begin);
        assert_eq!(former.time(begin), Time((WALL + 2 * HOUR) as u64));
    }

    #[test]
    fn a_boot_that_can_not_be_told_is_another_one() {
        let begin = Reading { boot: None, ..reading(0, 1000, WALL) };
        let clock = Clock::go_on(None, Time(0), begin);
        let later = Reading { boot: None, ..reading(0, 500, WALL + 10_000) };
        let next = Clock::go_on(Some(kept(clock, begin)), clock.time(begin), later);
        assert_eq!(next.time(later), Time(WALL as u64 + 10_000));
    }
}
