//! Slurm's short form of many node names: `c[1-3,07-09],x` is c1, c2, c3, c07, c08, c09 and x.
//!
//! A name may hold several brackets (`r[1-2]n[1-4]`); the last one counts fastest. A range keeps the width of its
//! lower end: `08-10` is 08, 09, 10 (hostlist of slurm.conf(5), Slurm 22.05).

/// Why a text is not a list of node names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a list of nodes: {why}")]
pub struct HostlistError {
    text: String,
    why: &'static str,
}

/// More digits than any number of a node has, and few enough for a `u64`.
const MOST_DIGITS: usize = 18;

/// Every name of `text`, in its order. An empty text has none.
///
/// # Errors
/// [`HostlistError`] if brackets or ranges are malformed, or if there would be more than `most` names: a range is
/// short to write and long to expand.
///
/// ```
/// let names = ondeck_wlm::hostlist::expand("c[1-2,09],x", 100).unwrap();
/// assert_eq!(names, ["c1", "c2", "c09", "x"]);
/// ```
pub fn expand(text: &str, most: usize) -> Result<Vec<String>, HostlistError> {
    let mut names = Vec::new();
    if text.is_empty() {
        return Ok(names);
    }
    split_outside_brackets(text)
        .and_then(|items| {
            for item in items {
                let room = most - names.len();
                names.extend(expand_item(item, room)?);
            }
            Ok(names)
        })
        .map_err(|why| HostlistError { text: shorten(text), why })
}

/// Splits at the commas that are not in brackets.
fn split_outside_brackets(text: &str) -> Result<Vec<&str>, &'static str> {
    let mut items = Vec::new();
    let (mut start, mut inside) = (0, false);
    for (at, byte) in text.bytes().enumerate() {
        match (byte, inside) {
            (b'[', false) => inside = true,
            (b'[', true) => return Err("a bracket within a bracket"),
            (b']', true) => inside = false,
            (b']', false) => return Err("a bracket is closed that was not opened"),
            (b',', false) => {
                items.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("a bracket is not closed");
    }
    items.push(&text[start..]);
    Ok(items)
}

/// All names of one item, such as `r[1-2]n[1-4]`.
fn expand_item(item: &str, most: usize) -> Result<Vec<String>, &'static str> {
    const TOO_MANY: &str = "it has more names than can be";
    if item.is_empty() {
        return Err("a name is missing between commas");
    }
    let mut names = vec![String::new()];
    let mut rest = item;
    while let Some((before, bracket)) = rest.split_once('[') {
        let (ranges, after) = bracket.split_once(']').ok_or("a bracket is not closed")?;
        let numbers = expand_ranges(ranges, most).ok_or(TOO_MANY)??;
        if names.len().saturating_mul(numbers.len()) > most {
            return Err(TOO_MANY);
        }
        names = names
            .iter()
            .flat_map(|name| numbers.iter().map(move |number| format!("{name}{before}{number}")))
            .collect();
        rest = after;
    }
    if names.len() > most {
        return Err(TOO_MANY);
    }
    for name in &mut names {
        name.push_str(rest);
    }
    Ok(names)
}

/// The numbers of `1-3,07-09`, as they are written; nothing if there are more than `most`.
fn expand_ranges(ranges: &str, most: usize) -> Option<Result<Vec<String>, &'static str>> {
    let mut numbers = Vec::new();
    for range in ranges.split(',') {
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        let (Some(first), Some(last)) = (number(low), number(high)) else {
            return Some(Err("a range is not made of numbers"));
        };
        if first > last {
            return Some(Err("a range runs backwards"));
        }
        if last - first >= (most - numbers.len()) as u64 {
            return None;
        }
        let width = low.len();
        numbers.extend((first..=last).map(|number| format!("{number:0width$}")));
    }
    Some(Ok(numbers))
}

fn number(text: &str) -> Option<u64> {
    let plain = (1..=MOST_DIGITS).contains(&text.len()) && text.bytes().all(|c| c.is_ascii_digit());
    plain.then(|| text.parse().ok()).flatten()
}

fn shorten(text: &str) -> String {
    const MOST: usize = 120;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_list_is_expanded_in_its_order() {
        for (text, names) in [
            ("", vec![]),
            ("x", vec!["x"]),
            ("n[1-4]", vec!["n1", "n2", "n3", "n4"]),
            ("c[1-3,07-09],x", vec!["c1", "c2", "c3", "c07", "c08", "c09", "x"]),
            ("c[08-11]", vec!["c08", "c09", "c10", "c11"]),
            ("r[1-2]n[1-2]", vec!["r1n1", "r1n2", "r2n1", "r2n2"]),
            ("a[1]-ib,b-[2]", vec!["a1-ib", "b-2"]),
        ] {
            assert_eq!(expand(text, 100).unwrap(), names, "{text}");
        }
    }

    #[test]
    fn what_is_not_a_list_is_refused() {
        for text in [
            ",",
            "a,",
            "a[",
            "a]",
            "a[]",
            "a[1",
            "a[1-]",
            "a[-1]",
            "a[x-y]",
            "a[3-1]",
            "a[1[2]]",
            "a[1,]",
            "a[99999999999999999999]",
            "a[+1]",
        ] {
            assert!(expand(text, 100).is_err(), "{text}");
        }
    }

    #[test]
    fn a_list_that_is_too_long_is_refused_before_it_is_expanded() {
        for text in ["n[1-101]", "n[0-999999999999999999]", "n[1-11]m[1-10]", "n[1-100],x", "n[1-60,1-60]"] {
            assert!(expand(text, 100).unwrap_err().to_string().contains("more names"), "{text}");
        }
        assert_eq!(expand("n[1-100]", 100).unwrap().len(), 100);
        assert!(expand("x", 0).is_err());
    }

    proptest! {
        #[test]
        fn ranges_hold_what_was_put_into_them(
            ranges in proptest::collection::vec((0u64..2000, 0u64..50, 1usize..6), 1..6), tail in "[a-z]{0,3}",
        ) {
            let mut written = Vec::new();
            let mut names = Vec::new();
            for (first, more, width) in ranges {
                let last = first + more;
                let low = format!("{first:0width$}");
                let width = low.len();
                written.push(if more == 0 { low } else { format!("{low}-{last:0width$}") });
                names.extend((first..=last).map(|n| format!("node{n:0width$}{tail}")));
            }
            let text = format!("node[{}]{tail}", written.join(","));
            prop_assert_eq!(expand(&text, 1000).unwrap(), names);
        }

        #[test]
        fn no_text_is_expanded_beyond_the_bound(text in "[a-c0-9\\[\\],-]{0,40}", most in 0usize..50) {
            if let Ok(names) = expand(&text, most) {
                prop_assert!(names.len() <= most);
                prop_assert!(names.iter().all(|name| !name.contains(['[', ']', ','])));
            }
        }
    }
}
