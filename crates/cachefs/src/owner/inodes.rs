//! All inodes that are known, by number.
//!
//! They lie in pieces of memory that never move, so that a table of a million grows without being copied, and what is forgotten
//! leaves a place for the next. A hand goes round over the places, as that of a clock: it finds what was not used since it came by
//! last, without a list that every use would have to change.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::inode::Inode;
use crate::message::Ino;

/// Places in a piece of memory.
const PIECE: usize = 256;

/// Memory of an inode in the table, and of its number in the index, which is between half full and full.
pub const INODE_BYTES: u64 = size_of::<Place>() as u64 + 17 * 3 / 2;

type Place = Option<(Ino, Inode)>;

/// A hash of inode numbers, which follow each other.
#[derive(Default)]
pub struct InoHasher(u64);

impl Hasher for InoHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        // The golden ratio: both halves of the product depend on all bits.
        let product = u128::from(self.0 ^ number) * 0x9e37_79b9_7f4a_7c15;
        self.0 = product as u64 ^ (product >> 64) as u64;
    }
}

/// The table.
#[derive(Default)]
pub struct Inodes {
    places: HashMap<Ino, u32, BuildHasherDefault<InoHasher>>,
    pieces: Vec<Vec<Place>>,
    free: Vec<u32>,
    hand: usize,
}

impl Inodes {
    fn place(&self, ino: Ino) -> Option<usize> {
        self.places.get(&ino).map(|place| *place as usize)
    }

    pub fn get(&self, ino: &Ino) -> Option<&Inode> {
        let place = self.place(*ino)?;
        self.pieces[place / PIECE][place % PIECE].as_ref().map(|(_, inode)| inode)
    }

    pub fn get_mut(&mut self, ino: &Ino) -> Option<&mut Inode> {
        let place = self.place(*ino)?;
        self.pieces[place / PIECE][place % PIECE].as_mut().map(|(_, inode)| inode)
    }

    pub fn contains_key(&self, ino: &Ino) -> bool {
        self.places.contains_key(ino)
    }

    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Adds an inode; returns the one that had the number.
    pub fn insert(&mut self, ino: Ino, inode: Inode) -> Option<Inode> {
        if let Some(place) = self.place(ino) {
            return self.pieces[place / PIECE][place % PIECE].replace((ino, inode)).map(|(_, inode)| inode);
        }
        let place = match self.free.pop() {
            Some(place) => {
                self.pieces[place as usize / PIECE][place as usize % PIECE] = Some((ino, inode));
                place
            }
            None => {
                if self.pieces.last().is_none_or(|piece| piece.len() == PIECE) {
                    self.pieces.push(Vec::with_capacity(PIECE));
                }
                let before = (self.pieces.len() - 1) * PIECE;
                let piece = &mut self.pieces[before / PIECE];
                piece.push(Some((ino, inode)));
                (before + piece.len() - 1) as u32
            }
        };
        self.places.insert(ino, place);
        None
    }

    pub fn remove(&mut self, ino: &Ino) -> Option<Inode> {
        let place = self.places.remove(ino)?;
        self.free.push(place);
        self.pieces[place as usize / PIECE][place as usize % PIECE].take().map(|(_, inode)| inode)
    }

    pub fn keys(&self) -> impl Iterator<Item = &Ino> {
        self.places.keys()
    }

    pub fn iter(&self) -> impl Iterator<Item = (Ino, &Inode)> {
        self.pieces.iter().flatten().flatten().map(|(ino, inode)| (*ino, inode))
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (Ino, &mut Inode)> {
        self.pieces.iter_mut().flatten().flatten().map(|(ino, inode)| (*ino, inode))
    }

    /// Places that the hand goes over until it is where it was.
    pub fn round(&self) -> usize {
        self.pieces.len() * PIECE
    }

    /// Moves the hand to the next place; returns what is there.
    pub fn advance(&mut self) -> Option<(Ino, &mut Inode)> {
        self.hand = if self.hand + 1 < self.round() { self.hand + 1 } else { 0 };
        let place = self.pieces.get_mut(self.hand / PIECE)?.get_mut(self.hand % PIECE)?;
        place.as_mut().map(|(ino, inode)| (*ino, inode))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_used_again_and_the_hand_comes_to_all() {
        let mut inodes = Inodes::default();
        for ino in 1..=1000 {
            inodes.insert(ino, Inode::new(libc::S_IFREG, ino));
        }
        for ino in (1..=1000).filter(|ino| ino % 3 == 0) {
            assert_eq!(inodes.remove(&ino).map(|inode| inode.dev), Some(ino));
        }
        let round = inodes.round();
        for ino in 2001..=2333 {
            inodes.insert(ino, Inode::new(libc::S_IFREG, ino));
        }
        assert_eq!((inodes.round(), inodes.len()), (round, 1000));
        let mut met: Vec<Ino> = (0..round).filter_map(|_| inodes.advance().map(|(ino, _)| ino)).collect();
        let mut known: Vec<Ino> = inodes.keys().copied().collect();
        met.sort_unstable();
        known.sort_unstable();
        assert_eq!(met, known);
        assert!(known.iter().all(|ino| inodes.get(ino).is_some_and(|inode| inode.dev == *ino)));
    }

    #[test]
    fn an_inode_takes_no_more_than_it_has_to() {
        assert!(size_of::<Place>() <= 232, "{}", size_of::<Place>());
    }
}
