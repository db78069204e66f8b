//! From nothing to mounted, and back: how long the commands take, and their steps.

use anyhow::Result;
use ondeck_bench::size::{GIB, MIB, show};

use crate::goals::Judged;
use crate::page::{Table, paragraph};
use crate::ramdisk::samples::{Samples, number};
use crate::ramdisk::testbed::{AgentTestbed, Recipe, StepTime, Timed};
use crate::ramdisk::{Effort, Section, judged, write_absent};
use crate::{interrupt, machine};

/// Seconds, for gluster from nothing to mounted, and for ceph.
const CREATE_GLUSTER_S: f64 = 0.5;
const CREATE_CEPH_S: f64 = 2.0;
const DESTROY_S: f64 = 0.5;
const DESTROY_FULL_S: f64 = 1.0;
/// What the thesis that Ondeck follows measured on its own cluster, in seconds.
const THESIS_CREATE_S: [f64; 2] = [12.0, 22.0];
const THESIS_DESTROY_S: [f64; 2] = [2.0, 10.0];

/// What every node lends.
const SHARE: u64 = GIB;
/// Data in the RAM disk that is destroyed full, and the size of its files.
const FULL: u64 = 6 * GIB;
const FULL_FILE: u64 = 256 * MIB;

/// What building and destroying one kind of RAM disk took.
struct Lifetime {
    recipe: Recipe,
    create: Samples,
    destroy: Samples,
    create_steps: Vec<(String, Samples)>,
    destroy_steps: Vec<(String, Samples)>,
    /// Why it could not be built.
    absent: Option<String>,
}

impl Lifetime {
    fn add(&mut self, create: &Timed, destroy: &Timed) {
        self.create.add(create.seconds);
        self.destroy.add(destroy.seconds);
        add_steps(&mut self.create_steps, &create.steps);
        add_steps(&mut self.destroy_steps, &destroy.steps);
    }
}

fn add_steps(known: &mut Vec<(String, Samples)>, steps: &[StepTime]) {
    for step in steps {
        match known.iter_mut().find(|(name, _)| *name == step.name) {
            Some((_, samples)) => samples.add(step.seconds),
            None => known.push((step.name.clone(), [step.seconds].into_iter().collect())),
        }
    }
}

pub fn measure(testbed: &AgentTestbed, effort: Effort) -> Result<Section> {
    let mut recipes: Vec<Recipe> = [1, 2, 4, 8].map(|nodes| Recipe::new("gluster", nodes)).into();
    recipes.extend([1, 2, 4, 8].map(|nodes| Recipe::new("ceph", nodes)));
    recipes.push(Recipe::new("tmpfs", 1));
    let mut lifetimes: Vec<Lifetime> = recipes
        .into_iter()
        .map(|recipe| Lifetime {
            recipe,
            create: Samples::default(),
            destroy: Samples::default(),
            create_steps: Vec::new(),
            destroy_steps: Vec::new(),
            absent: None,
        })
        .collect();
    let rounds = effort.rounds(3, 7);
    for round in 0..=rounds {
        let kinds = lifetimes.len();
        for position in 0..kinds {
            let lifetime = &mut lifetimes[(position + round) % kinds];
            if lifetime.absent.is_some() {
                continue;
            }
            match once(testbed, lifetime.recipe) {
                Ok((create, destroy)) if round > 0 => lifetime.add(&create, &destroy),
                Ok(_) => {}
                Err(error) => {
                    interrupt::check()?;
                    eprintln!("create and destroy: {}: {error:#}", lifetime.recipe.title());
                    lifetime.absent = Some(format!("{error:#}"));
                    testbed.reset()?;
                }
            }
        }
        eprintln!("create and destroy: round {round} of {rounds} done (0 warms up)");
    }
    let full = destroy_full(testbed, effort);
    interrupt::check()?;

    let mut section = Section::new("Create and destroy");
    write_times(&mut section, &lifetimes, testbed.entering()?);
    match &full {
        Ok(full) => write_full(&mut section, full),
        Err(error) => {
            testbed.reset()?;
            paragraph(&mut section.text, &format!("Destroying a full one was not measured: {error:#}."));
        }
    }
    for (lifetime, what) in [("gluster", 2), ("gluster", 8), ("ceph", 2)]
        .into_iter()
        .filter_map(|(engine, nodes)| lifetimes.iter().find(|l| l.recipe == Recipe::new(engine, nodes)))
        .flat_map(|lifetime| [(lifetime, "Create"), (lifetime, "Destroy")])
    {
        write_steps(&mut section, lifetime, what);
    }
    Ok(section)
}

fn once(testbed: &AgentTestbed, recipe: Recipe) -> Result<(Timed, Timed)> {
    let built = testbed.create(recipe, SHARE * recipe.nodes as u64)?;
    let create = built.timed.clone();
    Ok((create, testbed.destroy(built)?))
}

/// A RAM disk that was destroyed full.
struct Full {
    bytes: u64,
    note: Option<String>,
    destroy: Samples,
    /// The part of the data whose RAM was free when the command returned.
    freed: Samples,
    steps: Vec<(String, Samples)>,
    recipe: Recipe,
}

fn destroy_full(testbed: &AgentTestbed, effort: Effort) -> Result<Full> {
    let recipe = Recipe::new("gluster", 2);
    let wanted = if effort.quick { 2 * GIB } else { FULL };
    // The client's page cache holds a second copy for as long as there is room.
    let (bytes, note) = testbed.fit(wanted, 2, GIB)?;
    let (destroy, freed) = Default::default();
    let mut full = Full { bytes, note, destroy, freed, steps: Vec::new(), recipe };
    let rounds = effort.rounds(2, 3);
    for round in 0..=rounds {
        // Files lie whole on one brick each, so that one gets more of them than the other.
        let built = testbed.create(recipe, bytes * 2)?;
        for number in 0..bytes / FULL_FILE {
            testbed.write(built.client, &built.mount.join(format!("f{number}")), FULL_FILE)?;
        }
        let filled = machine::memory("Shmem");
        let destroy = testbed.destroy(built)?;
        let left = machine::memory("Shmem");
        if round > 0 {
            full.freed.add((filled as f64 - left as f64) / bytes as f64);
            full.destroy.add(destroy.seconds);
            add_steps(&mut full.steps, &destroy.steps);
        }
        eprintln!("destroy with {} of data: round {round} of {rounds} done", show(bytes));
    }
    Ok(full)
}

fn write_times(section: &mut Section, lifetimes: &[Lifetime], entering_s: f64) {
    paragraph(
        &mut section.text,
        &format!(
            "Wall time of the whole command, from nothing to mounted and tried by a write and a \
             read, and back with nothing in it; each node lends {}. For example `{}` and `{}`. \
             Each includes {:.0} ms for entering the testbed's host. The thesis has {} to {} s to \
             create and {} to {} s to destroy, on a cluster of its own: the first columns say how \
             many times as fast the median here is.",
            show(SHARE),
            Recipe::new("gluster", 2).command(2 * SHARE),
            Recipe::new("gluster", 2).destroy_command(),
            entering_s * 1e3,
            THESIS_CREATE_S[0],
            THESIS_CREATE_S[1],
            THESIS_DESTROY_S[0],
            THESIS_DESTROY_S[1],
        ),
    );
    let mut table = Table::new(&[
        "create: thesis / ours",
        "destroy: thesis / ours",
        "engine",
        "create: median s",
        "min s",
        "max s",
        "destroy: median s",
        "min s",
        "max s",
    ]);
    let measured = |lifetime: &&Lifetime| !lifetime.create.is_empty();
    for lifetime in lifetimes.iter().filter(measured) {
        let mut cells = vec![
            faster(THESIS_CREATE_S, &lifetime.create),
            faster(THESIS_DESTROY_S, &lifetime.destroy),
            lifetime.recipe.title(),
        ];
        cells.extend(lifetime.create.cells(3));
        cells.extend(lifetime.destroy.cells(3));
        table.add(cells);
        let create_goal = match lifetime.recipe.engine {
            "gluster" => CREATE_GLUSTER_S,
            "ceph" => CREATE_CEPH_S,
            _ => continue,
        };
        section.goals.push(below(lifetime, "create", &lifetime.create, create_goal));
        if lifetime.recipe.engine == "gluster" {
            section.goals.push(below(lifetime, "destroy", &lifetime.destroy, DESTROY_S));
        }
    }
    table.write(&mut section.text);
    write_absent(
        &mut section.text,
        lifetimes.iter().map(|lifetime| (lifetime.recipe.title(), &lifetime.absent)),
    );
}

fn below(lifetime: &Lifetime, what: &str, samples: &Samples, goal_s: f64) -> Judged {
    let seconds = samples.median();
    judged(
        &format!("{what} in less than {goal_s} s"),
        &lifetime.recipe.title(),
        samples,
        &format!("{} s", number(seconds, 3)),
        seconds < goal_s,
    )
}

/// How many times as fast as the thesis' shortest and longest.
fn faster(thesis_s: [f64; 2], ours: &Samples) -> String {
    if ours.is_empty() {
        return String::new();
    }
    let [least, most] = thesis_s.map(|seconds| seconds / ours.median());
    format!("{least:.0} to {most:.0}")
}

fn write_full(section: &mut Section, full: &Full) {
    let seconds = full.destroy.median();
    let case = format!("{}, {} of data", full.recipe.title(), show(full.bytes));
    paragraph(
        &mut section.text,
        &format!(
            "With {} of data, written through the mount in files of {}: `{}` takes {} s in the \
             median ({} to {}). When it returned, {:.0} % of the data's RAM was free again (Shmem of \
             /proc/meminfo). {}",
            show(full.bytes),
            show(FULL_FILE),
            full.recipe.destroy_command(),
            number(seconds, 3),
            number(full.destroy.min(), 3),
            number(full.destroy.max(), 3),
            full.freed.median() * 100.0,
            full.note.as_deref().unwrap_or_default(),
        ),
    );
    steps_table(&full.steps).write(&mut section.text);
    let goal = format!("destroy in less than {DESTROY_FULL_S} s");
    let figure = format!("{} s", number(seconds, 3));
    section.goals.push(judged(&goal, &case, &full.destroy, &figure, seconds < DESTROY_FULL_S));
}

fn write_steps(section: &mut Section, lifetime: &Lifetime, what: &str) {
    let (steps, explained) = match what {
        "Create" => (&lifetime.create_steps, "as the command tells them; it waits for all nodes in each"),
        _ => (&lifetime.destroy_steps, "of the slowest node each; nodes do not wait for each other"),
    };
    if steps.is_empty() {
        return;
    }
    paragraph(&mut section.text, &format!("{what}, {}: the steps, {explained}.", lifetime.recipe.title()));
    steps_table(steps).write(&mut section.text);
}

fn steps_table(steps: &[(String, Samples)]) -> Table {
    let mut table = Table::new(&["step", "median ms", "min ms", "max ms"]);
    for (name, samples) in steps {
        let [median, min, max] = [samples.median(), samples.min(), samples.max()];
        let mut cells = vec![name.clone()];
        cells.extend([median, min, max].map(|seconds| number(seconds * 1e3, 1)));
        table.add(cells);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_kept_in_their_order() {
        let step = |name: &str, seconds| StepTime { name: name.into(), seconds };
        let mut known = Vec::new();
        add_steps(&mut known, &[step("mount", 1.0), step("check", 2.0)]);
        add_steps(&mut known, &[step("mount", 3.0), step("check", 4.0)]);
        assert_eq!(known[0], ("mount".to_owned(), [1.0, 3.0].into_iter().collect()));
        assert_eq!(known[1].0, "check");
    }
}
