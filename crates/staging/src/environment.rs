//! What a user's stage script finds in its environment.

use std::ffi::{OsStr, OsString};
use std::path::Path;

/// What tells a script where to copy (the thesis, section 3.2.1 and appendix U): the RAM disk, the job's input and output
/// directories, and the job.
pub fn of_script<'a>(
    ram: &Path,
    input: impl Iterator<Item = &'a Path>,
    output: impl Iterator<Item = &'a Path>,
    job: OsString,
) -> Vec<(&'static str, OsString)> {
    vec![
        ("RSA_RAMDISK", ram.into()),
        ("RSA_DATA_IN", joined(input)),
        ("RSA_DATA_OUT", joined(output)),
        ("RSA_JOB_ID", job),
    ]
}

fn joined<'a>(paths: impl Iterator<Item = &'a Path>) -> OsString {
    let paths: Vec<&OsStr> = paths.map(Path::as_os_str).collect();
    paths.join(OsStr::new(":"))
}
