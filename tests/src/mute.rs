//! A FUSE filesystem of an ordinary user that never answers, a process whose environment lies in it, and one that it keeps in
//! `execve`.
//!
//! Spoken is FUSE 7.31 (fuse(4), linux/fuse.h), as little of it as is needed.

use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::mount::{MountFlags, mount};
use rustix::thread::{Gid, Uid, set_thread_gid, set_thread_uid};

/// The one file.
pub const FILE: &str = "file";

/// Its size, and more than an environment has.
const SIZE: u64 = 1 << 20;

/// A request is at most this long.
const REQUEST: usize = 256 << 10;

const LOOKUP: u32 = 1;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const INIT: u32 = 26;

/// Mounts the filesystem on a directory, as fusermount3 does for a user, and serves it as that user until it is killed. It
/// says `mounted` on standard output. With `names` it tells of its file, and opens it; nothing is ever read.
///
/// # Errors
/// If it can't be mounted.
pub fn serve(at: &Path, source: &str, uid: u32, allow_other: bool, names: bool) -> Result<()> {
    let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let others = if allow_other { ",allow_other" } else { "" };
    let options =
        format!("fd={},rootmode=40000,user_id={uid},group_id={uid}{others}", device.as_fd().as_raw_fd());
    mount(source, at, "fuse", MountFlags::NOSUID | MountFlags::NODEV, &*CString::new(options)?)
        .with_context(|| format!("mounting on {}", at.display()))?;
    // There is one thread.
    set_thread_gid(Gid::from_raw(uid))?;
    set_thread_uid(Uid::from_raw(uid))?;
    println!("mounted");
    std::io::stdout().flush()?;
    answer(device, uid, names)
}

fn answer(device: OwnedFd, uid: u32, names: bool) -> Result<()> {
    let mut device = File::from(device);
    let mut request = vec![0; REQUEST];
    loop {
        let length = match device.read(&mut request) {
            Ok(length) => length,
            Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => return Ok(()),
            Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::NOENT | Errno::INTR)) => {
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let request = &request[..length];
        let number = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap_or_default());
        let (operation, unique, node) = (number(4), &request[8..16], number(16));
        let body = match operation {
            INIT => init(),
            LOOKUP if names && request[40..].starts_with(FILE.as_bytes()) => {
                [&2_u64.to_ne_bytes()[..], &[0; 32], &attributes(2, uid)].concat()
            }
            GETATTR if names => [&[0; 16][..], &attributes(node, uid)].concat(),
            OPEN if names => vec![0; 16],
            _ => continue,
        };
        let length = u32::try_from(16 + body.len())?;
        let reply = [&length.to_ne_bytes()[..], &0_i32.to_ne_bytes(), unique, &body].concat();
        // Who asked may have been killed.
        let _ = device.write(&reply);
    }
}

fn init() -> Vec<u8> {
    let mut body = [7_u32, 31, 0, 0].map(u32::to_ne_bytes).concat();
    body.extend([16_u16, 12].map(u16::to_ne_bytes).concat());
    body.extend([4096_u32, 1].map(u32::to_ne_bytes).concat());
    body.resize(64, 0);
    body
}

fn attributes(node: u32, uid: u32) -> Vec<u8> {
    let (size, mode) = if node == 1 { (0, 0o40_755) } else { (SIZE, 0o100_644) };
    let mut body = [u64::from(node), size, 0, 0, 0, 0].map(u64::to_ne_bytes).concat();
    body.extend([0_u32, 0, 0, mode, 1, uid, uid, 0, 4096, 0].map(u32::to_ne_bytes).concat());
    body
}

/// Puts pages of a file in the place of the caller's environment, which is longer than a page, and never returns.
///
/// # Errors
/// If the environment is too short, or the file can't be mapped.
pub fn hide_environment(file: &Path) -> Result<()> {
    const PAGE: usize = 4096;
    let file = File::open(file).with_context(|| file.display().to_string())?;
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // proc_pid_stat(5): what follows the name begins with the third field.
    let fields: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3).and_then(|text| text.parse::<usize>().ok());
    let (start, end) = field(50).zip(field(51)).context("/proc tells no environment")?;
    let (start, end) = (start.next_multiple_of(PAGE), end / PAGE * PAGE);
    anyhow::ensure!(start < end, "the environment is too short to be hidden");
    // SAFETY: nothing but the environment is in these pages, and nobody in this process looks at it any more.
    unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        mmap(start as *mut _, end - start, ProtFlags::READ, flags, file.as_fd(), 0)?;
    }
    println!("hidden");
    std::io::stdout().flush()?;
    loop {
        std::thread::park();
    }
}

/// Runs `sleep` with a file open that the kernel closes before the program begins, and waits until its server has answered.
/// It never returns; for all that time who looks at this process in /proc may have to wait, too.
///
/// # Errors
/// If the file can't be opened, or the program not be run.
pub fn stick(file: &Path) -> Result<std::convert::Infallible> {
    let _file = File::open(file).with_context(|| file.display().to_string())?;
    println!("opened");
    std::io::stdout().flush()?;
    Err(std::process::Command::new("sleep").arg("300").exec().into())
}
