//! What a person or a program sees while something is copied.

use std::ffi::OsStr;
use std::io::IsTerminal;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ondeck_core::Bytes;
use ondeck_core::text::plain;
use ondeck_transfer::Progress;

/// A bar appears only if a copy takes longer than this: short ones would only flicker.
const PATIENCE: Duration = Duration::from_millis(400);
const REFRESH: Duration = Duration::from_millis(100);

/// A file's name on a line of its own: what a terminal would obey, and breaks of lines, are taken out.
pub fn name(name: &OsStr) -> String {
    plain(&name.to_string_lossy(), usize::MAX)
}

/// A text of several lines, in each of which what a terminal would obey is taken out.
pub fn lines(text: &str) -> String {
    let lines: Vec<String> = text.lines().map(|line| plain(line, usize::MAX)).collect();
    lines.join("\n")
}

/// Draws the progress of a copy on standard error until it is told to end.
pub struct Watch {
    ended: Mutex<bool>,
    wake: Condvar,
}

impl Watch {
    /// Nothing is drawn until [`Watch::draw`] is called.
    pub fn new() -> Self {
        Watch { ended: Mutex::new(false), wake: Condvar::new() }
    }

    /// Whether anyone would see a bar.
    pub fn is_useful() -> bool {
        std::io::stderr().is_terminal()
    }

    /// Ends [`Watch::draw`], which removes its bar.
    pub fn end(&self) {
        *self.ended.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = true;
        self.wake.notify_all();
    }

    /// Draws until [`Watch::end`]. `total` is the number of bytes if it is known beforehand.
    pub fn draw(&self, what: &'static str, progress: &Progress, total: Option<u64>) {
        let began = Instant::now();
        let mut bar: Option<ProgressBar> = None;
        let mut ended = self.ended.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        while !*ended {
            let (guard, _) =
                self.wake.wait_timeout(ended, REFRESH).unwrap_or_else(|poisoned| poisoned.into_inner());
            ended = guard;
            if began.elapsed() >= PATIENCE && !*ended {
                update(bar.get_or_insert_with(|| new_bar(what)), progress, total);
            }
        }
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
    }
}

/// A bar on standard error.
pub fn new_bar(what: impl Into<std::borrow::Cow<'static, str>>) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    // The template is a constant; if it were wrong, a plain bar would do.
    let style = ProgressStyle::with_template(
        "{prefix:>10} [{bar:30}] {bytes}/{total_bytes}  {msg}  {binary_bytes_per_sec}  {eta} left",
    );
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
    bar.set_prefix(what);
    bar
}

fn update(bar: &ProgressBar, progress: &Progress, total: Option<u64>) {
    let done = progress.bytes_so_far();
    let found = progress.bytes_found.load(Relaxed);
    bar.set_length(total.unwrap_or(found).max(done));
    bar.set_position(done);
    bar.set_message(format!(
        "{}/{} files",
        progress.entries_done.load(Relaxed),
        progress.entries_found.load(Relaxed)
    ));
}

/// `1 file`, `2 files`.
pub fn count(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// A rate for people, or nothing if the time was too short to tell.
pub fn rate(bytes: u64, time: Duration) -> String {
    if time < Duration::from_millis(1) {
        return String::new();
    }
    format!(", {}/s", Bytes((bytes as f64 / time.as_secs_f64()) as u64))
}
