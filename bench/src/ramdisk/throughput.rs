//! One client, one file, blocks of 1 MiB: what Ondeck's Gluster moves beside the same built by hand.

use std::path::PathBuf;

use anyhow::Result;
use ondeck_bench::size::{GIB, MIB, show};
use ondeck_testbed::{Host, Pid};

use crate::memcpy;
use crate::page::{Table, paragraph};
use crate::ramdisk::by_hand::{ByHand, Flavour};
use crate::ramdisk::cpu::cpu_s;
use crate::ramdisk::load::Load;
use crate::ramdisk::samples::{Samples, number};
use crate::ramdisk::testbed::{AgentTestbed, Recipe};
use crate::ramdisk::{Effort, Section, judged};

/// Of what the stack by hand moves.
const OF_BY_HAND: f64 = 0.95;
/// GB/s, where memcpy has [`AT_MEMCPY`]: elsewhere in proportion.
const RATE: f64 = 1.1;
const AT_MEMCPY: f64 = 11.0;

const NAMES: [&str; 4] = [
    "ondeck ramdisk",
    "by hand",
    "by hand, `--auto-invalidation=on --acl`",
    "by hand, the same, bricks with `huge=within_size`",
];

/// A mounted filesystem and what serves it.
struct Stack<'a> {
    client: &'a Host,
    mount: PathBuf,
    processes: Vec<Pid>,
}

/// What one stack did, round by round.
#[derive(Default)]
struct Direction {
    /// Bytes per second.
    rates: Vec<f64>,
    /// Processor seconds per gigabyte, of everybody.
    cpu: Samples,
}

#[derive(Default)]
struct Rates {
    write: Direction,
    read: Direction,
}

pub fn measure(testbed: &AgentTestbed, effort: Effort) -> Result<Section> {
    let recipe = Recipe::new("gluster", 2);
    // Many short rounds: what others do on the machine meets all stacks alike.
    let (bytes, note) = testbed.fit(GIB, 2, 512 * MIB)?;
    let share = bytes + bytes / 4;
    let built = testbed.create(recipe, 2 * share)?;
    let hand = |number, correct_client, huge| {
        ByHand::start(testbed, Flavour { number, correct_client, huge }, share)
    };
    let hands = [hand(1, false, false)?, hand(2, true, false)?, hand(3, true, true)?];
    let ours = testbed.marked().into_iter().map(|marked| marked.process.pid).collect();
    let mut stacks = vec![Stack { client: built.client, mount: built.mount.clone(), processes: ours }];
    stacks.extend(hands.iter().map(|hand| Stack {
        client: hand.client,
        mount: hand.mount.clone(),
        processes: hand.processes(),
    }));

    let mut rates: [Rates; 4] = Default::default();
    let mut memory = memcpy::Rates::default();
    let rounds = effort.rounds(4, 15);
    for round in 0..=rounds {
        for position in 0..stacks.len() {
            let which = (position + round) % stacks.len();
            let counts = (round > 0).then_some(&mut rates[which]);
            stacks[which].once(testbed, &format!("round-{round}"), bytes, counts)?;
        }
        if round % 5 == 1 {
            memory.add(memcpy::measure_in_child()?);
        }
        eprintln!("throughput: round {round} of {rounds} done (0 warms up)");
    }
    drop(hands);
    testbed.destroy(built)?;

    let mut section = Section::new("Throughput of one client, gluster on 2 nodes");
    paragraph(
        &mut section.text,
        &format!(
            "`{}` beside the same processes started by hand (two bricks on tmpfs, a client with \
             distribute and write-behind, no password), all mounted at once and taking turns: a \
             new file of {} written in blocks of 1 MiB and closed, then opened, its pages dropped \
             from the client's cache, and read. Ratios are medians of the ratios within a round, \
             those of processor time (servers, client and program) of medians. Everything runs on \
             this one machine, so client and bricks share its processors. {}",
            recipe.command(2 * share),
            show(bytes),
            note.as_deref().unwrap_or_default(),
        ),
    );
    write_table(&mut section, &rates, memory.best());
    Ok(section)
}

impl Stack<'_> {
    /// Writes, reads and removes one file.
    fn once(&self, testbed: &AgentTestbed, name: &str, bytes: u64, rates: Option<&mut Rates>) -> Result<()> {
        let path = self.mount.join(name);
        let before = self.cpu_s();
        let write = testbed.write(self.client, &path, bytes)?;
        let between = self.cpu_s();
        let read = testbed.read(self.client, &path)?;
        let after = self.cpu_s();
        testbed.remove(self.client, &path)?;
        if let Some(rates) = rates {
            rates.write.add(bytes, &write, between - before);
            rates.read.add(bytes, &read, after - between);
        }
        Ok(())
    }

    fn cpu_s(&self) -> f64 {
        self.processes.iter().map(|pid| cpu_s(*pid)).sum()
    }
}

impl Direction {
    fn add(&mut self, bytes: u64, load: &Load, servers_cpu_s: f64) {
        self.rates.push(bytes as f64 / load.seconds());
        self.cpu.add((servers_cpu_s + load.cpu_s) / (bytes as f64 / 1e9));
    }

    /// Round by round, because a machine that others use drifts.
    fn ratios_to(&self, theirs: &Self) -> Samples {
        self.rates.iter().zip(&theirs.rates).map(|(ours, theirs)| ours / theirs).collect()
    }

    fn giga(&self) -> Samples {
        self.rates.iter().map(|rate| rate / 1e9).collect()
    }
}

fn write_table(section: &mut Section, rates: &[Rates; 4], memcpy: Option<f64>) {
    let ours = &rates[0];
    for (what, of) in
        [("write", (|rates| &rates.write) as fn(&Rates) -> &Direction), ("read", |rates| &rates.read)]
    {
        let mut table = Table::new(&[
            &format!("{what}: ours / it"),
            "min",
            "max",
            "best / best",
            "CPU: ours / it",
            "stack",
            "median GB/s",
            "min",
            "max",
            "CPU s/GB",
        ]);
        let ours = of(ours);
        for (name, theirs) in NAMES.iter().zip(rates.iter().map(of)) {
            let ratios = ours.ratios_to(theirs);
            let best = ours.giga().max() / theirs.giga().max();
            let mut cells = ratios.cells(2).to_vec();
            cells.push(number(best, 2));
            cells.push(number(ours.cpu.median() / theirs.cpu.median(), 2));
            cells.push((*name).to_owned());
            cells.extend(theirs.giga().cells(2));
            cells.push(number(theirs.cpu.median(), 2));
            table.add(cells);
            if *name != NAMES[0] {
                // As it is shown.
                let met = (ratios.median() * 100.0).round() >= OF_BY_HAND * 100.0;
                let goal = format!("{what} at least {OF_BY_HAND} of the same stack by hand");
                let [median, min, max] = ratios.cells(2);
                let figure = format!("{median}, in rounds {min} to {max}, best runs {}", number(best, 2));
                section.goals.push(judged(
                    &goal,
                    &format!("gluster, 2 nodes, {name}"),
                    &ratios,
                    &figure,
                    met,
                ));
            }
        }
        table.write(&mut section.text);
    }
    against_memcpy(section, ours, memcpy);
}

fn against_memcpy(section: &mut Section, ours: &Rates, memcpy: Option<f64>) {
    let Some(memcpy) = memcpy.map(|rate| rate / 1e9) else { return };
    let goal_rate = RATE / AT_MEMCPY * memcpy;
    paragraph(
        &mut section.text,
        &format!(
            "memcpy here, on one thread, has {memcpy:.1} GB/s (`ondeck-bench memcpy`, the best), so the \
             goal of {RATE} GB/s where memcpy has {AT_MEMCPY} is {goal_rate:.2} GB/s here."
        ),
    );
    for (what, direction) in [("write", &ours.write), ("read", &ours.read)] {
        let samples = direction.giga();
        let median = samples.median();
        let goal = format!("{what} at least {:.0} % of memcpy", RATE / AT_MEMCPY * 100.0);
        let figure = format!("{median:.2} GB/s, {:.0} % of {memcpy:.1}", median / memcpy * 100.0);
        section.goals.push(judged(
            &goal,
            "gluster, 2 nodes, one client",
            &samples,
            &figure,
            median >= goal_rate,
        ));
    }
}
