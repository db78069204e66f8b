//! `ondeck-bench hooks`: what Prolog and Epilog add to a job, and how long a RAM disk takes from on deck
//! to READY, beside a real Slurm.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};

use crate::page::{Table, paragraph};
use crate::ramdisk::samples::{Samples, number};
use crate::scheduler::cluster::{Cluster, Integration, Setup, wait};
use crate::scheduler::{Options, Part};
use crate::{interrupt, machine};

/// Of one hook, without the mount or unmount that it waits for.
const HOOK_MS: f64 = 150.0;
/// From on deck until READY.
const READY_S: f64 = 1.5;
/// The same in the thesis: construction alone.
const THESIS_S: &str = "12 to 22";
/// Compute nodes of the job that has a RAM disk.
const JOB_NODES: usize = 2;

pub fn run(options: &Options) -> Result<()> {
    if !machine::is_root() {
        bail!("the cluster is a testbed of namespaces and mounts: run it as root");
    }
    interrupt::install()?;
    let mut part = Part::new("hooks", "What hooks add to a job, and from on deck to READY");
    part.introduction = "A real Slurm of four compute nodes and four RSA nodes, with the defaults of `ondeck serve` (a \
                         look at the queue every second, a job is on deck when it was next for one). All nodes are \
                         namespaces of one machine. The first round of each is dropped."
        .into();
    let cluster = Cluster::new(&Setup {
        lends: "256MiB",
        disk: None,
        scheduler: "",
        integration: Integration::Outside,
        slurm: "",
    })?;
    hooks(options, &cluster, &mut part)?;
    ready(options, &cluster, &mut part)?;
    drop(cluster);
    part.publish(options)
}

/// A directory of the user's.
pub fn directory(cluster: &Cluster, name: &str) -> Result<PathBuf> {
    let user = cluster.user();
    let path = user.scratch.join(name);
    fs::create_dir_all(&path)?;
    chown(&path, Some(user.uid), Some(user.gid))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

fn hooks(options: &Options, cluster: &Cluster, part: &mut Part) -> Result<()> {
    let rounds = options.rounds(3, 20);
    let output = directory(cluster, "out")?;
    // In the order of the hooks: without RSA; with it, the whole and without mount and unmount.
    let mut plain: [Samples; 2] = Default::default();
    let mut whole: [Samples; 2] = Default::default();
    let mut added: [Samples; 2] = Default::default();
    let mut work: [Samples; 2] = Default::default();
    for round in 0..=rounds {
        eprintln!("hooks: round {round} of {rounds}");
        let greatest = |ms: Vec<f64>| ms.into_iter().fold(0.0, f64::max);
        let job = cluster.submit("#!/bin/sh\ntrue\n", &["--output=/dev/null"])?;
        cluster.wait_completed(job)?;
        let mut of_plain = [0.0; 2];
        for (ms, hook) in of_plain.iter_mut().zip(["prolog", "epilog"]) {
            *ms = greatest(cluster.hook_ms(hook, job, 1)?);
        }

        let blocker = cluster.block()?;
        let script = format!("#!/bin/sh\n#RSA_DATA_OUT={}\n#RSA_NODES=1\ntrue\n", output.display());
        let nodes = format!("--nodes={JOB_NODES}");
        let job = cluster.submit(&script, &[&nodes, "--output=/dev/null"])?;
        cluster.wait_ready(job)?;
        cluster.cancel(blocker)?;
        cluster.wait_completed(job)?;
        let mut of_rsa = [0.0; 2];
        for (ms, hook) in of_rsa.iter_mut().zip(["prolog", "epilog"]) {
            *ms = greatest(cluster.hook_ms(hook, job, JOB_NODES)?);
        }
        cluster.wait_idle()?;
        let story = cluster.story(job)?;
        ensure!(story.was("INUSE_OUT"), "job {job} did not get its RAM disk: {}", story.message());
        let of_work = ["MOUNTING", "UNMOUNTING"].map(|state| story.seconds(state) * 1e3);
        if round == 0 {
            continue;
        }
        for hook in 0..2 {
            plain[hook].add(of_plain[hook]);
            whole[hook].add(of_rsa[hook]);
            work[hook].add(of_work[hook]);
            added[hook].add(of_rsa[hook] - of_work[hook]);
        }
    }
    paragraph(
        &mut part.text,
        &format!(
            "**Hooks**: a wrapper of `ondeck prolog` and `ondeck epilog` writes the time before and after each. *Without \
             RSA*: a job without `#RSA_` lines on one node. *With RSA*: a job with `#RSA_DATA_OUT` on {JOB_NODES} nodes, \
             whose RAM disk was READY; of its nodes the slowest counts, and *added* is without the seconds that \
             `ondeck job show --json` says it was MOUNTING or UNMOUNTING. {rounds} rounds, milliseconds."
        ),
    );
    let mut table = Table::new(&[
        "of the goal",
        "hook",
        "job",
        "added: median ms",
        "min",
        "max",
        "whole hook",
        "mount or unmount",
    ]);
    for (at, hook) in ["Prolog", "Epilog"].into_iter().enumerate() {
        let rows = [
            ("without RSA", &plain[at], &plain[at], None),
            ("with RSA", &added[at], &whole[at], Some(&work[at])),
        ];
        for (job, added, whole, work) in rows {
            let median = added.median();
            part.goal(
                &format!("a hook adds less than {HOOK_MS} ms"),
                &format!("{hook}, {job}"),
                format!("{median:.0} ms"),
                median < HOOK_MS,
            );
            let [median_ms, min, max] = added.cells(0);
            table.add([
                format!("{:.2}", median / HOOK_MS),
                hook.to_owned(),
                job.to_owned(),
                median_ms,
                min,
                max,
                number(whole.median(), 0),
                work.map_or(String::new(), |work| number(work.median(), 0)),
            ]);
        }
    }
    table.write(&mut part.text);
    Ok(())
}

fn ready(options: &Options, cluster: &Cluster, part: &mut Part) -> Result<()> {
    let rounds = options.rounds(2, 10);
    let input = directory(cluster, "empty")?;
    let blocker = cluster.block()?;
    let mut table = Table::new(&[
        "of the goal",
        "thesis / ours",
        "RSA nodes",
        "on deck to READY: median s",
        "min",
        "max",
        "constructing",
        "staging in",
        "from submission: median s",
        "min",
        "max",
    ]);
    for nodes in [1, 2, 4] {
        let mut on_deck = Samples::default();
        let mut submitted = Samples::default();
        let (mut booting, mut staging) = (Samples::default(), Samples::default());
        for round in 0..=rounds {
            eprintln!("on deck to READY: {nodes} RSA nodes, round {round} of {rounds}");
            let script = format!(
                "#!/bin/sh\n#RSA_DATA_IN={}\n#RSA_NODES={nodes}\n#RSA_ENGINE=gluster\ntrue\n",
                input.display()
            );
            let began = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis() as u64;
            let job = cluster.submit(&script, &["--nodes=1", "--exclusive", "--output=/dev/null"])?;
            cluster.wait_ready(job)?;
            let story = cluster.story(job)?;
            let at =
                |state: &str| story.first_ms(state).with_context(|| format!("job {job} was never {state}"));
            let (first, ready) = (at("INITIAL")?, at("READY")?);
            cluster.cancel(job)?;
            wait("the RAM disk is gone", || {
                let jobs = cluster.status()?["jobs"].as_array().map(Vec::len);
                Ok((jobs == Some(0)).then_some(()))
            })?;
            if round > 0 {
                on_deck.add((ready - first) as f64 / 1e3);
                submitted.add(ready.saturating_sub(began) as f64 / 1e3);
                booting.add(story.seconds("BOOTING"));
                staging.add(story.seconds("STAGING_IN"));
            }
        }
        let median = on_deck.median();
        part.goal(
            &format!("on deck to READY in less than {READY_S} s"),
            &format!("gluster, {nodes} RSA nodes, empty input"),
            format!("{median:.2} s"),
            median < READY_S,
        );
        let [median_s, min, max] = on_deck.cells(2);
        let [from_submission, least, most] = submitted.cells(2);
        table.add([
            format!("{:.2}", median / READY_S),
            format!("{:.0} to {:.0}", 12.0 / median, 22.0 / median),
            nodes.to_string(),
            median_s,
            min,
            max,
            number(booting.median(), 2),
            number(staging.median(), 2),
            from_submission,
            least,
            most,
        ]);
    }
    cluster.cancel(blocker)?;
    paragraph(
        &mut part.text,
        &format!(
            "**On deck to READY**: `#RSA_DATA_IN` of an empty directory, engine gluster; from the first INITIAL of the \
             job's log until READY, and from before `sbatch` was called. The thesis needed {THESIS_S} s to construct the \
             RAM disk, on a cluster of its own. {rounds} rounds."
        ),
    );
    table.write(&mut part.text);
    Ok(())
}
