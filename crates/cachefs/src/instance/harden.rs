//! What the server of a cache is protected from. It holds data that nobody else has.

use std::fs;
use std::io;

use ondeck_ramdisk::memory::free_ram;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Killed for want of memory after everything else but the agents: the RAM that it fills is given back by writing back,
/// which it alone can do.
const OOM_SCORE: &str = "-900";

/// So many files of the backing directory and of the store may be open.
const OPEN_FILES: u64 = 1 << 20;

/// Limits that are those of whoever mounts the cache, and would end its server, by a signal: what it is called.
const LIMITS: [(Resource, &str); 2] =
    [(Resource::Fsize, "of file sizes (`ulimit -Hf`)"), (Resource::Cpu, "of processor time (`ulimit -Ht`)")];

/// Whether this process may raise its limits.
fn may_raise() -> bool {
    let sets = rustix::thread::capabilities(None);
    sets.is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::SYS_RESOURCE))
}

/// A limit that a server which is started here would have, and which can't be raised.
pub fn limit_that_stays() -> Option<&'static str> {
    let stays = |(resource, _): &&(Resource, &str)| getrlimit(*resource).maximum.is_some();
    LIMITS.iter().find(stays).filter(|_| !may_raise()).map(|(_, name)| *name)
}

/// Has no limit of whoever mounts the cache end it.
fn lift_limits() {
    for (resource, name) in LIMITS {
        let now = getrlimit(resource);
        let maximum = if may_raise() { None } else { now.maximum };
        if let Err(error) = setrlimit(resource, Rlimit { current: maximum, maximum }) {
            tracing::warn!(%error, "the limit {name} stays");
        }
    }
}

/// Has all threads allocate from a few arenas. Names are made by one thread and forgotten by another: with an arena each, what is free
/// in one would be of no use to the others. To be called before there is any thread.
pub fn share_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it changes a number of the allocator's. If it is refused, nothing has changed.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
    }
}

/// Protects the calling process, before it has any thread. Returns what whoever mounts the cache has to know of that.
pub fn harden() -> Option<String> {
    rustix::process::umask(rustix::fs::Mode::empty());
    // Each of these may be refused in a container; then the kernel's own choice stands.
    if let Err(error) = fs::write("/proc/self/oom_score_adj", OOM_SCORE) {
        tracing::warn!(%error, "may be killed for want of memory as others are");
    }
    lift_limits();
    if let Err(error) = open_files() {
        tracing::warn!(%error, "few files can be open at a time");
    }
    // What it allocates while it writes back must not wait for pages that only writing back frees. Threads inherit this.
    let refused = rustix::process::configure_io_flusher_behavior(true).err()?;
    tracing::warn!(%refused, "may wait for memory that its own write-back frees");
    is_in_a_memory_group().then(|| {
        "it may hang together with programs of the same memory group that write through maps, once the group is full: that it writes \
         for them can't be told to the kernel without CAP_SYS_RESOURCE"
            .to_owned()
    })
}

/// Takes back what whoever mounts the cache has chosen for programs of their own (nice(1), taskset(1), chrt(1), ionice(1)): all who
/// use the cache wait for it. To be called before there is any thread.
pub fn forget_the_shell() {
    let warn = |what: &str, error: io::Error| tracing::warn!(%error, "the {what} of whoever mounts it stays");
    // SAFETY: calls with numbers, and with structures that live until they have returned.
    unsafe {
        let parameters: libc::sched_param = std::mem::zeroed();
        if libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const parameters) != 0 {
            warn("scheduling policy", io::Error::last_os_error());
        }
        if libc::setpriority(libc::PRIO_PROCESS, 0, 0) != 0 {
            warn("nice value", io::Error::last_os_error());
        }
        // All that there are; the kernel leaves out what the machine or its control group has not.
        let all = [u8::MAX; 8 * size_of::<libc::cpu_set_t>()];
        if libc::sched_setaffinity(0, all.len(), all.as_ptr().cast()) != 0 {
            warn("CPU affinity", io::Error::last_os_error());
        }
        // IOPRIO_WHO_PROCESS, and the class IOPRIO_CLASS_NONE: as the nice value says.
        if libc::syscall(libc::SYS_ioprio_set, 1, 0, 0) != 0 {
            warn("I/O priority", io::Error::last_os_error());
        }
    }
}

/// Whether a memory group of version 1 limits it. In one of version 2, or without a limit, nobody waits for such pages.
fn is_in_a_memory_group() -> bool {
    // Where that can't be seen, it may.
    free_ram()
        .map_or(true, |free| free.cgroup.is_some_and(|(_, group)| group.starts_with("/sys/fs/cgroup/memory")))
}

fn open_files() -> io::Result<()> {
    let now = getrlimit(Resource::Nofile);
    let most = fs::read_to_string("/proc/sys/fs/nr_open")?.trim().parse().unwrap_or(OPEN_FILES);
    let wanted = OPEN_FILES.min(most).max(now.current.unwrap_or(u64::MAX));
    let maximum = now.maximum.map(|maximum| maximum.max(wanted));
    Ok(setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum })?)
}

/// The signals by which the machine, or its administrator, asks a daemon to end.
#[derive(Clone, Copy)]
pub struct EndSignals(libc::sigset_t);

impl EndSignals {
    /// Blocks them in the calling thread and all that it starts later.
    pub fn block() -> EndSignals {
        // SAFETY: the set is initialised by the first call, and lives until the last has returned.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
                libc::sigaddset(&raw mut set, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            EndSignals(set)
        }
    }

    /// Waits for one of them. That of a terminal which is gone is none.
    pub fn wait(&self) -> libc::c_int {
        loop {
            let mut signal = 0;
            // SAFETY: both live until the call has returned.
            unsafe { libc::sigwait(&raw const self.0, &raw mut signal) };
            if signal != libc::SIGHUP && signal != 0 {
                return signal;
            }
        }
    }
}
