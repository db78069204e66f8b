//! The seven kinds of jobs: what each runs, with sizes, steps, ranks and names by a seed, and how it has used its files in truth.

use std::fmt;

/// Numbers from a seed (SplitMix64).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64, kind: u64, of: u64) -> Random {
        Random(seed.wrapping_mul(0x1000).wrapping_add(kind * 0x40 + of))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn between(&mut self, first: u64, last: u64) -> u64 {
        first + self.next() % (last - first + 1)
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.next() as usize % of.len()]
    }
}

/// How a job uses its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truth {
    EachProcess,
    OneFile,
    /// So many files at a time, each of several processes.
    Files(u64),
    SmallFiles,
    OneWriter,
    /// It writes next to nothing.
    Little,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    FilePerProcess,
    OneSharedFile,
    NToM,
    ReadMostly,
    ManySmallFiles,
    AppendLog,
    CheckpointRotation,
}

impl Kind {
    pub const ALL: [Kind; 7] = [
        Kind::FilePerProcess,
        Kind::OneSharedFile,
        Kind::NToM,
        Kind::ReadMostly,
        Kind::ManySmallFiles,
        Kind::AppendLog,
        Kind::CheckpointRotation,
    ];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Kind::FilePerProcess => "file per process",
            Kind::OneSharedFile => "one shared file",
            Kind::NToM => "N to M",
            Kind::ReadMostly => "read mostly",
            Kind::ManySmallFiles => "many small files",
            Kind::AppendLog => "append log",
            Kind::CheckpointRotation => "checkpoint rotation",
        })
    }
}

/// One run of a job.
pub struct Job {
    pub nodes: u64,
    pub ranks: u64,
    /// What each process runs, if the script starts it by `srun RANK`.
    pub rank: String,
    /// What its script runs in the job's directory.
    pub script: String,
    pub truth: Truth,
    /// Whether the files that it leaves have one explanation: if not, no answer is the best one.
    pub tells: bool,
    /// For people: what runs, and how files are called.
    pub what: String,
}

/// What differs from run to run.
struct Size {
    nodes: u64,
    ranks: u64,
    steps: u64,
    /// Seconds of computing before each step.
    pause: String,
    /// What each process writes in each step, a multiple of 64 KiB.
    bytes: u64,
}

impl Size {
    fn of(run: &mut Random, most_ranks: u64) -> Size {
        let nodes = run.between(1, 4);
        Size {
            nodes,
            ranks: run.between(nodes.max(2), most_ranks),
            steps: run.between(1, 4),
            pause: pause(run),
            bytes: run.between(16, 32) << 16,
        }
    }

    fn job(&self, rank: String, script: String, truth: Truth, what: String) -> Job {
        Job { nodes: self.nodes, ranks: self.ranks, rank, script, truth, tells: true, what }
    }
}

fn pause(run: &mut Random) -> String {
    format!("2.{}", run.between(0, 9))
}

/// What runs one of the programs with MPI. It takes more of this machine than a shell.
const MOST_MPI_RANKS: u64 = 6;

fn parallel(how: &str, groups: u64, size: &Size, (stride, keep): (u64, u64), name: &str) -> String {
    format!(
        "srun --mpi=pmi2 /usr/bin/python3 $PARALLEL {how} {groups} {} {} {} {stride} {keep} '{name}'\n",
        size.bytes, size.steps, size.pause
    )
}

/// A step after the other, in a shell of each process.
fn each_step(size: &Size, does: &str) -> String {
    let steps: Vec<String> = (1..=size.steps).map(|step| step.to_string()).collect();
    format!("for step in {}; do sleep {}; {does}; done", steps.join(" "), size.pause)
}

/// Writes its part of a file that it shares with others.
fn write_part(name: &str, place: &str, size: &Size) -> String {
    format!(
        "mkdir -p \"$(dirname {name})\"; dd if=/dev/zero of={name} bs=64k count={0} seek=$(({place} * {0})) conv=notrunc status=none",
        size.bytes >> 16
    )
}

/// A job of a kind. What `case` says is the same in all of its runs; `run` is of this one.
pub fn job(kind: Kind, case: &mut Random, run: &mut Random) -> Job {
    match kind {
        Kind::FilePerProcess => file_per_process(case, run),
        Kind::OneSharedFile => one_shared_file(case, run),
        Kind::NToM => n_to_m(case, run),
        Kind::ReadMostly => read_mostly(case, run),
        Kind::ManySmallFiles => many_small_files(case, run),
        Kind::AppendLog => append_log(case, run),
        Kind::CheckpointRotation => checkpoint_rotation(case, run),
    }
}

fn file_per_process(case: &mut Random, run: &mut Random) -> Job {
    match case.between(0, 3) {
        0 => {
            let size = Size::of(run, 12);
            let name = case.pick(&["step-$step.rank-", "dump_$step.", "part-"]);
            let fio = format!(
                "fio --output=fio.txt --name=rank --numjobs={} --size={} --rw=write --bs=64k --filename_format={name}'$jobnum'; rm fio.txt",
                size.ranks, size.bytes
            );
            let script = each_step(&size, &fio);
            size.job(String::new(), script, Truth::EachProcess, format!("fio, {name}N"))
        }
        1 => {
            let size = Size::of(run, MOST_MPI_RANKS);
            let (how, name) = case.pick(&[
                ("hdf5", "rank{group:03}/out.{step}.h5"),
                ("hdf5", "part_{group}.h5"),
                ("mpi", "dump.{step}.{group}"),
            ]);
            let script = parallel(how, size.ranks, &size, (1, 0), name);
            size.job(String::new(), script, Truth::EachProcess, format!("{how}, {name}"))
        }
        _ => {
            let size = Size::of(run, 12);
            let name = case.pick(&[
                "step-$step/rank-$rank.dat",
                "rank$rank/out.$step",
                "dump.$step.$rank.bin",
                "processor$rank/$step/U",
                "r${rank}_s$step",
                "part-$rank",
            ]);
            let write = format!("mkdir -p \"$(dirname {name})\"; head -c {} /dev/zero > {name}", size.bytes);
            size.job(
                each_step(&size, &write),
                "srun $RANK".into(),
                Truth::EachProcess,
                format!("a shell, {name}"),
            )
        }
    }
}

fn one_shared_file(case: &mut Random, run: &mut Random) -> Job {
    match case.between(0, 3) {
        0 => {
            let size = Size::of(run, 12);
            let name = case.pick(&["out.$step", "field.bin"]);
            let fio = format!(
                "fio --output=fio.txt --name=all --numjobs={} --size={1} --offset_increment={1} --rw=write --bs=64k --filename={name}; \
                 rm fio.txt",
                size.ranks, size.bytes
            );
            let script = each_step(&size, &fio);
            size.job(String::new(), script, Truth::OneFile, format!("fio, {name}"))
        }
        1 | 2 => {
            let size = Size::of(run, MOST_MPI_RANKS);
            let (how, name) = case.pick(&[
                ("hdf5", "result.h5"),
                ("hdf5", "plt_{step:04}.h5"),
                ("mpi", "fields/u.{step}"),
                ("mpi", "snapshot"),
            ]);
            let script = parallel(how, 1, &size, (1, 0), name);
            size.job(String::new(), script, Truth::OneFile, format!("{how}, {name}"))
        }
        _ => {
            let size = Size::of(run, 12);
            let name = case.pick(&["out/$step.dat", "all.nc"]);
            size.job(
                each_step(&size, &write_part(name, "rank", &size)),
                "srun $RANK".into(),
                Truth::OneFile,
                format!("dd, {name}"),
            )
        }
    }
}

fn n_to_m(case: &mut Random, run: &mut Random) -> Job {
    // As many as the program says, or one of each node.
    let fixed = case.pick(&[Some(2), Some(3), Some(4), None]);
    let is_mpi = case.between(0, 1) == 0;
    let mut size = Size::of(run, 12);
    if fixed.is_none() {
        size.nodes = run.between(2, 4);
    }
    let files = fixed.unwrap_or(size.nodes);
    let members = if is_mpi { 2 } else { run.between(2, 4) };
    size.ranks = files * members;
    size.nodes = size.nodes.min(size.ranks);
    if is_mpi {
        let (how, name) = case.pick(&[
            ("hdf5", "s{step}/io{group}.h5"),
            ("mpi", "data.{group}"),
            ("mpi", "dump-{group}.{step}"),
            ("hdf5", "subfile_{group}.h5"),
        ]);
        let script = parallel(how, files, &size, (1, 0), name);
        size.job(String::new(), script, Truth::Files(files), format!("{how}, {files} x {name}"))
    } else {
        let name = case.pick(&["s$step/io$group", "data.$group", "dump-$group.$step"]);
        let rank = format!("group=$((rank / {members}))\n")
            + &each_step(&size, &write_part(name, &format!("(rank % {members})"), &size));
        size.job(rank, "srun $RANK".into(), Truth::Files(files), format!("dd, {files} x {name}"))
    }
}

fn read_mostly(case: &mut Random, run: &mut Random) -> Job {
    let size = Size::of(run, 12);
    let results = run.between(1, 500);
    let summary = case.pick(&["summary.txt", "result.dat", "out/$SLURM_JOB_ID.json"]);
    let write =
        format!("\nmkdir -p \"$(dirname {summary})\"; head -c {results}k /dev/zero > \"{summary}\"\n");
    let (rank, read, what) = match case.between(0, 2) {
        0 => (each_step(&size, "cat $INPUT > /dev/null"), "srun $RANK".to_owned(), "cat"),
        1 => {
            let fio = format!(
                "fio --output=fio.txt --name=all --numjobs={} --size=8m --readonly --rw=randread --bs=64k --filename=$INPUT; rm fio.txt",
                size.ranks
            );
            (String::new(), each_step(&size, &fio), "fio")
        }
        _ => {
            let query = "sqlite3 -readonly $DATABASE 'select sum(length(value)) from samples' > /dev/null";
            (each_step(&size, query), "srun $RANK".to_owned(), "sqlite3")
        }
    };
    size.job(rank, read + &write, Truth::Little, format!("{what}, {summary}"))
}

fn many_small_files(case: &mut Random, run: &mut Random) -> Job {
    let size = Size::of(run, 8);
    let (each, bytes) = (run.between(12, 30), run.between(1, 60) << 10);
    match case.between(0, 2) {
        0 => {
            let fio = format!(
                "fio --output=fio.txt --name=small --numjobs={} --nrfiles={each} --filesize={bytes} --openfiles=4 --rw=write --bs=1k; \
                 rm fio.txt",
                size.ranks
            );
            let once = Size { steps: 1, ..size };
            let script = each_step(&once, &fio);
            once.job(String::new(), script, Truth::SmallFiles, "fio".into())
        }
        1 => {
            let split = format!(
                "head -c {} /dev/zero | split -a 3 -b {bytes} - part-$rank-$step-",
                bytes * each / size.steps
            );
            size.job(
                each_step(&size, &split),
                "srun $RANK".into(),
                Truth::SmallFiles,
                "split, part-N-N-aaa".into(),
            )
        }
        _ => {
            let name = case.pick(&["rank$rank/frame$frame.png", "tile-$rank-$frame", "$frame/$rank.vtk"]);
            let frames: Vec<String> = (1..=each).map(|frame| frame.to_string()).collect();
            let rank = format!(
                "sleep {}\nfor frame in {}; do mkdir -p \"$(dirname {name})\"; head -c {bytes} /dev/zero > {name}; done",
                size.pause,
                frames.join(" ")
            );
            size.job(rank, "srun $RANK".into(), Truth::SmallFiles, format!("a shell, {name}"))
        }
    }
}

fn append_log(case: &mut Random, run: &mut Random) -> Job {
    let size = Size::of(run, 12);
    let all = run.between(1100, 6000) << 10;
    let each = all / size.steps;
    let compute = format!("sleep {}", size.steps * 2);
    let (append, tells, what) = match case.between(0, 3) {
        0 => {
            let name = case.pick(&["events.db", "history.sqlite"]);
            let insert = "create table if not exists event (text); with recursive n(i) as (select 1 union all select i + 1 from n \
                          where i < ROWS) insert into event select hex(randomblob(500)) from n";
            let insert = insert.replace("ROWS", &(each / 1000).to_string());
            (format!("sqlite3 {name} '{insert}'"), true, format!("sqlite3, {name}"))
        }
        1 => {
            let name = case.pick(&["solver.log", "trace.csv"]);
            let fio = format!(
                "fio --output=fio.txt --name=log --size={each} --rw=write --bs=4k --file_append=1 --fallocate=none --filename={name}; \
                 rm fio.txt"
            );
            (fio, true, format!("fio, {name}"))
        }
        _ => {
            let (name, tells) = case.pick(&[
                ("run.log", true),
                ("md.log", true),
                ("log.lammps", true),
                ("thermo.txt", true),
                ("metrics.jsonl", true),
                ("OUTCAR", true),
                ("pw.out", false),
                ("monitor.dat", false),
            ]);
            (
                format!("yes 'step 17: all is well' | head -c {each} >> {name}"),
                tells,
                format!("a shell, {name}"),
            )
        }
    };
    let script = format!("srun $RANK &\n{}\nwait", each_step(&size, &append));
    Job { tells, ..size.job(compute, script, Truth::OneWriter, what) }
}

fn checkpoint_rotation(case: &mut Random, run: &mut Random) -> Job {
    let (is_of_each, style, keep) = (case.between(0, 2) == 0, case.between(0, 3), case.between(2, 3));
    let stride = case.pick(&[10, 50, 100, 250, 1000, 1]);
    let how = case.pick(&["dd", "mpi", "hdf5"]);
    let mut size = Size::of(run, if how == "dd" { 8 } else { MOST_MPI_RANKS });
    size.steps = run.between(4, 6);
    let truth = if is_of_each { Truth::EachProcess } else { Truth::OneFile };
    // By numbers that grow, of which the last are kept; by turns, in names with letters, or with numbers.
    let (parallel_name, shell_name) = match (style, is_of_each) {
        (0 | 1, false) => ("ckpt-{step:06}.h5", "ckpt-$number.dat"),
        (0 | 1, true) => ("ckpt-{step:06}/rank{group}.h5", "ckpt-$number/rank$rank"),
        (2, false) => ("state.{letter}", "state.$letter"),
        (2, true) => ("rank{group}.state.{letter}", "rank$rank.state.$letter"),
        (_, false) => ("ckpt.{slot}", "ckpt.$slot"),
        (_, true) => ("rank{group}.ckpt-{slot}", "rank$rank.ckpt-$slot"),
    };
    let is_numbered = style < 2;
    let kept = if is_numbered { keep } else { 0 };
    let mut job = if how == "dd" {
        let write = match is_of_each {
            true => format!(
                "mkdir -p \"$(dirname {shell_name})\"; head -c {} /dev/zero > {shell_name}",
                size.bytes
            ),
            false => write_part(shell_name, "rank", &size),
        };
        let rank = format!(
            "number=$(($STEP * {stride})) slot=$(($STEP % 2)) letter=$(echo ab | cut -c $(($STEP % 2 + 1)))\n{write}"
        );
        let old = match is_of_each {
            true => format!("ckpt-$(((step - {keep}) * {stride}))"),
            false => format!("ckpt-$(((step - {keep}) * {stride})).dat"),
        };
        let remove = if is_numbered { format!("rm -rf \"{old}\"") } else { ":".to_owned() };
        let script = each_step(&size, &format!("STEP=$step srun $RANK; {remove}"));
        size.job(rank, script, truth, format!("dd, {shell_name}"))
    } else {
        let groups = if is_of_each { size.ranks } else { 1 };
        let script = parallel(how, groups, &size, (stride, kept), parallel_name);
        size.job(String::new(), script, truth, format!("{how}, {parallel_name}"))
    };
    // Of a file of all in two places, or with numbers that ranks have, the names are those of files of processes.
    job.tells = is_of_each || style == 2 || (is_numbered && stride > 1);
    job.what = format!("{}, every {stride}, {keep} kept", job.what);
    job
}
