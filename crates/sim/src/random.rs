//! Random numbers that are the same on every machine, in every order of work: each is drawn for a purpose, a seed and a job.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};

/// What numbers are drawn for. The same seed gives other numbers for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// How much a job reads and writes.
    Io,
    /// How long a job might run, if its log does not say so.
    Estimates,
}

/// The numbers for one job; those of others do not change them.
pub fn of_job(purpose: Purpose, seed: u64, job: u64) -> Xoshiro256PlusPlus {
    let purpose = match purpose {
        Purpose::Io => 0x494f,
        Purpose::Estimates => 0x4553_5449,
    };
    let mixed = SplitMix64::seed_from_u64(seed).next_u64()
        ^ SplitMix64::seed_from_u64(job).next_u64().rotate_left(17);
    Xoshiro256PlusPlus::seed_from_u64(mixed ^ purpose)
}

/// A number from 0 to less than 1.
pub fn unit(random: &mut impl Rng) -> f64 {
    (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_depend_on_purpose_seed_and_job_and_on_nothing_else() {
        let first = |purpose, seed, job| of_job(purpose, seed, job).next_u64();
        assert_eq!(first(Purpose::Io, 1, 7), first(Purpose::Io, 1, 7));
        let mut seen = std::collections::BTreeSet::new();
        for job in 0..100 {
            for seed in 0..10 {
                seen.insert(first(Purpose::Io, seed, job));
                seen.insert(first(Purpose::Estimates, seed, job));
            }
        }
        assert_eq!(seen.len(), 2000);
        // The value of a seed is part of every report: no version of a library may change it.
        assert_eq!(first(Purpose::Io, 1, 7), FIRST);
    }

    const FIRST: u64 = 8_728_353_659_219_945_281;
}
