//! What the testbed promises to the tests that stand on it.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ondeck_testbed::{Host, Signal, Testbed, available, wait_until};

#[path = "shared/leftovers.rs"]
mod leftovers;

use leftovers::{Traces, interfaces};

const DEADLINE: Duration = Duration::from_secs(20);
const PORT: u16 = 7000;
const UID: u32 = 20_001;
const GROUP: u32 = 20_002;

fn bed(hosts: usize) -> Testbed {
    let binary = env!("CARGO_BIN_EXE_ondeck-testbed");
    Testbed::builder().host("ctl").hosts("n", hosts).binary(binary).build().unwrap()
}

fn listen(host: &Host) -> TcpListener {
    let address = SocketAddr::new(host.address().into(), PORT);
    host.in_network(|| TcpListener::bind(address)).unwrap()
}

fn can_connect(from: &Host, to: &Host) -> bool {
    let address = SocketAddr::new(to.address().into(), PORT);
    from.in_network(|| TcpStream::connect_timeout(&address, Duration::from_millis(300))).is_ok()
}

fn is_asleep(host: &Host) -> bool {
    host.processes().iter().any(|process| process.command_line == ["sleep", "1000"])
}

/// Fills a host with what a careless test leaves: a mount and a process that nobody waits for.
fn litter(bed: &Testbed, host: &str) -> Traces {
    let place = bed.dir().join("litter");
    fs::create_dir_all(&place).unwrap();
    let script = format!("mount -t tmpfs tmpfs {}; setsid sleep 1000 >/dev/null 2>&1 &", place.display());
    bed.host(host).shell(&script).assert_success();
    wait_until(DEADLINE, "the litter is there", || bed.host(host).processes().len() == 1);
    Traces::of(bed.dir())
}

#[test]
fn hosts_have_names_and_reach_each_other_by_them() {
    if !available() {
        return;
    }
    let bed = bed(2);
    assert_eq!(bed.host("ctl").address().to_string(), "10.77.0.1");
    assert_eq!(bed.host("n2").address().to_string(), "10.77.0.12");
    for host in bed.hosts() {
        assert_eq!(host.ok(&["hostname"]).trim(), host.name());
    }
    let listener = listen(bed.host("n1"));
    assert_eq!(bed.host("n1").listening(), [listener.local_addr().unwrap()]);
    assert_eq!(bed.host("n2").listening(), []);
    for host in bed.hosts() {
        std::thread::scope(|scope| {
            scope.spawn(|| listener.accept().unwrap().0.write_all(b"hello\n").unwrap());
            let script = format!("exec 3<>/dev/tcp/n1/{PORT}; cat <&3");
            assert_eq!(host.ok(&["bash", "-c", &script]), "hello\n");
        });
    }
    // And nobody else.
    let routes = bed.host("n1").ok(&["ip", "route"]);
    assert!(routes.starts_with("10.77.0.0/24 dev eth0") && routes.lines().count() == 1, "{routes}");
    assert!(!interfaces().contains("port0"));
}

#[test]
fn mounts_and_run_are_each_hosts_own_and_the_disk_is_shared() {
    if !available() {
        return;
    }
    let bed = Testbed::builder().host("ctl").hosts("n", 2).private_directory("local").build().unwrap();
    let [one, two] = [bed.host("n1"), bed.host("n2")];
    let place = bed.dir().join("mounted");
    fs::create_dir(&place).unwrap();
    one.ok(&["mount", "-t", "tmpfs", "tmpfs", &place.to_string_lossy()]);
    one.shell(&format!("echo secret > {}/file; echo one > /run/file", place.display())).assert_success();

    assert_eq!(one.new_mounts().len(), 1);
    assert_eq!(one.new_mounts()[0].target, place);
    assert_eq!(two.new_mounts(), []);
    assert!(!two.mounts().iter().any(|mount| mount.target == place));
    assert!(!fs::read_to_string("/proc/self/mountinfo").unwrap().contains("ondeck-testbed."));
    assert!(!place.join("file").exists());
    assert_eq!(fs::read_to_string(one.path_from_outside(place.join("file"))).unwrap(), "secret\n");
    assert_eq!(fs::read_to_string(one.path_from_outside("/run/file")).unwrap(), "one\n");
    assert!(!two.path_from_outside("/run/file").exists());
    assert!(!Path::new("/run/file").exists());

    let local = bed.dir().join("local");
    fs::write(one.path_from_outside(&local).join("file"), "").unwrap();
    assert_eq!(one.ok(&["ls", &local.to_string_lossy()]), "file\n");
    assert_eq!(two.ok(&["ls", &local.to_string_lossy()]), "");

    let shared = bed.dir().join("shared");
    one.shell(&format!("echo all > {}", shared.display())).assert_success();
    assert_eq!(two.ok(&["cat", &shared.to_string_lossy()]), "all\n");
    assert_eq!(fs::read_to_string(&shared).unwrap(), "all\n");
}

#[test]
fn a_program_ends_as_if_it_had_been_run_directly() {
    if !available() {
        return;
    }
    let bed = bed(0);
    let host = bed.host("ctl");
    assert_eq!(host.shell("echo out; echo err >&2; exit 7").assert_code(7).stdout, "out\n");
    assert_eq!(host.shell("kill -KILL $$").signal(), Some(libc::SIGKILL));
    assert_eq!(host.shell("kill -SEGV $$").signal(), Some(libc::SIGSEGV));
    host.run(&["no-such-program"]).assert_code(127).assert_says("cannot start no-such-program");

    // Signals to the child reach the program.
    let mut command = host.command("sh");
    command.args(["-c", "trap 'echo caught; exit 3' TERM; echo ready; while :; do sleep 0.01; done"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    // SAFETY: a system call without memory; the child has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\ncaught\n");
    assert_eq!(child.wait().unwrap().code(), Some(3));

    // Also to one that leaves them as it finds them.
    let mut child = host.command("sleep").arg("1000").spawn().unwrap();
    wait_until(DEADLINE, "sleep runs", || is_asleep(host));
    // SAFETY: as above.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGINT));
    assert_eq!(host.ok(&["grep", "SigBlk", "/proc/self/status"]).trim(), "SigBlk:\t0000000000000000");

    // Killing the child kills the program.
    let mut child = host.command("sleep").arg("1000").spawn().unwrap();
    wait_until(DEADLINE, "sleep runs", || is_asleep(host));
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until(DEADLINE, "sleep has ended", || host.processes().is_empty());
}

#[test]
fn no_program_leaves_a_core_file() {
    if !available() {
        return;
    }
    let bed = bed(0);
    let mut command = bed.host("ctl").command("sh");
    let all = rustix::process::Rlimit { current: None, maximum: None };
    // SAFETY: one system call, in the child before exec.
    unsafe {
        command.pre_exec(move || Ok(rustix::process::setrlimit(rustix::process::Resource::Core, all)?));
    }
    let output = command.args(["-c", "ulimit -Sc; ulimit -Hc; kill -SEGV $$"]).output().unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGSEGV));
    assert!(!output.status.core_dumped());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "0\n0\n");
    let limits = fs::read_to_string(bed.host("ctl").path_from_outside("/proc/1/limits")).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().collect::<Vec<_>>()[4..6], ["0", "0"]);
}

#[test]
fn the_working_directory_and_the_environment_are_kept() {
    if !available() {
        return;
    }
    let bed = bed(0);
    let mut command = bed.host("ctl").command("sh");
    command.args(["-c", "pwd; echo $FOOD; env | grep -c ONDECK_TESTBED_PID_FILE"]);
    let output = command.current_dir(bed.dir()).env("FOOD", "plums").output().unwrap();
    let expected = format!("{}\nplums\n0\n", bed.dir().display());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
}

#[test]
fn programs_run_as_another_user() {
    if !available() {
        return;
    }
    let bed = bed(0);
    let user = bed.host("ctl").as_user_in(UID, UID, &[GROUP]);
    assert_eq!(user.ok(&["id", "-u"]).trim(), UID.to_string());
    assert_eq!(user.ok(&["id", "-G"]).trim(), format!("{UID} {GROUP}"));
    assert_eq!(bed.host("ctl").as_user(UID, UID).ok(&["id", "-G"]).trim(), UID.to_string());
    assert!(!user.run(&["cat", "/etc/shadow"]).success());

    // The change of user must not cost the death signal.
    let mut child = user.command("sleep").arg("1000").spawn().unwrap();
    wait_until(DEADLINE, "sleep runs", || is_asleep(&user));
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until(DEADLINE, "sleep has ended", || user.processes().is_empty());
}

#[test]
fn a_daemon_is_watched_signalled_and_killed_with_its_handle() {
    if !available() {
        return;
    }
    let bed = bed(1);
    let host = bed.host("n1");
    let log = bed.dir().join("daemon.log");
    let mut command = host.command("sh");
    command
        .args(["-c", "trap 'echo bye; exit 4' TERM; echo up; while :; do sleep 0.01; done"])
        .env("COLOUR", "red");
    let mut daemon = host.spawn_daemon(command, &log).unwrap();
    wait_until(DEADLINE, "it is up", || daemon.log().contains("up"));
    assert!(daemon.is_running());
    assert_eq!(daemon.wait(Duration::from_millis(20)), None);
    let process = host.processes().into_iter().find(|process| process.pid == daemon.pid()).unwrap();
    assert_eq!(process.pid_inside, daemon.pid_inside());
    assert_eq!(process.command_line[..2], ["sh", "-c"]);
    assert_eq!(process.environment()["COLOUR"], "red");
    let comm = format!("/proc/{}/comm", daemon.pid_inside().as_raw_nonzero());
    assert_eq!(bed.host("ctl").ok(&["cat", &comm]), "sh\n");
    assert_eq!(daemon.stop(DEADLINE).code(), Some(4));
    assert!(!daemon.is_running());
    assert_eq!(daemon.log(), "up\nbye\n");

    let mut command = host.command("sleep");
    command.arg("1000");
    let daemon = host.spawn_daemon(command, &log).unwrap();
    drop(daemon);
    wait_until(DEADLINE, "nothing is left", || host.processes().is_empty());

    let error = host.spawn_daemon(host.command("no-such-program"), &log).unwrap_err();
    assert!(format!("{error:#}").contains("no-such-program"), "{error:#}");
}

#[test]
fn orphans_are_reaped() {
    if !available() {
        return;
    }
    let bed = bed(0);
    let orphan = bed.host("ctl").shell("sleep 0.01 >/dev/null 2>&1 & echo $!").stdout;
    let proc = bed.host("ctl").path_from_outside(format!("/proc/{}", orphan.trim()));
    wait_until(DEADLINE, "no zombie is left", || !proc.exists());
}

#[test]
fn a_cut_host_is_out_of_reach_until_it_joins() {
    if !available() {
        return;
    }
    let bed = bed(2);
    let [one, two] = [bed.host("n1"), bed.host("n2")];
    let _listener = listen(one);
    assert!(can_connect(two, one));
    one.cut();
    assert!(!can_connect(two, one));
    assert!(can_connect(one, one));
    one.join();
    wait_until(DEADLINE, "the host is back", || can_connect(two, one));
}

#[test]
fn a_crash_ends_one_hosts_processes_and_a_reboot_also_its_mounts() {
    if !available() {
        return;
    }
    let bed = bed(2);
    litter(&bed, "n1");
    litter(&bed, "n2");
    let [one, two] = [bed.host("n1"), bed.host("n2")];
    let mut command = one.command("sleep");
    command.arg("1000");
    let mut daemon = one.spawn_daemon(command, &bed.dir().join("log")).unwrap();
    one.crash();
    assert_eq!(one.processes(), []);
    assert_eq!(daemon.wait(DEADLINE).unwrap().signal(), Some(libc::SIGKILL));
    assert_eq!(one.new_mounts().len(), 1);
    assert_eq!(two.processes().len(), 1);
    assert_eq!(bed.processes(), two.processes());
    assert_eq!(one.ok(&["hostname"]), "n1\n");

    fs::write(two.path_from_outside("/run/file"), "").unwrap();
    two.reboot();
    assert_eq!(two.processes(), []);
    assert_eq!(two.new_mounts(), []);
    assert_eq!(two.ok(&["ls", "/run"]), "lock\n");
}

#[test]
fn munge_credentials_of_one_host_are_valid_on_another() {
    if !available() {
        return;
    }
    let bed = bed(2);
    let socket = bed.munge().unwrap();
    assert_eq!(bed.munge().unwrap(), socket);
    let (socket, credential) = (socket.display(), bed.dir().join("credential"));
    bed.host("n1").shell(&format!("munge -S {socket} -n | unmunge -S {socket}")).assert_success();
    fs::write(&credential, bed.host("n1").as_user(UID, UID).ok(&["munge", "-S", &socket.to_string(), "-n"]))
        .unwrap();
    let script = format!("unmunge -S {socket} < {}", credential.display());
    let decoded = bed.host("n2").shell(&script).assert_success().stdout.clone();
    assert!(decoded.contains(&UID.to_string()), "{decoded}");
}

#[test]
fn the_launcher_runs_a_command_in_another_host() {
    if !available() {
        return;
    }
    let bed = bed(2);
    let on = bed.dir().join("bin/on").to_string_lossy().into_owned();
    assert_eq!(bed.host("n1").ok(&[&on, "n2", "hostname"]), "n2\n");
    bed.host("n1").run(&[&on, "n9", "hostname"]).assert_code(1).assert_says("no host n9");
}

#[test]
fn a_bed_outlives_the_thread_that_built_it() {
    if !available() {
        return;
    }
    let bed = std::thread::spawn(|| bed(1)).join().unwrap();
    // A death signal tied to the thread would come at once, but in its own time.
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(bed.host("n1").ok(&["hostname"]), "n1\n");
}

#[test]
fn nine_hosts_are_quickly_there() {
    if !available() {
        return;
    }
    // Other tests run beside this one: the best of some.
    let best = (0..5).map(|_| {
        let start = Instant::now();
        let bed = bed(8);
        let built = start.elapsed();
        drop(bed);
        (built, start.elapsed())
    });
    let best = best.min().unwrap();
    println!("built in {:?}, gone after {:?}", best.0, best.1);
    assert!(best.0 < Duration::from_millis(700), "{best:?}");
}

#[test]
fn dropping_a_bed_leaves_nothing() {
    if !available() {
        return;
    }
    let before = interfaces();
    let bed = bed(1);
    let (dir, traces) = (bed.dir().to_owned(), litter(&bed, "n1"));
    assert!(traces.left().len() > 3);
    drop(bed);
    assert_eq!(traces.left(), Vec::<PathBuf>::new());
    assert!(!dir.exists());
    assert_eq!(interfaces(), before);
}

#[test]
fn a_panic_leaves_nothing() {
    if !available() {
        return;
    }
    let mut left = None;
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let bed = bed(1);
        left = Some((bed.dir().to_owned(), litter(&bed, "n1")));
        panic!("as a failing test does");
    }));
    assert!(panicked.is_err());
    let (dir, traces) = left.unwrap();
    assert_eq!(traces.left(), Vec::<PathBuf>::new());
    assert!(!dir.exists());
}

/// Ends a process that has a bed of two hosts, with a mount, a background process and a foreground one, by a signal.
/// Gives the bed's directory when nothing else is left.
fn end_a_process_with_a_bed(signal: Signal) -> PathBuf {
    let before = interfaces();
    let mut shell = Command::new(env!("CARGO_BIN_EXE_ondeck-testbed"))
        .args(["shell", "--hosts", "1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = shell.stdin.take().unwrap();
    let script = b"echo $BED; mkdir $BED/a; for host in ctl n1; do\n\
        on $host mount -t tmpfs tmpfs $BED/a\n\
        on $host sh -c 'setsid sleep 1000 >/dev/null 2>&1 &'\n\
        done\n\
        echo ready; on n1 sleep 1000\n";
    stdin.write_all(script).unwrap();
    let lines = BufReader::new(shell.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut lines: Vec<String> = lines.take_while(|line| line != "ready").collect();
    let dir = PathBuf::from(lines.remove(0));
    assert!(lines.is_empty(), "{lines:?}");
    let traces = Traces::of(&dir);
    assert!(traces.left().len() > 5);

    let pid = ondeck_testbed::Pid::from_child(&shell);
    rustix::process::kill_process(pid, signal).unwrap();
    assert!(!shell.wait().unwrap().success());
    wait_until(DEADLINE, "nothing is left", || traces.left().is_empty());
    assert_eq!(interfaces(), before);
    dir
}

#[test]
fn killing_the_process_that_has_a_bed_leaves_only_its_directory() {
    if !available() {
        return;
    }
    let dir = end_a_process_with_a_bed(Signal::KILL);
    assert_eq!(fs::read_dir(dir.join("a")).unwrap().count(), 0);
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn terminating_the_shell_leaves_nothing_at_all() {
    if !available() {
        return;
    }
    for signal in [Signal::TERM, Signal::INT] {
        assert!(!end_a_process_with_a_bed(signal).exists());
    }
}

#[test]
fn a_bed_that_cannot_be_built_says_why_and_leaves_nothing() {
    if !available() {
        return;
    }
    let error = |builder: ondeck_testbed::Builder| format!("{:#}", builder.build().unwrap_err());
    assert!(error(Testbed::builder()).contains("needs a host"));
    assert!(error(Testbed::builder().host("a b")).contains("no hostname"));
    assert!(error(Testbed::builder().host("a").host("a")).contains("twice"));
    assert!(error(Testbed::builder().host("a").private_directory("/nowhere")).contains("/nowhere"));
    assert!(error(Testbed::builder().host("a").binary("/bin/true")).contains("before the hosts were ready"));
    let own = format!("ondeck-testbed.{}.", std::process::id());
    let dirs = || fs::read_dir("/tmp").unwrap().map(|entry| entry.unwrap().path());
    let unfinished = |dir: &PathBuf| dir.to_string_lossy().contains(&own) && !dir.join("bin").exists();
    // Other tests may be building theirs.
    wait_until(DEADLINE, "no directory is left", || dirs().filter(unfinished).count() == 0);
}

#[test]
fn without_root_the_shell_says_what_it_needs() {
    if !available() {
        return;
    }
    let binary = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .tempdir()
        .unwrap();
    let path = binary.path().join("ondeck-testbed");
    fs::copy(env!("CARGO_BIN_EXE_ondeck-testbed"), &path).unwrap();
    let mut shell = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&path)
        .arg("shell")
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    shell.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(shell.wait().unwrap().code(), Some(1));
    assert!(said.contains("run it as root"), "{said}");
}
