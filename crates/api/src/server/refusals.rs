//! How much of a user's refused requests the log has.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::lock;

/// In each such time the log has so many of the refused requests of a user, and how many more there were.
const REFUSALS_PER: Duration = Duration::from_secs(60);
pub(super) const MOST_REFUSALS: u32 = 20;

/// Who was refused of late, and how often: nobody shall fill the disk that the log is on.
#[derive(Clone, Default)]
pub(super) struct Refusals {
    users: Arc<Mutex<HashMap<u32, RefusalCount>>>,
}

#[derive(Default)]
struct RefusalCount {
    told: u32,
    more: u64,
}

impl Refusals {
    /// Whether the log is to have another refused request of a user. Root's are all told.
    pub(super) fn is_to_be_told(&self, uid: u32) -> bool {
        if uid == 0 {
            return true;
        }
        let mut users = lock(&self.users);
        let refused = users.entry(uid).or_insert_with(|| {
            let this = self.clone();
            tokio::spawn(async move {
                tokio::time::sleep(REFUSALS_PER).await;
                this.begin_anew(uid);
            });
            RefusalCount::default()
        });
        let is_told = refused.told < MOST_REFUSALS;
        if is_told {
            refused.told += 1
        } else {
            refused.more += 1
        }
        is_told
    }

    pub(super) fn begin_anew(&self, uid: u32) {
        if let Some(RefusalCount { more: more @ 1.., .. }) = lock(&self.users).remove(&uid) {
            tracing::info!(uid, more, "more requests of a user were refused");
        }
    }
}
