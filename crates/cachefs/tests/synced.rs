//! What is synced is on the backing directory when fsync(2) has returned, and it returns.

#![allow(clippy::unwrap_used)]

mod client;

use std::fs;

use client::Cache;
use ondeck_cachefs::message::Request;
use ondeck_cachefs::settings::{LEAST_CAPACITY, Settings, SyncWhen};

#[test]
fn a_file_is_synced_whatever_others_have_done_since_it_was_made() {
    let cache = Cache::new(Settings { sync: SyncWhen::Fsync, idle: true, ..Settings::new(LEAST_CAPACITY) });
    cache.create("first", 0o644).unwrap();
    cache.write("first", 0, b"first").unwrap();
    cache.make_directory("d", 0o755).unwrap();
    cache.create("d/second", 0o644).unwrap();
    let open = cache.open("first").unwrap();
    cache.ask(Request::Sync { ino: open.ino, data_only: false }).unwrap();
    assert_eq!(fs::read(cache.backing().join("first")).unwrap(), b"first");
    cache.close(open);
}
