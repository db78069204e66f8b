//! Where files can be striped from here: the filesystems of the site's file, and those that are mounted and stripe files.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use ondeck_agent::observer::{NotWatched, can_watch};
use ondeck_api::Config;
use ondeck_api::config::SchedulerConfig;
use ondeck_layout::Site;
use ondeck_layout::site::Tool;
use ondeck_ramdisk::mounts;
use ondeck_staging::layout::{StripedDirectory, StripingError};
use rustix::fs::{Mode, OFlags};

use super::{Finding, State, finding};

const WHAT: &str = "layouts";

/// How long filesystems are waited for: one that hangs must not keep the rest from being told.
const PATIENCE: Duration = Duration::from_secs(5);

/// Filesystems that are looked at, at most: each takes a thread, for ever if it hangs.
const MOST: usize = 64;

/// Types of mounts that may stripe files; whether one does is asked.
const KINDS: &[&str] = &["lustre", "beegfs", "ceph", "fuse.ceph", "fuse.ceph-fuse"];

pub fn examine(config: Option<&Path>) -> Vec<Finding> {
    // What is wrong with the configuration is said elsewhere.
    let config = Config::load(config).unwrap_or_default();
    // Only root can be told who opens files.
    let is_watched = config.scheduler.watch_nodes > 0 && rustix::process::geteuid().is_root();
    let mut findings = Vec::new();
    let mut looked_at: BTreeSet<PathBuf> = BTreeSet::new();
    // All at once: several of them may hang.
    let mut looks = Vec::new();
    match read_site(config.scheduler.site_file) {
        Ok(None) => {}
        Ok(Some(site)) => {
            for filesystem in site.filesystems.into_iter().take(MOST) {
                looked_at.insert(filesystem.path.clone());
                let path = filesystem.path.display();
                findings.extend(filesystem.doubts().into_iter().map(|(what, remedy)| {
                    finding(WHAT, State::Limited, format!("the site's file: {path}: {what}"), Some(remedy))
                }));
                looks.push(Look::begin(filesystem.path, Some(filesystem.kind), is_watched));
            }
        }
        Err(wrong) => {
            let remedy = "mend it: docs/layout.md explains the site's file";
            findings.push(finding(WHAT, State::Limited, wrong, Some(remedy)));
        }
    }
    match mounts::mounted() {
        Ok(mounted) => {
            let striped = mounted.into_iter().filter(|mount| KINDS.contains(&mount.kind.as_str()));
            for mount in striped.filter(|mount| !mount.is_a_users()).take(MOST) {
                if looked_at.insert(mount.at.clone()) {
                    looks.push(Look::begin(mount.at, None, is_watched));
                }
            }
        }
        Err(error) => {
            let wrong = format!("it can't be seen what is mounted: {error}");
            findings.push(finding(WHAT, State::Limited, wrong, Some("mount /proc")));
        }
    }
    let until = Instant::now() + PATIENCE;
    for look in looks {
        findings.extend(look.end(until));
    }
    if findings.is_empty() {
        let detail = "no filesystem that stripes files is mounted here (Lustre, CephFS, BeeGFS)";
        findings.push(finding(WHAT, State::Ok, detail, None));
    }
    findings
}

/// The site's file; nothing if there is none, and none was named. It may lie on a filesystem that hangs.
fn read_site(path: PathBuf) -> Result<Option<Site>, String> {
    let (tell, told) = channel();
    let at = path.clone();
    std::thread::spawn(move || {
        // Nobody listens any more to what comes too late.
        let _ = tell.send(Site::read(&at));
    });
    match told.recv_timeout(PATIENCE) {
        Ok(Ok(None)) if path != SchedulerConfig::default().site_file => {
            Err(format!("{}, which scheduler.site_file names, is not there", path.display()))
        }
        Ok(read) => read.map_err(|error| error.to_string()),
        Err(_) => {
            Err(format!("{}: reading it has taken longer than {} s", path.display(), PATIENCE.as_secs()))
        }
    }
}

/// A filesystem that is being looked at.
struct Look {
    path: PathBuf,
    told: Receiver<(Shown, Option<NotWatched>)>,
}

/// How it is striped there.
type Shown = Result<(Tool, String), StripingError>;

impl Look {
    fn begin(path: PathBuf, tool: Option<Tool>, is_watched: bool) -> Look {
        let (tell, told) = channel();
        let at = path.clone();
        std::thread::spawn(move || {
            // Nobody listens any more to what comes too late.
            let _ = tell.send((show(&at, tool), is_watched.then(|| can_watch(&at).err()).flatten()));
        });
        Look { path, told }
    }

    /// What was found by then.
    fn end(self, until: Instant) -> Vec<Finding> {
        let path = self.path.display();
        let Ok((shown, unwatched)) = self.told.recv_timeout(until.saturating_duration_since(Instant::now()))
        else {
            let detail = format!("{path} has not answered within {} s", PATIENCE.as_secs());
            return vec![finding(WHAT, State::Limited, detail, Some("look after the filesystem"))];
        };
        let shown = match shown {
            Ok((tool, native)) => {
                finding(WHAT, State::Ok, format!("{path}: {tool}, new files get {native}"), None)
            }
            Err(error) => {
                let remedy = match &error {
                    StripingError::NoTool { tool, .. } => {
                        format!(
                            "install the client's tools, of which `{tool}` is one, where jobs and `ondeck agent` run"
                        )
                    }
                    StripingError::Directory { .. } => "mount it, or correct the site's file".to_owned(),
                    _ => "correct the site's file; jobs with #RSA_LAYOUT keep what their directories have"
                        .to_owned(),
                };
                finding(WHAT, State::Limited, error.to_string(), Some(&remedy))
            }
        };
        let remedy = "nothing: the history of jobs there is as without `watch_nodes`";
        let unwatched = unwatched.map(|why| finding(WHAT, State::Limited, why.to_string(), Some(remedy)));
        std::iter::once(shown).chain(unwatched).collect()
    }
}

fn show(path: &Path, tool: Option<Tool>) -> Result<(Tool, String), StripingError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty())
        .map_err(|error| StripingError::Directory { path: path.to_owned(), error: error.into() })?;
    let directory = StripedDirectory::of(directory, path, tool)?;
    Ok((directory.tool(), directory.show()?.native))
}
