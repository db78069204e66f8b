//! Extended attributes and ACLs as records.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::io;

use super::damaged;
use super::records::PaxRecords;
use crate::acl;
use crate::attributes::{ACL_ACCESS, ACL_DEFAULT, Xattr};
use crate::error::display_path;

/// The most extended attributes of one member: on Linux the names of all of them are at most 64 KiB.
const MOST_XATTRS: usize = 10_000;

pub(super) const XATTR: &[u8] = b"SCHILY.xattr.";
/// The keys under which GNU tar, bsdtar and star look for ACLs.
pub(super) const ACLS: [(&[u8], &CStr); 2] =
    [(b"SCHILY.acl.access", ACL_ACCESS), (b"SCHILY.acl.default", ACL_DEFAULT)];

/// Extended attributes and ACLs, and what of them can't be restored. An ACL decides on the permissions of `mode`.
pub(super) fn read_xattrs(
    records: &PaxRecords<'_>,
    path: &[u8],
    mode: &mut u32,
) -> io::Result<(Vec<Xattr>, Option<String>)> {
    let mut xattrs: Vec<Xattr> = Vec::new();
    let mut known: HashMap<CString, usize> = HashMap::new();
    let mut lost = None;
    for record in records.own {
        if let Some(name) = record.key.strip_prefix(XATTR)
            && let Ok(name) = CString::new(decode_name(name))
        {
            if let Some(at) = known.get(&name) {
                xattrs[*at].value.clone_from(&record.value);
                continue;
            }
            if xattrs.len() == MOST_XATTRS {
                let path = display_path(path);
                return Err(damaged(&format!("{path} has more than {MOST_XATTRS} extended attributes")));
            }
            known.insert(name.clone(), xattrs.len());
            xattrs.push(Xattr { name, value: record.value.clone() });
        }
    }
    for (key, name) in ACLS {
        // The binary form of the same, where both are there, needs no look-up of names.
        if let Some(text) = records.get(key)
            && !xattrs.iter().any(|xattr| *xattr.name == *name)
        {
            match acl::from_text(text) {
                Ok(acl::Parsed { acl, unknown }) => {
                    // The group's bits of a mode with an ACL are the mask's, but bsdtar writes the group's own.
                    if name == ACL_ACCESS {
                        *mode = acl::mode_bits(&acl).map_or(*mode, |bits| *mode & 0o7000 | bits);
                    }
                    xattrs.push(Xattr { name: name.to_owned(), value: acl });
                    if !unknown.is_empty() {
                        lost =
                            Some(format!("nobody is called `{}` here, whom it names", unknown.join("`, `")));
                    }
                }
                Err(why) => {
                    // What its group may do was in the ACL: no more than anybody else.
                    if name == ACL_ACCESS {
                        *mode &= 0o7707 | (*mode & 0o007) << 3;
                    }
                    lost = Some(why);
                }
            }
        }
    }
    Ok((xattrs, lost))
}

/// GNU tar writes an attribute's name so that the first `=` ends the key.
pub(super) fn encode_name(name: &[u8]) -> Vec<u8> {
    let mut encoded = Vec::with_capacity(name.len());
    for byte in name {
        match byte {
            b'%' => encoded.extend_from_slice(b"%25"),
            b'=' => encoded.extend_from_slice(b"%3D"),
            _ => encoded.push(*byte),
        }
    }
    encoded
}

fn decode_name(mut name: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(name.len());
    while let [first, rest @ ..] = name {
        let (byte, rest) = match name {
            [b'%', b'2', b'5', rest @ ..] => (b'%', rest),
            [b'%', b'3', b'D', rest @ ..] => (b'=', rest),
            _ => (*first, rest),
        };
        decoded.push(byte);
        name = rest;
    }
    decoded
}
