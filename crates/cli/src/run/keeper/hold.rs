//! Holding results that can't be brought home, until somebody says what to do.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ondeck_core::exit;
use ondeck_ramdisk::namespace::Namespaces;

use super::Keeper;
use crate::run::message::{Message, RunOrder};
use crate::run::program::{self, GRACE};
use crate::run::shared::lock;

/// What `--list` says of results that are held.
const HOLDING: &str = "holds results that are not on disk; `ondeck run --resume` stages them out";

impl Keeper {
    /// Waits with the results in RAM until someone says what to do.
    pub(super) fn hold(&mut self, namespaces: &Namespaces, why: &str) -> RunOrder {
        let id = &self.shared.id;
        let pid = std::process::id();
        let reach: Vec<String> = lock(&self.shared.outputs)
            .iter()
            .filter(|output| !output.home.load(Relaxed))
            .map(|output| format!("/proc/{pid}/fd/{}/{}", namespaces.ram_disk_number(), output.slot))
            .collect();
        let where_to = match reach.as_slice() {
            // A cache goes on trying by itself.
            [] => String::new(),
            reach => format!(" and can be read at {}", reach.join(" and ")),
        };
        let text = format!(
            "THE RESULTS ARE NOT ALL ON DISK.\n{why}\nThey are held in RAM{where_to}. Make room or mend the target, then \
             run:\n  ondeck run --resume {id}\nor give them up with: ondeck run --abandon {id}"
        );
        self.report.exit_code = exit::RESULTS_NOT_STAGED;
        self.report.results_on_disk = false;
        self.write_report();
        self.watchers.state(HOLDING);
        let held = Message::Held { exit_code: exit::RESULTS_NOT_STAGED, text };
        self.watchers.send(&held);
        // Nobody who reads our output must wait for as long as this takes.
        let _ = program::redirect(0..=2);
        self.guard(namespaces, &held);
        let mut answer = None;
        while answer.is_none() {
            self.watchers.wait(None, Duration::from_secs(3600), &mut |order| {
                if matches!(order, RunOrder::Resume | RunOrder::Abandon) {
                    answer = Some(order);
                }
            });
        }
        answer.unwrap_or(RunOrder::Resume)
    }

    /// Goes on in a child of this process, which does nothing more but to start another one if that is killed: nobody else
    /// is left who has the results, and they may be held for long.
    fn guard(&mut self, namespaces: &Namespaces, held: &Message) {
        if std::mem::replace(&mut self.guarded, true) {
            return;
        }
        let mut again = false;
        loop {
            // SAFETY: the keeper has one thread between its phases, so the child is a complete copy of it.
            match unsafe { libc::fork() } {
                // Without a guard, as if it had been killed.
                -1 => return,
                0 => {
                    // SAFETY: plain values. The child adopts what it starts, as its parent did.
                    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
                    if again {
                        // Whoever has asked for another try must not wait for its end.
                        self.watchers.state(HOLDING);
                        self.watchers.send(held);
                    }
                    return;
                }
                child => {
                    let status = program::reap(child as u32, true);
                    if let Some(code) = status.and_then(|status| status.code()) {
                        // SAFETY: it has done and removed everything.
                        unsafe { libc::_exit(code) }
                    }
                    // A script of the user's, of a stage-out that was tried again.
                    program::end_left_behind(GRACE, &self.shared.spared());
                    self.inherit(namespaces);
                    again = true;
                }
            }
        }
    }
}
