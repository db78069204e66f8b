//! Which files were written by which processes, as it follows from the order of what the kernel tells.
//!
//! The kernel tells of each file that is opened, and of each that is closed and was open for writing, with the process that did it. Events
//! of one process and file that nobody has read yet become one, so that of a short write its end stands at the place of its beginning.
//! What is certain all the same is when a process was *there*: from its first event to its last, and, as it is asked after each
//! batch of events which writers are alive, mostly to its end.
//!
//! Two processes that have written a file did so *at once* if they were there at the same time ([`ondeck_layout::watched`]). If both
//! came and went within one batch, that can't be told. Only processes of the job count; of one that is gone before it could be asked, it
//! can't be told either. Where processes say which rank of which step they are, different ranks of one
//! step count as such in any case: each may start a program for each of its writes.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ondeck_layout::watched::{FileSeen, KindSeen};
use ondeck_transfer::identity::FileHandle;

/// More written files are a sample of them.
const MOST_FILES: usize = 1 << 16;

/// More processes that write are too many.
const MOST_WRITERS: usize = 1 << 17;

/// Of one file so many writers are told apart; nobody needs to know more exactly.
const MOST_OF_A_FILE: usize = 4096;

/// So many processes that have opened something are remembered; of others it is known later that they were there.
const MOST_OPENERS: usize = 1 << 16;

/// Of a stranger it is asked with each of so many events whether it has become one of the job's, and seldom after that.
const OFTEN: u32 = 16;

/// A file on one of the watched filesystems.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileKey {
    /// The filesystem.
    pub filesystem: u64,
    /// The file.
    pub handle: FileHandle,
}

/// What the kernel tells of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The process that did it; 0 for one that can't be seen from here.
    pub process: u32,
    /// The file.
    pub file: FileKey,
    /// Whether it was closed, and had been open for writing.
    pub written: bool,
}

/// Which process of a parallel program one belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rank {
    /// A number for the step of the job.
    pub step: u64,
    /// A number for the rank in it.
    pub rank: u64,
}

/// Who a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// It is one of the job that is watched, and says of which rank, or not.
    OfJob(Option<Rank>),
    /// It is somebody else's.
    Stranger,
    /// It is gone.
    Gone,
}

/// Who can be asked of processes.
pub trait Processes {
    /// Whether a process is there.
    fn is_there(&self, process: u32) -> bool;

    /// Who it is.
    fn who(&self, process: u32) -> Who;
}

/// A process that has written nothing yet, as far as it is known.
#[derive(Clone, Copy, Debug)]
struct Opener {
    first: u64,
    who: Who,
    events: u32,
}

impl Opener {
    /// Whether it is worth while to ask again who it is: what starts a task becomes the task.
    fn may_be_another(&mut self) -> bool {
        self.events = self.events.saturating_add(1);
        self.who == Who::Stranger && (self.events < OFTEN || self.events.is_power_of_two())
    }
}

/// A process that has written.
#[derive(Clone, Copy, Debug)]
struct Writer {
    rank: Option<Rank>,
    /// When it was there for the first time, and for the last that is certain. Times are numbers of events.
    first: u64,
    last: u64,
    /// For the last time that is possible.
    latest: u64,
    /// The batch of its last event.
    batch: u64,
}

/// Who has written a file.
#[derive(Debug, Default)]
struct OfFile {
    writers: BTreeSet<usize>,
    /// Whether somebody has who was gone before it could be asked who that was.
    by_unknown: bool,
}

/// The writers of files.
#[derive(Debug, Default)]
pub struct Writers {
    writers: Vec<Writer>,
    /// The one that has this number now.
    alive: HashMap<u32, usize>,
    /// When processes that have written nothing yet were there for the first time.
    openers: HashMap<u32, Opener>,
    /// How many of them were alive when that was asked last.
    kept_openers: usize,
    files: HashMap<FileKey, OfFile>,
    /// Files of a higher rank are left out.
    sampled_up_to: Option<u64>,
    now: u64,
    batch: u64,
    /// Why this is not all.
    lack: Option<&'static str>,
}

impl Writers {
    /// The kernel has thrown events away.
    pub fn lose(&mut self) {
        self.lack = Some("more files were opened at a time than the kernel remembers");
    }

    /// Takes a batch of events.
    pub fn take(&mut self, events: impl IntoIterator<Item = Event>, processes: &impl Processes) {
        self.batch += 1;
        let mut is_news = false;
        for event in events {
            self.now += 1;
            // Of another namespace of processes: none of ours.
            if event.process != 0 {
                is_news |= self.take_one(event, processes);
            }
        }
        if is_news {
            self.look_who_is_alive(processes);
        }
    }

    /// Whether somebody is new.
    fn take_one(&mut self, Event { process, file, written }: Event, processes: &impl Processes) -> bool {
        if let Some(known) = self.alive.get(&process) {
            let (writer, now, batch) = (&mut self.writers[*known], self.now, self.batch);
            (writer.last, writer.latest, writer.batch) = (now, now, batch);
            if written {
                let known = *known;
                self.note(file, Some(known));
            }
            return false;
        }
        let now = self.now;
        let is_known = self.openers.contains_key(&process);
        if !is_known && self.openers.len() >= MOST_OPENERS && !written {
            return true;
        }
        // It is asked at once, as it may be gone when it closes the file.
        let ask = || Opener { first: now, who: processes.who(process), events: 0 };
        let opener = self.openers.entry(process).or_insert_with(ask);
        let is_written_by_known = written && is_known && opener.who != Who::Stranger;
        if opener.may_be_another() || is_written_by_known {
            match processes.who(process) {
                Who::Gone => {}
                who => opener.who = who,
            }
        }
        let Opener { first, who, .. } = *opener;
        if !written || who == Who::Stranger {
            return !is_known;
        }
        self.openers.remove(&process);
        let Who::OfJob(rank) = who else {
            self.note(file, None);
            return false;
        };
        if self.writers.len() >= MOST_WRITERS {
            self.lack = Some("more processes have written files than are told apart");
            return false;
        }
        let (last, batch) = (self.now, self.batch);
        let writer = Writer { rank, first, last, latest: last, batch };
        self.writers.push(writer);
        let known = self.writers.len() - 1;
        self.alive.insert(process, known);
        self.note(file, Some(known));
        true
    }

    /// A file was written, by one of these or by somebody unknown.
    fn note(&mut self, file: FileKey, writer: Option<usize>) {
        if self.sampled_up_to.is_some_and(|most| file.handle.rank() > most) {
            return;
        }
        let of_file = self.files.entry(file).or_default();
        of_file.by_unknown |= writer.is_none();
        if of_file.writers.len() < MOST_OF_A_FILE {
            of_file.writers.extend(writer);
        }
        if self.files.len() > MOST_FILES {
            let mut ranks: Vec<u64> = self.files.keys().map(|file| file.handle.rank()).collect();
            let (_, middle, _) = ranks.select_nth_unstable(MOST_FILES / 2);
            let most = *middle;
            self.files.retain(|file, _| file.handle.rank() <= most);
            self.sampled_up_to = Some(most);
        }
    }

    fn look_who_is_alive(&mut self, processes: &impl Processes) {
        let (now, batch, writers) = (self.now, self.batch, &mut self.writers);
        self.alive.retain(|process, known| {
            let writer = &mut writers[*known];
            let is_alive = processes.is_there(*process);
            if is_alive {
                (writer.last, writer.latest) = (now, now);
            } else if writer.batch == batch {
                // It went somewhen in this batch.
                writer.latest = now;
            }
            is_alive
        });
        // A number is used again for another process, some time after the end of the first.
        if self.openers.len() > self.kept_openers * 2 + 64 {
            self.openers.retain(|process, _| processes.is_there(*process));
            self.kept_openers = self.openers.len();
        }
    }

    /// Why what is told is not all; nothing if it is.
    pub fn lack(&self) -> Option<&'static str> {
        self.lack
    }

    /// What is known of the files of a kind.
    pub fn seen(&self, files: &[FileKey]) -> KindSeen {
        let mut all = BTreeSet::new();
        let of_file = |file: &FileKey| {
            let Some(of_file) = self.files.get(file) else {
                let is_left_out = self.sampled_up_to.is_some_and(|most| file.handle.rank() > most);
                return FileSeen { writers: 0, is_exact: !is_left_out };
            };
            all.extend(of_file.writers.iter().copied());
            self.at_once(of_file)
        };
        let files = files.iter().map(of_file).collect();
        // If it can't be told, that is so of files, too.
        let at_once = self.most(&all, |writer| writer.last).max(self.ranks(&all));
        KindSeen { files, at_once }
    }

    /// How many of them were there at the same time at most.
    fn at_once(&self, OfFile { writers, by_unknown }: &OfFile) -> FileSeen {
        let certain = self.most(writers, |writer| writer.last).max(self.ranks(writers));
        let possible = self.most(writers, |writer| writer.latest);
        FileSeen { writers: certain, is_exact: certain >= possible && !by_unknown }
    }

    /// How many ranks of one step are among them.
    fn ranks(&self, writers: &BTreeSet<usize>) -> u32 {
        let mut steps: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for rank in writers.iter().filter_map(|writer| self.writers[*writer].rank) {
            steps.entry(rank.step).or_default().insert(rank.rank);
        }
        let most = steps.values().map(BTreeSet::len).max().unwrap_or(0);
        u32::try_from(most).unwrap_or(u32::MAX)
    }

    fn most(&self, writers: &BTreeSet<usize>, until: impl Fn(&Writer) -> u64) -> u32 {
        // Processes of a rank are one: a program may open a file and have another process write it.
        let mut ranks: BTreeMap<(Option<Rank>, usize), (u64, u64)> = BTreeMap::new();
        for number in writers {
            let writer = &self.writers[*number];
            let alone = if writer.rank.is_some() { 0 } else { *number };
            let there = ranks.entry((writer.rank, alone)).or_insert((u64::MAX, 0));
            *there = (there.0.min(writer.first), there.1.max(until(writer)));
        }
        // Who comes at the time at which another one was there for the last time meets that one.
        let mut times: Vec<(u64, bool)> =
            ranks.into_values().flat_map(|(first, last)| [(first, false), (last, true)]).collect();
        times.sort_unstable();
        let (mut there, mut most) = (0u32, 0u32);
        for (_, goes) in times {
            if goes {
                there -= 1;
            } else {
                there += 1;
                most = most.max(there);
            }
        }
        most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Those that are there, and what they say of themselves.
    #[derive(Default)]
    struct Pretended {
        there: Vec<u32>,
        ranks: BTreeMap<u32, Rank>,
        strangers: Vec<u32>,
        gone: Vec<u32>,
    }

    impl Processes for Pretended {
        fn is_there(&self, process: u32) -> bool {
            self.there.contains(&process)
        }

        fn who(&self, process: u32) -> Who {
            match process {
                stranger if self.strangers.contains(&stranger) => Who::Stranger,
                gone if self.gone.contains(&gone) => Who::Gone,
                process => Who::OfJob(self.ranks.get(&process).copied()),
            }
        }
    }

    /// How many writers each file has; with fewer than 0 so many at least, and one more is said.
    fn told(seen: &KindSeen) -> Vec<i32> {
        let number = |seen: &FileSeen| (seen.writers.cast_signed(), seen.is_exact);
        let number = |seen| match number(seen) {
            (writers, true) => writers,
            (writers, false) => -(writers + 1),
        };
        seen.files.iter().map(number).collect()
    }

    fn key(file: u8) -> FileKey {
        FileKey { filesystem: 1, handle: FileHandle::new(1, &[file]) }
    }

    fn opened(process: u32, file: u8) -> Event {
        Event { process, file: key(file), written: false }
    }

    fn written(process: u32, file: u8) -> Event {
        Event { process, file: key(file), written: true }
    }

    /// Batches of events, each with those that are there after it; what is known of files then.
    fn seen(batches: &[(&[Event], &[u32])], files: &[u8]) -> KindSeen {
        let mut writers = Writers::default();
        for (events, there) in batches {
            let processes = Pretended { there: there.to_vec(), ..Pretended::default() };
            writers.take(events.to_vec(), &processes);
        }
        let keys: Vec<FileKey> = files.iter().map(|file| key(*file)).collect();
        writers.seen(&keys)
    }

    #[test]
    fn processes_that_live_at_once_have_written_at_once_and_those_that_a_script_starts_one_after_the_other_have_not()
     {
        // Each writes a file of its own and all of them one, in any order.
        let ranks: Vec<Event> =
            (1..=3).flat_map(|rank| [written(rank, 9), written(rank, rank as u8)]).collect();
        let found = seen(&[(&ranks, &[1, 2, 3])], &[9, 1, 2, 3, 4]);
        assert_eq!(told(&found), [3, 1, 1, 1, 0]);
        assert_eq!(found.at_once, 3);
        let steps = [
            (&[opened(1, 9), written(1, 9)][..], &[1][..]),
            (&[opened(2, 9)], &[2]),
            (&[written(2, 9)], &[2]),
            (&[written(3, 9)], &[3]),
        ];
        let found = seen(&steps, &[9]);
        assert_eq!((told(&found), found.at_once), (vec![1], 1));
    }

    #[test]
    fn who_opened_a_file_before_another_one_closed_it_was_there_at_once_also_if_one_of_them_is_gone() {
        let batches = [
            (&[opened(1, 9)][..], &[1][..]),
            (&[opened(2, 9)], &[1, 2]),
            (&[written(1, 9)], &[2]),
            (&[written(2, 9)], &[]),
        ];
        assert_eq!(told(&seen(&batches, &[9])), [2]);
    }

    #[test]
    fn of_two_that_came_and_went_before_anybody_looked_it_can_not_be_told() {
        let batch = [written(1, 9), written(2, 9), written(3, 8)];
        assert_eq!(told(&seen(&[(&batch, &[])], &[9, 8])), [-2, 1]);
        // If one of them goes on, it is known when the other one comes.
        let batches = [(&[written(1, 9)][..], &[1][..]), (&[written(2, 9)], &[1]), (&[written(3, 9)], &[])];
        assert_eq!(told(&seen(&batches, &[9])), [2]);
    }

    #[test]
    fn ranks_of_a_step_write_at_once_whatever_they_start_for_it_and_a_step_is_not_another_one() {
        let mut writers = Writers::default();
        let rank = |process: u32| Rank { step: u64::from(process / 10), rank: u64::from(process % 10) };
        for process in [10, 11, 12, 20, 21, 30] {
            let processes =
                Pretended { ranks: BTreeMap::from([(process, rank(process))]), ..Pretended::default() };
            // Each ends before the next one begins.
            writers.take([opened(process, 9), written(process, 9)], &processes);
            writers.take([written(process + 1000, 8)], &Pretended::default());
        }
        let found = writers.seen(&[key(9), key(8)]);
        assert_eq!((told(&found), found.at_once), (vec![3, 1], 3));
        // Two processes of one rank that live at a time are one writer.
        let ranks = BTreeMap::from([(1, rank(10)), (2, rank(10))]);
        writers.take(
            [opened(1, 7), written(2, 7), written(1, 7)],
            &Pretended { there: vec![1, 2], ranks, ..Pretended::default() },
        );
        assert_eq!(told(&writers.seen(&[key(7)])), [1]);
    }

    #[test]
    fn strangers_do_not_count_until_they_become_tasks_and_of_who_is_gone_it_can_not_be_told() {
        let (mut writers, stranger) =
            (Writers::default(), Pretended { strangers: vec![1, 2], ..Pretended::default() });
        let batch = [opened(1, 9), written(1, 9), opened(2, 8), written(3, 9)];
        writers.take(batch, &stranger);
        let found = writers.seen(&[key(9), key(8)]);
        assert_eq!((told(&found), found.at_once), (vec![1, 0], 1));
        // What has started it was one of Slurm's daemons.
        writers.take([opened(2, 8), written(2, 8)], &Pretended { there: vec![2], ..Pretended::default() });
        assert_eq!(told(&writers.seen(&[key(8)])), [1]);
        writers.take([opened(4, 8), written(4, 8)], &Pretended { gone: vec![4], ..Pretended::default() });
        assert_eq!(told(&writers.seen(&[key(9), key(8)])), [1, -2]);
        // It was known when it opened the file.
        writers.take([opened(5, 7)], &Pretended::default());
        writers.take([written(5, 7)], &Pretended { gone: vec![5], ..Pretended::default() });
        assert_eq!(told(&writers.seen(&[key(7)])), [1]);
    }

    #[test]
    fn a_number_that_is_used_again_is_another_process_and_those_of_other_namespaces_are_none() {
        let batches = [(&[written(1, 9)][..], &[][..]), (&[written(2, 9)], &[2]), (&[written(1, 8)], &[1])];
        assert_eq!(told(&seen(&batches, &[9, 8])), [1, 1]);
        assert_eq!(told(&seen(&[(&[written(0, 9)], &[0])], &[9])), [0]);
    }

    #[test]
    fn of_very_many_files_a_sample_is_known_and_of_the_others_nothing_is_told() {
        let mut writers = Writers::default();
        let key = |number: u32| FileKey { filesystem: 1, handle: FileHandle::new(1, &number.to_le_bytes()) };
        let many = 3 * MOST_FILES as u32;
        for number in 0..many {
            let event = Event { process: 1, file: key(number), written: true };
            writers.take([event], &Pretended { there: vec![1], ..Pretended::default() });
        }
        assert!(writers.files.len() <= MOST_FILES && writers.lack().is_none());
        let keys: Vec<FileKey> = (0..many + 1000).map(key).collect();
        let found = told(&writers.seen(&keys));
        let known = found.iter().filter(|writers| **writers == 1).count();
        assert_eq!(known, writers.files.len());
        // Of one that is not there it is only said where all such are known.
        let most = writers.sampled_up_to.unwrap_or(0);
        let is_said = |place: usize| found[place] == 0;
        let new = many as usize..keys.len();
        assert!(new.clone().all(|place| is_said(place) == (keys[place].handle.rank() <= most)));
        assert!((0..many as usize).all(|place| !is_said(place)));
        writers.lose();
        assert!(writers.lack().is_some());
    }
}
