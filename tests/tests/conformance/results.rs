//! What may hold results is destroyed by nothing but whoever says that they are safe, or given up; and an agent obeys one
//! scheduler.

use std::fs;

use ondeck_testbed::wait_until;
use serde_json::{Value, json};

use crate::isolation::call;
use crate::site::{self, Case, DEADLINE, GLUSTER, Site, View};

crate::for_engines! {
    tmpfs = TMPFS: [
        what_may_hold_results_is_destroyed_by_nothing_but_a_release,
        a_job_s_ramdisk_of_the_former_version_may_hold_results,
    ]
    gluster = GLUSTER: [
        what_may_hold_results_is_destroyed_by_nothing_but_a_release,
        a_job_s_ramdisk_of_the_former_version_may_hold_results,
    ]
}

/// Sends an order to an agent, with a scheduler's authority or as a person; gives the status and the answer.
fn order(
    site: &Site,
    node: &str,
    method: &str,
    path: &str,
    body: &Value,
    authority: Option<&Value>,
) -> (u16, Value) {
    let file = site.bed.dir().join("order.json");
    fs::write(&file, body.to_string()).unwrap();
    let (file, authority) = (file.display().to_string(), authority.map(Value::to_string));
    let mut more = vec!["--body", file.as_str()];
    if let Some(authority) = &authority {
        more.extend(["--authority", authority.as_str()]);
    }
    let (status, said) = call(site, site.host("ctl"), node, method, path, &more);
    (status, serde_json::from_str(&said).unwrap())
}

/// What is refused, by its code.
#[track_caller]
fn assert_refused(said: &(u16, Value), code: &str) {
    assert_eq!((said.0, &said.1["code"]), (409, &json!(code)), "{}", said.1);
}

#[track_caller]
fn assert_done(said: &(u16, Value)) {
    assert_eq!(said.0, 200, "{}", said.1);
}

fn path_of(layout: &Value) -> String {
    format!("/v1/ramdisks/{}@{}", layout["id"]["name"].as_str().unwrap(), layout["id"]["epoch"])
}

#[track_caller]
fn guard(site: &Site, case: &Case, layout: &Value) {
    for node in case.servers {
        assert_done(&order(site, node, "POST", &format!("{}/guard", path_of(layout)), &Value::Null, None));
    }
}

/// What the nodes say of a RAM disk.
#[track_caller]
fn reports(site: &Site, name: &str) -> Vec<Value> {
    let ran = site.ramdisk(&["list", "--json"]);
    let all: Vec<Value> = serde_json::from_str(&ran.assert_success().stdout).unwrap();
    let found = all.into_iter().find(|found| found["name"] == name).expect("it is there");
    found["nodes"].as_array().unwrap().clone()
}

#[track_caller]
fn assert_kept(site: &Site, name: &str, view: &View) {
    site.status(name).assert_success();
    assert_eq!(fs::read_to_string(view.outside.join("file")).unwrap(), "results");
}

fn what_may_hold_results_is_destroyed_by_nothing_but_a_release(case: &Case) {
    let site = Site::new();
    let layout = site.build_with(case, "kept", "64MiB", 1, &[])["layout"].clone();
    let (one, view) = (path_of(&layout), &site.views(case, "kept", 1)[0]);
    fs::write(view.outside.join("file"), "results").unwrap();
    let numbers: Vec<u64> =
        reports(&site, "kept").iter().map(|found| found["layout"]["number"].as_u64().unwrap()).collect();
    assert!(numbers[0] != 0 && numbers.iter().all(|number| *number == numbers[0]), "{numbers:?}");
    // It may be ordered again.
    guard(&site, case, &layout);
    guard(&site, case, &layout);
    let guarded = |found: &Value| found["guarded"] == found["server"];
    assert!(reports(&site, "kept").iter().all(guarded));

    for round in 0..2 {
        // A person, who is told what to do.
        let ran = site.ramdisk(&["destroy", "kept"]);
        ran.assert_code(1).assert_says("may hold results").assert_says("--abandon-results");
        assert_kept(&site, "kept", view);
        // Somebody who does not look before.
        for node in case.servers {
            assert_refused(&order(&site, node, "DELETE", &one, &Value::Null, None), "holds_results");
        }
        assert_kept(&site, "kept", view);
        // A later incarnation, and what undoes it.
        let ran = site.ramdisk(
            &site.arguments(case, "kept", "64MiB", 0).iter().map(String::as_str).collect::<Vec<_>>(),
        );
        ran.assert_code(3).assert_says("may hold results");
        let later = format!("/v1/ramdisks/kept@{}", layout["id"]["epoch"].as_u64().unwrap() + 1);
        let said = order(&site, case.servers[0], "DELETE", &later, &Value::Null, None);
        assert_refused(&said, "conflict");
        assert_kept(&site, "kept", view);
        // An agent that is started again, also one to which its record says that its lease is over.
        let node = case.servers[0];
        site.kill_agent(node);
        if round == 0 {
            let file = site.runtime_dir(node, "kept").join("record.json");
            let mut record: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
            record["complete"] = false.into();
            record["lease_until_ms"] = 1.into();
            fs::write(&file, record.to_string()).unwrap();
            site.start_agent(node);
            lease_of_another_is_over(&site, node, &layout);
            site.kill_agent(node);
            record["complete"] = true.into();
            fs::write(&file, record.to_string()).unwrap();
        }
        site.start_agent(node);
        assert_kept(&site, "kept", view);
    }
    // Nobody is asked, so nothing is done.
    site.ramdisk(&["destroy", "kept", "--abandon-results"]).assert_code(2).assert_says("--yes");
    assert_kept(&site, "kept", view);
    site.ramdisk(&["destroy", "kept", "--abandon-results", "--yes"]).assert_success();
    let log = fs::read_to_string(site.agent_log(case.servers[0])).unwrap();
    assert!(log.contains("its results were given up") && log.contains("user 0 on ctl"), "{log}");
    site.assert_nothing_is_left();

    // What is on disk may go.
    let layout = site.build_with(case, "kept", "64MiB", 0, &[])["layout"].clone();
    guard(&site, case, &layout);
    for node in case.servers {
        let release = json!({ "staged_out": { "task": 7 } });
        let path = format!("{}/release", path_of(&layout));
        for _ in 0..2 {
            assert_done(&order(&site, node, "POST", &path, &release, None));
        }
    }
    site.destroy("kept");
    // Nor is anything guarded that is not there.
    let said = order(&site, "n1", "POST", &format!("{}/guard", path_of(&layout)), &Value::Null, None);
    assert_ne!(said.0, 200, "{}", said.1);
    site.assert_nothing_is_left();
}

/// Waits until the agent of a node has removed a RAM disk that nobody has completed: so it has looked at all leases.
fn lease_of_another_is_over(site: &Site, node: &str, like: &Value) {
    let mut layout = like.clone();
    layout["id"]["name"] = "never".into();
    layout["engine"] = "simulated".into();
    layout["servers"] = json!([{ "node": node, "address": "0.0.0.0", "ports": [], "share": 1 << 20 }]);
    let secret = site.bed.dir().join("secret-of-never");
    fs::write(&secret, "7".repeat(64)).unwrap();
    let config = site.config.display().to_string();
    fs::write(site.bed.dir().join("never.layout"), layout.to_string()).unwrap();
    let probe = site.probe.display().to_string();
    let (file, layout_file) = (secret.display().to_string(), site.bed.dir().join("never.layout"));
    let layout_file = layout_file.display().to_string();
    site.host("ctl")
        .run(&[
            &probe,
            "steps",
            "--config",
            &config,
            "--layout",
            &layout_file,
            "--secret",
            &file,
            "--node",
            node,
            "--lease-ms",
            "1",
            "\"allocate\"",
        ])
        .assert_success();
    wait_until(DEADLINE, "the lease of another is over", || !site.runtime_dir(node, "never").exists());
}

fn a_job_s_ramdisk_of_the_former_version_may_hold_results(case: &Case) {
    let site = Site::new();
    for name in ["job-77-0", "hand"] {
        site.build(case, name, "64MiB", 0);
    }
    for node in case.servers {
        site.kill_agent(node);
        for name in ["job-77-0", "hand"] {
            let file = site.runtime_dir(node, name).join("record.json");
            let mut record: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
            record["version"] = 1.into();
            record.as_object_mut().unwrap().remove("guarded").unwrap();
            for field in ["number", "job"] {
                record["layout"].as_object_mut().unwrap().remove(field).unwrap();
            }
            fs::write(&file, record.to_string()).unwrap();
        }
        site.start_agent(node);
    }
    // Nobody can say of the one that it has no results; the other one is its maker's.
    site.status("job-77-0").assert_success();
    site.destroy("hand");
    site.ramdisk(&["destroy", "job-77-0"]).assert_code(1).assert_says("may hold results");
    site.status("job-77-0").assert_success();
    site.ramdisk(&["destroy", "job-77-0", "--abandon-results", "--yes"]).assert_success();
    site.assert_nothing_is_left();
}

fn claim(journal: &str, session: u64, counter: u64, take_over: bool) -> Value {
    json!({ "journal": journal, "session": session, "counter": counter, "take_over": take_over })
}

fn authority(journal: &str, session: u64, counter: u64) -> Value {
    json!({ "journal": journal, "session": session, "counter": counter })
}

/// Builds the RAM disk of a job on n1 and n2 as a scheduler does.
fn build_job(site: &Site, number: u32, authority: Option<&Value>) -> ondeck_testbed::Ran {
    let job = json!({
        "cluster": "test", "job": number.to_string(), "purpose": "both", "account": "physics", "request": {},
        "work_dir": "/home/alice",
    });
    let (probe, config) = (site.probe.display().to_string(), site.config.display().to_string());
    let (job, authority) = (job.to_string(), authority.map(Value::to_string));
    let mut line =
        vec![probe.as_str(), "build", "--config", &config, "--engine", "gluster", "--nodes", "n1,n2"];
    if let Some(authority) = &authority {
        line.extend(["--authority", authority]);
    }
    line.push(&job);
    site.host("ctl").run(&line)
}

#[test]
fn an_agent_obeys_one_scheduler() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = Site::new();
    let claims = |node: &str, claim: &Value| order(&site, node, "POST", "/v1/authority", claim, None);
    let (first, second) = (authority("aa", 1, 5), authority("bb", 9, 1));
    let obeyed = |node: &str| {
        let ran = site.ramdisk(&["nodes", "--nodes", node, "--json"]);
        let reports: Value = serde_json::from_str(&ran.assert_success().stdout).unwrap();
        reports[0]["authority"].clone()
    };
    assert_eq!(obeyed("n1"), Value::Null);
    // Who has not claimed it does not command it.
    let ran = build_job(&site, 7, Some(&first));
    assert!(!ran.success() && ran.stderr.contains("claim it first"), "{ran:#?}");
    for node in ["n1", "n2"] {
        assert_done(&claims(node, &claim("aa", 1, 5, false)));
    }
    assert_eq!(obeyed("n1"), json!({ "journal": "aa", "counter": 5, "session": 1 }));
    assert_refused(&claims("n1", &claim("bb", 9, 1, false)), "foreign_journal");
    let ran = build_job(&site, 7, Some(&authority("aa", 1, 6)));
    let layout: Value = serde_json::from_str(&ran.assert_success().stdout).unwrap();
    let name = layout["id"]["name"].as_str().unwrap();
    assert_eq!(obeyed("n1")["counter"], 6);
    assert_eq!(layout["job"]["account"], "physics");
    assert!(reports(&site, name).iter().all(|found| found["layout"]["number"] == layout["number"]));

    let guard_path = format!("{}/guard", path_of(&layout));
    let guards = |node: &str, authority: Option<&Value>| {
        order(&site, node, "POST", &guard_path, &Value::Null, authority)
    };
    let commit = json!({ "step": "commit", "layout": layout, "deadline_ms": 2000, "lease_ms": 2000 });
    let commits = |authority: Option<&Value>| {
        order(&site, "n1", "POST", &format!("{}/steps", path_of(&layout)), &commit, authority)
    };
    let release = json!({ "staged_out": { "task": 1 } });
    let releases = |authority: Option<&Value>| {
        order(&site, "n1", "POST", &format!("{}/release", path_of(&layout)), &release, authority)
    };
    let destroys =
        |authority: Option<&Value>| order(&site, "n1", "DELETE", &path_of(&layout), &Value::Null, authority);
    assert_done(&guards("n1", Some(&first)));
    assert_done(&guards("n2", Some(&first)));
    for _ in 0..2 {
        // Another scheduler, one with a copy of the journal, one of the former version: none of their orders is obeyed.
        for stranger in [Some(&second), Some(&authority("aa", 2, 100)), None] {
            assert_refused(&guards("n1", stranger), "not_in_charge");
            assert_refused(&commits(stranger), "not_in_charge");
            assert_refused(&releases(stranger), "not_in_charge");
            assert!(commits(stranger).1["message"].as_str().unwrap().contains("journal aa"));
        }
        assert!(commits(None).1["message"].as_str().unwrap().contains("version"));
        assert_refused(&destroys(Some(&second)), "not_in_charge");
        assert_refused(&destroys(None), "holds_results");
        // One that brings a RAM disk of the former version.
        let mut former = commit.clone();
        former["step"] = "allocate".into();
        former["layout"]["id"]["name"] = "job-8-0".into();
        for field in ["number", "job"] {
            former["layout"].as_object_mut().unwrap().remove(field).unwrap();
        }
        let path = format!("/v1/ramdisks/job-8-0@{}/steps", layout["id"]["epoch"]);
        assert_refused(&order(&site, "n1", "POST", &path, &former, None), "not_in_charge");
        assert_refused(&claims("n1", &claim("aa", 2, 5, false)), "older_journal");
        assert_refused(&claims("n1", &claim("bb", 9, 1, false)), "foreign_journal");
        assert_done(&commits(Some(&first)));
        // The same once it has been started again.
        site.kill_agent("n1");
        site.start_agent("n1");
        assert_eq!(obeyed("n1"), json!({ "journal": "aa", "counter": 6, "session": 1 }));
    }
    // Nothing of this keeps people from RAM disks of their own.
    site.build(&GLUSTER, "hand", "64MiB", 1);
    site.destroy("hand");

    // The scheduler starts anew, and the one before is not obeyed any more.
    assert_done(&claims("n1", &claim("aa", 2, 6, false)));
    assert_refused(&commits(Some(&first)), "not_in_charge");
    assert_done(&commits(Some(&authority("aa", 2, 7))));
    // An older copy, and then another journal, take over.
    assert_done(&claims("n1", &claim("aa", 3, 2, true)));
    assert_refused(&commits(Some(&authority("aa", 2, 8))), "not_in_charge");
    assert_done(&commits(Some(&authority("aa", 3, 3))));
    assert_done(&claims("n1", &claim("bb", 9, 1, true)));
    assert_refused(&commits(Some(&authority("aa", 3, 4))), "not_in_charge");
    assert_refused(&claims("n1", &claim("aa", 4, 9, false)), "foreign_journal");
    assert_done(&commits(Some(&second)));
    // n2 was not reached: there the first one is in charge still.
    assert_refused(&guards("n2", Some(&second)), "not_in_charge");

    // On the Unix socket, too.
    let on_socket = |authority: &Value| {
        let (probe, munge) = (site.probe.display().to_string(), site.munge.display().to_string());
        let said = site.host("n1").ok(&[
            &probe,
            "call",
            "--agent",
            "/run/ondeck/agent.sock",
            "--to",
            "n1",
            "--munge",
            &munge,
            "--method",
            "POST",
            "--path",
            &guard_path,
            "--credential",
            "none",
            "--authority",
            &authority.to_string(),
        ]);
        said.split_once('\n').unwrap().0.parse::<u16>().unwrap()
    };
    assert_eq!((on_socket(&second), on_socket(&first)), (200, 409));

    // A person ends what no scheduler ends: by name.
    site.ramdisk(&["destroy", name]).assert_code(1).assert_says("may hold results");
    site.ramdisk(&["destroy", name, "--abandon-results", "--yes"]).assert_success();
    site.assert_nothing_is_left();
}

#[test]
fn an_agent_that_can_not_tell_whom_it_obeys_does_not_start() {
    if !site::ready(&GLUSTER) {
        return;
    }
    let site = Site::new();
    assert_done(&order(&site, "n1", "POST", "/v1/authority", &claim("aa", 1, 5, false), None));
    let view = &site.build(&site::TMPFS, "stays", "64MiB", 1)[0];
    fs::write(view.outside.join("file"), "results").unwrap();
    site.kill_agent("n1");
    let file = site.host("n1").path_from_outside(format!("{}-n1/authority.json", site::STATE));
    let good = fs::read(&file).unwrap();
    let (ondeck, config) =
        (site.ondeck.display().to_string(), site.bed.dir().join("n1.toml").display().to_string());
    for text in ["", "{", "{\"format\":2}"] {
        fs::write(&file, text).unwrap();
        let ran = site.host("n1").run(&["timeout", "20", &ondeck, "agent", "--config", &config]);
        ran.assert_code(1).assert_says("authority.json").assert_says("whom this agent obeys");
        assert_eq!(fs::read_to_string(view.outside.join("file")).unwrap(), "results");
    }
    fs::write(&file, good).unwrap();
    site.start_agent("n1");
    assert_kept(&site, "stays", view);
    let said = order(&site, "n1", "POST", "/v1/authority", &claim("bb", 1, 5, false), None);
    assert_refused(&said, "foreign_journal");
    site.destroy("stays");
    site.assert_nothing_is_left();
}
