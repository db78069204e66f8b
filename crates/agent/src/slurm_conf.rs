//! What slurm.conf on this node says of its hooks, and of how the processes of jobs are tracked and contained.
//!
//! Slurm's commands tell what the controller has read. Its daemon on a node reads a file of its own, which may be another.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use ondeck_api::wire::HookSlurm;

/// A file of a configuration is no longer than this.
const LONGEST: u64 = 4 << 20;

/// Files include each other so deeply, at most: Slurm's own limit is not told, and a circle must end.
const DEEPEST: u32 = 8;

/// Reads it.
///
/// # Errors
/// If it, or a file that it includes, can't be read: then nothing is known.
pub fn read(conf: &Path) -> io::Result<HookSlurm> {
    let mut found = nothing_set(conf);
    read_into(conf, conf, 0, &mut found)?;
    Ok(found)
}

/// Of a file that sets none of it.
fn nothing_set(conf: &Path) -> HookSlurm {
    HookSlurm {
        conf: conf.to_owned(),
        prolog: Some(Vec::new()),
        epilog: Some(Vec::new()),
        ..HookSlurm::default()
    }
}

fn read_into(conf: &Path, path: &Path, depth: u32, found: &mut HookSlurm) -> io::Result<()> {
    if depth > DEEPEST {
        return Err(io::Error::other(format!("{} includes too deeply", conf.display())));
    }
    let mut text = Vec::new();
    File::open(path)?.take(LONGEST + 1).read_to_end(&mut text)?;
    if text.len() as u64 > LONGEST {
        return Err(io::Error::other(format!("{} is too long", path.display())));
    }
    // A line that ends with a backslash goes on in the next one.
    let text = String::from_utf8_lossy(&text).replace("\\\n", " ");
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if let Some(included) = after(line, "include").filter(|rest| rest.starts_with(char::is_whitespace)) {
            // A relative path is one beside slurm.conf.
            let above = conf.parent().unwrap_or(Path::new("/"));
            read_into(conf, &above.join(included.trim()), depth + 1, found)?;
            continue;
        }
        let mut rest = line;
        while let Some((key, value, behind)) = next(rest) {
            rest = behind;
            match key.to_ascii_lowercase().as_str() {
                // Slurm takes the last.
                "proctracktype" => found.proctrack_type = Some(value.to_owned()),
                "jobcontainertype" => found.job_container_type = Some(value.to_owned()),
                // Here it depends on its version whether it takes the last or all.
                "prolog" => found.prolog.get_or_insert_default().push(value.to_owned()),
                "epilog" => found.epilog.get_or_insert_default().push(value.to_owned()),
                _ => {}
            }
        }
    }
    Ok(())
}

/// The first key of a line, its value without quotes, and what is behind: a line may set several.
fn next(line: &str) -> Option<(&str, &str, &str)> {
    let (key, rest) = line.split_once('=')?;
    let rest = rest.trim_start();
    let (value, rest) = match rest.strip_prefix('"') {
        Some(quoted) => quoted.split_once('"')?,
        None => rest.split_at(rest.find(char::is_whitespace).unwrap_or(rest.len())),
    };
    (!value.is_empty()).then_some((key.trim(), value, rest))
}

/// What follows a word at the beginning of a line, whatever its case.
fn after<'a>(line: &'a str, word: &str) -> Option<&'a str> {
    let (begin, rest) = line.split_at_checked(word.len())?;
    begin.eq_ignore_ascii_case(word).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_value_counts_whatever_its_case_and_in_whichever_file_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let conf = dir.path().join("slurm.conf");
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write(
            "slurm.conf",
            "ClusterName=a # ProctrackType=no\n# JobContainerType=no\nPROCTRACKTYPE = proctrack/linuxproc\n\
             Include more.conf\nIncludeNothing=1\nProctrackTypeOther=no\n",
        );
        write("more.conf", "proctracktype=\\\nproctrack/cgroup\nJobContainerType=job_container/tmpfs\n");
        let found = read(&conf).unwrap();
        assert_eq!(found.proctrack_type.as_deref(), Some("proctrack/cgroup"));
        assert_eq!(found.job_container_type.as_deref(), Some("job_container/tmpfs"));
        write("slurm.conf", "ClusterName=a\n");
        assert_eq!(read(&conf).unwrap(), nothing_set(&conf));
    }

    #[test]
    fn all_hooks_are_read_in_order_and_nothing_that_is_called_alike() {
        let dir = tempfile::tempdir().unwrap();
        let conf = dir.path().join("slurm.conf");
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write(
            "slurm.conf",
            "PROLOG = /a # Prolog=/no\ninclude more.conf\nPrologFlags=Alloc\nTaskProlog=/no\nPrologSlurmctld=/no\n\
             prolog=\"/c d\" Epilog=/e\nNodeName=n Prolog\nProlog=\n",
        );
        write("more.conf", "ClusterName=a Prolog=/b\n#Epilog=/no\n");
        let found = read(&conf).unwrap();
        assert_eq!(found.prolog.unwrap(), ["/a", "/b", "/c d"]);
        assert_eq!(found.epilog.unwrap(), ["/e"]);
    }

    #[test]
    fn what_a_former_version_has_noted_is_understood_and_says_nothing_of_hooks() {
        let former =
            r#"{"conf": "/etc/slurm/slurm.conf", "proctrack_type": "a", "job_container_type": null}"#;
        let found: HookSlurm = serde_json::from_str(former).unwrap();
        assert_eq!((found.proctrack_type.as_deref(), found.prolog, found.epilog), (Some("a"), None, None));
    }

    #[test]
    fn what_can_not_be_read_is_not_taken_for_what_is_not_set() {
        let dir = tempfile::tempdir().unwrap();
        let conf = dir.path().join("slurm.conf");
        read(&conf).unwrap_err();
        std::fs::write(&conf, "Include none.conf\n").unwrap();
        read(&conf).unwrap_err();
        std::fs::write(&conf, "include slurm.conf\n").unwrap();
        assert!(read(&conf).unwrap_err().to_string().contains("too deeply"));
    }
}
