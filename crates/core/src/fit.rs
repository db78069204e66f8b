//! Does it fit, and when must it end: the two decisions of a run that depend on nothing but numbers.

use std::time::Duration;

use crate::{Bytes, Rate};

/// RAM that a run leaves to the program and the system when it chooses the size itself: half of what is free,
/// the share that tmpfs itself takes of a machine by default (tmpfs(5)).
const DEFAULT_SHARE: u64 = 2;

/// The sizes that a run must reconcile before anything is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// What the user asked for, if anything.
    pub requested: Option<Bytes>,
    /// What will be staged in, in whole pages.
    pub input: Bytes,
    /// What the output was declared to need.
    pub output: Bytes,
    /// RAM that may be used: the machine's and every memory cgroup's above us, whichever is least.
    pub free: Bytes,
}

/// Why a RAM disk of the asked size can't be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Misfit {
    /// The input (and declared output) is larger than the RAM disk that was asked for.
    #[error(
        "the RAM disk of {size} is too small: the input needs {input}{}; use --size {} or more",
        output_clause(*.output), in_mib(*.needed)
    )]
    InputTooLarge {
        /// The RAM disk's size.
        size: Bytes,
        /// What will be staged in.
        input: Bytes,
        /// What the output was declared to need.
        output: Bytes,
        /// The sum of the two.
        needed: Bytes,
    },
    /// The RAM disk that was asked for is larger than the RAM that is free.
    #[error(
        "a RAM disk of {size} does not fit: {free} of RAM are free here (memory cgroups counted); use --size {} or less, \
         free some memory, or run with --fallback disk",
        in_mib_down(*.free)
    )]
    RamTooSmall {
        /// The RAM disk's size.
        size: Bytes,
        /// RAM that may be used.
        free: Bytes,
    },
    /// What is needed exceeds the RAM that is free, whatever size was asked for.
    #[error(
        "the input {}needs {needed} but {free} of RAM are free here (memory cgroups counted); stage less, free some memory, \
         or run with --fallback disk",
        if *.output == Bytes::ZERO { "" } else { "with the declared output " }
    )]
    NothingFits {
        /// Input and declared output.
        needed: Bytes,
        /// What the output was declared to need.
        output: Bytes,
        /// RAM that may be used.
        free: Bytes,
    },
}

fn output_clause(output: Bytes) -> String {
    if output == Bytes::ZERO { String::new() } else { format!(" and the output {output}") }
}

/// A figure for `--size` that is never rounded below what is needed.
pub fn in_mib(size: Bytes) -> String {
    format!("{}MiB", size.0.div_ceil(1 << 20))
}

fn in_mib_down(size: Bytes) -> String {
    format!("{}MiB", size.0 >> 20)
}

/// The size of the RAM disk of a run.
///
/// Without a request it is half of the free RAM, or what the input and the declared output need if that is more.
///
/// # Errors
/// [`Misfit`], with the figures and the remedy.
pub fn ram_disk_size(sizes: Sizes) -> Result<Bytes, Misfit> {
    let Sizes { requested, input, output, free } = sizes;
    let needed = input.saturating_add(output);
    match requested {
        // No size would help.
        _ if needed > free => Err(Misfit::NothingFits { needed, output, free }),
        Some(size) if size > free => Err(Misfit::RamTooSmall { size, free }),
        Some(size) if size < needed => Err(Misfit::InputTooLarge { size, input, output, needed }),
        Some(size) => Ok(size),
        None => Ok(needed.max(Bytes(free.0 / DEFAULT_SHARE))),
    }
}

/// How long before the end of a batch job its program must be ended so that the results reach the disk.
///
/// The copy takes `bytes / rate`; half as much again covers a filesystem that is slower then than when it was
/// measured, and a fixed half minute covers ending the program, the sync and the workload manager's own grace.
pub fn end_margin(to_write: Bytes, rate: Rate) -> Duration {
    const FIXED: Duration = Duration::from_secs(30);
    let seconds = to_write.0 as f64 / rate.0.0.max(1) as f64 * 1.5;
    FIXED + Duration::from_secs_f64(seconds.min(1e9))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn sizes(requested: Option<u64>, input: u64, output: u64, free: u64) -> Sizes {
        Sizes {
            requested: requested.map(|g| Bytes(g * GIB)),
            input: Bytes(input * GIB),
            output: Bytes(output * GIB),
            free: Bytes(free * GIB),
        }
    }

    #[test]
    fn without_a_request_half_of_the_free_ram_is_taken_or_what_is_needed() {
        assert_eq!(ram_disk_size(sizes(None, 1, 0, 20)), Ok(Bytes(10 * GIB)));
        assert_eq!(ram_disk_size(sizes(None, 12, 3, 20)), Ok(Bytes(15 * GIB)));
    }

    #[test]
    fn a_misfit_names_the_figures_and_the_remedy() {
        let error = ram_disk_size(sizes(Some(2), 3, 1, 20)).unwrap_err().to_string();
        assert!(
            error.contains("needs 3 GiB and the output 1 GiB") && error.contains("--size 4096MiB"),
            "{error}"
        );
        let error = ram_disk_size(sizes(Some(30), 3, 0, 20)).unwrap_err().to_string();
        assert!(error.contains("20 GiB of RAM are free") && error.contains("--size 20480MiB"), "{error}");
        let error = ram_disk_size(sizes(None, 21, 0, 20)).unwrap_err().to_string();
        assert!(error.contains("--fallback disk"), "{error}");
        // No size would help: neither a larger nor a smaller one.
        for requested in [2, 30] {
            let error = ram_disk_size(sizes(Some(requested), 19, 2, 20)).unwrap_err().to_string();
            assert!(
                error.starts_with("the input with the declared output needs 21 GiB but 20 GiB"),
                "{error}"
            );
            assert!(error.contains("stage less") && !error.contains("--size"), "{error}");
        }
    }

    #[test]
    fn everything_fits_exactly_and_not_one_byte_more() {
        assert_eq!(ram_disk_size(sizes(Some(20), 20, 0, 20)), Ok(Bytes(20 * GIB)));
        let over = Sizes { requested: Some(Bytes(20 * GIB + 1)), ..sizes(None, 20, 0, 20) };
        assert!(matches!(ram_disk_size(over), Err(Misfit::RamTooSmall { .. })));
        let input = Sizes { input: Bytes(20 * GIB + 1), ..sizes(None, 0, 0, 20) };
        assert!(matches!(ram_disk_size(input), Err(Misfit::NothingFits { .. })));
    }

    #[test]
    fn the_margin_grows_with_what_is_left_to_write() {
        let rate = Rate(Bytes(100 << 20));
        assert_eq!(end_margin(Bytes::ZERO, rate), Duration::from_secs(30));
        assert_eq!(end_margin(Bytes(1000 << 20), rate), Duration::from_secs(45));
    }
}
