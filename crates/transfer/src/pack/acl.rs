//! Access control lists as other programs write them into archives: as text, such as
//! `user::rw-,user:lisa:r--,group::r--,mask::r--,other::---`.

use std::collections::HashMap;
use std::process::Command;
use std::sync::Mutex;

/// The kernel's form (`system.posix_acl_access`): a version, then tag, permissions and id of each entry.
const VERSION: u32 = 2;
/// The id of entries that have none.
const NO_ID: u32 = u32::MAX;

/// The kernel's form of an ACL in text.
///
/// # Errors
/// What is wrong with it, or which name in it nobody has here.
pub(super) fn from_text(text: &[u8]) -> Result<Vec<u8>, String> {
    let text = String::from_utf8_lossy(text);
    let mut entries = Vec::new();
    for entry in text.split([',', '\n']) {
        let entry = entry.split('#').next().unwrap_or_default().trim();
        let entry = entry.strip_prefix("default:").unwrap_or(entry);
        if entry.is_empty() {
            continue;
        }
        entries.push(parse(entry).ok_or_else(|| format!("`{entry}` is no entry of an ACL"))??);
    }
    // The kernel wants them by tag.
    entries.sort_by_key(|(tag, _, _)| *tag);
    let mut bytes = VERSION.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend_from_slice(&tag.to_le_bytes());
        bytes.extend_from_slice(&permissions.to_le_bytes());
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    Ok(bytes)
}

type Entry = (u16, u16, u32);

/// `TAG:NAME:PERMISSIONS`, and after that an id in the archives of some programs.
fn parse(entry: &str) -> Option<Result<Entry, String>> {
    let fields: Vec<&str> = entry.split(':').map(str::trim).collect();
    let (tag, name, permissions, id) = match fields[..] {
        [tag, name, permissions] => (tag, name, permissions, None),
        [tag, name, permissions, id] => (tag, name, permissions, Some(id)),
        // `mask:r--` and `other:r--` may lack their empty field.
        [tag, permissions] => (tag, "", permissions, None),
        _ => return None,
    };
    let mut bits = 0;
    for letter in permissions.chars() {
        bits |= match letter {
            'r' => 4,
            'w' => 2,
            'x' => 1,
            '-' => 0,
            _ => return None,
        };
    }
    let (tag, database) = match (tag, name.is_empty()) {
        ("user" | "u", true) => (0x01, None),
        ("user" | "u", false) => (0x02, Some("passwd")),
        ("group" | "g", true) => (0x04, None),
        ("group" | "g", false) => (0x08, Some("group")),
        ("mask" | "m", true) => (0x10, None),
        ("other" | "o", true) => (0x20, None),
        _ => return None,
    };
    let id = match database {
        None => NO_ID,
        Some(database) => {
            match (name.parse().ok())
                .or_else(|| id.and_then(|id| id.parse().ok()))
                .or_else(|| look_up(database, name))
            {
                Some(id) => id,
                None => return Some(Err(format!("nobody is called `{name}` here, whom its ACL names"))),
            }
        }
    };
    Some(Ok((tag, bits, id)))
}

/// Asks `getent(1)`, as [`crate::credentials`] does, and remembers the answer: the same few names come again and again.
fn look_up(database: &'static str, name: &str) -> Option<u32> {
    type Known = HashMap<(&'static str, String), Option<u32>>;
    /// Beyond this many names an archive only wants to fill our memory.
    const MOST: usize = 10_000;
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let known = known.get_or_insert_default();
    if let Some(id) = known.get(&(database, name.to_owned())) {
        return *id;
    }
    if known.len() == MOST || name.starts_with('-') {
        return None;
    }
    let id = (Command::new("getent").args([database, name]).output().ok())
        .filter(|output| output.status.success())
        .and_then(|output| String::from_utf8_lossy(&output.stdout).split(':').nth(2)?.trim().parse().ok());
    known.insert((database, name.to_owned()), id);
    id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_becomes_the_kernels_form() {
        let acl =
            from_text(b"other::r-x\nuser::rw-,user:12345:r--,group:root:r--:0,group::---,mask::r--").unwrap();
        let expected: Vec<u8> =
            [(1_u16, 6_u16, NO_ID), (2, 4, 12_345), (4, 0, NO_ID), (8, 4, 0), (16, 4, NO_ID), (32, 5, NO_ID)]
                .iter()
                .flat_map(|(tag, bits, id)| {
                    [&tag.to_le_bytes()[..], &bits.to_le_bytes(), &id.to_le_bytes()].concat()
                })
                .collect();
        assert_eq!(acl[4..], expected);
        assert_eq!(from_text(b"user:root:rwx").unwrap(), from_text(b"user:0:rwx").unwrap());
        assert!(from_text(b"user:nobody-has-this-name:rwx").unwrap_err().contains("nobody-has-this-name"));
        assert!(from_text(b"what").is_err() && from_text(b"user::rwz").is_err());
    }
}
