//! The documents are true: what docs/admin.md and docs/user.md tell to type is typed, in a shell on a testbed that has
//! what a site has (MUNGE, Slurm, users, a shared disk) and nothing of Ondeck's but the binary.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use ondeck_testbed::available;

use crate::binary::ondeck_binary;
use crate::cluster::Turn;

const ADMIN: &str = include_str!("../../../docs/admin.md");
const USER: &str = include_str!("../../../docs/user.md");

/// A shell block that this comment precedes is run.
const RUN: &str = "<!-- run -->\n```sh\n";

/// What a site types that has a Prolog and an Epilog.
const MERGE: &str = "<!-- merge -->\n```sh\n";

/// What a site types to have Slurm keep jobs waiting itself.
const BURST_BUFFERS: &str = "<!-- burst buffers -->\n```sh\n";

/// For both documents; they take a fraction of it.
const SECONDS: u32 = 300;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The blocks of a document that are to be run, one after the other. The first command that fails ends it.
fn script(document: &str) -> String {
    let blocks: Vec<&str> =
        document.split(RUN).skip(1).map(|rest| rest.split_once("```").expect("the block ends").0).collect();
    assert!(blocks.len() > 3, "{blocks:?}");
    format!("set -e -x\n{}", blocks.join("\n"))
}

/// The block of the administrators' document behind such a marker that has this in it.
fn block(marker: &str, with: &str) -> String {
    let mut blocks =
        ADMIN.split(marker).skip(1).map(|rest| rest.split_once("```").expect("the block ends").0);
    blocks.find(|block| block.contains(with)).expect("the block is there").to_owned()
}

fn told(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn an_administrator_sets_a_site_up_and_a_user_runs_jobs_by_typing_what_the_documents_say() {
    if !available() {
        return;
    }
    let _turn = Turn::wait();
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for (name, text) in [("admin.sh", script(ADMIN)), ("user.sh", script(USER))] {
        fs::write(dir.path().join(name), text).unwrap();
    }
    let here = dir.path().display();
    // The administrator's shell goes on after the document, as its daemons do. In a list of commands `set -e` would mean
    // nothing.
    let output = type_in(
        dir.path(),
        &format!(
            "fail() {{ echo \"FAILED: $1\"; cat /run/ondeck-serve.log; tail -n 30 $BED/log/*.log; exit 1; }}\n\
             (. {here}/admin.sh) < /dev/null &\n\
             wait $! || fail admin.md\n\
             as alice sh -e {here}/user.sh < /dev/null || fail user.md\n\
             timeout 60 sh -c 'until ondeck status | grep \"no jobs\"; do sleep 0.2; done' || fail 'jobs are left'\n\
             for node in c1 c2; do ! on $node grep ondeck:job- /proc/self/mounts || fail \"mounts are left on $node\"; done\n\
             echo ALL BLOCKS WERE RUN\n"
        ),
    );
    let told = told(&output);
    assert!(output.status.success() && told.contains("ALL BLOCKS WERE RUN"), "{}\n{told}", output.status);
    // What the texts say about it.
    for what in [
        // The first job found its input in RAM.
        "ondeck:job-1-",
        "on deck",
        "100000 case/results/shuffled",
        // The jobs whose scripts failed.
        "the job stays held, because it may need what its stage-in script makes",
        "it said at last: no tape in the drive",
        "not yet on disk",
        "it is tried again",
        "n2 lends again",
        "ondeck_node_free_bytes{node=\"n1\",pool=\"default\"}",
    ] {
        assert!(told.contains(what), "no `{what}` in\n{told}");
    }
}

/// Types something into a shell on the testbed.
fn type_in(dir: &Path, typed: &str) -> Output {
    let mut shell = Command::new("timeout");
    shell.args([&format!("{SECONDS}"), env!("CARGO_BIN_EXE_ondeck-testbed")]);
    shell.args(["shell", "--hosts", "2", "--with-munge", "--with-slurm", "2"]);
    shell.env("ONDECK", ondeck_binary()).current_dir(root());
    for name in ["ONDECK_CONFIG", "SCRATCH", "STATE", "SLURM_CONF"] {
        shell.env_remove(name);
    }
    let typist = dir.join("typed");
    fs::write(&typist, typed).unwrap();
    shell.stdin(fs::File::open(&typist).unwrap()).stdout(Stdio::piped()).stderr(Stdio::piped());
    shell.output().unwrap()
}

#[test]
fn a_site_that_has_hooks_of_its_own_keeps_them() {
    if !available() {
        return;
    }
    let _turn = Turn::wait();
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let (configure, add) = (block(RUN, "[scheduler.pool.default]"), block(RUN, "slurm.conf.example"));
    let merge = block(MERGE, "site-$hook");
    fs::write(dir.path().join("configure"), configure).unwrap();
    let here = dir.path().display();
    let noted = dir.path().join("noted").display().to_string();
    let typed = format!(
        "fail() {{ echo \"FAILED: $1\"; cat /etc/slurm/slurm.conf {noted}; tail -n 30 $BED/log/*.log; exit 1; }}\n\
         for hook in prolog epilog; do\n\
             printf '#!/bin/sh\\necho '$hook' >> {noted}\\n' > /etc/slurm/site-$hook\n\
             chmod 755 /etc/slurm/site-$hook\n\
         done\n\
         sed -i -e '/^Prolog=/d' -e '/^Epilog=/d' /etc/slurm/slurm.conf\n\
         echo 'Prolog=/etc/slurm/site-prolog' >> /etc/slurm/slurm.conf\n\
         echo '  epilog = /etc/slurm/site-epilog' >> /etc/slurm/slurm.conf\n\
         echo mine > /etc/slurm/job_submit.lua\n\
         . {here}/configure || fail 'no configuration'\n\
         (set -e -x\n{add}\n) < /dev/null || fail 'the lines are not added'\n\
         [ \"$(cat /etc/slurm/job_submit.lua)\" = mine ] || fail 'the script is replaced'\n\
         rm /etc/slurm/job_submit.lua; cp slurm/job_submit.lua /etc/slurm/; scontrol reconfigure\n\
         scontrol show config | grep -i '^ *prolog .*/etc/slurm/site-prolog$' || fail 'the Prolog is replaced'\n\
         scontrol show config | grep -i '^ *epilog .*/etc/slurm/site-epilog$' || fail 'the Epilog is replaced'\n\
         sed -i 's/^  epilog = /Epilog=/' /etc/slurm/slurm.conf\n\
         (set -e -x\n{merge}\n) < /dev/null || fail 'they are not merged'\n\
         ondeck doctor --slurm\n\
         as alice sbatch --wait --output=/dev/null --wrap true || fail 'a job'\n\
         timeout 60 sh -c 'until grep -q epilog {noted}; do sleep 0.2; done' || fail 'no Epilog of the site'\n\
         grep prolog {noted} || fail 'no Prolog of the site'\n\
         ! sinfo | grep drain || fail 'a node is drained'\n\
         echo ALL BLOCKS WERE RUN\n"
    );
    let output = type_in(dir.path(), &typed);
    let told = told(&output);
    assert!(output.status.success() && told.contains("ALL BLOCKS WERE RUN"), "{}\n{told}", output.status);
    for what in [
        "to be merged: Prolog=/etc/slurm/prolog",
        "to be merged: Epilog=/etc/slurm/epilog",
        "to be merged: /etc/slurm/job_submit.lua is there already",
        "ok       Prolog",
        "ok       Epilog",
    ] {
        assert!(told.contains(what), "no `{what}` in\n{told}");
    }
}

#[test]
fn a_site_moves_to_burst_buffers_while_a_job_from_before_waits() {
    if !available() {
        return;
    }
    let _turn = Turn::wait();
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let before =
        ["[scheduler.pool.default]", "slurm.conf.example", "setsid ondeck agent", "until ondeck doctor"];
    let before: String = before.iter().map(|with| block(RUN, with)).collect();
    let moves = ["burst_buffer.lua", "scontrol ping"].map(|with| block(BURST_BUFFERS, with)).concat();
    fs::write(dir.path().join("before"), format!("set -e -x\n{before}")).unwrap();
    fs::write(dir.path().join("moves"), format!("set -e -x\n{moves}")).unwrap();
    let here = dir.path().display();
    let typed = format!(
        "fail() {{ echo \"FAILED: $1\"; cat /run/ondeck-serve.log; tail -n 30 $BED/log/*.log; exit 1; }}\n\
         (. {here}/before) < /dev/null || fail 'it is not set up'\n\
         cat > \"$SCRATCH/job.sh\" <<'END'\n\
         #!/bin/sh\n\
         #SBATCH --nodes=2 --exclusive --time=5 --output=/dev/null\n\
         #RSA_DATA_IN=in\n\
         #RSA_DATA_OUT=out\n\
         #RSA_OUT_SIZE=1MiB\n\
         #RSA_WAIT=hold\n\
         findmnt --noheadings --output SOURCE in > out/where\n\
         END\n\
         sed -i 's/^ *//' \"$SCRATCH/job.sh\"\n\
         submit() {{ as alice sh -e -c 'mkdir -p \"$SCRATCH/alice/'$1'/in\" \"$SCRATCH/alice/'$1'/out\"; \
             cd \"$SCRATCH/alice/'$1'\"; sbatch --parsable \"$SCRATCH/job.sh\"'; }}\n\
         as alice sbatch --nodes=2 --exclusive --time=10 --output=/dev/null --wrap 'sleep 600' || fail 'no blocker'\n\
         from_outside=$(submit outside)\n\
         timeout 60 sh -c \"until ondeck status | grep READY; do sleep 0.2; done\" || fail 'the one from outside'\n\
         (. {here}/moves) < /dev/null || fail 'it does not move'\n\
         from_inside=$(submit inside)\n\
         timeout 60 sh -c \"until ondeck job show $from_inside | grep 'waits for its input'; do sleep 0.2; done\" \
             || fail 'the one from inside'\n\
         scancel 1\n\
         ondeck wait $from_outside --timeout 100s || fail 'the results from outside'\n\
         ondeck wait $from_inside --timeout 100s || fail 'the results from inside'\n\
         for way in outside inside; do grep ondeck: \"$SCRATCH/alice/$way/out/where\" || fail $way; done\n\
         timeout 60 sh -c 'until [ -z \"$(squeue -h)\" ]; do sleep 0.2; done' || fail 'Slurm keeps a job'\n\
         echo ALL BLOCKS WERE RUN\n"
    );
    let output = type_in(dir.path(), &typed);
    let told = told(&output);
    assert!(output.status.success() && told.contains("ALL BLOCKS WERE RUN"), "{}\n{told}", output.status);
    for what in ["ok       burst_buffer.lua", "ok       burst_buffer.conf", "ok       burst buffers' program"]
    {
        assert!(told.contains(what), "no `{what}` in\n{told}");
    }
}

#[test]
fn a_site_that_has_burst_buffers_of_its_own_keeps_them() {
    if !available() {
        return;
    }
    let _turn = Turn::wait();
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let looks = block(BURST_BUFFERS, "burst_buffer.lua");
    fs::write(dir.path().join("looks"), format!("set -e -x\n{looks}")).unwrap();
    let here = dir.path().display();
    let typed = format!(
        "fail() {{ echo \"FAILED: $1\"; head /etc/slurm/slurm.conf /etc/slurm/burst_buffer.conf; exit 1; }}\n\
         cd /etc/slurm\n\
         looks() {{ (cd {root} && . {here}/looks) < /dev/null > {here}/$1 2> {here}/$1.trace || \
             {{ cat {here}/$1.trace; fail \"$1: the block ends early\"; }}; \
             sed \"s/^/$1 says /\" {here}/$1; }}\n\
         same() {{ cmp $1 {here}/$1 || fail \"$2: $1 is another\"; }}\n\
         rm -f job_submit.lua ondeck_job_submit.lua burst_buffer.lua burst_buffer.conf\n\
         cp slurm.conf {here}/before.conf\n\
         echo '  burstbuffertype = burst_buffer/datawarp' >> slurm.conf\n\
         echo 'AllowUsers=alice' > burst_buffer.conf\n\
         echo '-- mine' > job_submit.lua\n\
         cp slurm.conf burst_buffer.conf job_submit.lua {here}/\n\
         looks all\n\
         for file in slurm.conf burst_buffer.conf job_submit.lua; do same $file all; done\n\
         rm burst_buffer.conf\n\
         looks type\n\
         ! [ -e burst_buffer.conf ] || fail 'the other plugin would read it'\n\
         for file in slurm.conf job_submit.lua; do same $file type; done\n\
         cp {here}/before.conf slurm.conf; cp slurm.conf {here}/\n\
         looks script\n\
         for file in slurm.conf job_submit.lua; do same $file script; done\n\
         grep -x Directive=RSA burst_buffer.conf || fail 'no burst_buffer.conf'\n\
         cp {root}/slurm/job_submit.lua ondeck_job_submit.lua\n\
         echo ' Directive = RSA' > burst_buffer.conf\n\
         echo 'OtherTimeout=600' >> burst_buffer.conf\n\
         cp burst_buffer.conf {here}/\n\
         for again in merged again; do\n\
             looks $again\n\
             ! [ -s {here}/$again ] || fail \"$again: it still names something\"\n\
             for file in burst_buffer.conf job_submit.lua; do same $file $again; done\n\
             [ $(grep -c ^BurstBufferType=burst_buffer/lua slurm.conf) = 1 ] || fail \"$again: not one BurstBufferType\"\n\
         done\n\
         cmp burst_buffer.lua {root}/slurm/burst_buffer.lua || fail 'the plugin is not copied'\n\
         echo ALL BLOCKS WERE RUN\n",
        root = root().display()
    );
    let output = type_in(dir.path(), &typed);
    let told = told(&output);
    assert!(output.status.success() && told.contains("ALL BLOCKS WERE RUN"), "{}\n{told}", output.status);
    let says = |who: &str| -> Vec<&str> {
        told.lines().filter_map(|line| line.strip_prefix(who)?.strip_prefix(" says ")).collect()
    };
    let shown = "  burstbuffertype = burst_buffer/datawarp";
    let merge = ["BurstBufferType", "/etc/slurm/burst_buffer.conf", "/etc/slurm/job_submit.lua"]
        .map(|what| format!("to be merged: {what}"));
    assert_eq!(says("all"), [shown, &merge[0], &merge[1], &merge[2]]);
    assert_eq!(says("type"), says("all"));
    assert_eq!(says("script"), [&merge[2]]);
}

#[test]
fn what_the_documents_link_to_is_there() {
    for (name, text) in [("docs/admin.md", ADMIN), ("docs/user.md", USER)] {
        for link in text.split("](").skip(1) {
            let target = link.split(')').next().unwrap_or_default();
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = root().join("docs").join(file);
            assert!(file.is_empty() || path.exists(), "{name} links to {target}");
            if file.is_empty() {
                let heading = |line: &str| {
                    line.trim_start_matches(['#', ' ']).to_lowercase().replace(',', "").replace(' ', "-")
                };
                assert!(
                    text.lines().any(|line| line.starts_with('#') && heading(line) == anchor),
                    "{name}: {anchor}"
                );
            }
        }
    }
}

#[test]
fn the_hooks_end_with_0_whatever_happens() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    };
    let hang = write("hang", "#!/bin/sh\ntrap '' TERM\nexec sleep 300\n");
    let fail = write("fail", "#!/bin/sh\necho no; exit 3\n");
    for name in ["prolog", "epilog"] {
        let hook = write(name, &fs::read_to_string(root().join("slurm").join(name)).unwrap());
        let settings = [
            "ONDECK=/nonexistent\n".to_owned(),
            "if (\n".to_owned(),
            "exit 7\n".to_owned(),
            format!("ONDECK={}\n", fail.display()),
            format!("ONDECK={}\nONDECK_LIMIT=0.2\n", hang.display()),
        ];
        for settings in settings {
            write("ondeck.env", &settings);
            let began = std::time::Instant::now();
            let output = Command::new(&hook).stdin(Stdio::null()).output().unwrap();
            assert_eq!(output.status.code(), Some(0), "{name} with {settings}: {}", told(&output));
            assert!(began.elapsed().as_secs() < 20, "{name} with {settings}");
        }
    }
}
