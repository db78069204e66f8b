//! The phases in the report that `ondeck run --report FILE` writes, for the demo.
//!
//! It is read with tolerance: what the demo does not need may be missing or renamed, and a phase
//! without seconds is left out.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

/// Prints `NAME SECONDS BYTES FILES` for each phase, and `program_exit CODE`; `-` for what is not
/// there.
pub fn print(report: &Path) -> Result<()> {
    let text = fs::read_to_string(report).with_context(|| format!("cannot read {}", report.display()))?;
    let report: Value =
        serde_json::from_str(&text).with_context(|| format!("{} is not JSON", report.display()))?;
    print!("{}", lines(&report));
    Ok(())
}

fn lines(report: &Value) -> String {
    let number = |value: Option<&Value>| match value.and_then(Value::as_f64) {
        Some(number) if number.fract() == 0.0 => format!("{number:.0}"),
        Some(number) => format!("{number:.3}"),
        None => "-".to_owned(),
    };
    let mut text = String::new();
    for phase in report.get("phases").and_then(Value::as_array).into_iter().flatten() {
        let name = phase.get("name").and_then(Value::as_str);
        let seconds = phase.get("seconds").and_then(Value::as_f64);
        if let (Some(name), Some(seconds)) = (name, seconds) {
            let bytes = number(phase.get("bytes"));
            let files = number(phase.get("files"));
            text += &format!("{name} {seconds:.3} {bytes} {files}\n");
        }
    }
    let exit = report.pointer("/program/exit_code");
    text += &format!("program_exit {}\n", number(exit));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_printed_in_their_order_with_what_is_known() {
        let report = serde_json::json!({
            "phases": [
                {"name": "stage_in", "seconds": 5.12345, "bytes": 268_435_456, "files": 64, "rate": 1.0},
                {"name": "program", "seconds": 1},
                {"name": "without seconds"},
            ],
            "program": {"exit_code": 0},
            "something": "new",
        });
        assert_eq!(lines(&report), "stage_in 5.123 268435456 64\nprogram 1.000 - -\nprogram_exit 0\n");
    }

    #[test]
    fn a_report_of_another_shape_has_no_phases() {
        assert_eq!(lines(&serde_json::json!([1, 2])), "program_exit -\n");
    }
}
