//! Running the program, and what goes on beside it.

use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use ondeck_core::Bytes;
use ondeck_core::fit::in_mib;
use ondeck_ramdisk::namespace::Namespaces;
use ondeck_staging::merge_back::Mechanism;
use ondeck_transfer::Progress;

use super::Keeper;
use crate::run::copy_out::Ticker;
use crate::run::deadline::{Deadline, measure_rate};
use crate::run::message::{Message, RunOrder};
use crate::run::program::{self, GRACE};
use crate::run::switch::Switch;
use crate::run::watchers::TICK;

impl Keeper {
    /// Runs the program to its end, with everything that goes on beside it. Returns the exit code.
    pub(super) fn run_program(&mut self, namespaces: &Namespaces) -> u8 {
        self.watchers.phase("program", None);
        self.watchers.state("the program runs");
        let began = Instant::now();
        let child = program::start(namespaces, &self.shared.command, self.shared.surroundings);
        let code = match child {
            Err(error) => {
                let name = Path::new(&self.shared.command[0]).display().to_string();
                self.watchers.warning(&format!("can't run {name}: {error}"));
                let code = program::start_failure(&self.shared.command[0], &error);
                self.watchers.send(&Message::ProgramEnded { exit_code: code });
                code
            }
            Ok(child) => {
                self.watchers.send(&Message::ProgramStarted { pid: child.id() });
                // The program's input and output are its own from now on: a reader of its pipe must not wait for us.
                let _ = program::redirect(0..=1);
                self.attend(namespaces, child.id())
            }
        };
        self.program_ended(namespaces, code, began);
        code
    }

    pub(super) fn attend(&mut self, namespaces: &Namespaces, pid: u32) -> u8 {
        let status = self.accompany(namespaces, pid);
        self.report.program.signal = status.signal();
        program::exit_code(status)
    }

    /// After the program: ends what it has left behind.
    pub(super) fn program_ended(&mut self, namespaces: &Namespaces, code: u8, began: Instant) {
        self.report.program.exit_code = code;
        self.report.program.seconds = began.elapsed().as_secs_f64();
        self.report.phase("program", began.elapsed(), 0, 0);
        if let Err(error) = self.keep_code(Some(code)) {
            self.watchers.warning(&format!("{error:#}"));
        }
        let left = program::end_left_behind(GRACE, &self.shared.spared());
        self.report.program.left_behind = left;
        if left > 0 {
            let processes = crate::display::count(left, "process").replace("processs", "processes");
            self.note(format!(
                "the program left {processes} behind, which {} ended",
                if left == 1 { "was" } else { "were" }
            ));
        }
        self.look_at_use(namespaces);
    }

    /// Waits for the program; copies out, switches, watches the RAM disk and the batch job's limit meanwhile.
    fn accompany(&mut self, namespaces: &Namespaces, pid: u32) -> std::process::ExitStatus {
        let ticker = Ticker::default();
        let interim = Progress::new();
        let mut switch = Switch::new(&self.shared.plan);
        let mut deadline = Deadline::new(&self.shared.margin);
        let mut peak = 0;
        let mut full = false;
        let mut switched_outputs = Vec::new();
        let shared = &self.shared;
        let watchers = &mut self.watchers;
        let (tell, told) = std::sync::mpsc::channel::<String>();
        let mut interim_notes = Vec::new();
        let status = std::thread::scope(|scope| {
            if let Some(interval) = shared.plan.copy_out_interval {
                let (ticker, interim, tell) = (&ticker, &interim, tell.clone());
                scope.spawn(move || shared.copy_out_regularly(interval, ticker, interim, &tell));
            }
            if !shared.plan.caches.is_empty() {
                let ticker = &ticker;
                scope.spawn(move || shared.watch_caches(ticker, &tell));
            }
            if deadline.is_set() {
                scope.spawn(|| measure_rate(shared));
            }
            let handle = program::open_pid(pid);
            let status = loop {
                if watchers.wait(handle.as_ref().map(|fd| fd.as_fd()), TICK, &mut |order| {
                    if let RunOrder::Signal { number } = order {
                        program::send_signal(pid, number);
                    }
                }) || handle.is_none()
                {
                    // Without a descriptor (Linux before 5.3) the pid is asked at every tick.
                    // Told before it is collected: whoever takes over finds the one or the other.
                    if let Some(status) = program::ended(pid) {
                        let exit_code = program::exit_code(status);
                        watchers.send(&Message::ProgramEnded { exit_code });
                        let _ = program::reap(pid, false);
                        break status;
                    }
                }
                program::reap_orphans(pid as i32);
                for text in told.try_iter() {
                    watchers.warning(&text);
                    interim_notes.push(text);
                }
                if let Ok(usage) = rustix::fs::fstatvfs(&namespaces.ram_disk) {
                    peak = peak.max((usage.f_blocks - usage.f_bfree) * usage.f_frsize);
                    full |= usage.f_bfree * usage.f_frsize < 64 << 10;
                }
                if let Some(outcome) = switch.advance(shared, namespaces) {
                    match outcome {
                        Ok(directories) => switched_outputs = directories,
                        Err(why) => watchers.warning(&why),
                    }
                }
                if let Some(reason) = deadline.check(shared, peak) {
                    watchers.warning(&reason);
                    program::send_signal(pid, if deadline.forced() { libc::SIGKILL } else { libc::SIGTERM });
                }
            };
            interim.cancel.store(true, Relaxed);
            ticker.stop();
            status
        });
        self.report.notes.extend(interim_notes);
        for (index, mechanism) in switched_outputs {
            let path = self.shared.plan.directories[index].path.to_string_lossy().into_owned();
            self.watchers.note(&format!(
                "{path}: from now on the program's output went to RAM (the switch after the delay)"
            ));
            for directory in &mut self.report.directories {
                if directory.path == path {
                    directory.mechanism = Mechanism::word(mechanism);
                }
            }
        }
        if let Some(ram_disk) = &mut self.report.ram_disk {
            ram_disk.peak_used = ram_disk.peak_used.max(peak);
            ram_disk.full |= full;
        }
        status
    }

    /// Was the RAM disk too small? Then say what probably did not fit, and what would.
    fn look_at_use(&mut self, namespaces: &Namespaces) {
        let Ok(usage) = rustix::fs::fstatvfs(&namespaces.ram_disk) else { return };
        let used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize;
        let left = usage.f_bfree * usage.f_frsize;
        let Some(ram_disk) = &mut self.report.ram_disk else { return };
        ram_disk.peak_used = ram_disk.peak_used.max(used);
        ram_disk.full |= left < 64 << 10;
        if !ram_disk.full {
            return;
        }
        let (size, free) = (Bytes(ram_disk.size), self.shared.plan.free);
        let latest = self.shared.latest_files();
        let remedy = if size.0.saturating_mul(2) <= free.0 {
            format!("run it again with --size {} or more", in_mib(Bytes(size.0 * 2)))
        } else {
            format!("this machine has {free} of RAM free in all; write part of the output elsewhere")
        };
        let files = if latest.is_empty() {
            String::new()
        } else {
            format!("; written last, and so probably incomplete: {}", latest.join(", "))
        };
        self.watchers.warning(&format!(
            "the RAM disk of {size} was full, so the program will have met \"No space left on device\"{files}; what it wrote \
             is saved; {remedy}"
        ));
    }
}
