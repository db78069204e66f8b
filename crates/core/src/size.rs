//! Sizes and rates, as people write them and as the code counts them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::text::plain;

/// A number of bytes.
///
/// `K`, `M`, `G`, `T`, `P` and `KiB` … `PiB` are powers of 1024, as for tmpfs and Slurm;
/// `KB` … `PB` are powers of 1000. Letters may be of either case, fractions are allowed (`1.5GiB`).
///
/// ```
/// use ondeck_core::Bytes;
/// assert_eq!("4GiB".parse(), Ok(Bytes(4 << 30)));
/// assert_eq!("500MB".parse(), Ok(Bytes(500_000_000)));
/// assert_eq!(Bytes(1536 << 20).to_string(), "1.5 GiB");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// Why a text is not a size, a rate or a duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{}` is not a {what}: {why}; write it like {example}", plain(text, 120))]
pub struct ParseError {
    pub(crate) text: String,
    pub(crate) what: &'static str,
    pub(crate) why: &'static str,
    pub(crate) example: &'static str,
}

impl Bytes {
    /// Nothing at all.
    pub const ZERO: Bytes = Bytes(0);

    /// `self + other`, at most `u64::MAX`.
    pub fn saturating_add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0))
    }

    /// `self - other`, at least zero.
    pub fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// The smallest multiple of `unit` that holds this size; `unit` must not be zero.
    pub fn round_up_to(self, unit: Bytes) -> Bytes {
        Bytes(self.0.div_ceil(unit.0).saturating_mul(unit.0))
    }
}

impl fmt::Display for Bytes {
    /// Powers of 1024 with at most one decimal, which is what fits a progress line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1023.95 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let text = format!("{value:.1}");
        write!(f, "{} {}", text.strip_suffix(".0").unwrap_or(&text), UNITS[unit])
    }
}

impl FromStr for Bytes {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        parse_bytes(text).map(Bytes).map_err(|why| ParseError {
            text: text.to_owned(),
            what: "size",
            why,
            example: "4GiB, 500MB or 1.5T",
        })
    }
}

fn parse_bytes(text: &str) -> Result<u64, &'static str> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "p" | "pib" => 1 << 50,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "pb" => 1_000_000_000_000_000,
        _ => return Err("the unit is not known"),
    };
    if number.is_empty() {
        return Err("the number is missing");
    }
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor).ok_or("it is too large");
    }
    if number.bytes().all(|b| b.is_ascii_digit()) {
        return Err("it is too large");
    }
    let value: f64 = number.parse().map_err(|_| "the number is malformed")?;
    let bytes = value * factor as f64;
    // 2^64 as f64 is exact; anything from there on does not fit.
    if bytes >= 18_446_744_073_709_551_616.0 { Err("it is too large") } else { Ok(bytes as u64) }
}

/// Bytes in a second.
///
/// ```
/// use ondeck_core::{Bytes, Rate};
/// assert_eq!("500MB/s".parse(), Ok(Rate(Bytes(500_000_000))));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Rate(pub Bytes);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/s", self.0)
    }
}

impl FromStr for Rate {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let error =
            |why| ParseError { text: text.to_owned(), what: "rate", why, example: "500MB/s or 1GiB/s" };
        let trimmed = text.trim();
        let size = trimmed.strip_suffix("/s").unwrap_or(trimmed);
        match parse_bytes(size).map_err(error)? {
            0 => Err(error("nothing would ever be copied")),
            bytes => Ok(Rate(Bytes(bytes))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_a_power_of_1024_unless_it_ends_in_b_alone() {
        assert_eq!("1k".parse(), Ok(Bytes(1024)));
        assert_eq!("1KiB".parse(), Ok(Bytes(1024)));
        assert_eq!("1KB".parse(), Ok(Bytes(1000)));
        assert_eq!(" 2.5 G ".parse(), Ok(Bytes(5 << 29)));
        assert_eq!("0".parse(), Ok(Bytes(0)));
    }

    #[test]
    fn what_is_not_a_size_is_refused_with_the_reason() {
        for bad in [
            "",
            "GiB",
            "4 giraffes",
            "-1G",
            "1..5G",
            "99999999999999999999",
            "18446744073709551616",
            "1e9",
            "20000P",
        ] {
            let error = bad.parse::<Bytes>().unwrap_err().to_string();
            assert!(error.contains("write it like"), "{bad}: {error}");
        }
        assert_eq!("18446744073709551615".parse(), Ok(Bytes(u64::MAX)));
    }

    #[test]
    fn a_size_is_printed_with_one_decimal_at_most() {
        assert_eq!(Bytes(0).to_string(), "0 B");
        assert_eq!(Bytes(1023).to_string(), "1023 B");
        assert_eq!(Bytes(1024).to_string(), "1 KiB");
        assert_eq!(Bytes((1 << 20) - 1).to_string(), "1 MiB");
        assert_eq!(Bytes(u64::MAX).to_string(), "16 EiB");
    }

    #[test]
    fn a_rate_of_zero_is_refused() {
        assert!("0MB/s".parse::<Rate>().is_err());
        assert_eq!("1k".parse(), Ok(Rate(Bytes(1024))));
    }
}
