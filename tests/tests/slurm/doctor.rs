//! `ondeck doctor --slurm`: silent about what is right, and right about what is wrong.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use ondeck_testbed::{Ran, available, wait_until};
use serde_json::Value;

use crate::cluster::{Cluster, DEADLINE, Setup};

/// A small cluster on which nothing is wrong.
fn cluster() -> Cluster {
    Cluster::with(Setup {
        rsa_nodes: 2,
        compute_nodes: 2,
        slurm: "BatchStartTimeout=40\nPrologEpilogTimeout=60\n".into(),
        ..Setup::default()
    })
}

fn doctor(cluster: &Cluster, config: &Path) -> (Ran, Vec<Value>) {
    let (ondeck, config) = (cluster.ondeck.to_string_lossy(), config.to_string_lossy());
    let ran = cluster.host("ctl").run(&[&*ondeck, "doctor", "--slurm", "--json", "--config", &config]);
    let findings = serde_json::from_str(&ran.stdout).unwrap_or_else(|error| panic!("{error}: {ran:#?}"));
    (ran, findings)
}

/// The findings that complain, as `what: detail -> remedy`.
fn complaints(findings: &[Value]) -> Vec<String> {
    let wrong = findings.iter().filter(|finding| finding["state"] != "ok");
    wrong
        .map(|finding| {
            let text = |key: &str| finding[key].as_str().unwrap_or_default().to_owned();
            format!("{}: {} -> {}", text("what"), text("detail"), text("remedy"))
        })
        .collect()
}

#[test]
fn a_cluster_that_works_has_no_complaint_and_each_thing_that_is_wrong_has_its_own() {
    if !available() {
        return;
    }
    let cluster = cluster();
    let dir = cluster.bed.dir();
    let good = dir.join("ondeck.toml");
    let (ran, findings) = doctor(&cluster, &good);
    assert_eq!(complaints(&findings), [""; 0], "{ran:#?}");
    assert_eq!(ran.code(), Some(0));
    for what in
        ["Slurm", "Prolog", "Epilog", "PrologFlags", "JobSubmitPlugins", "agents of RSA nodes", "scheduler"]
    {
        assert!(findings.iter().any(|finding| finding["what"] == what), "{what} in {findings:?}");
    }
    // For people: one line each.
    let people = cluster.ondeck(&["doctor", "--slurm"]);
    assert!(people.stdout.contains("ok       PrologFlags"), "{people:#?}");

    of_slurm(&cluster, &good);
    of_the_configuration(&cluster, &good);
    of_what_nodes_have(&cluster, &good);
    of_the_daemons(&cluster, &good);
}

#[test]
fn a_node_whose_hooks_run_another_program_or_read_another_configuration_is_named_until_it_is_mended() {
    if !available() {
        return;
    }
    let cluster = cluster();
    let dir = cluster.bed.dir();
    let good = dir.join("ondeck.toml");
    // The hooks that a site copies, which are the same on all nodes; what stands beside them may differ.
    let hooks = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("slurm");
    for name in ["prolog", "epilog"] {
        fs::copy(hooks.join(name), dir.join(format!("slurm-{name}"))).unwrap();
    }
    let (program, config) = (dir.join("own-ondeck"), dir.join("own.toml"));
    fs::copy(&cluster.ondeck, &program).unwrap();
    fs::copy(&good, &config).unwrap();
    let of_c2 = |lines: &str| {
        let text = format!(
            "ONDECK={}\nONDECK_CONFIG={}\nif [ \"$SLURMD_NODENAME\" = c2 ]; then\n:\n{lines}fi\n",
            cluster.ondeck.display(),
            good.display()
        );
        fs::write(dir.join("ondeck.env"), text).unwrap();
    };
    let run_a_job = || {
        let job = cluster.slurm.submit(
            cluster.user("alice"),
            "#!/bin/sh\n",
            &["--nodes=2", "--exclusive", "--output=/dev/null"],
        );
        cluster.slurm.wait_state(job, "COMPLETED", DEADLINE);
    };
    // Epilogs go on after the job has ended.
    let wait_for = |what: &str, fits: &dyn Fn(&[String]) -> bool| {
        wait_until(DEADLINE, what, || fits(&complaints(&doctor(&cluster, &good).1)));
    };

    let (_, before) = doctor(&cluster, &good);
    assert_eq!(complaints(&before), [""; 0]);
    let told = |findings: &[Value], what: &str| {
        let found = findings.iter().find(|finding| finding["what"] == what);
        found.map_or_else(String::new, |found| found["detail"].as_str().unwrap().to_owned())
    };
    assert!(told(&before, "unseen hooks").ends_with("no hook that runs: c1, c2"), "{before:#?}");

    of_c2(&format!("ONDECK={}\nONDECK_CONFIG={}\n", program.display(), config.display()));
    run_a_job();
    wait_for("both hooks of c2 are told", &|found| found.len() == 2);
    let found = complaints(&doctor(&cluster, &good).1);
    let begins = format!(
        "hooks' program: 1 have another than {}: c2, like {} (Prolog of c2, called by {})",
        cluster.ondeck.display(),
        program.display(),
        dir.join("slurm-prolog").display()
    );
    assert!(found[0].starts_with(&begins), "not `{begins}`: {found:#?}");
    assert!(found[0].contains("ONDECK in ondeck.env beside their scripts"), "{found:#?}");
    let begins = format!(
        "hooks' configuration: 1 have another than {}: c2, like {}",
        good.display(),
        config.display()
    );
    assert!(found[1].starts_with(&begins), "not `{begins}`: {found:#?}");
    assert!(found[1].contains("ONDECK_CONFIG in ondeck.env beside their scripts"), "{found:#?}");

    // It asks elsewhere; then it can't be read at all.
    let text = fs::read_to_string(&good).unwrap();
    fs::write(&config, text.replace("host = \"ctl\"", "host = \"c1\"")).unwrap();
    of_c2(&format!("ONDECK_CONFIG={}\n", config.display()));
    run_a_job();
    wait_for("hooks that ask elsewhere are told", &|found| {
        found.len() == 2 && found[1].starts_with("hooks' scheduler: 1 have another than ctl port 7273: c2")
    });
    fs::write(&config, "[scheduler]\nhosst = \"ctl\"\n").unwrap();
    run_a_job();
    let is_broken = |found: &String| {
        found.starts_with("nodes' hooks: 1 can't read their configuration: c2") && found.contains("hosst")
    };
    wait_for("both hooks tell of a configuration that can't be read", &|found| {
        found.iter().any(is_broken) && !found.iter().any(|found| found.starts_with("hooks' scheduler"))
    });

    // Whoever tries a hook by hand says nothing of what Slurm runs.
    let broken = complaints(&doctor(&cluster, &good).1);
    let by_hand = format!(
        "SLURM_JOB_ID=4000000 SLURM_JOB_UID=0 {} prolog --config {}",
        cluster.ondeck.display(),
        good.display()
    );
    cluster.host("c2").run(&["sh", "-c", &by_hand]).assert_success();
    assert_eq!(complaints(&doctor(&cluster, &good).1), broken);

    of_c2("");
    assert_eq!(complaints(&doctor(&cluster, &good).1), broken, "what is mended is seen at the next job");
    run_a_job();
    wait_for("nothing is told any more", &|found| found.is_empty());
    let (_, after) = doctor(&cluster, &good);
    let expected = format!("{} with {} on 2 of 2 nodes", cluster.ondeck.display(), good.display());
    assert_eq!(told(&after, "nodes' hooks"), expected);
    assert_eq!(told(&after, "unseen hooks"), "");

    // The file that Slurm's daemon of c2 has is another one by now.
    let hook = |name: &str| dir.join(format!("slurm-{name}")).display().to_string();
    let conf = cluster.slurm.conf().display().to_string();
    let other = dir.join("other-slurm.conf");
    let lines =
        "ProctrackType=proctrack/linuxproc\nJobContainerType=job_container/tmpfs\nProlog=/site/prolog\n";
    fs::write(&other, lines).unwrap();
    cluster.host("c2").run(&["mount", "--bind", other.to_str().unwrap(), &conf]).assert_success();
    run_a_job();
    wait_for("the other slurm.conf of c2 is told", &|found| {
        let begins = |what: &str| found.iter().any(|found| found.starts_with(what));
        found.len() == 4
            && begins(
                "nodes' ProctrackType: 1 have another than proctrack/cgroup: c2, like proctrack/linuxproc",
            )
            && begins("nodes' JobContainerType: 1 have another than none: c2, like job_container/tmpfs")
            && begins(&format!(
                "nodes' Prolog: 1 have another than {}: c2, like /site/prolog",
                hook("prolog")
            ))
            && begins(&format!("nodes' Epilog: 1 have another than {}: c2, like none", hook("epilog")))
    });
    cluster.host("c2").run(&["umount", &conf]).assert_success();
    run_a_job();
    wait_for("nothing is told any more", &|found| found.is_empty());
}

/// One complaint, of this beginning, with this remedy; and the exit code.
#[track_caller]
fn only(cluster: &Cluster, config: &Path, begins: &str, remedy: &str, code: i32) {
    let (ran, findings) = doctor(cluster, config);
    let found = complaints(&findings);
    assert!(found.len() == 1 && found[0].starts_with(begins), "not just `{begins}`: {found:#?}");
    assert!(found[0].contains(remedy), "no `{remedy}`: {found:#?}");
    assert_eq!(ran.code(), Some(code), "{found:#?}");
}

fn of_slurm(cluster: &Cluster, good: &Path) {
    let conf = cluster.slurm.conf();
    let text = fs::read_to_string(conf).unwrap();
    let with = |old: &str, new: &str| {
        let line = text.lines().find(|line| line.starts_with(old)).unwrap_or_else(|| panic!("no {old}"));
        fs::write(conf, text.replace(line, new)).unwrap();
        cluster.slurm.scontrol(&["reconfigure"]).assert_success();
        // A look at the queue in between may have failed. Whoever waits for a job that nobody knows has another one made.
        cluster.ondeck(&["wait", "4000000"]).assert_says("is not known here");
        wait_until(DEADLINE, "the scheduler sees the queue", || {
            cluster.status()["workload_manager"].is_null()
        });
    };
    let dir = cluster.bed.dir();
    let program = |name: &str, mode: u32, script: &str| {
        let path = dir.join(name);
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path.display().to_string()
    };

    with("Prolog=", "");
    only(cluster, good, "Prolog: none is set", "Prolog=/etc/slurm/prolog", 1);
    with("Epilog=", "");
    only(cluster, good, "Epilog: none is set", "Epilog=/etc/slurm/epilog", 1);
    with("Prolog=", "Prolog=/nowhere/prolog");
    only(cluster, good, "Prolog: /nowhere/prolog is not on this machine", "every compute node", 1);
    let other = program("other-prolog", 0o755, "#!/bin/sh\n# ondeck prolog is what we should call\nexit 0\n");
    with("Prolog=", &format!("Prolog={other}"));
    only(cluster, good, "Prolog:", "call slurm/prolog from it", 1);
    let no_program = program("no-program", 0o644, "#!/bin/sh\nexec ondeck epilog\n");
    with("Epilog=", &format!("Epilog={no_program}"));
    only(cluster, good, "Epilog:", "chmod 755", 1);
    let own =
        program("own-prolog", 0o755, &format!("#!/bin/sh\n{}\nexit 0\n", dir.join("slurm-prolog").display()));
    with("Prolog=", &format!("Prolog={own}"));
    assert_eq!(complaints(&doctor(cluster, good).1), [""; 0], "a Prolog may call ours");
    with("TaskProlog=", "");
    only(cluster, good, "TaskProlog: none is set", "TaskProlog=/etc/slurm/task_prolog", 0);
    with("PrologFlags=", "");
    only(cluster, good, "PrologFlags: without Alloc", "PrologFlags=Alloc", 1);
    with("PrologEpilogTimeout=", "PrologEpilogTimeout=15");
    only(cluster, good, "PrologEpilogTimeout: 15 s, and ours may take 20 s", "PrologEpilogTimeout=30", 1);
    with("BatchStartTimeout=", "");
    only(cluster, good, "BatchStartTimeout: 10 s", "BatchStartTimeout=30", 0);
    with("KillWait=", "KillWait=3");
    assert_eq!(complaints(&doctor(cluster, good).1), [""; 0]);

    let lua = conf.with_file_name("job_submit.lua");
    let ours = fs::read_to_string(&lua).unwrap();
    fs::write(&lua, "function slurm_job_submit() return slurm.SUCCESS end\n").unwrap();
    only(cluster, good, "JobSubmitPlugins:", "load slurm/job_submit.lua from it", 0);
    fs::write(&lua, ours).unwrap();
}

fn of_the_configuration(cluster: &Cluster, good: &Path) {
    let text = fs::read_to_string(good).unwrap();
    let changed = cluster.bed.dir().join("changed.toml");
    let with = |old: &str, new: &str| {
        assert!(text.contains(old), "no `{old}` in {text}");
        fs::write(&changed, text.replace(old, new)).unwrap();
    };
    let prefixes = text.lines().find(|line| line.starts_with("mount_prefixes")).unwrap();
    with(prefixes, "");
    only(cluster, &changed, "mount_prefixes: none", "mount_prefixes = ", 1);
    with("[scheduler]\nhost = \"ctl\"", "[scheduler]");
    only(cluster, &changed, "scheduler's host: the configuration names none", "[scheduler]", 1);
    with("host = \"ctl\"\nlisten = \"auto\"", "host = \"ctl\"");
    only(cluster, &changed, "scheduler's host: ctl, where only", "listen = \"auto\"", 1);
    with("backoff = ", "lock_in = \"qos\"\nlock_in_qos = \"first\"\nbackoff = ");
    only(cluster, &changed, "lock_in: qos", "lock_in = \"priority\"", 1);
    with("nodes = [\"r1\", \"r2\"]", "nodes = []");
    only(cluster, &changed, "pools: the pool `default` has no nodes", "ondeck serve --check", 1);
    with("nodes = [\"r1\", \"r2\"]", "nodes = [\"r1\", \"r2\"]\ndevice = \"nvme\"");
    only(cluster, &changed, "what is lent: 2 lend nothing", "[agent.device.NAME]", 1);
    with("debounce", "debouncce");
    only(cluster, &changed, "configuration:", "ondeck.toml.example", 1);
    assert!(complaints(&doctor(cluster, &changed).1)[0].contains("Did you mean `debounce`?"));
}

/// A node with another configuration than the scheduler's machine.
fn of_what_nodes_have(cluster: &Cluster, good: &Path) {
    let own = cluster.bed.dir().join("c2.toml");
    let text = fs::read_to_string(&own).unwrap();
    let reread = |text: &str| {
        fs::write(&own, text).unwrap();
        let before = cluster.log_text("agent-c2").len();
        cluster.signal("c2", ondeck_testbed::Signal::HUP);
        wait_until(DEADLINE, "c2 has read it", || {
            cluster.log_text("agent-c2")[before..].contains("read the conf")
        });
    };
    let prefixes = text.lines().find(|line| line.starts_with("mount_prefixes")).unwrap();
    reread(&text.replace(prefixes, "mount_prefixes = [\"/elsewhere\"]"));
    only(
        cluster,
        good,
        "nodes' mount_prefixes: 1 have another than /",
        "copy this machine's ondeck.toml there",
        1,
    );
    assert!(complaints(&doctor(cluster, good).1)[0].contains(": c2, like /elsewhere"));
    reread(&text.replace("host = \"ctl\"", "host = \"c1\""));
    only(
        cluster,
        good,
        "nodes' scheduler: 1 have another than ctl port 7273: c2, like c1 port 7273",
        "kill -HUP",
        1,
    );
    reread(&text.replace("host = \"ctl\"\n", ""));
    only(cluster, good, "nodes' scheduler: 1 have another than ctl port 7273: c2, like none", "kill -HUP", 1);
    reread(&text);
    assert_eq!(complaints(&doctor(cluster, good).1), [""; 0]);
}

fn of_the_daemons(cluster: &Cluster, good: &Path) {
    cluster.kill("r2");
    only(cluster, good, "agents of RSA nodes: 1 of 2 do not answer: r2", "ondeck agent", 1);
    cluster.start_agent("r2");
    cluster.kill("c1");
    only(cluster, good, "agents of Slurm's nodes: 1 of 2 do not answer: c1", "ondeck agent", 1);
    // One that knows no administrators.
    let own = cluster.bed.dir().join("c1.toml");
    let text = fs::read_to_string(&own).unwrap();
    fs::write(&own, text.replace("administrators = [\"root@ctl\"]", "")).unwrap();
    cluster.start_agent("c1");
    ondeck_testbed::wait_until(crate::cluster::DEADLINE, "the agent of c1 is asked", || {
        !complaints(&doctor(cluster, good).1).iter().any(|found| found.contains("do not answer"))
    });
    only(cluster, good, "agents of Slurm's nodes: 1 take no orders", "administrators = [\"root@ctl\"]", 1);
    fs::write(&own, text).unwrap();
    cluster.kill("c1");
    cluster.start_agent("c1");
    cluster.kill("scheduler");
    ondeck_testbed::wait_until(crate::cluster::DEADLINE, "the agent of c1 answers", || {
        complaints(&doctor(cluster, good).1).len() == 1
    });
    only(cluster, good, "scheduler: no scheduler at", "ondeck serve", 1);
    cluster.start_scheduler();
    cluster.slurm.kill_controller();
    let (ran, findings) = doctor(cluster, good);
    let found = complaints(&findings);
    assert!(found[0].starts_with("Slurm:") && found[0].contains("DOWN"), "{found:#?}");
    assert_eq!(ran.code(), Some(1));
}
