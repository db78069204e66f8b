//! The processor that requests are served on.
//!
//! A request about a name takes a few microseconds of computing. Waking a processor that sleeps takes longer, on a virtual
//! machine tens of microseconds: the kernel gives a request to a worker on one that is idle, and the answer wakes the program's
//! again. But whoever asks waits for the answer, so its own processor is free. While all requests come from one processor, the
//! workers stay on it; while they come from several, or from nowhere, the workers may run anywhere.
//!
//! The kernel does not tell a server where a request comes from, so a thread looks where those who ask are. It is one by
//! itself, because it may have to wait: who reads of a process in the middle of `execve` where that is waits for the `execve`,
//! which may be waiting for a worker. While it waits, the workers stay where they are, which costs time and nothing else.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_setaffinity};

/// How often it is looked while there are requests.
const LOOK: Duration = Duration::from_millis(2);

/// And while there are none.
const QUIET_LOOK: Duration = Duration::from_millis(20);

/// So many looks without a request are quiet.
const QUIET: u32 = 50;

/// So many looks in a row have to agree before the workers stay on a processor.
const LOOKS_THAT_AGREE: usize = 4;

/// What the workers of a mount tell.
#[derive(Debug, Default)]
pub struct Processors {
    /// The thread that has asked last since the last look; 0 if none has.
    asking: AtomicU32,
    workers: Mutex<Vec<Pid>>,
}

thread_local! {
    static IS_KNOWN: Cell<bool> = const { Cell::new(false) };
}

impl Processors {
    /// To be called by a worker for each request, with the thread that waits for the answer; 0 if none does.
    pub fn note(&self, thread: u32) {
        if !IS_KNOWN.replace(true) {
            self.workers.lock().unwrap_or_else(PoisonError::into_inner).push(gettid());
        }
        if thread != 0 {
            self.asking.store(thread, Ordering::Relaxed);
        }
    }

    /// Has the workers be where requests come from, as long as there are any.
    ///
    /// # Errors
    /// There are no more threads.
    pub fn follow(self: &Arc<Processors>) -> io::Result<()> {
        let processors = Arc::downgrade(self);
        std::thread::Builder::new().name("processor".to_owned()).spawn(move || follow(&processors)).map(drop)
    }

    fn stay_on(&self, set: &CpuSet) {
        for worker in &*self.workers.lock().unwrap_or_else(PoisonError::into_inner) {
            // Where it runs makes no difference but to the time.
            let _is_there = sched_setaffinity(Some(*worker), set);
        }
    }
}

fn follow(processors: &Weak<Processors>) {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let mut looks = Looks::default();
    let mut stay_on = None;
    let mut quiet = 0;
    loop {
        let Some(now) = processors.upgrade() else { return };
        match now.asking.swap(0, Ordering::Relaxed) {
            0 => quiet += 1,
            thread => {
                quiet = 0;
                looks.add(processor_of(thread));
            }
        }
        if quiet == QUIET {
            looks = Looks::default();
        }
        let wanted = looks.agreed().filter(|one| *one < CpuSet::MAX_CPU && allowed.is_set(*one));
        if wanted != stay_on {
            now.stay_on(&wanted.map_or(allowed, only));
            stay_on = wanted;
        }
        drop(now);
        std::thread::sleep(if quiet < QUIET { LOOK } else { QUIET_LOOK });
    }
}

fn only(processor: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(processor);
    set
}

/// The processors that the last looks have found; `None` where nothing was told.
#[derive(Default)]
struct Looks([Option<usize>; LOOKS_THAT_AGREE]);

impl Looks {
    fn add(&mut self, processor: Option<usize>) {
        self.0.rotate_left(1);
        self.0[LOOKS_THAT_AGREE - 1] = processor;
    }

    fn agreed(&self) -> Option<usize> {
        self.0[0].filter(|_| self.0.iter().all(|look| *look == self.0[0]))
    }
}

/// The processor that a thread has run on last.
fn processor_of(thread: u32) -> Option<usize> {
    let stat = std::fs::read(format!("/proc/{thread}/stat")).ok()?;
    last_processor(&stat)
}

/// The field `processor` of proc_pid_stat(5), the 39th. The second, a name in parentheses, may have any bytes.
fn last_processor(stat: &[u8]) -> Option<usize> {
    const BEHIND_THE_NAME: usize = 39 - 3;
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = str::from_utf8(&stat[name_end + 1..]).ok()?;
    rest.split_ascii_whitespace().nth(BEHIND_THE_NAME)?.parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn the_kernel_tells_where_a_thread_runs() {
        let allowed = sched_getaffinity(None).unwrap();
        let thread = gettid().as_raw_nonzero().get() as u32;
        for processor in (0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor)) {
            sched_setaffinity(None, &only(processor)).unwrap();
            assert_eq!(processor_of(thread), Some(processor));
        }
        sched_setaffinity(None, &allowed).unwrap();
        let strange = b"7 (a) 1 )\xff) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 63 0";
        assert_eq!(last_processor(strange), Some(63));
    }

    #[test]
    fn looks_agree_only_if_all_found_one_processor() {
        let mut looks = Looks::default();
        for _ in 0..LOOKS_THAT_AGREE {
            assert_eq!(looks.agreed(), None);
            looks.add(Some(0));
        }
        assert_eq!(looks.agreed(), Some(0));
        looks.add(None);
        assert_eq!(looks.agreed(), None);
    }

    #[test]
    fn workers_go_where_all_requests_come_from_and_may_leave_when_there_are_none() {
        let allowed = sched_getaffinity(None).unwrap();
        let processors = Arc::new(Processors::default());
        processors.follow().unwrap();
        let asks_from = (0..CpuSet::MAX_CPU).rfind(|processor| allowed.is_set(*processor)).unwrap();
        let waits_for = |wanted: CpuSet, note: bool| {
            let asking = Arc::clone(&processors);
            // The worker, which hears of the thread that asks, and that thread.
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    sched_setaffinity(None, &only(asks_from)).unwrap();
                    let asks = gettid().as_raw_nonzero().get() as u32;
                    let deadline = Instant::now() + Duration::from_secs(30);
                    let is_there = || {
                        let workers = asking.workers.lock().unwrap();
                        workers.iter().all(|worker| sched_getaffinity(Some(*worker)).unwrap() == wanted)
                    };
                    while !is_there() {
                        assert!(Instant::now() < deadline, "the worker does not follow");
                        if note {
                            asking.asking.store(asks, Ordering::Relaxed);
                        }
                        std::thread::sleep(Duration::from_millis(1));
                    }
                });
            });
        };
        processors.note(0);
        waits_for(only(asks_from), true);
        waits_for(allowed, false);
    }
}
