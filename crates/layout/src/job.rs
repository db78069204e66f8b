//! The layout of one of a job's directories: what its line says, or what the rules make of the job and its site, by what is
//! known of its files: from earlier runs, or from the name of its program.

use std::fmt;
use std::path::{Path, PathBuf};

use ondeck_core::{Rate, StripingChoice};

use crate::advice::{Pattern, Place, Reason, Workload};
use crate::history::Recollection;
use crate::lfs::{OptionError, Setstripe};
use crate::load::Load;
use crate::model::{Layout, LayoutError};
use crate::programs::Programs;
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

/// What is known of a job's files in a directory, and of its filesystem, beside its line.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known<'a> {
    /// What earlier runs say.
    pub history: Option<&'a Recollection>,
    /// The program that the job runs, by its name; none: nothing is known by names.
    pub program: Option<&'a str>,
    /// How busy the filesystem is.
    pub load: Load,
}

/// What a layout was chosen from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// The job's line has it, option by option.
    Line,
    /// The job's line names the pattern, and the rules do the rest.
    Pattern(Pattern),
    /// Earlier runs of the program have left files that say it.
    History(Recollection),
    /// Programs of this name use files so.
    Program {
        /// The name in the table.
        name: String,
        /// How they use files.
        pattern: Pattern,
        /// What earlier runs say of sizes, if not of the use.
        history: Option<Recollection>,
    },
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
    /// What is known of the site could not be read.
    #[error("the rules need to know the site, and its file can't be read: {0}")]
    UnreadSite(String),
    /// The directory is on none of the site's filesystems.
    #[error("{} is on none of the filesystems of the site file", .0.display())]
    Elsewhere(PathBuf),
    /// The rules and the site's figures make no layout.
    #[error("the rules make no layout: {0}")]
    Rules(#[from] LayoutError),
}

/// The layout for new files of a directory; nothing if they shall have what they would have anyway.
///
/// An explicit line comes first, then what it says of the pattern; where it says `auto`, what earlier runs have left, then the
/// name of the program, then what the rules have for files of which nothing is known.
///
/// # Errors
/// [`NotChosen`].
///
/// ```
/// use ondeck_core::StripingChoice;
/// use ondeck_layout::job::{JobSize, Known, Source, choose};
/// use ondeck_layout::{Rules, lfs::setstripe};
/// let (job, line) = (JobSize { nodes: 4, tasks: None }, StripingChoice::Options("-c 8 -S 4M".into()));
/// let directory = "/scratch/a".as_ref();
/// let chosen = choose(&line, job, directory, Known::default(), None, &Rules::tuned()).unwrap().unwrap();
/// assert_eq!(setstripe::options(&chosen.layout).join(" "), "-c 8 -S 4M");
/// assert_eq!(chosen.source, Source::Line);
/// ```
pub fn choose(
    choice: &StripingChoice,
    job: JobSize,
    directory: &Path,
    known: Known<'_>,
    site: Option<&Site>,
    rules: &Rules,
) -> Result<Option<ChosenLayout>, NotChosen> {
    let filesystem = site.and_then(|site| site.filesystem_of(directory));
    let source = match choice {
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
        StripingChoice::Auto => by_what_is_known(known, site),
        StripingChoice::Unknown => Source::Site,
        StripingChoice::Shared => Source::Pattern(Pattern::Shared),
        StripingChoice::FilePerProcess => Source::Pattern(Pattern::FilePerProcess),
        StripingChoice::Single => Source::Pattern(Pattern::Single),
    };
    let site = site.ok_or(NotChosen::NoSite)?;
    let filesystem = filesystem.ok_or_else(|| NotChosen::Elsewhere(directory.to_owned()))?;
    let workload = source.workload(job);
    let place = Place { filesystem, nodes: &site.nodes, load: known.load };
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

/// Of what is known, what counts most.
pub fn by_what_is_known(known: Known<'_>, site: Option<&Site>) -> Source {
    let history = known.history.cloned();
    if let Some(history) = history.as_ref().filter(|history| history.used.is_some()) {
        return Source::History(history.clone());
    }
    let of_site = site.map(|site| Programs { lines: site.programs.clone() }).unwrap_or_default();
    let by_name = known.program.and_then(|program| {
        let line = of_site.find(program).cloned().or_else(|| Programs::built_in().find(program).cloned());
        line.filter(|line| line.pattern != Pattern::Unknown)
    });
    match (by_name, history) {
        (Some(line), history) => Source::Program { name: line.name, pattern: line.pattern, history },
        // How large the files are is worth something by itself.
        (None, Some(history)) if history.size.is_some() => Source::History(history),
        (None, _) => Source::Site,
    }
}

impl Source {
    /// What the rules are told of a job.
    pub fn workload(&self, job: JobSize) -> Workload {
        let nodes = job.nodes.max(1);
        let (pattern, files, history) = match self {
            Self::Line | Self::Site => (Pattern::Unknown, None, None),
            Self::Pattern(pattern) => (*pattern, None, None),
            Self::History(history) => {
                let (pattern, files) = history.pattern(nodes).unwrap_or((Pattern::Unknown, None));
                (pattern, files, Some(history))
            }
            Self::Program { pattern, history, .. } => (*pattern, None, history.as_ref()),
        };
        Workload {
            nodes,
            tasks: job.tasks,
            pattern,
            size: history.and_then(|history| history.size),
            files,
            write_size: None,
            median: history.and_then(|history| history.median),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line => f.write_str("the job's line"),
            Self::Pattern(pattern) => write!(f, "the rules, for the pattern of the job's line ({pattern})"),
            Self::History(history) => write!(f, "the history, {history}"),
            Self::Program { name, pattern, history } => {
                write!(f, "the name of its program (`{name}`: {pattern})")?;
                match history {
                    Some(history) => write!(f, "; the history, {history}"),
                    None => Ok(()),
                }
            }
            Self::Site => f.write_str("the site's default, as nothing is known of the job's files"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ondeck_core::Bytes;

    use super::*;
    use crate::classify::FileUse;
    use crate::lfs::setstripe;

    const SITE: &str = "[nodes]\nlink = \"12GB/s\"\n[[filesystem]]\npath = \"/scratch\"\nkind = \"cephfs\"\n\
        targets = 120\nservers = 30\ntarget = \"4GB/s\"\n";

    const JOB: JobSize = JobSize { nodes: 8, tasks: Some(256) };

    fn chosen(choice: &StripingChoice, directory: &str) -> Result<Option<ChosenLayout>, NotChosen> {
        let site = Site::parse(SITE).unwrap();
        choose(choice, JOB, Path::new(directory), Known::default(), Some(&site), &Rules::tuned())
    }

    fn history(used: Option<FileUse>) -> Recollection {
        Recollection {
            used,
            agreement: 100,
            size: Some(Bytes(100 << 30)),
            median: Some(Bytes(64 << 20)),
            writes: Rate(Bytes(1 << 20)),
            runs: 5,
            before_change: 0,
        }
    }

    #[test]
    fn the_history_comes_before_names_of_programs_and_these_before_what_is_so_for_any_files() {
        let text = format!("{SITE}[[program]]\nname = \"mine*\"\npattern = \"shared\"\n");
        let site = Site::parse(&text).unwrap();
        let auto = |history: Option<&Recollection>, program: Option<&str>| {
            let (known, auto) = (Known { history, program, ..Known::default() }, &StripingChoice::Auto);
            choose(auto, JOB, Path::new("/scratch/a"), known, Some(&site), &Rules::tuned()).unwrap().unwrap()
        };
        let known = history(Some(FileUse::FilePerProcess));
        let own = auto(Some(&known), Some("mine-2"));
        assert_eq!(
            own.source.to_string(),
            "the history, 5 runs: each process has files of its own, by 100 % of their weight; large files have up to \
             100 GiB; the median file has 64 MiB"
        );
        assert_eq!(setstripe::options(&own.layout).join(" "), "-c 1 -S 1M");
        // What the history knows of sizes counts also where it does not know the use.
        let unclear = history(None);
        let by_name = auto(Some(&unclear), Some("mine-2"));
        assert!(
            by_name
                .source
                .to_string()
                .starts_with("the name of its program (`mine*`: shared); the history, ")
        );
        assert!(
            by_name.reasons.contains(&Reason::Head { end: Bytes(64 << 20), is_median: true }),
            "{by_name:?}"
        );
        let by_size = auto(Some(&unclear), Some("other"));
        assert!(by_size.reasons.contains(&Reason::BySize { size: Bytes(100 << 30) }), "{by_size:?}");
        // A site's line comes before one of this crate.
        assert_eq!(
            auto(None, Some("simpleFoam")).source.to_string(),
            "the name of its program (`*foam`: file-per-process)"
        );
        assert_eq!(auto(None, Some("other")).source, Source::Site);
        // What the line says counts more than all of it.
        let line = choose(
            &StripingChoice::Shared,
            JOB,
            Path::new("/scratch/a"),
            Known { history: Some(&known), program: Some("simpleFoam"), ..Known::default() },
            Some(&site),
            &Rules::tuned(),
        );
        assert_eq!(line.unwrap().unwrap().source, Source::Pattern(Pattern::Shared));
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
        let no_site =
            choose(&StripingChoice::Auto, job, Path::new("/a"), Known::default(), None, &Rules::tuned());
        assert_eq!(no_site, Err(NotChosen::NoSite));
    }
}
