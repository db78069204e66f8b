//! A configuration that is changed while daemons run and jobs are under way: at SIGHUP they take over what they can, name
//! what needs a new start, and go on as before if the file is wrong.

use std::collections::BTreeMap;
use std::fs;

use ondeck_testbed::{available, wait_until};

use crate::aids::{await_file, change, files, folder, give, reload, script};
use crate::cluster::{Cluster, DEADLINE, Setup, tree};

#[test]
fn a_scheduler_takes_a_changed_configuration_over_and_names_what_needs_a_new_start() {
    if !available() {
        return;
    }
    let scheduler = "user_nodes = 1".to_owned();
    let cluster = Cluster::with(Setup { rsa_nodes: 2, compute_nodes: 2, scheduler, ..Setup::default() });
    let alice = cluster.user("alice");
    let wanting = |name: &str| {
        let input = folder(alice, name, &files(1, 1000));
        script(alice, &[format!("DATA_IN={}", input.display()), "WAIT=hold".into()], "true")
    };
    reload(&cluster, "scheduler", "scheduler", "nothing that concerns ondeck serve has changed");

    // One waits for what the site lets its user have, and has it once the site lets more.
    let blocker = cluster.block(2);
    let first = cluster.submit(&wanting("first"), 1);
    cluster.wait_rsa(first, "READY");
    let second = cluster.submit(&wanting("second"), 1);
    wait_until(DEADLINE, "the second job waits", || {
        cluster.job(second).is_some_and(|job| job["message"].as_str().unwrap().contains("user"))
    });
    change(&cluster, "ondeck.toml", "user_nodes = 1", "user_nodes = 2");
    change(&cluster, "ondeck.toml", "[\"r1\", \"r2\"]", "[\"r2\"]\ndevice = \"other\"");
    reload(&cluster, "scheduler", "scheduler", "taken over: scheduler.user_nodes\n");
    let left = "this needs a new start of ondeck serve, and keeps its former value until then: \
                scheduler.pool.default.device, scheduler.pool.default.nodes\n";
    assert!(cluster.log_text("scheduler").contains(left), "{}", cluster.log_text("scheduler"));
    cluster.wait_rsa(second, "READY");

    // A file that is wrong, or gone, changes nothing.
    let (path, text) = change(&cluster, "ondeck.toml", "user_nodes = 2", "user_nodess = 3");
    reload(&cluster, "scheduler", "scheduler", "Did you mean `user_nodes`?");
    fs::write(&path, text.replace("[\"r2\"]", "[]")).unwrap();
    reload(&cluster, "scheduler", "scheduler", "stays in force: the pool `default` has no nodes");
    fs::remove_file(&path).unwrap();
    reload(&cluster, "scheduler", "scheduler", "stays in force: can't read the configuration");
    fs::write(&path, text).unwrap();
    assert_eq!(cluster.status()["nodes"].as_array().unwrap().len(), 2);

    cluster.slurm.cancel(blocker);
    cluster.wait_done(first);
    cluster.wait_done(second);
    cluster.assert_no_hook_failed();
    cluster.assert_clean();
}

#[test]
fn an_agent_takes_a_changed_configuration_over_while_a_job_has_its_ram_disk() {
    if !available() {
        return;
    }
    let cluster = Cluster::with(Setup { rsa_nodes: 1, compute_nodes: 1, ..Setup::default() });
    let alice = cluster.user("alice");
    let output = folder(alice, "out", &BTreeMap::new());
    let text = script(
        alice,
        &[format!("DATA_OUT={}", output.display())],
        &format!("echo begun > {out}/a\ntell begun\nawait go\necho done >> {out}/a", out = output.display()),
    );
    let job = cluster.start_staged(&text, 1);
    await_file(alice, "begun");

    // Less is lent from now on; what is lent stays lent.
    change(&cluster, "r1.toml", "capacity = \"256MiB\"", "capacity = \"192MiB\"");
    change(&cluster, "r1.toml", "listen = \"auto\"\nstate", "listen = \"10.0.0.1\"\nstate");
    reload(&cluster, "r1", "agent-r1", "taken over: agent.device.ram.capacity\n");
    let left =
        "this needs a new start of ondeck agent, and keeps its former value until then: agent.listen\n";
    assert!(cluster.log_text("agent-r1").contains(left), "{}", cluster.log_text("agent-r1"));
    wait_until(DEADLINE, "the scheduler knows that less is lent", || {
        cluster.status()["nodes"][0]["capacity"] == 192 << 20
    });
    // What may be covered changes under what is covered already.
    let scratch = cluster.bed.dir().join("scratch").display().to_string();
    let (old, new) = (format!("[\"{scratch}\"]"), format!("[\"{scratch}/nobody\"]"));
    change(&cluster, "c1.toml", &format!("mount_prefixes = {old}"), &format!("mount_prefixes = {new}"));
    reload(&cluster, "c1", "agent-c1", "taken over: agent.mount_prefixes\n");
    change(&cluster, "c1.toml", "[agent.device.ram]", "[agent.device.ssd]");
    reload(&cluster, "c1", "agent-c1", "the one device `ram`");
    give(alice, "go");
    cluster.wait_done(job);
    assert_eq!(tree(&output)["a"], b"begun\ndone\n", "{}", cluster.show(job));

    // The next one is not shown where nothing may be covered any more.
    let text = script(alice, &[format!("DATA_OUT={}", output.display())], "true");
    let next = cluster.start_staged(&text, 1);
    cluster.wait_done(next);
    let log = cluster.log_of(next);
    assert!(log.contains(&format!("it is not below {scratch}/nobody")), "{log}");
    cluster.assert_clean();
}
