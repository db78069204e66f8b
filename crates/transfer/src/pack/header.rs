//! The header of one member: a ustar block, and before it the pax records for all that the block can't hold.
//!
//! A ustar block has 512 bytes with fields of fixed width: 100 bytes of name, octal numbers, seconds. POSIX pax puts a
//! member of type `x` before it, whose content is lines of the form `LENGTH KEY=VALUE\n` (the length counts the
//! whole line) that replace or add to the block's fields. A member of type `g` does so for all that follow.
//!
//! What is written here: the path and a link's target where they are longer than 100 bytes or not plain ASCII (with
//! `hdrcharset=BINARY` if they are not UTF-8), numbers too large for their field, `mtime` with nanoseconds,
//! `SCHILY.xattr.NAME` for every extended attribute, `SCHILY.acl.access` and `SCHILY.acl.default` for ACLs as text, and
//! `GNU.sparse.*` for a file with holes.
//! What is read is more, because other programs write more: GNU's long names and old sparse maps, ACLs in the kernel's
//! form (`SCHILY.xattr.system.posix_acl_*`).

mod hole_map;
mod records;
mod xattrs;

pub(super) use hole_map::{read_map, write_map};
pub(super) use records::{Globals, MOST_RECORDS};

use std::borrow::Cow;
use std::io::{self, Read};

use rustix::fs::Mode;
use tar::EntryType;

use super::sparse::Segment;
use crate::acl;
use crate::attributes::{ACL_ACCESS, Xattr};
use crate::error::Fault;
use hole_map::{old_gnu_map, segments_of};
use records::{PaxRecords, decimal, parse_time, read_extension, read_records, record, time_text};
use xattrs::{ACLS, XATTR, encode_name, read_xattrs};

/// Tar's unit: headers and data begin at multiples of it.
pub(super) const BLOCK: u64 = 512;

/// Numbers that fit into the 11 octal digits of a size or time, and into the 7 of an id.
const MOST_11_DIGITS: u64 = 0o77_777_777_777;
const MOST_7_DIGITS: u32 = 0o7_777_777;
/// Who owns what has an owner that Linux can't have: nobody.
const NOBODY: u32 = 65_534;

/// Rounds up to whole blocks.
pub(super) fn padded(length: u64) -> u64 {
    length.next_multiple_of(BLOCK)
}

/// What an entry gets besides its content.
#[derive(Default)]
pub(super) struct Attributes {
    /// The permission bits, without the type.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Seconds and nanoseconds.
    pub mtime: (i64, u32),
    pub xattrs: Vec<Xattr>,
}

impl Attributes {
    /// Leaves what a stranger may give: permissions that the umask leaves, without set-id bits, ACLs, and attributes that
    /// are not the user's own.
    pub fn narrow(&mut self, umask: Mode) {
        self.mode &= 0o777 & !umask.as_raw_mode();
        for acl in self.xattrs.iter().filter(|xattr| *xattr.name == *ACL_ACCESS) {
            self.mode &= acl::bits_without(&acl.value);
        }
        self.xattrs.retain(|xattr| xattr.name.to_bytes().starts_with(b"user."));
    }
}

/// Where a member keeps the map of its holes.
pub(super) enum Holes {
    /// There are none.
    None,
    /// At the beginning of its data (pax format 1.0).
    InData,
    /// It was in the header (older formats).
    Map(Vec<Segment>),
}

/// A member's header.
pub(super) struct Header {
    /// The type, with the letters of [`crate::manifest`]; `?` for one we don't know.
    pub kind: u8,
    pub path: Vec<u8>,
    /// The target of a symlink, or the path of a hard link's first name.
    pub link: Vec<u8>,
    pub attributes: Attributes,
    /// Bytes of the content, holes included.
    pub size: u64,
    /// Bytes in the stream after the header, the map of a sparse file included, padding not.
    pub stored: u64,
    /// Major and minor number.
    pub device: (u32, u32),
    pub holes: Holes,
    /// What of it can't be restored here.
    pub lost: Option<String>,
}

impl Header {
    /// Appends the header to a buffer.
    ///
    /// # Errors
    /// If the records would be larger than [`MOST_RECORDS`].
    pub fn write(&self, out: &mut Vec<u8>) -> Result<(), Fault> {
        let attributes = &self.attributes;
        let path = match self.kind {
            b'd' if self.path.is_empty() => Cow::Borrowed(&b"./"[..]),
            b'd' => Cow::Owned([&relative(&self.path)[..], b"/"].concat()),
            _ => relative(&self.path),
        };
        let link = if self.kind == b'h' { relative(&self.link) } else { Cow::Borrowed(&self.link[..]) };
        let sparse = matches!(self.holes, Holes::InData);
        let mut records = Vec::new();
        if std::str::from_utf8(&path).is_err() || std::str::from_utf8(&link).is_err() {
            record(&mut records, b"hdrcharset", b"BINARY");
        }
        if sparse {
            record(&mut records, b"GNU.sparse.major", b"1");
            record(&mut records, b"GNU.sparse.minor", b"0");
            record(&mut records, b"GNU.sparse.name", &path);
            record(&mut records, b"GNU.sparse.realsize", self.size.to_string().as_bytes());
        } else if !fits(&path) {
            record(&mut records, b"path", &path);
        }
        if !fits(&link) {
            record(&mut records, b"linkpath", &link);
        }
        if self.stored > MOST_11_DIGITS {
            record(&mut records, b"size", self.stored.to_string().as_bytes());
        }
        for (key, id) in [(&b"uid"[..], attributes.uid), (b"gid", attributes.gid)] {
            if id > MOST_7_DIGITS {
                record(&mut records, key, id.to_string().as_bytes());
            }
        }
        let seconds = u64::try_from(attributes.mtime.0).ok().filter(|seconds| *seconds <= MOST_11_DIGITS);
        if attributes.mtime.1 != 0 || seconds.is_none() {
            record(&mut records, b"mtime", time_text(attributes.mtime).as_bytes());
        }
        for xattr in &attributes.xattrs {
            let key = ACLS.iter().find(|(_, name)| *xattr.name == **name).map(|(key, _)| key);
            if let Some((key, text)) = key.zip(acl::to_text(&xattr.value)) {
                record(&mut records, key, text.as_bytes());
                continue;
            }
            record(&mut records, &[XATTR, &encode_name(xattr.name.to_bytes())].concat(), &xattr.value);
        }
        if records.len() as u64 > MOST_RECORDS {
            return Err(Fault::message("packing it", "its extended attributes are too large for an archive"));
        }
        let base = self.path.rsplit(|b| *b == b'/').next().unwrap_or_default();
        if !records.is_empty() {
            let mut block = tar::Header::new_ustar();
            block.set_entry_type(EntryType::XHeader);
            block.set_mode(0o644);
            block.set_size(records.len() as u64);
            finish(block, &[b"PaxHeaders/", base].concat(), b"", out);
            out.extend_from_slice(&records);
            pad(out, records.len() as u64);
        }
        let mut block = tar::Header::new_ustar();
        block.set_entry_type(match self.kind {
            b'h' => EntryType::Link,
            b'l' => EntryType::Symlink,
            b'c' => EntryType::Char,
            b'b' => EntryType::Block,
            b'd' => EntryType::Directory,
            b'p' => EntryType::Fifo,
            _ => EntryType::Regular,
        });
        block.set_mode(attributes.mode);
        block.set_uid(if attributes.uid > MOST_7_DIGITS { 0 } else { attributes.uid.into() });
        block.set_gid(if attributes.gid > MOST_7_DIGITS { 0 } else { attributes.gid.into() });
        block.set_mtime(seconds.unwrap_or(0));
        block.set_size(if self.stored > MOST_11_DIGITS { 0 } else { self.stored });
        if matches!(self.kind, b'c' | b'b')
            && (self.device.0 > MOST_7_DIGITS || self.device.1 > MOST_7_DIGITS)
        {
            return Err(Fault::message("packing it", "its device number is too large for an archive"));
        }
        // Both succeed on a ustar block.
        let _ = block.set_device_major(self.device.0);
        let _ = block.set_device_minor(self.device.1);
        if sparse {
            // The name that shows in programs which don't know sparse files, as GNU tar does it.
            finish(block, &[b"GNUSparseFile.0/", base].concat(), b"", out);
        } else {
            finish(block, &path, &link, out);
        }
        Ok(())
    }

    /// Reads the next header from a stream that stands at one. `None` is the end of the archive.
    ///
    /// `globals` are empty at the beginning.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] if the stream ends, [`io::ErrorKind::InvalidData`] if this is no header.
    pub fn read(stream: &mut dyn Read, globals: &mut Globals) -> io::Result<Option<Header>> {
        let mut records = Vec::new();
        let (mut long_path, mut long_link) = (None, None);
        loop {
            let mut block = [0; BLOCK as usize];
            stream.read_exact(&mut block)?;
            if block == [0; BLOCK as usize] {
                return Ok(None);
            }
            let block = tar::Header::from_byte_slice(&block);
            check_sum(block)?;
            match block.entry_type().as_byte() {
                b'x' => records = read_records(stream, block)?,
                b'g' => {
                    read_records(stream, block)?.into_iter().for_each(|record| globals.put(record));
                    // Each header is bounded; so that many of them are, too:
                    if globals.bytes > MOST_RECORDS {
                        return Err(damaged("its global records are too many or too large"));
                    }
                }
                b'L' => long_path = Some(until_nul(read_extension(stream, block)?)),
                // The label of a volume: nothing to unpack.
                b'V' => drop(read_extension(stream, block)?),
                b'K' => long_link = Some(until_nul(read_extension(stream, block)?)),
                _ => {
                    let records = PaxRecords { own: &records, globals };
                    return build(block, &records, long_path, long_link, stream).map(Some);
                }
            }
        }
    }
}

fn build(
    block: &tar::Header,
    records: &PaxRecords<'_>,
    long_path: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
    stream: &mut dyn Read,
) -> io::Result<Header> {
    let path = (records.get(b"GNU.sparse.name").or_else(|| records.get(b"path")).map(<[u8]>::to_vec))
        .or(long_path)
        .unwrap_or_else(|| block.path_bytes().into_owned());
    let link = (records.get(b"linkpath").map(<[u8]>::to_vec))
        .or(long_link)
        .or_else(|| block.link_name_bytes().map(Cow::into_owned))
        .unwrap_or_default();
    let stored = match records.number(b"size")? {
        Some(size) => size,
        None => block.entry_size()?,
    };
    let entry_type = block.entry_type().as_byte();
    let kind = match entry_type {
        // Before ustar, a directory was a file whose name ends with a slash.
        b'0' | 0 | b'7' if path.ends_with(b"/") => b'd',
        b'0' | 0 | b'7' | b'S' => b'f',
        b'1' => b'h',
        b'2' => b'l',
        b'3' => b'c',
        b'4' => b'b',
        b'5' | b'D' => b'd',
        b'6' => b'p',
        _ => b'?',
    };
    let id = |key: &[u8], field: io::Result<u64>| -> io::Result<u32> {
        let id = records.number(key)?.or(field.ok()).unwrap_or(0);
        Ok(u32::try_from(id).ok().filter(|id| *id != u32::MAX).unwrap_or(NOBODY))
    };
    let mtime = match records.get(b"mtime") {
        Some(text) => parse_time(text).ok_or_else(|| damaged("its modification time is not a number"))?,
        // A base-256 number may be negative.
        None => (block.mtime().unwrap_or(0) as i64, 0),
    };
    let mut mode = block.mode().unwrap_or(0o600) & 0o7777;
    let (xattrs, lost) = read_xattrs(records, &path, &mut mode)?;
    let mut header = Header {
        kind,
        path,
        link,
        attributes: Attributes {
            mode,
            uid: id(b"uid", block.uid())?,
            gid: id(b"gid", block.gid())?,
            mtime,
            xattrs,
        },
        size: stored,
        stored,
        device: (
            block.device_major().ok().flatten().unwrap_or(0),
            block.device_minor().ok().flatten().unwrap_or(0),
        ),
        holes: Holes::None,
        lost,
    };
    let real = records.number(b"GNU.sparse.realsize")?.or(records.number(b"GNU.sparse.size")?);
    if entry_type == b'S' {
        old_gnu_map(block, &mut header, stream)?;
    } else if let Some(real) = real {
        header.size = real;
        header.holes = match (records.get(b"GNU.sparse.major"), records.get(b"GNU.sparse.map")) {
            (Some(b"1"), _) => Holes::InData,
            (Some(_), _) => return Err(damaged("its sparse format is unknown")),
            (None, Some(map)) => Holes::Map(segments_of(
                map.split(|b| *b == b',').map(decimal).collect::<io::Result<Vec<_>>>()?,
            )?),
            // The oldest form repeats two keys.
            (None, None) => Holes::Map(segments_of(
                (records.own.iter())
                    .filter(|record| matches!(&record.key[..], b"GNU.sparse.offset" | b"GNU.sparse.numbytes"))
                    .map(|record| decimal(&record.value))
                    .collect::<io::Result<Vec<_>>>()?,
            )?),
        };
    }
    Ok(header)
}

/// Zeros up to the next block after `length` bytes.
pub(super) fn pad(out: &mut Vec<u8>, length: u64) {
    out.resize(out.len() + (padded(length) - length) as usize, 0);
}

/// A path that no program takes for an absolute one: bsdtar removes what could be the drive of another system.
fn relative(path: &[u8]) -> Cow<'_, [u8]> {
    match path {
        [b'\\', ..] | [_, b':', ..] => Cow::Owned([b"./", path].concat()),
        _ => Cow::Borrowed(path),
    }
}

fn fits(name: &[u8]) -> bool {
    name.len() <= 100 && name.is_ascii()
}

fn finish(mut block: tar::Header, path: &[u8], link: &[u8], out: &mut Vec<u8>) {
    let put = |text: &[u8], field: &mut [u8; 100]| {
        for (byte, place) in text.iter().zip(field) {
            *place = if byte.is_ascii() { *byte } else { b'_' };
        }
    };
    let names = block.as_old_mut();
    put(path, &mut names.name);
    put(link, &mut names.linkname);
    block.set_cksum();
    out.extend_from_slice(block.as_bytes());
}

fn check_sum(block: &tar::Header) -> io::Result<()> {
    // The sum of all bytes, those of the sum itself counted as blanks.
    let sum: u32 = (block.as_bytes().iter().enumerate())
        .map(|(at, byte)| if (148..156).contains(&at) { 32 } else { u32::from(*byte) })
        .sum();
    match block.cksum() {
        Ok(stated) if stated == sum => Ok(()),
        _ => Err(damaged("this is no header of a tar archive")),
    }
}

fn until_nul(mut text: Vec<u8>) -> Vec<u8> {
    let length = text.iter().position(|b| *b == 0).unwrap_or(text.len());
    text.truncate(length);
    text
}

fn damaged(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use super::*;

    #[test]
    fn a_header_that_needs_every_record_is_read_as_it_was_written() {
        let name = |name: &str| CString::new(name).unwrap();
        let header = Header {
            kind: b'l',
            path: b"a/\xff\xfe".repeat(80),
            link: b"\xf0".repeat(300),
            attributes: Attributes {
                mode: 0o4751,
                uid: 3_000_000_000,
                gid: 2_097_152,
                mtime: (-5, 17),
                xattrs: vec![
                    Xattr { name: name("user.a=b%3D"), value: vec![b'\n', 0, b'='] },
                    Xattr { name: name("user.empty"), value: Vec::new() },
                ],
            },
            size: 1 << 40,
            stored: 1 << 40,
            device: (0, 0),
            holes: Holes::None,
            lost: None,
        };
        let mut data = Vec::new();
        header.write(&mut data).unwrap();
        assert_eq!(data.len() % 512, 0);
        let read = Header::read(&mut &data[..], &mut Globals::default()).unwrap().unwrap();
        assert_eq!((read.kind, &read.path, &read.link), (b'l', &header.path, &header.link));
        assert_eq!((read.size, read.attributes.mode, read.attributes.mtime), (1 << 40, 0o4751, (-5, 17)));
        assert_eq!((read.attributes.uid, read.attributes.gid), (3_000_000_000, 2_097_152));
        let xattrs = |header: &Header| -> Vec<(CString, Vec<u8>)> {
            header.attributes.xattrs.iter().map(|x| (x.name.clone(), x.value.clone())).collect()
        };
        assert_eq!(xattrs(&read), xattrs(&header));
        // One byte off, and it is no header.
        data[600] ^= 1;
        let last = data.len() - 500;
        data[last] ^= 1;
        assert!(Header::read(&mut &data[..], &mut Globals::default()).is_err());
    }
}
