//! Simple commands of a shell script, by its text: nothing is run, and no variable is known.

/// The words of a simple command, as a shell takes them apart. Quotes are gone, and what is redirected is left out.
pub(crate) type Command = Vec<String>;

/// What a word stands behind and a command begins after, beside the operators.
const KEYWORDS: [&str; 12] =
    ["if", "then", "else", "elif", "do", "while", "until", "!", "{", "}", "fi", "done"];

/// The simple commands of a script, in the order of its text.
pub(crate) fn commands(text: &str) -> impl Iterator<Item = Command> {
    let mut lexer = Lexer { rest: text, here: Vec::new() };
    std::iter::from_fn(move || lexer.command())
}

struct Lexer<'a> {
    rest: &'a str,
    /// The ends of here-documents that begin at the end of the line.
    here: Vec<String>,
}

impl Lexer<'_> {
    fn command(&mut self) -> Option<Command> {
        let mut words = Command::new();
        while let Some(next) = self.rest.chars().next() {
            match next {
                '\n' => {
                    self.skip(1);
                    self.skip_here_documents();
                    if !words.is_empty() {
                        return Some(words);
                    }
                }
                ';' | '&' | '|' | '(' | ')' => {
                    // `&>` redirects.
                    if self.rest.starts_with("&>") {
                        self.skip(1);
                    } else {
                        self.skip(1);
                        if !words.is_empty() {
                            return Some(words);
                        }
                    }
                }
                '<' | '>' => self.redirect(),
                // A line that goes on.
                '\\' if self.rest.starts_with("\\\n") => self.skip(2),
                '#' => self.skip(self.rest.find('\n').unwrap_or(self.rest.len())),
                next if next.is_whitespace() => self.skip(next.len_utf8()),
                _ => {
                    let (word, is_plain) = self.word();
                    let is_number = word.bytes().all(|byte| byte.is_ascii_digit());
                    if is_plain && is_number && self.rest.starts_with(['<', '>']) {
                        // `2>` is about a descriptor.
                    } else if !(words.is_empty() && is_plain && KEYWORDS.contains(&word.as_str())) {
                        words.push(word);
                    }
                }
            }
        }
        (!words.is_empty()).then_some(words)
    }

    fn skip(&mut self, bytes: usize) {
        self.rest = &self.rest[bytes..];
    }

    /// What is redirected, and where to.
    fn redirect(&mut self) {
        let is_here_document = self.rest.starts_with("<<") && !self.rest.starts_with("<<<");
        let length = self.rest.len() - self.rest.trim_start_matches(['<', '>', '&', '|', '-']).len();
        self.skip(length);
        let blanks = self.rest.len() - self.rest.trim_start_matches([' ', '\t']).len();
        self.skip(blanks);
        // `<(...)` is a command's output.
        if self.rest.starts_with('(') {
            return self.skip_group();
        }
        if self.rest.starts_with(['\n', ';', '|', ')']) {
            return;
        }
        let (target, _) = self.word();
        if is_here_document {
            self.here.push(target);
        }
    }

    /// What stands in here-documents is no command.
    fn skip_here_documents(&mut self) {
        for end in std::mem::take(&mut self.here) {
            while !self.rest.is_empty() {
                let line = self.rest.split('\n').next().unwrap_or_default();
                let is_end = line.trim_start_matches('\t') == end;
                self.skip((line.len() + 1).min(self.rest.len()));
                if is_end {
                    break;
                }
            }
        }
    }

    /// A word, and whether nothing of it was quoted.
    fn word(&mut self) -> (String, bool) {
        let (mut word, mut is_plain) = (String::new(), true);
        while let Some(next) = self.rest.chars().next() {
            match next {
                '\'' | '"' => {
                    is_plain = false;
                    self.skip(1);
                    self.quoted(next, &mut word);
                }
                '\\' => {
                    is_plain = false;
                    self.skip(1);
                    // A line that goes on.
                    let escaped = self.rest.chars().next();
                    word.extend(escaped.filter(|escaped| *escaped != '\n'));
                    self.skip(escaped.map_or(0, char::len_utf8));
                }
                '$' if self.rest.starts_with("$(") => {
                    word.push('$');
                    self.skip(1);
                    self.skip_group();
                }
                ';' | '&' | '|' | '(' | ')' | '<' | '>' => break,
                next if next.is_whitespace() => break,
                next => {
                    word.push(next);
                    self.skip(next.len_utf8());
                }
            }
        }
        (word, is_plain)
    }

    /// What stands in quotes, of which the first is gone.
    fn quoted(&mut self, quote: char, word: &mut String) {
        while let Some(next) = self.rest.chars().next() {
            self.skip(next.len_utf8());
            match next {
                next if next == quote => return,
                '\\' if quote == '"' => {
                    let escaped = self.rest.chars().next();
                    word.extend(escaped.filter(|escaped| *escaped != '\n'));
                    self.skip(escaped.map_or(0, char::len_utf8));
                }
                next => word.push(next),
            }
        }
    }

    /// From a bracket to the one that closes it.
    fn skip_group(&mut self) {
        let mut depth = 0_usize;
        while let Some(next) = self.rest.chars().next() {
            self.skip(next.len_utf8());
            match next {
                '(' => depth += 1,
                ')' if depth <= 1 => return,
                ')' => depth -= 1,
                '\'' | '"' => self.quoted(next, &mut String::new()),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_script_is_taken_apart_as_a_shell_does() {
        for (script, expected) in [
            ("a b;c d", "a b|c d"),
            ("a&&b||c|d&\n(e)", "a|b|c|d|e"),
            ("if a; then b; else c; fi", "a|b|c"),
            ("while ! a; do b; done", "a|b"),
            ("run() { srun \"$@\"; }\nrun x", "run|srun $@|run x"),
            ("a>o 2>&1 <i b", "a b"),
            ("a &>o b", "a b"),
            ("a 2 > o", "a 2"),
            ("a 'b c'\"d\\\"e\" \\f", "a b cd\"e f"),
            ("a \\\n  b", "a b"),
            ("a # b; c\n# d\ne#f", "a|e#f"),
            ("a $(b; c d) ${e}", "a $ ${e}"),
            ("cat <<EOF\nsrun x\nEOF\nb", "cat|b"),
            ("cat <<-'E F' >o\nsrun x\n\tE F\nb", "cat|b"),
            ("a <<<b c", "a c"),
            ("diff <(a b) <(c) d", "diff d"),
            ("case $x in a) b;; esac", "case $x in a|b|esac"),
            ("a 'b", "a b"),
            ("a $(b", "a $"),
            ("\\", ""),
            (" \n;;\n", ""),
        ] {
            let found: Vec<String> = commands(script).map(|words| words.join(" ")).collect();
            assert_eq!(found.join("|"), expected, "{script}");
        }
    }

    proptest! {
        #[test]
        fn any_text_comes_to_an_end(text in "([a-z$ \n;&|(){}<>'\"\\\\#é-]|<<E|\nE\n){0,60}") {
            let words: usize = commands(&text).map(|words| words.len()).sum();
            prop_assert!(words <= text.len());
        }
    }
}
