//! What an ordinary user of a node, or root of another one, tries with an agent's TCP port.

use std::fs;
use std::path::PathBuf;

use ondeck_testbed::{Daemon, Host, wait_until};

use crate::isolation::call;
use crate::site::{self, DEADLINE, OWNER, PORT, STRANGER, Site};

/// Starts an attack on a host, as its user, and waits until it is under way.
fn attack(site: &Site, host: &Host, name: &str, arguments: &[&str]) -> Daemon {
    let program: PathBuf = site.bed.dir().join("ondeck-attack");
    if !program.exists() {
        // A copy, so that other users reach it wherever the target directory is.
        fs::copy(env!("CARGO_BIN_EXE_ondeck-attack"), &program).unwrap();
    }
    let mut command = host.command(&program);
    command.args(arguments);
    let attack = host.spawn_daemon(command, &site.bed.dir().join(format!("{name}.log"))).unwrap();
    wait_until(DEADLINE, "the attack is under way", || {
        assert!(attack.is_running(), "{}", attack.log());
        attack.log().contains("ready")
    });
    attack
}

#[test]
fn a_user_with_many_addresses_keeps_nobody_out_of_an_agent() {
    if !site::ready(&site::TMPFS) {
        return;
    }
    let site = Site::new();
    let agent = format!("{}:{PORT}", site.host("n1").address());
    let own = (2..=12).map(|last| format!("127.0.0.{last}")).chain([site.host("n1").address().to_string()]);
    let from = own.collect::<Vec<_>>().join(",");
    let user = site.host("n1").as_user(OWNER, OWNER);
    let line = ["crowd", "--daemon", &agent, "--from", &from, "--each", "64"];
    let crowd = attack(&site, &user, "crowd", &line);
    // A user of another node, and root of the node from which orders come.
    for _ in 0..20 {
        for host in [&site.host("n3").as_user(STRANGER, STRANGER), site.host("ctl")] {
            let (status, body) = call(&site, host, "n1", "GET", "/v1/node", &[]);
            assert_eq!(status, 200, "{body}");
        }
    }
    assert!(crowd.is_running(), "{}", crowd.log());
    drop(crowd);
    site.assert_nothing_is_left();
}

/// What `ondeck ramdisk nodes` says of n4 while somebody stands at the port of its agent, which has been killed.
fn nodes_says_of_n4(site: &Site) -> String {
    let ran = site.ramdisk(&["nodes", "--nodes", "n4"]);
    assert!(!ran.success(), "{ran:#?}");
    ran.stderr
}

#[test]
fn an_answer_of_another_daemon_on_the_node_is_not_believed() {
    if !site::ready(&site::TMPFS) {
        return;
    }
    let site = Site::new();
    let host = site.host("n4");
    site.kill_agent("n4");
    // As the scheduler where it is on an RSA node: of the same name, and of root.
    let text = fs::read_to_string(site.bed.dir().join("n4.toml")).unwrap();
    let state = format!("{}-other", site::STATE);
    let text = text.replace(&format!("{}-n4", site::STATE), &state);
    let text = text.replace("[agent]\n", "port = 7373\n[agent]\nsocket = \"/run/ondeck/other.sock\"\n");
    let config = site.bed.dir().join("other.toml");
    fs::write(&config, text).unwrap();
    let mut command = host.command(&site.ondeck);
    command.arg("agent").arg("--config").arg(&config);
    let other = host.spawn_daemon(command, &site.bed.dir().join("other.log")).unwrap();
    let (own, its) = (format!("{}:{PORT}", host.address()), format!("{}:7373", host.address()));
    wait_until(DEADLINE, "the other daemon listens", || {
        assert!(other.is_running(), "{}", other.log());
        host.listening().contains(&its.parse().unwrap())
    });
    let user = host.as_user(STRANGER, STRANGER);
    let line = ["pass-off", "--listen", &own, "--daemon", &its, "unread"];
    let attack = attack(&site, &user, "unread", &line);
    let said = nodes_says_of_n4(&site);
    assert!(said.contains("n4 did not prove that it is the agent"), "{said}");
    assert!(said.contains("meant for port 7272, and this is port 7373 of n4"), "{said}");
    drop((attack, other));
    site.start_agent("n4");
    site.ramdisk(&["nodes", "--nodes", "n4"]).assert_success();
    site.assert_nothing_is_left();
}

#[test]
fn an_answer_of_another_node_is_not_believed() {
    if !site::ready(&site::TMPFS) {
        return;
    }
    let site = Site::new();
    site.kill_agent("n4");
    let (own, other) =
        (format!("{}:{PORT}", site.host("n4").address()), format!("{}:{PORT}", site.host("n2").address()));
    let munge = site.munge.display().to_string();
    // Root anywhere can read a request; but the agent of n2 says who it is.
    let line =
        ["pass-off", "--listen", &own, "--daemon", &other, "resealed", "--node", "n2", "--munge", &munge];
    let attack = attack(&site, site.host("n4"), "resealed", &line);
    let said = nodes_says_of_n4(&site);
    assert!(said.contains("n4 did not prove that it is the agent: its answer was made by n2"), "{said}");
    drop(attack);
    site.start_agent("n4");
    site.ramdisk(&["nodes", "--nodes", "n4"]).assert_success();
    site.assert_nothing_is_left();
}

#[test]
fn a_machine_on_which_users_may_use_ports_below_1024_is_told_of() {
    if !site::ready(&site::TMPFS) {
        return;
    }
    let site = Site::new();
    let host = site.host("ctl");
    let line = || {
        let (ondeck, config) = (site.ondeck.display().to_string(), site.config.display().to_string());
        let said = host.run(&[ondeck.as_str(), "doctor", "--config", config.as_str()]).stdout;
        said.lines().find(|line| line.contains("ports below 1024")).unwrap().to_owned()
    };
    assert!(line().starts_with("ok"), "{}", line());
    // Of this host's network alone.
    host.shell("echo 80 > /proc/sys/net/ipv4/ip_unprivileged_port_start").assert_success();
    assert!(line().starts_with("limited") && line().contains("from 80 on"), "{}", line());
    site.assert_nothing_is_left();
}

/// Nobody there knows the secret. What a brick buffers before it asks for it is its own memory, not the node's.
#[test]
fn messages_without_an_end_take_no_more_than_a_bricks_own_memory() {
    let case = &site::GLUSTER;
    if !site::ready(case) {
        return;
    }
    let site = Site::new();
    let view = &site.build(case, "mine", "64MiB", 1)[0];
    fs::write(view.outside.join("before"), "x").unwrap();
    let brick = site.process("n1", "glusterfsd");
    let own = || {
        let status = fs::read_to_string(format!("/proc/{}/status", brick.pid.as_raw_nonzero())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap().to_owned();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
    };
    let listening: Vec<_> = site.host("n1").listening();
    let port = listening.iter().map(std::net::SocketAddr::port).find(|port| (24900..25900).contains(port));
    let at = format!("{}:{}", site.host("n1").address(), port.unwrap());
    let user = site.host("n4").as_user(STRANGER, STRANGER);
    let line = ["records", "--brick", &at, "--connections", "8", "--idle", "3000"];
    let attack = attack(&site, &user, "records", &line);
    let ram = fs::read_to_string("/proc/meminfo").unwrap();
    let ram = ram.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let ram = ram.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10;
    let most = (128 << 20) + (ram / 64).clamp(256 << 20, 1 << 30);
    // While it goes on, whoever knows the secret works.
    let mut seen = 0;
    for number in 0..50 {
        seen = seen.max(own());
        fs::write(view.outside.join(format!("file-{number}")), vec![7; 1 << 20]).unwrap();
        fs::remove_file(view.outside.join(format!("file-{number}"))).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    assert!(attack.is_running(), "{}", attack.log());
    assert!(seen <= most, "the brick took {seen} bytes of {most}");
    drop(attack);
    wait_until(DEADLINE, "the brick has given back what it took", || own() < 128 << 20);
    assert_eq!(fs::read_to_string(view.outside.join("before")).unwrap(), "x");
    site.destroy("mine");
    site.assert_nothing_is_left();
}
