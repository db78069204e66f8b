//! What is left out of a copy.

use std::os::fd::AsFd;

use fast_glob::glob_match;
use rustix::fs::{self, AtFlags, FileType, RawDirEntry};

/// Glob patterns of what is left out: `*`, `?`, `[...]`, `{a,b}` and `**`.
///
/// A pattern without a slash matches a name at any depth; one with a slash matches the path from the root of the
/// copy; one with a slash at its end matches directories only. A directory that matches is left out with all it holds.
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
}

impl Pattern {
    fn matches(&self, text: &[u8], is_directory: bool) -> bool {
        (is_directory || !self.directories_only) && glob_match(&self.glob, text)
    }
}

impl Exclude {
    /// Sorts the patterns by what they are matched with.
    pub fn new<P: AsRef<[u8]>>(patterns: impl IntoIterator<Item = P>) -> Self {
        let mut exclude = Exclude::default();
        for pattern in patterns {
            let pattern = pattern.as_ref();
            let (pattern, directories_only) = match pattern.strip_suffix(b"/") {
                Some(directory) => (directory, true),
                None => (pattern, false),
            };
            let anchored = pattern.strip_prefix(b"/");
            let list = if pattern.contains(&b'/') { &mut exclude.paths } else { &mut exclude.names };
            list.push(Pattern { glob: anchored.unwrap_or(pattern).to_vec(), directories_only });
        }
        exclude
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
        let exclude = Exclude::new(["*.o", "core.[0-9]*"]);
        assert!(exclude.matches(b"", b"a.o", false) && exclude.matches(b"x/y", b"core.12", true));
        assert!(!exclude.matches(b"x", b"a.c", false));
    }

    #[test]
    fn a_pattern_with_a_slash_matches_from_the_root() {
        let exclude = Exclude::new(["/build", "docs/*.pdf", "a/**/z"]);
        assert!(exclude.matches(b"", b"build", true) && !exclude.matches(b"src", b"build", true));
        assert!(exclude.matches(b"docs", b"x.pdf", false) && !exclude.matches(b"docs/sub", b"x.pdf", false));
        assert!(exclude.matches(b"a/b/c", b"z", false));
    }

    #[test]
    fn a_pattern_with_a_slash_at_its_end_matches_directories_only() {
        let exclude = Exclude::new(["cache/", "/build/", "a/b*/"]);
        for (parent, name) in [("", "cache"), ("x/y", "cache"), ("", "build"), ("a", "bc")] {
            let matches = |is_directory| exclude.matches(parent.as_bytes(), name.as_bytes(), is_directory);
            assert!(matches(true) && !matches(false), "{parent}/{name}");
        }
        assert!(!exclude.matches(b"x", b"build", true));
    }
}
