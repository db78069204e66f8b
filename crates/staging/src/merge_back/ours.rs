//! What a run itself has, or has put, on disk.

use std::collections::HashMap;
use std::io::{self, Write};
use std::path::Path;

use super::lines::read_lines;
use super::stat::Moment;

/// What this run itself has, or has put, on disk: inode and ctime by the hash of the path.
pub type Ours = HashMap<u128, (u64, Moment)>;

/// The first line of a file with [`Ours`].
const OURS: &str = "# ondeck ours 1";

/// Keeps what is this run's own in a file.
pub fn write_ours(path: &Path, ours: &Ours) -> io::Result<()> {
    let partial = path.with_extension("partial");
    let mut file = io::BufWriter::new(std::fs::File::create(&partial)?);
    writeln!(file, "{OURS}")?;
    for (path, (inode, changed)) in ours {
        writeln!(file, "{path:032x} {inode} {} {}", changed.0, changed.1)?;
    }
    file.into_inner().map_err(io::IntoInnerError::into_error)?;
    std::fs::rename(&partial, path)
}

/// Reads what was kept; nothing if nothing was.
pub fn read_ours(path: &Path) -> io::Result<Ours> {
    let mut ours = Ours::new();
    let read = read_lines(path, &[OURS], &mut |line| {
        let mut fields = line.split(' ');
        let path = u128::from_str_radix(fields.next()?, 16).ok()?;
        let inode = fields.next()?.parse().ok()?;
        ours.insert(path, (inode, (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?)));
        fields.next().is_none().then_some(())
    });
    match read {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(ours),
    }
}
