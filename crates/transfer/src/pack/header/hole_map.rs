//! The maps of files with holes.

use std::io::{self, Read, Write};

use super::{BLOCK, Header, Holes, damaged, pad};
use crate::pack::sparse::Segment;

/// The most segments of a sparse file that are read: 64 MiB of memory.
const MOST_SEGMENTS: usize = 4 << 20;

/// The map of GNU tar's own format: four segments in the block, more in blocks that follow.
pub(super) fn old_gnu_map(block: &tar::Header, header: &mut Header, stream: &mut dyn Read) -> io::Result<()> {
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
pub(in crate::pack) fn read_map(data: &mut dyn Read) -> io::Result<(Vec<Segment>, u64)> {
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
pub(in crate::pack) fn write_map(segments: &[Segment], size: u64, out: &mut Vec<u8>) {
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

pub(super) fn segments_of(numbers: Vec<u64>) -> io::Result<Vec<Segment>> {
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

#[cfg(test)]
mod tests {
    use super::*;

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
