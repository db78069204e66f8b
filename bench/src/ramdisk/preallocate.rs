//! What `preallocate = true` costs when a RAM disk is built, and what its first write gains.

use anyhow::Result;
use ondeck_bench::size::{GIB, MIB, show};

use crate::interrupt;
use crate::page::{Table, paragraph};
use crate::ramdisk::samples::{Samples, number};
use crate::ramdisk::testbed::{AgentTestbed, Recipe};
use crate::ramdisk::{Effort, Section, write_absent};

#[derive(Default)]
struct Gain {
    create: Samples,
    /// GB/s.
    first: Samples,
    again: Samples,
    absent: Option<String>,
}

pub fn measure(testbed: &AgentTestbed, effort: Effort) -> Result<Section> {
    let (bytes, note) = testbed.fit(if effort.quick { 512 * MIB } else { GIB }, 4, 256 * MIB)?;
    let recipes = [Recipe::new("tmpfs", 1), Recipe::new("gluster", 2)]
        .into_iter()
        .flat_map(|recipe| [false, true].map(|preallocate| Recipe { preallocate, ..recipe }));
    let mut gains: Vec<(Recipe, Gain)> = recipes.map(|recipe| (recipe, Gain::default())).collect();
    let rounds = effort.rounds(3, 5);
    for round in 0..=rounds {
        let kinds = gains.len();
        for position in 0..kinds {
            let (recipe, gain) = &mut gains[(position + round) % kinds];
            if gain.absent.is_some() {
                continue;
            }
            match once(testbed, *recipe, bytes) {
                Ok((create_s, first_s, again_s)) if round > 0 => {
                    gain.create.add(create_s);
                    gain.first.add(bytes as f64 / first_s / 1e9);
                    gain.again.add(bytes as f64 / again_s / 1e9);
                }
                Ok(_) => {}
                Err(error) => {
                    interrupt::check()?;
                    gain.absent = Some(format!("{error:#}"));
                    testbed.reset()?;
                }
            }
        }
        eprintln!("preallocate: round {round} of {rounds} done (0 warms up)");
    }

    let mut section = Section::new("Touching all pages first");
    paragraph(
        &mut section.text,
        &format!(
            "`preallocate = true` in the agents' configuration, beside the default `false`: a new \
             RAM disk with room for {} on each node (`{}`), a file of {} written to it, and the \
             same file written over in place. The pages that are touched are given back to the \
             kernel, so that it gains where the machine's memory was never used before; here it \
             has been, in the warm-up at the latest. {}",
            show(bytes + bytes / 2),
            gains[2].0.command(size(gains[2].0, bytes)),
            show(bytes),
            note.unwrap_or_default()
        ),
    );
    let mut table = Table::new(&[
        "first / again",
        "engine",
        "preallocate",
        "first write: median GB/s",
        "min",
        "max",
        "again: median GB/s",
        "create: median s",
        "min s",
        "max s",
    ]);
    for (recipe, gain) in gains.iter().filter(|(_, gain)| !gain.create.is_empty()) {
        let mut cells = vec![
            number(gain.first.median() / gain.again.median(), 2),
            recipe.title(),
            recipe.preallocate.to_string(),
        ];
        cells.extend(gain.first.cells(2));
        cells.push(number(gain.again.median(), 2));
        cells.extend(gain.create.cells(3));
        table.add(cells);
    }
    table.write(&mut section.text);
    write_absent(&mut section.text, gains.iter().map(|(recipe, gain)| (recipe.title(), &gain.absent)));
    Ok(section)
}

fn size(recipe: Recipe, bytes: u64) -> u64 {
    (bytes + bytes / 2) * recipe.nodes as u64
}

/// Seconds to create, for the first write, and for the next.
fn once(testbed: &AgentTestbed, recipe: Recipe, bytes: u64) -> Result<(f64, f64, f64)> {
    let built = testbed.create(recipe, size(recipe, bytes))?;
    let path = built.mount.join("data");
    let first = testbed.write(built.client, &path, bytes)?;
    let again = testbed.write(built.client, &path, bytes)?;
    let create_s = built.timed.seconds;
    testbed.destroy(built)?;
    Ok((create_s, first.seconds(), again.seconds()))
}
