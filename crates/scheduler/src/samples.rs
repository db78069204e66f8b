//! What tests begin with.

use ondeck_core::{Incarnation, Owner, QueuedJob, Standing};

/// A job of one node that is next in the queue.
pub(crate) fn queued(id: Incarnation) -> QueuedJob {
    QueuedJob {
        id,
        owner: Owner { uid: 1000, gid: 1000 },
        account: String::new(),
        standing: Standing::Next,
        reason: String::new(),
        node_count: 1,
        nodes: Vec::new(),
        start: None,
        submitted: 0,
        priority: 1,
        qos: String::new(),
        held_for_input: false,
        dependent: false,
        depends_on: Vec::new(),
        component_of: None,
        several: false,
        has_burst_buffer: false,
        waits_for_results: false,
        burst_buffer_lost: false,
    }
}
