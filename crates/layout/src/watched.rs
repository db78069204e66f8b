//! Who wrote a run's files, as nodes have seen that watched them being opened and closed.
//!
//! A node says of a sample of files by how many processes each was written that lived at the same time ([`KindSeen`]). [`join`] adds
//! up what several nodes say; [`crate::classify`] takes it before names, counts and times.
//!
//! Processes that live at the same time count, and not those that write at the same instant: ranks of a parallel program may write
//! one after the other, and wait for each other. What a script starts one after the other is one process at a time.

use serde::{Deserialize, Serialize};

/// What a node has seen of a sample of a kind's files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindSeen {
    /// By how many processes that lived at the same time each of them was written there; 0 if none was seen, and nothing if
    /// that can't be told.
    pub writers: Vec<Option<u32>>,
    /// How many processes that lived at the same time have written any of them there.
    pub at_once: u32,
}

/// What was seen of a kind's files by all nodes that watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchedKind {
    /// How many nodes watched.
    pub nodes: u32,
    /// Of how many files they were asked.
    pub files: u32,
    /// How many of those were written by one process at a time.
    pub one: u32,
    /// How many by several.
    pub several: u32,
    /// By how many: of the file in the middle of those that several wrote.
    pub writers: u32,
    /// How many processes that lived at the same time have written any of the kind's files, on all of these nodes.
    pub at_once: u32,
}

/// What all nodes together have seen of a kind, whose sample has so many files.
///
/// ```
/// use ondeck_layout::watched::{KindSeen, join};
/// // A file of each of two processes, a node each.
/// let first = KindSeen { writers: vec![Some(1), Some(0)], at_once: 1 };
/// let second = KindSeen { writers: vec![Some(0), Some(1)], at_once: 1 };
/// let joined = join(2, &[first, second]);
/// assert_eq!((joined.one, joined.several, joined.at_once), (2, 0, 2));
/// ```
pub fn join(files: usize, nodes: &[KindSeen]) -> WatchedKind {
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let of_file = |file: usize| -> Option<u32> {
        // What one node can't tell of a file, all of them can't. One that has not answered for it has not seen it.
        nodes.iter().try_fold(0u32, |sum, node| match node.writers.get(file) {
            Some(Some(writers)) => Some(sum.saturating_add(*writers)),
            Some(None) => None,
            None => Some(sum),
        })
    };
    let told: Vec<u32> = (0..files).filter_map(of_file).collect();
    let mut several: Vec<u32> = told.iter().copied().filter(|writers| *writers > 1).collect();
    several.sort_unstable();
    WatchedKind {
        nodes: number(nodes.len()),
        files: number(files),
        one: number(told.iter().filter(|writers| **writers == 1).count()),
        several: number(several.len()),
        writers: several.get(several.len() / 2).copied().unwrap_or(0),
        at_once: nodes.iter().fold(0, |sum, node| sum.saturating_add(node.at_once)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nodes_have_seen_is_added_up_file_by_file() {
        let seen = |writers: &[Option<u32>], at_once| KindSeen { writers: writers.to_vec(), at_once };
        let nodes = [
            seen(&[Some(8), Some(1), Some(0), None, Some(1)], 8),
            seen(&[Some(7), Some(0), Some(0), Some(3), Some(1)], 7),
        ];
        let joined = join(5, &nodes);
        assert_eq!(
            joined,
            WatchedKind { nodes: 2, files: 5, one: 1, several: 2, writers: 15, at_once: 15 },
            "15 and 2 processes, one, none, and one of which it can't be told"
        );
        assert_eq!(join(3, &[]), WatchedKind { files: 3, ..WatchedKind::default() });
        assert_eq!(join(2, &[seen(&[Some(1)], 1)]).one, 1);
    }
}
