//! The goals that were stated before anything was measured, and whether they are met.
//!
//! Medians are compared with medians and best runs with best runs. A goal is judged without and
//! with checksums where both are run: peers take none, but the default of `ondeck stage` does.

use crate::copies::{Direction, Results, Until};
use crate::data::Case;
use crate::run_overhead::Overhead;
use crate::tools::{Checksum, Tool};
use ondeck_bench::size::{MIB, show};

/// Times the fastest peer, in every case.
const WORST_RATIO: f64 = 1.05;
/// Times as fast as `rsync -a`, into RAM.
const AGAINST_RSYNC: [(Case, f64); 2] = [(Case::Medium, 4.0), (Case::Small, 2.5)];
/// The slowest run over the median, of files of 1 MiB into RAM and where memory is in small pieces.
const STEADY: f64 = 2.0;
/// Share of the memcpy rate for one large file into RAM.
const OF_MEMCPY: [(Checksum, f64); 2] = [(Checksum::None, 0.55), (Checksum::Xxh3, 0.45)];
/// Time with the default checksum over time without.
const CHECKSUM_RATIO: f64 = 1.25;
/// Of `ondeck stage` for the tree.
const PEAK_MEMORY: u64 = 64 * MIB;
/// Of `ondeck run` with nothing to stage.
const RUN_OVERHEAD_MS: f64 = 5.0;

#[derive(Debug, PartialEq)]
pub struct Judged {
    pub goal: String,
    pub case: String,
    pub figure: String,
    pub verdict: String,
}

/// One figure of a goal: what it is of, how it reads, and whether it is good enough.
struct Figure {
    of: &'static str,
    shown: String,
    met: bool,
}

fn judge(goal: &str, case: String, figures: Vec<Option<Figure>>) -> Judged {
    let figures: Vec<Figure> = figures.into_iter().flatten().collect();
    let missed: Vec<&str> = figures.iter().filter(|f| !f.met).map(|f| f.of).collect();
    let verdict = if figures.is_empty() {
        "not measured".to_owned()
    } else if missed.is_empty() {
        "met".to_owned()
    } else if missed.len() == figures.len() {
        "**missed**".to_owned()
    } else {
        format!("**missed** {}", missed.join(" and "))
    };
    let shown: Vec<String> =
        figures.iter().map(|f| format!("{} {}", f.shown, f.of).trim_end().to_owned()).collect();
    Judged { goal: goal.to_owned(), case, figure: shown.join(", "), verdict }
}

const WITHOUT_AND_WITH: [(Checksum, &str); 2] =
    [(Checksum::None, "without checksums"), (Checksum::Xxh3, "with xxh3")];

pub fn judge_all(results: &Results, overheads: &[Overhead]) -> Vec<Judged> {
    let mut judged = Vec::new();
    judged.extend(against_fastest_peer(results));
    judged.extend(against_rsync(results));
    judged.push(against_memcpy(results));
    judged.extend(checksum_costs(results));
    judged.push(peak_memory(results));
    judged.extend(overheads.iter().map(run_overhead));
    judged.extend(steady(results));
    judged
}

fn against_fastest_peer(results: &Results) -> Vec<Judged> {
    let mut judged = Vec::new();
    for comparison in results.comparisons.iter().filter(|c| !c.in_pieces) {
        let measures: &[(Until, bool, &str)] = match comparison.direction {
            Direction::In => &[(Until::Returned, true, "in")],
            Direction::Out => {
                &[(Until::Returned, false, "out, --no-sync"), (Until::OnDisk, true, "out, on disk")]
            }
        };
        for &(until, sync, name) in measures {
            let figures = WITHOUT_AND_WITH.map(|(checksum, of)| {
                let ratio = comparison.ratio(Tool::ondeck(checksum, sync), until)?;
                // As it is shown: a verdict must not hang on a digit that the reader cannot see.
                let met = (ratio * 100.0).round() <= (WORST_RATIO * 100.0).round();
                Some(Figure { of, shown: format!("{ratio:.2}x"), met })
            });
            let bare = (comparison.case == Case::Tree && until == Until::Returned).then(|| {
                let ratio = comparison.ratio(Tool::Bare, until)?;
                let met = (ratio * 100.0).round() <= (WORST_RATIO * 100.0).round();
                Some(Figure { of: "with modes as the only metadata", shown: format!("{ratio:.2}x"), met })
            });
            let figures = figures.into_iter().chain(bare).collect();
            judged.push(judge(
                &format!("1: at most {WORST_RATIO}x the time of the fastest peer"),
                format!("{}, {name}", comparison.shape.title()),
                figures,
            ));
        }
    }
    judged
}

/// Every run of `ondeck stage` into RAM, of one file or of files of 1 MiB.
fn steady(results: &Results) -> Vec<Judged> {
    let cases = results
        .comparisons
        .iter()
        .filter(|c| c.direction == Direction::In && matches!(c.case, Case::Medium | Case::Large));
    cases
        .map(|comparison| {
            let figures = WITHOUT_AND_WITH.map(|(checksum, of)| {
                let summary = comparison.summary(Tool::ondeck(checksum, true), Until::Returned)?;
                let slowest = summary.max_s / summary.median_s;
                Some(Figure { of, shown: format!("{slowest:.2}x"), met: slowest <= STEADY })
            });
            let pieces = if comparison.in_pieces { ", memory in small pieces" } else { "" };
            judge(
                &format!("7: the slowest run at most {STEADY}x the median"),
                format!("{}, in{pieces}", comparison.shape.title()),
                figures.into(),
            )
        })
        .collect()
}

fn against_rsync(results: &Results) -> Vec<Judged> {
    AGAINST_RSYNC
        .into_iter()
        .map(|(case, goal)| {
            let comparison = results.comparison(case, Direction::In);
            let figures = WITHOUT_AND_WITH.map(|(checksum, of)| {
                let comparison = comparison?;
                let rsync = comparison.summary(Tool::Rsync, Until::Returned)?;
                let ondeck = comparison.summary(Tool::ondeck(checksum, true), Until::Returned)?;
                let faster = rsync.median_s / ondeck.median_s;
                Some(Figure { of, shown: format!("{faster:.1}x"), met: faster >= goal })
            });
            judge(
                &format!("2: at least {goal}x as fast as rsync -a"),
                comparison.map_or(format!("{case:?}"), |c| c.shape.title()) + ", in",
                figures.into(),
            )
        })
        .collect()
}

/// Best run against best memcpy; the median is shown beside it.
fn against_memcpy(results: &Results) -> Judged {
    let comparison = results.comparison(Case::Large, Direction::In);
    let figures = OF_MEMCPY.map(|(checksum, goal)| {
        let comparison = comparison?;
        let memcpy = results.memcpy.best()?;
        let ondeck = comparison.summary(Tool::ondeck(checksum, true), Until::Returned)?;
        let share = |seconds: f64| comparison.census.bytes as f64 / seconds / memcpy;
        Some(Figure {
            of: WITHOUT_AND_WITH.into_iter().find(|(c, _)| *c == checksum).map_or("", |(_, of)| of),
            shown: format!(
                "{:.0} % (median {:.0} %)",
                share(ondeck.min_s) * 100.0,
                share(ondeck.median_s) * 100.0
            ),
            met: share(ondeck.min_s) >= goal,
        })
    });
    let [(_, without), (_, with)] = OF_MEMCPY;
    judge(
        &format!(
            "3: at least {:.0} % of memcpy without checksums, {:.0} % with",
            without * 100.0,
            with * 100.0
        ),
        comparison.map_or("one large file".into(), |c| c.shape.title()) + ", in",
        figures.into(),
    )
}

fn checksum_costs(results: &Results) -> Vec<Judged> {
    let costs = results.checksum_costs.iter();
    costs
        .map(|cost| {
            let ratio = cost.ratio();
            let figure = Figure { of: "", shown: format!("{ratio:.2}x"), met: ratio <= CHECKSUM_RATIO };
            judge(
                &format!("4: xxh3 at most {CHECKSUM_RATIO}x the time without"),
                cost.shape.title() + ", in",
                vec![Some(figure)],
            )
        })
        .collect()
}

fn peak_memory(results: &Results) -> Judged {
    let trees = results.comparisons.iter().filter(|c| c.case == Case::Tree);
    let peak = trees
        .clone()
        .flat_map(|c| &c.rows)
        .filter(|row| row.tool.is_ondeck())
        .filter_map(|row| row.peak_memory())
        .max();
    let figure = peak.map(|peak| Figure { of: "", shown: show(peak), met: peak < PEAK_MEMORY });
    judge(
        &format!("5: less than {} of memory", show(PEAK_MEMORY)),
        trees.map(|c| c.shape.title()).next().unwrap_or("a tree".into()),
        vec![figure],
    )
}

fn run_overhead(overhead: &Overhead) -> Judged {
    let figure = overhead.added_ms().map(|added| Figure {
        of: "",
        shown: format!("{added:.2} ms"),
        met: added < RUN_OVERHEAD_MS,
    });
    judge(
        &format!("6: ondeck run adds less than {RUN_OVERHEAD_MS} ms"),
        format!("true, as {}", overhead.user),
        vec![figure],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(of: &'static str, met: bool) -> Option<Figure> {
        Some(Figure { of, shown: "1".into(), met })
    }

    #[test]
    fn a_goal_that_is_half_met_names_the_half_that_is_not() {
        let verdict = |figures| judge("goal", String::new(), figures).verdict;
        assert_eq!(verdict(vec![figure("a", true), figure("b", true)]), "met");
        assert_eq!(verdict(vec![figure("a", true), figure("b", false)]), "**missed** b");
        assert_eq!(verdict(vec![figure("a", false), figure("b", false)]), "**missed**");
        assert_eq!(verdict(vec![None, None]), "not measured");
    }

    #[test]
    fn without_results_no_goal_counts_as_met() {
        let judged = judge_all(&Results::default(), &[]);
        assert!(judged.iter().all(|j| j.verdict == "not measured"));
        assert!(!judged.is_empty());
    }
}
