//! Dropping to a user before anything of theirs is opened. Small and separate, so that it can be read in one go.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::process::Command;

/// A user's numeric identity with all groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The login name.
    pub name: String,
    /// The user whose rights count.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Every group the user is in, the primary one included.
    pub groups: Vec<u32>,
    /// The home directory.
    pub home: PathBuf,
}

/// Why a user could not be looked up or become.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum CredentialError {
    /// The name service does not know the user.
    #[error("there is no user `{name}` on this machine{}{detail}", if .detail.is_empty() { "" } else { ": " })]
    Unknown {
        /// The name or number that was asked for.
        name: String,
        /// What was said instead.
        detail: String,
    },
    /// The kernel refused.
    #[error("can't become user {uid}: {source}; only root may")]
    Refused {
        /// The user asked for.
        uid: u32,
        source: io::Error,
    },
}

/// Whether the calling thread may do with an open directory what `access` says, by its identity for files.
///
/// # Errors
/// The kernel's other than "no"; `ENOSYS` before Linux 5.8, which can't tell.
pub fn may(directory: BorrowedFd<'_>, access: rustix::fs::Access) -> io::Result<bool> {
    // Not the C library's: where the kernel lacks the call, that one goes by the real user, who is root.
    // SAFETY: a descriptor that is open and a string that ends with zero, both only read.
    let done = unsafe {
        libc::syscall(
            libc::SYS_faccessat2,
            directory.as_raw_fd(),
            c".".as_ptr(),
            access.bits() as libc::c_int,
            libc::AT_EACCESS,
        )
    };
    match io::Error::last_os_error() {
        _ if done == 0 => Ok(true),
        error if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EROFS)) => Ok(false),
        error => Err(error),
    }
}

impl User {
    /// Looks up a name or a number.
    ///
    /// It asks `getent(1)` and `id(1)`: a static binary can't load the name-service modules (LDAP, SSSD) that know a
    /// site's users.
    ///
    /// # Errors
    /// [`CredentialError::Unknown`] if there is no such user or the two can't be run.
    pub fn look_up(name: &str) -> Result<User, CredentialError> {
        let unknown =
            |detail: &str| CredentialError::Unknown { name: name.to_owned(), detail: detail.to_owned() };
        let ask = |command: &str, arguments: [&str; 2]| -> Result<String, CredentialError> {
            let output = Command::new(command)
                .args(arguments)
                .output()
                .map_err(|error| unknown(&format!("can't run {command}(1): {error}")))?;
            if !output.status.success() {
                return Err(unknown(String::from_utf8_lossy(&output.stderr).trim()));
            }
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        };
        if name.is_empty() || name.starts_with('-') {
            return Err(unknown("that is no user's name"));
        }
        let entry = ask("getent", ["passwd", name])?;
        let fields: Vec<&str> = entry.split(':').collect();
        let [login, _, uid, gid, _, home, _] = fields[..] else {
            return Err(unknown(&format!("getent(1) said `{entry}`")));
        };
        let number = |text: &str| text.parse().map_err(|_| unknown(&format!("`{text}` is no number")));
        let groups = ask("id", ["-G", login])?.split_whitespace().map(number).collect::<Result<_, _>>()?;
        Ok(User {
            name: login.to_owned(),
            uid: number(uid)?,
            gid: number(gid)?,
            groups,
            home: PathBuf::from(home),
        })
    }

    /// Does work on a thread of its own that reaches files as this user does, with all groups, and ends afterwards.
    ///
    /// Only the identity for files is changed (setfsuid(2), and the groups, which the kernel keeps for each thread): to
    /// the user's own processes the thread stays root's, so that they can neither signal nor trace it.
    ///
    /// # Errors
    /// [`CredentialError::Refused`]; then the work was not begun.
    pub fn on_a_thread<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, CredentialError> {
        let refused = |source| CredentialError::Refused { uid: self.uid, source };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().spawn_scoped(scope, || {
                self.reach_files()?;
                Ok(work())
            });
            match thread.map_err(refused)?.join() {
                Ok(done) => done.map_err(refused),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Makes the calling thread reach files as this user, for the rest of its life.
    ///
    /// # Errors
    /// The kernel's; the thread must then end, because its groups may have changed already.
    pub fn reach_files(&self) -> io::Result<()> {
        let groups: Vec<_> = self.groups.iter().map(|gid| rustix::thread::Gid::from_raw(*gid)).collect();
        rustix::thread::set_thread_groups(&groups)?;
        // These tell no error; asked for an impossible id they tell the one that is in force.
        // SAFETY: plain system calls by value, for the calling thread alone.
        let (uid, gid) = unsafe {
            libc::setfsgid(self.gid);
            libc::setfsuid(self.uid);
            (libc::setfsuid(u32::MAX), libc::setfsgid(u32::MAX))
        };
        if (uid as u32, gid as u32) == (self.uid, self.gid) {
            Ok(())
        } else {
            Err(io::Error::from(rustix::io::Errno::PERM))
        }
    }

    /// Becomes this user for the rest of the process's life: groups, then gid, then uid, each real, effective and
    /// saved, and no new privileges from then on. Other processes of the user can't trace it, nor reach its memory and
    /// open files: it was root's, and speaks for it. Must be called before any thread is started.
    ///
    /// # Errors
    /// [`CredentialError::Refused`]; the caller must then end, because some ids may have changed already.
    pub fn become_for_good(&self) -> Result<(), CredentialError> {
        let refused = |_| CredentialError::Refused { uid: self.uid, source: io::Error::last_os_error() };
        let check = |result: libc::c_int| if result == 0 { Ok(()) } else { Err(result) };
        // SAFETY: plain system calls by value; the group list lives until setgroups has returned.
        unsafe {
            check(libc::setgroups(self.groups.len(), self.groups.as_ptr())).map_err(refused)?;
            check(libc::setresgid(self.gid, self.gid, self.gid)).map_err(refused)?;
            check(libc::setresuid(self.uid, self.uid, self.uid)).map_err(refused)?;
            check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)).map_err(refused)?;
            // The change of uid has done so already, unless the machine's fs.suid_dumpable says otherwise. What the
            // process has in its own /proc/self/fd it reaches all the same.
            check(libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0)).map_err(refused)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::fd::AsFd;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_thread_reaches_files_as_the_user_and_the_process_stays_what_it_was() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let (file, shared) = (dir.path().join("file"), dir.path().join("shared"));
        fs::write(&file, "secret").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        fs::create_dir(&shared).unwrap();
        std::os::unix::fs::chown(&shared, None, Some(4711)).unwrap();
        fs::set_permissions(&shared, fs::Permissions::from_mode(0o770)).unwrap();
        let user = |groups: &[u32]| User {
            name: "somebody".into(),
            uid: 20_001,
            gid: 20_001,
            groups: groups.to_vec(),
            home: PathBuf::from("/"),
        };
        let kind = user(&[]).on_a_thread(|| fs::read(&file).unwrap_err().kind()).unwrap();
        assert_eq!(kind, io::ErrorKind::PermissionDenied);
        let directory = fs::File::open(&shared).unwrap();
        let may = || may(directory.as_fd(), rustix::fs::Access::WRITE_OK).unwrap();
        assert!(!user(&[]).on_a_thread(may).unwrap());
        assert!(user(&[4711]).on_a_thread(may).unwrap());
        assert_eq!(fs::read(&file).unwrap(), b"secret");
    }
}
