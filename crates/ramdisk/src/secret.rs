//! The secret of one incarnation of a RAM disk, from which every key and password of its engine follows.
//!
//! Two jobs may share a compute node, so an address proves nothing: who can't name the secret gets no data. A new
//! incarnation has a new one, which is also what fences the clients of the earlier ones.

use std::fmt;
use std::str::FromStr;

/// 32 random bytes. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A new secret from the kernel's random numbers.
    ///
    /// # Errors
    /// The kernel's, which on Linux only happens before the machine has gathered any randomness.
    pub fn new() -> std::io::Result<Secret> {
        let mut bytes = [0; 32];
        let mut filled = 0;
        while filled < bytes.len() {
            filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
        }
        Ok(Secret(bytes))
    }

    /// What clients are given: enough to mount the RAM disk, not enough to be one of its servers.
    pub fn for_clients(&self) -> Secret {
        Secret(self.derive("clients"))
    }

    /// A key for `purpose`. From one key nobody can tell another, nor the secret.
    pub fn derive(&self, purpose: &str) -> [u8; 32] {
        *blake3::keyed_hash(&self.0, purpose.as_bytes()).as_bytes()
    }

    /// A password for `purpose`: 64 hexadecimal digits.
    pub fn password(&self, purpose: &str) -> String {
        hex(&self.derive(purpose))
    }

    /// A UUID for `purpose` (version 4 of RFC 4122, by its fixed bits).
    pub fn uuid(&self, purpose: &str) -> [u8; 16] {
        let derived = self.derive(purpose);
        let mut bytes: [u8; 16] = std::array::from_fn(|index| derived[index]);
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        bytes
    }

    /// The secret as text, to be put only where nobody else can read it.
    pub fn reveal(&self) -> String {
        hex(&self.0)
    }
}

/// A UUID as it is written.
pub fn uuid_text(bytes: [u8; 16]) -> String {
    let hex = hex(&bytes);
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(not shown)")
    }
}

/// A text is not a secret of 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a secret has 64 hexadecimal digits")]
pub struct NotASecret;

impl FromStr for Secret {
    type Err = NotASecret;

    fn from_str(text: &str) -> Result<Secret, NotASecret> {
        if text.len() != 64 || !text.is_ascii() {
            return Err(NotASecret);
        }
        let mut bytes = [0; 32];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).map_err(|_| NotASecret)?;
        }
        Ok(Secret(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_survives_its_text_and_is_not_shown() {
        let secret = Secret::new().unwrap();
        assert_eq!(secret.reveal().parse::<Secret>().unwrap(), secret);
        assert!(!format!("{secret:?}").contains(&secret.reveal()[..8]));
        assert_ne!(secret, Secret::new().unwrap());
        assert_ne!(secret.password("a"), secret.password("b"));
        assert_ne!(secret.for_clients(), secret);
        for bad in ["", "00", &"g".repeat(64), &"é".repeat(32)] {
            assert!(bad.parse::<Secret>().is_err());
        }
    }
}
