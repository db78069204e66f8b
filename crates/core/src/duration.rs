//! Durations as people write them: `300` (seconds), `90s`, `5m`, `1h30m`, `2d`.

use std::time::Duration;

use crate::size::ParseError;

/// Parses `300`, `90s`, `5m`, `1h30m`, `2d`; a bare number is in `bare_unit` seconds.
///
/// # Errors
/// [`ParseError`] for an unknown unit, a missing number, or more than a hundred years.
///
/// ```
/// use std::time::Duration;
/// assert_eq!(ondeck_core::duration::parse("1h30m", 1), Ok(Duration::from_secs(5400)));
/// assert_eq!(ondeck_core::duration::parse("5", 60), Ok(Duration::from_secs(300)));
/// ```
pub fn parse(text: &str, bare_unit: u64) -> Result<Duration, ParseError> {
    const HUNDRED_YEARS: u64 = 100 * 366 * 86_400;
    let error =
        |why| ParseError { text: text.to_owned(), what: "duration", why, example: "90s, 5m or 1h30m" };
    let trimmed = text.trim();
    let mut rest = trimmed;
    let mut seconds: u64 = 0;
    if rest.is_empty() {
        return Err(error("it is empty"));
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let number: u64 = rest[..digits]
            .parse()
            .map_err(|_| error("the number is missing, too large or no whole number"))?;
        rest = &rest[digits..];
        let letters = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let factor = match rest[..letters].trim() {
            "" if digits == trimmed.len() => bare_unit,
            "s" | "sec" => 1,
            "m" | "min" => 60,
            "h" => 3_600,
            "d" => 86_400,
            _ => return Err(error("the unit is not known")),
        };
        rest = &rest[letters..];
        seconds = number
            .checked_mul(factor)
            .and_then(|part| seconds.checked_add(part))
            .filter(|total| *total <= HUNDRED_YEARS)
            .ok_or_else(|| error("it is longer than a hundred years"))?;
    }
    Ok(Duration::from_secs(seconds))
}

/// A duration for a line that people read: `0.42 s`, `37.1 s`, `12 min 5 s`, `3 h 4 min`.
pub fn display(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..10 => format!("{:.2} s", duration.as_secs_f64()),
        10..120 => format!("{:.1} s", duration.as_secs_f64()),
        120..7_200 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3_600, seconds % 3_600 / 60),
    }
}

/// A limit as somebody has set it, in the largest unit that it is a multiple of: `24 h`, `10 min`, `90 s`, `1.5 s`.
pub fn limit(limit: Duration) -> String {
    match limit.as_secs() {
        seconds if limit.subsec_nanos() > 0 || seconds % 60 > 0 || seconds == 0 => {
            format!("{} s", limit.as_secs_f64())
        }
        seconds if seconds % 3_600 > 0 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_shown_in_its_own_unit() {
        let shown = [0, 500, 90_000, 600_000, 86_400_000].map(|ms| limit(Duration::from_millis(ms)));
        assert_eq!(shown, ["0 s", "0.5 s", "90 s", "10 min", "24 h"]);
    }

    #[test]
    fn parts_add_up_and_a_bare_number_has_the_unit_of_its_option() {
        assert_eq!(parse("1d2h3m4s", 1), Ok(Duration::from_secs(93_784)));
        assert_eq!(parse("7", 60), Ok(Duration::from_secs(420)));
        assert_eq!(parse("0", 1), Ok(Duration::ZERO));
    }

    #[test]
    fn what_is_not_a_duration_is_refused() {
        for bad in ["", "m", "5 parsecs", "1h30", "-5m", "99999999999999999999s", "200000d"] {
            assert!(parse(bad, 1).is_err(), "{bad}");
        }
    }
}
