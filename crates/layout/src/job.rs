//! The layout of one of a job's directories: what its line says, or what the rules make of the job and its site.

use std::fmt;
use std::path::{Path, PathBuf};

use ondeck_core::{Rate, StripingChoice};

use crate::advice::{Load, Pattern, Place, Reason, Workload};
use crate::lfs::{OptionError, Setstripe};
use crate::model::{Layout, LayoutError};
use crate::rules::Rules;
use crate::site::{Site, Tool};

/// What a workload manager says of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobSize {
    /// Its nodes.
    pub nodes: u32,
    /// Its processes, on all of them; nothing: one on each node.
    pub tasks: Option<u32>,
}

/// What a layout was chosen from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The job's line has it, option by option.
    Line,
    /// The job's line names the pattern, and the rules do the rest.
    Pattern(Pattern),
    /// Nothing is known of the job's files: what the rules have for any.
    Site,
}

/// A layout for a directory, and where it comes from.
#[derive(Clone, Debug, PartialEq)]
pub struct ChosenLayout {
    /// The layout.
    pub layout: Layout,
    /// What it was chosen from.
    pub source: Source,
    /// What led to it, in the order of the decisions; nothing if the line has it.
    pub reasons: Vec<Reason>,
    /// What all processes together read or write in a second, at most, where that can be said.
    pub bandwidth: Option<Rate>,
    /// How many targets the filesystem has, where the site says so.
    pub targets: Option<u32>,
    /// How the filesystem is told its layouts, where the site says so.
    pub tool: Option<Tool>,
}

/// Why there is no layout for a directory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotChosen {
    /// The options of the line describe none.
    #[error("the options of its line: {0}; `ondeck layout check \"OPTIONS\"` says what they mean")]
    Options(#[from] OptionError),
    /// Nothing is known of the site.
    #[error(
        "the rules need to know the site, and it has no site file; write the layout's options in the line instead"
    )]
    NoSite,
    /// The directory is on none of the site's filesystems.
    #[error("{} is on none of the filesystems of the site file", .0.display())]
    Elsewhere(PathBuf),
    /// The rules and the site's figures make no layout.
    #[error("the rules make no layout: {0}")]
    Rules(#[from] LayoutError),
}

/// The layout for new files of a directory; nothing if they shall have what they would have anyway.
///
/// An explicit line comes first, then what it says of the pattern, then what the rules have for files of which nothing is
/// known.
///
/// # Errors
/// [`NotChosen`].
///
/// ```
/// use ondeck_core::StripingChoice;
/// use ondeck_layout::job::{JobSize, Source, choose};
/// use ondeck_layout::{Rules, lfs::setstripe};
/// let (job, line) = (JobSize { nodes: 4, tasks: None }, StripingChoice::Options("-c 8 -S 4M".into()));
/// let chosen = choose(&line, job, "/scratch/a".as_ref(), None, &Rules::tuned()).unwrap().unwrap();
/// assert_eq!(setstripe::options(&chosen.layout).join(" "), "-c 8 -S 4M");
/// assert_eq!(chosen.source, Source::Line);
/// ```
pub fn choose(
    choice: &StripingChoice,
    job: JobSize,
    directory: &Path,
    site: Option<&Site>,
    rules: &Rules,
) -> Result<Option<ChosenLayout>, NotChosen> {
    let filesystem = site.and_then(|site| site.filesystem_of(directory));
    let (pattern, source) = match choice {
        StripingChoice::None => return Ok(None),
        StripingChoice::Options(options) => {
            let layout = Setstripe::parse_of_any(options)?.layout()?;
            return Ok(Some(ChosenLayout {
                layout,
                source: Source::Line,
                reasons: Vec::new(),
                bandwidth: None,
                targets: filesystem.map(|filesystem| filesystem.targets),
                tool: filesystem.map(|filesystem| filesystem.kind),
            }));
        }
        StripingChoice::Auto | StripingChoice::Unknown => (Pattern::Unknown, Source::Site),
        StripingChoice::Shared => (Pattern::Shared, Source::Pattern(Pattern::Shared)),
        StripingChoice::FilePerProcess => (Pattern::FilePerProcess, Source::Pattern(Pattern::FilePerProcess)),
        StripingChoice::Single => (Pattern::Single, Source::Pattern(Pattern::Single)),
    };
    let site = site.ok_or(NotChosen::NoSite)?;
    let filesystem = filesystem.ok_or_else(|| NotChosen::Elsewhere(directory.to_owned()))?;
    let workload = Workload {
        nodes: job.nodes.max(1),
        tasks: job.tasks,
        pattern,
        size: None,
        files: None,
        write_size: None,
        median: None,
    };
    let place = Place { filesystem, nodes: &site.nodes, load: Load::default() };
    let advice = rules.advise(place, &workload)?;
    Ok(Some(ChosenLayout {
        layout: advice.layout,
        source,
        reasons: advice.reasons,
        bandwidth: Some(advice.bandwidth),
        targets: Some(filesystem.targets),
        tool: Some(filesystem.kind),
    }))
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line => f.write_str("the job's line"),
            Self::Pattern(pattern) => write!(f, "the rules, for the pattern of the job's line ({pattern})"),
            Self::Site => f.write_str("the site's default, as nothing is known of the job's files"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::lfs::setstripe;

    const SITE: &str = "[nodes]\nlink = \"12GB/s\"\n[[filesystem]]\npath = \"/scratch\"\nkind = \"cephfs\"\n\
        targets = 120\nservers = 30\ntarget = \"4GB/s\"\n";

    fn chosen(choice: &StripingChoice, directory: &str) -> Result<Option<ChosenLayout>, NotChosen> {
        let site = Site::parse(SITE).unwrap();
        let job = JobSize { nodes: 8, tasks: Some(256) };
        choose(choice, job, Path::new(directory), Some(&site), &Rules::tuned())
    }

    #[test]
    fn a_line_comes_first_then_its_pattern_then_what_is_so_for_any_files() {
        let line = chosen(&StripingChoice::Options("-c 3".into()), "/scratch/a").unwrap().unwrap();
        assert_eq!((line.source, line.tool, line.targets), (Source::Line, Some(Tool::Cephfs), Some(120)));
        assert_eq!(setstripe::options(&line.layout).join(" "), "-c 3 -S 1M");
        let elsewhere = chosen(&StripingChoice::Options("-c 3".into()), "/home/a").unwrap().unwrap();
        assert_eq!((elsewhere.tool, elsewhere.targets), (None, None));
        let own = chosen(&StripingChoice::FilePerProcess, "/scratch/a").unwrap().unwrap();
        assert_eq!(own.source.to_string(), "the rules, for the pattern of the job's line (file-per-process)");
        assert_eq!(setstripe::options(&own.layout).join(" "), "-c 1 -S 1M");
        assert!(own.bandwidth.is_some() && !own.reasons.is_empty());
        let any = chosen(&StripingChoice::Auto, "/scratch/a").unwrap().unwrap();
        assert_eq!(any.source, Source::Site);
        assert!(any.reasons.contains(&Reason::Progressive), "{any:?}");
        assert_eq!(chosen(&StripingChoice::None, "/scratch/a"), Ok(None));
    }

    #[test]
    fn what_can_not_be_chosen_is_told_with_a_remedy() {
        let told =
            |choice: StripingChoice, directory: &str| chosen(&choice, directory).unwrap_err().to_string();
        let wrong = told(StripingChoice::Options("-c 0 -E".into()), "/scratch/a");
        assert!(wrong.starts_with("the options of its line: ") && wrong.contains("layout check"), "{wrong}");
        assert_eq!(
            told(StripingChoice::Shared, "/home/a"),
            "/home/a is on none of the filesystems of the site file"
        );
        let job = JobSize { nodes: 1, tasks: None };
        let no_site = choose(&StripingChoice::Auto, job, Path::new("/a"), None, &Rules::tuned());
        assert_eq!(no_site, Err(NotChosen::NoSite));
    }
}
