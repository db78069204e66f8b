//! Options and outputs of Lustre's `lfs`.

#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;

use ondeck_core::Bytes;
use ondeck_layout::lfs::setstripe::{Entry, Pattern};
use ondeck_layout::lfs::{OptionError, Setstripe, getstripe, setstripe};
use ondeck_layout::{Component, Layout, LayoutError, Placement, StripeCount};
use proptest::prelude::*;

mod common;

/// What a real `lfs` took and refused: `accept` or `reject`, the command, and what it would have sent.
const VECTORS: &str = include_str!("lfs-vectors.tsv");

/// What `lfs setstripe` would send, as the vectors tell it: the header has 32 bytes, a component 48 and its stripes 32, or 48
/// with a pool.
fn sent(entries: &[Entry]) -> String {
    let size: usize =
        32 + entries.iter().map(|entry| 48 + if entry.pool.is_some() { 48 } else { 32 }).sum::<usize>();
    let mut told = format!("magic=0bd60bd0 size={size} entries={}:", entries.len());
    for entry in entries {
        let end = entry.end.map_or("EOF".to_owned(), |end| end.0.to_string());
        let flags = if entry.extension { "40" } else { "0" };
        let (magic, pool) = match &entry.pool {
            Some(pool) => ("0bd30bd0", format!(" p={pool}")),
            None => ("0bd10bd0", String::new()),
        };
        let pattern = match entry.pattern {
            Pattern::Raid0 => "1",
            Pattern::Overstriped => "201",
            Pattern::Metadata => "100",
        };
        let first = entry.first_target.map_or(-1, i64::from);
        let (start, size, count) = (entry.start.0, entry.stripe_size, entry.count);
        write!(
            told,
            " [{start},{end}) fl={flags} m={magic} pat={pattern} S={size} c={count} i={first}{pool}"
        )
        .unwrap();
    }
    told
}

#[test]
fn options_are_taken_refused_and_sent_as_a_real_lfs_does() {
    let mut taken = 0;
    let mut refused = 0;
    for line in VECTORS.lines() {
        let mut fields = line.split('\t');
        let (verdict, command) = (fields.next().unwrap(), fields.next().unwrap());
        let options = command.strip_prefix("lfs setstripe").unwrap().strip_suffix("DIR").unwrap();
        match (verdict, Setstripe::parse(options)) {
            ("accept", Ok(setstripe)) => {
                assert_eq!(sent(setstripe.entries()), fields.next().unwrap(), "{command}");
                taken += 1;
            }
            ("reject", Err(_)) => refused += 1,
            (_, result) => panic!("{verdict}: {command}: {result:?}"),
        }
    }
    assert_eq!((taken, refused), (28, 21), "all vectors were read");
}

#[test]
fn what_is_not_said_is_one_stripe_of_a_mebibyte_or_what_the_component_before_has() {
    let layout = |options: &str| Setstripe::parse(options).unwrap().layout().unwrap();
    let words = |options: &str| setstripe::options(&layout(options)).join(" ");
    assert_eq!(words("-E 16M -c 1 -E -1 -c 4"), "-E 16M -c 1 -S 1M -E -1 -c 4 -S 1M");
    assert_eq!(words("-S 4M -E 16M -E EOF -c 4 -p flash"), "-E 16M -c 1 -S 4M -E -1 -c 4 -S 4M -p flash");
    assert_eq!(words("-E 64K -L mdt -E -1 -c 2"), "-E 64K -L mdt -E -1 -c 2 -S 1M");
    // A stripe of 1 MiB would not end with it.
    assert_eq!(words("-E 192K -c 1 -E -1 -c 2"), "-E 192K -c 1 -S 64K -E -1 -c 2 -S 1M");
    assert_eq!(words("--stripe-count=8 --stripe-size 4m"), "-c 8 -S 4M");
    assert_eq!(words("-c-1"), "-c -1 -S 1M");
    assert_eq!(words("-E -1 -C -2 -S 16M"), "-C -2 -S 16M");
}

#[test]
fn a_pool_of_another_filesystem_may_have_a_longer_name() {
    let options = "-c 2 -S 1M -p cephfs.scratch.data";
    assert_eq!(
        Setstripe::parse(options).unwrap_err().to_string(),
        "pool cephfs.scratch.data: the name of a pool of Lustre has at most 15 characters"
    );
    let layout = Setstripe::parse_of_any(options).unwrap().layout().unwrap();
    assert_eq!(setstripe::options(&layout).join(" "), options);
}

#[test]
fn what_a_layout_does_not_have_is_told() {
    let refused = |options: &str| {
        Setstripe::parse(options).and_then(|setstripe| setstripe.layout()).unwrap_err().to_string()
    };
    assert_eq!(
        refused("-E 1G -z 64M -c 1 -E -1 -c 4"),
        "component 2: components that extend themselves (-z) can't be set here; leave -z out"
    );
    assert_eq!(
        refused("-E 16M -c 1 -E 1G -c 4"),
        "the last component ends at 1 GiB, and what is written behind it would fail; end it with `-E -1`"
    );
    assert_eq!(
        refused("-E 4G -c 4 -E 1G -c 1"),
        "component 2 ends at 1 GiB, and must end behind 4 GiB, where it begins"
    );
    assert_eq!(
        refused("-E -1 -c 4 -E 1G -c 1"),
        "component 2 begins at the end of the file: only the last may end there (`-E -1`)"
    );
    assert_eq!(refused("-c 0"), "0 stripes: there must be 1 to 2000, or -1 for one on every target");
    assert_eq!(
        refused("-i 3 -c 1"),
        "component 1: a first target (-i) would put all files of the directory on the same disks; leave -i out"
    );
    assert_eq!(refused("-c"), "`-c` needs a value");
    assert_eq!(refused(""), "there are no options");
    assert_eq!(
        refused("-c 4 /scratch"),
        "`/scratch` is not understood: a layout has -E, -c, -C, -S, -p, -L and -i"
    );
    assert_eq!(refused("-c x"), "`-c x`: it is not a number of stripes, like 4, or -1 for all");
    assert_eq!(refused("-S +1M"), "`-S +1M`: it is not a size, like 64K, 16M or 4G");
    assert_eq!(
        refused("-E 16M -C 8 -E -1"),
        "component 2 needs -c or -C: what it takes over from -C before it depends on the version"
    );
    assert_eq!(
        refused("-c 4 -p $(id)"),
        "`$(id)` is no name of a pool: it has 1 to 64 letters, digits, `_`, `-` or `.`"
    );
}

/// What `lfs getstripe --yaml -d` prints of a directory with this layout (its source, 2.15).
fn shown(layout: &Layout) -> String {
    let mut text = String::new();
    let components = layout.components();
    let indent = if components.len() == 1 { "" } else { "      " };
    if components.len() > 1 {
        write!(
            text,
            "  lcm_layout_gen:    0\n  lcm_mirror_count:  1\n  lcm_entry_count:   {}\n",
            components.len()
        )
        .unwrap();
    }
    let mut start = 0;
    for (index, component) in components.iter().enumerate() {
        let end = component.end.map_or("EOF".to_owned(), |end| end.0.to_string());
        if components.len() > 1 {
            write!(
                text,
                "  component{index}:\n    lcme_id:             N/A\n    lcme_mirror_id:      N/A\n    \
                 lcme_flags:          0\n    lcme_extent.e_start: {start}\n    lcme_extent.e_end:   {end}\n    \
                 sub_layout:\n"
            )
            .unwrap();
        }
        start = component.end.unwrap_or_default().0;
        let (count, size, pattern, pool) = match &component.placement {
            Placement::Metadata => (0, start, "mdt", None),
            Placement::Striped { count, stripe_size, pool } => {
                let (count, pattern) = match count {
                    StripeCount::Of(count) => (i64::from(*count), "raid0"),
                    StripeCount::All => (-1, "raid0"),
                    StripeCount::Overstriped(count) => ((*count).into(), "raid0,overstriped"),
                    StripeCount::PerTarget(count) => (-i64::from(*count), "raid0,overstriped"),
                };
                (count, stripe_size.0, pattern, pool.as_ref())
            }
        };
        write!(
            text,
            "{indent}stripe_count:  {count}\n{indent}stripe_size:   {size}\n{indent}pattern:       {pattern}\n\
             {indent}stripe_offset: -1\n"
        )
        .unwrap();
        if let Some(pool) = pool {
            writeln!(text, "{indent}pool:          {pool}").unwrap();
        }
        text.push('\n');
    }
    text
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn every_layout_is_taken_by_lfs_and_read_back(layout in common::layouts()) {
        let options = setstripe::options(&layout).join(" ");
        let taken = Setstripe::parse(&options).unwrap();
        prop_assert_eq!(taken.entries().len(), layout.components().len());
        prop_assert_eq!(&taken.layout().unwrap(), &layout);
        // It says all there is to say.
        for entry in taken.entries() {
            prop_assert!(entry.pattern == Pattern::Metadata || entry.count != 0 && entry.stripe_size != 0);
        }
        prop_assert_eq!(taken.entries().last().unwrap().end, None);
        prop_assert_eq!(&getstripe::parse(&shown(&layout)).unwrap(), &layout);
    }

    #[test]
    fn no_text_is_a_panic(text in "(-[EcCSpLzi]|-1|[0-9]{1,20}[KMGTP]?|mdt|EOF| |\n|:|lcme_extent.e_(start|end)|(lmm_)?stripe_(count|size)){0,24}") {
        if let Ok(setstripe) = Setstripe::parse(&text) {
            let _ = setstripe.layout();
        }
        let _ = getstripe::parse(&text);
    }
}

#[test]
fn the_published_defaults_of_four_sites_survive() {
    // Levante (DKRZ), Perlmutter (NERSC), Orion (OLCF), CLEPS (Inria).
    for options in [
        "-E 1G -c 1 -S 1M -E 4G -c 4 -S 1M -E -1 -c 16 -S 1M",
        "-E 1G -c 1 -S 1M -E 10G -c 8 -S 1M -E 100G -c 24 -S 1M -E -1 -c 72 -S 1M",
        "-E 256K -L mdt -E 8M -c 1 -S 1M -p performance -E 128G -c 1 -S 1M -p capacity -E -1 -c 8 -S 1M -p capacity",
        "-E 512M -c 1 -S 1M -E 40G -c 4 -S 4M -E -1 -c -1 -S 64M",
    ] {
        let layout = Setstripe::parse(options).unwrap().layout().unwrap();
        assert_eq!(setstripe::options(&layout).join(" "), options);
        assert_eq!(getstripe::parse(&shown(&layout)).unwrap(), layout);
    }
}

#[test]
fn what_lfs_shows_of_files_and_directories_is_read() {
    // As the report prints it of Levante, and what version 2.15 prints of a file.
    let levante = "/scratch/k/k203168\n  lcm_layout_gen:      0\n  lcm_mirror_count:   1\n  lcm_entry_count:    3\n    \
        lcme_id:            N/A\n    lcme_mirror_id:    N/A\n    lcme_flags:         0\n    \
        lcme_extent.e_start: 0\n    lcme_extent.e_end:   1073741824\n      stripe_count:      1\n      \
        stripe_size:  1048576\n      pattern:      raid0\n      stripe_offset: -1\n\n    lcme_id:            N/A\n    \
        lcme_extent.e_start: 1073741824\n    lcme_extent.e_end:   EOF\n      stripe_count:      4\n      \
        stripe_size:  1048576\n      pattern:      raid0\n      stripe_offset: -1\n";
    let layout = getstripe::parse(levante).unwrap();
    assert_eq!(setstripe::options(&layout).join(" "), "-E 1G -c 1 -S 1M -E -1 -c 4 -S 1M");
    let file = "results.nc\nlmm_stripe_count:  2\nlmm_stripe_size:   4194304\nlmm_pattern:       raid0\n\
        lmm_layout_gen:    0\nlmm_stripe_offset: 3\nlmm_pool:          flash\nlmm_objects:\n      - l_ost_idx: 3\n        \
        l_fid:     0x100030000:0x2:0x0\n      - l_ost_idx: 1\n        l_fid:     0x100010000:0x2:0x0\n";
    let layout = getstripe::parse(file).unwrap();
    assert_eq!(setstripe::options(&layout).join(" "), "-c 2 -S 4M -p flash");
    // Of a directory that has no layout of its own.
    let none = "stripe_count:  1\nstripe_size:   1048576\npattern:       0\nstripe_offset: -1\n";
    assert_eq!(setstripe::options(&getstripe::parse(none).unwrap()).join(" "), "-c 1 -S 1M");

    let refused = |text: &str| getstripe::parse(text).unwrap_err().to_string();
    assert_eq!(refused("  lcm_mirror_count:  2\n"), "the directory has mirrored files");
    assert_eq!(
        refused("lfs getstripe: cannot open '/x': No such file or directory"),
        "lfs getstripe shows no layout, only `lfs getstripe: cannot open '/x': No such file or directory`"
    );
    assert_eq!(refused(""), "lfs getstripe shows no layout, only ``");
    assert_eq!(
        refused("stripe_count: many"),
        "lfs getstripe shows `stripe_count: many`, and a number was expected"
    );
}

#[test]
fn a_layout_keeps_the_limits() {
    let striped =
        |count, stripe_size| Placement::Striped { count, stripe_size: Bytes(stripe_size), pool: None };
    let component = |end: Option<u64>, placement| Component { end: end.map(Bytes), placement };
    let one = striped(StripeCount::Of(1), 1 << 20);
    assert_eq!(Layout::new(vec![]), Err(LayoutError::Empty));
    assert!(Layout::new(vec![component(None, one.clone())]).is_ok());
    assert_eq!(Layout::new(vec![component(None, Placement::Metadata)]), Err(LayoutError::MetadataTooLarge));
    assert_eq!(
        Layout::new(vec![component(Some(1 << 20), one.clone()), component(None, Placement::Metadata)]),
        Err(LayoutError::MetadataNotFirst { component: 2 })
    );
    for size in [0, 1000, 4 << 30] {
        assert!(Layout::new(vec![component(None, striped(StripeCount::All, size))]).is_err(), "{size}");
    }
    assert!(matches!(
        Setstripe::parse("-E 16M -S 3M -E -1 -c 2"),
        Err(OptionError::Layout(LayoutError::EndsWithinStripe { component: 1, .. }))
    ));
}
