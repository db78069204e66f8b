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
//! The text is bytes. Paths on Linux are bytes, too, but what is kept of a job and sent to agents is text: a path that is
//! not UTF-8, or holds control characters, is refused.
//!
//! A script is hostile until it is read. What is looked at, and what is answered, is bounded: [`MOST_HEAD`],
//! [`MOST_LINE`], [`MOST_ERRORS`], [`MOST_DIRECTORIES`], [`MOST_PATH`]. `slurm/job_submit.lua` has the same bounds.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use ondeck_core::striping::{MOST_OPTIONS, StripingChoiceError};
use ondeck_core::text::plain;
use ondeck_core::{
    Bytes, Contradiction, EngineKind, IoIntensity, PackFormat, Request, StripingChoice, StripingDirectory,
    WaitPolicy, duration,
};

/// Lines that begin beyond so many bytes of a script are not looked at.
pub const MOST_HEAD: usize = 1 << 20;

/// A longer line is refused: the longest path, quotes, the key and some room for a comment.
pub const MOST_LINE: usize = 4608;

/// So many errors, and so many warnings, are told.
pub const MOST_ERRORS: usize = 20;

/// Directories of one job: each is a mount on every one of its nodes.
pub const MOST_DIRECTORIES: usize = 64;

/// The bytes of a path: Linux's PATH_MAX without the NUL.
pub const MOST_PATH: usize = 4095;

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
    Layout,
    LayoutDir,
    Io,
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
    ("RSA_LAYOUT", Key::Layout),
    ("RSA_LAYOUT_DIR", Key::LayoutDir),
    ("RSA_IO", Key::Io),
];

/// Reads the directives at the head of `script`, of which something may be said elsewhere, too, such as by options.
///
/// # Errors
/// Every malformed directive, in the order of their lines, so that a user mends them all at once: the first
/// [`MOST_ERRORS`].
///
/// ```
/// let script = b"#!/bin/bash\n#RSA_DATA_IN=/case/input\n#RSA_DATA_OUT=/case/results\n./solver\n";
/// let parsed = ondeck_directive::parse(script).unwrap();
/// assert_eq!(parsed.request.data_in, ["/case/input"].map(std::path::PathBuf::from));
/// ```
pub fn parse(script: &[u8]) -> Result<Parsed, Vec<DirectiveError>> {
    read(script).map(|(parsed, _)| parsed)
}

/// Reads the directives of a script that is all there is to know, as of one that is given to sbatch.
///
/// # Errors
/// As [`parse`], and a directive that makes no sense beside the others.
pub fn parse_alone(script: &[u8]) -> Result<Parsed, Vec<DirectiveError>> {
    let (parsed, seen) = read(script)?;
    let Some(contradiction) = parsed.request.contradiction() else { return Ok(parsed) };
    let key = match contradiction {
        Contradiction::StageInWithoutInput => Key::StageIn,
        Contradiction::StageOutWithoutOutput | Contradiction::StageOutAndPack => Key::StageOut,
        Contradiction::HoldWithoutData => Key::Wait,
    };
    let line = seen.iter().find(|(known, _)| *known == key).map_or(1, |(_, line)| *line);
    let name = KEYS.iter().find(|(_, known)| *known == key).map_or("RSA_", |(name, _)| name);
    let (problem, remedy) = split_remedy(contradiction);
    Err(vec![DirectiveError { line, key: name.to_owned(), problem, remedy }])
}

/// The keys that a script has, each with its line.
type SeenKeys = Vec<(Key, usize)>;

fn read(script: &[u8]) -> Result<(Parsed, SeenKeys), Vec<DirectiveError>> {
    let mut parsed = Parsed::default();
    let mut errors = Vec::new();
    let mut seen = SeenKeys::new();
    let mut in_head = true;
    let mut begins = 0;
    for (index, line) in script.split(|b| *b == b'\n').enumerate() {
        if begins >= MOST_HEAD || errors.len() == MOST_ERRORS || parsed.warnings.len() == MOST_ERRORS {
            break;
        }
        begins += line.len() + 1;
        let number = index + 1;
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let Some(text) = line.strip_prefix(b"#RSA_") else {
            let trimmed = line.trim_ascii();
            in_head &= trimmed.is_empty() || trimmed.starts_with(b"#");
            if in_head && is_slurms_own(line) {
                errors.push(slurms_own(number, line));
                continue;
            }
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
    if errors.is_empty() { Ok((parsed, seen)) } else { Err(errors) }
}

/// Whether Slurm's own burst buffer plugin would read a size or a pool out of a line, and wait for what nobody has: it takes each
/// line that begins with `#RSA` for one of its own.
fn is_slurms_own(line: &[u8]) -> bool {
    let says = |rest: &[u8], word: &[u8]| rest.windows(word.len()).any(|part| part == word);
    line.strip_prefix(b"#RSA").is_some_and(|rest| says(rest, b"capacity=") || says(rest, b"pool="))
}

fn slurms_own(line: usize, text: &[u8]) -> DirectiveError {
    DirectiveError {
        line,
        key: preview(text),
        problem: "Slurm would take it for its own, and have the job wait for space that Slurm does not count"
            .into(),
        remedy: "write #RSA_CAPACITY=SIZE and #RSA_POOL=NAME".into(),
    }
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
    seen: &mut SeenKeys,
    request: &mut Request,
) -> Result<(), Box<DirectiveError>> {
    let looked_at = &text[..text.len().min(MOST_LINE)];
    let equals = looked_at.iter().position(|b| *b == b'=');
    let word =
        format!("RSA_{}", String::from_utf8_lossy(&looked_at[..equals.unwrap_or(looked_at.len())]).trim());
    let fail = |problem: String, remedy: String| {
        Box::new(DirectiveError { line, key: plain(&word, PREVIEW), problem, remedy })
    };
    if text.len() + "#RSA_".len() > MOST_LINE {
        return Err(fail(format!("the line is longer than {MOST_LINE} bytes"), "shorten it".into()));
    }
    let Some((name, key)) = KEYS.iter().find(|(name, _)| *name == word) else {
        return Err(fail("there is no such directive".into(), nearest(&word)));
    };
    let Some(equals) = equals else {
        return Err(fail("it has no value".into(), format!("write #{name}=VALUE")));
    };
    let value = value_of(&text[equals + 1..])
        .map_err(|problem| fail(problem.into(), format!("write #{name}=VALUE or #{name}=\"VALUE\"")))?;
    // How many directories of a kind there are already, of a line that may be repeated.
    let directories = match key {
        Key::DataIn | Key::DataOut => Some(request.data_in.len() + request.data_out.len()),
        Key::LayoutDir => Some(request.striping.directories.len()),
        _ => None,
    };
    if let Some((_, first)) = seen.iter().find(|(k, _)| k == key)
        && directories.is_none()
    {
        return Err(fail(format!("it was given before, in line {first}"), "remove one of the two".into()));
    }
    if directories == Some(MOST_DIRECTORIES) {
        let problem = format!("a job has at most {MOST_DIRECTORIES} directories");
        return Err(fail(problem, "name a directory that holds several of them".into()));
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
        Key::Layout => request.striping.choice = Some(striping(value)?),
        Key::LayoutDir => request.striping.directories.push(striping_directory(value)?),
        Key::Io => request.io = Some(word(value, IoIntensity::from_word, IoIntensity::WORDS)?),
    }
    Ok(())
}

fn striping(value: &[u8]) -> Result<StripingChoice, Refusal> {
    StripingChoice::parse(text(value)?).map_err(|error| {
        let remedy = match error {
            StripingChoiceError::Unknown => {
                format!("write {}, or options like -c 4", StripingChoice::WORDS.join(", "))
            }
            StripingChoiceError::Characters => "write options like -E 16M -c 1 -E -1 -c 4".to_owned(),
            StripingChoiceError::Long => format!("a layout needs less than {MOST_OPTIONS}"),
        };
        (format!("`{}`: {error}", preview(value)), remedy)
    })
}

/// `DIR`, `DIR:PATTERN`, `DIR:keep` or `DIR:PATTERN:keep`: no pattern holds a colon, so the last one divides.
fn striping_directory(value: &[u8]) -> Result<StripingDirectory, Refusal> {
    const REMEDY: &str = "write DIR, DIR:PATTERN or DIR:PATTERN:keep; of a name with a colon, DIR:auto";
    let (rest, keep) = match value.strip_suffix(b":keep") {
        Some(rest) => (rest, true),
        None => (value, false),
    };
    let (directory, choice) = match rest.iter().rposition(|byte| *byte == b':') {
        Some(colon) => (&rest[..colon], Some(&rest[colon + 1..])),
        None => (rest, None),
    };
    if directory.is_empty() {
        return Err(("it names no directory".to_owned(), REMEDY.to_owned()));
    }
    let choice = match choice.map(striping).transpose() {
        Ok(choice) => choice,
        Err((problem, _)) => return Err((problem, REMEDY.to_owned())),
    };
    Ok(StripingDirectory { path: path(directory)?, choice, keep })
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
    let path = Path::new(OsStr::from_bytes(value));
    check_path(path).map_err(split_remedy)?;
    Ok(path.to_owned())
}

/// Why a path can't be one of a job's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// What is kept and sent of a job is text.
    #[error("the path is not UTF-8 text; rename it, or use another")]
    NotText,
    /// It would reach terminals and logs.
    #[error("the path holds control characters; rename it, or use another")]
    Control,
    /// The kernel would not take it.
    #[error("the path is longer than {MOST_PATH} bytes; use a directory nearer to the root")]
    Long,
    /// It leads elsewhere when a directory on the way is replaced.
    #[error("the path holds `..`; write it without")]
    Parent,
}

/// Whether a path, absolute or not, can be one of a job's.
///
/// # Errors
/// [`PathError`].
pub fn check_path(path: &Path) -> Result<(), PathError> {
    let text = path.to_str().ok_or(PathError::NotText)?;
    if text.len() > MOST_PATH {
        Err(PathError::Long)
    } else if text.chars().any(char::is_control) {
        Err(PathError::Control)
    } else if path.components().any(|part| part == Component::ParentDir) {
        Err(PathError::Parent)
    } else {
        Ok(())
    }
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
        .map(|(name, _)| (strsim::damerau_levenshtein(&plain(word, PREVIEW), name), *name))
        .min()
        .filter(|(distance, _)| *distance <= 4);
    match best {
        Some((_, name)) => format!("did you mean {name}?"),
        None => "the user guide lists them all".to_owned(),
    }
}

/// The characters of a value or a key that a message shows.
const PREVIEW: usize = 120;

/// Enough of a value for a message, and never more than a line of it.
fn preview(bytes: &[u8]) -> String {
    // No character takes more bytes.
    let enough = &bytes[..bytes.len().min(4 * (PREVIEW + 1))];
    plain(&String::from_utf8_lossy(enough), PREVIEW)
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
    fn a_line_says_how_much_a_job_uses_the_disk() {
        for word in IoIntensity::WORDS {
            let parsed = parse(format!("#RSA_IO={word}\n").as_bytes()).unwrap();
            assert_eq!(parsed.request.io, IoIntensity::from_word(word));
        }
        assert_eq!(parse(b"#RSA_LAYOUT=auto\n").unwrap().request.io, None);
        assert!(one_error("#RSA_IO=Heavy\n").contains("write heavy, normal"));
        assert!(one_error("#RSA_IO=heavy\n#RSA_IO=normal\n").contains("given before, in line 1"));
    }

    #[test]
    fn lines_of_layouts_are_read_with_their_patterns() {
        let request = |script: &str| parse(script.as_bytes()).unwrap().request;
        let asked = request(
            "#RSA_LAYOUT=\"-E 1G -c 1 -E -1 -c 8\" # large files\n#RSA_LAYOUT_DIR=/a\n#RSA_LAYOUT_DIR=b:shared\n\
             #RSA_LAYOUT_DIR=/c:-c 4 -S 4M:keep\n#RSA_LAYOUT_DIR=/d:keep\n#RSA_LAYOUT_DIR=\"/e:f:auto\"\n\
             #RSA_LAYOUT_DIR=/$(touch x)\n",
        )
        .striping;
        let options = |text: &str| StripingChoice::Options(text.into());
        assert_eq!(asked.choice, Some(options("-E 1G -c 1 -E -1 -c 8")));
        let directory = |path: &str, choice, keep| StripingDirectory { path: path.into(), choice, keep };
        assert_eq!(
            asked.directories,
            [
                directory("/a", None, false),
                directory("b", Some(StripingChoice::Shared), false),
                directory("/c", Some(options("-c 4 -S 4M")), true),
                directory("/d", None, true),
                directory("/e:f", Some(StripingChoice::Auto), false),
                directory("/$(touch x)", None, false),
            ]
        );
        for word in StripingChoice::WORDS {
            assert!(request(&format!("#RSA_LAYOUT={word}\n")).striping.choice.is_some());
        }
        for (script, part) in [
            (
                "#RSA_LAYOUT=Shared\n",
                "write auto, shared, file-per-process, single, unknown, none, or options",
            ),
            ("#RSA_LAYOUT=lfs setstripe -c 4\n", "neither a word for a layout nor options"),
            ("#RSA_LAYOUT=\"-c 4; touch x\"\n", "letters, digits, blanks"),
            ("#RSA_LAYOUT=auto\n#RSA_LAYOUT=none\n", "given before, in line 1"),
            ("#RSA_LAYOUT_DIR=/a:sharde\n", "`sharde`: it is neither a word"),
            ("#RSA_LAYOUT_DIR=:shared\n", "it names no directory"),
            ("#RSA_LAYOUT_DIR=:keep\n", "it names no directory"),
            ("#RSA_LAYOUT_DIR=$SCRATCH:shared\n", "not expanded"),
            ("#RSA_LAYOUT_DIR=a/../b:shared\n", "holds `..`"),
            ("#RSA_LAYOUT_DIR=/a:\n", "neither a word"),
        ] {
            let error = one_error(script);
            assert!(error.contains(part), "{script}: {error}");
        }
        // A directory may be called so.
        assert_eq!(
            request("#RSA_LAYOUT_DIR=/a:keep:shared\n").striping.directories[0].path,
            PathBuf::from("/a:keep")
        );
        let many = "#RSA_LAYOUT_DIR=/a\n".repeat(MOST_DIRECTORIES + 1);
        assert!(one_error(&many).contains("at most 64 directories"));
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
    fn a_path_that_can_not_be_kept_as_text_is_refused() {
        for (value, part) in [
            (&b"/d\xff"[..], "not UTF-8"),
            (b"/d\x1b[2J", "control characters"),
            ("/d\u{9b}x".as_bytes(), "control characters"),
            (b"/d\tx", "control characters"),
            (b"../in", "holds `..`"),
            (b"/a/../in", "holds `..`"),
        ] {
            for key in ["DATA_IN", "DATA_OUT", "STAGE_IN", "STAGE_OUT"] {
                let script = [b"#RSA_", key.as_bytes(), b"=", value, b"x\n"].concat();
                let errors = parse(&script).unwrap_err();
                let said = errors[0].to_string();
                assert!(errors.len() == 1 && said.contains(part), "{said}");
                assert!(!said.chars().any(char::is_control), "{said:?}");
            }
        }
        assert!(parse(b"#RSA_DATA_IN=/a..b/..c/d..\n").is_ok());
        let long = |length: usize| format!("#RSA_DATA_IN=/{}\n", "x".repeat(length - 1));
        assert!(parse(long(MOST_PATH).as_bytes()).is_ok());
        assert!(one_error(&long(MOST_PATH + 1)).contains("longer than 4095 bytes"));
        assert!(one_error(&long(MOST_LINE)).contains("line is longer than 4608 bytes"));
    }

    #[test]
    fn a_job_has_a_bounded_number_of_directories() {
        let lines = |count: usize| {
            let line = |number: usize| {
                format!("#RSA_DATA_{}=/d{number}\n", if number.is_multiple_of(2) { "IN" } else { "OUT" })
            };
            (0..count).map(line).collect::<String>()
        };
        assert!(parse(lines(MOST_DIRECTORIES).as_bytes()).is_ok());
        assert!(
            one_error(&lines(MOST_DIRECTORIES + 1)).starts_with("line 65: RSA_DATA_IN: a job has at most 64")
        );
    }

    #[test]
    fn what_makes_no_sense_beside_the_others_is_refused_in_a_script_alone() {
        for (script, message) in [
            (
                "\n#RSA_STAGE_IN=x\n",
                "line 2: RSA_STAGE_IN: a stage-in script needs an input directory to read from; name one",
            ),
            (
                "#RSA_DATA_IN=a\n#RSA_STAGE_OUT=x\n",
                "line 2: RSA_STAGE_OUT: a stage-out script needs an output directory to write to; name one",
            ),
            (
                "#RSA_DATA_OUT=a\n#RSA_PACK=tar\n#RSA_POSTPROCESS=x\n",
                "line 3: RSA_STAGE_OUT: a stage-out script and packing exclude each other; let the script pack",
            ),
            ("#RSA_WAIT=hold\n", "line 1: RSA_WAIT: there is no data directory to wait for; name one"),
        ] {
            let errors = parse_alone(script.as_bytes()).unwrap_err();
            assert_eq!(errors.iter().map(ToString::to_string).collect::<Vec<_>>(), [message]);
            // Options may add what is missing.
            assert!(parse(script.as_bytes()).is_ok());
        }
        let fine = b"#RSA_DATA_IN=a\n#RSA_DATA_OUT=b\n#RSA_STAGE_IN=x\n#RSA_STAGE_OUT=y\n#RSA_WAIT=hold\n";
        assert!(parse_alone(fine).is_ok());
        assert!(parse_alone(b"#RSA_CAPACITY=1G\n").is_ok());
    }

    #[test]
    fn a_hostile_script_is_judged_at_once_and_in_few_words() {
        let long = |line: &[u8]| line.repeat((4 << 20) / line.len());
        for script in [
            long(b"#RSA_X=1\n"),
            long(b"#RSA_DATA_IN=/x\n"),
            long(b"echo\n#RSA_DATA_IN=/x\n"),
            long(b"# RSA_DATA_IN=/x\n"),
            [&b"#RSA_DELAY="[..], &long(b"1s")].concat(),
            [&b"#RSA_"[..], &long(b"\xff")].concat(),
            long(b"\n"),
        ] {
            let begin = std::time::Instant::now();
            match parse_alone(&script) {
                Ok(parsed) => assert!(parsed.warnings.len() <= MOST_ERRORS),
                Err(errors) => assert!(errors.len() <= MOST_ERRORS),
            }
            assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
        }
    }

    #[test]
    fn only_the_head_is_looked_at() {
        let behind = |blanks: usize| [&b"\n".repeat(blanks)[..], b"#RSA_DATA_IN=/x\n"].concat();
        assert_eq!(parse(&behind(MOST_HEAD - 1)).unwrap().directives, 1);
        assert_eq!(parse(&behind(MOST_HEAD)).unwrap().directives, 0);
    }
}
