//! With a real munged; skipped where there is none.

use std::io::Read as _;
use std::io::Write as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::exchange::read_request;
use super::{TempDir, assert_code};
use crate::munge::protocol::{DECODE_REQUEST, message};
use crate::munge::{Munge, MungeCode, MungeError};

/// A munged with its own key and socket, killed with the guard.
pub(crate) struct Munged {
    child: Child,
    dir: TempDir,
}

impl Munged {
    /// Starts one, or says why not and returns `None`: it takes root, and the package.
    pub(crate) fn start() -> Option<Self> {
        let skip = |why: &str| {
            ondeck_skip::skipped(why);
            None
        };
        if !rustix::process::geteuid().is_root() {
            return skip("not root");
        }
        for program in ["munged", "munge", "unmunge", "setpriv"] {
            let run = Command::new(program).arg("--version").stdout(Stdio::null()).status();
            if run.is_err() {
                return skip(&format!("no {program} here"));
            }
        }
        let accounts = std::fs::read_to_string("/etc/passwd").unwrap();
        let Some(account) = accounts.lines().find(|line| line.starts_with("munge:")) else {
            return skip("no account munge");
        };
        let ids: Vec<u32> = account.split(':').skip(2).take(2).map(|id| id.parse().unwrap()).collect();

        // munged is strict about its directory: it and the key must be its own.
        let dir = TempDir::new();
        let key = dir.0.join("key");
        let mut random = [0; 1024];
        std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut random).unwrap();
        std::fs::write(&key, random).unwrap();
        let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(&key, mode(0o400)).unwrap();
        std::fs::set_permissions(&dir.0, mode(0o755)).unwrap();
        for path in [&key, &dir.0] {
            std::os::unix::fs::chown(path, Some(ids[0]), Some(ids[1])).unwrap();
        }
        let mut munged = Self { child: Self::spawn(&dir.0), dir };
        munged.wait_until_it_listens();
        Some(munged)
    }

    fn spawn(dir: &Path) -> Child {
        let option = |name: &str, file: &str| format!("--{name}={}", dir.join(file).display());
        Command::new("setpriv")
            .args(["--reuid=munge", "--regid=munge", "--clear-groups"])
            .args(["setpriv", "--pdeathsig=KILL", "munged"]) // again, as a change of user clears it
            .args(["--foreground", "--num-threads=2"])
            .args([option("key-file", "key"), option("socket", "socket")])
            .args([option("pid-file", "pid"), option("log-file", "log"), option("seed-file", "seed")])
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(dir.join("stderr")).unwrap())
            .spawn()
            .unwrap()
    }

    fn wait_until_it_listens(&mut self) {
        let begin = Instant::now();
        while UnixStream::connect(self.socket()).is_err() {
            let ended = self.child.try_wait().unwrap();
            if ended.is_some() || begin.elapsed() > Duration::from_secs(20) {
                let said = std::fs::read_to_string(self.dir.0.join("stderr")).unwrap_or_default();
                panic!("munged did not start ({ended:?}): {said}");
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.0.join("socket")
    }

    fn client(&self) -> Munge {
        Munge::new(self.socket())
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Runs `munge` or `unmunge` as a user; its exit code and output.
    fn run(&self, program: &str, uid: u32, args: &[&str], input: &[u8]) -> (i32, String) {
        let mut child = Command::new(program)
            .arg("--socket")
            .arg(self.socket())
            .args(args)
            .uid(uid)
            .gid(uid)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        let output = child.wait_with_output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    }
}

impl Drop for Munged {
    fn drop(&mut self) {
        self.kill();
    }
}

fn now() -> u64 {
    std::time::UNIX_EPOCH.elapsed().unwrap().as_secs()
}

#[test]
fn real_munged_round_trip_and_replay() {
    let Some(munged) = Munged::start() else { return };
    let munge = munged.client();
    let binary: Vec<u8> = (0..=255).collect();
    for payload in [&b""[..], b"hello", &binary, &vec![0; 100_000]] {
        // time(2), which munged asks, is up to a tick behind.
        let before = now() - 1;
        let text = munge.encode(payload, None, Duration::ZERO).unwrap();
        assert!(text.starts_with("MUNGE:") && text.ends_with(':'), "{text}");
        let credential = munge.decode(&text).unwrap();
        assert_eq!(credential.payload, payload);
        assert_eq!((credential.uid, credential.gid), (0, rustix::process::getegid().as_raw()));
        assert_eq!(credential.only_for, None);
        assert!(credential.address.is_some());
        for time in [credential.encoded_at, credential.decoded_at] {
            assert!((before..=now()).contains(&time), "{time}");
        }
        // Neither the same text nor one that differs in what munged ignores is good again.
        assert_code(munge.decode(&text), MungeCode::Replayed);
        assert_code(munge.decode(&format!(" {text}\n")), MungeCode::Replayed);
    }
}

#[test]
fn real_munged_interoperates_with_its_programs() {
    let Some(munged) = Munged::start() else { return };
    let munge = munged.client();

    // Theirs, as another user, decoded by us.
    let (code, text) = munged.run("munge", NOBODY, &["--string", "from nobody"], b"");
    assert_eq!(code, 0);
    let credential = munge.decode(&text).unwrap();
    assert_eq!((credential.uid, credential.gid), (NOBODY, NOBODY));
    assert_eq!(credential.payload, b"from nobody");

    // Ours, decoded by theirs, with the time to live that was asked for; then a replay by us.
    for (ttl, want) in [(Duration::ZERO, 300), (Duration::from_millis(76_001), 77), (Duration::MAX, 3600)] {
        let text = munge.encode(b"from root", None, ttl).unwrap();
        let (code, output) = munged.run("unmunge", NOBODY, &[], text.as_bytes());
        assert_eq!(code, 0, "{output}");
        let has = |key: &str, value: &str| {
            output.lines().any(|line| line.starts_with(key) && line.trim_end().ends_with(value))
        };
        assert!(has("TTL:", &format!(" {want}")) && has("UID:", "root (0)"), "{output}");
        assert!(output.ends_with("\n\nfrom root"), "{output}");
        assert_code(munge.decode(&text), MungeCode::Replayed);
    }
}

#[test]
fn real_munged_lets_only_the_named_user_decode() {
    let Some(munged) = Munged::start() else { return };
    let munge = munged.client();
    let text = munge.encode(b"for nobody", Some(NOBODY), Duration::ZERO).unwrap();
    // Not even root; and the attempt does not use it up.
    assert_code(munge.decode(&text), MungeCode::Unauthorized);
    let (code, output) = munged.run("unmunge", NOBODY, &[], text.as_bytes());
    assert_eq!(code, 0, "{output}");

    let text = munge.encode(b"for me", Some(0), Duration::ZERO).unwrap();
    assert_eq!(munged.run("unmunge", NOBODY, &[], text.as_bytes()).0, 18);
    assert_eq!(munge.decode(&text).unwrap().only_for, Some(0));

    // As a server does it: a user's credential that only the server can decode.
    let (_, text) = munged.run("munge", NOBODY, &["--restrict-uid", "0", "--string", "hi"], b"");
    let credential = munge.decode(&text).unwrap();
    assert_eq!((credential.uid, credential.only_for), (NOBODY, Some(0)));
}

#[test]
fn real_munged_refuses_what_expired() {
    let Some(munged) = Munged::start() else { return };
    let munge = munged.client();
    let text = munge.encode(b"", None, Duration::from_secs(1)).unwrap();
    thread::sleep(Duration::from_millis(2200));
    let error = munge.decode(&text).unwrap_err();
    assert_eq!(error.code(), Some(MungeCode::Expired), "{error:?}");
    assert_eq!(error.to_string(), "munged refused: Expired credential");
}

#[test]
fn real_munged_refuses_garbage() {
    let Some(munged) = Munged::start() else { return };
    let munge = munged.client();
    assert_code(munge.decode(""), MungeCode::BadArgument);
    assert_code(munge.decode("  \n"), MungeCode::BadArgument);
    for garbage in
        ["garbage", "MUNGE:", "MUNGE::", "MUNGE:!!!!:", "MUNGE:\0:", "\0", "MUNGE:ä:", "Munge:AwQF:"]
    {
        let error = munge.decode(garbage).unwrap_err();
        assert!(error.code().is_some_and(MungeCode::is_about_the_credential), "{garbage:?}: {error:?}");
    }
    let text = munge.encode(b"payload", None, Duration::ZERO).unwrap();
    // Cut anywhere, or changed anywhere, it is refused for a fault of its own.
    for n in (0..text.len()).step_by(7) {
        let cut = munge.decode(&text[..n]).unwrap_err();
        assert!(cut.code().is_some_and(MungeCode::is_about_the_credential), "{n}: {cut:?}");
        let closed = munge.decode(&format!("{}:", &text[..n])).unwrap_err();
        assert!(closed.code().is_some_and(MungeCode::is_about_the_credential), "{n}: {closed:?}");
        let mut changed = text.clone().into_bytes();
        changed[n] = if changed[n] == b'A' { b'B' } else { b'A' };
        let changed = munge.decode(&String::from_utf8(changed).unwrap()).unwrap_err();
        assert!(changed.code().is_some_and(MungeCode::is_about_the_credential), "{n}: {changed:?}");
    }
    // That did not use it up.
    assert_eq!(munge.decode(&text).unwrap().payload, b"payload");

    // Made with another key.
    let other = Munged::start().unwrap();
    assert_code(munge.decode(&other.client().encode(b"", None, Duration::ZERO).unwrap()), MungeCode::Invalid);
}

#[test]
fn real_munged_takes_payloads_up_to_the_limit() {
    let Some(munged) = Munged::start() else { return };
    let munge = munged.client();
    let payload = vec![1; 750 * 1024];
    let text = munge.encode(&payload, None, Duration::ZERO).unwrap();
    assert_eq!(munge.decode(&text).unwrap().payload, payload);
    // A credential that could not be decoded is not handed out.
    let error = munge.encode(&vec![1; 800 * 1024], None, Duration::ZERO).unwrap_err();
    assert!(matches!(error, MungeError::TooLong { .. }), "{error:?}");
}

#[test]
fn real_munged_lets_a_retry_pass_but_no_replay() {
    let Some(munged) = Munged::start() else { return };
    // Between the client and munged: the first answer is lost, after munged has used the credential up.
    let proxy = munged.dir.0.join("proxy");
    let listener = UnixListener::bind(&proxy).unwrap();
    let real = munged.socket();
    let thread = thread::spawn(move || {
        let mut retries = vec![];
        for connection in 0..2 {
            let mut client = listener.accept().unwrap().0;
            let (retry, body) = read_request(&mut client);
            retries.push(retry);
            let mut server = UnixStream::connect(&real).unwrap();
            server.write_all(&message(DECODE_REQUEST, retry, &body)).unwrap();
            let mut answer = vec![];
            server.read_to_end(&mut answer).unwrap();
            if connection > 0 {
                client.write_all(&answer).unwrap();
            }
        }
        retries
    });
    let munge = munged.client();
    let text = munge.encode(b"once", None, Duration::ZERO).unwrap();
    assert_eq!(Munge::new(proxy).decode(&text).unwrap().payload, b"once");
    assert_eq!(thread.join().unwrap(), [0, 1]);
    assert_code(munge.decode(&text), MungeCode::Replayed);
}

#[test]
fn real_munged_killed_and_started_again() {
    let Some(mut munged) = Munged::start() else { return };
    let munge = munged.client();
    let text = munge.encode(b"survivor", None, Duration::ZERO).unwrap();
    munged.kill();
    assert!(munged.socket().exists(), "a stale socket is what this test is about");
    let begin = Instant::now();
    let error = munge.decode(&text).unwrap_err();
    assert!(matches!(error, MungeError::Unreachable { .. }), "{error:?}");
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());

    munged.child = Munged::spawn(&munged.dir.0);
    munged.wait_until_it_listens();
    assert_eq!(munge.decode(&text).unwrap().payload, b"survivor");
}

#[test]
fn real_munged_serves_many_threads() {
    let Some(munged) = Munged::start() else { return };
    let munge = munged.client();
    thread::scope(|scope| {
        for n in 0..16_u8 {
            let munge = &munge;
            scope.spawn(move || {
                for m in 0..20 {
                    let text = munge.encode(&[n, m], Some(0), Duration::ZERO).unwrap();
                    assert_eq!(munge.decode(&text).unwrap().payload, [n, m]);
                }
            });
        }
    });
}

const NOBODY: u32 = 65534;
