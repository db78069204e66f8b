//! Sizes as people write them: `512KiB`, `4GiB`, `1048576`.

use anyhow::{Context, Result, bail};

/// 2^10 bytes.
pub const KIB: u64 = 1 << 10;
/// 2^20 bytes.
pub const MIB: u64 = 1 << 20;
/// 2^30 bytes.
pub const GIB: u64 = 1 << 30;

/// Reads a whole number with an optional binary unit. `4G`, `4GB` and `4GiB` all mean 4 x 2^30
/// bytes, as in `ondeck --size`.
pub fn parse(text: &str) -> Result<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit());
    let (number, unit) = text.split_at(digits.unwrap_or(text.len()));
    let number: u64 =
        number.parse().with_context(|| format!("'{text}' is not a size; write for example 512KiB"))?;
    let factor = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => KIB,
        "m" | "mb" | "mib" => MIB,
        "g" | "gb" | "gib" => GIB,
        other => bail!("'{other}' is not a unit of size; use KiB, MiB or GiB"),
    };
    number.checked_mul(factor).with_context(|| format!("'{text}' is too large"))
}

/// Three figures and a binary unit, for a person.
pub fn show(bytes: u64) -> String {
    let (value, unit) = match bytes {
        GIB.. => (bytes as f64 / GIB as f64, "GiB"),
        MIB.. => (bytes as f64 / MIB as f64, "MiB"),
        KIB.. => (bytes as f64 / KIB as f64, "KiB"),
        _ => return format!("{bytes} B"),
    };
    if value >= 100.0 || value.fract() == 0.0 {
        format!("{value:.0} {unit}")
    } else {
        format!("{value:.1} {unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_binary_whatever_their_spelling() {
        assert_eq!(parse("512KiB").unwrap(), 512 * KIB);
        assert_eq!(parse("4g").unwrap(), 4 * GIB);
        assert_eq!(parse(" 7 MB ").unwrap(), 7 * MIB);
        assert_eq!(parse("1048576").unwrap(), MIB);
    }

    #[test]
    fn what_is_not_a_size_is_refused() {
        for text in ["", "GiB", "4 parsecs", "-1", "99999999999GiB"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_in_their_largest_unit() {
        assert_eq!(show(4 * GIB), "4 GiB");
        assert_eq!(show(1536 * KIB), "1.5 MiB");
        assert_eq!(show(12), "12 B");
    }
}
