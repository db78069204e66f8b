//! `slurm/job_submit.lua` says the same as the parser of directives.
//!
//! It needs a Lua interpreter (`apt-get install lua5.3`), and is skipped without one.

#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::process::{Command, Stdio};

use ondeck_core::WaitPolicy;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

const LUA: &[&str] = &["lua5.3", "lua5.4", "lua5.2", "lua5.1", "luajit", "lua"];

/// Reads scripts, each as the offset of the component, the script's length on a line and then its bytes, and answers a line for each: how the plugin decided,
/// the priority and the AdminComment that it gave, in how many seconds the job may begin, and what its user was told.
const DRIVER: &str = r#"
slurm = { SUCCESS = 0, ERROR = -1 }
local said
slurm.log_user = function(format, ...) said = string.format(format, ...) end
slurm.log_info = function(format, ...) said = "INTERNAL " .. string.format(format, ...) end
dofile(arg[1])
while true do
    local line = io.read("*l")
    if not line then break end
    local offset, length = line:match("(%d+) (%d+)")
    local desc = {
        script = io.read(tonumber(length)) or "", priority = 4294967294, het_job_offset = tonumber(offset),
        begin_time = tonumber(arg[2] or "0"),
    }
    said = ""
    -- So many instructions, whatever else the machine does. The plugin reports the error as one of its own.
    debug.sethook(function() error("it keeps slurmctld busy") end, "", 3000000)
    local result = slurm_job_submit(desc, {}, 1000)
    debug.sethook()
    io.write(result == 0 and "accepted" or "refused", "\t", desc.priority == 0 and "held" or "free", "\t",
        desc.admin_comment or "", "\t", desc.begin_time == 0 and "at once" or desc.begin_time - os.time(), "\t", (said:gsub("\n", "|")), "\n")
end
"#;

struct Answer {
    accepted: bool,
    held: bool,
    comment: String,
    /// When it may begin: `at once`, or in so many seconds.
    begins: String,
    said: String,
}

/// What Slurm has for the offset of a job that is no component.
const NO_COMPONENT: u32 = 4_294_967_294;

/// What the plugin makes of every script; nothing without an interpreter.
fn submit(scripts: &[Vec<u8>]) -> Option<Vec<Answer>> {
    submit_as(NO_COMPONENT, scripts)
}

fn submit_as(offset: u32, scripts: &[Vec<u8>]) -> Option<Vec<Answer>> {
    submit_beginning(offset, 0, scripts)
}

/// The same of jobs whose user has said when they begin, in seconds since 1970; 0 is nothing.
fn submit_beginning(offset: u32, begin: u64, scripts: &[Vec<u8>]) -> Option<Vec<Answer>> {
    let plugin = concat!(env!("CARGO_MANIFEST_DIR"), "/../../slurm/job_submit.lua");
    let folder = tempfile::tempdir().unwrap();
    let driver = folder.path().join("driver.lua");
    std::fs::write(&driver, DRIVER).unwrap();
    let spawn = |lua: &&str| {
        let mut command = Command::new(lua);
        command.arg(&driver).arg(plugin).arg(begin.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.spawn().ok()
    };
    let Some(mut child) = LUA.iter().find_map(spawn) else {
        ondeck_skip::skipped("there is no Lua interpreter; install lua5.3");
        return None;
    };
    let mut input = child.stdin.take().unwrap();
    let scripts_owned = scripts.to_vec();
    let writer = std::thread::spawn(move || {
        for script in scripts_owned {
            input.write_all(format!("{offset} {}\n", script.len()).as_bytes()).unwrap();
            input.write_all(&script).unwrap();
        }
    });
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success());
    let answers: Vec<Answer> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| {
            let mut parts = line.splitn(5, '\t').map(str::to_owned);
            let mut part = || parts.next().unwrap();
            let (accepted, held) = (part() == "accepted", part() == "held");
            Answer { accepted, held, comment: part(), begins: part(), said: part() }
        })
        .collect();
    assert_eq!(answers.len(), scripts.len());
    Some(answers)
}

/// Both must agree on what is refused, which lines are wrong, and whether the job is held.
fn compare(scripts: &[Vec<u8>]) {
    let Some(answers) = submit(scripts) else { return };
    for (script, answer) in scripts.iter().zip(answers) {
        let shown = script.escape_ascii();
        assert!(!answer.said.starts_with("INTERNAL"), "{shown}: {}", answer.said);
        match ondeck_directive::parse_alone(script) {
            Ok(parsed) => {
                assert!(answer.accepted, "only Lua refuses {shown}: {}", answer.said);
                let wait = parsed.request.wait;
                let held =
                    wait == Some(WaitPolicy::Hold) || wait.is_none() && parsed.request.stage_in.is_some();
                assert_eq!(answer.held, held, "{shown}");
                assert_eq!(answer.comment, if held { ondeck_wlm::HELD_FOR_INPUT } else { "" });
            }
            Err(errors) => {
                assert!(!answer.accepted, "only Rust refuses {shown}: {errors:?}");
                assert!(!answer.held);
                for error in errors {
                    let line = format!("line {}: ", error.line);
                    assert!(answer.said.contains(&line), "{shown}: {} and not {error}", answer.said);
                }
            }
        }
    }
}

#[test]
fn the_plugin_and_the_parser_agree_on_every_kind_of_line() {
    let lines: &[&[u8]] = &[
        b"",
        b"#!/bin/sh",
        b"echo",
        b"# RSA_DATA_IN=/x",
        b"  #RSA_X=1",
        b"echo\n#RSA_X=1",
        b"\n\n#RSA_X=1",
        b"#RSA capacity=1 pool=x",
        b"#RSA pool=x",
        b"#RSAcapacity=1",
        b"#RSApool=1",
        b"#RSA is a storage accelerator",
        b"#RSA\tx capacity=",
        b"# RSA capacity=1",
        b"echo\n#RSA capacity=1",
        b"#RSA_",
        b"#RSA_=1",
        b"#RSA_DATA_IN",
        b"#RSA_DATA_IN=",
        b"#RSA_DATA_IN= ",
        b"#RSA_DATA_IN=/x",
        b"#RSA_DATA_IN =/x",
        b"#RSA_ DATA_IN=/x",
        b"#RSA_data_in=/x",
        b"#RSA_DATAIN=/x",
        b"#RSA_DATA_IN=x y",
        b"#RSA_DATA_IN=rel/../x",
        b"#RSA_DATA_IN=~/x",
        b"#RSA_DATA_IN=$HOME/x",
        b"#RSA_DATA_IN='~/x'",
        b"#RSA_DATA_IN=/d\xff",
        b"#RSA_DATA_IN=/d\0x",
        b"#RSA_DATA_IN=\"/x\"",
        b"#RSA_DATA_IN=\"/x",
        b"#RSA_DATA_IN=\"/x\" # c",
        b"#RSA_DATA_IN=\"/x\"y",
        b"#RSA_DATA_IN=\"\"",
        b"#RSA_DATA_IN=# c",
        b"#RSA_DATA_IN= # c",
        b"#RSA_DATA_IN=/x#y",
        b"#RSA_DATA_IN=/x # y",
        b"#RSA_DATA_IN=/x\r",
        b"#RSA_DATA_IN=/a\n#RSA_DATA_IN=/b",
        b"#RSA_DELAY=1\n#RSA_DELAY=2",
        b"#RSA_STAGE_IN=/a\n#RSA_PREPROCESS=/b",
        b"#RSA_DELAY=no\n#RSA_DELAY=2",
        b"#RSA_DELAY=\n#RSA_DELAY=2",
        b"#RSA_STAGE_IN=/a",
        b"#RSA_STAGE_IN=/a\n#RSA_WAIT=disk",
        b"#RSA_PREPROCESS=/a\n#RSA_WAIT=union",
        b"#RSA_WAIT=hold",
        b"#RSA_WAIT=disk",
        b"#RSA_WAIT=Hold",
        b"#RSA_WAIT=\xff",
        b"#RSA_STAGE_OUT=/x",
        b"#RSA_POSTPROCESS=/x",
        b"#RSA_POOL=fast",
        b"#RSA_POOL=f\xff",
        b"#RSA_ENGINE=ceph",
        b"#RSA_ENGINE=simulated",
        b"#RSA_PACK=tar.zst",
        b"#RSA_PACK=zip",
        b"#RSA_NODES=4",
        b"#RSA_NODES=0",
        b"#RSA_NODES=+4",
        b"#RSA_NODES=-4",
        b"#RSA_NODES=4294967295",
        b"#RSA_NODES=4294967296",
        b"#RSA_NODES=00000000000007",
        b"#RSA_NODES=4 4",
        b"#RSA_NODES=99999999999999999999999",
        b"#RSA_CAPACITY=4GiB",
        b"#RSA_CAPACITY=4 gib",
        b"#RSA_CAPACITY=4gb",
        b"#RSA_CAPACITY=0",
        b"#RSA_CAPACITY=0.0G",
        b"#RSA_CAPACITY=0.5",
        b"#RSA_CAPACITY=1.5T",
        b"#RSA_CAPACITY=.5G",
        b"#RSA_CAPACITY=5.G",
        b"#RSA_CAPACITY=.",
        b"#RSA_CAPACITY=1..5G",
        b"#RSA_CAPACITY=G",
        b"#RSA_CAPACITY=4 X",
        b"#RSA_CAPACITY=1e9",
        b"#RSA_CAPACITY=-1",
        b"#RSA_CAPACITY=18446744073709551615",
        b"#RSA_CAPACITY=18446744073709551616",
        b"#RSA_CAPACITY=18446744073709551616.0",
        b"#RSA_CAPACITY=16383P",
        b"#RSA_CAPACITY=16384P",
        b"#RSA_CAPACITY=18446PB",
        b"#RSA_CAPACITY=18447PB",
        b"#RSA_CAPACITY=16383.9P",
        b"#RSA_CAPACITY=\x0b4G\x0b",
        b"#RSA_OUT_SIZE=1G",
        b"#RSA_OUT_SIZE=big",
        b"#RSA_CAPACITY=4\xc3\xa4",
        b"#RSA_DELAY=0",
        b"#RSA_DELAY=300",
        b"#RSA_DELAY=90s",
        b"#RSA_DELAY=1h30m",
        b"#RSA_DELAY=1h 30m",
        b"#RSA_DELAY=1 h",
        b"#RSA_DELAY=1h30",
        b"#RSA_DELAY=5 parsecs",
        b"#RSA_DELAY=soon",
        b"#RSA_DELAY=-5m",
        b"#RSA_DELAY=36600d",
        b"#RSA_DELAY=36601d",
        b"#RSA_DELAY=99999999999999999999s",
        b"#RSA_DELAY=1H",
        b"#RSA_DELAY=00000000000000000000000001s",
        b"#RSA_COPY_OUT_INTERVAL=5",
        b"#RSA_COPY_OUT_INTERVAL=0",
        b"#RSA_COPY_OUT_INTERVAL=0s",
        b"#RSA_COPY_OUT_INTERVAL=1min",
        b"\x0b\n#RSA_X=1",
        b"\x0c\n#RSA_X=1",
        b"#RSA_X=%s%d\n#RSA_Y=\xff\0",
        b"#RSA_DATA_IN=..",
        b"#RSA_DATA_IN=../in",
        b"#RSA_DATA_IN=/a/..",
        b"#RSA_DATA_IN=..a/b../.../.",
        b"#RSA_STAGE_IN=../x",
        b"#RSA_DATA_OUT=/d\x1b[2J",
        b"#RSA_DATA_OUT=/d\tx",
        b"#RSA_DATA_OUT=/d\x7f",
        b"#RSA_DATA_OUT=/d\xc2\x80",
        b"#RSA_DATA_OUT=/d\xc2\x9f",
        b"#RSA_DATA_OUT=/d\xc2\xa0",
        b"#RSA_STAGE_OUT=/d\xed\xa0\x80",
        b"#RSA_DATA_IN=a\n#RSA_STAGE_IN=x",
        b"#RSA_DATA_OUT=a\n#RSA_STAGE_IN=x",
        b"#RSA_DATA_IN=a\n#RSA_STAGE_OUT=x",
        b"#RSA_DATA_OUT=a\n#RSA_STAGE_OUT=x",
        b"#RSA_DATA_OUT=a\n#RSA_STAGE_OUT=x\n#RSA_PACK=tar",
        b"#RSA_DATA_OUT=a\n#RSA_PACK=tar\n#RSA_POSTPROCESS=x",
        b"#RSA_DATA_OUT=a\n#RSA_PACK=zip\n#RSA_POSTPROCESS=x",
        b"#RSA_DATA_OUT=a\n#RSA_PACK=tar",
        b"#RSA_WAIT=hold\n#RSA_DATA_IN=a",
        b"#RSA_WAIT=hold\n#RSA_DATA_OUT=a",
        b"#RSA_WAIT=hold\n#RSA_CAPACITY=1G",
        b"#RSA_WAIT=hold\n#RSA_DATA_IN=~/x",
        b"#RSA_DATA_IN=a\n#RSA_STAGE_IN=x\n#RSA_WAIT=disk",
        b"#RSA_LAYOUT=auto",
        b"#RSA_LAYOUT=shared",
        b"#RSA_LAYOUT=file-per-process",
        b"#RSA_LAYOUT=single",
        b"#RSA_LAYOUT=unknown",
        b"#RSA_LAYOUT=none",
        b"#RSA_LAYOUT=None",
        b"#RSA_LAYOUT=keep",
        b"#RSA_LAYOUT=\xff",
        b"#RSA_LAYOUT=-\xff",
        b"#RSA_LAYOUT=\"-E 1G -c 1 -E -1 -c 72\" # c",
        b"#RSA_LAYOUT=-E 1G -c 1 -E -1 -c 72",
        b"#RSA_LAYOUT=-c 1;touch x",
        b"#RSA_LAYOUT=-c $(touch x)",
        b"#RSA_LAYOUT=-c\t1",
        b"#RSA_LAYOUT=-c 1:keep",
        b"#RSA_LAYOUT=lfs setstripe -c 1",
        b"#RSA_LAYOUT=auto\n#RSA_LAYOUT=none",
        b"#RSA_LAYOUT=auto\n#RSA_DATA_OUT=a",
        b"#RSA_LAYOUT_DIR",
        b"#RSA_LAYOUT_DIR=/a",
        b"#RSA_LAYOUT_DIR=a b:shared",
        b"#RSA_LAYOUT_DIR=/a:sharde",
        b"#RSA_LAYOUT_DIR=/a:",
        b"#RSA_LAYOUT_DIR=:",
        b"#RSA_LAYOUT_DIR=::",
        b"#RSA_LAYOUT_DIR=:auto",
        b"#RSA_LAYOUT_DIR=:keep",
        b"#RSA_LAYOUT_DIR=keep",
        b"#RSA_LAYOUT_DIR=/a:keep",
        b"#RSA_LAYOUT_DIR=/a:keep:keep",
        b"#RSA_LAYOUT_DIR=/a:keep:auto",
        b"#RSA_LAYOUT_DIR=/a:auto:keep",
        b"#RSA_LAYOUT_DIR=/a:-c 4:keep",
        b"#RSA_LAYOUT_DIR=/a:-c \xff",
        b"#RSA_LAYOUT_DIR=/a\xff:-c 4",
        b"#RSA_LAYOUT_DIR=/a:b:none",
        b"#RSA_LAYOUT_DIR=/$(touch x)",
        b"#RSA_LAYOUT_DIR=$HOME/x:auto",
        b"#RSA_LAYOUT_DIR=../x:auto",
        b"#RSA_LAYOUT_DIR=/a/..:auto",
        b"#RSA_LAYOUT_DIR=\"/a:shared\" # c",
        b"#RSA_LAYOUT_DIR=/a\n#RSA_LAYOUT_DIR=/a",
        b"#RSA_LAYOUT_DIR=/a\n#RSA_WAIT=hold",
        b"#RSA_LAYOUT_DIR=/a\n#RSA_STAGE_OUT=x",
        b"#RSA_LAYOUT_DIR=/a:auto\x0b",
        b"#RSA_LAYOUT_DIR=/a :auto",
        b"#RSA_IO=heavy",
        b"#RSA_IO=normal # c",
        b"#RSA_IO=Heavy",
        b"#RSA_IO=\xff",
        b"#RSA_IO",
        b"#RSA_IO=",
        b"#RSA_IO=heavy\n#RSA_IO=heavy",
        b"#RSA_IO=heavy\n#RSA_WAIT=hold",
        b"#RSA_IO=heavy\n#RSA_DATA_IN=a",
    ];
    let mut scripts: Vec<Vec<u8>> = lines.iter().map(|line| line.to_vec()).collect();
    scripts.extend(lines.iter().map(|line| [b"#!/bin/bash\n#SBATCH -n1\n", *line, b"\n./solver\n"].concat()));
    compare(&scripts);
}

#[test]
fn the_plugin_and_the_parser_have_the_same_bounds() {
    let directories = |count: usize| b"#RSA_DATA_IN=/x\n".repeat(count);
    let path = |length: usize| [&b"#RSA_DATA_IN=/"[..], &b"x".repeat(length - 1)].concat();
    let line = |length: usize| [&b"#RSA_DELAY=1"[..], &b" ".repeat(length - 12)].concat();
    let behind = |blanks: usize| [&b"\n".repeat(blanks)[..], b"#RSA_X=1"].concat();
    compare(&[
        directories(64),
        directories(65),
        [directories(64), b"#RSA_DATA_OUT=/y".to_vec()].concat(),
        [b"#RSA_DATA_IN=~\n".to_vec(), directories(64)].concat(),
        path(4095),
        path(4096),
        b"#RSA_LAYOUT_DIR=/x\n".repeat(64),
        b"#RSA_LAYOUT_DIR=/x\n".repeat(65),
        [directories(64), b"#RSA_LAYOUT_DIR=/x\n".repeat(64)].concat(),
        [&b"#RSA_LAYOUT="[..], &b"-".repeat(1024)].concat(),
        [&b"#RSA_LAYOUT="[..], &b"-".repeat(1025)].concat(),
        [&b"#RSA_LAYOUT_DIR=/"[..], &b"x".repeat(4094), b":keep"].concat(),
        [&b"#RSA_LAYOUT_DIR=/"[..], &b"x".repeat(4095), b":keep"].concat(),
        line(4608),
        line(4609),
        [line(4608), b"\r".to_vec()].concat(),
        [&b"#"[..], &line(9000)].concat(),
        b"#RSA_X=1\n".repeat(20),
        [b"#RSA_X=1\n".repeat(19), b"echo\n#RSA_X=1".to_vec()].concat(),
        b"#RSA_X=1\n".repeat(1000),
        [b"\n".repeat((1 << 20) - 1), b"#RSA_X".to_vec()].concat(),
        [b"\n".repeat(1 << 20), b"#RSA_X".to_vec()].concat(),
        b"\n\n# x\n \t#\n#RSA_X=1\r\n\r\n#RSA_Y".to_vec(),
        b"#RSA_X=1\n \x0b\n#RSA_Y".to_vec(),
        b"#RSA_X=1\n \0#\n#RSA_Y".to_vec(),
        behind(1024 * 1024 - 1),
        behind(1024 * 1024),
    ]);
}

#[test]
fn slurmctld_is_not_kept_busy_by_a_hostile_script() {
    let long = |line: &[u8]| line.repeat((4 << 20) / line.len());
    let head = |text: &[u8]| [b"#!/bin/sh\n", text].concat();
    let scripts = [
        [&b"#RSA_DELAY="[..], &long(b"1s")].concat(),
        [&b"#RSA_DELAY="[..], &long(b"0")].concat(),
        [&b"#RSA_CAPACITY="[..], &long(b".")].concat(),
        [&b"#RSA_"[..], &long(b"A")].concat(),
        [&b"#RSA_DATA_IN="[..], &long(b" ")].concat(),
        head(&long(b"#RSA_DATA_IN=/x\n")),
        head(&long(b"#RSA_DELAY=1s1s1s1s1s1s1s\n")),
        head(&long(&[&b"#RSA_DATA_IN="[..], &b" ".repeat(4500), b"\n"].concat())),
        head(&long(b"#RSA_\xff\n")),
        [long(b"\n"), b"#RSA_".to_vec()].concat(),
        [long(b"#\n"), b"#RSA_".to_vec()].concat(),
        [long(b" "), b"\n#RSA_".to_vec()].concat(),
        [long(b" \n"), b"\n#RSA_".to_vec()].concat(),
        [b"\n".repeat((1 << 20) - 1), b"#RSA_DELAY=1s".to_vec()].concat(),
        [b"#\n".repeat((1 << 19) - 1), b"#RSA_DELAY=1s".to_vec()].concat(),
        [b" ".repeat((1 << 20) - 2), b"\n#RSA_DELAY=1s".to_vec()].concat(),
        long(b" \r#\n \n#RSA_DELAY=1s\n"),
        long(b"echo #RSA_"),
        head(&long(&[&b"#RSA_LAYOUT_DIR="[..], &b":".repeat(4500), b"\n"].concat())),
        head(&long(&[&b"#RSA_LAYOUT=-"[..], &b"c".repeat(4500), b"\n"].concat())),
        head(&long(b"#RSA_LAYOUT_DIR=/x:-c 4:keep\n")),
    ];
    for script in scripts {
        let shown = script[..40].escape_ascii();
        let mut took = Vec::new();
        // What else the machine does only makes it longer.
        let answers = loop {
            let begin = std::time::Instant::now();
            let Some(answers) = submit(std::slice::from_ref(&script)) else { return };
            took.push(begin.elapsed());
            if took.last().is_some_and(|took| *took < std::time::Duration::from_secs(1)) {
                break answers;
            }
            assert!(took.len() < 5, "{took:?}: {shown}");
        };
        assert!(!answers[0].said.starts_with("INTERNAL"), "{shown}: {}", answers[0].said);
        assert!(answers[0].said.len() < 20_000, "{shown}");
    }
}

#[test]
fn the_plugin_and_the_parser_agree_on_texts_by_chance() {
    let key = prop_oneof![
        Just("DATA_IN"),
        Just("STAGE_IN"),
        Just("DELAY"),
        Just("CAPACITY"),
        Just("NODES"),
        Just("POOL"),
        Just("ENGINE"),
        Just("WAIT"),
        Just("COPY_OUT_INTERVAL"),
        Just("LAYOUT"),
        Just("LAYOUT_DIR"),
        Just("IO"),
        Just("DELAy"),
        Just(" DELAY "),
    ];
    let value = prop_oneof![
        "[0-9]{1,21}(\\.[0-9]{0,3})? ?(k|KiB|MB|g|P|pb|s|min|h|d|x)?",
        "([0-9]{1,3} ?[smhd] ?){1,3}",
        "[ \t\"'#/a$~=0-9.+-]{0,12}",
        "hold|disk|union|tmpfs|ceph|tar|heavy|normal",
        "[/a:-]{0,4}(:|)(auto|shared|none|keep|-c 4|-[ c1;:]{0,4}|)(:keep|:|)",
        "\\PC{0,6}",
    ];
    let line = (key, value, any::<bool>(), any::<[u8; 2]>()).prop_map(|(key, value, odd, bytes)| {
        let mut line = format!("#RSA_{key}={value}").into_bytes();
        if odd && bytes[0] < 40 {
            line.extend(bytes);
        }
        line
    });
    let script = proptest::collection::vec(line, 1..3).prop_map(|lines| lines.join(&b'\n'));
    let mut runner = TestRunner::deterministic();
    let scripts: Vec<Vec<u8>> = (0..4000).map(|_| script.new_tree(&mut runner).unwrap().current()).collect();
    compare(&scripts);
}

#[test]
fn a_component_of_a_heterogeneous_job_is_not_held_and_its_user_is_told() {
    let scripts = [
        &b"#RSA_DATA_OUT=a\n"[..],
        b"#RSA_DATA_OUT=a\n#RSA_WAIT=hold\n#SBATCH hetjob\n",
        b"#RSA_DATA_IN=a\n#RSA_STAGE_IN=x\n",
        b"#RSA_NODES=1\n",
        b"#RSA_DATA_OUT=~/a\n",
    ]
    .map(<[u8]>::to_vec);
    let Some(answers) = submit_as(0, &scripts) else { return };
    for answer in &answers[..3] {
        assert!(answer.accepted && !answer.held && answer.comment.is_empty(), "{}", answer.said);
        assert!(answer.said.starts_with("no RAM disk: this job is heterogeneous"), "{}", answer.said);
    }
    let script_is_told = answers.iter().map(|answer| answer.said.contains("stage-in script is not run"));
    assert_eq!(script_is_told.collect::<Vec<_>>(), [false, false, true, false, false]);
    // It asks for nothing, or for what can't be obeyed.
    assert!(answers[3].accepted && answers[3].said.is_empty(), "{}", answers[3].said);
    assert!(!answers[4].accepted && answers[4].said.contains("line 1: "), "{}", answers[4].said);
}

#[test]
fn a_heavy_job_on_disk_begins_a_moment_later_unless_its_user_has_said_when() {
    let heavy = b"#RSA_IO=heavy\n".to_vec();
    let others = [
        &b"#RSA_IO=normal\n"[..],
        b"#RSA_LAYOUT=auto\n",
        b"#RSA_IO=heavy\n#RSA_DATA_OUT=a\n",
        b"echo\n#RSA_IO=heavy\n",
    ];
    let scripts: Vec<Vec<u8>> = std::iter::once(heavy.clone()).chain(others.map(<[u8]>::to_vec)).collect();
    let Some(answers) = submit(&scripts) else { return };
    // The clock may go on in between.
    assert!(["5", "4"].contains(&answers[0].begins.as_str()), "{}", answers[0].begins);
    assert!(answers.iter().all(|answer| answer.accepted && !answer.held && answer.comment.is_empty()));
    assert!(answers[1..].iter().all(|answer| answer.begins == "at once"));
    let component = submit_as(0, std::slice::from_ref(&heavy)).unwrap();
    assert_eq!(component[0].begins, "at once");
    let later = submit_beginning(NO_COMPONENT, 4_000_000_000, &[heavy]).unwrap();
    assert!(later[0].begins.parse::<u64>().unwrap() > 1_000_000_000, "{}", later[0].begins);
}

#[test]
fn a_user_is_told_line_key_and_remedy() {
    let script = b"#!/bin/sh\n#RSA_DELAY=soon\n#RSA_DATAIN=/x\n".to_vec();
    let Some(answers) = submit(&[script]) else { return };
    assert_eq!(
        answers[0].said,
        "the #RSA_ lines of this script can't be obeyed:|  line 2: RSA_DELAY: `soon` is not a duration: the number \
         is missing, too large or no whole number; write it like 90s, 5m or 1h30m|  line 3: RSA_DATAIN: there is no \
         such directive; did you mean RSA_DATA_IN?"
    );
    for script in [
        &b"#RSA_WAIT=hold\n#RSA_DATA_IN=../in\n"[..],
        b"#RSA_DATA_IN=/d\xff\n",
        b"#RSA_DATA_IN=/d\x1b\n",
        b"#RSA_STAGE_IN=x\n",
        b"#RSA_DATA_IN=a\n#RSA_STAGE_OUT=x\n",
        b"#RSA_DATA_OUT=a\n#RSA_STAGE_OUT=x\n#RSA_PACK=tar\n",
        b"#RSA_WAIT=hold\n",
        &[&b"#RSA_DATA_IN=/"[..], &b"x".repeat(4095)].concat(),
        &[&b"#RSA_DATA_IN=/"[..], &b"x".repeat(5000)].concat(),
        &b"#RSA_DATA_IN=/x\n".repeat(65),
    ] {
        let Some(answers) = submit(&[script.to_vec()]) else { return };
        let error = &ondeck_directive::parse_alone(script).unwrap_err()[0];
        let expected = format!("the #RSA_ lines of this script can't be obeyed:|  {error}");
        assert_eq!(answers[0].said, expected);
    }
}
