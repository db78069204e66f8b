//! What an ordinary user of a node, or root of another one, tries with an agent's TCP port.

use std::fs;
use std::path::PathBuf;

use ondeck_testbed::{Daemon, Host, wait_until};

use crate::site::{self, DEADLINE, OWNER, PORT, STRANGER, Site};
use crate::walls::call;

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
