//! What this kernel and this user can do.

use std::fs;
use std::io;
use std::path::Path;

use ondeck_core::Bytes;

use crate::mounts::{Overlay, Target};
use crate::namespace::{BuildError, Namespaces};
use crate::tmpfs::Features;

/// What trying it out showed.
#[derive(Debug)]
pub struct Probe {
    /// A private RAM disk, or the step that failed.
    pub ram_disk: Result<Features, BuildError>,
    /// An overlay over a directory on disk, with its upper layer in RAM.
    pub overlay: io::Result<()>,
    /// User extended attributes on the RAM disk (Linux 6.6).
    pub user_xattrs: bool,
}

/// Builds a small RAM disk and an overlay in `scratch`, an empty directory of the caller, and takes them down again.
/// The calling process must have one thread only.
pub fn probe(scratch: &Path) -> Probe {
    let mount_point = scratch.join("ramdisk");
    let lower = scratch.join("lower");
    let made = fs::create_dir(&mount_point).and_then(|()| fs::create_dir(&lower));
    if let Err(source) = made {
        let error = BuildError { step: "making a scratch directory", source: io::Error::from(source.kind()) };
        return Probe { ram_disk: Err(error), overlay: Err(source), user_xattrs: false };
    }
    let namespaces = match Namespaces::build(&mount_point, Bytes(1 << 20)) {
        Ok(namespaces) => namespaces,
        Err(error) => {
            let overlay = Err(io::Error::other("needs the RAM disk"));
            return Probe { ram_disk: Err(error), overlay, user_xattrs: false };
        }
    };
    let overlay = namespaces.inside(|| {
        let (upper, work) = (mount_point.join("upper"), mount_point.join("work"));
        fs::create_dir(&upper)?;
        fs::create_dir(&work)?;
        let root = rustix::process::geteuid().is_root();
        Overlay { lower: &lower, upper: &upper, work: &work, root }.mount(&Target::open(&lower, None)?)?;
        fs::write(lower.join("x"), "x")?;
        fs::metadata(upper.join("x")).map(|_| ())
    });
    let user_xattrs =
        rustix::fs::fsetxattr(&namespaces.ram_disk, c"user.ondeck", b"1", rustix::fs::XattrFlags::empty())
            .is_ok();
    Probe { ram_disk: Ok(namespaces.features), overlay, user_xattrs }
}
