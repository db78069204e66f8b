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
    fn a_separator_can_not_be_guessed() {
        assert_ne!(separator(), separator());
        assert_eq!(format(&["A", "B"], "|"), "A:|,B:|");
    }
}
