//! What is left out of a copy.

use fast_glob::glob_match;

/// Glob patterns of what is left out: `*`, `?`, `[...]`, `{a,b}` and `**`.
///
/// A pattern without a slash matches a name at any depth; one with a slash matches the path from the root of the
/// copy. A directory that matches is left out with all it holds. What is left out of the source is also left
/// alone in the target, whatever else is deleted there.
#[derive(Clone, Debug, Default)]
pub struct Exclude {
    names: Vec<Vec<u8>>,
    paths: Vec<Vec<u8>>,
    exact: Vec<Vec<u8>>,
}

impl Exclude {
    /// Sorts the patterns by what they are matched with.
    pub fn new<P: AsRef<[u8]>>(patterns: impl IntoIterator<Item = P>) -> Self {
        let mut exclude = Exclude::default();
        for pattern in patterns {
            let pattern = pattern.as_ref();
            let pattern = pattern.strip_suffix(b"/").unwrap_or(pattern);
            match pattern.strip_prefix(b"/") {
                Some(anchored) => exclude.paths.push(anchored.to_vec()),
                None if pattern.contains(&b'/') => exclude.paths.push(pattern.to_vec()),
                None => exclude.names.push(pattern.to_vec()),
            }
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
    pub fn matches(&self, parent: &[u8], name: &[u8]) -> bool {
        self.names.iter().any(|pattern| glob_match(pattern, name))
            || (!(self.paths.is_empty() && self.exact.is_empty()) && {
                let path = crate::dir::join(parent, name);
                self.exact.contains(&path) || self.paths.iter().any(|pattern| glob_match(pattern, &path))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_without_a_slash_matches_a_name_at_any_depth() {
        let exclude = Exclude::new(["*.o", "core.[0-9]*"]);
        assert!(exclude.matches(b"", b"a.o") && exclude.matches(b"x/y", b"core.12"));
        assert!(!exclude.matches(b"x", b"a.c"));
    }

    #[test]
    fn a_pattern_with_a_slash_matches_from_the_root() {
        let exclude = Exclude::new(["/build", "docs/*.pdf", "a/**/z"]);
        assert!(exclude.matches(b"", b"build") && !exclude.matches(b"src", b"build"));
        assert!(exclude.matches(b"docs", b"x.pdf") && !exclude.matches(b"docs/sub", b"x.pdf"));
        assert!(exclude.matches(b"a/b/c", b"z"));
    }
}
