//! How a run has used its files is told, or said to be not known; never told wrongly.

#![allow(clippy::unwrap_used)]

use ondeck_core::Bytes;
use ondeck_layout::census::{Census, MOST_TOLD, Tally};
use ondeck_layout::classify::{FileUse, RunShape, Unclear, classify};
use ondeck_layout::history::{Run, recall};
use ondeck_layout::watched::WatchedKind;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

/// Files of a run, each with its size and when it was written last.
fn tally(files: impl IntoIterator<Item = (String, u64, u64)>) -> Tally {
    let mut census = Census::default();
    for (path, size, at) in files {
        census.add_written(path.as_bytes(), Bytes(size), Some(at));
    }
    census.tally()
}

/// How ranks and steps stand in the names of files.
fn name(style: u8, step: u64, rank: u64) -> String {
    match style % 5 {
        0 => format!("step-{step:04}/rank-{rank}.dat"),
        1 => format!("rank{rank:03}/out.{step}"),
        2 => format!("dump.{step}.{rank}.h5"),
        3 => format!("processor{rank}/{step}/U"),
        _ => format!("r{rank}_s{step}"),
    }
}

/// A run of at least 10 s.
fn shapes() -> impl Strategy<Value = RunShape> {
    (1u32..64, 1u32..32, 10_000u64..10_000_000).prop_map(|(nodes, each, lasted_ms)| RunShape {
        nodes,
        tasks: nodes * each,
        lasted_ms,
    })
}

fn is_or_unclear(found: FileUse, truth: FileUse) -> bool {
    found == truth || !found.is_known()
}

proptest! {
    #[test]
    fn files_of_each_process_are_seen_or_not_known(
        shape in shapes(), style: u8, steps in 1u64..9, size in MIB..(1 << 33), noise in 0u64..1000,
    ) {
        let ranks = u64::from(shape.tasks);
        let at = |step: u64| shape.lasted_ms * (step + 1) / steps;
        let files = (0..steps).flat_map(|step| (0..ranks).map(move |rank| (name(style, step, rank), size + rank, at(step) + noise)));
        let found = classify(&tally(files), shape);
        let truth = if shape.tasks == 1 { FileUse::OneProcess } else { FileUse::FilePerProcess };
        prop_assert!(is_or_unclear(found, truth), "{found:?}");
        // In one step it is clear, and in several unless their number might be that of the processes.
        if steps == 1 || shape.tasks == 1 {
            prop_assert_eq!(found, truth);
        }
    }

    #[test]
    fn a_file_of_all_is_seen_or_not_known(shape in shapes(), style: u8, steps in 1u64..40, each in 1u64..64) {
        // Of each process a few stripes, written again and again over the run.
        let size = u64::from(shape.tasks) * each * MIB;
        let files = (0..steps).map(|step| (name(style, step, 0), size, shape.lasted_ms * (step + 1) / steps));
        let found = classify(&tally(files), shape);
        let truth = if shape.tasks == 1 { FileUse::OneProcess } else { FileUse::OneFile };
        prop_assert!(is_or_unclear(found, truth), "{found:?}");
        if steps == 1 || steps >= 4 {
            prop_assert_eq!(found, truth);
        }
    }

    #[test]
    fn files_of_nodes_and_groups_are_seen_or_not_known(
        nodes in 2u32..32, each in 2u32..16, groups in 2u64..64, style: u8, lasted_ms in 10_000u64..1_000_000,
    ) {
        let shape = RunShape { nodes, tasks: nodes * each, lasted_ms };
        let written = |count: u64| {
            let files = (0..count).map(|file| (name(style, 0, file), 64 * MIB, lasted_ms + file % 7));
            classify(&tally(files), shape)
        };
        prop_assert_eq!(written(nodes.into()), FileUse::FilePerNode);
        let (found, tasks) = (written(groups), u64::from(shape.tasks));
        let truth = match groups {
            _ if groups.is_multiple_of(tasks) => FileUse::FilePerProcess,
            _ if groups == u64::from(nodes) => FileUse::FilePerNode,
            _ if groups < tasks && tasks.is_multiple_of(groups) => FileUse::Groups { files: groups },
            _ => FileUse::NotKnown(Unclear::Count),
        };
        prop_assert_eq!(found, truth);
    }

    #[test]
    fn no_files_are_too_strange_to_be_judged_and_what_is_kept_of_them_is_small(
        files in prop::collection::vec((any::<Vec<u8>>(), any::<u64>(), any::<Option<u64>>()), 0..200),
        nodes: u32, tasks: u32, lasted_ms: u64, ended in prop::collection::vec(any::<u64>(), 1..6), now: u64,
    ) {
        let mut census = Census::default();
        for (path, size, at) in &files {
            census.add_written(path, Bytes(*size), *at);
        }
        let (tally, shape) = (census.tally(), RunShape { nodes, tasks, lasted_ms });
        let _ = classify(&tally, shape);
        prop_assert!(tally.kinds.len() <= MOST_TOLD);
        let text = serde_json::to_string(&tally).unwrap();
        prop_assert_eq!(&serde_json::from_str::<Tally>(&text).unwrap(), &tally);
        // In whatever order the runs come.
        let mut runs: Vec<Run> = ended.iter().map(|ended_ms| Run { ended_ms: *ended_ms, shape, tally: tally.clone() }).collect();
        let told = recall(&runs, now);
        prop_assert!(told.is_some());
        runs.reverse();
        prop_assert_eq!(recall(&runs, now), told);
    }
}

#[test]
fn what_has_two_explanations_is_not_known() {
    let shape = RunShape { nodes: 4, tasks: 64, lasted_ms: 100_000 };
    let unclear = |files: Vec<(String, u64, u64)>| match classify(&tally(files), shape) {
        FileUse::NotKnown(why) => why,
        known => panic!("{known:?}"),
    };
    let several = |count: u64, size: u64, end: u64| -> Vec<_> {
        (0..count).map(|file| (format!("f{file}"), size, 100_000 + file * end / count)).collect()
    };
    assert_eq!(unclear(Vec::new()), Unclear::NoFiles);
    assert_eq!(unclear(several(3, 1000, 0)), Unclear::FewBytes);
    assert_eq!(unclear(vec![("x.dat".to_owned(), 2 * MIB, 1)]), Unclear::Small);
    assert_eq!(unclear(several(65, MIB, 0)), Unclear::Count);
    // A third of the run: neither together nor one after the other.
    assert_eq!(unclear(several(64, 100 * MIB, 36_000)), Unclear::Order);
    let mut mixed = several(64, MIB, 0);
    mixed.push(("all.h5".to_owned(), 64 * MIB, 0));
    assert_eq!(unclear(mixed), Unclear::Mixed);
    // Times that nobody has noted.
    let mut census = Census::default();
    (0..64).for_each(|file| census.add(format!("f{file}").as_bytes(), Bytes(MIB)));
    assert_eq!(classify(&census.tally(), shape), FileUse::NotKnown(Unclear::Order));
    let small = tally(several(500, 40_000, 0));
    assert_eq!(classify(&small, shape), FileUse::SmallFiles { files: 500 });
}

#[test]
fn logs_databases_and_archives_have_one_writer_however_large_they_are() {
    let shape = RunShape { nodes: 4, tasks: 64, lasted_ms: 100_000 };
    for name in
        ["run.log", "out/LOG.lammps", "case/thermo.csv", "events.db", "step-3.sqlite", "results-42.tar.zst"]
    {
        for size in [2 * MIB, 1 << 36] {
            assert_eq!(classify(&tally([(name.to_owned(), size, 1)]), shape), FileUse::OneWriter, "{name}");
        }
    }
    assert_eq!(classify(&tally([("OUTCAR".to_owned(), 1 << 36, 1)]), shape), FileUse::OneWriter);
    // What is printed is called so, and so are fields.
    let printed = classify(&tally([("pw.out".to_owned(), 1 << 36, 1)]), shape);
    assert_eq!(printed, FileUse::NotKnown(Unclear::Name));
    // As many as the processes are theirs.
    let logs = (0..64).map(|rank| (format!("rank-{rank}.log"), 2 * MIB, 5));
    assert_eq!(classify(&tally(logs), shape), FileUse::FilePerProcess);
}

#[test]
fn the_last_checkpoints_are_not_taken_for_files_of_processes() {
    let shape = RunShape { nodes: 4, tasks: 4, lasted_ms: 1_000_000 };
    // Of those of all processes the last few are left, a minute apart, of names that ranks have not.
    let kept = |first: u64, count: u64, each: u64| {
        (0..count)
            .map(move |number| (format!("ckpt-{:06}.h5", first + number * each), 64 * MIB, number * 60_000))
            .collect::<Vec<_>>()
    };
    for (count, each) in [(2, 10), (3, 7), (4, 50), (5, 1)] {
        assert_eq!(classify(&tally(kept(500, count, each)), shape), FileUse::OneFile);
    }
    // Hosts are called so, too; and of two places that are used by turns the names are those of ranks.
    let by_turns = (0..2).map(|slot| (format!("ckpt.{slot}"), 64 * MIB, slot * 60_000));
    for files in [kept(501, 4, 1), by_turns.collect()] {
        assert_eq!(classify(&tally(files), shape), FileUse::NotKnown(Unclear::Order));
    }
    // Of each process its own.
    let own = (0..4).flat_map(|rank| {
        (0..2).map(move |slot| (format!("rank-{rank}.ckpt-{slot}"), 8 * MIB, slot * 60_000 + rank * 500))
    });
    assert_eq!(classify(&tally(own), shape), FileUse::FilePerProcess);
}

#[test]
fn steps_are_told_from_files_by_when_those_of_one_number_were_written() {
    let shape = RunShape { nodes: 2, tasks: 4, lasted_ms: 100_000 };
    let files = |steps: u64, groups: u64, apart_ms: u64| {
        let file = move |step: u64, group: u64| {
            (format!("s{step}/io{group}"), 64 * MIB, step * apart_ms + group * 100)
        };
        classify(&tally((0..steps).flat_map(|step| (0..groups).map(move |group| file(step, group)))), shape)
    };
    assert_eq!(files(5, 2, 20_000), FileUse::FilePerNode);
    assert_eq!(files(5, 4, 20_000), FileUse::FilePerProcess);
    let wide = RunShape { tasks: 16, ..shape };
    let of_wide = (0..5)
        .flat_map(|step| (0..8).map(move |group| (format!("s{step}/io{group}"), 64 * MIB, step * 20_000)));
    assert_eq!(classify(&tally(of_wide), wide), FileUse::Groups { files: 8 });
    // Four steps of two files, or two files of each process, which took turns.
    assert_eq!(files(4, 2, 10_000), FileUse::NotKnown(Unclear::Order));
    // Nobody takes turns over all of a run.
    assert_eq!(files(4, 2, 20_000), FileUse::FilePerNode);
    // All at once: two files of each process.
    assert_eq!(files(4, 3, 10), FileUse::FilePerProcess);
    // A name that has its step twice.
    let twice = (0..5).flat_map(|step| {
        (0..4).map(move |rank| (format!("{step}/out.{step}.{rank}"), 64 * MIB, step * 20_000))
    });
    assert_eq!(classify(&tally(twice), shape), FileUse::FilePerProcess);
}

/// What four nodes of eight ranks have seen of a kind's files.
fn seen(one: u32, several: u32, writers: u32, at_once: u32) -> WatchedKind {
    let files = one + several;
    WatchedKind { nodes: 4, files, one, several, unclear: 0, writers, is_exact: true, at_once }
}

#[test]
fn what_was_seen_comes_before_names_numbers_and_times() {
    let shape = RunShape { nodes: 4, tasks: 8, lasted_ms: 60_000 };
    // Two files of one kind, a few seconds apart: of two ranks, or one in two places by turns.
    let places = tally([("ckpt.0".into(), 64 * MIB, 50_000), ("ckpt.1".into(), 64 * MIB, 53_000)]);
    let log = tally([("monitor.dat".into(), 64 * MIB, 60_000)]);
    let each = tally((0..8).map(|rank| (format!("rank-{rank}.dat"), 64 * MIB, 59_000 + rank)));
    let watched = |left: &Tally, watched: WatchedKind| {
        let mut left = left.clone();
        left.kinds[0].watched = Some(watched);
        classify(&left, shape)
    };
    assert!(!classify(&places, shape).is_known());
    assert_eq!(watched(&places, seen(0, 2, 8, 8)), FileUse::OneFile);
    assert_eq!(watched(&places, seen(2, 0, 0, 1)), FileUse::OneWriter);
    assert_eq!(watched(&places, seen(0, 2, 4, 8)), FileUse::Groups { files: 2 });
    // A number that is too small for all may be so because some were not seen.
    let lower = WatchedKind { is_exact: false, ..seen(0, 2, 4, 8) };
    assert_eq!(watched(&places, lower), FileUse::NotKnown(Unclear::Count));
    assert_eq!(classify(&log, shape), FileUse::OneFile);
    assert_eq!(watched(&log, seen(1, 0, 0, 1)), FileUse::OneWriter);
    // Names say that it is a log, and it was seen that all write it.
    let shared = tally([("all.log".into(), 64 * MIB, 60_000)]);
    assert_eq!(watched(&shared, seen(0, 1, 7, 7)), FileUse::OneFile);
    assert_eq!(watched(&each, seen(8, 0, 0, 8)), FileUse::FilePerProcess);
    // Written together, by one at a time: of short processes on a busy node nobody knows.
    assert_eq!(watched(&each, seen(8, 0, 0, 1)), FileUse::NotKnown(Unclear::Order));
    assert_eq!(watched(&each, seen(4, 4, 2, 8)), FileUse::NotKnown(Unclear::Mixed));
    // Who saw nothing says nothing; nor does the one node of several on which there is a rank.
    for nothing in [seen(0, 0, 0, 0), WatchedKind { nodes: 0, ..seen(8, 0, 0, 1) }] {
        assert_eq!(watched(&each, nothing), FileUse::FilePerProcess);
    }
    let few = RunShape { nodes: 8, ..shape };
    let mut one_node = each.clone();
    one_node.kinds[0].watched = Some(WatchedKind { nodes: 1, files: 8, ..seen(1, 0, 0, 1) });
    assert_eq!(classify(&one_node, few), FileUse::FilePerProcess);
    // Two files without numbers, each of one process: of the same one, or of two.
    let mut two = tally([("alpha.bin".into(), 64 * MIB, 59_000), ("beta.bin".into(), 64 * MIB, 59_000)]);
    for kind in &mut two.kinds {
        kind.watched = Some(seen(1, 0, 0, 1));
    }
    assert_eq!(classify(&two, shape), FileUse::NotKnown(Unclear::Order));
    // A job of one task may start processes itself.
    let one_task = RunShape { nodes: 1, tasks: 1, ..shape };
    let started = |watched: WatchedKind| {
        let mut left = log.clone();
        left.kinds[0].watched = Some(WatchedKind { nodes: 1, ..watched });
        classify(&left, one_task)
    };
    assert_eq!(started(seen(0, 1, 4, 4)), FileUse::OneFile);
    assert_eq!(started(seen(1, 0, 0, 1)), FileUse::OneProcess);
    assert_eq!(classify(&log, one_task), FileUse::OneProcess);
}
