//! What other users put into a job's output directory, where they may write, while it is in RAM.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use serde_json::{Value, json};

use super::{GROUP, Job, make, names, put, site};
use crate::site::{Case, OWNER, STRANGER};

crate::for_engines! {
    tmpfs = TMPFS: [
        what_others_put_there_lends_nobody_the_jobs_owner_or_group,
        what_others_have_closed_holds_no_results_back,
    ]
    gluster = GLUSTER: [
        what_others_put_there_lends_nobody_the_jobs_owner_or_group,
        what_others_have_closed_holds_no_results_back,
    ]
}

/// Another user of the owner's group works in a directory of the RAM disk.
#[track_caller]
fn another_works(job: &Job<'_>, name: &str, script: &str) {
    let view = job.view.as_ref().unwrap();
    let user = view.host.as_user_in(STRANGER, STRANGER, &[GROUP]);
    user.shell(&format!("cd {}/{name} && {script}", view.text())).assert_success();
}

/// An output directory of the group's, empty on disk, with what others may do there.
fn shared(job: &Job<'_>, mode: u32) {
    make(&job.path("out"));
    chown(job.path("out"), Some(OWNER), Some(GROUP)).unwrap();
    fs::set_permissions(job.path("out"), fs::Permissions::from_mode(mode)).unwrap();
    job.succeeds("n1", &job.fill(&[job.directory("out", "0", "out")]));
    // Others reach it through the cover on a compute node; here by its path.
    let view = job.view.as_ref().unwrap();
    fs::set_permissions(&view.outside, fs::Permissions::from_mode(0o711)).unwrap();
    let shown = fs::metadata(job.shown("0")).unwrap();
    assert_eq!((shown.mode() & 0o7777, shown.gid()), (mode, GROUP));
}

fn what_others_put_there_lends_nobody_the_jobs_owner_or_group(case: &Case) {
    let site = site();
    let job = Job::new(&site, case, "job", "192MiB", 1);
    shared(&job, 0o2770);
    another_works(
        &job,
        "0",
        "for name in uid both other kept; do cp /usr/bin/id $name; done; truncate -s 70M large; mkfifo pipe; \
         chgrp $(id -g) other; chmod 4755 uid; chmod 6755 both other large kept pipe",
    );
    job.works("0", "cp /usr/bin/id own; chmod 4711 own");
    // Theirs is put beside it.
    put(&job.path("out/kept"), "of somebody else");
    job.succeeds("n1", &job.home(&[job.directory("out", "0", "out")]));
    let found = |name: &str| {
        let meta = fs::symlink_metadata(job.path("out").join(name)).unwrap();
        (meta.uid(), meta.gid(), format!("{:o}", meta.mode() & 0o7777))
    };
    for (name, mode) in [
        ("uid", "755"),
        ("other", "755"),
        // They were of this group, and still are.
        ("both", "2755"),
        ("large", "2755"),
        ("pipe", "2755"),
        ("kept.ondeck-4711", "2755"),
        ("own", "4711"),
    ] {
        assert_eq!(found(name), (OWNER, GROUP, mode.to_owned()), "{name}");
    }
    site.destroy("job");
    site.assert_nothing_is_left();
}

fn what_others_have_closed_holds_no_results_back(case: &Case) {
    let site = site();
    let job = Job::new(&site, case, "job", "64MiB", 1);
    shared(&job, 0o777);
    another_works(
        &job,
        "0",
        "mkdir closed open && echo x > closed/x && echo y > open/y && echo secret > open/secret && echo s > secret; \
         chmod 700 closed; chmod 600 secret open/secret",
    );
    job.works("0", "echo result > result; echo mine > none; chmod 0 none");
    let directories = [job.directory("out", "0", "out")];
    let told = |request: &Value| {
        let report = job.succeeds("n1", request);
        assert_eq!(report["errors"], json!([]), "{report:#}");
        let message = report["state"]["done"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("3 entries of other users, which user20001 can't read"), "{message}");
        for name in ["closed", "secret", "open/secret"] {
            let named = format!("{} (of uid {STRANGER})", job.path("out").join(name).display());
            assert!(message.contains(&named), "{message}");
        }
    };
    told(&job.home(&directories));
    assert_eq!(names(&job.path("out")), ["none", "open", "open/y", "result"]);
    let none = fs::metadata(job.path("out/none")).unwrap();
    assert_eq!((none.mode() & 0o7777, none.uid()), (0, OWNER));
    assert_eq!(fs::read_to_string(job.path("out/none")).unwrap(), "mine\n");
    // Once more, and packed.
    told(&job.home(&directories));
    job.works("0", "rm -f none");
    told(&job.request(json!({"bring_home": {"directories": directories, "script": null, "pack": "tar"}})));
    let archive = job.path("out/results-4711.tar").display().to_string();
    let listed = site.host("ctl").ok(&["tar", "tf", &archive]);
    let mut listed: Vec<&str> = listed.lines().collect();
    listed.sort_unstable();
    assert_eq!(listed, ["./", "open/", "open/y", "result"]);
    site.destroy("job");
    site.assert_nothing_is_left();
}

/// What is salvaged is merged like all results: nothing of it comes into a directory that another user has put there meanwhile.
#[test]
fn what_is_salvaged_goes_into_no_directory_that_another_user_has_put_there() {
    if !site::ready(&site::GLUSTER) {
        return;
    }
    let site = site();
    let job = Job::new(&site, &site::GLUSTER, "job", "64MiB", 1);
    for name in ["out", "shared"] {
        make(&job.path(name));
    }
    // This one was another user's from the beginning, as a group's may be.
    chown(job.path("shared"), Some(STRANGER), Some(OWNER)).unwrap();
    fs::set_permissions(job.path("shared"), fs::Permissions::from_mode(0o775)).unwrap();
    let directories = [job.directory("out", "0", "out"), job.directory("shared", "1", "out")];
    job.succeeds("n1", &job.fill(&directories));
    job.works("0", "mkdir run1; for n in 1 2 3 4 5 6 7 8; do echo secret > $n; echo secret > run1/$n; done");
    job.works("1", "for n in 1 2 3 4 5 6 7 8; do echo result > $n; done");
    let theirs = |path: &std::path::Path| {
        fs::create_dir(path).unwrap();
        chown(path, Some(STRANGER), Some(STRANGER)).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
    };
    fs::rename(job.path("out"), job.path("out.old")).unwrap();
    theirs(&job.path("out"));
    let salvage =
        json!({"bring_home": {"directories": directories, "script": null, "pack": null, "salvage": true}});
    for node in ["n1", "n2"] {
        job.fails(node, &job.request(salvage.clone()), false, &["another user", "retry --salvage"]);
    }
    assert_eq!(names(&job.path("out")), Vec::<String>::new());
    // A failure of one does not keep the other from what belongs there.
    assert_eq!(names(&job.path("shared")).len(), 8);
    fs::remove_dir(job.path("out")).unwrap();
    fs::rename(job.path("out.old"), job.path("out")).unwrap();
    theirs(&job.path("out/run1"));
    for node in ["n1", "n2"] {
        job.succeeds(node, &job.request(salvage.clone()));
    }
    assert_eq!(names(&job.path("out/run1")), Vec::<String>::new());
    assert_eq!(names(&job.path("out/run1.ondeck-4711")).len(), 8);
    assert_eq!(fs::read_to_string(job.path("out/8")).unwrap(), "secret\n");
    site.destroy("job");
    site.assert_nothing_is_left();
}
