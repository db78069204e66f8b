//! Memory beside the data: of the processes, and of the kernel for each file, and whether what
//! agents set aside for it is enough.

use std::fs;

use anyhow::{Context, Result, ensure};
use ondeck_bench::size::{GIB, KIB, show};
use ondeck_core::{EngineKind, Layout};
use ondeck_ramdisk::device::BYTES_OF_FILE;
use ondeck_testbed::Process;

use crate::goals::Judged;
use crate::page::{Table, paragraph};
use crate::ramdisk::samples::{Samples, number};
use crate::ramdisk::testbed::{AgentTestbed, CLIENT, Marked, MountedRamDisk, Recipe};
use crate::ramdisk::{Effort, Section, judged};
use crate::{interrupt, machine};

const FILES: u64 = 20_000;
const FILE_BYTES: u64 = KIB;
/// The one file that is written before them.
const DATA: u64 = GIB;

/// A process at one moment.
struct ProcessMemory {
    host: String,
    role: String,
    memory: u64,
}

/// One RAM disk: its processes at rest, after one large file, after many small ones.
struct Use {
    recipe: Recipe,
    moments: [Vec<ProcessMemory>; 3],
    /// What an agent sets aside for the processes of the first server.
    budget: u64,
    /// Kernel memory for each small file that can't be reclaimed, and that can.
    unreclaimable: f64,
    reclaimable: f64,
}

pub fn measure(testbed: &AgentTestbed, _effort: Effort) -> Result<Section> {
    let mut section = Section::new("Memory");
    let recipes = [Recipe::new("gluster", 2), Recipe::new("ceph", 2), Recipe::new("tmpfs", 1)];
    paragraph(
        &mut section.text,
        &format!(
            "One run on a new RAM disk, as by `{}`: resident memory of each process (VmRSS) at \
             rest, after a file of {} was written, and after {FILES} files of {} more.",
            recipes[0].command(2 * share()),
            show(DATA),
            show(FILE_BYTES)
        ),
    );
    let mut uses = Vec::new();
    for recipe in recipes {
        match once(testbed, recipe) {
            Ok(used) => uses.push(used),
            Err(error) => {
                interrupt::check()?;
                eprintln!("memory: {}: {error:#}", recipe.title());
                paragraph(&mut section.text, &format!("{}: not measured: {error:#}.", recipe.title()));
                testbed.reset()?;
            }
        }
        eprintln!("memory: {} done", recipe.title());
    }
    write_processes(&mut section, &uses);
    write_kernel(&mut section, &uses);
    Ok(section)
}

/// Room for the large file on any one brick, and for the small ones.
fn share() -> u64 {
    DATA + DATA / 2
}

fn once(testbed: &AgentTestbed, recipe: Recipe) -> Result<Use> {
    testbed.fit(DATA * 3, 1, DATA * 3)?;
    let built = testbed.create(recipe, share() * recipe.nodes as u64)?;
    let budget = budget(&built)?;
    let idle = look(testbed);
    testbed.write(built.client, &built.mount.join("data"), DATA)?;
    let filled = look(testbed);
    let before = [machine::memory("SUnreclaim"), machine::memory("SReclaimable")];
    let directory = built.mount.join("files");
    testbed.load(
        built.client,
        &[
            "files",
            &directory.to_string_lossy(),
            "--count",
            &FILES.to_string(),
            "--bytes",
            &FILE_BYTES.to_string(),
        ],
    )?;
    let [unreclaimable, reclaimable] = [("SUnreclaim", before[0]), ("SReclaimable", before[1])]
        .map(|(field, before)| (machine::memory(field) as f64 - before as f64) / FILES as f64);
    let many = look(testbed);
    testbed.destroy(built)?;
    Ok(Use { recipe, moments: [idle, filled, many], budget, unreclaimable, reclaimable })
}

fn budget(built: &MountedRamDisk) -> Result<u64> {
    let layout: Layout = serde_json::from_value(built.layout.clone()).context("not a layout")?;
    let server = layout.servers.first().context("a layout without servers")?;
    ensure!(layout.engine != EngineKind::Simulated, "nothing to measure");
    Ok(ondeck_ramdisk::engine(layout.engine).process_memory(&layout, 0, server.share).0)
}

fn look(testbed: &AgentTestbed) -> Vec<ProcessMemory> {
    let nodes = (1..=2).map(|number| format!("n{number}"));
    let mut seen = Vec::new();
    for host in nodes.chain([CLIENT.to_owned()]) {
        for Marked { role, process } in testbed.marked_on(testbed.host(&host)) {
            seen.push(ProcessMemory { host: host.clone(), role, memory: resident(&process) });
        }
    }
    seen
}

fn resident(process: &Process) -> u64 {
    let status = fs::read_to_string(process.proc("status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * KIB
}

/// The most that the servers on one host have together; the client counts where it mounts.
fn most_on_a_server(moments: &[Vec<ProcessMemory>; 3]) -> u64 {
    let on = |moment: &[ProcessMemory], host: &str| -> u64 {
        moment.iter().filter(|seen| seen.host == host).map(|seen| seen.memory).sum()
    };
    moments.iter().flat_map(|moment| ["n1", "n2"].map(|host| on(moment, host))).max().unwrap_or(0)
}

fn write_processes(section: &mut Section, uses: &[Use]) {
    let mut table = Table::new(&["engine", "host", "process", "at rest", "after 1 GiB", "after the files"]);
    for used in uses {
        let [idle, filled, many] = &used.moments;
        for (index, seen) in idle.iter().enumerate() {
            let later = |moment: &[ProcessMemory]| {
                let same = moment.get(index).filter(|other| other.role == seen.role);
                same.map_or("ended".to_owned(), |other| show(other.memory))
            };
            table.add([
                used.recipe.title(),
                seen.host.clone(),
                seen.role.clone(),
                show(seen.memory),
                later(filled),
                later(many),
            ]);
        }
        if !idle.is_empty() {
            let most = most_on_a_server(&used.moments);
            section.goals.push(within(
                "servers on a node within what is set aside",
                &used.recipe.title(),
                most as f64,
                &format!("{} of {}", show(most), show(used.budget)),
                used.budget as f64,
            ));
        }
    }
    table.write(&mut section.text);
}

fn write_kernel(section: &mut Section, uses: &[Use]) {
    paragraph(
        &mut section.text,
        &format!(
            "Kernel memory for each of the {FILES} small files, by SUnreclaim and SReclaimable of \
             /proc/meminfo before and after, of servers and client together and of whatever else \
             the machine did meanwhile. Agents set {} aside for each file (BYTES_OF_FILE), and \
             allow one for each 16 KiB. Gluster's links by id lie in up to 65,536 directories, \
             which few files share: more files cost less each.",
            show(BYTES_OF_FILE)
        ),
    );
    let mut table = Table::new(&[
        "of what is set aside",
        "engine",
        "unreclaimable bytes per file",
        "reclaimable bytes per file",
    ]);
    for used in uses {
        let Use { unreclaimable, reclaimable, .. } = *used;
        table.add([
            format!("{:.0} %", unreclaimable / BYTES_OF_FILE as f64 * 100.0),
            used.recipe.title(),
            number(unreclaimable, 0),
            number(reclaimable, 0),
        ]);
        section.goals.push(within(
            "kernel memory of a file within what is set aside",
            &used.recipe.title(),
            unreclaimable,
            &format!("{unreclaimable:.0} of {BYTES_OF_FILE} bytes"),
            BYTES_OF_FILE as f64,
        ));
    }
    table.write(&mut section.text);
}

fn within(goal: &str, case: &str, value: f64, figure: &str, most: f64) -> Judged {
    judged(goal, case, &Samples::from_iter([value]), figure, value <= most)
}
