//! What others notice: nothing.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, SystemTime};

use ondeck_testbed::{User, available};

use crate::aids::LONG;
use crate::cluster::{Cluster, DEADLINE, Setup, tree};
use crate::jobs::{Gate, assert_passed, directives, says, wait_file};
use crate::life::directory;

#[test]
fn jobs_without_directives_or_with_wrong_ones() {
    if !available() {
        return;
    }
    let cluster = Cluster::new();
    nothing_changes_for_a_job_that_asks_for_nothing(&cluster);
    a_malformed_directive_is_refused(&cluster);
    cluster.assert_quiet();
    cluster.assert_clean();
}

#[test]
fn what_one_user_writes_into_the_queue_costs_no_other_and_no_nodes_for_what_can_not_start() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { scheduler: "sharing = \"any\"\n".into(), ..Setup::default() });
    a_singleton_waits_for_its_namesake(&cluster);
    thousands_of_elements_with_thousands_of_dependencies(&cluster);
    cluster.assert_quiet();
    cluster.assert_clean();
}

fn waits_for_its_input(user: &User, name: &str) -> String {
    let input = directory(user, name, &[("a", "alpha")]);
    format!("#!/bin/sh\n#RSA_WAIT=hold\n{}cat {}/a\n", directives(&[&input], &[]), input.display())
}

fn a_singleton_waits_for_its_namesake(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let gate = Gate::of(alice, "namesake");
    let options = ["--nodes=1", "--output=/dev/null", "--job-name=one"];
    let first = cluster.slurm.submit(alice, &format!("#!/bin/sh\n{}", gate.line()), &options);
    cluster.slurm.wait_state(first, "RUNNING", DEADLINE);
    let script = waits_for_its_input(alice, "namesake-in");
    let singleton =
        cluster.slurm.submit(alice, &script, &[&options[..], &["--dependency=singleton"]].concat());
    let other = cluster.slurm.submit(alice, &waits_for_its_input(alice, "other-in"), &options[..2]);
    cluster.slurm.wait_state(other, "COMPLETED", LONG);
    cluster.wait_done(other);
    assert!(cluster.job(singleton).is_none(), "it can't start");
    gate.open();
    cluster.slurm.wait_state(singleton, "COMPLETED", LONG);
    assert_passed(&cluster.states(singleton), &["READY"]);
    cluster.wait_done(singleton);
}

fn thousands_of_elements_with_thousands_of_dependencies(cluster: &Cluster) {
    let (alice, bob) = (cluster.user("alice"), cluster.user("bob"));
    let array = |dependency: Option<&str>| {
        let options = ["--hold", "--array=0-999", "--output=/dev/null"];
        let all: Vec<&str> = options.into_iter().chain(dependency).collect();
        cluster.slurm.submit(bob, "#!/bin/sh\ntrue\n", &all)
    };
    let elements: Vec<String> = [array(None), array(None)]
        .iter()
        .flat_map(|id| (0..1000).map(move |task| format!("{id}_{task}")))
        .collect();
    let kinds = ["afterany", "afterok", "afternotok", "afterburstbuffer"];
    let clauses = kinds.map(|kind| format!("{kind}:{}", elements.join(":")));
    let dependency = format!("--dependency={}", clauses.join(","));
    for _ in 0..3 {
        array(Some(&dependency));
    }
    let job = cluster.slurm.submit(alice, &waits_for_its_input(alice, "seen-in"), &["--output=/dev/null"]);
    cluster.slurm.wait_state(job, "COMPLETED", LONG);
    assert_passed(&cluster.states(job), &["READY"]);
    let log = cluster.log_text("scheduler");
    assert!(!log.contains("the queue can't be seen"), "{log}");
    cluster.slurm.client(&["scancel", "--user", &bob.name]).assert_success();
    cluster.wait_done(job);
}

fn nothing_changes_for_a_job_that_asks_for_nothing(cluster: &Cluster) {
    let alice = cluster.user("alice");
    let began = alice.scratch.join("plain-began");
    let gate = Gate::of(alice, "plain");
    let script = format!("#!/bin/sh\n# no RSA_DATA_IN\ndate +%s.%N > {}\n{}", began.display(), gate.line());
    let submitted = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let job = cluster.slurm.submit(alice, &script, &["--nodes=4", "--exclusive"]);
    let running = cluster.slurm.wait_state(job, "RUNNING", DEADLINE);
    assert!(!running.contains_key("AdminComment") && !running.contains_key("Comment"), "{running:#?}");
    assert!(cluster.job(job).is_none());
    wait_file(&began);
    gate.open();
    cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    let began: f64 = says(&began).parse().unwrap();
    let delay = Duration::from_secs_f64((began - submitted.as_secs_f64()).max(0.0));
    // Slurm itself takes up to a second of it.
    assert!(delay < Duration::from_secs(4), "{delay:?}");
    let shown = cluster.ondeck(&["job", "show", &job.to_string()]);
    assert!(!shown.success(), "{shown:#?}");
    assert!(shown.stderr.contains("has asked for nothing"), "{shown:#?}");
}

fn a_malformed_directive_is_refused(cluster: &Cluster) {
    let alice = cluster.user("alice");
    for (line, says) in [
        ("#RSA_DATAIN=/x", &["line 3", "RSA_DATAIN", "did you mean RSA_DATA_IN?"][..]),
        ("#RSA_CAPACITY=much", &["line 3", "RSA_CAPACITY", "`much` is not a size", "write it like 4GiB"]),
        ("#RSA_DATA_OUT", &["line 3", "RSA_DATA_OUT", "it has no value", "write #RSA_DATA_OUT=VALUE"]),
    ] {
        let ran =
            cluster.slurm.try_submit(alice, &format!("#!/bin/sh\n#SBATCH --nodes=2\n{line}\ntrue\n"), &[]);
        assert!(!ran.success(), "{ran:#?}");
        for says in says {
            ran.assert_says(says);
        }
    }
}

/// Everybody on a cluster can reach this directory, and its own mode keeps them out.
fn secret(cluster: &Cluster, user: &User) -> std::path::PathBuf {
    let dir = directory(user, "secret", &[("data", &format!("the secret of {}", user.name))]);
    let open = cluster.bed.dir().join("scratch").join(format!("{}-open", user.name));
    fs::rename(&dir, &open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o700)).unwrap();
    // Its own mode would let everybody in.
    fs::set_permissions(open.join("data"), fs::Permissions::from_mode(0o644)).unwrap();
    open
}

#[test]
fn two_users_see_nothing_of_each_other() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { scheduler: "sharing = \"any\"\n".into(), ..Setup::default() });
    let (alice, bob) = (cluster.user("alice"), cluster.user("bob"));
    let (of_alice, of_bob) = (secret(&cluster, alice), secret(&cluster, bob));
    for (round, nodes) in [["c1", "c1"], ["c1", "c2"]].into_iter().enumerate() {
        let name = format!("secrets-{round}");
        let gates = [Gate::of(alice, &name), Gate::of(bob, &name)];
        let submit = |user: &User,
                      own: &std::path::Path,
                      others: &std::path::Path,
                      gate: &Gate,
                      node: &str| {
            let found = user.scratch.join(format!("found-{round}"));
            let script = format!(
                "#!/bin/sh\n#RSA_WAIT=hold\n{}{}\
                 cat {own}/data > {found}\n\
                 (cat {others}/data; ls {others}; echo x > {others}/x; cat {others}/result\n\
                 find /run/ondeck {bed} -type f -exec grep -l secret {{}} + ) 2> /dev/null > {found}-wrong\n\
                 for d in /proc/[0-9]*/root /proc/[0-9]*/cwd; do cat $d{others}/data; done 2> /dev/null >> {found}-wrong\n\
                 echo done > {own}/result\n",
                directives(&[own], &[own]),
                gate.line(),
                own = own.display(),
                others = others.display(),
                found = found.display(),
                bed = cluster.bed.dir().display(),
            );
            cluster.slurm.submit(user, &script, &["--nodes=1", &format!("--nodelist={node}")])
        };
        let jobs = [
            submit(alice, &of_alice, &of_bob, &gates[0], nodes[0]),
            submit(bob, &of_bob, &of_alice, &gates[1], nodes[1]),
        ];
        for job in jobs {
            cluster.wait_rsa(job, "INUSE_BOTH");
        }
        // Nor can they elsewhere: on the nodes that lend, and on those of the other job.
        for (user, other) in [(alice, &of_bob), (bob, &of_alice)] {
            for host in ["r1", "r2", "r3", "r4", "c1", "c2", "ctl"] {
                let look = format!(
                    "cat {other}/data; find /run/ondeck -type f -exec cat {{}} +; ls /run/ondeck/*/*",
                    other = other.display()
                );
                let ran = cluster.host(host).log_in(user).shell(&look);
                assert!(!ran.success(), "{} on {host}: {ran:#?}", user.name);
                assert!(!ran.stdout.contains("secret of"), "{} on {host}: {ran:#?}", user.name);
            }
        }
        gates.iter().for_each(Gate::open);
        for (user, own, job) in [(alice, &of_alice, jobs[0]), (bob, &of_bob, jobs[1])] {
            cluster.wait_done(job);
            let found = user.scratch.join(format!("found-{round}"));
            assert_eq!(says(&found), format!("the secret of {}", user.name));
            let wrong = fs::read_to_string(user.scratch.join(format!("found-{round}-wrong"))).unwrap();
            let other = if user.name == "alice" { "bob" } else { "alice" };
            assert!(!wrong.contains(other) && !wrong.contains("secret of"), "{wrong}");
            assert_eq!(tree(own).len(), 2);
            assert_eq!(says(&own.join("result")), "done");
            fs::remove_file(own.join("result")).unwrap();
        }
    }
    cluster.assert_quiet();
    cluster.assert_clean();
}
