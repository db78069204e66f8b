//! The disk filesystem: one bandwidth, shared by everything that reads and writes.
//!
//! A [`Transfer`] is bytes that some nodes read or write together. Bandwidth is shared max-min fair among nodes: every node has
//! the same, but for those whose transfers can't use so much (their own links bound them), and what these leave is for the others.
//! Reading and writing have one bandwidth together.
//!
//! Rates change only when a transfer begins or ends, so all is exact in between; the end of a transfer is rounded up to the next
//! millisecond, in which the filesystem is idle for it.

use ondeck_core::Bytes;
use ondeck_core::schedule::Time;

/// A transfer, by a number that is not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Transfer(u64);

#[derive(Clone, Debug)]
struct Flow<T> {
    transfer: Transfer,
    of: T,
    /// Bytes that are left.
    left: f64,
    /// How many nodes take part.
    nodes: f64,
    /// What one of them can do at most, in bytes a second.
    link: f64,
    /// What all of them do now, in bytes a second.
    rate: f64,
}

/// The disk filesystem, with what is being read and written; `T` says what a transfer is for.
#[derive(Clone, Debug)]
pub struct Disk<T> {
    /// Bytes a second that are there for the transfers.
    bandwidth: f64,
    /// By what one node can do, the least first; of equals the earlier first.
    flows: Vec<Flow<T>>,
    now: Time,
    next: u64,
    /// When the next transfer ends, if nothing changes.
    ends: Option<Time>,
    /// Bytes that were read and written until `now`.
    moved: f64,
    /// The time with any transfer, in milliseconds.
    busy_ms: u64,
    /// When anything was moved last.
    last_used: Time,
}

impl<T: Copy> Disk<T> {
    /// A filesystem with nothing to do, of so many bytes a second.
    pub fn new(bandwidth: f64) -> Disk<T> {
        Disk {
            bandwidth: bandwidth.max(1.0),
            flows: Vec::new(),
            now: Time(0),
            next: 0,
            ends: None,
            moved: 0.0,
            busy_ms: 0,
            last_used: Time(0),
        }
    }

    /// When the next transfer ends, if none begins before.
    pub fn next_end(&self) -> Option<Time> {
        self.ends
    }

    /// Bytes that were moved, and the milliseconds in which any were.
    pub fn use_so_far(&self) -> (f64, u64) {
        (self.moved, self.busy_ms)
    }

    /// When anything was moved last.
    pub fn last_used(&self) -> Time {
        self.last_used
    }

    /// Some nodes begin to read or write, each with at most so many bytes a second.
    pub fn begin(&mut self, now: Time, of: T, bytes: Bytes, nodes: u32, link: f64) -> Transfer {
        self.pass(now);
        let transfer = Transfer(self.next);
        self.next += 1;
        let link = link.max(1.0);
        let place = self.flows.partition_point(|flow| flow.link <= link);
        let nodes = f64::from(nodes.max(1));
        self.flows.insert(place, Flow { transfer, of, left: bytes.0 as f64, nodes, link, rate: 0.0 });
        self.share();
        transfer
    }

    /// Ends a transfer before its time. Returns the bytes that were not moved; none if it has ended.
    pub fn stop(&mut self, now: Time, transfer: Transfer) -> Option<Bytes> {
        self.pass(now);
        let place = self.flows.iter().position(|flow| flow.transfer == transfer)?;
        let flow = self.flows.remove(place);
        self.share();
        Some(Bytes(flow.left.max(0.0) as u64))
    }

    /// Takes out what has ended by now, in the order of their beginnings.
    pub fn take_ended(&mut self, now: Time) -> Vec<(Transfer, T)> {
        if self.ends.is_none_or(|ends| ends > now) {
            return Vec::new();
        }
        self.pass(now);
        let mut ended: Vec<(Transfer, T)> = self
            .flows
            .iter()
            .filter(|flow| flow.left <= LEAST)
            .map(|flow| (flow.transfer, flow.of))
            .collect();
        ended.sort_unstable_by_key(|(transfer, _)| *transfer);
        self.flows.retain(|flow| flow.left > LEAST);
        self.share();
        ended
    }

    /// The bytes a second that all transfers have together, and how many there are.
    pub fn load(&self) -> (f64, usize) {
        (self.flows.iter().map(|flow| flow.rate).sum(), self.flows.len())
    }

    fn pass(&mut self, now: Time) {
        let passed = now.0.saturating_sub(self.now.0);
        if passed == 0 {
            return;
        }
        self.now = now;
        if self.flows.is_empty() {
            return;
        }
        self.busy_ms += passed;
        self.last_used = now;
        let seconds = passed as f64 / 1000.0;
        for flow in &mut self.flows {
            let bytes = (flow.rate * seconds).min(flow.left);
            flow.left -= bytes;
            self.moved += bytes;
        }
    }

    /// Gives everybody a rate, and says when the first one ends.
    fn share(&mut self) {
        let (mut bandwidth, mut nodes) = (self.bandwidth, 0.0);
        for flow in &self.flows {
            nodes += flow.nodes;
        }
        let mut first = f64::INFINITY;
        // Those who can use the least come first: what they leave is for those after them.
        for flow in &mut self.flows {
            let each = (bandwidth / nodes).min(flow.link);
            flow.rate = each * flow.nodes;
            bandwidth -= flow.rate;
            nodes -= flow.nodes;
            first = first.min((flow.left - LEAST).max(0.0) / flow.rate);
        }
        self.ends =
            first.is_finite().then(|| Time(self.now.0.saturating_add((first * 1000.0).ceil() as u64)));
    }
}

/// Of a transfer of which no more is left, nothing is left: parts of a byte come from rounding.
const LEAST: f64 = 0.5;

#[cfg(test)]
mod tests {
    use super::*;

    const MB: f64 = 1e6;

    fn bytes(megabytes: u64) -> Bytes {
        Bytes(megabytes * 1_000_000)
    }

    #[test]
    fn one_alone_has_all_that_its_links_can_take() {
        let mut disk = Disk::new(100.0 * MB);
        disk.begin(Time(0), 'a', bytes(1000), 4, 50.0 * MB);
        assert_eq!(disk.next_end(), Some(Time(10_000)));
        assert_eq!(disk.take_ended(Time(9_999)), []);
        let ended: Vec<char> = disk.take_ended(Time(10_000)).into_iter().map(|(_, of)| of).collect();
        assert_eq!(ended, ['a']);
        disk.begin(Time(10_000), 'b', bytes(1000), 1, 50.0 * MB);
        assert_eq!(disk.next_end(), Some(Time(30_000)));
    }

    #[test]
    fn what_a_slow_one_leaves_is_for_the_others_by_their_nodes() {
        let mut disk = Disk::new(100.0 * MB);
        disk.begin(Time(0), 's', bytes(10), 1, 10.0 * MB);
        disk.begin(Time(0), 'a', bytes(300), 1, 1000.0 * MB);
        disk.begin(Time(0), 'b', bytes(300), 2, 1000.0 * MB);
        // 10, then 90 by nodes: 30 and 60.
        assert_eq!(disk.next_end(), Some(Time(1000)));
        assert_eq!(disk.load(), (100.0 * MB, 3));
        assert_eq!(disk.take_ended(Time(1000)).len(), 1);
        // 270 and 240 are left; 100 is shared as 33.3 and 66.7: b needs 3.6 s more.
        assert_eq!(disk.next_end(), Some(Time(4600)));
        assert_eq!(disk.take_ended(Time(4600)).len(), 1);
        // a has 150 left, alone.
        assert_eq!(disk.next_end(), Some(Time(6100)));
    }

    #[test]
    fn who_is_stopped_leaves_what_was_not_moved() {
        let mut disk = Disk::new(100.0 * MB);
        let transfer = disk.begin(Time(0), 'a', bytes(1000), 1, 1000.0 * MB);
        assert_eq!(disk.stop(Time(4000), transfer), Some(bytes(600)));
        assert_eq!(disk.stop(Time(4000), transfer), None);
        assert_eq!((disk.next_end(), disk.use_so_far()), (None, (400.0 * MB, 4000)));
    }

    #[test]
    fn nothing_to_move_ends_at_once() {
        let mut disk = Disk::new(MB);
        disk.begin(Time(5), 'a', Bytes(0), 1, MB);
        assert_eq!(disk.next_end(), Some(Time(5)));
        assert_eq!(disk.take_ended(Time(5)).len(), 1);
    }

    proptest::proptest! {
        #[test]
        fn all_bytes_are_moved_once_and_never_more_than_the_bandwidth(
            begins in proptest::collection::vec((0u64..20_000, 0u64..500, 1u32..64, 1u64..200), 1..40),
        ) {
            let mut disk = Disk::new(100.0 * MB);
            let mut begins = begins;
            begins.sort_unstable();
            let all: u64 = begins.iter().map(|(_, megabytes, ..)| megabytes * 1_000_000).sum();
            let (mut ended, count) = (0, begins.len());
            let mut begins = begins.into_iter().peekable();
            let mut last = Time(0);
            while ended < count {
                let begin = begins.peek().map(|(at, ..)| Time(*at));
                let now = match (begin, disk.next_end()) {
                    (Some(begin), Some(end)) => begin.min(end),
                    (begin, end) => begin.or(end).unwrap_or(last),
                };
                proptest::prop_assert!(now >= last);
                last = now;
                ended += disk.take_ended(now).len();
                while let Some((_, megabytes, nodes, link)) = begins.next_if(|(at, ..)| Time(*at) <= now) {
                    disk.begin(now, (), bytes(megabytes), nodes, link as f64 * MB);
                }
                let (rate, flows) = disk.load();
                proptest::prop_assert!(rate <= 100.0 * MB * (1.0 + 1e-9));
                // Nobody waits for nothing: all of the bandwidth is used, or every link.
                let links: f64 = disk.flows.iter().map(|flow| flow.nodes * flow.link).sum();
                proptest::prop_assert!(flows == 0 || rate >= links.min(100.0 * MB) * (1.0 - 1e-9));
            }
            let (moved, busy_ms) = disk.use_so_far();
            proptest::prop_assert!((moved - all as f64).abs() <= count as f64, "{moved} of {all}");
            proptest::prop_assert!(moved <= 100.0 * MB * busy_ms as f64 / 1000.0 + 1.0);
        }
    }
}
