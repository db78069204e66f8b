//! Access control lists: in the kernel's form, and as text, as archives hold them, such as
//! `user::rw-,user:lisa:r--,group::r--,mask::r--,other::---`.

use std::collections::HashMap;
use std::process::Command;
use std::sync::Mutex;

/// The kernel's form (`system.posix_acl_access`): a version, then tag, permissions and id of each entry.
const VERSION: u32 = 2;
/// The id of entries that have none.
const NO_ID: u32 = u32::MAX;

const OWNER: u16 = 0x01;
const USER: u16 = 0x02;
const OWNING_GROUP: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// Tag, permissions, id.
type Entry = (u16, u16, u32);

/// The entries of an ACL in the kernel's form; `None` if it is something else.
fn entries(acl: &[u8]) -> Option<Vec<Entry>> {
    let body = acl.strip_prefix(&VERSION.to_le_bytes())?;
    let (entries, []) = body.as_chunks::<8>() else { return None };
    Some(
        (entries.iter())
            .map(|[a, b, c, d, e, f, g, h]| {
                let (tag, permissions) = (u16::from_le_bytes([*a, *b]), u16::from_le_bytes([*c, *d]));
                (tag, permissions, u32::from_le_bytes([*e, *f, *g, *h]))
            })
            .collect(),
    )
}

/// What an ACL in the kernel's form gives to the owner, the owning group and all others, as permission bits.
///
/// The group's bits of a mode are the mask, which may be more: a mode without its ACL would give all of the mask to the
/// group. What is no ACL gives nothing to anybody but the owner.
pub(crate) fn plain_bits(acl: &[u8]) -> u32 {
    let Some(entries) = entries(acl) else { return 0o700 };
    let group = bits_of(&entries, OWNING_GROUP).unwrap_or(0) & bits_of(&entries, MASK).unwrap_or(7);
    bits_of(&entries, OWNER).unwrap_or(7) << 6 | group << 3 | bits_of(&entries, OTHER).unwrap_or(0)
}

/// The permission bits that stand for an ACL in the kernel's form where it is not kept: whom it names is one of the group or
/// of all others then, and neither gets more than each of them had.
pub(crate) fn bits_without(acl: &[u8]) -> u32 {
    let Some(entries) = entries(acl) else { return 0o700 };
    let mask = bits_of(&entries, MASK).unwrap_or(7);
    let named = entries.iter().filter(|(tag, ..)| *tag == USER || *tag == GROUP);
    let least = named.fold(7, |least, (_, bits, _)| least & u32::from(*bits) & mask);
    plain_bits(acl) & (0o700 | least << 3 | least)
}

/// Whether an ACL in the kernel's form names somebody who can't read, or search, what it is on. One that is not understood
/// does.
pub(crate) fn shuts_out_somebody(acl: &[u8]) -> bool {
    let Some(entries) = entries(acl) else { return true };
    let mask = bits_of(&entries, MASK).unwrap_or(7);
    let is_named = |tag: u16| tag == USER || tag == GROUP;
    entries.iter().any(|(tag, bits, _)| is_named(*tag) && u32::from(*bits) & mask & 5 != 5)
}

/// The permission bits of a mode that goes with an ACL in the kernel's form: the group's are the mask.
pub(crate) fn mode_bits(acl: &[u8]) -> Option<u32> {
    let entries = entries(acl)?;
    let group = bits_of(&entries, MASK).or_else(|| bits_of(&entries, OWNING_GROUP))?;
    Some(bits_of(&entries, OWNER)? << 6 | group << 3 | bits_of(&entries, OTHER)?)
}

fn bits_of(entries: &[Entry], tag: u16) -> Option<u32> {
    entries.iter().find(|(found, ..)| *found == tag).map(|(_, bits, _)| u32::from(bits & 7))
}

/// An ACL in the kernel's form as text, with numbers for names: GNU tar, bsdtar and star read them everywhere. The id
/// stands behind the permissions once more, where star looks for it. `None` if it is something else.
pub(crate) fn to_text(acl: &[u8]) -> Option<String> {
    let mut text = Vec::new();
    for (tag, bits, id) in entries(acl)? {
        let letter = |bit, letter| if bits & bit != 0 { letter } else { '-' };
        let permissions: String = [letter(4, 'r'), letter(2, 'w'), letter(1, 'x')].into_iter().collect();
        text.push(match tag {
            OWNER => format!("user::{permissions}"),
            USER => format!("user:{id}:{permissions}:{id}"),
            OWNING_GROUP => format!("group::{permissions}"),
            GROUP => format!("group:{id}:{permissions}:{id}"),
            MASK => format!("mask::{permissions}"),
            OTHER => format!("other::{permissions}"),
            _ => return None,
        });
    }
    Some(text.join(","))
}

/// An ACL that was text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Parsed {
    /// It in the kernel's form, without the entries of those who are unknown here.
    pub acl: Vec<u8>,
    /// Whom it names that nobody knows here.
    pub unknown: Vec<String>,
}

/// The kernel's form of an ACL in text.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn from_text(text: &[u8]) -> Result<Parsed, String> {
    /// Linux has no larger one than 64 KiB in its own form, which is at most some four times as many letters.
    const MOST: usize = 512 << 10;
    if text.len() > MOST {
        return Err(format!("it has {} bytes, which no ACL of Linux has", text.len()));
    }
    let text = String::from_utf8_lossy(text);
    let (mut entries, mut unknown) = (Vec::new(), Vec::new());
    for entry in text.split([',', '\n']) {
        let entry = entry.split('#').next().unwrap_or_default().trim();
        let entry = entry.strip_prefix("default:").unwrap_or(entry);
        if entry.is_empty() {
            continue;
        }
        match parse(entry).ok_or_else(|| format!("`{entry}` is no entry of an ACL"))? {
            Ok(entry) => entries.push(entry),
            Err(name) => unknown.push(name),
        }
    }
    // The kernel wants them by tag.
    entries.sort_by_key(|(tag, _, _)| *tag);
    Ok(Parsed { acl: to_bytes(&entries), unknown })
}

fn to_bytes(entries: &[Entry]) -> Vec<u8> {
    let mut bytes = VERSION.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend_from_slice(&tag.to_le_bytes());
        bytes.extend_from_slice(&permissions.to_le_bytes());
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    bytes
}

/// `TAG:NAME:PERMISSIONS`, and after that an id in the archives of some programs, which is the user's or group's as an
/// archive's numbers are its owners'. The inner error is a name that nobody has here.
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
        ("user" | "u", true) => (OWNER, None),
        ("user" | "u", false) => (USER, Some("passwd")),
        ("group" | "g", true) => (OWNING_GROUP, None),
        ("group" | "g", false) => (GROUP, Some("group")),
        ("mask" | "m", true) => (MASK, None),
        ("other" | "o", true) => (OTHER, None),
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
                None => return Some(Err(name.to_owned())),
            }
        }
    };
    Some(Ok((tag, bits, id)))
}

/// Asks `getent(1)`, as [`crate::credentials`] does, and remembers the answer: the same few names come again and again.
fn look_up(database: &'static str, name: &str) -> Option<u32> {
    type IdCache = HashMap<(&'static str, String), Option<u32>>;
    /// Beyond this many names an archive only wants to fill our memory.
    const MOST: usize = 10_000;
    static KNOWN: Mutex<Option<IdCache>> = Mutex::new(None);
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

    fn kernels(text: &[u8]) -> Vec<u8> {
        let Parsed { acl, unknown } = from_text(text).unwrap();
        assert_eq!(unknown, Vec::<String>::new());
        acl
    }

    #[test]
    fn text_becomes_the_kernels_form() {
        let acl = kernels(b"other::r-x\nuser::rw-,user:12345:r--,group:root:r--:0,group::---,mask::r--");
        let expected: Vec<u8> =
            [(1_u16, 6_u16, NO_ID), (2, 4, 12_345), (4, 0, NO_ID), (8, 4, 0), (16, 4, NO_ID), (32, 5, NO_ID)]
                .iter()
                .flat_map(|(tag, bits, id)| {
                    [&tag.to_le_bytes()[..], &bits.to_le_bytes(), &id.to_le_bytes()].concat()
                })
                .collect();
        assert_eq!(acl[4..], expected);
        assert_eq!(kernels(b"user:root:rwx"), kernels(b"user:0:rwx"));
        assert_eq!(kernels(b"user:nobody-has-this-name:rwx:1234"), kernels(b"user:1234:rwx"));
        assert!(from_text(b"what").is_err() && from_text(b"user::rwz").is_err());
    }

    #[test]
    fn the_kernels_form_becomes_text_and_the_same_again() {
        let text = "user::rwx,user:12345:r--:12345,group::---,group:7:rw-:7,mask::rw-,other::--x";
        let acl = kernels(text.as_bytes());
        assert_eq!(to_text(&acl).as_deref(), Some(text));
        assert_eq!(to_text(&acl[..acl.len() - 1]), None);
        assert_eq!(to_text(b""), None);
    }

    #[test]
    fn whom_nobody_knows_here_is_left_out_and_named() {
        let parsed =
            from_text(b"user::rw-,user:nobody-has-this-name:rwx,group::r--,mask::rwx,other::---").unwrap();
        assert_eq!(parsed.acl, kernels(b"user::rw-,group::r--,mask::rwx,other::---"));
        assert_eq!(parsed.unknown, ["nobody-has-this-name"]);
    }

    #[test]
    fn the_group_has_no_more_than_its_own_entry_and_the_mask() {
        let bits = |text: &[u8]| plain_bits(&kernels(text));
        assert_eq!(bits(b"user::rwx,user:7:rwx,group::---,mask::rwx,other::r--"), 0o704);
        assert_eq!(bits(b"user::rw-,user:7:rwx,group::rwx,mask::r-x,other::---"), 0o650);
        assert_eq!(bits(b"user::rwx,group::r-x,other::r-x"), 0o755);
        assert_eq!(plain_bits(b"what"), 0o700);
        assert_eq!(mode_bits(&kernels(b"user::rw-,user:7:rwx,group::---,mask::r-x,other::---")), Some(0o650));
        assert_eq!(mode_bits(&kernels(b"user::rw-,group::r--,other::---")), Some(0o640));
    }
}
