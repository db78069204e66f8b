//! `slurm/burst_buffer.lua`, where it can't run `ondeck burst-buffer`: Slurm never asks for a job's input again.
//!
//! It needs a Lua interpreter (`apt-get install lua5.3`), and is skipped without one.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

const LUA: &[&str] = &["lua5.3", "lua5.4", "lua5.2", "lua5.1", "luajit", "lua"];

/// Asks for the input of a job with this script. A pause lasts for no time, and after the second one there is a binary. Prints what the
/// plugin answers, after how many pauses, and the message.
const DRIVER: &str = r#"
slurm = { SUCCESS = 0, ERROR = -1, log_info = function() end }
local pauses, now = 0, 1000
os.time = function() return now end
os.execute = function(line)
    pauses, now = pauses + 1, now + tonumber(line:match("^sleep (%d+)$"))
    if pauses == 2 then
        local file = io.open(arg[3], "w")
        file:write("ONDECK=" .. arg[4] .. "\n")
        file:close()
    end
end
dofile(arg[1])
local result, message = slurm_bb_data_in(7, arg[2])
print(result == 0 and "success" or "error", pauses, message)
"#;

fn executable(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// What is answered for a job with this script; nothing without an interpreter.
fn data_in(script: &str, with_check: bool) -> Option<String> {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let slurm = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../slurm");
    if with_check {
        fs::copy(slurm.join("job_submit.lua"), path("job_submit.lua")).unwrap();
    }
    fs::write(path("driver.lua"), DRIVER).unwrap();
    fs::write(path("script"), script).unwrap();
    fs::write(path("ondeck.env"), "ONDECK=/nowhere/ondeck\n").unwrap();
    // It says with which limit it was asked.
    executable(&path("ondeck"), "#!/bin/sh\necho \"ondeck: done: it is in RAM ($4 $5)\"\n");
    let run = |lua: &&str| {
        let mut command = Command::new(lua);
        command.env("SLURM_CONF", path("slurm.conf")).arg(path("driver.lua"));
        command.arg(slurm.join("burst_buffer.lua")).args(["script", "ondeck.env", "ondeck"].map(path));
        command.output().ok()
    };
    let Some(ran) = LUA.iter().find_map(run) else {
        ondeck_skip::skipped("there is no Lua interpreter; install lua5.3");
        return None;
    };
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    Some(String::from_utf8(ran.stdout).unwrap().trim_end().to_owned())
}

#[test]
fn a_job_that_must_have_its_input_waits_for_a_binary_and_others_start_on_disk() {
    let waits = [
        "#!/bin/sh\n#RSA_DATA_IN=in\n#RSA_WAIT=hold\n",
        "#!/bin/sh\n#RSA_DATA_IN=in\n#RSA_STAGE_IN=unpack\n",
        "#!/bin/sh\n#RSA_DATA_IN=in\n#RSA_PREPROCESS=\"unpack\" # as in the thesis\n",
    ];
    let starts = [
        "#!/bin/sh\n#RSA_DATA_IN=in\n",
        "#!/bin/sh\n#RSA_DATA_IN=in\n#RSA_WAIT=disk\n",
        "#!/bin/sh\n#RSA_DATA_IN=in\n#RSA_STAGE_IN=unpack\n#RSA_WAIT=disk\n",
        // What can't be obeyed is not waited for, nor what is no line of the head.
        "#!/bin/sh\n#RSA_DATA_IN=in\n#RSA_WAIT=hold\n#RSA_NODES=none\n",
        "#!/bin/sh\n#RSA_DATA_IN=in\ntrue\n#RSA_WAIT=hold\n",
    ];
    for script in waits {
        for with_check in [true, false] {
            let Some(said) = data_in(script, with_check) else { return };
            assert_eq!(said, "success\t2\tit is in RAM (--limit 171980)", "{script}");
        }
    }
    for script in starts {
        let Some(said) = data_in(script, true) else { return };
        assert!(said.starts_with("success\t0\t") && said.ends_with("; the job works on disk"), "{said}");
    }
    // Without job_submit.lua a script is looked at for these lines alone.
    let said = data_in(starts[0], false).unwrap();
    assert!(said.starts_with("success\t0\t"), "{said}");
}
