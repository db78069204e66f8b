//! Files of lines, in which is kept what whoever merges back must know.

use std::io::{self, BufRead, Read};
use std::path::Path;

use rustix::fs::{self, Mode, OFlags};

/// More bytes than a line of one has: the extended attributes of a directory are 67 bytes each, and the kernel lists at
/// most 64 KiB of names.
const LONGEST_LINE: u64 = 1 << 20;

/// Reads a file of lines that somebody could have replaced. `take` says whether it understands a line.
pub(super) fn read_lines(
    path: &Path,
    first: &[&str],
    take: &mut dyn FnMut(&str) -> Option<()>,
) -> io::Result<()> {
    let malformed = || io::Error::other(format!("{} is damaged, or no file of ours", path.display()));
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = std::fs::File::from(fs::open(path, flags, Mode::empty())?);
    if !file.metadata()?.is_file() {
        return Err(malformed());
    }
    let mut file = io::BufReader::new(file);
    let mut line = String::new();
    let mut number = 0_u64;
    // No line without end is read.
    while file.by_ref().take(LONGEST_LINE).read_line(&mut line)? > 0 {
        let text = line.strip_suffix('\n').unwrap_or(&line);
        if number == 0 && !first.contains(&text) || number > 0 && take(text).is_none() {
            return Err(malformed());
        }
        number += 1;
        line.clear();
    }
    if number > 0 { Ok(()) } else { Err(malformed()) }
}
