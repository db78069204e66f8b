//! What the users of jobs with burst buffers are told when they submit them.

use std::collections::BTreeMap;

use ondeck_testbed::available;

use crate::aids::folder;
use crate::cluster::Setup;
use crate::inside::inside;

#[test]
fn what_slurm_would_take_for_its_own_is_refused_and_who_has_no_script_is_told_that_there_is_no_ram_disk() {
    if !available() {
        return;
    }
    let cluster = inside(Setup { rsa_nodes: 1, compute_nodes: 1, ..Setup::default() });
    let alice = cluster.user("alice");
    let input = folder(alice, "in", &BTreeMap::new());
    for line in ["#RSA pool=ondeck capacity=1GiB", "#RSA capacity=1 pool=other"] {
        for ours in [String::new(), format!("#RSA_DATA_IN={}\n", input.display())] {
            let text = format!("#!/bin/sh\n{ours}{line}\ntrue\n");
            let ran = cluster.slurm.try_submit(alice, &text, &["--nodes=1"]);
            let is_told = ran.stderr.contains("write #RSA_CAPACITY=SIZE and #RSA_POOL=NAME");
            assert!(!ran.success() && is_told, "{ran:?}");
        }
    }
    let bb = format!("--bb=#RSA_DATA_IN={}", input.display());
    let ran = cluster.slurm.client_as(alice, &["salloc", &bb, "--nodes=1", "--chdir=/", "true"]);
    assert!(ran.success() && ran.stderr.contains("only a batch script (sbatch) can have one"), "{ran:?}");
    let ran = cluster.slurm.client_as(alice, &["salloc", "--nodes=1", "--chdir=/", "true"]);
    assert!(ran.success() && !ran.stderr.contains("no RAM disk"), "{ran:?}");
    cluster.assert_clean_inside();
}
