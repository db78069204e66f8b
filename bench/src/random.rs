//! Reproducible pseudo-random numbers and bytes (SplitMix64).
//!
//! The data must be incompressible, because zeros would let a filesystem or a tool cheat, and the
//! same on every machine, because figures are compared across machines. Nothing here needs to be
//! unpredictable, so the smallest generator that passes the usual tests is enough, and it fills
//! memory at several gigabytes per second.

/// SplitMix64 (Steele, Lea, Flood 2014): a counter and a mixing function.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The same seed gives the same numbers on every machine.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `low..=high`. The bias of the plain remainder is far below what the shapes of
    /// the test data could show.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.number() % (high - low + 1)
    }

    /// One of the choices, each as likely as the others.
    pub fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.number() as usize % choices.len()]
    }

    /// Fills a buffer with the next bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        let mut words = bytes.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&self.number().to_le_bytes());
        }
        let rest = words.into_remainder();
        let last = self.number().to_le_bytes();
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_bytes_at_any_length() {
        let mut long = [0; 64];
        let mut short = [0; 13];
        Random::new(7).fill(&mut long);
        Random::new(7).fill(&mut short);
        assert_eq!(long[..8], short[..8]);
        assert_eq!(long[8..13], short[8..]);
    }

    #[test]
    fn between_reaches_both_ends() {
        let mut random = Random::new(1);
        let drawn: Vec<u64> = (0..200).map(|_| random.between(3, 5)).collect();
        assert!(drawn.iter().all(|n| (3..=5).contains(n)));
        assert!(drawn.contains(&3) && drawn.contains(&5));
    }
}
