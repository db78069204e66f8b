//! The jobs that wait, in their order, so that the next one that fits is found without looking at all of them.
//!
//! The order is known before the simulation begins, so each job has a place in it from the start. A tree over the places has of
//! every part of the queue the least number of nodes and the least time that anybody in it asks for.

/// What somebody who waits asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Nodes.
    pub nodes: u32,
    /// For how long, in milliseconds.
    pub ms: u64,
}

/// Nobody: nothing is as much as this.
const NOBODY: Asked = Asked { nodes: u32::MAX, ms: u64::MAX };

/// What fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// The nodes that are free now.
    pub free: u32,
    /// So many of them are not needed by whoever is first when it starts: who has these may run for ever.
    pub spare: u32,
    /// For so long all of them are free.
    pub ms: u64,
}

impl Room {
    /// Whether somebody who asks for this may start now.
    pub fn fits(self, asked: Asked) -> bool {
        asked.nodes <= self.free && (asked.nodes <= self.spare || asked.ms <= self.ms)
    }
}

/// The jobs that wait.
#[derive(Clone, Debug)]
pub struct Waiting {
    /// A power of two; the leaves begin here.
    leaves: usize,
    /// From 1, the root; those under `at` are `2 * at` and `2 * at + 1`.
    tree: Vec<Asked>,
}

impl Waiting {
    /// Nobody, with so many places.
    pub fn new(places: usize) -> Waiting {
        let leaves = places.max(1).next_power_of_two();
        Waiting { leaves, tree: vec![NOBODY; 2 * leaves] }
    }

    /// Somebody waits at a place.
    pub fn insert(&mut self, place: usize, asked: Asked) {
        self.set(place, asked);
    }

    /// Nobody waits at a place any more.
    pub fn remove(&mut self, place: usize) {
        self.set(place, NOBODY);
    }

    /// What is asked for at a place, if anybody waits there.
    pub fn at(&self, place: usize) -> Option<Asked> {
        Some(self.tree[self.leaves + place]).filter(|asked| *asked != NOBODY)
    }

    /// The first at a place or after it.
    pub fn first_from(&self, place: usize) -> Option<usize> {
        self.first_that_fits(place, Room { free: u32::MAX - 1, spare: u32::MAX - 1, ms: 0 })
    }

    /// The first at a place or after it for whom there is room.
    pub fn first_that_fits(&self, place: usize, room: Room) -> Option<usize> {
        if place >= self.leaves {
            return None;
        }
        let mut at = self.leaves + place;
        loop {
            // A subtree may seem to fit because of the nodes of one and the time of another: then it is left without a find.
            if room.fits(self.tree[at]) {
                if at >= self.leaves {
                    return Some(at - self.leaves);
                }
                at *= 2;
                continue;
            }
            // Up while it is a right one, then to the right.
            while at % 2 == 1 {
                at /= 2;
                if at <= 1 {
                    return None;
                }
            }
            at += 1;
        }
    }

    fn set(&mut self, place: usize, asked: Asked) {
        let mut at = self.leaves + place;
        self.tree[at] = asked;
        while at > 1 {
            at /= 2;
            let (left, right) = (self.tree[2 * at], self.tree[2 * at + 1]);
            let both = Asked { nodes: left.nodes.min(right.nodes), ms: left.ms.min(right.ms) };
            if self.tree[at] == both {
                break;
            }
            self.tree[at] = both;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn the_first_that_fits_is_found_as_by_looking_at_everybody(
            changes in proptest::collection::vec((0usize..40, proptest::option::of((1u32..9, 1u64..9))), 0..80),
            from in 0usize..45, free in 0u32..9, spare in 0u32..9, ms in 0u64..9,
        ) {
            let mut waiting = Waiting::new(40);
            let mut plain: Vec<Option<Asked>> = vec![None; 40];
            for (place, asked) in changes {
                plain[place] = asked.map(|(nodes, ms)| Asked { nodes, ms });
                match plain[place] {
                    Some(asked) => waiting.insert(place, asked),
                    None => waiting.remove(place),
                }
            }
            let room = Room { free, spare, ms };
            let fits = |place: &usize| plain[*place].is_some_and(|asked| room.fits(asked));
            let expected = (from..40).find(fits);
            proptest::prop_assert_eq!(waiting.first_that_fits(from, room), expected);
            proptest::prop_assert_eq!(waiting.first_from(from), (from..40).find(|place| plain[*place].is_some()));
            proptest::prop_assert_eq!((0..40).filter(|place| waiting.at(*place).is_some()).count(), plain.iter().flatten().count());
            proptest::prop_assert!((0..40).all(|place| waiting.at(place) == plain[place]));
        }
    }
}
