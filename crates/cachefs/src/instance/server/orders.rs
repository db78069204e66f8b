//! What a server is told to do by its user and by root, and what it answers: a line of JSON each.

use std::io::{self, BufReader};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ondeck_core::text::{MESSAGE, plain};
use ondeck_ramdisk::holders::holders;
use ondeck_ramdisk::mounts::{self, Mount, TakenAway};

use super::super::control::{ANOTHER_USERS, Answer, Order, Report, read_line, write_line};
use super::{Attach, Cache, PROGRESS, Phase, lock};
use crate::status::Status;

/// How long a mount may be used by others after it was taken away here, until that is called busy.
const LINGERS: Duration = Duration::from_secs(5);

/// So many orders are carried out at a time; who comes later is told so.
const MOST_ORDERS: usize = 32;

/// So many of these are root's alone.
const ROOTS_ORDERS: usize = 8;

/// So many holders of a busy mount are named.
const MOST_HOLDERS: usize = 5;

impl Cache {
    pub(super) fn listen(self: Arc<Self>, listener: &UnixListener) {
        loop {
            match listener.accept() {
                Ok((stream, _)) => self.admit(stream),
                Err(error) => {
                    tracing::warn!(%error, "an order was not heard");
                    // Too many open files, most likely.
                    std::thread::sleep(PROGRESS);
                }
            }
        }
    }

    fn admit(self: &Arc<Self>, mut stream: UnixStream) {
        let refuse = |stream: &mut UnixStream, message: &str| {
            let _ = write_line(stream, &Answer::Failed { message: message.to_owned(), unwritten: false });
        };
        let most = match rustix::net::sockopt::socket_peercred(&stream) {
            Ok(peer) if peer.uid.is_root() => MOST_ORDERS,
            Ok(peer) if peer.uid.as_raw() == self.uid() => MOST_ORDERS - ROOTS_ORDERS,
            _ => return refuse(&mut stream, ANOTHER_USERS),
        };
        if self.orders.fetch_add(1, Ordering::AcqRel) >= most {
            self.orders.fetch_sub(1, Ordering::AcqRel);
            return refuse(&mut stream, "the cache has too many orders at a time; try again later");
        }
        let cache = Arc::clone(self);
        let thread = std::thread::Builder::new().name("order".to_owned()).spawn(move || {
            let ended = cache.obey(stream);
            cache.orders.fetch_sub(1, Ordering::AcqRel);
            if let Err(error) = ended {
                tracing::debug!(%error, "an order was not answered");
            }
        });
        if thread.is_err() {
            self.orders.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn obey(&self, stream: UnixStream) -> io::Result<()> {
        // Who says nothing must not take a place.
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.set_write_timeout(Some(Duration::from_secs(10)))?;
        let mut answers = stream.try_clone()?;
        let Some(order) = read_line(&mut BufReader::new(stream))? else { return Ok(()) };
        // Whoever has gone does not want it any more.
        let mut tell = |status: &Status| {
            write_line(&mut answers, &Answer::Progress { status: Box::new(status.clone()) }).is_ok()
        };
        let result = |done: Result<(), String>, unwritten| match done {
            Ok(()) => Answer::Done,
            // It names files as whoever made them did.
            Err(message) => Answer::Failed { message: plain(&message, MESSAGE), unwritten },
        };
        let is_write_back = matches!(order, Order::Flush | Order::Unmount { lose: false });
        // Who did not wait until it was heard does not want it any more.
        if is_write_back && !tell(&self.owner.status()) {
            return Ok(());
        }
        if matches!(order, Order::Unmount { .. }) {
            let phase = lock(&self.phase);
            self.was_asked.store(true, Ordering::Release);
            drop(phase);
            self.changed.notify_all();
        }
        let known = match order {
            Order::Flush => self.owner.status().conflicts.len(),
            _ => 0,
        };
        let answer = match order {
            Order::Status => Answer::Report(Box::new(self.report())),
            Order::Flush => match result(self.owner.flush(&mut tell), true) {
                Answer::Failed { .. } if self.is_given_up() => Answer::GivenUp,
                flushed => flushed,
            },
            Order::Preload { path } => result(self.owner.preload(&path, &mut tell), false),
            Order::Evict { path } => result(self.owner.evict(&path), false),
            Order::Unmount { lose: true } => self.lose(),
            Order::Unmount { lose: false } => match self.unmount(true, &mut tell) {
                // Of what was not written back before.
                Answer::Done | Answer::Failed { unwritten: true, .. } if self.is_given_up() => {
                    Answer::GivenUp
                }
                unmounted => unmounted,
            },
        };
        if is_write_back && answer == Answer::Done {
            // With the last that is told: conflicts that the order has found, or of a cache that ends all.
            let mut status = self.owner.status();
            status.conflicts.drain(..known);
            tell(&status);
        }
        write_line(&mut answers, &answer)
    }

    fn report(&self) -> Report {
        Report {
            mount_point: self.mount_now().map_or_else(|| self.plan.mount_point.clone(), |mount| mount.at),
            backing: self.plan.backing.clone(),
            user: self.plan.user.as_ref().map_or_else(|| "root".to_owned(), |user| user.name.clone()),
            others: self.plan.others,
            run: self.plan.run.clone(),
            server: std::process::id(),
            mounted: self.phase() == Phase::Mounted,
            settings: self.settings.clone(),
            status: self.owner.status(),
        }
    }

    /// Writes back, takes the mount away, and waits for the end.
    pub(super) fn unmount(&self, waits: bool, tell: &mut dyn FnMut(&Status) -> bool) -> Answer {
        if let (Phase::Mounted, Some(mount)) = (self.phase(), self.mount_now()) {
            let mount = &mount;
            // While programs still can use it, since this is most of the work.
            if let Err(message) = self.owner.flush(tell) {
                // It names files as whoever made them did.
                return Answer::Failed { message: plain(&message, MESSAGE), unwritten: true };
            }
            let taken_away = match self.plan.attach {
                // That is for those to do who see it.
                Attach::Inside(_) => Ok(TakenAway::Yes),
                Attach::Nowhere | Attach::Here => mounts::take_away(mount, false),
            };
            match taken_away {
                Ok(TakenAway::Yes) => {}
                Ok(TakenAway::Busy) => return self.busy(mount),
                // Somebody has taken it from its place, and who uses it still does.
                Ok(TakenAway::Elsewhere) if !is_mounted(mount) => return self.busy(mount),
                Ok(TakenAway::Elsewhere) => {
                    let message = format!(
                        "{} is covered by another mount, or was renamed: unmount that first",
                        mount.at.display()
                    );
                    return Answer::Failed { message, unwritten: false };
                }
                Err(error) => {
                    let message = format!("can't unmount {}: {error}", mount.at.display());
                    return Answer::Failed { message, unwritten: false };
                }
            }
        }
        if !waits {
            return Answer::Done;
        }
        self.wait_for_end(tell)
    }

    fn wait_for_end(&self, tell: &mut dyn FnMut(&Status) -> bool) -> Answer {
        let began = Instant::now();
        let mut phase = lock(&self.phase);
        if let Phase::Stuck(_) = *phase {
            // It is tried again now.
            *phase = Phase::WritingBack;
            self.changed.notify_all();
        }
        loop {
            match &*phase {
                Phase::Ended => return Answer::Done,
                Phase::Stuck(why) => {
                    return Answer::Failed { message: plain(why, MESSAGE), unwritten: true };
                }
                Phase::Mounted if began.elapsed() >= LINGERS => {
                    drop(phase);
                    let Some(mount) = &self.mount else { return Answer::Done };
                    return self.busy(mount);
                }
                Phase::Mounted | Phase::WritingBack => {}
            }
            phase =
                self.changed.wait_timeout(phase, PROGRESS).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
            if matches!(*phase, Phase::Mounted | Phase::WritingBack) {
                drop(phase);
                if !tell(&self.owner.status()) {
                    let message = "nobody waits for it any more".to_owned();
                    return Answer::Failed { message, unwritten: true };
                }
                phase = lock(&self.phase);
            }
        }
    }

    /// Who uses a mount that can't be taken away.
    fn busy(&self, mount: &Mount) -> Answer {
        let mut message = format!("{} is in use; everything is written back", mount.at.display());
        match holders(mount.device, self.uid(), MOST_HOLDERS, |_| true) {
            Ok(found) if found.is_empty() => {
                message.push_str(": something is mounted in it, or it is used in another mount namespace");
            }
            Ok(found) => {
                for holder in found {
                    // Paths and names of programs are their users' words.
                    message.push_str(&format!("\n  {}", plain(&holder.to_string(), MESSAGE)));
                }
            }
            Err(error) => message.push_str(&format!(", by whom can't be told: {error}")),
        }
        Answer::Failed { message, unwritten: false }
    }

    /// Ends at once.
    fn lose(&self) -> Answer {
        self.given_up.store(true, Ordering::Release);
        tracing::warn!("told to end without writing back");
        {
            let mut phase = lock(&self.phase);
            if let Phase::Stuck(_) = *phase {
                *phase = Phase::WritingBack;
            }
            self.changed.notify_all();
        }
        if self.phase() == Phase::Mounted {
            self.take_away_lazily();
            // Who uses it gets errors from now on, and the kernel lets go of it.
            if let Some(mount) = &self.mount
                && let Err(error) = mounts::abort_fuse(mount.device, &self.scratch())
            {
                tracing::warn!(%error, "programs that use the cache may go on");
            }
        }
        self.wait_for_end(&mut |_| true)
    }
}

/// Whether a mount is where it was mounted, as far as can be told.
fn is_mounted(mount: &Mount) -> bool {
    mounts::mounted().map_or(true, |all| all.iter().any(|found| found.id == mount.id))
}
