//! `ondeck layout`: advice, and layouts that are shown and set.
//!
//! Lustre and BeeGFS are stand-ins here: scripts that keep what they are told in a file, refuse what `ondeck layout check` refuses
//! (the crate `layout` compares that with a real `lfs`), and print it as the real ones do. CephFS is a real one, in the tests of
//! the engines.

#![allow(clippy::unwrap_used)]

mod scene;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use scene::{Ran, Scene, Who};

const SITE: &str = r#"
[nodes]
link = "12GB/s"
process = "1GB/s"

[[filesystem]]
path = "PATH"
kind = "KIND"
targets = 120
servers = 30
target = "4GB/s"
server = "12GB/s"
"#;

/// `lfs`: every word of a call is a line of `calls`; layouts are kept as options, by the names of their directories. A directory that
/// was told nothing has what the one above has.
const LFS: &str = r#"#!/bin/sh
here=$(dirname "$0")/..
mkdir -p "$here/layouts"
options_of() { echo "$here/layouts/$(basename "$(cd "$1" && pwd -P)")"; }
printf '%s\n' "$@" >> "$here/calls"
case $1 in
setstripe)
    shift
    options=
    while [ $# -gt 1 ]; do options="$options $1"; shift; done
    [ "$1" = . ] || { echo "lfs setstripe: unexpected argument '$1'" >&2; exit 22; }
    [ ! -e "$here/full" ] || { echo "error: lfs setstripe: can't create composite layout: Operation not permitted" >&2; exit 1; }
    "$here/ondeck" layout check "$options" > "$here/checked" 2>&1 || { cat "$here/checked" >&2; exit 22; }
    echo $options > "$(options_of .)"
    ;;
getstripe)
    [ "$2 $3 $4" = "--yaml -d ." ] || exit 22
    number() {
        case $1 in
        *K) echo $((${1%K} << 10)) ;; *M) echo $((${1%M} << 20)) ;; *G) echo $((${1%G} << 30)) ;; *) echo "$1" ;;
        esac
    }
    echo "  lcm_layout_gen:    0"; echo "  lcm_mirror_count:  1"
    of=.
    while [ ! -e "$(options_of $of)" ] && [ "$(cd $of && pwd -P)" != / ]; do of=$of/..; done
    set -- $(cat "$(options_of $of)" 2> /dev/null || echo -c 1)
    [ "$1" = -E ] || set -- -E -1 "$@"
    start=0 index=0
    while [ $# -gt 0 ]; do
        end=$(number "$2"); [ "$end" = -1 ] && end=EOF
        shift 2
        count=1 size=1048576 pattern=raid0 pool=
        while [ $# -gt 0 ] && [ "$1" != -E ]; do
            case $1 in
            -c) count=$2 ;; -C) count=$2 pattern=raid0,overstriped ;; -S) size=$(number "$2") ;; -p) pool=$2 ;;
            -L) count=0 pattern=mdt size=$end ;;
            esac
            shift 2
        done
        echo "  component$index:"; echo "    lcme_extent.e_start: $start"; echo "    lcme_extent.e_end:   $end"
        echo "    sub_layout:"; echo "      stripe_count:  $count"; echo "      stripe_size:   $size"
        echo "      pattern:       $pattern"; echo "      stripe_offset: -1"
        [ -z "$pool" ] || echo "      pool:          $pool"
        start=$end index=$((index + 1))
    done
    ;;
*) exit 22 ;;
esac
"#;

/// `beegfs` of version 8.
const BEEGFS: &str = r#"#!/bin/sh
here=$(dirname "$0")/..
echo "$@" >> "$here/calls"
case "$1 $2" in
"entry set")
    for word in "$@"; do
        case $word in
        --num-targets=*) echo "${word#*=}" > "$here/targets" ;;
        --chunk-size=*) echo "${word#*=}" > "$here/chunk" ;;
        esac
    done
    echo "Processed 1 entries."
    ;;
"entry info")
    [ "$3 $4" = "--retro ." ] || exit 1
    echo "Entry type: directory"; echo "EntryID: root"; echo "Stripe pattern details:"; echo "+ Type: RAID0"
    echo "+ Chunksize: $(($(cat "$here/chunk") / 1024))K"
    echo "+ Number of storage targets: desired: $(cat "$here/targets")"; echo "+ Storage Pool: 1  (default)"
    ;;
*) exit 1 ;;
esac
"#;

/// A directory `striped`, told its layouts by a stand-in.
fn scene_of(kind: &str, tool: &str, program: &str) -> Scene {
    let scene = Scene::new(Who::Me);
    let striped = scene.dir("striped");
    scene.dir("bin");
    scene.script(&format!("bin/{tool}"), program);
    let path = fs::canonicalize(striped).unwrap();
    scene.file("site.toml", SITE.replace("PATH", path.to_str().unwrap()).replace("KIND", kind));
    scene
}

fn with_tools(scene: &Scene, arguments: &[&str]) -> Ran {
    let mut command: Command = scene.ondeck(arguments);
    let path = std::env::var("PATH").unwrap();
    command.env("PATH", format!("{}:{path}", scene.path("bin").display()));
    Ran::of(command.output().unwrap())
}

#[test]
fn lustre_is_told_a_layout_in_the_words_of_lfs_and_asked_for_it_again() {
    let scene = scene_of("lustre", "lfs", LFS);
    let set =
        |options: &str| with_tools(&scene, &["layout", "set", "striped", options, "--site", "site.toml"]);
    let ran = set("-E 64K -L mdt -E 1G -c 1 -E 10G -c 8 -p flash -E -1 -C -2 -S 4M");
    ran.assert_code(0);
    assert_eq!(
        ran.out,
        "striped (Lustre)\n  up to 64 KiB   with the metadata\n  up to 1 GiB    1 target, stripes of 1 MiB\n  \
         up to 10 GiB   8 targets, stripes of 1 MiB, of pool flash\n  \
         the rest       all targets, 2 stripes on each, stripes of 4 MiB, of pool flash\n  \
         lfs setstripe -E 64K -L mdt -E 1G -c 1 -S 1M -E 10G -c 8 -S 1M -p flash -E -1 -C -2 -S 4M -p flash\n"
    );
    // Each word by itself, as the program got it.
    let calls = scene.read("calls");
    assert!(calls.starts_with("setstripe\n-E\n64K\n-L\nmdt\n-E\n1G\n-c\n1\n"), "{calls}");
    assert!(calls.ends_with(".\ngetstripe\n--yaml\n-d\n.\n"), "{calls}");
    let shown = with_tools(&scene, &["layout", "show", "striped", "--site", "site.toml", "--json"]);
    let shown: serde_json::Value = serde_json::from_str(&shown.out).unwrap();
    assert_eq!(shown["components"][2]["count"], 8);
    assert_eq!(shown["components"][3]["over"], "per-target");
    // What the tool refuses is told with its words.
    scene.file("full", "");
    let ran = set("-c 4");
    ran.assert_code(1);
    assert!(
        ran.err.contains("`lfs setstripe -c 4 -S 1M` failed: error: lfs setstripe: can't create"),
        "{}",
        ran.err
    );
}

#[test]
fn what_is_no_layout_never_reaches_a_tool() {
    let scene = scene_of("lustre", "lfs", LFS);
    for options in [
        "-E 16M -S 3M -E -1 -c 2",
        "-c 0",
        "-c 4 $(touch x)",
        "-c 4; touch x",
        "",
        "-p `id` -c 1",
        "-E 1G -c 1",
    ] {
        let ran = with_tools(&scene, &["layout", "set", "striped", options, "--site", "site.toml"]);
        ran.assert_code(2);
        assert!(ran.err.starts_with("ondeck layout: "), "{}", ran.err);
    }
    assert!(!scene.path("calls").exists() && !scene.path("x").exists());
    // A directory whose name would be something to a shell is a name.
    let hostile = "striped/$(touch x)";
    fs::create_dir(scene.path(hostile)).unwrap();
    let ran = with_tools(&scene, &["layout", "set", hostile, "-c 4", "--site", "site.toml"]);
    ran.assert_code(0);
    assert!(scene.path("layouts/$(touch x)").exists());
    assert!(!scene.path("x").exists() && !scene.path(hostile).join("x").exists());
}

#[test]
fn each_step_of_a_job_gets_its_layout_and_one_that_somebody_chose_stays() {
    let scene = scene_of("lustre", "lfs", LFS);
    fs::create_dir(scene.path("striped/case")).unwrap();
    let auto = |more: &[&str]| {
        let arguments = [&["layout", "auto", "--site", "site.toml"][..], more].concat();
        let mut command = scene.ondeck(&arguments);
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", scene.path("bin").display()));
        command.env("SLURM_JOB_NUM_NODES", "8").env("SLURM_NTASKS", "256");
        let ran = Ran::of(command.output().unwrap());
        // A job goes on, whatever happens.
        ran.assert_code(0);
        ran
    };
    let case = "striped/case";
    let shared = auto(&["--pattern", "shared", case]);
    assert_eq!(shared.out, "striped/case: -E 16M -c 1 -S 1M -E -1 -c 32 -S 1M, for at most 89.4 GiB/s\n");
    assert_eq!(
        auto(&["--pattern", "shared", case]).out,
        "striped/case: has -E 16M -c 1 -S 1M -E -1 -c 32 -S 1M already\n"
    );
    // The next step is another one, of fewer nodes.
    let own = auto(&["--pattern", "shared", "--nodes", "2", "--tasks", "64", case]);
    assert_eq!(own.out, "striped/case: -E 16M -c 1 -S 1M -E -1 -c 8 -S 1M, for at most 22.3 GiB/s\n");
    // What a person has set stays.
    with_tools(&scene, &["layout", "set", case, "-c 5", "--site", "site.toml"]).assert_code(0);
    let kept = auto(&["--pattern", "shared", case]);
    assert_eq!(
        kept.out,
        "striped/case: keeps the layout that somebody has chosen for it (lfs setstripe -c 5 -S 1M); --replace sets another one\n"
    );
    assert_eq!(scene.read("layouts/case"), "-c 5 -S 1M\n");
    auto(&["--pattern", "shared", "--replace", case]);
    assert_eq!(scene.read("layouts/case"), "-E 16M -c 1 -S 1M -E -1 -c 32 -S 1M\n");
    // Nothing costs the job anything.
    let nowhere = auto(&["striped/nowhere"]);
    assert!(
        nowhere.err.starts_with("ondeck layout: the layout of striped/nowhere stays as it is: "),
        "{}",
        nowhere.err
    );
    scene.file("full", "");
    let full = auto(&["--pattern", "file-per-process", case]);
    assert!(
        full.err.contains("stays as it is: striped/case: `lfs setstripe -c 1 -S 1M` failed"),
        "{}",
        full.err
    );
    let without = scene.run(&["layout", "auto", "--site", "site.toml", case]);
    without
        .assert_code(0)
        .assert_says("say by --nodes how many nodes use the files: this is no job of Slurm");
}

#[test]
fn beegfs_is_told_its_last_component_and_how_many_targets_all_are() {
    let scene = scene_of("beegfs8", "beegfs", BEEGFS);
    let ran = with_tools(
        &scene,
        &["layout", "set", "striped", "-E 16M -c 1 -E -1 -c -1 -S 2M", "--site", "site.toml"],
    );
    ran.assert_code(0);
    assert_eq!(
        ran.out,
        "striped (BeeGFS 8)\n  whole files    120 targets, stripes of 2 MiB, of pool 1\n  \
         beegfs entry set --num-targets=120 --chunk-size=2097152 --pool=1\n"
    );
    assert_eq!(
        scene.read("calls"),
        "entry set --num-targets=120 --chunk-size=2097152 .\nentry info --retro .\n"
    );
}

#[test]
fn advice_says_why_and_can_be_set_as_it_is() {
    let scene = scene_of("lustre", "lfs", LFS);
    let advise = |more: &[&str]| {
        scene.run(&[&["layout", "advise", "--nodes", "8", "--site", "site.toml"][..], more].concat())
    };
    let ran = advise(&["--tasks", "256", "--pattern", "shared"]);
    ran.assert_code(0);
    let options = ran.out.lines().next().unwrap().to_owned();
    assert_eq!(options, "-E 16M -c 1 -S 1M -E -1 -c 32 -S 1M");
    assert!(ran.out.contains("\n  - a node reads or writes 11.2 GiB/s: 4 stripes\n"), "{}", ran.out);
    let set = with_tools(&scene, &["layout", "set", "striped", &options, "--site", "site.toml"]);
    set.assert_code(0);
    let json = advise(&["--pattern", "file-per-process", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!(json["options"], serde_json::json!(["-c", "1", "-S", "1M"]));
    // The report's rules, and a site's own.
    let thesis = advise(&["--pattern", "shared", "--rules", "thesis"]);
    assert!(thesis.out.starts_with("-E 16M -c 1 -S 1M -E -1 -c 24 -S 1M\n"), "{}", thesis.out);
    scene.file("rules.toml", "name = \"ours\"\n");
    let ours = advise(&["--rules", "rules.toml"]);
    ours.assert_code(2);
    assert!(ours.err.contains("rules.toml: ") && ours.err.contains("missing field"), "{}", ours.err);
}

#[test]
fn an_earlier_run_says_what_nobody_knows() {
    let scene = scene_of("lustre", "lfs", LFS);
    let file = |path: String, size: u64| {
        let path = scene.path(&path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::File::create(path).unwrap().set_len(size).unwrap();
    };
    for rank in 0..64 {
        for step in 0..3 {
            file(format!("ranks/step-{step}/rank-{rank}.dat"), 3 << 30);
        }
    }
    file("one/result.h5".to_owned(), 200 << 30);
    file("one/run.log".to_owned(), 5000);
    let advise = |like: &str, more: &[&str]| {
        let line =
            ["layout", "advise", "--site", "site.toml", "--nodes", "8", "--tasks", "64", "--like", like];
        let ran = scene.run(&[&line[..], more].concat());
        ran.assert_code(0);
        ran.out
    };
    let ranks = advise("ranks", &[]);
    assert!(ranks.starts_with("-c 1 -S 1M\n"), "{ranks}");
    assert!(
        ranks.contains(
            "\n  - ranks: 64 files of one kind, 3 times, with 100 % of the bytes: each process has its own\n"
        ),
        "{ranks}"
    );
    let one = advise("one", &[]);
    assert!(one.starts_with("-E 64K -L mdt -E -1 -c 24 -S 1M\n"), "{one}");
    assert!(one.contains("\n  - one: one file, with 99 % of the bytes: all processes use it\n"), "{one}");
    // What is said counts more.
    assert!(advise("ranks", &["--pattern", "shared"]).contains("-c 24"), "8 nodes use one file");
    let json: serde_json::Value = serde_json::from_str(&advise("one", &["--json"])).unwrap();
    assert_eq!((&json["like"]["pattern"], &json["like"]["files"]), (&"shared".into(), &1.into()));
    let nowhere =
        scene.run(&["layout", "advise", "--site", "site.toml", "--nodes", "8", "--like", "nowhere"]);
    nowhere.assert_code(2).assert_says("can't open the directory nowhere: No such file or directory");
}

#[test]
fn what_nobody_says_and_no_run_has_left_the_name_of_the_program_may_say() {
    let scene = scene_of("lustre", "lfs", LFS);
    let more = scene.read("site.toml") + "\n[[program]]\nname = \"Mine*\"\npattern = \"single\"\n";
    scene.file("site.toml", more);
    scene.file("none.toml", "[scheduler]\nsocket = \"/nowhere/at/all\"\n");
    let advise = |more: &[&str]| {
        let words = [
            "layout",
            "advise",
            "--nodes",
            "8",
            "--tasks",
            "256",
            "--site",
            "site.toml",
            "--config",
            "none.toml",
        ];
        with_tools(&scene, &[&words[..], more].concat())
    };
    let named = advise(&["--program", "/opt/openfoam/simpleFoam"]);
    named.assert_code(0);
    assert!(
        named.out.contains("  - from the name of its program (`*foam`: file-per-process)\n"),
        "{}",
        named.out
    );
    // That the history can't be asked for is not taken for an empty one.
    assert!(
        named.err.contains("earlier jobs do not count, as the history can't be read: no scheduler at"),
        "{}",
        named.err
    );
    let of_site = advise(&["--program", "mine-2", "--json"]);
    let of_site: serde_json::Value = serde_json::from_str(&of_site.out).unwrap();
    assert_eq!(of_site["from"], "the name of its program (`Mine*`: single)");
    assert!(advise(&["--program", "other"]).out.contains("  - from the site's default"));
    // Whoever says the pattern means it.
    let said = advise(&["--program", "simpleFoam", "--pattern", "shared"]);
    assert!(!said.out.contains("from the name") && said.err.is_empty(), "{}{}", said.out, said.err);
    with_tools(&scene, &["layout", "forget"]).assert_code(2);
    with_tools(&scene, &["layout", "history", "--config", "none.toml"]).assert_code(1);
}

#[test]
fn what_is_missing_is_told_by_name() {
    let scene = scene_of("lustre", "lfs", LFS);
    let refused = |arguments: &[&str], code: i32, what: &str| {
        let ran = scene.run(arguments);
        ran.assert_code(code);
        assert!(ran.err.contains(what), "{}", ran.err);
    };
    refused(
        &["layout", "show", "."],
        1,
        "its filesystem stripes no files: there are layouts on Lustre, CephFS and BeeGFS",
    );
    refused(&["layout", "show", "nowhere"], 1, "can't open the directory nowhere: No such file or directory");
    refused(&["layout", "show", "site.toml"], 1, "can't open the directory site.toml: Not a directory");
    refused(
        &["layout", "show", "striped", "--site", "site.toml"],
        1,
        "striped: can't start `lfs`, which shows and sets layouts there: No such file or directory",
    );
    refused(
        &["layout", "show", "striped", "--site", "other.toml"],
        2,
        "can't read other.toml: No such file or directory",
    );
    refused(
        &["layout", "advise", "--nodes", "1", "--site", "site.toml", "--directory", "."],
        2,
        ". is on none of the site's filesystems",
    );
    scene.file("wrong.toml", "[nodes]\nlink = \"fast\"\n");
    refused(&["layout", "advise", "--nodes", "1", "--site", "wrong.toml"], 2, "`fast` is not a rate");
}

#[test]
fn the_document_says_what_is_said() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/layout.md");
    let page = fs::read_to_string(page).unwrap();
    let blocks: Vec<&str> = page.split("```").skip(1).step_by(2).collect();
    let scene = Scene::new(Who::Me);
    let site = blocks.iter().find_map(|block| block.strip_prefix("toml\n")).unwrap();
    scene.file("site.toml", site);
    let mut typed = 0;
    for block in blocks.iter().filter_map(|block| block.strip_prefix("console\n")) {
        for part in block.split("$ ").filter(|part| !part.is_empty()) {
            let (command, said) = part.split_once('\n').unwrap();
            // As a shell would take it: a word in quotation marks is one.
            let words: Vec<&str> = command
                .split('"')
                .enumerate()
                .flat_map(|(index, text)| match index % 2 {
                    0 => text.split_whitespace().collect(),
                    _ => vec![text],
                })
                .collect();
            let ran = scene.run(&words[1..]);
            assert_eq!(ran.out + &ran.err, said, "{command}");
            typed += 1;
        }
    }
    assert_eq!(typed, 3);
    // The job of two steps, as a shell runs it.
    let job = blocks.iter().find_map(|block| block.strip_prefix("sh\n")).unwrap();
    let scene = scene_of("lustre", "lfs", LFS);
    scene.script("bin/srun", "#!/bin/sh\nexit 0\n");
    fs::create_dir_all(scene.path("striped/case/fields")).unwrap();
    fs::create_dir_all(scene.path("striped/case/frames")).unwrap();
    let dir = scene.dir.path().display().to_string();
    let job = job
        .replace("/scratch", &format!("{dir}/striped"))
        .replace("layout auto", "layout auto --site site.toml");
    let script = scene.script("job", &job);
    let mut command = Command::new("sh");
    let path = std::env::var("PATH").unwrap();
    command
        .arg("-e")
        .arg(script)
        .current_dir(scene.dir.path())
        .env("PATH", format!("{dir}:{dir}/bin:{path}"));
    command.env("SLURM_JOB_NUM_NODES", "8").env("SLURM_NTASKS", "256");
    Ran::of(command.output().unwrap()).assert_code(0);
    assert_eq!(scene.read("layouts/fields"), "-E 16M -c 1 -S 1M -E -1 -c 32 -S 1M\n");
    // Which is what it has already.
    assert!(!scene.path("layouts/frames").exists());
}

#[test]
fn doctor_says_where_files_can_be_striped_and_what_lacks_for_that() {
    let scene = scene_of("lustre", "lfs", LFS);
    let site = scene.path("site.toml");
    scene.file("ondeck.toml", format!("[scheduler]\nsite_file = \"{}\"\n", site.display()));
    let doctor = || {
        let ran = with_tools(&scene, &["doctor", "--config", "ondeck.toml"]);
        let of_layouts = |line: &&str| line.contains("  layouts ");
        (ran.out.lines().filter(of_layouts).collect::<Vec<_>>().join("\n"), ran.out.clone())
    };
    let (told, _) = doctor();
    assert!(told.starts_with("ok ") && told.contains("striped: Lustre, new files get "), "{told}");
    let plain = fs::read_to_string(&site).unwrap();
    scene.file("site.toml", format!("{plain}heavy_above = \"80%\"\n"));
    let (told, all) = doctor();
    assert!(told.contains("heavy_above and slow_above do nothing without `load`"), "{told}");
    assert!(all.contains("say in `load` what tells it"), "{all}");
    scene.file("site.toml", plain);
    fs::remove_file(scene.path("bin/lfs")).unwrap();
    let (told, all) = doctor();
    assert!(told.starts_with("limited") && told.contains("can't start `lfs`"), "{told}");
    assert!(all.contains("install the client's tools, of which `lfs` is one"), "{all}");
    scene.file("site.toml", "nonsense");
    let (told, _) = doctor();
    assert!(told.starts_with("limited") && told.contains("site.toml: "), "{told}");
    fs::remove_file(site).unwrap();
    let (told, _) = doctor();
    assert!(told.starts_with("limited") && told.contains("which scheduler.site_file names"), "{told}");
    scene.file("ondeck.toml", "");
    if !Path::new("/etc/ondeck/site.toml").exists() {
        let (told, _) = doctor();
        assert!(told.starts_with("ok ") && told.contains("no filesystem that stripes files"), "{told}");
    }
}

/// Runs a command where a directory is a filesystem whose server never answers; it goes with the command.
const WITH_ONE_THAT_HANGS: &str = "#!/bin/sh\nexec 9<> /dev/fuse\n\
    mount -i -t fuse -o fd=9,rootmode=40000,user_id=0,group_id=0 hangs \"$1\" || exit 99\nshift\nexec \"$@\"\n";

#[test]
fn doctor_tells_of_all_filesystems_though_some_hang_and_leaves_no_tool_behind() {
    let scene = scene_of("lustre", "lfs", LFS);
    let [hangs, stuck] = ["hangs", "stuck"].map(|name| fs::canonicalize(scene.dir(name)).unwrap());
    // One of which the tool never answers.
    scene.script("bin/beegfs", "#!/bin/sh\necho $$ > \"$(dirname \"$0\")/../tool\"\nexec sleep 300\n");
    let more = |path: &Path, kind: &str| {
        format!(
            "[[filesystem]]\npath = \"{}\"\nkind = \"{kind}\"\ntargets = 2\nservers = 2\ntarget = \"1GB/s\"\n",
            path.display()
        )
    };
    // Those that hang come first.
    let site = scene.read("site.toml");
    let (nodes, lustre) = site.split_once("[[filesystem]]").unwrap();
    let (hung, slow) = (more(&hangs, "cephfs"), more(&stuck, "beegfs8"));
    let site = scene.file("site.toml", format!("{nodes}{hung}{slow}[[filesystem]]{lustre}"));
    scene.file("ondeck.toml", format!("[scheduler]\nsite_file = \"{}\"\n", site.display()));

    let script = scene.script("with-one-that-hangs", WITH_ONE_THAT_HANGS);
    let doctor = scene.ondeck(&["doctor", "--config", "ondeck.toml"]);
    let mut command = Command::new("unshare");
    command.args(if scene::is_root() { ["--mount", "--"] } else { ["-rm", "--"] }).arg(script).arg(&hangs);
    command.arg(doctor.get_program()).args(doctor.get_args()).current_dir(scene.dir.path());
    let path = std::env::var("PATH").unwrap();
    command.env("PATH", format!("{}:{path}", scene.path("bin").display()));
    command.env("ONDECK_STATE_DIR", scene.path("state"));
    let began = Instant::now();
    let ran = Ran::of(command.output().unwrap());
    let took = began.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}: they are waited for together");
    let told: Vec<&str> = ran.out.lines().filter(|line| line.contains("  layouts ")).collect();
    assert_eq!(told.len(), 3, "{}{}", ran.out, ran.err);
    for (line, path) in told.iter().zip([&hangs, &stuck]) {
        let says = format!("{} has not answered within 5 s", path.display());
        assert!(line.starts_with("limited") && line.contains(&says), "{line}");
    }
    assert!(told[2].starts_with("ok ") && told[2].contains("striped: Lustre, new files get "), "{}", told[2]);
    let tool = Path::new("/proc").join(scene.read("tool").trim());
    let until = Instant::now() + Duration::from_secs(10);
    while fs::read_to_string(tool.join("cmdline")).is_ok_and(|line| line.contains("sleep")) {
        assert!(Instant::now() < until, "the tool is left");
    }
}
