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

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::io::{self, Read, Write};

use rustix::fs::Mode;
use tar::EntryType;

use super::sparse::Segment;
use crate::acl;
use crate::attributes::{ACL_ACCESS, ACL_DEFAULT, Xattr};
use crate::error::{Fault, display_path};

/// Tar's unit: headers and data begin at multiples of it.
pub(super) const BLOCK: u64 = 512;
/// The most bytes of pax records of one member. Linux allows 64 KiB for an attribute and a path is much shorter; more
/// is damage, or an attack on our memory.
pub(super) const MOST_RECORDS: u64 = 16 << 20;
/// The most records of one member: an attacker's are short. Only GNU's oldest map of holes has more than a few.
const MOST_LINES: usize = 1 << 17;
/// The most extended attributes of one member: on Linux the names of all of them are at most 64 KiB.
const MOST_XATTRS: usize = 10_000;
/// What a record takes of our memory beside its text.
const RECORD: u64 = 128;
/// The most segments of a sparse file that are read: 64 MiB of memory.
const MOST_SEGMENTS: usize = 4 << 20;
/// Numbers that fit into the 11 octal digits of a size or time, and into the 7 of an id.
const MOST_11_DIGITS: u64 = 0o77_777_777_777;
const MOST_7_DIGITS: u32 = 0o7_777_777;
/// Who owns what has an owner that Linux can't have: nobody.
const NOBODY: u32 = 65_534;

const XATTR: &[u8] = b"SCHILY.xattr.";
/// The keys under which GNU tar, bsdtar and star look for ACLs.
const ACLS: [(&[u8], &CStr); 2] = [(b"SCHILY.acl.access", ACL_ACCESS), (b"SCHILY.acl.default", ACL_DEFAULT)];

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
                    let records = Records { own: &records, globals };
                    return build(block, &records, long_path, long_link, stream).map(Some);
                }
            }
        }
    }
}

/// The records that hold for all members to come.
#[derive(Default)]
pub(super) struct Globals {
    records: HashMap<Vec<u8>, Vec<u8>>,
    /// What they take of our memory, about.
    bytes: u64,
}

impl Globals {
    fn put(&mut self, Record { key, value }: Record) {
        let name = key.len() as u64;
        self.bytes += name + value.len() as u64 + RECORD;
        if let Some(old) = self.records.insert(key, value) {
            self.bytes -= name + old.len() as u64 + RECORD;
        }
    }
}

/// One `KEY=VALUE`.
struct Record {
    key: Vec<u8>,
    value: Vec<u8>,
}

/// The records that hold for a member: its own before the global ones, the last of a key before earlier ones.
struct Records<'a> {
    own: &'a [Record],
    globals: &'a Globals,
}

impl Records<'_> {
    fn get(&self, key: &[u8]) -> Option<&[u8]> {
        match self.own.iter().rfind(|record| record.key == key) {
            Some(record) => Some(&record.value[..]),
            None => self.globals.records.get(key).map(|value| &value[..]),
        }
        // An empty value takes a record back.
        .filter(|value| !value.is_empty())
    }

    fn number(&self, key: &[u8]) -> io::Result<Option<u64>> {
        self.get(key).map(decimal).transpose()
    }
}

fn build(
    block: &tar::Header,
    records: &Records<'_>,
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

/// Extended attributes and ACLs, and what of them can't be restored. An ACL decides on the permissions of `mode`.
fn read_xattrs(
    records: &Records<'_>,
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

/// The map of GNU tar's own format: four segments in the block, more in blocks that follow.
fn old_gnu_map(block: &tar::Header, header: &mut Header, stream: &mut dyn Read) -> io::Result<()> {
    let gnu = block.as_gnu().ok_or_else(|| damaged("it has a sparse map in a header that has none"))?;
    header.size = gnu.real_size()?;
    let mut numbers = Vec::new();
    let mut add = |slots: &[tar::GnuSparseHeader]| -> io::Result<()> {
        for slot in slots.iter().filter(|slot| !slot.is_empty()) {
            numbers.extend([slot.offset()?, slot.length()?]);
        }
        if numbers.len() > 2 * MOST_SEGMENTS { Err(damaged("it has too many holes")) } else { Ok(()) }
    };
    add(&gnu.sparse)?;
    let mut more = gnu.is_extended();
    while more {
        let mut extension = tar::GnuExtSparseHeader::new();
        stream.read_exact(extension.as_mut_bytes())?;
        add(extension.sparse())?;
        more = extension.is_extended();
    }
    header.holes = Holes::Map(segments_of(numbers)?);
    Ok(())
}

/// Reads the map at the beginning of a sparse file's data: decimal numbers on lines of their own, the count of
/// segments first, padded to whole blocks. Also tells how many bytes that were.
pub(super) fn read_map(data: &mut dyn Read) -> io::Result<(Vec<Segment>, u64)> {
    let mut block = [0; BLOCK as usize];
    let (mut at, mut consumed) = (block.len(), 0);
    let mut next = || -> io::Result<u64> {
        let mut number = 0_u64;
        let mut digits = 0;
        loop {
            if at == block.len() {
                data.read_exact(&mut block)?;
                (at, consumed) = (0, consumed + BLOCK);
            }
            let byte = block[at];
            at += 1;
            match byte {
                b'0'..=b'9' if digits < 20 => {
                    digits += 1;
                    number = (number.checked_mul(10))
                        .and_then(|number| number.checked_add(u64::from(byte - b'0')))
                        .ok_or_else(|| damaged("a number in its sparse map is too large"))?;
                }
                b'\n' if digits > 0 => return Ok(number),
                _ => return Err(damaged("its sparse map is not a list of numbers")),
            }
        }
    };
    let count = next()?;
    if count > MOST_SEGMENTS as u64 {
        return Err(damaged("it has too many holes"));
    }
    let mut numbers = Vec::new(); // grows with what is really there
    for _ in 0..count * 2 {
        numbers.push(next()?);
    }
    Ok((segments_of(numbers)?, consumed))
}

/// The same, written.
pub(super) fn write_map(segments: &[Segment], size: u64, out: &mut Vec<u8>) {
    let start = out.len();
    // A last segment of no length says where a hole at the end ends.
    let ends_in_hole = segments.last().is_none_or(|last| last.offset + last.length < size);
    let end = ends_in_hole.then_some(Segment { offset: size, length: 0 });
    // Writing to a Vec can't fail.
    let _ = writeln!(out, "{}", segments.len() + usize::from(ends_in_hole));
    for segment in segments.iter().chain(&end) {
        let _ = writeln!(out, "{}\n{}", segment.offset, segment.length);
    }
    let length = (out.len() - start) as u64;
    pad(out, length);
}

fn segments_of(numbers: Vec<u64>) -> io::Result<Vec<Segment>> {
    let mut segments = Vec::with_capacity(numbers.len() / 2);
    let mut end = 0;
    for pair in numbers.chunks(2) {
        let [offset, length] = *pair else { return Err(damaged("its sparse map has an odd length")) };
        if offset < end {
            return Err(damaged("the segments of its sparse map overlap"));
        }
        end = offset.checked_add(length).ok_or_else(|| damaged("its sparse map is too large"))?;
        if length > 0 {
            segments.push(Segment { offset, length });
        }
    }
    Ok(segments)
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

/// Appends `LENGTH KEY=VALUE\n`, where the length counts its own digits.
fn record(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
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
fn read_records(stream: &mut dyn Read, block: &tar::Header) -> io::Result<Vec<Record>> {
    parse_records(&read_extension(stream, block)?)?.ok_or_else(|| {
        let path = display_path(&block.path_bytes());
        damaged(&format!("the extended header {path} has more than {MOST_LINES} records"))
    })
}

/// `None` if there are too many.
fn parse_records(mut data: &[u8]) -> io::Result<Option<Vec<Record>>> {
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
        records.push(Record { key: line[..equals].to_vec(), value: line[equals + 1..].to_vec() });
        data = &data[length..];
    }
    Ok(Some(records))
}

/// The content of a member that extends the next one's header.
fn read_extension(stream: &mut dyn Read, block: &tar::Header) -> io::Result<Vec<u8>> {
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

fn decimal(text: &[u8]) -> io::Result<u64> {
    (std::str::from_utf8(text).ok())
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| damaged("a number in its extended header is none"))
}

/// Seconds with a fraction. Before 1970 the whole is negative: half a second before it is `-0.5`, not -1 plus 0.5.
fn time_text((seconds, nanoseconds): (i64, u32)) -> String {
    match (seconds, nanoseconds) {
        (_, 0) => seconds.to_string(),
        (..0, _) => format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanoseconds),
        _ => format!("{seconds}.{nanoseconds:09}"),
    }
}

fn parse_time(text: &[u8]) -> Option<(i64, u32)> {
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

/// GNU tar writes an attribute's name so that the first `=` ends the key.
fn encode_name(name: &[u8]) -> Vec<u8> {
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

    #[test]
    fn a_map_of_holes_is_read_as_it_was_written_and_nonsense_is_refused() {
        let segments: Vec<_> = (0..100).map(|n| Segment { offset: n << 20, length: 4096 + n }).collect();
        let mut data = Vec::new();
        write_map(&segments, 200 << 20, &mut data);
        let (read, consumed) = read_map(&mut &data[..]).unwrap();
        assert_eq!((read, consumed), (segments, data.len() as u64));
        for nonsense in
            ["", "2\n5\n", "1\n5\nx\n", "2\n5\n5\n6\n1\n", "99999999999\n", "1\n18446744073709551615\n2\n"]
        {
            let mut block = nonsense.as_bytes().to_vec();
            block.resize(512, 0);
            assert!(read_map(&mut &block[..]).is_err(), "{nonsense}");
        }
    }
}
