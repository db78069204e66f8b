//! The fields of squeue's `-O`: `NAME:SUFFIX` prints a field in full length, followed by the suffix.

use std::hash::{BuildHasher, RandomState};

use crate::WlmError;

/// A new separator: a control character and six letters by chance. No comma, which would begin another field, and no
/// digit or dot in front, which would be a width.
pub fn separator() -> String {
    let mut chance = RandomState::new().hash_one("separator");
    let mut text = String::from('\u{1f}');
    for _ in 0..6 {
        text.push(char::from(b'a' + (chance % 26) as u8));
        chance /= 26;
    }
    text
}

/// The argument for `-O`.
pub fn format(fields: &[&str], separator: &str) -> String {
    fields.iter().map(|field| format!("{field}:{separator}")).collect::<Vec<_>>().join(",")
}

/// How much is kept of what squeue prints in a field, where it is a user's own text. No queue is lost for one of them,
/// who may write any length in any number of jobs. What Slurm itself and administrators write is kept whole.
fn most_of(field: &str) -> usize {
    match field {
        "Dependency" => MOST_DEPENDENCIES,
        "Account" | "BurstBuffer" | "Name" | "QOS" => 1 << 10,
        // Longer than any path: what is cut off here leads nowhere.
        "Comment" | "WorkDir" | "stdout" | "stderr" => 8 << 10,
        _ => usize::MAX,
    }
}

/// How much is kept of what a job depends on: some hundred other jobs. What is as long was cut off.
pub const MOST_DEPENDENCIES: usize = 16 << 10;

/// Takes what squeue writes, piece by piece, and keeps of each field what it may have. (squeue itself, told a width, would
/// fill all fields up to it.)
pub struct Cutter<'a> {
    separator: &'a [u8],
    /// The most bytes of each field of a record.
    most: Vec<usize>,
    /// Which field is being read, and how much of it is kept.
    field: usize,
    length: usize,
    /// How many bytes of a separator were read.
    matched: usize,
}

impl<'a> Cutter<'a> {
    /// For what is printed as [`format`] asks for it.
    pub fn new(fields: &[&str], separator: &'a str) -> Cutter<'a> {
        let most = fields.iter().map(|field| most_of(field)).collect();
        Cutter { separator: separator.as_bytes(), most, field: 0, length: 0, matched: 0 }
    }

    /// Appends to `kept` what is to be kept of the next piece.
    pub fn take(&mut self, mut piece: &[u8], kept: &mut Vec<u8>) {
        let separator = self.separator;
        let Some(first) = separator.first() else { return kept.extend_from_slice(piece) };
        while let [byte, rest @ ..] = piece {
            if *byte == separator[self.matched] {
                self.matched += 1;
                piece = rest;
                if self.matched == separator.len() {
                    kept.extend_from_slice(separator);
                    (self.matched, self.length) = (0, 0);
                    self.field = (self.field + 1) % self.most.len();
                }
            } else if self.matched > 0 {
                // The first byte of a separator occurs in it only there.
                self.keep(&separator[..self.matched], kept);
                self.matched = 0;
            } else {
                let end = piece.iter().position(|byte| byte == first).unwrap_or(piece.len());
                self.keep(&piece[..end], kept);
                piece = &piece[end..];
            }
        }
    }

    fn keep(&mut self, text: &[u8], kept: &mut Vec<u8>) {
        let room = self.most[self.field] - self.length;
        let text = &text[..text.len().min(room)];
        kept.extend_from_slice(text);
        self.length += text.len();
    }
}

/// The records of an output, each with `N` fields.
///
/// # Errors
/// [`WlmError::Malformed`] if a record lacks a field or is cut off.
pub fn records<'a, const N: usize>(
    output: &'a [u8],
    separator: &str,
) -> Result<Vec<[&'a [u8]; N]>, WlmError> {
    let malformed = |what: &str| WlmError::Malformed {
        what: format!(
            "squeue: {what}: `{}`",
            String::from_utf8_lossy(&output[..output.len().min(300)]).escape_debug()
        ),
    };
    let mut records = Vec::new();
    let mut rest = output;
    while !rest.is_empty() {
        let mut record: [&[u8]; N] = [&[]; N];
        for field in &mut record {
            let end = find(rest, separator.as_bytes()).ok_or_else(|| malformed("a field is missing"))?;
            *field = &rest[..end];
            rest = &rest[end + separator.len()..];
        }
        rest = rest.strip_prefix(b"\n").ok_or_else(|| malformed("a line does not end"))?;
        records.push(record);
    }
    Ok(records)
}

fn find(bytes: &[u8], needle: &[u8]) -> Option<usize> {
    let first = *needle.first()?;
    let mut from = 0;
    while let Some(at) = bytes[from..].iter().position(|byte| *byte == first) {
        let at = from + at;
        if bytes[at..].starts_with(needle) {
            return Some(at);
        }
        from = at + 1;
    }
    None
}

/// A field as text; what squeue prints for nothing is empty.
pub fn text(field: &[u8]) -> String {
    match field {
        b"(null)" | b"N/A" => String::new(),
        field => String::from_utf8_lossy(field).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_whole_or_not_at_all() {
        let output = b"1\x1fabc\x1fabd\x1fabc\n2\x1fabcline\nline\x1fabc\n";
        let read = records::<2>(output, "\u{1f}abc").unwrap();
        assert_eq!(read, [[&b"1"[..], b"\x1fabd"], [b"2", b"line\nline"]]);
        assert_eq!(records::<2>(b"", "|").unwrap(), Vec::<[&[u8]; 2]>::new());
        for cut in ["1|2", "1|2|", "1|2|3\n", "1|\n", "\n"] {
            assert!(matches!(records::<2>(cut.as_bytes(), "|"), Err(WlmError::Malformed { .. })), "{cut}");
        }
    }

    #[test]
    fn of_a_users_text_a_part_is_kept_and_of_the_rest_all() {
        let long = "x\u{1f}ab".repeat(10_000);
        let record = |job: &str, cut: bool| {
            let of = |most: usize| if cut { &long[..most] } else { &long };
            let fields = [job, of(MOST_DEPENDENCIES), &long, of(1 << 10), "\u{1f}", ""];
            fields.map(|field| format!("{field}\u{1f}abc")).concat() + "\n"
        };
        let written = record("1", false) + &record("2", false);
        let wanted = record("1", true) + &record("2", true);
        for piece in [1, 2, 3, 7, 64 << 10, written.len()] {
            let fields = ["JobID", "Dependency", "NodeList", "Account", "Reason", "QOS"];
            let mut cutter = Cutter::new(&fields, "\u{1f}abc");
            let mut kept = Vec::new();
            for piece in written.as_bytes().chunks(piece) {
                cutter.take(piece, &mut kept);
            }
            assert!(kept == wanted.as_bytes(), "in pieces of {piece}");
        }
    }

    #[test]
    fn a_separator_can_not_be_guessed() {
        assert_ne!(separator(), separator());
        assert_eq!(format(&["A", "B"], "|"), "A:|,B:|");
    }
}
