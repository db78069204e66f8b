//! Dropping to a user before anything of theirs is opened. Small and separate, so that it can be read in one go.

use std::io;
use std::path::PathBuf;
use std::process::Command;

/// A user's numeric identity with all groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The login name.
    pub name: String,
    /// User id.
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
        /// Why.
        source: io::Error,
    },
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

    /// Becomes this user for the rest of the process's life: groups, then gid, then uid, each real, effective and
    /// saved, and no new privileges from then on. Must be called before any thread is started.
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
            // A change of uid clears the dumpable flag, and with it the right to read one's own /proc/self/fd.
            check(libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0)).map_err(refused)?;
        }
        Ok(())
    }
}
