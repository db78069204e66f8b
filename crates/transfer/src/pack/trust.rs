//! How far an archive is trusted.

use rustix::fs::Mode;

use super::header::Header;
use crate::Ownership;

/// What an archive may say of who may do what with its entries.
#[derive(Clone, Copy)]
pub(super) enum Trust {
    /// All that the caller could say as well.
    Full,
    /// Nothing beyond what the umask leaves: it may be a stranger's.
    Umask(Mode),
}

impl Trust {
    /// Takes from a header what must not be followed.
    pub fn narrow(self, header: &mut Header) {
        if let Trust::Umask(umask) = self {
            header.attributes.narrow(umask);
            // No ACL is restored, so none is missing.
            header.lost = None;
        }
    }

    /// Whose the entries are: the archive's owners', or the caller's.
    pub fn ownership(self) -> Ownership {
        match self {
            Trust::Full => Ownership::Preserve,
            Trust::Umask(_) => Ownership::Inherit,
        }
    }
}
