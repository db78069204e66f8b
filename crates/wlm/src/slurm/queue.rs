//! The queue: from squeue's fields to [`QueuedJob`]s.

use std::collections::{BTreeSet, HashMap};
use std::str::FromStr;

use ondeck_core::{Incarnation, JobId, NodeName, Owner, QueuedJob, Standing};

use super::record::{MOST_DEPENDENCIES, records, text};
use crate::{Element, HeldArray, Queue, WlmError, hostlist};

/// The mark in AdminComment of a job that `job_submit.lua` held until its input is there.
pub const HELD_FOR_INPUT: &str = "ondeck:hold";

/// The mark of the life of a job that was started anew so many times.
pub fn mark(restarts: u32) -> String {
    match restarts {
        0 => HELD_FOR_INPUT.to_owned(),
        restarts => format!("{HELD_FOR_INPUT}:{restarts}"),
    }
}

/// More nodes than a job has on any machine.
const MOST_NODES: usize = 100_000;

/// What is asked of squeue, in the order of [`Fields`].
pub const FIELDS: &[&str; 25] = &[
    "JobID",
    "ArrayTaskID",
    "RestartCnt",
    "UserID",
    "GroupID",
    "State",
    "Reason",
    "NumNodes",
    "NodeList",
    "SchedNodes",
    "StartTime",
    "EndTime",
    "TimeUsed",
    "SubmitTime",
    "PriorityLong",
    "QOS",
    "admin_comment",
    "ArrayJobID",
    "Dependency",
    "HetJobID",
    "BurstBuffer",
    "BurstBufferState",
    "EligibleTime",
    // What users write as they like comes last: the account where there is no accounting, and the name.
    "Account",
    "Name",
];

/// The place of `ArrayJobID`.
const ARRAY: usize = 17;

/// One record, as squeue prints it.
struct Fields<'a> {
    job: &'a [u8],
    array_task: &'a [u8],
    restarts: &'a [u8],
    uid: &'a [u8],
    gid: &'a [u8],
    state: &'a [u8],
    reason: &'a [u8],
    node_count: &'a [u8],
    nodes: &'a [u8],
    scheduled_nodes: &'a [u8],
    start: &'a [u8],
    end: &'a [u8],
    used: &'a [u8],
    submitted: &'a [u8],
    priority: &'a [u8],
    qos: &'a [u8],
    admin_comment: &'a [u8],
    array: &'a [u8],
    het_job: &'a [u8],
    burst_buffer: &'a [u8],
    burst_buffer_state: &'a [u8],
    begin: &'a [u8],
    account: &'a [u8],
    dependency: &'a [u8],
    name: &'a [u8],
}

/// All jobs of squeue's output whose number is their own.
///
/// # Errors
/// [`WlmError::Malformed`] if a single one is not understood: a job that is left out would be taken for gone.
pub fn parse(output: &[u8], separator: &str) -> Result<Queue, WlmError> {
    let mut queue = Queue::default();
    let records = records::<{ FIELDS.len() }>(output, separator)?;
    // Elements of an array that share one record have one number, that of the record.
    let mut lines: HashMap<&[u8], usize> = HashMap::new();
    let mut lines_of_array: HashMap<&[u8], usize> = HashMap::new();
    let mut dependencies: Vec<(usize, Dependency)> = Vec::new();
    let mut neighbours = Neighbours::default();
    let mut whole: BTreeSet<JobId> = BTreeSet::new();
    for record in &records {
        *lines.entry(record[0]).or_default() += 1;
        *lines_of_array.entry(record[ARRAY]).or_default() += 1;
    }
    for record in records {
        let [
            job,
            array_task,
            restarts,
            uid,
            gid,
            state,
            reason,
            node_count,
            nodes,
            scheduled_nodes,
            start,
            end,
            used,
            submitted,
            priority,
            qos,
            admin_comment,
            array,
            dependency,
            het_job,
            burst_buffer,
            burst_buffer_state,
            begin,
            account,
            name,
        ] = record;
        let fields = Fields {
            job,
            array_task,
            restarts,
            uid,
            gid,
            state,
            reason,
            node_count,
            nodes,
            scheduled_nodes,
            start,
            end,
            used,
            submitted,
            priority,
            qos,
            admin_comment,
            array,
            het_job,
            burst_buffer,
            burst_buffer_state,
            begin,
            account,
            dependency,
            name,
        };
        if fields.stands_for_several() || lines[fields.job] > 1 {
            neighbours.see(&fields, true)?;
            if let Some(held) = fields.held_array()? {
                match queue.held_arrays.iter_mut().find(|known| known.array == held.array) {
                    Some(known) => known.next = known.next.min(held.next),
                    None => queue.held_arrays.push(held),
                }
            }
            // What shares its number with another record can't be told from it.
            let rest = fields.job()?;
            if lines[fields.job] == 1 && rest.standing.waits() && !rest.held_for_input {
                dependencies
                    .extend(dependencies_in(&fields).map(|dependency| (queue.jobs.len(), dependency)));
                if lines_of_array[fields.array] == 1 {
                    whole.insert(rest.id.job);
                    queue.begin_times.extend(fields.begin_time(rest.id.job));
                }
                queue.jobs.push(QueuedJob { several: true, ..rest });
            }
            continue;
        }
        let job = fields.job()?;
        neighbours.see(&fields, false)?;
        dependencies.extend(dependencies_in(&fields).map(|dependency| (queue.jobs.len(), dependency)));
        if let Some(element) = fields.element()? {
            queue.elements.insert(job.id.job, element);
        }
        if job.standing.waits() {
            queue.begin_times.extend(fields.begin_time(job.id.job));
        }
        if fields.waits_for_its_input() {
            queue.staging_in.insert(job.id.job);
        }
        queue.jobs.push(job);
    }
    // Slurm itself does not look at what a held job depends on.
    for (place, dependency) in dependencies {
        let job = &mut queue.jobs[place];
        match dependency {
            Dependency::Other { kind, other, all } => {
                let awaited = neighbours.awaited(kind, other, all);
                job.dependent |= awaited.is_some();
                job.depends_on.extend(awaited);
            }
            Dependency::Namesakes(name) => job.dependent |= neighbours.has_namesake(job, name),
            Dependency::Unknown => job.dependent = true,
        }
    }
    for job in &mut queue.jobs {
        job.depends_on.sort_unstable();
        job.depends_on.dedup();
    }
    let (rests, jobs): (Vec<_>, Vec<_>) = queue.jobs.into_iter().partition(|job| job.several);
    queue.jobs = jobs;
    queue.whole_arrays = rests.iter().filter(|rest| whole.contains(&rest.id.job)).cloned().collect();
    queue.dependent_rests = rests.into_iter().filter(|rest| !rest.depends_on.is_empty()).collect();
    Ok(queue)
}

/// Something that a job depends on.
enum Dependency<'a> {
    /// Another job; `all` if it may be an array, and not a certain element of it.
    Other { kind: &'a [u8], other: JobId, all: bool },
    /// Jobs of the same user with the same name: those that run, and those that were submitted before.
    Namesakes(&'a [u8]),
    /// Slurm says that it waits, or did not say all.
    Unknown,
}

/// What a job depends on, as in `afterok:5(unfulfilled),afterany:7_*(unfulfilled)`.
fn dependencies_in<'a>(fields: &Fields<'a>) -> impl Iterator<Item = Dependency<'a>> {
    let (field, name) = (fields.dependency, fields.name);
    let is_cut = field.len() >= MOST_DEPENDENCIES;
    // The number where it was cut off may be another one.
    let whole =
        if is_cut { field.iter().rposition(|byte| is_between(*byte)).unwrap_or(0) } else { field.len() };
    let each = field[..whole].split(|byte| is_between(*byte)).filter_map(move |clause| {
        let one = one_dependency(clause);
        if clause.starts_with(b"singleton") {
            return clause.ends_with(b"(unfulfilled)").then_some(Dependency::Namesakes(name));
        }
        one.or_else(|| clause.ends_with(b"(unfulfilled)").then_some(Dependency::Unknown))
    });
    // A held job may show an old reason.
    let waits =
        matches!(fields.reason, b"Dependency" | b"DependencyNeverSatisfied") && fields.priority != b"0";
    each.chain((is_cut || waits).then_some(Dependency::Unknown))
}

fn is_between(byte: u8) -> bool {
    matches!(byte, b',' | b'?')
}

/// A clause that names another job.
fn one_dependency(clause: &[u8]) -> Option<Dependency<'_>> {
    let kind = clause.iter().position(|byte| *byte == b':')?;
    let rest = &clause[kind + 1..];
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let other = JobId(std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()?);
    let is_element =
        rest[digits..].first() == Some(&b'_') && rest.get(digits + 1).is_some_and(u8::is_ascii_digit);
    Some(Dependency::Other { kind: &clause[..kind], other, all: !is_element })
}

/// The jobs that others may wait for. A user can have thousands of jobs that each wait for thousands: of all that have one
/// number or one name only what decides is kept.
#[derive(Default)]
struct Neighbours<'a> {
    /// By their number and that of their array, and whether they are the rest of an array.
    by_number: HashMap<(JobId, bool), Awaited>,
    /// Of each user.
    by_name: HashMap<(u32, &'a [u8]), Namesakes>,
}

/// One job of several that has not started, and one that has not ended: the elements of an array have one script, and one
/// of them stands for all.
#[derive(Default)]
struct Awaited {
    start: Option<JobId>,
    end: Option<JobId>,
}

#[derive(Default)]
struct Namesakes {
    /// Whether one of them has started.
    run: bool,
    /// The first of the others.
    first: Option<JobId>,
}

impl<'a> Neighbours<'a> {
    fn see(&mut self, fields: &Fields<'a>, is_rest: bool) -> Result<(), WlmError> {
        let job = JobId(fields.number("number", fields.job)?);
        let standing = standing(&text(fields.state), &text(fields.reason), fields.priority()?);
        if standing == Standing::Ended {
            return Ok(());
        }
        for number in [Some(job), fields.array()?.filter(|array| *array != job)].into_iter().flatten() {
            let awaited = self.by_number.entry((number, is_rest)).or_default();
            awaited.end.get_or_insert(job);
            if !matches!(standing, Standing::Running | Standing::Ending) {
                awaited.start.get_or_insert(job);
            }
        }
        let user = fields.number("user", fields.uid)?;
        let namesakes = self.by_name.entry((user, fields.name)).or_default();
        match standing {
            Standing::Ending | Standing::Ended => {}
            Standing::Running | Standing::Configuring => namesakes.run = true,
            _ => namesakes.first = Some(namesakes.first.map_or(job, |first| first.min(job))),
        }
        Ok(())
    }

    /// A job for which one waits that depends in this way on this one.
    fn awaited(&self, kind: &[u8], other: JobId, all: bool) -> Option<JobId> {
        let known = |is_rest: bool| {
            let awaited = self.by_number.get(&(other, is_rest))?;
            // `after` waits for the other's start only.
            if kind == b"after" { awaited.start } else { awaited.end }
        };
        known(false).or_else(|| if all { known(true) } else { None })
    }

    fn has_namesake(&self, job: &QueuedJob, name: &[u8]) -> bool {
        self.by_name
            .get(&(job.owner.uid, name))
            .is_some_and(|known| known.run || known.first.is_some_and(|first| first < job.id.job))
    }
}

impl Fields<'_> {
    /// Whether it is the pending rest of an array, such as `2-9`, `1,5` or `0-9%2`. A single element has a number of
    /// its own, even the last of several, which has the number of the array then.
    fn stands_for_several(&self) -> bool {
        let tasks = self.array_task.split(|byte| *byte == b'%').next().unwrap_or_default();
        tasks != b"N/A" && !tasks.iter().all(u8::is_ascii_digit)
    }

    /// The pending rest of an array, if it is held until its input is there: such an element would never start, because
    /// what is not seen is not released.
    fn held_array(&self) -> Result<Option<HeldArray>, WlmError> {
        if !self.is_marked(0)
            || standing(&text(self.state), &text(self.reason), self.priority()?) != Standing::Held
        {
            return Ok(None);
        }
        // `2-9`, `1,5`, `0-8:2%3`, and with an ellipsis if there are many: the first number is that of the next one.
        let digits = self.array_task.iter().take_while(|byte| byte.is_ascii_digit()).count();
        Ok(Some(HeldArray {
            array: JobId(self.number("number", self.job)?),
            next: self.number("number in its array", &self.array_task[..digits])?,
        }))
    }

    /// The array that it is of, in whole or in part.
    fn array(&self) -> Result<Option<JobId>, WlmError> {
        if self.array_task == b"N/A" {
            return Ok(None);
        }
        Ok(Some(JobId(self.number("array", self.array)?)))
    }

    /// Of a single element of an array: which.
    fn element(&self) -> Result<Option<Element>, WlmError> {
        let task = self.array_task.split(|byte| *byte == b'%').next().unwrap_or_default();
        let Some(array) = self.array()? else { return Ok(None) };
        Ok(Some(Element { array, task: self.number("number in its array", task)? }))
    }

    /// Of a component of a heterogeneous job: which.
    fn component_of(&self) -> Result<Option<JobId>, WlmError> {
        match self.het_job {
            b"N/A" | b"(null)" | b"" | b"0" => Ok(None),
            number => Ok(Some(JobId(self.number("heterogeneous job", number)?))),
        }
    }

    /// Whether the present life of a job was held for its input: what was requeued and is held was held by somebody else.
    fn is_marked(&self, restarts: u32) -> bool {
        let mark = mark(restarts);
        text(self.admin_comment).split_whitespace().any(|word| word == mark)
    }

    /// Whether Slurm's plugin has found lines of ours, as the site's burst_buffer.conf has it look for.
    fn has_burst_buffer(&self) -> bool {
        self.burst_buffer.starts_with(b"#RSA")
    }

    /// Whether Slurm says that it has asked for its input and is not answered. The reason that it shows may be another one: of a job
    /// behind others it is that.
    fn waits_for_its_input(&self) -> bool {
        self.has_burst_buffer() && self.state == b"PENDING" && self.burst_buffer_state == b"staging-in"
    }

    /// Before which time it does not start, if anybody has said so. Slurm shows the submission where nobody has.
    fn begin_time(&self, job: JobId) -> Option<(JobId, u64)> {
        seconds(self.begin).map(|begin| (job, begin))
    }

    fn priority(&self) -> Result<u64, WlmError> {
        self.number("priority", self.priority)
    }

    fn job(&self) -> Result<QueuedJob, WlmError> {
        let state = text(self.state);
        let priority = self.priority()?;
        let reason = text(self.reason);
        let standing = standing(&state, &reason, priority);
        let start = seconds(self.start);
        let mut restarts: u32 = self.number("restart count", self.restarts)?;
        let requeued = state == "COMPLETING" && self.is_requeued(start);
        if requeued {
            restarts = restarts.saturating_sub(1);
        }
        let nodes = if self.nodes.is_empty() { self.scheduled_nodes } else { self.nodes };
        let submitted = self.number("submit time", self.submitted)?;
        Ok(QueuedJob {
            id: Incarnation { job: JobId(self.number("number", self.job)?), submitted, restarts },
            owner: Owner { uid: self.number("user", self.uid)?, gid: self.number("group", self.gid)? },
            account: text(self.account),
            standing,
            reason,
            node_count: self.number("number of nodes", self.node_count)?,
            nodes: self.expand(&text(nodes))?,
            // What squeue shows for an old life that still ends is the present time.
            start: start.filter(|_| !requeued),
            submitted,
            priority,
            qos: text(self.qos),
            held_for_input: self.is_marked(restarts),
            // Known when all jobs are.
            dependent: false,
            depends_on: Vec::new(),
            component_of: self.component_of()?,
            several: false,
            has_burst_buffer: self.has_burst_buffer(),
            // Known when Slurm was asked for its burst buffers.
            burst_buffer_lost: false,
            // Those of another plugin are none of ours.
            waits_for_results: state == "STAGE_OUT" && self.has_burst_buffer(),
        })
    }

    /// Whether a job that is COMPLETING is to start again. Slurm shows it in no field, but such a job is pending to
    /// squeue, which gives it no time used, and an end that is unknown or that lies ahead by its time limit, of at least
    /// a minute.
    fn is_requeued(&self, start: Option<u64>) -> bool {
        self.used == b"0:00"
            && match (start, seconds(self.end)) {
                (Some(start), Some(end)) => end >= start + 60,
                _ => true,
            }
    }

    fn number<T: FromStr>(&self, what: &str, field: &[u8]) -> Result<T, WlmError> {
        text(field).parse().map_err(|_| self.malformed(what, field))
    }

    fn expand(&self, list: &str) -> Result<Vec<NodeName>, WlmError> {
        let malformed = || self.malformed("nodes", list.as_bytes());
        let names = hostlist::expand(list, MOST_NODES).map_err(|_| malformed())?;
        names.iter().map(|name| name.parse().map_err(|_| malformed())).collect()
    }

    fn malformed(&self, what: &str, field: &[u8]) -> WlmError {
        let shown =
            |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(120)]).escape_debug().to_string();
        WlmError::Malformed {
            what: format!("squeue: job {}: its {what} is `{}`", shown(self.job), shown(field)),
        }
    }
}

/// A time in seconds since 1970; `N/A`, `NONE` and `Unknown` are none.
fn seconds(field: &[u8]) -> Option<u64> {
    std::str::from_utf8(field).ok()?.parse().ok().filter(|time| *time > 0)
}

/// Where a job stands, by its state (squeue(1), job state codes).
fn standing(state: &str, reason: &str, priority: u64) -> Standing {
    match state {
        // A hold is a priority of zero. Its reason may be anything, such as `job requeued in held state`, and a user
        // who changes the niceness of a held job leaves the reason and changes the number.
        "PENDING" | "REQUEUED" | "REQUEUE_FED" if priority == 0 => Standing::Held,
        "PENDING" if matches!(reason, "JobHeldUser" | "JobHeldAdmin") => Standing::Held,
        "REQUEUE_HOLD" | "SPECIAL_EXIT" | "RESV_DEL_HOLD" => Standing::Held,
        "PENDING" if reason == "Resources" => Standing::Next,
        // Its burst buffer was asked for its input.
        "PENDING" if reason == "BurstBufferStageIn" => Standing::StagingIn,
        // Any change of a job, also of its comment, makes it so until the next pass of Slurm's scheduler.
        "PENDING" if reason == "None" => Standing::Unjudged,
        "PENDING" | "REQUEUED" | "REQUEUE_FED" => Standing::Waiting,
        "CONFIGURING" | "POWER_UP_NODE" => Standing::Configuring,
        // After SIGTERM its processes have KillWait (30 s) to write what they must.
        "COMPLETING" => Standing::Ending,
        "STAGE_OUT" | "BOOT_FAIL" | "CANCELLED" | "COMPLETED" | "DEADLINE" | "FAILED" | "NODE_FAIL"
        | "OUT_OF_MEMORY" | "PREEMPTED" | "REVOKED" | "TIMEOUT" | "LAUNCH_FAILED" | "RECONFIG_FAIL" => {
            Standing::Ended
        }
        // RUNNING, SUSPENDED, STOPPED, RESIZING, SIGNALING, and what later versions add: nothing may be taken away
        // from a job that may run.
        _ => Standing::Running,
    }
}

#[cfg(test)]
mod tests;
