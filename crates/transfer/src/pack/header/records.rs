//! The pax records that a ustar block can't hold, and the extensions that they stand in.

use std::collections::HashMap;
use std::io::{self, Read};

use super::{damaged, padded};
use crate::error::display_path;

/// The most bytes of pax records of one member. Linux allows 64 KiB for an attribute and a path is much shorter; more
/// is damage, or an attack on our memory.
pub(in crate::pack) const MOST_RECORDS: u64 = 16 << 20;
/// The most records of one member: an attacker's are short. Only GNU's oldest map of holes has more than a few.
const MOST_LINES: usize = 1 << 17;

/// What a record takes of our memory beside its text.
const RECORD: u64 = 128;

/// The records that hold for all members to come.
#[derive(Default)]
pub(in crate::pack) struct Globals {
    pub(super) records: HashMap<Vec<u8>, Vec<u8>>,
    /// What they take of our memory, about.
    pub(super) bytes: u64,
}

impl Globals {
    pub(super) fn put(&mut self, PaxRecord { key, value }: PaxRecord) {
        let name = key.len() as u64;
        self.bytes += name + value.len() as u64 + RECORD;
        if let Some(old) = self.records.insert(key, value) {
            self.bytes -= name + old.len() as u64 + RECORD;
        }
    }
}

/// One `KEY=VALUE`.
pub(super) struct PaxRecord {
    pub(super) key: Vec<u8>,
    pub(super) value: Vec<u8>,
}

/// The records that hold for a member: its own before the global ones, the last of a key before earlier ones.
pub(super) struct PaxRecords<'a> {
    pub(super) own: &'a [PaxRecord],
    pub(super) globals: &'a Globals,
}

impl PaxRecords<'_> {
    pub(super) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        match self.own.iter().rfind(|record| record.key == key) {
            Some(record) => Some(&record.value[..]),
            None => self.globals.records.get(key).map(|value| &value[..]),
        }
        // An empty value takes a record back.
        .filter(|value| !value.is_empty())
    }

    pub(super) fn number(&self, key: &[u8]) -> io::Result<Option<u64>> {
        self.get(key).map(decimal).transpose()
    }
}

/// Appends `LENGTH KEY=VALUE\n`, where the length counts its own digits.
pub(super) fn record(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let digits = |number: usize| number.to_string().len();
    let rest = key.len() + value.len() + 3;
    let mut length = rest + digits(rest);
    if digits(length) > digits(rest) {
        length = rest + digits(length);
    }
    records.extend_from_slice(length.to_string().as_bytes());
    records.push(b' ');
    records.extend_from_slice(key);
    records.push(b'=');
    records.extend_from_slice(value);
    records.push(b'\n');
}

/// The records of a member that extends the next one's header.
pub(super) fn read_records(stream: &mut dyn Read, block: &tar::Header) -> io::Result<Vec<PaxRecord>> {
    parse_records(&read_extension(stream, block)?)?.ok_or_else(|| {
        let path = display_path(&block.path_bytes());
        damaged(&format!("the extended header {path} has more than {MOST_LINES} records"))
    })
}

/// `None` if there are too many.
fn parse_records(mut data: &[u8]) -> io::Result<Option<Vec<PaxRecord>>> {
    let broken = || damaged("its extended header is not a list of records");
    let mut records = Vec::new();
    while !data.is_empty() {
        if records.len() == MOST_LINES {
            return Ok(None);
        }
        let space = data.iter().take(20).position(|b| *b == b' ').ok_or_else(broken)?;
        let length = usize::try_from(decimal(&data[..space])?).map_err(|_| broken())?;
        let line =
            data.get(space + 1..length).and_then(|line| line.strip_suffix(b"\n")).ok_or_else(broken)?;
        let equals = line.iter().position(|b| *b == b'=').ok_or_else(broken)?;
        records.push(PaxRecord { key: line[..equals].to_vec(), value: line[equals + 1..].to_vec() });
        data = &data[length..];
    }
    Ok(Some(records))
}

/// The content of a member that extends the next one's header.
pub(super) fn read_extension(stream: &mut dyn Read, block: &tar::Header) -> io::Result<Vec<u8>> {
    let size = block.entry_size()?;
    if size > MOST_RECORDS {
        return Err(damaged("its extended header is too large"));
    }
    // Allocates as it reads, not what a header claims.
    let mut data = Vec::with_capacity(padded(size).min(64 << 10) as usize);
    stream.take(padded(size)).read_to_end(&mut data)?;
    if (data.len() as u64) < padded(size) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    data.truncate(size as usize);
    Ok(data)
}

pub(super) fn decimal(text: &[u8]) -> io::Result<u64> {
    (std::str::from_utf8(text).ok())
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| damaged("a number in its extended header is none"))
}

/// Seconds with a fraction. Before 1970 the whole is negative: half a second before it is `-0.5`, not -1 plus 0.5.
pub(super) fn time_text((seconds, nanoseconds): (i64, u32)) -> String {
    match (seconds, nanoseconds) {
        (_, 0) => seconds.to_string(),
        (..0, _) => format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanoseconds),
        _ => format!("{seconds}.{nanoseconds:09}"),
    }
}

pub(super) fn parse_time(text: &[u8]) -> Option<(i64, u32)> {
    let text = std::str::from_utf8(text).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let mut nanoseconds = 0;
    for place in 0..9 {
        let digit =
            fraction.as_bytes().get(place).map_or(Some(0), |b| b.is_ascii_digit().then(|| b - b'0'))?;
        nanoseconds = nanoseconds * 10 + u32::from(digit);
    }
    let seconds: i64 = whole.parse().ok()?;
    if whole.starts_with('-') && nanoseconds > 0 {
        return Some((seconds.checked_sub(1)?, 1_000_000_000 - nanoseconds));
    }
    Some((seconds, nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_counts_the_digits_of_its_own_length() {
        for length in [0, 1, 5, 6, 84, 85, 86, 87, 980, 990, 9_990, 70_000] {
            let mut data = Vec::new();
            record(&mut data, b"path", &vec![b'\n'; length]);
            record(&mut data, b"k", b"a=b");
            let records = parse_records(&data).unwrap().unwrap();
            assert_eq!(records.len(), 2, "{length}");
            assert_eq!((&records[0].key[..], records[0].value.len()), (&b"path"[..], length));
            assert_eq!(records[1].value, b"a=b");
        }
    }

    #[test]
    fn times_before_1970_keep_their_nanoseconds() {
        for (time, text) in [
            ((0, 0), "0"),
            ((12, 5), "12.000000005"),
            ((-1, 500_000_000), "-0.500000000"),
            ((-2, 999_999_999), "-1.000000001"),
            ((-7, 0), "-7"),
        ] {
            assert_eq!(time_text(time), text);
            assert_eq!(parse_time(text.as_bytes()), Some(time));
        }
        assert_eq!(parse_time(b"1.5"), Some((1, 500_000_000)));
        assert_eq!(parse_time(b"x"), None);
    }
}
