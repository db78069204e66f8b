//! Layouts of CephFS and BeeGFS.

#![allow(clippy::unwrap_used)]

use ondeck_core::Bytes;
use ondeck_layout::beegfs::{StripePattern, Version};
use ondeck_layout::ceph::{DirLayout, LARGEST_OBJECT};
use ondeck_layout::lfs::{Setstripe, setstripe};
use ondeck_layout::{Layout, Placement};
use proptest::prelude::*;

mod common;

fn layout(options: &str) -> Layout {
    Setstripe::parse(options).unwrap().layout().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn every_layout_has_one_of_cephfs_that_is_read_back_unless_no_osd_takes_it(layout in common::layouts(), osds in 1u32..=2000) {
        let Placement::Striped { stripe_size, .. } = &layout.last().placement else { panic!() };
        let ceph = DirLayout::of(&layout, osds);
        // What no OSD takes, writing would fail with.
        prop_assert_eq!(ceph.is_err(), *stripe_size > LARGEST_OBJECT);
        let Ok(ceph) = ceph else { return Ok(()) };
        prop_assert_eq!(&ceph.to_string().parse::<DirLayout>().unwrap(), &ceph);
        // The MDS refuses anything else.
        prop_assert!(ceph.stripe_count >= 1);
        prop_assert!(ceph.stripe_unit.0.is_multiple_of(64 << 10));
        prop_assert!(ceph.object_size.0.is_multiple_of(ceph.stripe_unit.0));
        let Placement::Striped { count, stripe_size, pool } = &layout.last().placement else { panic!() };
        let back = ceph.layout();
        if count.among(osds) <= 2000 {
            let back = back.unwrap();
            let Placement::Striped { count: count_back, stripe_size: size_back, pool: pool_back } = &back.last().placement
            else { panic!() };
            prop_assert_eq!((count_back.among(osds), size_back, pool_back), (count.among(osds).min(osds), stripe_size, pool));
        }
    }

    #[test]
    fn every_layout_has_one_of_beegfs_that_is_read_back(layout in common::layouts(), targets in 1u32..=2000) {
        let pattern = StripePattern::of(&layout, targets).unwrap();
        prop_assert!((1..=targets).contains(&pattern.targets));
        prop_assert!(pattern.chunk_size.0.is_power_of_two() && pattern.chunk_size.0 >= 64 << 10);
        let pool = pattern.pool.as_ref().map_or(String::new(), |pool| format!("+ Storage Pool: {pool}  (some)\n"));
        let shown = format!(
            "Entry type: directory\nEntryID: root\nStripe pattern details:\n+ Type: RAID0\n+ Chunksize: {}K\n+ Number of \
             storage targets: desired: {}\n{pool}Inlined inode: no\n",
            pattern.chunk_size.0 >> 10, pattern.targets,
        );
        prop_assert_eq!(&StripePattern::parse(&shown).unwrap(), &pattern);
        prop_assert_eq!(pattern.arguments(Version::Eight).unwrap().len(), 4 + usize::from(pattern.pool.is_some()));
        let back = pattern.layout().unwrap();
        prop_assert_eq!(&StripePattern::of(&back, targets).unwrap(), &pattern);
    }
}

#[test]
fn cephfs_gets_the_component_for_large_files() {
    let ceph = DirLayout::of(&layout("-E 16M -c 1 -E -1 -c 8 -S 2M"), 100).unwrap();
    assert_eq!(ceph.to_string(), "stripe_unit=2097152 stripe_count=8 object_size=4194304");
    let everywhere = DirLayout::of(&layout("-c -1 -S 3M"), 12).unwrap();
    assert_eq!(everywhere.to_string(), "stripe_unit=3145728 stripe_count=12 object_size=6291456");
    assert_eq!(setstripe::options(&ceph.layout().unwrap()).join(" "), "-c 8 -S 2M");
    let with_namespace = "stripe_unit=4194304 stripe_count=1 object_size=4194304 pool=data pool_namespace=ns";
    assert_eq!(with_namespace.parse::<DirLayout>().unwrap().pool.as_deref(), Some("data"));
    // As Ceph itself names the pool of a filesystem.
    let named = "stripe_unit=4194304 stripe_count=1 object_size=4194304 pool=cephfs.scratch.data";
    assert!(named.parse::<DirLayout>().unwrap().layout().is_ok());
    assert_eq!(DirLayout::of(&layout("-c 1 -S 128M"), 8).unwrap().object_size, LARGEST_OBJECT);
    assert_eq!(
        DirLayout::of(&layout("-c 1 -S 192M"), 8).unwrap_err().to_string(),
        "stripes of 192 MiB: Ceph writes no objects of more than 128 MiB (osd_max_object_size)"
    );
    let refused = |text: &str| text.parse::<DirLayout>().unwrap_err().to_string();
    assert_eq!(
        refused("stripe_unit=4194304 stripe_count=1"),
        "ceph.dir.layout is `stripe_unit=4194304 stripe_count=1`, which is not understood: there is no object_size"
    );
    assert_eq!(
        refused("stripe_unit=65537 stripe_count=1 object_size=65537"),
        "objects of 65537 bytes in units of 65537: both must be multiples of 64 KiB, and the first of the second"
    );
    assert!(refused("stripe_unit=65536 stripe_count=0 object_size=65536").contains("0 stripes"));
    assert!(refused("").contains("there is no stripe_unit"));
}

#[test]
fn both_tools_of_beegfs_are_spoken_to() {
    let pattern = StripePattern::of(&layout("-c 4 -S 3M -p 2"), 8).unwrap();
    assert_eq!(
        pattern.arguments(Version::Seven).unwrap().join(" "),
        "--setpattern --numtargets=4 --chunksize=2097152 --storagepoolid=2"
    );
    assert_eq!(
        pattern.arguments(Version::Eight).unwrap().join(" "),
        "entry set --num-targets=4 --chunk-size=2097152 --pool=2"
    );
    let named = StripePattern::of(&layout("-c -1 -p flash"), 8).unwrap();
    assert_eq!(named.targets, 8);
    assert_eq!(
        named.arguments(Version::Seven).unwrap_err().to_string(),
        "pool flash: beegfs-ctl takes the number of a pool; `beegfs-ctl --liststoragepools` shows it"
    );
    // As the documentation of both versions shows a file and a directory.
    let file = "Entry type: file\nEntryID: 0-5D285750-1\nStripe pattern details:\n+ Type: RAID0\n+ Chunksize: 512k\n\
        + Number of storage targets: desired: 2; actual: 2\n+ Storage targets:\n  + 1 @ node1 [ID: 1]\n";
    assert_eq!(
        StripePattern::parse(file).unwrap(),
        StripePattern { targets: 2, chunk_size: Bytes(512 << 10), pool: None }
    );
    let mirrored = file.replace("RAID0", "Buddy Mirror");
    assert_eq!(
        StripePattern::parse(&mirrored).unwrap_err().to_string(),
        "the directory is striped as Buddy Mirror, and only RAID0 can be set here"
    );
    assert_eq!(
        StripePattern::parse("Error: no such entry").unwrap_err().to_string(),
        "the tool of BeeGFS shows no kind of striping, only `Error: no such entry`"
    );
}
