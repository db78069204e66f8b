//! What the Slurm of a testbed promises to the tests that stand on it.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ondeck_testbed::{Builder, Slurm, SlurmSetup, Testbed, available, wait_until};

#[path = "shared/leftovers.rs"]
mod leftovers;

use leftovers::{Traces, interfaces};

const DEADLINE: Duration = Duration::from_secs(30);
/// A job that goes on until a test ends it.
const ENDLESS: &str = "#!/bin/sh\nwhile :; do sleep 0.05; done\n";

fn builder(nodes: usize) -> Builder {
    Testbed::builder().host("ctl").hosts("c", nodes).binary(env!("CARGO_BIN_EXE_ondeck-testbed"))
}

fn setup(nodes: usize) -> SlurmSetup {
    SlurmSetup::new("ctl", (1..=nodes).map(|number| format!("c{number}")))
}

fn cluster(nodes: usize) -> (Testbed, Slurm) {
    let bed = builder(nodes).build().unwrap();
    let slurm = bed.slurm(setup(nodes)).unwrap();
    (bed, slurm)
}

/// Writes a program for Slurm to run.
fn program(path: PathBuf, text: &str) -> Option<PathBuf> {
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    Some(path)
}

/// The file's lines, sorted.
fn lines(path: &Path) -> Vec<String> {
    let mut lines: Vec<String> = fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn a_job_on_two_nodes_runs_as_the_user_who_submitted_it() {
    if !available() {
        return;
    }
    let (bed, slurm) = cluster(2);
    let alice = bed.user("alice");
    let script = "#!/bin/sh\npwd; id -un; id -Gn; echo $HOME $SLURM_JOB_NODELIST\nsrun hostname > nodes\n";
    let job = slurm.submit(alice, script, &["--nodes=2", "--job-name=two words", "--output=out"]);
    let ended = slurm.wait_state(job, "COMPLETED", DEADLINE);
    assert_eq!(ended["JobName"], "two words");
    assert_eq!(ended["UserId"], format!("alice({})", alice.uid));
    assert_eq!(ended["NodeList"], "c[1-2]");

    let out = alice.home.join("out");
    let home = alice.home.display();
    let said = format!("{home}\nalice\nalice team\n{home} c[1-2]\n");
    assert_eq!(fs::read_to_string(&out).unwrap(), said);
    let owner = fs::metadata(&out).unwrap();
    assert_eq!((owner.uid(), owner.gid()), (alice.uid, alice.gid));
    assert_eq!(lines(&alice.home.join("nodes")), ["c1", "c2"]);
}

#[test]
fn clients_work_on_every_host_without_an_environment() {
    if !available() {
        return;
    }
    let (bed, slurm) = cluster(1);
    let bob = bed.user("bob");
    let job = slurm.submit(bob, ENDLESS, &["--comment=a b=c"]);
    let seen = slurm.wait_state(job, "RUNNING", DEADLINE);
    assert_eq!(seen["Comment"], "a b=c");
    for host in bed.hosts() {
        let user = host.log_in(bed.user("alice"));
        assert_eq!(user.ok(&["squeue", "--noheader", "--format=%i %u %T"]), format!("{job} bob RUNNING\n"));
    }
    assert_eq!(slurm.client_as(bob, &["srun", "id", "-un"]).assert_success().stdout, "bob\n");
    slurm.client_as(bed.user("alice"), &["scancel", &job.to_string()]).assert_says("denied");
    slurm.cancel(job);
    slurm.wait_state(job, "CANCELLED", DEADLINE);
}

#[test]
fn a_mount_of_the_prolog_is_the_jobs_until_the_epilog() {
    if !available() {
        return;
    }
    let bed = builder(3).build().unwrap();
    let [source, target] = ["source", "target"].map(|name| bed.dir().join(name));
    for directory in [&source, &target] {
        fs::create_dir(directory).unwrap();
    }
    fs::write(source.join("file"), "of the prolog\n").unwrap();
    let log = bed.dir().join("scripts.log");
    let (source, target) = (source.display(), target.display());
    let script = |act: &str| {
        format!("#!/bin/sh\necho $0 $(id -u) $(hostname) $SLURM_JOB_ID >> {}\n{act}\n", log.display())
    };
    let setup = SlurmSetup {
        prolog: program(bed.dir().join("prolog"), &script(&format!("mount --bind {source} {target}"))),
        epilog: program(bed.dir().join("epilog"), &script(&format!("umount {target}"))),
        ..setup(3)
    };
    let slurm = bed.slurm(setup).unwrap();
    let alice = bed.user("alice");
    let batch = format!("#!/bin/sh\nsrun cat {target}/file\n");
    let job = slurm.submit(alice, &batch, &["--nodelist=c1,c3", "--output=out"]);
    slurm.wait_state(job, "COMPLETED", DEADLINE);

    let out = fs::read_to_string(alice.home.join("out")).unwrap();
    assert_eq!(out, "of the prolog\nof the prolog\n");
    // COMPLETED comes after every Epilog; until then the state is COMPLETING.
    for host in bed.hosts() {
        assert_eq!(host.new_mounts(), [], "{host:?}");
    }
    let dir = bed.dir().display();
    let expected = ["epilog 0 c1", "epilog 0 c3", "prolog 0 c1", "prolog 0 c3"];
    assert_eq!(lines(&log), expected.map(|line| format!("{dir}/{line} {job}")));
}

#[test]
fn a_job_submit_script_refuses_with_a_message_that_the_user_sees() {
    if !available() {
        return;
    }
    let bed = builder(1).build().unwrap();
    let script = bed.dir().join("refuse.lua");
    let lua = r#"
        function slurm_job_submit(job, partitions, uid)
            if string.find(job.script or "", "forbidden") then
                slurm.log_user("this word is forbidden")
                return slurm.ERROR
            end
            job.comment = "seen"
            return slurm.SUCCESS
        end
        function slurm_job_modify() return slurm.SUCCESS end
    "#;
    fs::write(&script, lua).unwrap();
    let slurm = bed.slurm(SlurmSetup { job_submit: Some(script), ..setup(1) }).unwrap();
    let alice = bed.user("alice");
    let refused = slurm.try_submit(alice, "#!/bin/sh\necho forbidden\n", &[]);
    refused.assert_code(1).assert_says("this word is forbidden");
    let job = slurm.submit(alice, "#!/bin/sh\n", &[]);
    assert_eq!(slurm.wait_state(job, "COMPLETED", DEADLINE)["Comment"], "seen");
    let panicked = catch_unwind(AssertUnwindSafe(|| slurm.submit(alice, "#!/bin/sh\n#forbidden\n", &[])));
    assert!(panicked.unwrap_err().downcast_ref::<String>().unwrap().contains("this word is forbidden"));
}

#[test]
fn a_job_goes_on_while_slurmctld_is_killed_and_started_again() {
    if !available() {
        return;
    }
    let (bed, slurm) = cluster(2);
    let alice = bed.user("alice");
    let script = "#!/bin/sh\ntouch started\nwhile [ ! -e go ]; do sleep 0.02; done\necho done\n";
    let job = slurm.submit(alice, script, &["--nodes=2", "--output=out"]);
    slurm.wait_state(job, "RUNNING", DEADLINE);
    wait_until(DEADLINE, "the job has started", || alice.home.join("started").exists());

    let admin_comment = |job| slurm.job(job)["AdminComment"].clone();
    slurm.scontrol(&["update", &format!("JobId={job}"), "AdminComment=before"]).assert_success();
    slurm.wait_saved(job);
    assert_eq!(admin_comment(job), "before");
    slurm.kill_controller();
    wait_until(DEADLINE, "nothing of it is left", || slurm.controller().processes().is_empty());
    let panicked = catch_unwind(AssertUnwindSafe(|| slurm.state(job)));
    assert!(panicked.unwrap_err().downcast_ref::<String>().unwrap().contains("slurmctld is down"));
    slurm.start_controller();
    assert_eq!(slurm.state(job), "RUNNING");
    fs::write(alice.home.join("go"), "").unwrap();
    let ended = slurm.wait_state(job, "COMPLETED", DEADLINE);
    assert_eq!(ended["Restarts"], "0");
    assert_eq!(fs::read_to_string(alice.home.join("out")).unwrap(), "done\n");

    let next = slurm.submit(alice, "#!/bin/sh\n", &["--nodes=2"]);
    assert_eq!(next, job + 1);
    slurm.wait_state(next, "COMPLETED", DEADLINE);
}

#[test]
fn a_job_outlives_the_slurmd_of_its_node() {
    if !available() {
        return;
    }
    let (bed, slurm) = cluster(1);
    let alice = bed.user("alice");
    let script = "#!/bin/sh\ntouch started\nwhile [ ! -e go ]; do sleep 0.02; done\n";
    let job = slurm.submit(alice, script, &[]);
    wait_until(DEADLINE, "the job has started", || alice.home.join("started").exists());
    slurm.kill_slurmd("c1");
    slurm.start_slurmd("c1");
    assert_eq!(slurm.state(job), "RUNNING");
    fs::write(alice.home.join("go"), "").unwrap();
    slurm.wait_state(job, "COMPLETED", DEADLINE);
}

#[test]
fn a_node_that_was_rebooted_takes_jobs_again() {
    if !available() {
        return;
    }
    let (bed, slurm) = cluster(2);
    let alice = bed.user("alice");
    let job = slurm.submit(alice, ENDLESS, &["--nodelist=c2", "--requeue"]);
    slurm.wait_state(job, "RUNNING", DEADLINE);
    bed.host("c2").reboot();
    slurm.scontrol(&["update", "NodeName=c2", "State=down", "Reason=crash"]).assert_success();
    assert_eq!(slurm.wait_state(job, "PENDING", DEADLINE)["Restarts"], "1");
    slurm.start_slurmd("c2");
    slurm.cancel(job);
    let next = slurm.submit(alice, "#!/bin/sh\nhostname\n", &["--nodelist=c2", "--output=out"]);
    slurm.wait_state(next, "COMPLETED", DEADLINE);
    assert_eq!(fs::read_to_string(alice.home.join("out")).unwrap(), "c2\n");
}

#[test]
fn a_running_job_can_be_requeued() {
    if !available() {
        return;
    }
    let (bed, slurm) = cluster(1);
    let job = slurm.submit(bed.user("bob"), ENDLESS, &["--requeue"]);
    slurm.wait_state(job, "RUNNING", DEADLINE);
    slurm.requeue(job);
    let queued = slurm.wait_state(job, "PENDING", DEADLINE);
    assert_eq!(queued["Restarts"], "1");
    // Slurm waits until the job's credential has expired, two minutes.
    assert_eq!(queued["Reason"], "BeginTime");
}

#[test]
fn users_are_known_everywhere_and_cannot_read_each_others_files() {
    if !available() {
        return;
    }
    // The machine may have accounts with the ids or the names of the bed's users. They stay, and the bed has its own.
    let tables = || ["/etc/passwd", "/etc/group"].map(|table| fs::read_to_string(table).unwrap());
    let before = tables();
    let bed = builder(1).build().unwrap();
    let [alice, bob] = [bed.user("alice"), bed.user("bob")];
    for user in [alice, bob] {
        for directory in [&user.home, &user.scratch] {
            fs::write(directory.join("secret"), "").unwrap();
        }
    }
    let team = bed.dir().join("scratch/team");
    for host in bed.hosts() {
        for user in [alice, bob] {
            let account =
                format!("{0}:x:{1}:{2}::{3}:/bin/sh\n", user.name, user.uid, user.gid, user.home.display());
            assert_eq!(host.ok(&["getent", "passwd", &user.uid.to_string()]), account);
            assert_eq!(host.ok(&["getent", "passwd", &user.name]), account);
        }
        assert_eq!(host.ok(&["id", "root"]), "uid=0(root) gid=0(root) groups=0(root)\n");
        let [alices, bobs] = [host.log_in(alice), host.log_in(bob)];
        assert_eq!(bobs.ok(&["id", "-Gn"]), "bob team\n");
        assert_eq!(alices.ok(&["sh", "-c", "cd; pwd; env | wc -l"]).lines().count(), 2);
        for directory in [&bob.home, &bob.scratch] {
            bobs.ok(&["cat", &directory.join("secret").to_string_lossy()]);
            alices.run(&["ls", &directory.to_string_lossy()]).assert_says("denied");
            alices.run(&["cat", &directory.join("secret").to_string_lossy()]).assert_says("denied");
        }
        let file = team.join(host.name()).display().to_string();
        alices.ok(&["sh", "-c", &format!("umask 007; echo for all > {file}")]);
        assert_eq!(bobs.ok(&["cat", &file]), "for all\n");
        let launched =
            host.ok(&[&bed.dir().join("bin/as").to_string_lossy(), "bob", "sh", "-c", "pwd; id -Gn"]);
        assert_eq!(launched, format!("{}\nbob team\n", bob.home.display()));
    }
    assert_eq!(tables(), before);
}

/// A cluster with a job on both nodes.
fn busy_cluster() -> (Testbed, Slurm, Traces) {
    let (bed, slurm) = cluster(2);
    let job = slurm.submit(bed.user("alice"), "#!/bin/sh\nsrun sleep 1000\n", &["--nodes=2"]);
    slurm.wait_state(job, "RUNNING", DEADLINE);
    wait_until(DEADLINE, "the steps run", || {
        let sleeping = |name| {
            let processes = bed.host(name).processes();
            // srun looks the program up; a process that is about to end has no command line.
            let mut programs = processes.iter().filter_map(|process| process.command_line.first());
            programs.any(|program| program.ends_with("/sleep"))
        };
        ["c1", "c2"].iter().all(|name| sleeping(name))
    });
    let traces = Traces::of(bed.dir());
    (bed, slurm, traces)
}

#[test]
fn a_busy_cluster_is_quickly_gone_and_leaves_nothing() {
    if !available() {
        return;
    }
    let before = interfaces();
    // One after the other, in either order of dropping.
    for bed_first in [true, false, true] {
        let (bed, slurm, traces) = busy_cluster();
        let dir = bed.dir().to_owned();
        assert!(traces.left().len() > 10);
        let start = Instant::now();
        if bed_first {
            drop(bed);
            drop(slurm);
        } else {
            drop(slurm);
            drop(bed);
        }
        let gone = start.elapsed();
        assert_eq!(traces.left(), Vec::<PathBuf>::new());
        assert!(!dir.exists());
        assert_eq!(interfaces(), before);
        println!("gone in {gone:?}");
        assert!(gone < Duration::from_secs(5), "{gone:?}");
    }
}

#[test]
fn a_panic_leaves_nothing_of_a_cluster() {
    if !available() {
        return;
    }
    let mut left = None;
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let (bed, _slurm, traces) = busy_cluster();
        left = Some((bed.dir().to_owned(), traces));
        panic!("as a failing test does");
    }));
    assert!(panicked.is_err());
    let (dir, traces) = left.unwrap();
    assert_eq!(traces.left(), Vec::<PathBuf>::new());
    assert!(!dir.exists());
}

#[test]
fn eight_nodes_are_up_in_a_few_seconds() {
    if !available() {
        return;
    }
    let start = Instant::now();
    let bed = builder(8).build().unwrap();
    let slurm = bed.slurm(setup(8)).unwrap();
    let up = start.elapsed();
    let ran = slurm.client_as(bed.user("bob"), &["srun", "--nodes=8", "hostname"]);
    assert_eq!(ran.assert_success().stdout.lines().count(), 8);
    println!("up in {up:?}, a step on 8 nodes after {:?}", start.elapsed());
    assert!(up < Duration::from_secs(15), "{up:?}");
}

#[test]
fn the_shell_has_a_slurm_whose_jobs_are_an_ordinary_users() {
    if !available() {
        return;
    }
    let mut shell = Command::new(env!("CARGO_BIN_EXE_ondeck-testbed"))
        .args(["shell", "--hosts", "1", "--with-slurm", "2"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let script = b"hostname; sinfo --noheader --format=%D; as bob srun --nodes=2 id -un </dev/null\n\
        on n1 as alice sh -c 'sinfo --noheader --format=%P; id -un; pwd | xargs basename; echo $SLURM_CONF'\n";
    shell.stdin.take().unwrap().write_all(script).unwrap();
    let output = String::from_utf8(shell.wait_with_output().unwrap().stdout).unwrap();
    let (said, conf) = output.trim_end().rsplit_once('\n').unwrap();
    assert_eq!(said, "ctl\n2\nbob\nbob\nmain*\nalice\nalice");
    assert!(conf.ends_with("/slurm.conf"), "{conf}");
}

#[test]
fn a_cluster_that_cannot_start_says_why() {
    if !available() {
        return;
    }
    let bed = builder(1).build().unwrap();
    let setup = SlurmSetup { conf: "NoSuchKey=1".to_owned(), ..setup(1) };
    let said = format!("{:#}", bed.slurm(setup).unwrap_err());
    assert!(said.contains("NoSuchKey"), "{said}");
}
