//! Processor time that a gigabyte costs: of the servers, of the client that mounts, and of the
//! program that writes or reads.
//!
//! Every round has a new RAM disk, because some engines keep the memory of what was removed. What
//! the kernel does for nobody in particular, as for packets on the bridge, is in no process's time.

use std::collections::BTreeMap;
use std::fs;

use anyhow::Result;
use ondeck_bench::size::{GIB, MIB, show};
use ondeck_testbed::Pid;

use crate::interrupt;
use crate::page::{Table, paragraph};
use crate::ramdisk::samples::Samples;
use crate::ramdisk::testbed::{AgentTestbed, Marked, Recipe};
use crate::ramdisk::{Effort, Section, write_absent};

/// The role of the process that mounts, in the mark that an agent gives it.
const CLIENT_ROLE: &str = "client";

/// Seconds per gigabyte of each who takes part.
#[derive(Default)]
struct Cost {
    all: Samples,
    servers: Samples,
    client: Samples,
    program: Samples,
}

#[derive(Default)]
struct Costs {
    write: Cost,
    read: Cost,
    absent: Option<String>,
}

pub fn measure(testbed: &AgentTestbed, effort: Effort) -> Result<Section> {
    let mut recipes: Vec<Recipe> = [1, 2, 4, 8].map(|nodes| Recipe::new("gluster", nodes)).into();
    recipes.extend([1, 2, 4].map(|nodes| Recipe::new("ceph", nodes)));
    // Some engines keep data in their processes, others copy it once more into the client's cache.
    let (bytes, note) = testbed.fit(if effort.quick { 512 * MIB } else { GIB }, 3, 256 * MIB)?;
    let mut costs: Vec<(Recipe, Costs)> =
        recipes.into_iter().map(|recipe| (recipe, Costs::default())).collect();
    let rounds = effort.rounds(2, 3);
    for round in 0..=rounds {
        let kinds = costs.len();
        for position in 0..kinds {
            let (recipe, costs) = &mut costs[(position + round) % kinds];
            if costs.absent.is_some() {
                continue;
            }
            if let Err(error) = once(testbed, *recipe, bytes, (round > 0).then_some(&mut *costs)) {
                interrupt::check()?;
                eprintln!("processor time: {}: {error:#}", recipe.title());
                costs.absent = Some(format!("{error:#}"));
                testbed.reset()?;
            }
        }
        eprintln!("processor time: round {round} of {rounds} done (0 warms up)");
    }
    Ok(render(&costs, bytes, note))
}

fn once(testbed: &AgentTestbed, recipe: Recipe, bytes: u64, costs: Option<&mut Costs>) -> Result<()> {
    let built = testbed.create(recipe, size(recipe, bytes))?;
    let processes = testbed.marked();
    let path = built.mount.join("data");
    let before = times(&processes);
    let write = testbed.write(built.client, &path, bytes)?;
    let between = times(&processes);
    let read = testbed.read(built.client, &path)?;
    let after = times(&processes);
    testbed.destroy(built)?;
    if let Some(costs) = costs {
        costs.write.add(&before, &between, write.cpu_s, bytes);
        costs.read.add(&between, &after, read.cpu_s, bytes);
    }
    Ok(())
}

/// A file lies whole on one of gluster's bricks, so that each must have room for it.
fn size(recipe: Recipe, bytes: u64) -> u64 {
    (bytes + bytes / 2).max(GIB) * recipe.nodes as u64
}

/// User and system time so far, by role, in seconds.
fn times(processes: &[Marked]) -> BTreeMap<String, f64> {
    let mut times = BTreeMap::new();
    for Marked { role, process } in processes {
        *times.entry(role.clone()).or_insert(0.0) += cpu_s(process.pid);
    }
    times
}

/// User and system time of a process so far, in seconds; 0 once it has ended.
pub fn cpu_s(pid: Pid) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    ticks(&stat) as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// utime and stime, the fields 14 and 15; the name in the second may have blanks and brackets.
fn ticks(stat: &str) -> u64 {
    let Some((_, fields)) = stat.rsplit_once(')') else { return 0 };
    fields.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum()
}

impl Cost {
    fn add(
        &mut self,
        before: &BTreeMap<String, f64>,
        after: &BTreeMap<String, f64>,
        program_s: f64,
        bytes: u64,
    ) {
        let gigabytes = bytes as f64 / 1e9;
        let spent = |wanted: &dyn Fn(&str) -> bool| {
            let spent = after.iter().filter(|(role, _)| wanted(role));
            spent.map(|(role, seconds)| seconds - before.get(role).unwrap_or(&0.0)).sum::<f64>()
        };
        let servers = spent(&|role| role != CLIENT_ROLE);
        let client = spent(&|role| role == CLIENT_ROLE);
        self.servers.add(servers / gigabytes);
        self.client.add(client / gigabytes);
        self.program.add(program_s / gigabytes);
        self.all.add((servers + client + program_s) / gigabytes);
    }
}

fn render(costs: &[(Recipe, Costs)], bytes: u64, note: Option<String>) -> Section {
    let mut section = Section::new("Processor time per gigabyte");
    paragraph(
        &mut section.text,
        &format!(
            "User and system seconds for each 10^9 bytes of a file of {} in blocks of 1 MiB, \
             written to a new RAM disk and read back with the client's cache emptied; for example \
             `{}`. Servers and client by /proc/PID/stat, the writing or reading program by its \
             own clock. {}",
            show(bytes),
            Recipe::new("gluster", 2).command(size(Recipe::new("gluster", 2), bytes)),
            note.unwrap_or_default(),
        ),
    );
    for (title, of) in
        [("Write", (|costs| &costs.write) as fn(&Costs) -> &Cost), ("Read", |costs| &costs.read)]
    {
        let mut table = Table::new(&[
            &format!("{title}: s/GB, median"),
            "min",
            "max",
            "engine",
            "of servers",
            "of client",
            "of program",
        ]);
        for (recipe, costs) in costs.iter().filter(|(_, costs)| !costs.write.all.is_empty()) {
            let cost = of(costs);
            let mut cells = cost.all.cells(2).to_vec();
            cells.push(recipe.title());
            cells.extend([&cost.servers, &cost.client, &cost.program].map(|samples| {
                let [median, ..] = samples.cells(2);
                median
            }));
            table.add(cells);
        }
        table.write(&mut section.text);
    }
    write_absent(&mut section.text, costs.iter().map(|(recipe, costs)| (recipe.title(), &costs.absent)));
    section
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_does_not_shift_the_times() {
        let stat = "7 (a) (b) S 1 2 3 4 5 6 7 8 9 10 120 30 0 0 20 0 9 0";
        assert_eq!(ticks(stat), 150);
        assert_eq!(ticks(""), 0);
    }
}
