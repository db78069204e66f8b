//! What bounds a script: its processes, its CPU, and what a node does that can't bound its memory.

use std::fs;
use std::path::Path;

use ondeck_testbed::wait_until;
use serde_json::{Value, json};

use super::{Job, make, site, site_with};
use crate::site::{DEADLINE, TMPFS};

/// A fill with a script of this text.
fn with_script(job: &Job<'_>, text: &str) -> Value {
    let script = job.script("script", text);
    job.request(json!({"fill": {"directories": [job.directory("in", "0", "in")], "script": script}}))
}

/// Whether groups of version 1 of this controller can be made here.
fn has(controller: &str) -> bool {
    let group = Path::new("/sys/fs/cgroup").join(controller);
    let test = group.join(format!("ondeck-test-{}", std::process::id()));
    let made = group.join("tasks").exists() && fs::create_dir(&test).is_ok();
    if made {
        fs::remove_dir(&test).unwrap();
    }
    made
}

fn groups_of_tasks(controller: &str) -> Vec<String> {
    let groups = fs::read_dir(Path::new("/sys/fs/cgroup").join(controller)).unwrap().flatten();
    let names = groups.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("ondeck-task-")).collect()
}

#[test]
fn a_script_starts_no_processes_without_end_and_servers_come_before_it() {
    if !site::ready(&TMPFS) {
        return;
    }
    let site = site();
    let job = Job::new(&site, &TMPFS, "job", "16MiB", 0);
    make(&job.path("in"));
    // What a killed runner has left: of a process that there can't be.
    let left_over = Path::new("/sys/fs/cgroup/cpu/ondeck-task-4294967295");
    if has("cpu") {
        fs::create_dir(left_over).unwrap();
    }
    // Only what the shell itself can do is still possible at the end.
    let text = "while IFS=: read -r number controllers group; do case ,$controllers, in
            *,cpu,*) read -r shares < /sys/fs/cgroup/cpu$group/cpu.shares;; esac; done < /proc/self/cgroup
        echo shares $shares, nice $(nice)
        (i=0; while test $i -lt 2000; do sleep 60 & i=$((i+1)); done; echo all of them) 2> /dev/null
        set -- /proc/[0-9]*; echo $# processes";
    let report = job.succeeds("n1", &with_script(&job, text));
    let log = report["log"].as_str().unwrap();
    let lines: Vec<&str> = log.lines().collect();
    if has("cpu") {
        assert_eq!(lines[0], "shares 512, nice 0", "{log}");
        assert!(!left_over.exists());
    } else {
        assert!(lines[0].ends_with("nice 5"), "{log}");
    }
    if has("pids") {
        assert!(!log.contains("all of them"), "{log}");
        let processes: u64 = lines[1].split(' ').next().unwrap().parse().unwrap();
        assert!((900..=1024).contains(&processes), "{log}");
    } else {
        eprintln!("not tried: the machine has no controller `pids` of version 1");
    }
    // Others have theirs meanwhile, perhaps; this one is gone.
    for controller in ["cpu", "pids"].into_iter().filter(|controller| has(controller)) {
        let is_dead = |name: &&String| {
            let tasks = Path::new("/sys/fs/cgroup").join(controller).join(name).join("tasks");
            fs::read_to_string(tasks).is_ok_and(|tasks| tasks.is_empty())
        };
        // One of another test may be on its way.
        wait_until(DEADLINE, "no group is left", || {
            groups_of_tasks(controller).iter().filter(is_dead).count() == 0
        });
    }
    site.destroy("job");
    site.assert_nothing_is_left();
}

#[test]
fn a_node_without_memory_groups_says_so_and_refuses_scripts_if_it_must_have_them() {
    if !site::ready(&TMPFS) {
        return;
    }
    for is_required in [false, true] {
        let site = site_with(&format!("require_memory_group = {is_required}"));
        let job = Job::new(&site, &TMPFS, "job", "16MiB", 0);
        make(&job.path("in"));
        let host = site.host("n1");
        let doctor = || {
            let config = site.bed.dir().join("n1.toml").display().to_string();
            let ondeck = site.ondeck.display().to_string();
            host.run(&[ondeck.as_str(), "doctor", "--config", config.as_str()]).stdout
        };
        let script = with_script(&job, "nice; ulimit -v");
        let report = job.succeeds("n1", &script);
        assert!(report["log"].as_str().unwrap().ends_with("unlimited\n"), "{report:#}");
        assert!(doctor().contains("bounded by a memory group"), "{}", doctor());

        host.ok(&["mount", "-t", "tmpfs", "-o", "mode=755", "none", "/sys/fs/cgroup"]);
        let said = doctor();
        assert!(said.contains("no memory group can be made here"), "{said}");
        assert!(said.contains("no controller `pids`") && said.contains("no controller `cpu`"), "{said}");
        assert_eq!(said.contains("MISSING  memory of scripts"), is_required, "{said}");
        if is_required {
            job.fails("n1", &script, false, &["n1", "no memory group", "require_memory_group"]);
            // Everything else goes on.
            job.succeeds("n1", &job.fill(&[job.directory("in", "0", "in")]));
        } else {
            let report = job.succeeds("n1", &script);
            let log = report["log"].as_str().unwrap();
            assert!(log.starts_with("5\n") && !log.contains("unlimited"), "{report:#}");
        }
        host.ok(&["umount", "/sys/fs/cgroup"]);
        site.destroy("job");
        site.assert_nothing_is_left();
    }
}
