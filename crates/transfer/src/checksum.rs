//! Checksums of files, taken from the buffers as they pass.
//!
//! A file of up to [`CHUNKED_ABOVE`] bytes has the checksum of its bytes. A larger one has the checksum of the
//! concatenated checksums of its chunks of [`CHUNK`] bytes (the last may be shorter), so that several threads can
//! work on it; the manifest marks it with the chunk size. Holes count as zeros. XXH3-128 digests are written and
//! chained in their canonical big-endian form.

use std::fmt;

use twox_hash::XxHash3_128;

/// Files larger than this have a checksum over chunk checksums.
pub const CHUNKED_ABOVE: u64 = 64 << 20;
/// The size of a chunk of such a file.
pub const CHUNK: u64 = 16 << 20;

/// Which checksum is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// XXH3 with 128 bits: as fast as memory, guards against accidents, not against forgers.
    #[default]
    Xxh3,
    /// BLAKE3 with 256 bits: cryptographic, costs more time.
    Blake3,
    /// None: sizes alone are compared.
    None,
}

impl Checksum {
    /// The name in manifests and messages.
    pub fn name(self) -> &'static str {
        match self {
            Checksum::Xxh3 => "xxh3-128",
            Checksum::Blake3 => "blake3",
            Checksum::None => "none",
        }
    }

    /// The checksum of one buffer.
    pub fn of(self, data: &[u8]) -> Digest {
        match self {
            Checksum::Xxh3 => Digest::from_slice(&XxHash3_128::oneshot(data).to_be_bytes()),
            Checksum::Blake3 => Digest::from_slice(blake3::hash(data).as_bytes()),
            Checksum::None => Digest::default(),
        }
    }

    /// A hasher for data that comes in pieces.
    pub fn hasher(self) -> Hasher {
        match self {
            Checksum::Xxh3 => Hasher::Xxh3(Box::new(XxHash3_128::new())),
            Checksum::Blake3 => Hasher::Blake3(Box::new(blake3::Hasher::new())),
            Checksum::None => Hasher::None,
        }
    }

    /// The checksum over the checksums of a large file's chunks.
    pub fn of_chunks(self, chunks: &[Digest]) -> Digest {
        let mut hasher = self.hasher();
        for chunk in chunks {
            hasher.update(chunk.as_bytes());
        }
        hasher.finish()
    }
}

/// A checksum in the making.
pub enum Hasher {
    /// Of XXH3-128, which is fast and no protection against forgery.
    Xxh3(Box<XxHash3_128>),
    /// Of BLAKE3, a cryptographic hash.
    Blake3(Box<blake3::Hasher>),
    /// Nothing is computed.
    None,
}

impl Hasher {
    /// Takes the next bytes.
    pub fn update(&mut self, data: &[u8]) {
        match self {
            Hasher::Xxh3(hasher) => hasher.write(data),
            Hasher::Blake3(hasher) => {
                hasher.update(data);
            }
            Hasher::None => {}
        }
    }

    /// Takes `length` zeros, which is what a hole reads as.
    pub fn update_zeros(&mut self, mut length: u64) {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        if matches!(self, Hasher::None) {
            return;
        }
        while length > 0 {
            let piece = length.min(ZEROS.len() as u64);
            self.update(&ZEROS[..piece as usize]);
            length -= piece;
        }
    }

    /// The checksum of all that was taken.
    pub fn finish(self) -> Digest {
        match self {
            Hasher::Xxh3(hasher) => Digest::from_slice(&hasher.finish_128().to_be_bytes()),
            Hasher::Blake3(hasher) => Digest::from_slice(hasher.finalize().as_bytes()),
            Hasher::None => Digest::default(),
        }
    }
}

/// A checksum's value: 16 bytes of XXH3, 32 of BLAKE3, or none.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Digest {
    bytes: [u8; 32],
    length: u8,
}

impl Digest {
    fn from_slice(slice: &[u8]) -> Self {
        let mut bytes = [0; 32];
        bytes[..slice.len()].copy_from_slice(slice);
        Digest { bytes, length: slice.len() as u8 }
    }

    /// The bytes, big end first; empty when no checksum was taken.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    /// Reads what [`fmt::Display`] wrote.
    pub fn from_hex(text: &str) -> Option<Self> {
        if !text.is_ascii() || !matches!(text.len(), 32 | 64) {
            return None;
        }
        let mut bytes = [0; 32];
        for (index, byte) in bytes.iter_mut().take(text.len() / 2).enumerate() {
            *byte = u8::from_str_radix(&text[index * 2..index * 2 + 2], 16).ok()?;
        }
        Some(Digest { bytes, length: (text.len() / 2) as u8 })
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_empty_input_has_the_published_checksums() {
        assert_eq!(Checksum::Xxh3.of(b"").to_string(), "99aa06d3014798d86001c324468d497f");
        assert_eq!(&Checksum::Blake3.of(b"").to_string()[..16], "af1349b9f5f9a1a6");
        assert_eq!(Checksum::None.of(b"x").to_string(), "");
    }

    #[test]
    fn pieces_give_the_same_checksum_as_the_whole_and_holes_count_as_zeros() {
        let mut data = vec![7_u8; 100_000];
        data.extend_from_slice(&[0; 200_000]);
        for checksum in [Checksum::Xxh3, Checksum::Blake3] {
            let mut hasher = checksum.hasher();
            hasher.update(&data[..33_333]);
            hasher.update(&data[33_333..100_000]);
            hasher.update_zeros(200_000);
            let digest = hasher.finish();
            assert_eq!(digest, checksum.of(&data));
            assert_eq!(Digest::from_hex(&digest.to_string()), Some(digest));
        }
    }
}
