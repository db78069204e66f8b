//! The layouts that follow from a job, and the bandwidth that is expected of them.

#![allow(clippy::unwrap_used)]

use ondeck_core::Bytes;
use ondeck_layout::lfs::setstripe;
use ondeck_layout::{Advice, Load, Pattern, Place, Placement, Rules, Site, StripeCount, Workload};
use proptest::prelude::*;

/// The report's cluster: five storage servers with a disk each, all behind Gigabit Ethernet, of which 110 MB/s arrive (table 3.2,
/// first row).
const REPORT: &str = r#"
[nodes]
link = "110MB/s"
[[filesystem]]
path = "/mnt/lustre"
kind = "lustre"
targets = 5
servers = 5
target = "250MB/s"
server = "110MB/s"
"#;

/// A large one: 120 OSTs on 30 servers.
const LARGE: &str = r#"
[nodes]
link = "12GB/s"
process = "1GB/s"
[[filesystem]]
path = "/scratch"
kind = "lustre"
targets = 120
servers = 30
target = "4GB/s"
server = "12GB/s"
"#;

fn workload(nodes: u32, tasks: u32, pattern: Pattern) -> Workload {
    Workload { nodes, tasks: Some(tasks), pattern, size: None, files: None, write_size: None, median: None }
}

fn advise_at(rules: &Rules, site: &str, load: Load, workload: &Workload) -> Advice {
    let site = Site::parse(site).unwrap();
    let place = Place { filesystem: &site.filesystems[0], nodes: &site.nodes, load };
    rules.advise(place, workload).unwrap()
}

fn advise(rules: &Rules, site: &str, workload: &Workload) -> Advice {
    advise_at(rules, site, Load::default(), workload)
}

fn options(advice: &Advice) -> String {
    setstripe::options(&advice.layout).join(" ")
}

fn stripes(advice: &Advice) -> u32 {
    let Placement::Striped { count, .. } = advice.layout.last().placement else { panic!() };
    count.among(u32::MAX)
}

#[test]
fn the_report_s_choices_are_made_again() {
    // Table 3.2: nodes, tasks, stripes of one shared file. Files of each process: 1.
    let rules = Rules::thesis();
    for (nodes, tasks, shared) in [(1, 1, 1), (1, 24, 1), (4, 4, 4), (4, 96, 4), (2, 48, 2), (3, 72, 3)] {
        let advice = advise(&rules, REPORT, &workload(nodes, tasks, Pattern::Shared));
        assert_eq!(stripes(&advice), shared, "{nodes} nodes, shared");
        let advice = advise(&rules, REPORT, &workload(nodes, tasks, Pattern::FilePerProcess));
        assert_eq!(stripes(&advice), 1, "{nodes} nodes, a file each");
    }
    // Listing 3.2, test 9.
    let advice = advise(&rules, REPORT, &workload(2, 48, Pattern::Shared));
    assert_eq!(options(&advice), "-E 16M -c 1 -S 1M -E -1 -c 2 -S 1M");
    // The worked examples of section 2.3.3: 1 and 10 Gbit/s against targets of 2 Gbit/s.
    for (link, stripes_of_one) in [("125MB/s", 1), ("1250MB/s", 5)] {
        let site = REPORT.replacen("110MB/s", link, 1);
        let advice = advise(&rules, &site, &workload(1, 1, Pattern::Single));
        assert_eq!(stripes(&advice), stripes_of_one, "{link}");
    }
    // Never more than there are servers.
    assert_eq!(stripes(&advise(&rules, REPORT, &workload(40, 40, Pattern::Shared))), 5);
}

#[test]
fn the_report_s_bandwidths_are_expected_within_a_fifth() {
    // Nodes, tasks, stripes; MB/s read and written with a file each, and with one file.
    type Row = (u32, u32, u16, [u32; 2], [u32; 2]);
    const TABLES: [Row; 14] = [
        // 3.1
        (1, 1, 1, [112, 111], [112, 111]),
        (1, 1, 4, [112, 111], [112, 111]),
        (1, 24, 1, [112, 111], [109, 111]),
        (1, 24, 4, [112, 111], [112, 111]),
        (4, 4, 1, [439, 432], [105, 110]),
        (4, 4, 4, [418, 433], [298, 268]),
        (4, 96, 4, [443, 440], [441, 430]),
        (4, 96, 5, [443, 443], [443, 437]),
        // 3.2
        (1, 1, 1, [111, 110], [111, 109]),
        (1, 24, 1, [112, 111], [102, 110]),
        (4, 4, 4, [438, 425], [294, 252]),
        (4, 96, 4, [443, 439], [441, 426]),
        (2, 48, 2, [224, 221], [218, 218]),
        (3, 72, 3, [331, 328], [322, 325]),
    ];
    let site = Site::parse(REPORT).unwrap();
    let place = Place { filesystem: &site.filesystems[0], nodes: &site.nodes, load: Load::default() };
    for (row, (nodes, tasks, stripes, each, one)) in TABLES.into_iter().enumerate() {
        for (pattern, measured) in [(Pattern::FilePerProcess, each), (Pattern::Shared, one)] {
            let layout =
                ondeck_layout::Layout::of_one(StripeCount::Of(stripes), Bytes(1 << 20), None).unwrap();
            let expected = Rules::thesis().bandwidth(place, &workload(nodes, tasks, pattern), &layout);
            for measured in measured {
                let ratio = expected.0.0 as f64 / 1e6 / f64::from(measured);
                assert!(
                    (0.8..=1.2).contains(&ratio),
                    "row {row}, {pattern}: {expected}, measured {measured} MB/s"
                );
            }
        }
    }
}

#[test]
fn tuned_rules_fill_the_nodes_and_no_more() {
    let rules = Rules::tuned();
    // A target's share is 3 GB/s, as a quarter of its server; a node of 32 processes has 12 GB/s: 4 stripes.
    let shared = advise(&rules, LARGE, &workload(8, 256, Pattern::Shared));
    assert_eq!(options(&shared), "-E 16M -c 1 -S 1M -E -1 -c 32 -S 1M");
    // 8 nodes of 12 GB/s, and 32 stripes of 3 GB/s that hardly ever wait for their 256 writers.
    assert!((95_900_000_000..=96_000_000_000).contains(&shared.bandwidth.0.0), "{}", shared.bandwidth);
    // Two processes on a node have 2 GB/s: 1 stripe each.
    assert_eq!(stripes(&advise(&rules, LARGE, &workload(8, 16, Pattern::Shared))), 8);
    // No more than there are; and so many that each has as many writers.
    let told = advise(&rules, LARGE, &workload(63, 2016, Pattern::Shared));
    assert_eq!(stripes(&told), 112);
    let reasons: Vec<String> = told.reasons.iter().map(ToString::to_string).collect();
    assert_eq!(
        reasons,
        [
            "a target carries 2.8 GiB/s",
            "a node reads or writes 11.2 GiB/s: 4 stripes",
            "63 nodes use one file, 4 stripes each",
            "there are 120 targets",
            "112 instead of 120 stripes: each has as many of the 2016 writers",
            "up to 16 MiB one target, for small files",
        ]
    );
    // 96 writers on 64 stripes would wait for those stripes that have two.
    let fast = LARGE.replace("process = \"1GB/s\"\n", "");
    assert_eq!(stripes(&advise(&rules, &fast, &workload(16, 96, Pattern::Shared))), 48);
    // Of 2,048 writers, each of 120 stripes has 17 or 18: 64 with 32 each would be half as fast.
    assert_eq!(stripes(&advise(&rules, LARGE, &workload(64, 2048, Pattern::Shared))), 120);
    // Eight files of 64 nodes: each is used by 8.
    let mut grouped = workload(64, 2048, Pattern::Shared);
    grouped.files = Some(8);
    let told = advise(&rules, LARGE, &grouped);
    assert_eq!(stripes(&told), 32);
    assert!(told.bandwidth.0 > Bytes(350_000_000_000), "all 120 targets: {}", told.bandwidth);
    // A prime number of writers has no factor that would be worth it.
    assert_eq!(stripes(&advise(&rules, LARGE, &workload(63, 2017, Pattern::Shared))), 120);
    // More nodes than targets: several stripes on each.
    let over = advise(&rules, LARGE, &workload(300, 9600, Pattern::Shared));
    assert_eq!(options(&over), "-E 16M -c 1 -S 1M -E -1 -C -3 -S 1M");
    // The site's cap.
    let capped = LARGE.to_owned() + "most_stripes = 16\n";
    assert_eq!(stripes(&advise(&rules, &capped, &workload(300, 9600, Pattern::Shared))), 16);
}

#[test]
fn files_of_their_own_are_striped_only_if_targets_would_be_idle() {
    let rules = Rules::tuned();
    assert_eq!(options(&advise(&rules, LARGE, &workload(8, 256, Pattern::FilePerProcess))), "-c 1 -S 1M");
    // One process has a part of the target only.
    assert_eq!(options(&advise(&rules, LARGE, &workload(8, 8, Pattern::FilePerProcess))), "-c 1 -S 1M");
    let fast = LARGE.replace("process = \"1GB/s\"\n", "");
    // Two files for 120 targets: as many as a node fills.
    assert_eq!(stripes(&advise(&rules, &fast, &workload(2, 2, Pattern::FilePerProcess))), 4);
    assert_eq!(stripes(&advise(&rules, &fast, &workload(100, 100, Pattern::FilePerProcess))), 1);
}

#[test]
fn a_file_of_unknown_writers_is_striped_by_its_size_or_as_it_grows() {
    let rules = Rules::tuned();
    let mut job = workload(4, 64, Pattern::Unknown);
    for (size, expected) in [(1 << 20, 1), (1 << 30, 2), (4 << 30, 3), (100 << 30, 11), (1 << 50, 120)] {
        job.size = Some(Bytes(size));
        assert_eq!(stripes(&advise(&rules, LARGE, &job)), expected, "{size}");
    }
    job.size = None;
    assert_eq!(
        options(&advise(&rules, LARGE, &job)),
        "-E 1G -c 1 -S 1M -E 16G -c 4 -S 1M -E 256G -c 16 -S 1M -E -1 -c 33 -S 1M"
    );
    assert_eq!(options(&advise(&rules, REPORT, &job)), "-E 1G -c 1 -S 1M -E 16G -c 4 -S 1M -E -1 -c 5 -S 1M");
    // The report's rules know no sizes.
    assert_eq!(options(&advise(&Rules::thesis(), REPORT, &job)), "-c 1 -S 1M");
}

#[test]
fn the_median_file_and_the_size_of_writes_decide_about_the_beginning_and_the_stripes() {
    let rules = Rules::tuned();
    let mut job = workload(8, 256, Pattern::Shared);
    let with = |job: &Workload| options(&advise(&rules, LARGE, job));
    job.median = Some(Bytes(40_000));
    assert_eq!(with(&job), "-E 64K -L mdt -E -1 -c 32 -S 1M");
    job.median = Some(Bytes(65_537));
    assert_eq!(with(&job), "-E 128K -c 1 -S 128K -E -1 -c 32 -S 1M");
    job.median = Some(Bytes(100 << 20));
    assert_eq!(with(&job), "-E 100M -c 1 -S 1M -E -1 -c 32 -S 1M");
    job.median = None;
    for (write, stripe) in [
        (1 << 20, "1M"),
        (3 << 20, "3M"),
        (8 << 20, "4M"),
        (640 << 10, "1280K"),
        (1000, "1M"),
        (6 << 20, "2M"),
    ] {
        job.write_size = Some(Bytes(write));
        assert!(with(&job).ends_with(&format!("-E -1 -c 32 -S {stripe}")), "{write}: {}", with(&job));
    }
    // A file of eight stripes fills no more than eight targets.
    job.write_size = None;
    job.size = Some(Bytes(8 << 20));
    assert_eq!(with(&job), "-E 16M -c 1 -S 1M -E -1 -c 8 -S 1M");
}

#[test]
fn busy_targets_count_less_for_tuned_rules_only() {
    let half = Load::new(0.5);
    let job = workload(2, 64, Pattern::Shared);
    assert_eq!(stripes(&advise_at(&Rules::tuned(), LARGE, half, &job)), 16);
    assert_eq!(stripes(&advise(&Rules::tuned(), LARGE, &job)), 8);
    assert_eq!(
        stripes(&advise_at(&Rules::thesis(), LARGE, half, &job)),
        stripes(&advise(&Rules::thesis(), LARGE, &job))
    );
    assert_eq!(Load::new(f64::NAN), Load::default());
}

fn patterns() -> impl Strategy<Value = Pattern> {
    prop_oneof![
        Just(Pattern::Shared),
        Just(Pattern::FilePerProcess),
        Just(Pattern::Single),
        Just(Pattern::Unknown)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn every_job_gets_a_layout_that_lfs_takes(
        nodes in 0u32..100_000,
        tasks in proptest::option::of(0u32..5_000_000),
        pattern in patterns(),
        sizes in proptest::collection::vec(proptest::option::of(0u64..1 << 50), 3),
        files in proptest::option::of(0u64..1 << 40),
        load in -1.0f64..2.0,
        targets in 1u32..3000,
        servers in 1u32..3000,
        rates in proptest::collection::vec(1u64..1 << 42, 4),
        most in proptest::option::of(1u32..3000),
    ) {
        let servers = servers.min(targets);
        let most = most.map_or(String::new(), |most| format!("most_stripes = {most}\n"));
        let site = format!(
            "[nodes]\nlink = \"{}\"\nprocess = \"{}\"\n[[filesystem]]\npath = \"/s\"\nkind = \"lustre\"\n\
             targets = {targets}\nservers = {servers}\ntarget = \"{}\"\nserver = \"{}\"\n{most}",
            rates[0], rates[1], rates[2], rates[3]
        );
        let workload = Workload {
            nodes, tasks, pattern, size: sizes[0].map(Bytes), files,
            write_size: sizes[1].map(Bytes), median: sizes[2].map(Bytes),
        };
        for rules in [Rules::thesis(), Rules::tuned()] {
            let advice = advise_at(&rules, &site, Load::new(load), &workload);
            let options = options(&advice);
            let taken = ondeck_layout::lfs::Setstripe::parse(&options).unwrap();
            prop_assert_eq!(taken.layout().unwrap(), advice.layout.clone());
            let Placement::Striped { count, .. } = advice.layout.last().placement else { panic!() };
            prop_assert!(count.among(targets) <= targets.saturating_mul(rules.overstripe.into()));
            prop_assert!(!advice.reasons.is_empty());
        }
    }
}
