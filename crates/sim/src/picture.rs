//! Pictures of a simulation, as SVG: a Gantt chart, and what each size of the accelerator saves.
//!
//! Each stands by itself: no script, no font, nothing from a network; light or dark as its reader's system is. Whoever can't see it
//! is told the same by its description, and by the tables that [`page`] puts beside it.

mod curve;
mod gantt;
pub mod page;

use std::fmt::Write;

pub use curve::sizing_curve;
pub use gantt::{TooMuch, gantt};

use ondeck_core::timeline::Phase;

/// The colours of everything, as a style sheet within the picture.
const STYLE: &str = "
  .ground{fill:#ffffff} .text{fill:#1c1e21} .faint{fill:#5a6068} .line{stroke:#c9ced6} .lane{fill:#eef0f3}
  .curve{fill:none;stroke-width:2.5} .mark{stroke:none}
  .c1{stroke:#1f6fb2} .m1{fill:#1f6fb2} .c2{stroke:#c0561e} .m2{fill:#c0561e} .c3{stroke:#5b7f2b} .m3{fill:#5b7f2b}
  .prolog,.epilog{fill:#9aa1ab} .reading{fill:#d9742b} .computing{fill:#8fb8de} .checkpoint{fill:#e8a33d} .writing{fill:#c0561e}
  .constructing,.removing{fill:#9aa1ab} .staging_in{fill:#a98fd6} .ready{fill:#dcd2ee} .in_use{fill:#5b9f5b}
  .staging_out{fill:#4fb8b6} .held{fill:#c22f3d} .label{fill:#101214}
  @media (prefers-color-scheme: dark){
  .ground{fill:#16181b} .text{fill:#e7e9ec} .faint{fill:#a0a7b1} .line{stroke:#3a3f47} .lane{fill:#22262b}
  .c1{stroke:#6db3ee} .m1{fill:#6db3ee} .c2{stroke:#f0935a} .m2{fill:#f0935a} .c3{stroke:#a3cc6a} .m3{fill:#a3cc6a}
  .computing{fill:#4a7eae} .ready{fill:#6d5a92} .staging_in{fill:#7a5ea8} .staging_out{fill:#2b7f7f} .in_use{fill:#3f7a3f} .label{fill:#ffffff}}
";

/// The beginning of a picture of this size, with what it shows, shortly and at length.
fn begin(width: u32, height: u32, title: &str, description: &str) -> String {
    let mut svg = String::new();
    let _ = write!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         role=\"img\" aria-labelledby=\"title description\" font-family=\"system-ui, sans-serif\" font-size=\"13\">\n\
         <title id=\"title\">{}</title>\n<desc id=\"description\">{}</desc>\n<style>{STYLE}</style>\n\
         <rect class=\"ground\" width=\"{width}\" height=\"{height}\"/>\n",
        escaped(title),
        escaped(description)
    );
    svg
}

/// Words at a place.
fn text(svg: &mut String, x: f64, y: f64, anchor: &str, class: &str, words: &str) {
    let _ = writeln!(
        svg,
        "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
        escaped(words)
    );
}

/// Text as it may stand in XML and in HTML.
pub fn escaped(words: &str) -> String {
    let mut safe = String::with_capacity(words.len());
    for character in words.chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            character if character.is_control() => safe.push('\u{fffd}'),
            character => safe.push(character),
        }
    }
    safe
}

/// Where an axis has its marks: round numbers, so many at most.
fn marks(most: f64, count: usize) -> Vec<f64> {
    if most.is_nan() || most <= 0.0 {
        return vec![0.0];
    }
    let rough = most / count.max(1) as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].into_iter().map(|by| by * power).find(|step| *step >= rough).unwrap_or(power);
    (0..).map(|index| f64::from(index) * step).take_while(|mark| *mark <= most * 1.0001).collect()
}

/// The same of an axis that also goes below zero.
fn marks_between(low: f64, high: f64, count: usize) -> Vec<f64> {
    let step = marks(high - low, count).get(1).copied().unwrap_or(1.0);
    let first = (low / step).ceil() as i32;
    (first..).map(|index| f64::from(index) * step).take_while(|mark| *mark <= high + step * 0.001).collect()
}

/// A span of time as people read it.
pub fn time(ms: u64) -> String {
    let seconds = ms / 1000;
    let (days, hours, minutes, seconds) =
        (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    if days > 0 {
        format!("{days}-{hours:02}:{minutes:02}:{seconds:02}")
    } else {
        format!("{hours}:{minutes:02}:{seconds:02}")
    }
}

/// Its class in the style sheet, and its words.
fn of_phase(phase: Phase) -> (&'static str, &'static str) {
    match phase {
        Phase::Prolog => ("prolog", "waiting for Prologs"),
        Phase::Reading => ("reading", "reading"),
        Phase::Computing => ("computing", "computing"),
        Phase::Checkpoint => ("checkpoint", "checkpoint"),
        Phase::Writing => ("writing", "writing"),
        Phase::Running => ("computing", "running"),
        Phase::Epilog => ("epilog", "waiting for Epilogs"),
        Phase::Constructing => ("constructing", "building"),
        Phase::StagingIn => ("staging_in", "staging in"),
        Phase::Ready => ("ready", "ready"),
        Phase::InUse => ("in_use", "in use"),
        Phase::StagingOut => ("staging_out", "staging out"),
        Phase::Held => ("held", "held"),
        Phase::Removing => ("removing", "removing"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_round_and_few() {
        assert_eq!(marks(10.0, 5), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(marks(0.0, 5), [0.0]);
        assert_eq!(marks(730.0, 4), [0.0, 200.0, 400.0, 600.0]);
        assert_eq!(
            marks_between(-3000.0, 3500.0, 7),
            [-3000.0, -2000.0, -1000.0, 0.0, 1000.0, 2000.0, 3000.0]
        );
        assert_eq!(marks_between(-1.0, 730.0, 4), [0.0, 200.0, 400.0, 600.0]);
    }

    #[test]
    fn times_are_read_by_people_and_words_are_safe() {
        assert_eq!(time(3_725_999), "1:02:05");
        assert_eq!(time(90_000_000), "1-01:00:00");
        assert_eq!(escaped("<a & 'b'>\u{7}"), "&lt;a &amp; &#39;b&#39;&gt;\u{fffd}");
    }
}
