//! Access control lists, as the kernel hands them on (`system.posix_acl_access`, `system.posix_acl_default`), and what mode goes
//! with them: the rules of acl(5), which a filesystem has to apply itself.

/// The attribute with a file's own ACL.
pub const ACCESS: &str = "system.posix_acl_access";

/// The attribute with what new entries of a directory inherit.
pub const DEFAULT: &str = "system.posix_acl_default";

/// The attribute with an ACL of NFSv4, which is none of these: it may give and refuse what no mode says.
pub const NFS4: &str = "system.nfs4_acl";

const VERSION: u32 = 2;

const OWNER: u16 = 0x01;
const USER: u16 = 0x02;
const OWNING_GROUP: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    tag: u16,
    permissions: u16,
    id: u32,
}

/// An ACL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl(Vec<Entry>);

impl Acl {
    /// Reads the kernel's form; `None` if it is something else.
    pub fn parse(bytes: &[u8]) -> Option<Acl> {
        let (entries, []) = bytes.strip_prefix(&VERSION.to_le_bytes())?.as_chunks::<8>() else { return None };
        let entry = |[a, b, c, d, e, f, g, h]: &[u8; 8]| Entry {
            tag: u16::from_le_bytes([*a, *b]),
            permissions: u16::from_le_bytes([*c, *d]),
            id: u32::from_le_bytes([*e, *f, *g, *h]),
        };
        Some(Acl(entries.iter().map(entry).collect()))
    }

    /// The kernel's form.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        for Entry { tag, permissions, id } in &self.0 {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(permissions.to_le_bytes());
            bytes.extend(id.to_le_bytes());
        }
        bytes
    }

    fn has(&self, tag: u16) -> bool {
        self.0.iter().any(|entry| entry.tag == tag)
    }

    fn bits(&self, tag: u16) -> u32 {
        self.0.iter().find(|entry| entry.tag == tag).map_or(0, |entry| u32::from(entry.permissions & 7))
    }

    /// The permission bits that stand for it in a mode: the group's are the mask's, if there is one.
    pub fn mode(&self) -> u32 {
        let group = if self.has(MASK) { self.bits(MASK) } else { self.bits(OWNING_GROUP) };
        self.bits(OWNER) << 6 | group << 3 | self.bits(OTHER)
    }

    /// Whether a mode says all that it says.
    pub fn is_a_mode(&self) -> bool {
        !self.has(USER) && !self.has(GROUP) && !self.has(MASK)
    }

    /// It after chmod(2).
    pub fn with_mode(&self, mode: u32) -> Acl {
        self.changed(|_, class| class & 7, mode)
    }

    /// The ACL that something of this mode gets which is made where this is the default.
    pub fn inherited(&self, mode: u32) -> Acl {
        self.changed(|had, class| had & class & 7, mode)
    }

    fn changed(&self, permissions: impl Fn(u16, u16) -> u16, mode: u32) -> Acl {
        let group = if self.has(MASK) { MASK } else { OWNING_GROUP };
        let of = |mut entry: Entry| {
            let class = match entry.tag {
                OWNER => mode >> 6,
                OTHER => mode,
                tag if tag == group => mode >> 3,
                _ => return entry,
            };
            entry.permissions = permissions(entry.permissions, class as u16);
            entry
        };
        Acl(self.0.iter().copied().map(of).collect())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn acl(entries: &[(u16, u16, u32)]) -> Acl {
        Acl(entries
            .iter()
            .map(|(tag, permissions, id)| Entry { tag: *tag, permissions: *permissions, id: *id })
            .collect())
    }

    const NOBODY: u32 = u32::MAX;

    #[test]
    fn the_mask_is_what_a_mode_says_of_the_group() {
        let named = acl(&[
            (OWNER, 7, NOBODY),
            (USER, 6, 4711),
            (OWNING_GROUP, 5, NOBODY),
            (MASK, 6, NOBODY),
            (OTHER, 4, NOBODY),
        ]);
        assert_eq!(Acl::parse(&named.to_bytes()), Some(named.clone()));
        assert_eq!(named.mode(), 0o764);
        assert!(!named.is_a_mode());
        assert_eq!(named.with_mode(0o640).mode(), 0o640);
        assert_eq!(named.with_mode(0o640).bits(OWNING_GROUP), 5);
        let made = named.inherited(0o666);
        assert_eq!((made.mode(), made.bits(OWNING_GROUP), made.bits(USER)), (0o664, 5, 6));
    }

    #[test]
    fn an_acl_that_names_nobody_is_a_mode() {
        let plain = acl(&[(OWNER, 7, NOBODY), (OWNING_GROUP, 5, NOBODY), (OTHER, 1, NOBODY)]);
        assert!(plain.is_a_mode());
        assert_eq!(plain.inherited(0o666).mode(), 0o640);
        assert_eq!(Acl::parse(b"no ACL"), None);
        assert_eq!(Acl::parse(&plain.to_bytes()[..9]), None);
    }
}
