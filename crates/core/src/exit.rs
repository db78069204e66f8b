//! The exit codes of every command, and what each promises. `docs/exit-codes.md` shows this table to users.

/// Everything that was asked for was done.
pub const OK: u8 = 0;
/// `ondeck stage`: some entries could not be copied; each was named on standard error, the rest is complete.
pub const SOME_FAILED: u8 = 1;
/// `ondeck stage`: some entries were removed from the source before they could be copied; each was named, the rest is
/// complete. rsync says it with the same code.
pub const SOME_VANISHED: u8 = 24;
/// `ondeck ramdisk`: a RAM disk is not whole, a node did not answer, or something is left of it. `ondeck agent`: it could
/// not start.
pub const FAILED: u8 = 1;
/// The command line was malformed; nothing was changed.
pub const USAGE: u8 = 2;
/// `ondeck stage`: the copy could not begin or could not go on; running it again resumes.
pub const STAGE_FAILED: u8 = 3;
/// `ondeck serve`: another scheduler has taken its place. It must not be started again by itself.
pub const DISPLACED: u8 = 4;
/// `ondeck run`: all results are on disk, but not under the path that was named: a directory was renamed while the program
/// ran, and its results are where it is now. It outranks the program's own code.
pub const RESULTS_ELSEWHERE: u8 = 121;
/// `ondeck run`: the results are not (all) on disk. They are held in RAM and the message says how to finish.
/// It outranks the program's own code, which stands in the report: a lost result never looks like success.
pub const RESULTS_NOT_STAGED: u8 = 122;
/// `ondeck run`: the owner abandoned the results by name.
pub const ABANDONED: u8 = 123;
/// `ondeck run`: Ondeck refused or failed before the program was started; nothing was changed.
pub const NOT_STARTED: u8 = 125;
/// The program was found but could not be executed (as `env`, `nohup` and `timeout` say it).
pub const CANNOT_EXECUTE: u8 = 126;
/// The program was not found.
pub const NOT_FOUND: u8 = 127;
/// The program was ended by signal `n`: 128 + n, as shells say it.
pub const SIGNAL_BASE: u8 = 128;
