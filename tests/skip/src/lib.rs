//! Tests that can't run here: they say so, and nobody takes them for passed.
//!
//! The test harness knows no test that skips itself: it shows what a test says only if it fails. So each is written to the
//! file that `ONDECK_SKIPPED` names, which `make test` counts at its end; and under `ONDECK_TESTS=require`, where everything
//! must be there, it fails.

use std::fs::OpenOptions;
use std::io::Write;

/// A file that gets a line for every skipped test.
const SKIPPED: &str = "ONDECK_SKIPPED";
/// `require`: a test that is skipped has failed.
const TESTS: &str = "ONDECK_TESTS";

/// Says that this test, or a part of it, is skipped, and why. The caller returns then.
///
/// # Panics
/// Under `ONDECK_TESTS=require`; and if `ONDECK_SKIPPED` can't be written.
pub fn skipped(why: impl std::fmt::Display) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    assert!(
        std::env::var_os(TESTS).is_none_or(|value| value != "require"),
        "skipped under {TESTS}=require: {why}"
    );
    eprintln!("skipped: {test}: {why}");
    if let Some(file) = std::env::var_os(SKIPPED) {
        OpenOptions::new()
            .append(true)
            .create(true)
            .open(&file)
            .and_then(|mut file| file.write_all(format!("{test}: {why}\n").as_bytes()))
            .unwrap_or_else(|error| panic!("{SKIPPED}={}: {error}", file.display()));
    }
}
