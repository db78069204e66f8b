//! Texts that somebody else wrote, made fit for a terminal and for a line of a log.

/// Enough of a text for a message.
pub const MESSAGE: usize = 4000;

/// One line of at most `most` characters and an ellipsis. A control character could move the cursor, rename a window
/// or begin a line of its own in a log; a mark of direction could show letters in another order. Breaks of lines and
/// tabs become blanks, all else that is not to be seen becomes `?`.
///
/// ```
/// use ondeck_core::text::plain;
/// assert_eq!(plain("no\nroom \u{1b}[2J", 80), "no room ?[2J");
/// assert_eq!(plain("four letters", 4), "four…");
/// ```
pub fn plain(text: &str, most: usize) -> String {
    let seen = |c| match c {
        '\n' | '\r' | '\t' | '\u{2028}' | '\u{2029}' => ' ',
        // Marks, embeddings, overrides and isolates of direction.
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => '?',
        c if c.is_control() => '?',
        c => c,
    };
    let mut rest = text.chars();
    let mut line: String = rest.by_ref().take(most).map(seen).collect();
    if rest.next().is_some() {
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_not_there_any_more() {
        let hostile = "a\u{1b}]0;title\u{7}\r\nb\u{9b}31m\u{7f}\u{0}\u{202e}\u{2028}é";
        assert_eq!(plain(hostile, 80), "a?]0;title?  b?31m??? é");
        assert!(plain(hostile, 80).chars().all(|c| !c.is_control()));
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        assert_eq!(plain(&"é".repeat(5), 5), "é".repeat(5));
        assert_eq!(plain(&"é".repeat(6), 5), "é".repeat(5) + "…");
    }
}
