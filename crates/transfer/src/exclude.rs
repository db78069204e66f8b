//! What is left out of a copy.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;

use fast_glob::glob_match;
use rustix::fs::{self, AtFlags, FileType, RawDirEntry};

/// Glob patterns of what is left out: `*`, `?`, `[...]`, `{a,b}` and `**`.
///
/// A pattern without a slash matches a name at any depth; one with a slash matches the path from the root of the
/// copy; one with a slash at its end matches directories only; one with a `!` at its beginning matches what the rest does
/// not. A directory that matches is left out with all it holds.
/// What is left out of the source is also left alone in the target, whatever else is deleted there.
#[derive(Clone, Debug, Default)]
pub struct Exclude {
    names: Vec<Pattern>,
    paths: Vec<Pattern>,
    exact: Vec<Vec<u8>>,
}

#[derive(Clone, Debug)]
struct Pattern {
    glob: Vec<u8>,
    directories_only: bool,
    negated: bool,
}

impl Pattern {
    fn matches(&self, text: &[u8], is_directory: bool) -> bool {
        (is_directory || !self.directories_only) && glob_match(&self.glob, text) != self.negated
    }
}

/// A pattern that matches nothing, or not what its author thinks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the pattern `{}` can't match anything: {why}", OsStr::from_bytes(pattern).display())]
pub struct PatternError {
    /// The pattern, as it was given.
    pub pattern: Vec<u8>,
    why: &'static str,
}

/// What is wrong with a glob, if anything.
fn fault(glob: &[u8]) -> Option<&'static str> {
    let (mut braces, mut at) = (0, 0);
    while let Some(byte) = glob.get(at) {
        match byte {
            b'\\' if at + 1 == glob.len() => return Some("a backslash at its end"),
            b'\\' => at += 1,
            b'[' => {
                // The first of a class may be `]`, also behind the `!` or `^` that negates it.
                let first = at + 1 + usize::from(matches!(glob.get(at + 1), Some(b'!' | b'^')));
                let end = glob.iter().skip(first + 1).position(|byte| *byte == b']');
                match end {
                    Some(end) => at = first + 1 + end,
                    None => return Some("`[` without `]`; write `\\[` for the character"),
                }
            }
            b'{' => braces += 1,
            b'}' if braces > 0 => braces -= 1,
            _ => {}
        }
        at += 1;
    }
    (braces > 0).then_some("`{` without `}`; write `\\{` for the character")
}

impl Exclude {
    /// Sorts the patterns by what they are matched with.
    ///
    /// # Errors
    /// [`PatternError`] for the first that can't match anything.
    pub fn new<P: AsRef<[u8]>>(patterns: impl IntoIterator<Item = P>) -> Result<Self, PatternError> {
        let mut exclude = Exclude::default();
        for given in patterns {
            let given = given.as_ref();
            let wrong = |why| PatternError { pattern: given.to_vec(), why };
            let (mut pattern, mut negated) = (given, false);
            while let Some(rest) = pattern.strip_prefix(b"!") {
                (pattern, negated) = (rest, !negated);
            }
            let (pattern, directories_only) = match pattern.strip_suffix(b"/") {
                Some(directory) => (directory, true),
                None => (pattern, false),
            };
            let anchored = pattern.strip_prefix(b"/");
            let glob = anchored.unwrap_or(pattern);
            let mut parts = glob.split(|byte| *byte == b'/');
            if let Some(part) = parts.find(|part| matches!(*part, b"" | b"." | b"..")) {
                return Err(wrong(match part {
                    b"" => "a name in it is empty",
                    _ => "it is matched with paths from the root of the copy, which have no `.` and `..`",
                }));
            }
            if let Some(why) = fault(glob) {
                return Err(wrong(why));
            }
            let list = if pattern.contains(&b'/') { &mut exclude.paths } else { &mut exclude.names };
            list.push(Pattern { glob: glob.to_vec(), directories_only, negated });
        }
        Ok(exclude)
    }

    /// Leaves out these paths, taken literally.
    pub fn exactly(paths: impl IntoIterator<Item = Vec<u8>>) -> Self {
        Exclude { exact: paths.into_iter().collect(), ..Exclude::default() }
    }

    /// Whether nothing is left out.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty() && self.paths.is_empty() && self.exact.is_empty()
    }

    /// Whether the entry `name` of the directory `parent` (relative to the root, empty for it) is left out.
    pub fn matches(&self, parent: &[u8], name: &[u8], is_directory: bool) -> bool {
        self.names.iter().any(|pattern| pattern.matches(name, is_directory))
            || (!(self.paths.is_empty() && self.exact.is_empty()) && {
                let path = crate::dir::join(parent, name);
                self.exact.contains(&path)
                    || self.paths.iter().any(|pattern| pattern.matches(&path, is_directory))
            })
    }

    /// The same of an entry as it was listed.
    pub(crate) fn matches_listed(
        &self,
        parent: &[u8],
        directory: impl AsFd,
        entry: &RawDirEntry<'_>,
    ) -> bool {
        if self.is_empty() {
            return false;
        }
        let name = entry.file_name();
        let is_directory = match entry.file_type() {
            // Some filesystems don't say it in their lists.
            FileType::Unknown => fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
                .is_ok_and(|stat| crate::attributes::is_directory(&stat)),
            kind => kind == FileType::Directory,
        };
        self.matches(parent, name.to_bytes(), is_directory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_without_a_slash_matches_a_name_at_any_depth() {
        let exclude = Exclude::new(["*.o", "core.[0-9]*"]).unwrap();
        assert!(exclude.matches(b"", b"a.o", false) && exclude.matches(b"x/y", b"core.12", true));
        assert!(!exclude.matches(b"x", b"a.c", false));
    }

    #[test]
    fn a_pattern_with_a_slash_matches_from_the_root() {
        let exclude = Exclude::new(["/build", "docs/*.pdf", "a/**/z"]).unwrap();
        assert!(exclude.matches(b"", b"build", true) && !exclude.matches(b"src", b"build", true));
        assert!(exclude.matches(b"docs", b"x.pdf", false) && !exclude.matches(b"docs/sub", b"x.pdf", false));
        assert!(exclude.matches(b"a/b/c", b"z", false));
    }

    #[test]
    fn a_pattern_with_a_slash_at_its_end_matches_directories_only() {
        let exclude = Exclude::new(["cache/", "/build/", "a/b*/"]).unwrap();
        for (parent, name) in [("", "cache"), ("x/y", "cache"), ("", "build"), ("a", "bc")] {
            let matches = |is_directory| exclude.matches(parent.as_bytes(), name.as_bytes(), is_directory);
            assert!(matches(true) && !matches(false), "{parent}/{name}");
        }
        assert!(!exclude.matches(b"x", b"build", true));
    }

    #[test]
    fn a_pattern_with_an_exclamation_mark_matches_what_the_rest_does_not() {
        let exclude = Exclude::new(["!*.dat"]).unwrap();
        assert!(exclude.matches(b"x", b"a.txt", false) && !exclude.matches(b"x", b"a.dat", false));
        let exclude = Exclude::new(["!/keep/*"]).unwrap();
        assert!(exclude.matches(b"", b"other", true) && !exclude.matches(b"keep", b"a", false));
        assert!(Exclude::new(["!!*.dat"]).unwrap().matches(b"", b"a.dat", false));
        assert!(Exclude::new(["\\!a"]).unwrap().matches(b"", b"!a", false));
    }

    #[test]
    fn a_pattern_that_can_not_match_anything_is_refused() {
        for wrong in
            ["", "/", "!", "[", "a[b", "[]", "[!]", "{a", "a\\", "./b", "a/../b", "a//b", "a/.", "b//"]
        {
            let error = Exclude::new(["fine", wrong]).unwrap_err();
            assert_eq!(error.pattern, wrong.as_bytes());
        }
        for fine in
            ["[]]", "[!]]", "[a-c]", "{a,b}", "a}", "]", "**", "a/**", ".*", "...", "\\[", "a\\{b", "..a/b"]
        {
            assert!(Exclude::new([fine]).is_ok(), "{fine}");
        }
    }
}
