//! `ondeck stage` into a gluster RAM disk through its mount, and out again, by its threads.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use ondeck_bench::size::{GIB, MIB};
use ondeck_testbed::Host;

use crate::page::{Table, paragraph};
use crate::ramdisk::samples::{Samples, number};
use crate::ramdisk::testbed::{AgentTestbed, CLIENT, Recipe, text};
use crate::ramdisk::{Effort, Section};

const FILE: u64 = MIB;
/// Nothing leaves the choice to `ondeck stage`.
const THREADS: [Option<u32>; 6] = [None, Some(1), Some(2), Some(4), Some(8), Some(16)];

#[derive(Default)]
struct Times {
    inward: Samples,
    outward: Samples,
}

pub fn measure(testbed: &AgentTestbed, effort: Effort) -> Result<Section> {
    let wanted = if effort.quick { GIB / 2 } else { 2 * GIB };
    // The source, the bricks, the client's cache, and what comes out.
    let (bytes, note) = testbed.fit(wanted, 4, GIB / 2)?;
    let files = bytes / FILE;
    let client = testbed.host(CLIENT);
    let ram = testbed.dir().join("ram");
    fs::create_dir(&ram)?;
    let options = format!("size={},huge=within_size", 3 * bytes);
    testbed.run(client, &["mount", "-t", "tmpfs", "-o", &options, "ram", &text(&ram)].map(String::from))?;
    let source = ram.join("source");
    let (count, each) = (files.to_string(), FILE.to_string());
    testbed.load(client, &["files", &text(&source), "--count", &count, "--bytes", &each])?;

    let recipe = Recipe::new("gluster", 2);
    let size = bytes + bytes / 2;
    let built = testbed.create(recipe, size)?;
    let paths =
        Paths { source, inside: built.mount.join("staged"), out: ram.join("out"), notes: ram.join("notes") };
    let mut times: [Times; THREADS.len()] = Default::default();
    let rounds = effort.rounds(2, 3);
    for round in 0..=rounds {
        for position in 0..THREADS.len() {
            let which = (position + round) % THREADS.len();
            // One setting warms up the memory for all.
            if round == 0 && which > 0 {
                continue;
            }
            let inward = paths.stage(testbed, client, &paths.source, &paths.inside, THREADS[which])?;
            let outward = paths.stage(testbed, client, &paths.inside, &paths.out, THREADS[which])?;
            testbed.remove(client, &paths.inside)?;
            testbed.remove(client, &paths.out)?;
            if round > 0 {
                times[which].inward.add(inward);
                times[which].outward.add(outward);
            }
        }
        eprintln!("staging: round {round} of {rounds} done (0 warms up)");
    }
    testbed.destroy(built)?;
    testbed.run(client, &["umount".to_owned(), text(&ram)])?;

    let mut section = Section::new("Staging through the mount, gluster on 2 nodes");
    paragraph(
        &mut section.text,
        &format!(
            "`ondeck stage --threads N SRC DST` of {files} files of 1 MiB from a tmpfs of the \
             mounting node into the RAM disk of `{}`, and from there into the tmpfs, with the \
             default checksum, a manifest, and the sync. {}",
            recipe.command(size),
            note.unwrap_or_default()
        ),
    );
    write_table(&mut section, &times);
    Ok(section)
}

struct Paths {
    source: PathBuf,
    inside: PathBuf,
    out: PathBuf,
    notes: PathBuf,
}

impl Paths {
    /// Seconds of the whole command.
    fn stage(
        &self,
        testbed: &AgentTestbed,
        host: &Host,
        from: &Path,
        to: &Path,
        threads: Option<u32>,
    ) -> Result<f64> {
        // What is left of another run would be resumed.
        testbed.remove(host, &self.notes)?;
        fs::create_dir(host.path_from_outside(&self.notes))?;
        let mut words = vec![text(testbed.ondeck()), "stage".to_owned()];
        words.extend(threads.map(|threads| format!("--threads={threads}")));
        words.extend(["--manifest".to_owned(), text(&self.notes.join("manifest")), text(from), text(to)]);
        Ok(testbed.run(host, &words)?.0)
    }
}

fn write_table(section: &mut Section, times: &[Times; THREADS.len()]) {
    let mut table = Table::new(&[
        "in: x default",
        "out: x default",
        "threads",
        "in: median s",
        "min s",
        "max s",
        "out: median s",
        "min s",
        "max s",
    ]);
    let default = &times[0];
    for (threads, times) in THREADS.iter().zip(times) {
        let mut cells = vec![
            number(times.inward.median() / default.inward.median(), 2),
            number(times.outward.median() / default.outward.median(), 2),
            threads.map_or("default".to_owned(), |threads| threads.to_string()),
        ];
        cells.extend(times.inward.cells(2));
        cells.extend(times.outward.cells(2));
        table.add(cells);
    }
    table.write(&mut section.text);
}
