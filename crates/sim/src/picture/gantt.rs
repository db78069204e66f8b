//! A Gantt chart: a row for each node, compute nodes above and RSA nodes below, on one axis of time, as in figure 2.1 of the thesis.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::{begin, escaped, marks, of_phase, text, time};
use ondeck_core::timeline::{Phase, Span, Timeline};

/// Why there is no picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{spans} spans of time from {} to {} are more than {most}, which is all that can be told apart; take a shorter time", time(*.from_ms), time(*.to_ms))]
pub struct TooMuch {
    /// How many there are.
    pub spans: usize,
    /// The most.
    pub most: usize,
    /// From when.
    pub from_ms: u64,
    /// Until when.
    pub to_ms: u64,
}

/// More spans of time than these nobody could tell apart.
const MOST: usize = 20_000;
const LEFT: f64 = 130.0;
const WIDTH: f64 = 1000.0;
const TOP: f64 = 60.0;
const GAP: f64 = 26.0;

/// The picture of a time, in milliseconds. The title says whose it is.
///
/// # Errors
/// [`TooMuch`], if too much happens in that time.
pub fn gantt(title: &str, timeline: &Timeline, from_ms: u64, to_ms: u64) -> Result<String, TooMuch> {
    let to_ms = to_ms.max(from_ms + 1);
    let within = |spans: &[Span]| -> Vec<Span> {
        spans.iter().filter(|span| span.from_ms < to_ms && span.to_ms > from_ms).cloned().collect()
    };
    let (compute, rsa) = (within(&timeline.compute), within(&timeline.rsa));
    let spans = compute.len() + rsa.len();
    if spans > MOST {
        return Err(TooMuch { spans, most: MOST, from_ms, to_ms });
    }
    // A row is as high as there is room for; few rows are high enough for the number of a job.
    let height_of = |nodes: u32| (420.0 / f64::from(nodes.max(1))).clamp(1.0, 22.0);
    let (compute_row, rsa_row) = (height_of(timeline.compute_nodes), height_of(timeline.rsa_nodes));
    let compute_height = compute_row * f64::from(timeline.compute_nodes);
    let rsa_height = rsa_row * f64::from(timeline.rsa_nodes);
    let rsa_top = TOP + compute_height + GAP;
    let bottom = if timeline.rsa_nodes > 0 { rsa_top + rsa_height } else { TOP + compute_height };
    let phases: BTreeSet<Phase> = compute.iter().chain(&rsa).map(|span| span.phase).collect();
    let legend_rows = phases.len().div_ceil(5) as f64;
    let height = bottom + 44.0 + legend_rows * 20.0;

    let jobs: BTreeSet<u64> = compute.iter().chain(&rsa).map(|span| span.job).collect();
    let description = format!(
        "{} compute nodes and {} RSA nodes from {} to {}, with {} jobs. Each row is a node; colours say what it does for a job.",
        timeline.compute_nodes,
        timeline.rsa_nodes,
        time(from_ms),
        time(to_ms),
        jobs.len()
    );
    let mut svg = begin((LEFT + WIDTH + 20.0) as u32, height as u32, title, &description);
    text(&mut svg, LEFT, 24.0, "start", "text", title);
    let scale = WIDTH / (to_ms - from_ms) as f64;
    let x = |ms: u64| LEFT + (ms.clamp(from_ms, to_ms) - from_ms) as f64 * scale;
    let unit = if to_ms - from_ms > 4 * 3_600_000 { 3_600_000.0 } else { 60_000.0 };
    let word = if unit > 60_000.0 { "hours" } else { "minutes" };
    for mark in marks((to_ms - from_ms) as f64 / unit, 10) {
        let (at, shown) = (LEFT + mark * unit * scale, from_ms as f64 / unit + mark);
        let _ = writeln!(
            svg,
            "<line class=\"line\" x1=\"{at:.1}\" y1=\"{:.1}\" x2=\"{at:.1}\" y2=\"{bottom:.1}\"/>",
            TOP - 4.0
        );
        text(&mut svg, at, TOP - 9.0, "middle", "faint", &format!("{}", (shown * 100.0).round() / 100.0));
    }
    text(&mut svg, LEFT - 10.0, TOP - 9.0, "end", "faint", word);
    let mut group = |name: &str, nodes: u32, top: f64, row: f64, spans: &[Span]| {
        if nodes == 0 {
            return;
        }
        let height = row * f64::from(nodes);
        let _ = writeln!(
            svg,
            "<rect class=\"lane\" x=\"{LEFT:.1}\" y=\"{top:.1}\" width=\"{WIDTH:.1}\" height=\"{height:.1}\"/>"
        );
        text(&mut svg, LEFT - 10.0, top + height / 2.0 + 4.0, "end", "text", name);
        for span in spans {
            let (class, words) = of_phase(span.phase);
            let (left, right) = (x(span.from_ms), x(span.to_ms));
            let told = format!("job {}: {words}, {} to {}", span.job, time(span.from_ms), time(span.to_ms));
            for (place, (first, last)) in span.nodes.iter().enumerate() {
                let (y, high) = (top + row * f64::from(*first), row * f64::from(last - first + 1));
                let wide = (right - left).max(0.3);
                let _ = writeln!(
                    svg,
                    "<rect class=\"{class}\" x=\"{left:.1}\" y=\"{y:.1}\" width=\"{wide:.1}\" height=\"{:.1}\"><title>{}</title></rect>",
                    (high - if row > 4.0 { 1.0 } else { 0.0 }).max(0.5),
                    escaped(&told)
                );
                let label = span.job.to_string();
                if place == 0 && high >= 14.0 && wide > 9.0 * label.len() as f64 {
                    text(&mut svg, left + wide / 2.0, y + high / 2.0 + 4.0, "middle", "label", &label);
                }
            }
        }
    };
    group("compute nodes", timeline.compute_nodes, TOP, compute_row, &compute);
    group("RSA nodes", timeline.rsa_nodes, rsa_top, rsa_row, &rsa);
    for (index, phase) in phases.iter().enumerate() {
        let (class, words) = of_phase(*phase);
        let (left, y) = (LEFT + (index % 5) as f64 * 200.0, bottom + 24.0 + (index / 5) as f64 * 20.0);
        let _ = writeln!(
            svg,
            "<rect class=\"{class}\" x=\"{left:.1}\" y=\"{:.1}\" width=\"14\" height=\"14\"/>",
            y - 11.0
        );
        text(&mut svg, left + 20.0, y, "start", "text", words);
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}
