//! `slurm/ondeck.toml.example` is true: it has every key, and the defaults that it states are the defaults.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::Path;

use ondeck_api::Config;

const EXAMPLE: &str = include_str!("../../../slurm/ondeck.toml.example");

fn parse(text: &str) -> Result<Config, String> {
    Config::parse(text, Path::new("ondeck.toml")).map_err(|error| error.to_string())
}

/// A line `#key = value`, without the mark.
fn shown(line: &str) -> Option<&str> {
    let rest = line.strip_prefix('#')?;
    let (key, _) = rest.split_once(" = ")?;
    key.bytes().all(|c| c.is_ascii_lowercase() || c == b'_').then_some(rest)
}

/// The lines with the part that they stand in.
fn lines() -> Vec<(&'static str, &'static str)> {
    let mut part = "";
    EXAMPLE
        .lines()
        .map(|line| {
            if line.starts_with('[') {
                part = line;
            }
            (part, line)
        })
        .collect()
}

#[test]
fn it_is_understood_as_it_is_and_with_every_line_that_it_shows() {
    parse(EXAMPLE).unwrap();
    let all: Vec<&str> = EXAMPLE.lines().map(|line| shown(line).unwrap_or(line)).collect();
    let config = parse(&all.join("\n")).unwrap();
    config.scheduler.site(&config.nodes).unwrap();
}

#[test]
fn the_defaults_that_it_states_are_the_defaults() {
    let mut seen = 0;
    for (part, line) in lines() {
        let Some(line) = shown(line).filter(|line| !line.contains("none by default")) else { continue };
        // What a device and a pool can't do without.
        let needs = match part {
            "[agent.device.ram]" => "kind = \"ram\"\n",
            "[scheduler.pool.default]" => "nodes = [\"r1\"]\n",
            _ => "",
        };
        let with = parse(&format!("{part}\n{needs}{line}\n")).unwrap();
        let without = parse(&format!("{part}\n{needs}")).unwrap();
        assert_eq!(format!("{with:?}"), format!("{without:?}"), "{part} {line}");
        seen += 1;
    }
    assert!(seen > 30, "{seen}");
}

#[test]
fn it_has_every_key() {
    let parts = [
        "",
        "[agent]",
        "[agent.device.ram]",
        "[scheduler]",
        "[scheduler.pool.default]",
        "[scheduler.limits]",
        "[slurm]",
    ];
    for part in parts {
        let kind = if part == "[agent.device.ram]" { "kind = \"ram\"\n" } else { "" };
        // Parts of a part, and what the text of the example tells.
        let elsewhere = ["agent", "scheduler", "slurm", "device", "pool", "limits"];
        let error = parse(&format!("{part}\n{kind}no_such_key = 1\n")).unwrap_err();
        let known: BTreeSet<&str> = error
            .split_once("expected")
            .unwrap_or_else(|| panic!("{part}: {error}"))
            .1
            .split('`')
            .skip(1)
            .step_by(2)
            .filter(|key| !elsewhere.contains(key))
            .collect();
        assert!(!known.is_empty(), "{part}: {error}");
        for key in known {
            let there = lines().into_iter().any(|(of, line)| {
                let line = shown(line).unwrap_or(line);
                of == part && line.strip_prefix(key).is_some_and(|rest| rest.starts_with(" ="))
            });
            assert!(there, "{part} {key} is missing from the example");
        }
    }
}
