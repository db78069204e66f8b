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
    /// What was seen of each of them.
    pub files: Vec<FileSeen>,
    /// How many processes that lived at the same time have written any of them there.
    pub at_once: u32,
}

/// What a node has seen of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSeen {
    /// By how many processes that lived at the same time it was written there, at least; 0 if none was seen.
    pub writers: u32,
    /// Whether it were no more.
    pub is_exact: bool,
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
    /// Of how many it can't be told which of both.
    pub unclear: u32,
    /// By how many at least: of the file in the middle of those that several wrote.
    pub writers: u32,
    /// Whether these were no more.
    pub is_exact: bool,
    /// How many processes that lived at the same time have written any of the kind's files, on all of these nodes.
    pub at_once: u32,
}

/// What all nodes together have seen of a kind, whose sample has so many files.
///
/// ```
/// use ondeck_layout::watched::{FileSeen, KindSeen, join};
/// // A file of each of two processes, a node each.
/// let [one, none] = [1, 0].map(|writers| FileSeen { writers, is_exact: true });
/// let first = KindSeen { files: vec![one, none], at_once: 1 };
/// let second = KindSeen { files: vec![none, one], at_once: 1 };
/// let joined = join(2, &[first, second]);
/// assert_eq!((joined.one, joined.several, joined.at_once), (2, 0, 2));
/// ```
pub fn join(files: usize, nodes: &[KindSeen]) -> WatchedKind {
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let of_file = |file: usize| {
        // A node that has not answered for it has not seen it.
        let seen = || nodes.iter().filter_map(|node| node.files.get(file));
        FileSeen {
            writers: seen().fold(0, |sum, seen| sum.saturating_add(seen.writers)),
            is_exact: seen().all(|seen| seen.is_exact),
        }
    };
    let seen: Vec<FileSeen> = (0..files).map(of_file).collect();
    let mut several: Vec<FileSeen> = seen.iter().copied().filter(|seen| seen.writers > 1).collect();
    several.sort_unstable_by_key(|seen| (seen.writers, seen.is_exact));
    let middle = several.get(several.len() / 2);
    WatchedKind {
        nodes: number(nodes.len()),
        files: number(files),
        one: number(seen.iter().filter(|seen| seen.writers == 1 && seen.is_exact).count()),
        several: number(several.len()),
        unclear: number(seen.iter().filter(|seen| seen.writers <= 1 && !seen.is_exact).count()),
        writers: middle.map_or(0, |seen| seen.writers),
        is_exact: middle.is_some_and(|seen| seen.is_exact),
        at_once: nodes.iter().fold(0, |sum, node| sum.saturating_add(node.at_once)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nodes_have_seen_is_added_up_file_by_file() {
        // A number below 0: so many at least.
        let seen = |writers: &[i32], at_once| {
            let file = |writers: &i32| FileSeen { writers: writers.unsigned_abs(), is_exact: *writers >= 0 };
            KindSeen { files: writers.iter().map(file).collect(), at_once }
        };
        let nodes = [seen(&[8, 1, 0, -1, 1, -2], 8), seen(&[7, 0, 0, 0, 1, 3], 7)];
        let joined = join(6, &nodes);
        assert_eq!((joined.nodes, joined.files, joined.at_once), (2, 6, 15));
        assert_eq!((joined.one, joined.several, joined.unclear), (1, 3, 1));
        assert_eq!((joined.writers, joined.is_exact), (5, false), "of 2, 5 and 15");
        assert_eq!(join(3, &[]), WatchedKind { files: 3, ..WatchedKind::default() });
        assert_eq!(join(2, &[seen(&[1], 1)]).one, 1);
    }
}
