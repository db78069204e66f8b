//! Ordinary users, the same in every host of every bed, so that what looks users up by name finds somebody: Slurm
//! refuses jobs of a user without one, and a daemon that takes names needs names.
//!
//! The hosts see the machine's own `/etc/passwd` and `/etc/group` with these users added; the machine does not.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The users' names and ids; each has a group of the same name and id.
const USERS: [(&str, u32); 2] = [("alice", 20_001), ("bob", 20_002)];
/// The name and the id of the group that all users are in.
const TEAM: (&str, u32) = ("team", 20_100);

/// An ordinary user of a bed. [`Host::log_in`](crate::Host::log_in) runs programs as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The name, in `/etc/passwd` of every host.
    pub name: String,
    /// The user id.
    pub uid: u32,
    /// The id of the user's own group.
    pub gid: u32,
    /// The ids of the other groups: that of `team`.
    pub groups: Vec<u32>,
    /// The home directory, on the disk that the hosts share, with mode 0700.
    pub home: PathBuf,
    /// The user's directory in `scratch`, the disk that stands for a cluster's parallel filesystem, with mode 0700.
    pub scratch: PathBuf,
}

/// Makes the users' directories in the bed's directory.
///
/// Beside the users' own there is `scratch/team`, which the group may write and whose files are the group's.
pub(crate) fn make(dir: &Path) -> Result<Vec<User>> {
    let users = USERS.map(|(name, id)| User {
        name: name.to_owned(),
        uid: id,
        gid: id,
        groups: vec![TEAM.1],
        home: dir.join("home").join(name),
        scratch: dir.join("scratch").join(name),
    });
    make_directory(&dir.join("home"), 0, 0, 0o755)?;
    make_directory(&dir.join("scratch"), 0, 0, 0o755)?;
    make_directory(&dir.join("scratch").join(TEAM.0), 0, TEAM.1, 0o2770)?;
    for user in &users {
        make_directory(&user.home, user.uid, user.gid, 0o700)?;
        make_directory(&user.scratch, user.uid, user.gid, 0o700)?;
    }
    Ok(users.into())
}

/// Makes a directory of this owner, whatever the umask.
pub(crate) fn make_directory(path: &Path, uid: u32, gid: u32, mode: u32) -> Result<()> {
    let made = fs::create_dir(path)
        .and_then(|()| chown(path, Some(uid), Some(gid)))
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(mode)));
    made.with_context(|| format!("cannot make the directory {}", path.display()))
}

/// Writes a file that every user may read, whatever the umask.
pub(crate) fn write_public(path: &Path, content: &[u8]) -> Result<()> {
    let written =
        fs::write(path, content).and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o644)));
    written.with_context(|| format!("cannot write {}", path.display()))
}

/// What the hosts see as `/etc/passwd`.
pub(crate) fn passwd(machines: &str, users: &[User]) -> String {
    let mut table = without(machines, |name, id| USERS.iter().any(|user| user.0 == name || user.1 == id));
    for User { name, uid, gid, home, .. } in users {
        table += &format!("{name}:x:{uid}:{gid}::{}:/bin/sh\n", home.display());
    }
    table
}

/// What the hosts see as `/etc/group`.
pub(crate) fn group(machines: &str, users: &[User]) -> String {
    let ours = || USERS.iter().chain([&TEAM]);
    let mut table = without(machines, |name, id| ours().any(|group| group.0 == name || group.1 == id));
    for User { name, gid, .. } in users {
        table += &format!("{name}:x:{gid}:\n");
    }
    let members: Vec<&str> = users.iter().map(|user| user.name.as_str()).collect();
    table + &format!("{}:x:{}:{}\n", TEAM.0, TEAM.1, members.join(","))
}

/// The lines of a table whose name and id are not taken.
fn without(table: &str, is_taken: impl Fn(&str, u32) -> bool) -> String {
    let is_free = |line: &&str| {
        let mut fields = line.split(':');
        let name = fields.next().unwrap_or_default();
        let id = fields.nth(1).and_then(|id| id.parse().ok());
        id.is_none_or(|id| !is_taken(name, id))
    };
    table.lines().filter(is_free).map(|line| format!("{line}\n")).collect()
}

/// The ids of one of the machine's users. The binary may be static, without the C library's way to ask for them.
pub(crate) fn ids_of(name: &str, package: &str) -> Result<(u32, u32)> {
    let table = fs::read_to_string("/etc/passwd").context("cannot read /etc/passwd")?;
    table
        .lines()
        .find_map(|line| {
            let mut fields = line.split(':');
            (fields.next()? == name).then_some(())?;
            Some((fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?))
        })
        .with_context(|| format!("no user {name}; install the package {package}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_users_stay_unless_a_name_or_an_id_is_taken() {
        let users = [User {
            name: "alice".to_owned(),
            uid: 20_001,
            gid: 20_001,
            groups: vec![20_100],
            home: PathBuf::from("/bed/home/alice"),
            scratch: PathBuf::from("/bed/scratch/alice"),
        }];
        let machines =
            "root:x:0:0:root:/root:/bin/bash\nalice:x:1000:1000::/home/alice:/bin/sh\nx:x:20002:1::/:\n";
        let expected = "root:x:0:0:root:/root:/bin/bash\nalice:x:20001:20001::/bed/home/alice:/bin/sh\n";
        assert_eq!(passwd(machines, &users), expected);
        let machines = "root:x:0:\nteam:x:99:bob\n";
        assert_eq!(group(machines, &users), "root:x:0:\nalice:x:20001:\nteam:x:20100:alice\n");
    }
}
