//! Which blocks of an extent something holds for.

use serde::{Deserialize, Serialize};

use crate::settings::EXTENT;

/// Bytes of a block: a page, the least that the store gives and takes.
pub const BLOCK: u64 = 4096;

/// Blocks of an extent.
pub const BLOCKS: u16 = (EXTENT / BLOCK) as u16;

/// A set of blocks of one extent. Most are none, all, or the first few.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Blocks {
    /// The first so many.
    First(u16),
    /// Any.
    Some(Box<[u64; 4]>),
}

impl Default for Blocks {
    fn default() -> Blocks {
        Blocks::First(0)
    }
}

impl PartialEq for Blocks {
    fn eq(&self, other: &Blocks) -> bool {
        self.bits() == other.bits()
    }
}

impl Blocks {
    fn bits(&self) -> [u64; 4] {
        match self {
            Blocks::Some(bits) => **bits,
            Blocks::First(count) => {
                let mut bits = [0; 4];
                for (word, bits) in bits.iter_mut().enumerate() {
                    let below = usize::from(*count).saturating_sub(word * 64).min(64);
                    *bits = if below == 64 { u64::MAX } else { (1 << below) - 1 };
                }
                bits
            }
        }
    }

    fn of(bits: [u64; 4]) -> Blocks {
        let count: u32 = bits.iter().map(|word| word.count_ones()).sum();
        let first: u32 = {
            let full = bits.iter().take_while(|word| **word == u64::MAX).count();
            full as u32 * 64 + bits.get(full).map_or(0, |word| word.trailing_ones())
        };
        if first == count { Blocks::First(count as u16) } else { Blocks::Some(Box::new(bits)) }
    }

    /// The blocks `begin..end`.
    pub fn range(begin: u16, end: u16) -> Blocks {
        Blocks::First(end).without(&Blocks::First(begin))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        matches!(self, Blocks::First(0))
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        match self {
            Blocks::First(count) => u64::from(*count),
            Blocks::Some(bits) => bits.iter().map(|word| u64::from(word.count_ones())).sum(),
        }
    }

    /// Those of both.
    pub fn with(&self, other: &Blocks) -> Blocks {
        if let (Blocks::First(a), Blocks::First(b)) = (self, other) {
            return Blocks::First(*a.max(b));
        }
        let (a, b) = (self.bits(), other.bits());
        Blocks::of(std::array::from_fn(|word| a[word] | b[word]))
    }

    /// Those that are not in the other.
    pub fn without(&self, other: &Blocks) -> Blocks {
        if let (Blocks::First(a), Blocks::First(b)) = (self, other)
            && (a <= b || *b == 0)
        {
            return if a <= b { Blocks::First(0) } else { self.clone() };
        }
        let (a, b) = (self.bits(), other.bits());
        Blocks::of(std::array::from_fn(|word| a[word] & !b[word]))
    }

    /// Those that are in both.
    pub fn within(&self, other: &Blocks) -> Blocks {
        if let (Blocks::First(a), Blocks::First(b)) = (self, other) {
            return Blocks::First(*a.min(b));
        }
        let (a, b) = (self.bits(), other.bits());
        Blocks::of(std::array::from_fn(|word| a[word] & b[word]))
    }

    /// Whether all of the other are in it.
    pub fn covers(&self, other: &Blocks) -> bool {
        other.without(self).is_empty()
    }

    /// Adds the other.
    pub fn add(&mut self, other: &Blocks) {
        *self = self.with(other);
    }

    /// Takes the other away.
    pub fn take(&mut self, other: &Blocks) {
        *self = self.without(other);
    }

    /// The runs of blocks that follow each other, as `begin..end`.
    pub fn runs(&self) -> Vec<(u16, u16)> {
        let bits = match self {
            Blocks::First(0) => return Vec::new(),
            Blocks::First(count) => return vec![(0, *count)],
            Blocks::Some(bits) => bits,
        };
        let is_set = |block: u16| bits[usize::from(block / 64)] >> (block % 64) & 1 == 1;
        let mut found = Vec::new();
        let mut begin = None;
        for block in 0..BLOCKS {
            match (begin, is_set(block)) {
                (None, true) => begin = Some(block),
                (Some(first), false) => {
                    found.push((first, block));
                    begin = None;
                }
                _ => {}
            }
        }
        if let Some(first) = begin {
            found.push((first, BLOCKS));
        }
        found
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use proptest::prelude::*;

    fn set(blocks: &Blocks) -> BTreeSet<u16> {
        blocks.runs().into_iter().flat_map(|(begin, end)| begin..end).collect()
    }

    proptest! {
        #[test]
        fn they_are_sets(steps in proptest::collection::vec((0..3u8, 0..=BLOCKS, 0..=BLOCKS), 0..12)) {
            let (mut blocks, mut model) = (Blocks::default(), BTreeSet::new());
            for (what, a, b) in steps {
                let (begin, end) = (a.min(b), a.max(b));
                let range = Blocks::range(begin, end);
                let of: BTreeSet<u16> = (begin..end).collect();
                prop_assert_eq!(set(&range), of.clone());
                prop_assert_eq!(blocks.covers(&range), model.is_superset(&of));
                match what {
                    0 => { blocks.add(&range); model.extend(&of); }
                    1 => { blocks.take(&range); model = &model - &of; }
                    _ => { blocks = blocks.within(&range); model = &model & &of; }
                }
                prop_assert_eq!(set(&blocks), model.clone());
                prop_assert_eq!(blocks.count(), model.len() as u64);
                prop_assert_eq!(blocks.is_empty(), model.is_empty());
            }
        }
    }
}
