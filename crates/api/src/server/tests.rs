//! Requests through both sockets, and callers who would keep others out.

use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Method, StatusCode};
use axum::response::{Html, Response};
use axum::routing::{any, get, post};
use hyper_util::service::TowerToHyperService;
use ondeck_core::RamDiskId;
use serde::Deserialize;

use super::answer::{MOST_OF_OTHERS, RequestHead, handle};
use super::connection::{MOST_BUFFERED, SILENCE};
use super::doors::Origin;
use super::refusals::{MOST_REFUSALS, Refusals};
use super::{Content, Daemon, Json, Listening, PATIENCE, Path, PathInQuery, Peer, Query, Server, from_text};
use crate::auth::{Administrators, Caller};
use crate::config::Administrator;
use crate::envelope;
use crate::munge::Munge;
use crate::munge::tests::real_munged::Munged;
use crate::wire::{MOST_BYTES, Refusal, RefusalCode};

#[derive(Deserialize)]
struct List(Vec<u8>);

impl Content for List {
    const NAME: &'static str = "the list";
}

#[derive(Deserialize)]
struct Named {
    #[serde(deserialize_with = "from_text")]
    id: RamDiskId,
}

#[derive(Deserialize)]
struct Wait {
    #[serde(default)]
    wait: u64,
}

/// Waits for one second, if it is let.
async fn slow(caller: Caller) -> Json<u32> {
    tokio::time::sleep(Duration::from_secs(1)).await;
    Json(caller.uid)
}

async fn id(Path(Named { id }): Path<Named>) -> String {
    id.to_string()
}

async fn wait(Query(Wait { wait }): Query<Wait>) -> Json<u64> {
    Json(wait)
}

async fn path(PathInQuery(path): PathInQuery) -> String {
    format!("{path:?}")
}

async fn list(_: super::Administrator, Json(List(list)): Json<List>) -> Json<usize> {
    Json(list.len())
}

fn router() -> Router {
    Router::new()
        .route("/v1/slow", get(slow))
        .route("/v1/page", any(async || Html("<p>")))
        .route("/v1/ramdisks/{id}", get(id))
        .route("/v1/wait", get(wait))
        .route("/v1/path", get(path))
        .route("/v1/list", post(list))
        .route("/v1/broken", get(async || StatusCode::IM_A_TEAPOT))
}

fn daemon(router: Router) -> Arc<Daemon> {
    Arc::new(Daemon {
        name: "n1".parse().unwrap(),
        router: TowerToHyperService::new(router),
        port: None,
        munge: Munge::new("/nowhere"),
        administrators: Administrators::new(&[]),
        refusals: Refusals::default(),
    })
}

fn listening(socket: &std::path::Path, connections: usize) -> Listening {
    Listening {
        name: "n1".parse().unwrap(),
        socket: socket.to_owned(),
        tcp: None,
        connections,
        munge: Munge::new("/nowhere"),
        administrators: Administrators::new(&[]),
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn text_of(response: Response) -> String {
    let body = runtime().block_on(to_bytes(response.into_body(), MOST_BYTES)).unwrap();
    String::from_utf8(body.to_vec()).unwrap()
}

/// What a user of this machine is answered; of a refusal its status, code and words.
fn ask(uid: u32, method: &str, path: &str, body: &'static str) -> Result<String, (u16, RefusalCode, String)> {
    let request = hyper::Request::builder().method(method).uri(path).body(Body::from(body)).unwrap();
    let response = runtime().block_on(handle(daemon(router()), Peer::Local(Some(uid)), request));
    let (status, kind) = (response.status(), response.headers()["content-type"].clone());
    let text = text_of(response);
    if status.is_success() {
        return Ok(text);
    }
    assert_eq!(kind, "application/json");
    let refusal: Refusal = serde_json::from_str(&text).unwrap();
    Err((status.as_u16(), refusal.code, refusal.message))
}

#[test]
fn the_parts_of_a_request_are_told_apart() {
    assert_eq!(ask(0, "GET", "/v1/ramdisks/a@1/", "").unwrap(), "a@1");
    assert_eq!(ask(0, "GET", "/v1/wait?other=1&wait=20&path=%2Fa%20b", "").unwrap(), "20");
    assert_eq!(ask(0, "GET", "/v1/path?wait=20&path=%2Fa%20b+c", "").unwrap(), "\"/a b+c\"");
    assert_eq!(ask(0, "POST", "/v1/list", "[1, 2]").unwrap(), "2");
    assert_eq!(ask(1, "GET", "/v1/wait", "").unwrap(), "0");
    let (status, code, message) = ask(0, "GET", "/v9/node", "").unwrap_err();
    assert_eq!((status, code), (404, RefusalCode::NotFound));
    assert_eq!(message, "this daemon speaks v1, and the request is for `v9`");
    let (status, code, message) = ask(0, "POST", "/v1/list", "[1").unwrap_err();
    assert_eq!((status, code), (400, RefusalCode::Malformed));
    assert!(message.starts_with("the list: "), "{message}");
}

#[test]
fn a_percent_encoded_part_of_a_path_is_what_it_stands_for() {
    assert_eq!(ask(0, "GET", "/v1/ramdisks/%61%401", "").unwrap(), "a@1");
    for path in ["/v1/ramdisks/..%2f..@1", "/v1/ramdisks/%ff@1", "/v1/ramdisks/a", "/v1/ramdisks/a%zz@1"] {
        let (status, code, message) = ask(0, "GET", path, "").unwrap_err();
        assert_eq!((status, code), (400, RefusalCode::Malformed), "{path}: {message}");
    }
    // In the type's own words.
    let wanted = "a@x".parse::<RamDiskId>().unwrap_err().to_string();
    assert_eq!(ask(0, "GET", "/v1/ramdisks/a@x", "").unwrap_err().2, wanted);
}

#[test]
fn a_query_that_is_not_understood_is_refused_and_does_not_count_as_absent() {
    for path in
        ["/v1/wait?wait=long", "/v1/wait?wait=", "/v1/wait?wait=-1", "/v1/wait?wait=%ff", "/v1/wait?x=%ff"]
    {
        let (status, code, message) = ask(0, "GET", path, "").unwrap_err();
        assert_eq!((status, code), (400, RefusalCode::Malformed), "{path}: {message}");
    }
    let (.., message) = ask(0, "GET", "/v1/wait?wait=long", "").unwrap_err();
    assert_eq!(message, "the query can't be understood: wait: invalid digit found in string");
    for path in ["/v1/path", "/v1/path?path=", "/v1/path?path=%zz", "/v1/path?path=a"] {
        assert_eq!(ask(0, "GET", path, "").unwrap_err().0, 400, "{path}");
    }
    // Names of files are bytes.
    assert_eq!(ask(0, "GET", "/v1/path?path=%2f%ff", "").unwrap(), "\"/\\xFF\"");
}

#[test]
fn what_no_route_is_for_is_refused_in_the_form_of_all_refusals() {
    for (method, path) in [
        ("GET", "/v1/other"),
        ("PUT", "/v1/slow"),
        ("GET", "/v1/list"),
        ("GET", "/v1"),
        ("DELETE", "/v1/wait"),
    ] {
        let (status, code, message) = ask(0, method, path, "").unwrap_err();
        assert_eq!((status, code), (404, RefusalCode::NotFound), "{method} {path}");
        assert_eq!(message, format!("there is nothing at {path}"));
    }
    assert_eq!(ask(0, "GET", "/v1/broken", "").unwrap_err().1, RefusalCode::Failed);
}

#[test]
fn who_may_not_do_a_thing_is_told_so_before_the_body_is_looked_at() {
    let (status, code, _) = ask(7, "POST", "/v1/list", "[1").unwrap_err();
    assert_eq!((status, code), (403, RefusalCode::Forbidden));
}

#[test]
fn a_body_that_the_credential_does_not_cover_reaches_no_handler() {
    static REACHED: AtomicU32 = AtomicU32::new(0);
    let reach = async || {
        REACHED.fetch_add(1, Ordering::Relaxed);
        Json(())
    };
    let daemon = daemon(Router::new().route("/v1/list", post(reach)));
    let answer = |covered: &[u8], body: &'static str| {
        let known = RequestHead {
            caller: Caller::local(0),
            secret: None,
            authority: None,
            body: Some(envelope::hash(covered)),
            seal: None,
        };
        let request = hyper::Request::builder().method(Method::POST).uri("/v1/list").body(()).unwrap();
        let (parts, ()) = request.into_parts();
        runtime().block_on(daemon.answer(known, parts, Body::from(body)))
    };
    let response = answer(b"[1]", "[2]");
    assert_eq!(response.status(), StatusCode::UNAUTHORIZED);
    let refusal: Refusal = serde_json::from_str(&text_of(response)).unwrap();
    assert_eq!(refusal.code, RefusalCode::Unauthenticated);
    assert_eq!(REACHED.load(Ordering::Relaxed), 0);
    assert_eq!(answer(b"[2]", "[2]").status(), StatusCode::OK);
    assert_eq!(REACHED.load(Ordering::Relaxed), 1);
}

#[test]
fn over_tcp_answers_and_refusals_are_sealed_as_they_are_sent() {
    let Some(munged) = Munged::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let root_here = Administrator { user: "root".into(), host: "127.0.0.1".into() };
    let listening = Listening {
        name: "127.0.0.1".parse().unwrap(),
        tcp: Some("127.0.0.1:0".parse().unwrap()),
        munge: Munge::new(munged.socket()),
        administrators: Administrators::new(&[root_here]),
        ..listening(&dir.path().join("socket"), 8)
    };
    runtime().block_on(async {
        let server = Server::bind(router(), listening).await.unwrap();
        let port = server.tcp.as_ref().unwrap().local_addr().unwrap().port();
        tokio::spawn(server.serve(std::future::pending()));
        let endpoint = crate::Endpoint::Node { name: "127.0.0.1".parse().unwrap(), port };
        let client = crate::Client::new(&munged.socket());
        let text = async |method: &str, path: &str| {
            let answer = client.call_text(&endpoint, method, path, PATIENCE).await;
            answer.map_err(|error| (error.code(), error.to_string()))
        };
        // The credential covers the path as it is sent, and not what it stands for.
        assert_eq!(text("GET", "/v1/ramdisks/%61%401/?x=%2f").await.unwrap(), "a@1");
        assert_eq!(text("GET", "/v1/page").await.unwrap(), "<p>");
        for (method, path, code) in [
            ("PUT", "/v1/slow", RefusalCode::NotFound),
            ("GET", "/v2/slow", RefusalCode::NotFound),
            ("GET", "/v1/wait?wait=long", RefusalCode::Malformed),
        ] {
            assert_eq!(text(method, path).await.unwrap_err().0, Some(code), "{method} {path}");
        }
        let list = client.call::<usize>(&endpoint, "POST", "/v1/list", Some(&[1, 2]), None, PATIENCE);
        assert_eq!(list.await.unwrap(), 2);
    });
}

/// Tells when it is dropped.
struct Dropped(tokio::sync::mpsc::UnboundedSender<&'static str>);

impl Drop for Dropped {
    fn drop(&mut self) {
        let _ = self.0.send("dropped");
    }
}

#[test]
fn a_handler_that_waits_is_dropped_when_its_caller_hangs_up() {
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let waiting = move || {
        let tell = tell.clone();
        async move {
            let _ = tell.send("waits");
            let _dropped = Dropped(tell);
            std::future::pending::<Json<()>>().await
        }
    };
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    runtime().block_on(async {
        let router = Router::new().route("/v1/waiting", get(waiting));
        let server = Server::bind(router, listening(&socket, 4)).await.unwrap();
        tokio::spawn(server.serve(std::future::pending()));
        let mut stream = tokio::net::UnixStream::connect(&socket).await.unwrap();
        use tokio::io::AsyncWriteExt;
        stream.write_all(b"GET /v1/waiting HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut next = async || tokio::time::timeout(PATIENCE, told.recv()).await.unwrap();
        assert_eq!(next().await, Some("waits"));
        drop(stream);
        assert_eq!(next().await, Some("dropped"));
    });
}

#[test]
fn requests_that_wait_hold_no_thread() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let listening = listening(&socket, 200);
    let began = Instant::now();
    runtime.block_on(async {
        let server = Server::bind(router(), listening).await.unwrap();
        tokio::spawn(server.serve(std::future::pending()));
        let client = crate::Client::new(std::path::Path::new("/nowhere"));
        let endpoint = crate::Endpoint::Socket(socket);
        let call = async |path: &str| {
            client.call::<u32>(&endpoint, "GET", path, None::<&()>, None, Duration::from_secs(20)).await
        };
        let mut waiting = tokio::task::JoinSet::new();
        for _ in 0..50 {
            let (client, endpoint) = (client.clone(), endpoint.clone());
            waiting.spawn(async move {
                let limit = Duration::from_secs(20);
                client.call::<u32>(&endpoint, "GET", "/v1/slow", None::<&()>, None, limit).await
            });
        }
        let uid = rustix::process::geteuid().as_raw();
        while let Some(answer) = waiting.join_next().await {
            assert_eq!(answer.unwrap().unwrap(), uid);
        }
        assert_eq!(call("/v1/other").await.unwrap_err().code(), Some(RefusalCode::NotFound));
        assert!(matches!(call("/v1/page").await, Err(crate::CallError::Gibberish { .. })));
    });
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

/// What was logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn however_often_a_user_is_refused_the_log_stays_short() {
    const USER: u32 = 20_001;
    let runtime = runtime();
    let daemon = daemon(router());
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let path = format!("/v1/{}", "x".repeat(5000));
    let ask = async |uid: u32, path: &str| {
        let request = hyper::Request::builder().uri(path).body(Body::empty()).unwrap();
        assert_eq!(handle(Arc::clone(&daemon), Peer::Local(Some(uid)), request).await.status(), 404);
    };
    let said = || String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    runtime.block_on(async {
        for _ in 0..1000 {
            ask(USER, &path).await;
        }
        assert_eq!(said().lines().count(), MOST_REFUSALS as usize);
        assert!(said().len() < 1000 * MOST_REFUSALS as usize, "{}", said());
        ask(USER + 1, "/v1/of-another").await;
        assert!(said().contains("of-another"));
        for _ in 0..100 {
            ask(0, "/v1/of-root").await;
        }
        assert_eq!(said().matches("refused").count(), MOST_REFUSALS as usize + 101);
        daemon.refusals.begin_anew(USER);
        let more = format!("more={}", 1000 - MOST_REFUSALS);
        assert!(said().lines().last().unwrap().contains(&more), "{}", said());
        ask(USER, "/v1/again").await;
        assert!(said().contains("/v1/again"));
    });
}

#[test]
fn a_machine_is_one_origin_whatever_address_it_uses() {
    let of = |address: &str| {
        let own: [IpAddr; 2] = ["10.0.0.5".parse().unwrap(), "fd00::5".parse().unwrap()];
        Origin::of(address.parse().unwrap(), |address| own.contains(&address))
    };
    for own in ["127.0.0.1", "127.9.8.7", "::1", "::ffff:127.0.0.2", "10.0.0.5", "::ffff:10.0.0.5", "fd00::5"]
    {
        assert_eq!(of(own), Origin::ThisMachine, "{own}");
    }
    assert_eq!(of("10.0.0.6"), of("::ffff:10.0.0.6"));
    assert_ne!(of("10.0.0.6"), of("10.0.0.7"));
    assert_eq!(of("fd00::6"), of("fd00::dead:beef"));
    assert_ne!(of("fd00::6"), of("fd00:0:0:1::6"));
}

#[test]
fn connections_from_many_addresses_of_this_machine_are_of_one_origin() {
    const EACH: usize = 8;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let tcp = Some("127.0.0.1:0".parse().unwrap());
    let listening = Listening { tcp, ..listening(&dir.path().join("socket"), EACH * 4) };
    let open = runtime.block_on(async {
        let server = Server::bind(router(), listening).await.unwrap();
        let daemon = server.tcp.as_ref().unwrap().local_addr().unwrap();
        tokio::spawn(server.serve(std::future::pending()));
        let mut all = Vec::new();
        for last in 2..=4 {
            for _ in 0..EACH {
                let socket = tokio::net::TcpSocket::new_v4().unwrap();
                socket.bind(([127, 0, 0, last], 0).into()).unwrap();
                all.push(socket.connect(daemon).await.unwrap());
            }
        }
        // Those that are let in are answered, and the others are closed.
        let mut open = 0;
        for stream in &mut all {
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            let _ = stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
            open += usize::from(matches!(stream.read(&mut [0]).await, Ok(1)));
        }
        open
    });
    assert_eq!(open, EACH);
}

#[test]
fn what_is_too_long_or_comes_to_no_end_is_refused_or_cut_off() {
    use std::io::Write;
    const USER: u32 = 20_001;
    if !rustix::process::geteuid().is_root() {
        ondeck_skip::skipped("it needs root");
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let socket = dir.path().join("socket");
    let listening = listening(&socket, 32);
    runtime.block_on(async {
        let server = Server::bind(router(), listening).await.unwrap();
        tokio::spawn(server.serve(std::future::pending()));
    });
    let said = |uid: u32, head: &str, length: usize, sent: usize| {
        let mut stream = idle(&socket, uid, 1).pop().unwrap();
        let head = format!("POST /v1/page HTTP/1.1\r\nhost: x\r\n{head}content-length: {length}\r\n\r\n");
        // What is not read any more can't be written.
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&vec![b' '; sent]));
        let mut answer = vec![0; 4096];
        stream.set_read_timeout(Some(PATIENCE * 2)).unwrap();
        let length = read(&mut stream, &mut answer).unwrap_or(0);
        String::from_utf8_lossy(&answer[..length]).into_owned()
    };
    let (limit, more) = (MOST_OF_OTHERS, MOST_OF_OTHERS + 1);
    assert!(said(USER, "", limit, limit).contains(" 200 "));
    assert!(said(0, "", more, more).contains(" 200 "));
    for (uid, length, sent) in [(USER, more, more), (0, MOST_BYTES + 1, MOST_BYTES + 1), (USER, limit, 1)] {
        let answer = said(uid, "", length, sent);
        assert!(answer.contains(" 400 ") && answer.contains("too long"), "{uid}: {answer}");
    }
    let header = format!("x: {}\r\n", "x".repeat(MOST_BUFFERED * 2));
    let answer = said(USER, &header, 0, 0);
    assert!(!answer.contains(" 200 "), "{answer}");
}

/// Reads once. If the process is stopped and goes on, a read that has a time limit ends with EINTR (signal(7)).
fn read(stream: &mut std::os::unix::net::UnixStream, into: &mut [u8]) -> std::io::Result<usize> {
    loop {
        match std::io::Read::read(stream, into) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

/// Connections of this user that say nothing.
fn idle(socket: &std::path::Path, uid: u32, number: usize) -> Vec<std::os::unix::net::UnixStream> {
    let socket = socket.to_owned();
    let connect = move || {
        // The kernel's call changes this thread alone.
        let uid = rustix::process::Uid::from_raw(uid);
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        (0..number).map(|_| std::os::unix::net::UnixStream::connect(&socket).unwrap()).collect()
    };
    std::thread::spawn(connect).join().unwrap()
}

#[test]
fn idle_connections_of_users_keep_neither_root_nor_other_users_out() {
    const USERS: [u32; 2] = [20_001, 20_002];
    if !rustix::process::geteuid().is_root() {
        ondeck_skip::skipped("it needs root");
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let socket = dir.path().join("socket");
    let listening = listening(&socket, 32);
    runtime.block_on(async {
        let server = Server::bind(router(), listening).await.unwrap();
        tokio::spawn(server.serve(std::future::pending()));
    });
    let mut held = idle(&socket, USERS[0], 300);
    let ask = |uid: u32| {
        let (limit, began) = (Duration::from_secs(3), Instant::now());
        let mut stream = idle(&socket, uid, 1).pop().unwrap();
        stream.set_read_timeout(Some(limit)).unwrap();
        let mut answer = String::new();
        use std::io::{Read, Write};
        stream.write_all(b"GET /v1/page HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.ends_with("<p>"), "{answer}");
        assert!(began.elapsed() < limit, "{:?}", began.elapsed());
    };
    ask(0);
    ask(USERS[1]);
    held.extend(idle(&socket, USERS[1], 300));
    ask(0);
    // Whoever says nothing is not listened to for ever.
    held[0].set_read_timeout(Some(SILENCE * 2)).unwrap();
    assert_eq!(read(&mut held[0], &mut [0]).unwrap(), 0);
    ask(USERS[0]);
    drop(held);
}
