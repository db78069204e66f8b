//! docs/specification.md: every promise names what checks it, or is pending with a reason; and what it names exists.
//!
//! The last column of a table names files (`run.rs`, `crates/core/src/text.rs`, `endings` for `endings.rs`), the tests in
//! the file that was named last (`a_program_finds_…`: whole, or their beginning), and goals of the Makefile.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

/// Below these, in this order, a file is looked for that is named without its directory.
const TESTS: [&str; 3] = ["tests/tests", "crates", "bench"];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

#[test]
fn every_promise_names_a_test_that_exists_or_is_pending() {
    let text = fs::read_to_string(workspace().join("docs/specification.md")).unwrap();
    let makefile = fs::read_to_string(workspace().join("Makefile")).unwrap();
    let sources = Sources::read(&workspace());
    let mut wrong = Vec::new();
    let mut promises = 0;
    let mut directory = None;
    for (index, line) in text.lines().enumerate() {
        let Some(row) = line.strip_prefix("| ") else { continue };
        let (promise, checked) = row.trim_end_matches('|').split_once(" | ").unwrap_or((row, ""));
        if promise == "promise" {
            directory = spans(checked).next().map(|path| workspace().join(path));
            continue;
        }
        promises += 1;
        let number = index + 1;
        wrong.extend(
            faults(checked, directory.as_deref(), &sources, &makefile)
                .into_iter()
                .map(|fault| format!("docs/specification.md:{number}: {fault}")),
        );
    }
    assert!(promises > 100, "only {promises} promises were found: has the form of the tables changed?");
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn a_test_that_is_not_there_is_noticed() {
    let sources = Sources {
        files: vec![(
            PathBuf::from("/w/tests/tests/slurm/endings.rs"),
            "#[test]\nfn a_job_ends() {}\n#[tokio::test]\nasync fn another_one() {}\nfn a_helper() {}\n\
             proptest! {\n    #[test]\n    fn of_all_kinds(\n"
                .to_owned(),
        )],
    };
    let told = |checked| faults(checked, None, &sources, "bench: build\n");
    for good in [
        "`endings` `a_job_ends`",
        "`endings.rs` `a_job_…`, `another_one`, `of_all_kinds`",
        "`make bench` (noisy)",
        "pending: for want of one",
        "`tests/tests/slurm/endings.rs`, all of it",
    ] {
        assert_eq!(told(good), Vec::<String>::new(), "{good}");
    }
    for bad in [
        "",
        "by hand",
        "`endings` `a_job_begins`",
        "`endings` `a_job`",
        "`endings` `another_two_…`",
        "`endings` `a_helper`",
        "`beginnings` `a_job_ends`",
        "`a_job_ends`",
        "`make tea`",
        "`endings` `a job`",
        "pending",
    ] {
        assert_eq!(told(bad).len(), 1, "{bad}: {:?}", told(bad));
    }
}

/// What stands between backquotes.
fn spans(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// All files with tests in them, with their texts.
struct Sources {
    files: Vec<(PathBuf, String)>,
}

impl Sources {
    fn read(workspace: &Path) -> Sources {
        let mut files = Vec::new();
        for directory in TESTS {
            read_below(&workspace.join(directory), &mut files);
        }
        Sources { files }
    }

    /// The files of a name: a path from the workspace's root, or the end of one; a module by the name of its file. If the
    /// section says a directory, its file comes before all others.
    fn named(&self, name: &str, directory: Option<&Path>) -> Vec<&(PathBuf, String)> {
        let file = if name.ends_with(".rs") { name.to_owned() } else { format!("{name}.rs") };
        let within = directory.map(|directory| directory.join(&file));
        let of_section: Vec<_> =
            self.files.iter().filter(|(path, _)| Some(path) == within.as_ref()).collect();
        if of_section.is_empty() {
            self.files.iter().filter(|(path, _)| path.ends_with(&file)).collect()
        } else {
            of_section
        }
    }
}

fn read_below(directory: &Path, files: &mut Vec<(PathBuf, String)>) {
    let mut entries: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            read_below(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            files.push((path, text));
        }
    }
}

/// Whether a text has a test of this name, or one that begins so if it ends with `…`: a function that is marked as one, or
/// listed for the engines that it is made for.
fn has_test(text: &str, name: &str) -> bool {
    let (name, may_go_on) = name.strip_suffix('…').map_or((name, false), |beginning| (beginning, true));
    let mut marked = false;
    text.lines().map(str::trim).any(|line| {
        if line.starts_with("#[") {
            marked |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
            return false;
        }
        let is_marked = std::mem::take(&mut marked);
        let Some(own) =
            line.trim_start_matches("async ").strip_prefix("fn ").and_then(|line| line.split('(').next())
        else {
            return false;
        };
        let is_meant = if may_go_on { own.starts_with(name) } else { own == name };
        is_meant && (is_marked || text.lines().any(|line| line.trim().strip_suffix(',') == Some(own)))
    })
}

fn faults(checked: &str, directory: Option<&Path>, sources: &Sources, makefile: &str) -> Vec<String> {
    if let Some(reason) = checked.strip_prefix("pending") {
        return if reason.trim().is_empty() { vec!["pending, and no reason".into()] } else { Vec::new() };
    }
    let mut faults = Vec::new();
    let mut names_something = false;
    let mut files: Vec<&(PathBuf, String)> = Vec::new();
    for name in spans(checked) {
        names_something = true;
        if let Some(goal) = name.strip_prefix("make ") {
            let is_goal = makefile.lines().any(|line| line.starts_with(&format!("{goal}:")));
            if !is_goal {
                faults.push(format!("the Makefile has no `{goal}`"));
            }
            continue;
        }
        let named = sources.named(name, directory);
        if !named.is_empty() {
            files = named;
        } else if name.ends_with(".rs") || files.is_empty() {
            faults.push(format!("there is no file `{name}`"));
            // The rest would only be wrong for the same reason.
            break;
        } else if !files.iter().any(|(_, text)| has_test(text, name)) {
            let files: Vec<_> = files.iter().map(|(path, _)| path.display().to_string()).collect();
            faults.push(format!("there is no test `{name}` in {}", files.join(", ")));
        }
    }
    if !names_something {
        faults.push("no test is named, and it is not pending".into());
    }
    faults
}
