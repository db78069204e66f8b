//! What Slurm needs to have accounts and qualities of service: MariaDB with slurmdbd before it.
//!
//! Both run on the controller's host as the user of Slurm, and have all their files in the bed. The database is reached
//! by a socket there, and takes who connects for who the kernel says it is. It never waits for a disk: nobody needs
//! it after a crash.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use anyhow::{Result, ensure};

use super::{KEEPER, Slurm, USER, listens, read};
use crate::bed::Testbed;
use crate::host::Host;
use crate::inside::in_path;
use crate::plan::slurm_directory_in;
use crate::users::{self, make_directory};

/// The name under which the database is kept among the daemons.
const DATABASE: &str = "the database";
const KEEPER_PORT: u16 = 6819;
/// All users' account.
const ACCOUNT: &str = "testbed";

/// The least that works, and as little waiting as there can be.
const SMALL: [&str; 5] = [
    "--innodb-buffer-pool-size=16M",
    "--innodb-log-file-size=4M",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-flush-method=nosync",
    "--innodb-doublewrite=0",
];

/// The lines of slurm.conf that go with it.
pub(super) fn settings(controller: &str, munge_socket: &Path) -> [(&'static str, String); 6] {
    [
        ("AccountingStorageType", "accounting_storage/slurmdbd".to_owned()),
        ("AccountingStorageHost", controller.to_owned()),
        // Where MUNGE listens, whatever its name says.
        ("AccountingStoragePass", munge_socket.display().to_string()),
        // Users have what they were given, and no other quality of service.
        ("AccountingStorageEnforce", "associations,limits,qos".to_owned()),
        ("PriorityType", "priority/multifactor".to_owned()),
        ("PriorityWeightQOS", "10000".to_owned()),
    ]
}

/// Starts both, and returns when they answer and know the bed's users.
pub(super) fn start(slurm: &Slurm, bed: &Testbed, work: &Path) -> Result<()> {
    for program in ["mariadbd", "mariadb-install-db", "slurmdbd", "sacctmgr"] {
        ensure!(
            in_path(program),
            "{program} is not in PATH; install mariadb-server-core, mariadb-client-core, slurmdbd and \
             slurm-wlm-mysql-plugin"
        );
    }
    let (uid, gid) = users::ids_of(USER, "slurmctld")?;
    let directory = work.join("accounting");
    make_directory(&directory, uid, gid, 0o755)?;
    let host = slurm.controller.as_user(uid, gid);
    let (data, socket) = (directory.join("data"), directory.join("socket"));
    let temporary = directory.join("tmp");
    make_directory(&temporary, uid, gid, 0o755)?;
    start_database(slurm, &host, &data, &socket, &temporary)?;

    let conf = slurm_directory_in(bed.dir()).join("slurmdbd.conf");
    let text = format!(
        "DbdHost={controller}\nDbdPort={KEEPER_PORT}\nSlurmUser={USER}\nAuthType=auth/munge\n\
         AuthInfo=socket={munge}\nStorageType=accounting_storage/mysql\nStorageHost=localhost\nStorageUser={USER}\n\
         StorageLoc=accounting\nLogFile={log}\nPidFile={directory}/slurmdbd.pid\n",
        controller = slurm.controller.name(),
        munge = bed.munge()?.display(),
        log = slurm.log.join("slurmdbd.log").display(),
        directory = directory.display(),
    );
    fs::write(&conf, text)?;
    // slurmdbd wants it so, as it may have a password.
    fs::set_permissions(&conf, Permissions::from_mode(0o600))?;
    chown(&conf, Some(uid), Some(gid))?;
    let mut command = host.command("slurmdbd");
    command.arg("-D").env_clear().env("SLURM_CONF", &slurm.conf).current_dir("/");
    // It has no setting for the socket; the library of MariaDB's clients looks here.
    command.env("MYSQL_UNIX_PORT", &socket);
    command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    slurm.keep(KEEPER, slurm.controller.spawn_daemon(command, &slurm.log.join("slurmdbd.out"))?);
    slurm.wait_for(KEEPER, "slurmdbd listens", || listens(&slurm.controller, KEEPER_PORT))?;
    give_accounts(slurm, bed)
}

fn start_database(slurm: &Slurm, host: &Host, data: &Path, socket: &Path, temporary: &Path) -> Result<()> {
    let log = slurm.log.join("database.out");
    let data = format!("--datadir={}", data.display());
    // Its temporary tables are named by its process ID, which is the same in every bed: in a directory that beds share,
    // they would take each other's.
    let temporary = format!("--tmpdir={}", temporary.display());
    let mut install = host.command("mariadb-install-db");
    install.args(["--no-defaults", &data, "--skip-test-db", "--auth-root-authentication-method=socket"]);
    install.arg(format!("--auth-root-socket-user={USER}")).arg(&temporary).args(SMALL).current_dir("/");
    let output = install.output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "mariadb-install-db: {}{said}", String::from_utf8_lossy(&output.stdout));

    let mut command = host.command("mariadbd");
    command.args(["--no-defaults", "--skip-networking", &data, &temporary]).args(SMALL).current_dir("/");
    command.arg(format!("--socket={}", socket.display()));
    slurm.keep(DATABASE, slurm.controller.spawn_daemon(command, &log)?);
    slurm.wait_for(DATABASE, "the database is ready", || read(&log).contains("ready for connections"))
}

/// The users have one account. They may not take the quality of service `ondeck`, which comes before the usual one, but
/// `patient`, which comes after it.
fn give_accounts(slurm: &Slurm, bed: &Testbed) -> Result<()> {
    let users: Vec<&str> = bed.users().iter().map(|user| user.name.as_str()).collect();
    for words in [
        "add cluster testbed",
        "modify qos normal set priority=100",
        "add qos ondeck priority=1000",
        "add qos patient priority=50",
        &format!("add account {ACCOUNT}"),
        &format!("add user {} account={ACCOUNT} qos=normal,patient", users.join(",")),
    ] {
        let mut line = vec!["sacctmgr", "--immediate", "--quiet"];
        line.extend(words.split(' '));
        let ran = slurm.run_anyway(&slurm.controller, &line, "")?;
        ensure!(ran.success(), "sacctmgr {words}: {ran:#?}\n{}", slurm.all_last_words());
    }
    Ok(())
}
