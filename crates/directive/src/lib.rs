//! From the text of a batch script to a [`Request`].
//!
//! The `#RSA_KEY=VALUE` lines are those of the RSA thesis (appendices R and U) and ours beyond it. Like sbatch,
//! this parser reads the head of the script only: it stops at the first line that is neither blank nor a comment.
//! A line further down would be ignored by a reader who knows sbatch, so it is reported as a [`Warning`], never
//! obeyed: it may be part of a here-document that writes another script.
//!
//! A value may be quoted; outside quotes ` #` begins a comment, as in `#SBATCH` lines. Nothing is expanded:
//! `$HOME` and `~` are refused, because a shell would expand them and this parser can't.
//!
//! The text is bytes, not UTF-8: paths on Linux are bytes.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use ondeck_core::{Bytes, EngineKind, PackFormat, Request, WaitPolicy, duration};

/// A directive that can't be obeyed: where it stands, what is wrong, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {key}: {problem}; {remedy}")]
pub struct DirectiveError {
    /// The line of the script, counted from 1.
    pub line: usize,
    /// The key as the user wrote it.
    pub key: String,
    /// What is wrong.
    pub problem: String,
    /// What to do about it.
    pub remedy: String,
}

/// Something that a user should know but that does not stop the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// The line of the script, counted from 1.
    pub line: usize,
    /// What is noteworthy.
    pub message: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}

/// What a script's directives say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parsed {
    /// The request; empty when the script has no `#RSA_` line.
    pub request: Request,
    /// What a user should know.
    pub warnings: Vec<Warning>,
    /// How many directives were obeyed.
    pub directives: usize,
}

/// A key, with the other names it goes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    DataIn,
    DataOut,
    StageIn,
    StageOut,
    Delay,
    Capacity,
    Nodes,
    Pool,
    Engine,
    Pack,
    Wait,
    OutSize,
    CopyOutInterval,
}

const KEYS: &[(&str, Key)] = &[
    ("RSA_DATA_IN", Key::DataIn),
    ("RSA_DATA_OUT", Key::DataOut),
    ("RSA_STAGE_IN", Key::StageIn),
    ("RSA_PREPROCESS", Key::StageIn),
    ("RSA_STAGE_OUT", Key::StageOut),
    ("RSA_POSTPROCESS", Key::StageOut),
    ("RSA_DELAY", Key::Delay),
    ("RSA_CAPACITY", Key::Capacity),
    ("RSA_NODES", Key::Nodes),
    ("RSA_POOL", Key::Pool),
    ("RSA_ENGINE", Key::Engine),
    ("RSA_PACK", Key::Pack),
    ("RSA_WAIT", Key::Wait),
    ("RSA_OUT_SIZE", Key::OutSize),
    ("RSA_COPY_OUT_INTERVAL", Key::CopyOutInterval),
];

/// Reads the directives at the head of `script`.
///
/// # Errors
/// Every malformed directive, in the order of their lines, so that a user mends them all at once.
///
/// ```
/// let script = b"#!/bin/bash\n#RSA_DATA_IN=/case/input\n#RSA_DATA_OUT=/case/results\n./solver\n";
/// let parsed = ondeck_directive::parse(script).unwrap();
/// assert_eq!(parsed.request.data_in, ["/case/input"].map(std::path::PathBuf::from));
/// ```
pub fn parse(script: &[u8]) -> Result<Parsed, Vec<DirectiveError>> {
    let mut parsed = Parsed::default();
    let mut errors = Vec::new();
    let mut seen: Vec<(Key, usize)> = Vec::new();
    let mut in_head = true;
    for (index, line) in script.split(|b| *b == b'\n').enumerate() {
        let number = index + 1;
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let Some(text) = line.strip_prefix(b"#RSA_") else {
            let trimmed = line.trim_ascii();
            in_head &= trimmed.is_empty() || trimmed.starts_with(b"#");
            if in_head && looks_like_a_directive(trimmed) {
                parsed.warnings.push(Warning {
                    line: number,
                    message: format!(
                        "`{}` is not obeyed: a directive begins with `#RSA_` in the first column",
                        preview(trimmed)
                    ),
                });
            }
            continue;
        };
        if !in_head {
            parsed.warnings.push(Warning {
                line: number,
                message: format!(
                    "`#RSA_{}` is not obeyed because it follows the first command; move it to the head of the script",
                    preview(text)
                ),
            });
            continue;
        }
        match directive(number, text, &mut seen, &mut parsed.request) {
            Ok(()) => parsed.directives += 1,
            Err(error) => errors.push(*error),
        }
    }
    if errors.is_empty() { Ok(parsed) } else { Err(errors) }
}

/// `# RSA_DATA_IN=…` and `  #RSA_…` are what people write when they don't know that the column matters.
fn looks_like_a_directive(trimmed: &[u8]) -> bool {
    trimmed.strip_prefix(b"#").is_some_and(|rest| {
        let rest = rest.trim_ascii_start();
        KEYS.iter().any(|(name, _)| {
            rest.strip_prefix(name.as_bytes()).is_some_and(|tail| tail.trim_ascii_start().starts_with(b"="))
        })
    })
}

/// Parses one directive; `text` is what follows `#RSA_`.
fn directive(
    line: usize,
    text: &[u8],
    seen: &mut Vec<(Key, usize)>,
    request: &mut Request,
) -> Result<(), Box<DirectiveError>> {
    let equals = text.iter().position(|b| *b == b'=');
    let word = format!("RSA_{}", String::from_utf8_lossy(&text[..equals.unwrap_or(text.len())]).trim());
    let fail = |problem: String, remedy: String| {
        Box::new(DirectiveError { line, key: shorten(&word), problem, remedy })
    };
    let Some((name, key)) = KEYS.iter().find(|(name, _)| *name == word) else {
        return Err(fail("there is no such directive".into(), nearest(&word)));
    };
    let Some(equals) = equals else {
        return Err(fail("it has no value".into(), format!("write #{name}=VALUE")));
    };
    let value = value_of(&text[equals + 1..])
        .map_err(|problem| fail(problem.into(), format!("write #{name}=VALUE or #{name}=\"VALUE\"")))?;
    let repeatable = matches!(key, Key::DataIn | Key::DataOut);
    if let Some((_, first)) = seen.iter().find(|(k, _)| k == key)
        && !repeatable
    {
        return Err(fail(format!("it was given before, in line {first}"), "remove one of the two".into()));
    }
    seen.push((*key, line));
    apply(*key, value, request).map_err(|(problem, remedy)| fail(problem, remedy))
}

type Refusal = (String, String);

fn apply(key: Key, value: &[u8], request: &mut Request) -> Result<(), Refusal> {
    match key {
        Key::DataIn => request.data_in.push(path(value)?),
        Key::DataOut => request.data_out.push(path(value)?),
        Key::StageIn => request.stage_in = Some(path(value)?),
        Key::StageOut => request.stage_out = Some(path(value)?),
        Key::Delay => request.delay = Some(parse_duration(value, 1)?),
        Key::CopyOutInterval => {
            let interval = parse_duration(value, 60)?;
            if interval.is_zero() {
                return Err((
                    "an interval of zero would copy without end".into(),
                    "write minutes, like 5".into(),
                ));
            }
            request.copy_out_interval = Some(interval);
        }
        Key::Capacity => request.capacity = Some(parse_size(value)?),
        Key::OutSize => request.out_size = Some(parse_size(value)?),
        Key::Nodes => {
            let nodes = text(value)?.parse::<u32>().ok().filter(|n| *n > 0);
            request.nodes = Some(nodes.ok_or_else(|| {
                (
                    format!("`{}` is not a number of nodes", preview(value)),
                    "write a whole number from 1".into(),
                )
            })?);
        }
        Key::Pool => request.pool = Some(text(value)?.to_owned()),
        Key::Engine => request.engine = Some(word(value, EngineKind::for_job, EngineKind::FOR_JOBS)?),
        Key::Pack => request.pack = Some(word(value, PackFormat::from_word, PackFormat::WORDS)?),
        Key::Wait => request.wait = Some(word(value, WaitPolicy::from_word, WaitPolicy::WORDS)?),
    }
    Ok(())
}

/// Takes quotes, a trailing comment and surrounding blanks off a value.
fn value_of(raw: &[u8]) -> Result<&[u8], &'static str> {
    let raw = raw.trim_ascii();
    let value = match raw.first() {
        Some(quote @ (b'"' | b'\'')) => {
            let rest = &raw[1..];
            let end = rest.iter().position(|b| b == quote).ok_or("its quote is not closed")?;
            let tail = rest[end + 1..].trim_ascii_start();
            if !tail.is_empty() && !tail.starts_with(b"#") {
                return Err("something follows the closing quote");
            }
            &rest[..end]
        }
        _ => {
            let comment = raw.windows(2).position(|pair| pair[0].is_ascii_whitespace() && pair[1] == b'#');
            raw[..comment.unwrap_or(raw.len())].trim_ascii_end()
        }
    };
    if value.is_empty() { Err("its value is empty") } else { Ok(value) }
}

fn path(value: &[u8]) -> Result<PathBuf, Refusal> {
    if value.contains(&0) {
        return Err(("a path can't hold a NUL byte".into(), "write the path as `ls` prints it".into()));
    }
    if value.starts_with(b"~") || value.starts_with(b"$") {
        return Err((
            format!("`{}` is not expanded here", preview(value)),
            "write the whole path, as `pwd` prints it".into(),
        ));
    }
    Ok(PathBuf::from(OsStr::from_bytes(value)))
}

fn text(value: &[u8]) -> Result<&str, Refusal> {
    std::str::from_utf8(value)
        .map_err(|_| (format!("`{}` is not UTF-8 text", preview(value)), "retype the line".into()))
}

fn parse_duration(value: &[u8], bare_unit: u64) -> Result<std::time::Duration, Refusal> {
    duration::parse(text(value)?, bare_unit).map_err(split_remedy)
}

fn parse_size(value: &[u8]) -> Result<Bytes, Refusal> {
    match text(value)?.parse().map_err(split_remedy)? {
        Bytes(0) => Err(("a size of zero holds nothing".into(), "write a size like 4GiB".into())),
        size => Ok(size),
    }
}

/// The core's errors carry their remedy after the last semicolon.
fn split_remedy(error: impl fmt::Display) -> Refusal {
    let message = error.to_string();
    match message.rsplit_once("; ") {
        Some((problem, remedy)) => (problem.to_owned(), remedy.to_owned()),
        None => (message, "see the user guide".to_owned()),
    }
}

fn word<T>(value: &[u8], from_word: fn(&str) -> Option<T>, words: &[&str]) -> Result<T, Refusal> {
    from_word(text(value)?).ok_or_else(|| {
        (format!("`{}` is not one of its values", preview(value)), format!("write {}", words.join(", ")))
    })
}

fn nearest(word: &str) -> String {
    let best = KEYS
        .iter()
        .map(|(name, _)| (strsim::damerau_levenshtein(&shorten(word), name), *name))
        .min()
        .filter(|(distance, _)| *distance <= 4);
    match best {
        Some((_, name)) => format!("did you mean {name}?"),
        None => "the user guide lists them all".to_owned(),
    }
}

/// Enough of a value for a message, and never more than a line of it.
fn preview(bytes: &[u8]) -> String {
    shorten(&String::from_utf8_lossy(bytes).escape_debug().to_string())
}

fn shorten(text: &str) -> String {
    const MOST: usize = 120;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn one_error(script: &str) -> String {
        let errors = parse(script.as_bytes()).unwrap_err();
        assert_eq!(errors.len(), 1, "{errors:?}");
        errors[0].to_string()
    }

    #[test]
    fn the_job_script_of_appendix_u_is_understood() {
        let script = b"#!/bin/bash\n\n# set stage-in data directory:\n#RSA_DATA_IN=/gpfs/home/w/test8/input\n\
            # set custom stage-in script:\n#RSA_STAGE_IN=/gpfs/home/w/stage-in.sh\n\n# set stage-out directory:\n\
            #RSA_DATA_OUT=/gpfs/home/w/test8/results\n# custom stage-out script\n\
            #RSA_STAGE_OUT=/gpfs/home/w/stage-out.sh\n\n# run in virtualnode mode\nmpirun ./mpi-matrix 16384\n";
        let parsed = parse(script).unwrap();
        assert_eq!(parsed.directives, 4);
        assert_eq!(parsed.request.data_out, [PathBuf::from("/gpfs/home/w/test8/results")]);
        assert_eq!(parsed.request.stage_in, Some(PathBuf::from("/gpfs/home/w/stage-in.sh")));
        assert_eq!(parsed.warnings, []);
    }

    #[test]
    fn every_key_of_the_design_is_known() {
        let script = b"#RSA_DATA_IN=/a\n#RSA_DATA_IN=/b\n#RSA_DATA_OUT=\"/c d\" # results\n#RSA_PREPROCESS=/p\n\
            #RSA_POSTPROCESS=/q\n#RSA_DELAY=300\n#RSA_CAPACITY=4GiB\n#RSA_NODES=2\n#RSA_POOL=fast\n\
            #RSA_ENGINE=gluster\n#RSA_PACK=tar.zst\n#RSA_WAIT=hold\n#RSA_OUT_SIZE=1G\r\n#RSA_COPY_OUT_INTERVAL=5\n";
        let request = parse(script).unwrap().request;
        assert_eq!(request.data_in.len(), 2);
        assert_eq!(request.data_out, [PathBuf::from("/c d")]);
        assert_eq!(request.delay, Some(Duration::from_secs(300)));
        assert_eq!(request.capacity, Some(Bytes(4 << 30)));
        assert_eq!(request.engine, Some(EngineKind::Gluster));
        assert_eq!(request.pack, Some(PackFormat::TarZst));
        assert_eq!(request.wait, Some(WaitPolicy::Hold));
        assert_eq!(request.out_size, Some(Bytes(1 << 30)));
        assert_eq!(request.copy_out_interval, Some(Duration::from_secs(300)));
        assert_eq!((request.nodes, request.pool.as_deref()), (Some(2), Some("fast")));
    }

    #[test]
    fn a_wrong_key_names_the_nearest_one() {
        let error = one_error("#RSA_DATAIN=/x\n");
        assert_eq!(error, "line 1: RSA_DATAIN: there is no such directive; did you mean RSA_DATA_IN?");
        assert!(one_error("#RSA_SOMETHING_ELSE_ENTIRELY=1\n").contains("user guide"));
    }

    #[test]
    fn a_malformed_value_is_refused_with_line_key_and_remedy() {
        for (script, part) in [
            ("#RSA_DATA_IN\n", "no value"),
            ("#RSA_DATA_IN=\n", "empty"),
            ("#RSA_DATA_IN=\"/x\n", "not closed"),
            ("#RSA_DATA_IN=\"/x\"y\n", "follows the closing quote"),
            ("#RSA_DATA_IN=$HOME/x\n", "not expanded"),
            ("#RSA_DATA_IN=~/x\n", "not expanded"),
            ("#RSA_DELAY=soon\n", "write it like 90s"),
            ("#RSA_DELAY=1\n#RSA_DELAY=2\n", "given before, in line 1"),
            ("#RSA_CAPACITY=0\n", "zero"),
            ("#RSA_NODES=0\n", "whole number from 1"),
            ("#RSA_PACK=zip\n", "write tar, tar.zst"),
            ("#RSA_COPY_OUT_INTERVAL=0\n", "without end"),
        ] {
            let error = one_error(script);
            assert!(error.contains(part), "{script}: {error}");
        }
    }

    #[test]
    fn all_errors_of_a_script_are_told_at_once() {
        assert_eq!(parse(b"#RSA_X=1\n#RSA_DELAY=no\n#RSA_DATA_IN=/ok\n").unwrap_err().len(), 2);
    }

    #[test]
    fn a_directive_after_the_first_command_is_a_warning_only() {
        let parsed = parse(b"#!/bin/sh\nmodule load x\n#RSA_DATA_IN=/x\n").unwrap();
        assert_eq!(parsed.request, Request::default());
        assert!(parsed.warnings[0].to_string().starts_with("line 3:"));
        let parsed = parse(b"# RSA_DATA_IN=/x\n").unwrap();
        assert!(parsed.warnings[0].message.contains("first column"));
    }

    #[test]
    fn a_path_need_not_be_utf8() {
        let parsed = parse(b"#RSA_DATA_IN=/d\xff\n").unwrap();
        assert_eq!(parsed.request.data_in[0].as_os_str().as_bytes(), b"/d\xff");
    }
}
