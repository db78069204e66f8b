//! Programs: what a job's script runs, and how programs of some names use files.
//!
//! A job's *program* is what its history is kept under: what the script starts by `srun` or `mpirun` first, by an
//! interpreter the interpreter's script, and without either the job's own name. Numbers in it are one: `case-12` and
//! `case-13` are one program. A script is read as text; nothing in it is run, and no variable is known.

use serde::Deserialize;

use crate::census::pattern_of;
use crate::pattern::Pattern;
use crate::shell::{Command, commands};

/// What starts a program on all nodes.
const LAUNCHERS: [&str; 9] =
    ["srun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun", "aprun", "jsrun", "ibrun"];

/// What stands in front of a program and is none.
const PREFIXES: [&str; 12] = [
    "exec", "time", "nohup", "env", "nice", "numactl", "taskset", "command", "stdbuf", "timeout", "strace",
    "valgrind",
];

/// What runs a script: then that is the program.
const INTERPRETERS: [&str; 10] =
    ["python", "python3", "python2", "bash", "sh", "perl", "julia", "Rscript", "matlab", "lua"];

/// Interpreters that take a script of a shell's behind `-c`.
const SHELLS: [&str; 2] = ["bash", "sh"];

/// Options of launchers that have a value, which is the next word. Others with two dashes have theirs behind `=`, or none.
const WITH_VALUE: [&str; 53] = [
    "-n",
    "-N",
    "-c",
    "-p",
    "-A",
    "-J",
    "-o",
    "-e",
    "-i",
    "-t",
    "-w",
    "-x",
    "-D",
    "-G",
    "-C",
    "-q",
    "-d",
    "-m",
    "-np",
    "-H",
    "-f",
    "-ppn",
    "-genv",
    "-hosts",
    "--np",
    "--ntasks",
    "--nodes",
    "--cpus-per-task",
    "--ntasks-per-node",
    "--nodelist",
    "--partition",
    "--account",
    "--job-name",
    "--output",
    "--error",
    "--time",
    "--mpi",
    "--mem",
    "--gpus",
    "--host",
    "--hostfile",
    "--map-by",
    "--bind-to",
    "--chdir",
    "--comment",
    "--constraint",
    "--reservation",
    "--qos",
    "--gres",
    "--input",
    "--distribution",
    "--cpu-bind",
    "--mem-per-cpu",
];

/// The longest name of a program, in characters.
const LONGEST: usize = 100;

/// The most commands of a script that are looked at.
const MOST_COMMANDS: usize = 10_000;

/// What a shell does itself, and what it begins with words that are no program.
const BUILTINS: [&str; 27] = [
    "cd", "export", "set", "ulimit", "umask", "module", "source", ".", "unset", "for", "case", "select",
    "function", "trap", "read", "true", ":", "wait", "eval", "shift", "exit", "return", "[", "[[", "test",
    "local", "esac",
];

/// The program of a job: its name for the history, and for the table of names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobProgram {
    /// What its history is kept under.
    pub key: String,
    /// Its name without a directory.
    pub name: String,
}

/// The program of a job, by its script and its name.
///
/// ```
/// use ondeck_layout::programs::program_of;
/// let of = |script: &str| program_of("case-12", script.as_bytes()).key;
/// assert_eq!(of("#!/bin/sh\nmodule load x\nsrun -n 4 --mpi=pmix ./build/solver --steps 9\n"), "solver");
/// assert_eq!(of("#!/bin/sh\nsrun python3 -u train.py\n"), "train.py");
/// assert_eq!(of("#!/bin/sh\n./solver\n"), "case-#");
/// ```
pub fn program_of(job_name: &str, script: &[u8]) -> JobProgram {
    JobProgram::of(started_by(script), job_name)
}

/// What a script starts first by a launcher; nothing if it starts nothing so.
pub fn started_by(script: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(script);
    commands(&text).take(MOST_COMMANDS).find_map(|words| launched(&words))
}

impl JobProgram {
    /// The program of a job whose script starts something by a launcher, or not.
    pub fn of(started: Option<String>, job_name: &str) -> JobProgram {
        let name: String = started
            .as_deref()
            .unwrap_or(job_name)
            .chars()
            .filter(|c| !c.is_control())
            .take(LONGEST)
            .collect();
        JobProgram { key: key_of(&name), name }
    }
}

/// What the history of a program is kept under, by its name or path.
pub fn key_of(name: &str) -> String {
    pattern_of(base(name).as_ref()).chars().filter(|c| !c.is_control()).take(LONGEST).collect()
}

/// The program that a command starts by a launcher.
fn launched(words: &Command) -> Option<String> {
    let launcher = words.iter().position(|word| !stands_in_front(word))?;
    if !LAUNCHERS.contains(&base(&words[launcher])) {
        return None;
    }
    program_in(&words[launcher + 1..])
}

/// Whether a word may stand in front of a program: a variable is set, or something is said of how it runs.
fn stands_in_front(word: &str) -> bool {
    word.contains('=') || PREFIXES.contains(&base(word))
}

/// The program of these words, behind options.
fn program_in(words: &[String]) -> Option<String> {
    let mut is_value = false;
    let mut interpreter: Option<String> = None;
    for (place, word) in words.iter().enumerate() {
        if is_value {
            is_value = false;
        } else if let Some(name) = &interpreter
            && ["-c", "-e", "-E", "-"].contains(&word.as_str())
        {
            // A script of its own. That of another language has other commands.
            let is_shell = word == "-c" && SHELLS.contains(&name.as_str());
            let Some(script) = words.get(place + 1).filter(|_| is_shell) else { return interpreter };
            let of_script = commands(script).take(MOST_COMMANDS).find_map(|words| run_by(&words));
            return of_script.or(interpreter);
        } else if word.starts_with('-') {
            // To a launcher it names a file of hosts.
            let is_flag = word == "-f" && words[..place].iter().any(|word| base(word) == "strace");
            is_value = interpreter.is_none() && !is_flag && WITH_VALUE.contains(&word.as_str());
        } else if (word.starts_with('$') && !word.contains('/')) || stands_in_front(word) {
            // A variable may be anything, or nothing; behind a directory stands a name.
        } else if place > 0 && words[place - 1] == "timeout" {
            // So long.
        } else if interpreter.is_none() && INTERPRETERS.contains(&base(word)) {
            interpreter = Some(base(word).to_owned());
        } else if !base(word).is_empty() {
            return Some(base(word).to_owned());
        }
    }
    interpreter
}

/// The program that a command runs; nothing if that is the shell's own.
fn run_by(words: &[String]) -> Option<String> {
    let first = words.iter().find(|word| !stands_in_front(word))?;
    if BUILTINS.contains(&first.as_str()) { None } else { program_in(words) }
}

fn base(word: &str) -> &str {
    word.rsplit('/').next().unwrap_or(word)
}

/// How programs of some names use files.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Programs {
    /// The lines of the table, in their order.
    #[serde(rename = "program", default)]
    pub lines: Vec<ProgramLine>,
}

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramLine {
    /// A name; `*` stands for any letters.
    pub name: String,
    /// How such programs use files.
    pub pattern: Pattern,
}

impl Programs {
    /// The table of this crate.
    pub fn built_in() -> Programs {
        match toml::from_str(include_str!("../rules/programs.toml")) {
            Ok(programs) => programs,
            // A test reads it.
            Err(error) => unreachable!("the table of this crate: {error}"),
        }
    }

    /// The first line for a program.
    pub fn find(&self, name: &str) -> Option<&ProgramLine> {
        let name = base(name).to_lowercase();
        self.lines.iter().find(|line| fits(&line.name.to_lowercase(), &name))
    }
}

/// Whether a name is as a line has it.
fn fits(line: &str, name: &str) -> bool {
    let Some((first, rest)) = line.split_once('*') else { return line == name };
    let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    let Some(name) = name.strip_prefix(first).and_then(|name| name.strip_suffix(last)) else { return false };
    // Each part as early as it can be leaves most for the next.
    middle
        .split('*')
        .try_fold(name, |left, part| left.find(part).map(|at| &left[at + part.len()..]))
        .is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_what_the_script_starts_or_else_the_job_by_its_name() {
        let of = |script: &str| program_of("run-0012.sh", script.as_bytes()).key;
        for (script, key) in [
            ("#SBATCH -n 4\n# srun ./no\nsrun ./solver a b\nsrun ./other\n", "solver"),
            ("srun --nodes 1 --ntasks 32 /opt/x/render2 in\n", "render#"),
            ("time mpirun -np 8 --bind-to core env A=1 pw.x < in\n", "pw.x"),
            ("mpiexec -n $SLURM_NTASKS python -u train.py 3\n", "train.py"),
            ("if srun \"$HOME/bin/a.out\"; then true; fi\n", "a.out"),
            ("srun $PROGRAM\n", "run-#.sh"),
            ("srun hostname > x\nsrun ./b\n", "hostname"),
            ("srun python\n", "python"),
            ("srun\nsrun \\\n  ./x\n", "x"),
            ("srun bash -c 'echo x'\n", "echo"),
            ("srun sh -c 'cd $DIR && ulimit -c 0; A=1 ./solver x'\n", "solver"),
            ("srun sh -c '$COMMAND'\n", "sh"),
            ("srun bash -c 'if true; then ./b; fi'\n", "b"),
            ("srun perl -e 1\n", "perl"),
            ("srun python3 - in <<E\nE\n", "python#"),
            ("srun python -c 'import x; x.y()'\n", "python"),
            ("srun nice -n 5 timeout 60 ./b\n", "b"),
            ("srun strace -f -o /dev/null ./b\n", "b"),
            ("srun bash -c 'exec > f; for k in 1 2; do [ -e x ] || head -c 9 in; done'\n", "head"),
            ("run() { srun \"$@\"; }\nrun ./x\n", "run-#.sh"),
            ("run() {\n  srun \"$@\"\n}\nsrun ./y\n", "y"),
            ("srun ./b;./a\n", "b"),
            ("srun ./b>o\n", "b"),
            ("srun -n1 sqlite3|tar c x\n", "sqlite#"),
            ("echo srun ./no; A=1 nohup srun ./yes &\n", "yes"),
            ("echo \"srun ./no\"\ncat <<E\nsrun ./no\nE\n", "run-#.sh"),
            ("srun --export=ALL,A='x y' --comment 'a b' \"./my solver\" in\n", "my solver"),
            ("for i in 1 2; do srun ./step $i; done\n", "step"),
            ("", "run-#.sh"),
        ] {
            assert_eq!(of(script), key, "{script}");
        }
        let strange = program_of(&"\u{7}ä".repeat(5000), &[0xff; 100]);
        assert!(strange.key.chars().count() <= LONGEST && !strange.key.contains('\u{7}'));
    }

    #[test]
    fn the_table_of_names_is_read_and_has_the_report_s_modes() {
        let programs = Programs::built_in();
        let pattern = |name: &str| programs.find(name).map(|line| line.pattern);
        assert_eq!(pattern("/home/me/ior_mps.slurm"), Some(Pattern::Shared));
        assert_eq!(pattern("ior_mpm.slurm"), Some(Pattern::FilePerProcess));
        assert_eq!(pattern("icoFoam"), Some(Pattern::FilePerProcess));
        // Their names don't say it.
        assert_eq!((pattern("pw.x"), pattern("flash4")), (None, None));
        assert_eq!(
            (pattern("foamRun"), pattern("foamRunner"), pattern("")),
            (Some(Pattern::FilePerProcess), None, None)
        );
        for (line, name, is) in [
            ("*", "", true),
            ("a*", "a", true),
            ("*a*b", "xaxbxb", true),
            ("a*b*c", "abc", true),
            ("a*b*c", "acb", false),
            ("*b", "ab", true),
            ("*b", "ba", false),
            ("", "", true),
            ("a**", "ab", true),
            ("*é", "é", true),
        ] {
            assert_eq!(fits(line, name), is, "{line} {name}");
        }
    }
}
