//! The layouts of jobs' directories on disk: what was chosen for each, what came of it, and what is still to be taken back.
//! Nothing here asks anybody: `layouts` does. `active` has those of all jobs, and says who shares a directory with whom.

mod active;

use std::path::{Path, PathBuf};

use ondeck_api::scheduler::{LayoutState, LayoutView};
use ondeck_api::wire::{
    DirectoryToRestore, DirectoryToStripe, FormerLayout, StripingOutcome, StripingReport, StripingResult,
};
use ondeck_core::schedule::Time;
use ondeck_core::text::{MESSAGE, plain};
use ondeck_core::{
    Incarnation, IoIntensity, JobId, NodeName, Owner, QueuedJob, Rate, StripingChoice, StripingDirectory,
    StripingRequest,
};
use ondeck_layout::job::{ChosenLayout, NotChosen, Source};
use ondeck_layout::lfs::setstripe;
use ondeck_layout::programs::JobProgram;
use serde::{Deserialize, Serialize};

pub(crate) use self::active::{ActiveLayouts, Layouts};

/// What the lines of a job's script ask of layouts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StripingAsked {
    /// The lines, with absolute paths.
    pub request: StripingRequest,
    /// The job's output directories.
    pub outputs: Vec<PathBuf>,
    /// The directory it was submitted from.
    pub work_dir: PathBuf,
    /// Its processes, if the workload manager says how many.
    pub tasks: Option<u32>,
    /// The array that it is an element of.
    pub array: Option<JobId>,
    /// What it runs.
    pub program: JobProgram,
    /// How much it uses the disk, if its line says so.
    pub io: Option<IoIntensity>,
}

/// What is kept of the layouts of a job's directories.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct JobLayouts {
    /// Which life of which job.
    pub id: Incarnation,
    /// Whose it is.
    pub owner: Owner,
    /// The account it is charged to.
    pub account: String,
    /// The directory it was submitted from.
    pub work_dir: PathBuf,
    /// When it was submitted, in seconds since 1970.
    pub submitted: u64,
    /// Its nodes; the agent of the first sets the layouts.
    pub nodes: Vec<NodeName>,
    /// Its processes, if it is known how many.
    #[serde(default)]
    pub tasks: Option<u32>,
    /// The array that it is an element of: the others have the same script, and so the same directories.
    #[serde(default)]
    pub array: Option<JobId>,
    /// What it runs: the name under which its history is kept.
    #[serde(default)]
    pub program: String,
    /// When it started.
    pub since: Time,
    /// When its end was noticed.
    #[serde(default)]
    pub ended: Option<Time>,
    /// What its lines ask for.
    pub request: StripingRequest,
    /// Its directories.
    pub directories: Vec<DirectoryLayout>,
    /// The nodes that watch who writes there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub watched_on: Vec<NodeName>,
    /// What its user should know of the lines as a whole.
    pub notes: Vec<String>,
    /// Why the last try to take them back has failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_taken_back: Option<String>,
}

/// The layout of one directory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct DirectoryLayout {
    /// Its path.
    pub path: PathBuf,
    /// Whether it keeps the layout when the job has ended.
    pub keep: bool,
    /// Whether what the job leaves there is counted: it has written there alone, and has not said that the directory is nobody's
    /// business.
    #[serde(default)]
    pub counts: bool,
    /// The element of its array that sees to it, if it is another one: what is set, taken back and counted is that one's.
    #[serde(default)]
    pub left_to: Option<Incarnation>,
    /// The elements of its array that have left it to this one: what all of them leave there is counted as one run.
    #[serde(default)]
    pub guests: Guests,
    /// What was chosen, if anything was.
    pub choice: Option<LayoutChoice>,
    /// What the agent is told.
    pub order: Option<DirectoryToStripe>,
    /// What it had before, once that is known and something else was tried to be set.
    pub former: Option<FormerLayout>,
    /// What came of it.
    pub state: DirectoryState,
}

/// Elements of an array that have left a directory to the one that sees to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Guests {
    /// The nodes of all of them.
    pub nodes: u32,
    /// Their processes.
    pub tasks: u32,
}

/// A layout that was chosen, in words.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LayoutChoice {
    /// Options of `lfs setstripe`.
    pub options: String,
    /// What it was chosen from.
    pub from: String,
    /// What led to it.
    pub reasons: Vec<String>,
    /// What all processes together read or write in a second, at most.
    pub bandwidth: Option<Rate>,
}

/// What came of a directory's layout. Layouts are in the words of the filesystem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DirectoryState {
    /// The agent is told, and has not answered: it may be set.
    Ordered {
        /// Why it has not.
        doubt: Option<String>,
        /// Whether it was refused before, so that it stays as it is unless this time it is set.
        #[serde(default)]
        again: bool,
    },
    /// New files have it.
    Set { native: String },
    /// The directory stays as it is.
    Alone {
        why: String,
        /// Whether that is as the job would have it.
        as_asked: bool,
    },
    /// It could not be set.
    Failed { why: String },
    /// The job has ended, and the directory keeps it.
    Kept { native: String },
    /// The job has ended, and the directory has what it had before.
    Restored { native: String },
    /// The job has ended, and somebody had set something else.
    Changed { native: String },
    /// The job has ended, and what the directory had before could not be set again.
    NotRestored { why: String },
}

impl JobLayouts {
    /// What is to be done for a job that starts. `choose` chooses a layout for a directory; nothing if it is to stay as it is.
    pub fn plan(
        job: &QueuedJob,
        asked: &StripingAsked,
        since: Time,
        mut choose: impl FnMut(&StripingChoice, &Path) -> Result<Option<ChosenLayout>, NotChosen>,
    ) -> JobLayouts {
        let (meant, again) = asked.request.meant(&asked.outputs);
        let mut notes: Vec<String> = again
            .iter()
            .map(|path| format!("{}: two lines name it, and the first counts", path.display()))
            .collect();
        let asks_for_none = matches!(asked.request.choice, None | Some(StripingChoice::None));
        if meant.is_empty() && !asks_for_none {
            notes.push(
                "#RSA_LAYOUT is about no directory: the job has no output directory (#RSA_DATA_OUT), and no \
                 #RSA_LAYOUT_DIR names one"
                    .to_owned(),
            );
        }
        let directories = meant.into_iter().map(|wanted| DirectoryLayout::plan(wanted, &mut choose));
        JobLayouts {
            id: job.id,
            owner: job.owner,
            account: job.account.clone(),
            work_dir: asked.work_dir.clone(),
            submitted: job.submitted,
            nodes: job.nodes.clone(),
            tasks: asked.tasks,
            array: asked.array,
            program: asked.program.key.clone(),
            since,
            ended: None,
            request: asked.request.clone(),
            directories: directories.collect(),
            watched_on: Vec::new(),
            notes,
            not_taken_back: None,
        }
    }

    /// What the agent is still to be told.
    pub fn to_stripe(&self) -> Vec<DirectoryToStripe> {
        let ordered = |directory: &&DirectoryLayout| directory.is_ordered();
        self.directories.iter().filter(ordered).filter_map(|directory| directory.order.clone()).collect()
    }

    /// Takes what came of the order.
    pub fn take(&mut self, report: &StripingReport) {
        for directory in self.directories.iter_mut().filter(|directory| directory.is_ordered()) {
            if let Some(result) = result_of(report, &directory.path) {
                directory.take(result);
            }
        }
    }

    /// Nobody has said what came of the order.
    pub fn take_silence(&mut self, why: &str) {
        for directory in self.directories.iter_mut().filter(|directory| directory.is_ordered()) {
            directory.state = DirectoryState::Ordered { doubt: Some(why.to_owned()), again: false };
        }
    }

    /// Whether a directory has, or may have, a layout of this job's.
    pub fn uses(&self, path: &Path) -> bool {
        self.directory(path).is_some_and(DirectoryLayout::may_be_set)
    }

    fn directory(&self, path: &Path) -> Option<&DirectoryLayout> {
        self.directories.iter().find(|directory| directory.path == path)
    }

    fn directory_mut(&mut self, path: &Path) -> Option<&mut DirectoryLayout> {
        self.directories.iter_mut().find(|directory| directory.path == path)
    }

    /// Whether both are elements of one array, or lives of one. A number is given again, but hardly to an array of the same user with
    /// the same lines; the time of submission tells nothing, as a requeue changes it.
    fn is_of_the_array_of(&self, other: &JobLayouts) -> bool {
        self.array.is_some()
            && (self.array, self.owner) == (other.array, other.owner)
            && self.request == other.request
    }

    /// Its nodes and processes.
    fn size(&self) -> (u32, u32) {
        let nodes = u32::try_from(self.nodes.len()).unwrap_or(u32::MAX).max(1);
        (nodes, self.tasks.unwrap_or(nodes))
    }

    /// The nodes and processes that have used a directory, with those of other elements of its array.
    pub fn size_in(&self, path: &Path) -> (u32, u32) {
        let (nodes, tasks) = self.size();
        let guests = self.directory(path).map(|directory| directory.guests).unwrap_or_default();
        (nodes.saturating_add(guests.nodes), tasks.saturating_add(guests.tasks))
    }

    fn paths(&self) -> Vec<PathBuf> {
        self.directories.iter().map(|directory| directory.path.clone()).collect()
    }

    /// The directories where it is counted what the job has left.
    pub fn to_count(&self) -> Vec<PathBuf> {
        self.directories.iter().filter(|it| it.counts).map(|directory| directory.path.clone()).collect()
    }

    /// Does not count what is in a directory: others write there, too, or it is done.
    pub fn count_no_more(&mut self, path: Option<&Path>) {
        for directory in &mut self.directories {
            if path.is_none_or(|path| directory.path == path) {
                directory.counts = false;
            }
        }
    }

    /// The directories for which something was chosen that could not be set.
    fn failed(&self) -> Vec<PathBuf> {
        let failed = self.directories.iter().filter(|directory| {
            directory.order.is_some() && matches!(directory.state, DirectoryState::Failed { .. })
        });
        failed.map(|directory| directory.path.clone()).collect()
    }

    /// Whether it has left something to a life of another element.
    fn has_left_to(&self, other: Incarnation) -> bool {
        self.directories.iter().any(|directory| directory.left_to == Some(other))
    }

    /// Whether something is to be taken back when the job has ended.
    pub fn is_to_restore(&self) -> bool {
        self.directories.iter().any(DirectoryLayout::is_to_restore)
    }

    /// Of what is to be taken back, that of which it is known what was there before. The agent that has set it may know more.
    pub fn to_restore(&self) -> Vec<DirectoryToRestore> {
        self.directories
            .iter()
            .filter(|directory| directory.is_to_restore())
            .filter_map(|directory| {
                let order = directory.order.as_ref()?;
                Some(DirectoryToRestore {
                    path: directory.path.clone(),
                    options: order.options.clone(),
                    targets: order.targets,
                    tool: order.tool,
                    former: directory.former.clone()?,
                })
            })
            .collect()
    }

    /// Whether another node than the first can take it back: what was there before is known of all.
    pub fn is_known(&self) -> bool {
        let known = |directory: &DirectoryLayout| !directory.is_to_restore() || directory.former.is_some();
        self.directories.iter().all(known)
    }

    /// Takes what came of taking it back. What failed is tried again, unless this was the last time.
    pub fn take_restored(&mut self, report: &StripingReport, is_last: bool) {
        for directory in self.directories.iter_mut().filter(|directory| directory.is_to_restore()) {
            directory.take_restored(result_of(report, &directory.path), is_last);
        }
    }

    /// Nothing is taken back any more.
    pub fn give_up(&mut self, why: &str) {
        for directory in self.directories.iter_mut().filter(|directory| directory.is_to_restore()) {
            directory.state = match directory.state {
                DirectoryState::Set { .. } => DirectoryState::NotRestored { why: why.to_owned() },
                // Nobody has said that it was set.
                _ => DirectoryState::Failed { why: directory.why_not_set() },
            };
            directory.former = None;
        }
    }

    /// The job has ended, and nothing is to be taken back any more.
    pub fn end(&mut self) {
        for directory in &mut self.directories {
            directory.state = match &directory.state {
                DirectoryState::Set { native } => DirectoryState::Kept { native: native.clone() },
                DirectoryState::Ordered { .. } => DirectoryState::Failed { why: directory.why_not_set() },
                state => state.clone(),
            };
        }
    }

    /// Whether nothing of the directories themselves is to be done any more, though what the job has left may be counted yet.
    pub fn is_all_over(&self) -> bool {
        self.ended.is_some() && !self.directories.iter().any(DirectoryLayout::may_be_set)
    }

    /// What its user should know: all that is not as the lines ask for; nothing if it is.
    pub fn told(&self) -> Option<String> {
        let of_directories = self.directories.iter().filter_map(DirectoryLayout::told);
        let told: Vec<String> = self.notes.iter().cloned().chain(of_directories).collect();
        (!told.is_empty()).then(|| format!("layouts: {}", told.join("; ")))
    }

    /// What is shown of it.
    pub fn view(&self) -> Vec<LayoutView> {
        let (has_ended, failed) = (self.ended.is_some(), self.not_taken_back.as_deref());
        self.directories.iter().map(|directory| directory.view(has_ended, failed)).collect()
    }
}

fn result_of<'a>(report: &'a StripingReport, path: &Path) -> Option<&'a StripingResult> {
    report.directories.iter().find(|result| result.path == path)
}

impl DirectoryLayout {
    fn plan(
        wanted: StripingDirectory,
        choose: &mut impl FnMut(&StripingChoice, &Path) -> Result<Option<ChosenLayout>, NotChosen>,
    ) -> DirectoryLayout {
        let StripingDirectory { path, choice, keep } = wanted;
        let choice = choice.unwrap_or(StripingChoice::Auto);
        let chosen = if path.is_absolute() {
            choose(&choice, &path).map_err(|error| error.to_string())
        } else {
            Err("its whole path is too long".to_owned())
        };
        let mut directory = DirectoryLayout {
            counts: path.is_absolute() && choice != StripingChoice::None,
            left_to: None,
            guests: Guests::default(),
            path,
            keep,
            choice: None,
            order: None,
            former: None,
            state: DirectoryState::Ordered { doubt: None, again: false },
        };
        match chosen {
            Ok(Some(chosen)) => {
                let options = setstripe::options(&chosen.layout).join(" ");
                directory.order = Some(DirectoryToStripe {
                    path: directory.path.clone(),
                    options: options.clone(),
                    targets: chosen.targets,
                    tool: chosen.tool,
                    // Whoever writes option by option means it.
                    replace: chosen.source == Source::Line,
                    keep,
                });
                directory.choice = Some(LayoutChoice {
                    options,
                    from: chosen.source.to_string(),
                    reasons: chosen.reasons.iter().map(ToString::to_string).collect(),
                    bandwidth: chosen.bandwidth,
                });
            }
            Ok(None) => {
                let why = "its line says that it stays as it is".to_owned();
                directory.state = DirectoryState::Alone { why, as_asked: true };
            }
            Err(why) => directory.state = DirectoryState::Failed { why },
        }
        directory
    }

    fn is_ordered(&self) -> bool {
        matches!(self.state, DirectoryState::Ordered { .. })
    }

    /// Whether it has what was chosen, or may have.
    fn may_be_set(&self) -> bool {
        match self.state {
            DirectoryState::Ordered { .. } | DirectoryState::Set { .. } => true,
            DirectoryState::Failed { .. } => self.former.is_some(),
            _ => false,
        }
    }

    fn is_to_restore(&self) -> bool {
        !self.keep && self.may_be_set()
    }

    /// Whether another element of the array need not see to it: it has the layout, or its agent has said why it stays as it is.
    fn takes_guests(&self) -> bool {
        let is_alone = matches!(self.state, DirectoryState::Alone { .. });
        self.order.is_some() && (self.may_be_set() || is_alone && self.counts)
    }

    /// Leaves it alone, if it is not set yet.
    fn leave_alone(&mut self, why: String) {
        self.counts = false;
        if self.is_ordered() {
            self.state = DirectoryState::Alone { why, as_asked: false };
        }
    }

    /// Leaves it to another element of the array.
    fn leave_to(&mut self, first: Incarnation, of_first: &DirectoryLayout, why: String) {
        (self.left_to, self.counts) = (Some(first), false);
        (self.choice, self.order) = (of_first.choice.clone(), of_first.order.clone());
        self.state = DirectoryState::Alone { why, as_asked: true };
    }

    /// Sees to it after all.
    fn take_over(&mut self) {
        self.left_to = None;
        self.state = DirectoryState::Ordered { doubt: None, again: false };
    }

    fn order_again(&mut self) {
        if let DirectoryState::Failed { why } = &self.state {
            self.state = DirectoryState::Ordered { doubt: Some(why.clone()), again: true };
        }
    }

    fn take(&mut self, result: &StripingResult) {
        if let StripingOutcome::SetFor { job, path, .. } = &result.outcome {
            let path = plain(&path.to_string_lossy(), MESSAGE);
            return self.leave_alone(format!(
                "job {job} has set its layout, by the name of {path}, and that is not taken back yet"
            ));
        }
        self.former.clone_from(&result.former);
        self.state = match &result.outcome {
            StripingOutcome::Set { native } => DirectoryState::Set { native: native.clone() },
            StripingOutcome::Has { native } => DirectoryState::Alone {
                why: format!("it has that layout already ({native})"),
                as_asked: true,
            },
            StripingOutcome::Chosen { native } => DirectoryState::Alone {
                why: format!(
                    "somebody has chosen a layout for it ({native}); options in its line would replace that"
                ),
                as_asked: false,
            },
            StripingOutcome::NotStriped { why } => {
                let why = why.strip_prefix(&format!("{}: ", self.path.display())).unwrap_or(why).to_owned();
                DirectoryState::Alone { why, as_asked: false }
            }
            StripingOutcome::Failed { why } => DirectoryState::Failed { why: why.clone() },
            StripingOutcome::Unknown { why } => {
                DirectoryState::Ordered { doubt: Some(why.clone()), again: false }
            }
            other => DirectoryState::Failed { why: format!("its agent answered {other:?}: a defect") },
        };
    }

    fn take_restored(&mut self, result: Option<&StripingResult>, is_last: bool) {
        let was_set = matches!(self.state, DirectoryState::Set { .. });
        self.state = match result.map(|result| &result.outcome) {
            Some(StripingOutcome::Restored { native }) => DirectoryState::Restored { native: native.clone() },
            Some(StripingOutcome::AsBefore) if was_set => {
                DirectoryState::Restored { native: "somebody has set it already".to_owned() }
            }
            Some(StripingOutcome::Changed { native }) => DirectoryState::Changed { native: native.clone() },
            Some(StripingOutcome::Failed { .. }) if !is_last => return,
            // Of what was refused nobody says that it was set.
            Some(StripingOutcome::Gone { why } | StripingOutcome::Failed { why }) => match &self.state {
                DirectoryState::Failed { why: refused } => {
                    let why = format!("{refused}; when the job had ended it could not be looked at: {why}");
                    DirectoryState::Failed { why }
                }
                _ => DirectoryState::NotRestored { why: why.clone() },
            },
            None if was_set => {
                DirectoryState::NotRestored { why: "nobody knows what it had before".to_owned() }
            }
            // It had not been set after all.
            _ => DirectoryState::Failed { why: self.why_not_set() },
        };
        self.former = None;
    }

    fn why_not_set(&self) -> String {
        match &self.state {
            DirectoryState::Failed { why } | DirectoryState::Ordered { doubt: Some(why), .. } => why.clone(),
            _ => "the job ended before it was set".to_owned(),
        }
    }

    /// What its user should know, if it is not as the lines ask for.
    fn told(&self) -> Option<String> {
        let path = self.path.display().to_string();
        let named = |stays: &str, why: &str| match why.strip_prefix(&path) {
            Some(rest) if rest.starts_with(": ") => format!("{path} {stays} as it is{rest}"),
            _ => format!("{path} {stays} as it is: {why}"),
        };
        match &self.state {
            DirectoryState::Alone { why, as_asked: false } | DirectoryState::Failed { why } => {
                Some(named("stays", why))
            }
            DirectoryState::Ordered { doubt: Some(why), again } => {
                Some(named(if *again { "stays" } else { "may stay" }, why))
            }
            DirectoryState::NotRestored { why } => {
                let why = why.strip_prefix(&format!("{path}: ")).unwrap_or(why);
                Some(format!("{path} could not be given its former layout: {why}"))
            }
            _ => None,
        }
    }

    /// What is shown of it. `not_taken_back` is why that has failed.
    fn view(&self, has_ended: bool, not_taken_back: Option<&str>) -> LayoutView {
        let has_guests = self.guests != Guests::default();
        let keeps = match (has_ended, not_taken_back) {
            _ if self.keep => String::new(),
            (true, Some(why)) => format!(", to be taken back; the last try failed: {why}"),
            (true, None) if has_guests => ", until other elements of its array have ended".to_owned(),
            (true, None) => ", to be taken back".to_owned(),
            (false, _) => ", until the job has ended".to_owned(),
        };
        let (state, text) = match &self.state {
            DirectoryState::Ordered { doubt: None, .. } => {
                (LayoutState::Ordered, "its agent is told".to_owned())
            }
            DirectoryState::Ordered { doubt: Some(why), .. } => {
                (LayoutState::Ordered, format!("it may not be set: {why}"))
            }
            DirectoryState::Set { native } => (LayoutState::Set, format!("set ({native}){keeps}")),
            DirectoryState::Alone { why, .. } => (LayoutState::Alone, format!("left alone: {why}")),
            DirectoryState::Failed { why } => {
                let why = why.strip_prefix(&format!("{}: ", self.path.display())).unwrap_or(why);
                (LayoutState::Failed, format!("not set: {why}"))
            }
            DirectoryState::Kept { native } => (LayoutState::Kept, format!("set ({native}), and kept")),
            DirectoryState::Restored { native } => {
                (LayoutState::Restored, format!("set, and what was there before is there again ({native})"))
            }
            DirectoryState::Changed { native } => {
                (LayoutState::Changed, format!("left as somebody has changed it since ({native})"))
            }
            DirectoryState::NotRestored { why } => (
                LayoutState::NotRestored,
                format!("set, and what was there before is not there again: {why}"),
            ),
        };
        let choice = self.choice.clone();
        LayoutView {
            directory: self.path.clone(),
            state,
            text,
            keep: self.keep,
            options: choice.as_ref().map(|choice| choice.options.clone()),
            from: choice.as_ref().map(|choice| choice.from.clone()).unwrap_or_default(),
            bandwidth: choice.as_ref().and_then(|choice| choice.bandwidth),
            reasons: choice.map(|choice| choice.reasons).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ondeck_api::wire::FormerValue;
    use ondeck_core::JobId;
    use ondeck_layout::Rules;
    use ondeck_layout::job::{JobSize, Known, choose};

    use super::*;
    use crate::samples::queued;

    fn asked(lines: &str) -> StripingAsked {
        let request = ondeck_directive::parse(lines.as_bytes()).unwrap().request;
        StripingAsked {
            request: request.striping,
            outputs: request.data_out,
            work_dir: "/".into(),
            tasks: None,
            array: None,
            io: None,
            program: JobProgram::default(),
        }
    }

    fn planned(number: u32, lines: &str) -> JobLayouts {
        let job =
            QueuedJob { nodes: vec!["c1".parse().unwrap()], ..queued(number.to_string().parse().unwrap()) };
        JobLayouts::plan(&job, &asked(lines), Time(1), |choice, path| {
            choose(choice, JobSize { nodes: 1, tasks: None }, path, Known::default(), None, &Rules::tuned())
        })
    }

    fn former_layout() -> Option<FormerLayout> {
        Some(FormerLayout { layout: FormerValue::Inherited, mark: None, inode: None })
    }

    fn report(path: &str, outcome: StripingOutcome, former: Option<FormerLayout>) -> StripingReport {
        StripingReport { directories: vec![StripingResult { path: path.into(), outcome, former }] }
    }

    fn state(record: &JobLayouts) -> LayoutState {
        record.view()[0].state
    }

    #[test]
    fn what_lines_ask_for_is_chosen_or_told() {
        let record = planned(
            1,
            "#RSA_LAYOUT=-c 2\n#RSA_LAYOUT_DIR=/a:keep\n#RSA_LAYOUT_DIR=/b:none\n#RSA_LAYOUT_DIR=/c:-c 0 -E\n\
             #RSA_LAYOUT_DIR=/d:shared\n#RSA_LAYOUT_DIR=/a\n",
        );
        let orders = record.to_stripe();
        let [order] = orders.as_slice() else { panic!("{orders:?}") };
        assert_eq!((order.options.as_str(), order.replace, order.keep), ("-c 2 -S 1M", true, true));
        let states: Vec<LayoutState> = record.view().iter().map(|view| view.state).collect();
        use LayoutState::{Alone, Failed, Ordered};
        assert_eq!(states, [Ordered, Alone, Failed, Failed]);
        assert_eq!(record.to_count(), ["/a", "/c", "/d"].map(PathBuf::from));
        let told = record.told().unwrap();
        for part in
            ["/a: two lines name it", "/c stays as it is: the options", "/d stays as it is: the rules need"]
        {
            assert!(told.contains(part), "{told}");
        }
        assert!(!told.contains("/b"), "{told}");
        assert!(planned(1, "#RSA_LAYOUT=shared\n").told().unwrap().contains("is about no directory"));
        assert_eq!(planned(1, "#RSA_LAYOUT=none\n").told(), None);
        let of_output = planned(1, "#RSA_LAYOUT=-c 2\n#RSA_DATA_OUT=/out\n");
        assert_eq!(of_output.to_stripe()[0].path, Path::new("/out"));
    }

    #[test]
    fn what_was_set_is_taken_back_once_and_what_was_kept_is_not() {
        let set = || StripingOutcome::Set { native: "two".into() };
        let mut record = planned(1, "#RSA_LAYOUT_DIR=/a:-c 2\n");
        assert!(record.is_to_restore() && !record.is_known(), "nobody knows what its agent does");
        record.take(&report("/a", set(), former_layout()));
        assert_eq!((state(&record), record.told(), record.is_known()), (LayoutState::Set, None, true));
        assert_eq!(record.to_restore()[0].former, former_layout().unwrap());
        let fails = report("/a", StripingOutcome::Failed { why: "/a: no".into() }, None);
        record.take_restored(&fails, false);
        assert!(record.is_to_restore() && state(&record) == LayoutState::Set);
        let mut lasting = record.clone();
        lasting.take_restored(&fails, true);
        assert_eq!(state(&lasting), LayoutState::NotRestored);
        assert_eq!(lasting.told().unwrap(), "layouts: /a could not be given its former layout: no");
        record.take_restored(&report("/a", StripingOutcome::Restored { native: "one".into() }, None), false);
        assert!(!record.is_to_restore() && state(&record) == LayoutState::Restored);
        record.end();
        assert_eq!(state(&record), LayoutState::Restored);

        let mut kept = planned(1, "#RSA_LAYOUT_DIR=/a:-c 2:keep\n");
        kept.take(&report("/a", set(), None));
        assert!(!kept.is_to_restore() && kept.uses(Path::new("/a")));
        kept.end();
        assert_eq!((state(&kept), kept.uses(Path::new("/a"))), (LayoutState::Kept, false));
    }

    #[test]
    fn an_agent_that_said_nothing_may_have_set_it_and_is_asked_at_the_end() {
        let mut record = planned(1, "#RSA_LAYOUT_DIR=/a:-c 2\n");
        record.take_silence("c1 does not answer");
        assert_eq!(record.told().unwrap(), "layouts: /a may stay as it is: c1 does not answer");
        assert!(record.is_to_restore() && record.to_restore().is_empty() && record.uses(Path::new("/a")));
        let mut set = record.clone();
        set.take_restored(&report("/a", StripingOutcome::Restored { native: "one".into() }, None), false);
        assert_eq!(state(&set), LayoutState::Restored);
        // It knows nothing of it.
        record.take_restored(&StripingReport::default(), false);
        assert_eq!(state(&record), LayoutState::Failed);
        assert!(record.view()[0].text.contains("c1 does not answer") && !record.is_to_restore());
        // What failed half-way is looked at, too.
        let mut half = planned(1, "#RSA_LAYOUT_DIR=/a:-c 2\n");
        half.take(&report("/a", StripingOutcome::Failed { why: "/a: no".into() }, former_layout()));
        assert!(half.is_to_restore() && half.told().unwrap() == "layouts: /a stays as it is: no");
        let mut moved = half.clone();
        let gone = StripingOutcome::Failed { why: "/a: No such file or directory".into() };
        moved.take_restored(&report("/a", gone, None), true);
        assert!(!moved.is_to_restore() && state(&moved) == LayoutState::Failed);
        assert!(moved.view()[0].text.starts_with("not set: no; when the job had ended"));
        half.take_restored(&report("/a", StripingOutcome::AsBefore, None), false);
        assert!(!half.is_to_restore() && state(&half) == LayoutState::Failed);
        // Its agent does not know of layouts at all.
        let mut former = planned(1, "#RSA_LAYOUT_DIR=/a:-c 2\n");
        former.take_silence("there is nothing at this path");
        former.give_up("there is nothing at this path");
        assert!(!former.is_to_restore() && state(&former) == LayoutState::Failed);
        let mut set = planned(1, "#RSA_LAYOUT_DIR=/a:-c 2\n");
        set.take(&report("/a", StripingOutcome::Set { native: "two".into() }, former_layout()));
        set.give_up("no");
        assert!(!set.is_to_restore() && state(&set) == LayoutState::NotRestored);
    }

    #[test]
    fn of_two_jobs_with_one_directory_the_first_stays_and_the_second_is_told() {
        let layouts = Layouts::default();
        let (first, _) = layouts.add(planned(1, "#RSA_LAYOUT_DIR=/a:-c 2\n"));
        let second = planned(2, "#RSA_LAYOUT_DIR=/a:-c 3\n#RSA_LAYOUT_DIR=/b:-c 3\n");
        assert_eq!(layouts.others(&second).len(), 1);
        let (second, _) = layouts.add(second);
        assert_eq!(second.record().to_stripe().len(), 1);
        assert!(second.record().told().unwrap().contains("/a stays as it is: job 1 may have set its layout"));
        // What is there afterwards is of both, so neither learns from it.
        assert!(first.record().to_count().is_empty());
        assert_eq!(second.record().to_count(), [PathBuf::from("/b")]);
        // Its Epilog on another node says nothing of its script.
        let node = |name: &str| name.parse::<NodeName>().unwrap();
        assert!(layouts.left(JobId(1), 0, &node("c2")).is_empty() && !first.is_over());
        assert_eq!(layouts.left(JobId(1), 0, &node("c1")).len(), 1);
        assert!(first.is_over() && layouts.left(JobId(1), 0, &node("c1")).is_empty());
        let id = first.record().id;
        layouts.remove(id);
        assert!(layouts.others(&planned(3, "#RSA_LAYOUT_DIR=/a:-c 3\n")).is_empty());
    }

    #[test]
    fn what_failed_is_ordered_again_for_results_unless_another_job_has_set_it() {
        let layouts = Layouts::default();
        let (job, _) = layouts
            .add(planned(1, "#RSA_LAYOUT_DIR=/a:-c 2\n#RSA_LAYOUT_DIR=/b:-c 2\n#RSA_LAYOUT_DIR=/c:shared\n"));
        for path in ["/a", "/b"] {
            job.record().take(&report(path, StripingOutcome::Failed { why: format!("{path}: no") }, None));
        }
        assert!(job.record().to_stripe().is_empty());
        layouts.add(planned(2, "#RSA_LAYOUT_DIR=/b:-c 3\n"));
        let told = job.record().told();
        assert!(layouts.order_again(&job));
        // For `/c` there was nothing to be set.
        let ordered: Vec<PathBuf> = job.record().to_stripe().into_iter().map(|order| order.path).collect();
        assert_eq!((ordered, job.record().told()), (vec![PathBuf::from("/a")], told));
        job.record().take(&report("/a", StripingOutcome::Set { native: "two".into() }, former_layout()));
        assert!(!layouts.order_again(&job) && job.record().is_to_restore());
    }

    #[test]
    fn what_is_kept_is_read_as_it_was_written() {
        let mut record = planned(1, "#RSA_LAYOUT_DIR=/$(touch x):-c 2\n#RSA_LAYOUT_DIR=/b:shared\n");
        record.take_silence("no");
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<JobLayouts>(&text).unwrap(), record);
    }
}
