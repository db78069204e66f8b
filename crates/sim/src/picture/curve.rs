//! What each size of the accelerator saves, and what it costs.

use std::fmt::Write;

use super::{begin, marks_between, text};
use crate::study::Saved;

const LEFT: f64 = 90.0;
const TOP: f64 = 56.0;
const WIDTH: f64 = 620.0;
const HEIGHT: f64 = 300.0;

/// A number of what is saved.
type Number = fn(&Saved) -> f64;

/// The picture of several sizes, the smallest first, each with what it saves.
pub fn sizing_curve(title: &str, sizes: &[(u32, Saved)]) -> String {
    let description = sizes.iter().fold(
        "Node-hours against the number of RSA nodes: saved, saved after the RSA's own nodes are counted, and those of the RSA nodes."
            .to_owned(),
        |mut all, (nodes, saved)| {
            let _ = write!(
                all,
                " {nodes} RSA nodes: {:.0} saved, {:.0} net, {:.0} of their own.",
                saved.gross.mean, saved.net.mean, saved.cost.mean
            );
            all
        },
    );
    let mut svg = begin((LEFT + WIDTH + 130.0) as u32, (TOP + HEIGHT + 60.0) as u32, title, &description);
    text(&mut svg, LEFT, 24.0, "start", "text", title);
    let means = sizes.iter().flat_map(|(_, saved)| [saved.gross.mean, saved.net.mean, saved.cost.mean]);
    let (mut low, mut high) = (0.0f64, 1.0f64);
    for mean in means {
        (low, high) = (low.min(mean), high.max(mean));
    }
    let most = f64::from(sizes.last().map_or(1, |(nodes, _)| (*nodes).max(1)));
    let x = |nodes: f64| LEFT + nodes / most * WIDTH;
    let y = |hours: f64| TOP + (high - hours) / (high - low) * HEIGHT;
    for mark in marks_between(low, high, 7) {
        let at = y(mark);
        let _ = writeln!(
            svg,
            "<line class=\"line\" x1=\"{LEFT:.1}\" y1=\"{at:.1}\" x2=\"{:.1}\" y2=\"{at:.1}\"/>",
            LEFT + WIDTH
        );
        text(&mut svg, LEFT - 8.0, at + 4.0, "end", "faint", &format!("{mark}"));
    }
    text(&mut svg, LEFT, TOP - 10.0, "start", "faint", "node-hours");
    for (nodes, _) in sizes {
        text(&mut svg, x(f64::from(*nodes)), TOP + HEIGHT + 20.0, "middle", "faint", &nodes.to_string());
    }
    text(&mut svg, LEFT + WIDTH / 2.0, TOP + HEIGHT + 42.0, "middle", "text", "RSA nodes");
    let curves: [(&str, u8, Number); 3] = [
        ("saved", 1, |saved| saved.gross.mean),
        ("saved, net", 3, |saved| saved.net.mean),
        ("RSA's own", 2, |saved| saved.cost.mean),
    ];
    let mut labels: Vec<f64> = Vec::new();
    for (name, number, of) in curves {
        let mut points = format!("{:.1},{:.1}", x(0.0), y(0.0));
        for (nodes, saved) in sizes {
            let (left, down) = (x(f64::from(*nodes)), y(of(saved)));
            let _ = write!(points, " {left:.1},{down:.1}");
            let _ =
                writeln!(svg, "<circle class=\"m{number} mark\" cx=\"{left:.1}\" cy=\"{down:.1}\" r=\"4\"/>");
        }
        let _ = writeln!(svg, "<polyline class=\"curve c{number}\" points=\"{points}\"/>");
        let mut at = sizes.last().map_or(y(0.0), |(_, saved)| y(of(saved))) + 4.0;
        // Names do not stand on each other.
        while labels.iter().any(|other| (at - other).abs() < 15.0) {
            at += 15.0;
        }
        labels.push(at);
        text(&mut svg, LEFT + WIDTH + 12.0, at, "start", "text", name);
    }
    svg.push_str("</svg>\n");
    svg
}
