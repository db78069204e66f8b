//! Ceph with its data in a directory's device: what it gains from metadata on RAM.

use anyhow::{Context, Result};
use ondeck_bench::size::GIB;

use crate::page::{Table, paragraph};
use crate::ramdisk::samples::{Samples, number};
use crate::ramdisk::testbed::{AgentTestbed, DISK, Recipe, text};
use crate::ramdisk::{Effort, Section};

const FILES: usize = 5_000;
/// Building the RAM disk, and the parts of the load.
const PARTS: [&str; 4] = ["(building it)", "create", "stat", "unlink"];

pub fn measure(testbed: &AgentTestbed, effort: Effort) -> Result<Section> {
    let recipe = |metadata| Recipe { devices: Some((DISK, metadata)), ..Recipe::new("ceph", 1) };
    let recipes = [("disk", recipe(None)), ("RAM", recipe(Some("ram")))];
    let mut times: [[Samples; PARTS.len()]; 2] = Default::default();
    let rounds = effort.rounds(1, 3);
    for round in 0..=rounds {
        for position in 0..recipes.len() {
            let which = (position + round) % recipes.len();
            let seconds = once(testbed, recipes[which].1)?;
            if round > 0 {
                times[which].iter_mut().zip(seconds).for_each(|(samples, seconds)| samples.add(seconds));
            }
        }
        eprintln!("metadata device: round {round} of {rounds} done (0 warms up)");
    }

    let mut section = Section::new("Metadata on RAM, data on a disk");
    paragraph(
        &mut section.text,
        &format!(
            "{FILES} files of 1 KiB created, looked at and removed by one process on a new RAM \
             disk of `{}`, beside the same without `--metadata-device`. The disk is a directory \
             of {}.",
            recipes[1].1.command(2 * GIB),
            testbed.disk_label()
        ),
    );
    let mut table = Table::new(&["disk / it", "metadata on", "part", "median s", "min s", "max s"]);
    for (part, name) in PARTS.iter().enumerate() {
        for (which, (device, _)) in recipes.iter().enumerate() {
            let samples = &times[which][part];
            let mut cells = vec![
                number(times[0][part].median() / samples.median(), 2),
                (*device).to_owned(),
                (*name).to_owned(),
            ];
            cells.extend(samples.cells(3));
            table.add(cells);
        }
    }
    table.write(&mut section.text);
    Ok(section)
}

fn once(testbed: &AgentTestbed, recipe: Recipe) -> Result<[f64; PARTS.len()]> {
    let built = testbed.create(recipe, 2 * GIB)?;
    let directory = text(&built.mount.join("files"));
    let load = testbed.load(built.client, &["metadata", &directory, "--count", &FILES.to_string()])?;
    let built_s = built.timed.seconds;
    testbed.destroy(built)?;
    let parts = load.parts.iter().map(|(_, seconds)| *seconds);
    let seconds: Vec<f64> = std::iter::once(built_s).chain(parts).collect();
    seconds.try_into().ok().context("a load with other parts")
}
