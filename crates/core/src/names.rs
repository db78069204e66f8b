//! The names of RAM disks and nodes, and the incarnations of a RAM disk.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Why a text can't be a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` can't be the name of {what}: {why}")]
pub struct NameError {
    text: String,
    what: &'static str,
    why: &'static str,
}

macro_rules! name_type {
    ($(#[$meta:meta])* $name:ident, $what:literal, $longest:literal, $first:expr, $rest:expr, $why:literal) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = NameError;

            fn from_str(text: &str) -> Result<Self, NameError> {
                let first: fn(u8) -> bool = $first;
                let rest: fn(u8) -> bool = $rest;
                let ok = text.len() <= $longest
                    && text.bytes().next().is_some_and(first)
                    && text.bytes().all(rest);
                if ok {
                    Ok($name(text.to_owned()))
                } else {
                    Err(NameError { text: text.to_owned(), what: $what, why: $why })
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;

            fn try_from(text: String) -> Result<Self, NameError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }
    };
}

name_type! {
    /// The name of a RAM disk. It becomes part of paths and of an engine's own names, so it is short and plain.
    RamDiskName, "a RAM disk", 48,
    |c| c.is_ascii_alphanumeric(),
    |c| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.'),
    "use at most 48 letters, digits, `-`, `_` and `.`, beginning with a letter or digit"
}

name_type! {
    /// The name of a node, as its host name says it.
    NodeName, "a node", 253,
    |c| c.is_ascii_alphanumeric(),
    |c| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'.' | b'_'),
    "use letters, digits, `-`, `_` and `.`, beginning with a letter or digit"
}

/// The incarnation of a RAM disk. A later one has a greater number, and whoever still holds an earlier one is refused.
///
/// Microseconds since 1970 at creation: greater than every earlier one without anything that has to be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Epoch {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Epoch)
    }
}

/// One incarnation of a RAM disk: what every task of an agent names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RamDiskId {
    /// What people call it.
    pub name: RamDiskName,
    /// Which of those that had the name: a later one is greater.
    pub epoch: Epoch,
}

impl fmt::Display for RamDiskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.name, self.epoch)
    }
}

impl FromStr for RamDiskId {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let malformed =
            || NameError { text: text.to_owned(), what: "an incarnation", why: "it is written NAME@EPOCH" };
        let (name, epoch) = text.rsplit_once('@').ok_or_else(malformed)?;
        Ok(RamDiskId { name: name.parse()?, epoch: epoch.parse().map_err(|_| malformed())? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain() {
        for good in ["a", "job-42", "A.b_c", "7"] {
            assert_eq!(good.parse::<RamDiskName>().unwrap().as_str(), good);
        }
        for bad in ["", ".", "..", "-a", "a/b", "a b", "a@b", "ä", &"x".repeat(49)] {
            assert!(bad.parse::<RamDiskName>().is_err(), "{bad}");
        }
        let id: RamDiskId = "job-1@17".parse().unwrap();
        assert_eq!((id.name.as_str(), id.epoch), ("job-1", Epoch(17)));
        assert_eq!(id.to_string().parse::<RamDiskId>(), Ok(id));
        for bad in ["job", "job@", "job@x", "@1", "a/b@1"] {
            assert!(bad.parse::<RamDiskId>().is_err(), "{bad}");
        }
    }
}
