//! A backing directory that does not take what is written: over quota, read-only, with a device that fails, or gone.

#![allow(clippy::unwrap_used)]

mod cached;
mod disk;
mod scene;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use cached::{Mounted, Random, sh};
use disk::Disk;
use rustix::io::Errno;
use scene::wait_until;

/// Of `ondeck cache flush` and `unmount`: not everything could be written back, and nothing is lost.
const UNWRITTEN: i32 = 122;

/// What the kernel says of an error.
fn says(error: Errno) -> String {
    std::io::Error::from(error).to_string()
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name != "lost+found");
    names.sort();
    names
}

/// What everybody says while nothing can be written back because of `error`, and that nothing is lost.
fn is_hindered(mounted: &Mounted, error: Errno, hinder: impl FnOnce(), mend: impl FnOnce()) {
    let mut random = Random(0x9_1e57);
    let mut content = random.bytes(3_000_000);
    let new = random.bytes(5_000_000);
    fs::write(mounted.fast.join("changed"), &content).unwrap();
    mounted.run("echo old > replaced; echo gone > removed; mkdir d; echo kept > d/renamed");
    mounted.ondeck(&["flush", "fast"]);
    hinder();

    // The cache takes it.
    let changed = File::options().write(true).open(mounted.fast.join("changed")).unwrap();
    changed.write_all_at(&new[..100_000], 1_500_000).unwrap();
    content[1_500_000..1_600_000].copy_from_slice(&new[..100_000]);
    let mut made = File::create(mounted.fast.join("new")).unwrap();
    made.write_all(&new).unwrap();
    mounted.run("echo new > temporary; mv temporary replaced; rm removed; mv d/renamed moved; chmod 700 d");
    // It is told, and by what is synced too.
    let (code, told) = mounted.refused(&["flush", "fast"]);
    assert_eq!(code, UNWRITTEN, "{told}");
    assert!(told.contains(&says(error)), "{told}");
    let failing = mounted.status()["status"]["failing"].to_string();
    assert!(failing.contains(&says(error)), "{failing}");
    wait_until("fsync says it", || {
        made.sync_all().is_err_and(|told| told.raw_os_error() == Some(error.raw_os_error()))
    });
    drop((changed, made));
    // Who writes more than fits does not wait for ever.
    let mut large = File::create(mounted.fast.join("large")).unwrap();
    let told = (0..60).find_map(|_| large.write_all(&new[..1 << 20]).err());
    assert_eq!(told.unwrap().raw_os_error(), Some(error.raw_os_error()));
    drop(large);
    fs::remove_file(mounted.fast.join("large")).unwrap();
    let (code, told) = mounted.refused(&["unmount", "fast"]);
    assert_eq!(code, UNWRITTEN, "{told}");
    assert!(told.contains(&says(error)), "{told}");

    let is_whole = |dir: &Path| {
        assert_eq!(names(dir), ["changed", "d", "moved", "new", "replaced"]);
        assert!(fs::read(dir.join("changed")).unwrap() == content, "changed");
        assert!(fs::read(dir.join("new")).unwrap() == new, "new");
        assert_eq!(sh(dir, "cat replaced moved; ls d; stat -c %a d"), "new\nkept\n700\n");
    };
    is_whole(&mounted.fast);
    mounted.kill();
    mounted.mount();
    is_whole(&mounted.fast);
    mend();
    mounted.ondeck(&["flush", "fast"]);
    assert_eq!(mounted.status()["status"]["failing"].to_string(), "[]");
    is_whole(&mounted.backing);
    mounted.ondeck(&["unmount", "fast"]);
    is_whole(&mounted.backing);
}

#[test]
fn over_quota_everybody_is_told_and_nothing_is_lost() {
    let mut disk = None;
    let prepare = |backing: &Path| {
        let image = backing.with_extension("image");
        disk = Some(Disk::new("mkfs.btrfs -q", "400M", &image, backing, ""));
        sh(backing, "btrfs quota enable .");
    };
    let Some(mounted) = Mounted::with(&["--age", "2s"], prepare) else { return };
    let limit = |limit: &str| drop(sh(&mounted.backing, &format!("btrfs qgroup limit {limit} .; sync -f .")));
    is_hindered(&mounted, Errno::DQUOT, || limit("3500K"), || limit("none"));
}

#[test]
fn on_a_disk_that_became_read_only_everybody_is_told_and_nothing_is_lost() {
    let mut disk = None;
    let prepare = |backing: &Path| {
        disk = Some(Disk::new("mkfs.ext4 -q", "200M", &backing.with_extension("image"), backing, ""));
    };
    let Some(mounted) = Mounted::with(&["--age", "2s"], prepare) else { return };
    let at = mounted.backing.display();
    let remount = |how: &str| drop(sh(Path::new("/"), &format!("mount -o remount,{how} {at}")));
    is_hindered(&mounted, Errno::ROFS, || remount("ro"), || remount("rw"));
}

/// A device that has less room than it promises: only the filesystem's own blocks are there for certain.
const PROMISES: &str = "fallocate -l 200M $image
    mkfs.ext4 -q -b 4096 -O ^has_journal -E nodiscard $image
    free=$(dumpe2fs $image 2>/dev/null | sed -n 's/^  Free blocks: \\([0-9]*\\)-.*/\\1/p' | head -n 1)
    fallocate -p -o $((free * 4096)) -l 200M $image";

#[test]
fn on_a_device_that_fails_to_keep_what_it_took_everybody_is_told_and_nothing_is_lost() {
    let mut disks = None;
    let prepare = |backing: &Path| {
        let host = backing.with_file_name("host");
        fs::create_dir(&host).unwrap();
        let image = host.join("image");
        let host = scene::Mounted::tmpfs(&host, "size=300m");
        sh(Path::new("/"), &format!("image={}; {PROMISES}", image.display()));
        disks = Some((Disk::of(&image, backing, "noinit_itable"), host));
    };
    let Some(mounted) = Mounted::with(&["--age", "2s"], prepare) else { return };
    let (disk, host) = disks.as_ref().unwrap();
    let fill = || {
        let used =
            sh(Path::new("/"), &format!("sync -f {}; du -k {}", disk.at.display(), disk.image.display()));
        host.remount(false, &format!("size={}k", used.split_whitespace().next().unwrap()));
    };
    let mend = || {
        host.remount(false, "size=300m");
        // The kernel tells once more what it could not keep.
        sh(&mounted.backing, "sync -f . || true");
    };
    is_hindered(&mounted, Errno::NOSPC, fill, mend);
}

#[test]
fn a_disk_that_is_unmounted_lazily_gets_what_is_written_all_the_same() {
    let mut disk = None;
    let prepare = |backing: &Path| {
        disk = Some(Disk::new("mkfs.ext4 -q", "200M", &backing.with_extension("image"), backing, ""));
    };
    let Some(mounted) = Mounted::with(&[], prepare) else { return };
    mounted.run("head -c 20000000 /dev/urandom > large; md5sum large > sum");
    let image = disk.as_ref().unwrap().image.clone();
    drop(disk);
    assert!(names(&mounted.backing).is_empty());
    mounted.run("md5sum -c --quiet sum; echo more > more");
    mounted.ondeck(&["unmount", "fast"]);
    let _disk = Disk::of(&image, &mounted.backing, "");
    assert_eq!(sh(&mounted.backing, "md5sum -c --quiet sum; cat more"), "more\n");
}

#[test]
fn what_a_disk_keeps_for_root_is_not_a_users_through_a_cache_either() {
    const NOBODY: u32 = 65_534;
    let mut disk = None;
    let prepare = |backing: &Path| {
        let image = backing.with_extension("image");
        disk = Some(Disk::new("mkfs.ext4 -q -m 50", "100M", &image, backing, ""));
        sh(backing, "chown nobody . && rmdir lost+found");
    };
    let Some(mounted) = Mounted::with(&["--user", "nobody"], prepare) else { return };
    let free = || rustix::fs::statvfs(&mounted.backing).unwrap();
    let kept = free().f_bfree - free().f_bavail;
    assert!(kept * free().f_frsize > 40 << 20);
    // The directory is nobody's to enter but this user's.
    let script = format!("cd {}; head -c 90000000 /dev/zero > large", mounted.fast.display());
    let mut writer = Command::new("sh");
    let output = writer.args(["-c", &script]).uid(NOBODY).gid(NOBODY).env("LC_ALL", "C").output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("No space left on device"), "{told}");
    assert!(free().f_bfree >= kept, "{} blocks are free, and {kept} are root's", free().f_bfree);
}

/// Two directories with quotas of their own, and one without.
const PROJECTS: &str = "mkdir -p one/deep two plain; chattr -p 1 +P one one/deep; chattr -p 2 +P two
    echo one | tee one/file one/other > one/deep/file; echo two > two/file; echo plain > plain/file";

/// Directory quotas: a name that the disk would refuse for good is refused at once, and programs copy as they do there.
#[test]
fn a_directory_with_a_project_of_its_own_takes_no_names_of_what_has_another() {
    // ext4 says the same, where the kernel has quotas.
    const MAKE: (&str, &str) = ("mkfs.xfs -q", "320M");
    let mut disk = None;
    let prepare = |backing: &Path| {
        disk = Some(Disk::new(MAKE.0, MAKE.1, &backing.with_extension("image"), backing, ""));
        sh(backing, PROJECTS);
    };
    let Some(mounted) = Mounted::with(&[], prepare) else { return };
    let told = |at: &Path| {
        let (at, mut told) = (|name: &str| at.join(name), Vec::new());
        let mut note =
            |done: std::io::Result<()>| told.push(done.err().and_then(|error| error.raw_os_error()));
        for (from, to) in [
            ("one/file", "two/moved"),
            ("one/file", "two/file"),
            ("one/deep", "two/deep"),
            ("plain/file", "one/moved"),
            ("one/file", "one/deep/moved"),
            ("one/other", "plain/moved"),
            ("plain/moved", "two/moved"),
        ] {
            note(fs::rename(at(from), at(to)));
        }
        note(fs::hard_link(at("two/file"), at("one/linked")));
        note(fs::hard_link(at("two/file"), at("plain/linked")));
        // What is made has the project of where it is made.
        fs::create_dir(at("one/new")).unwrap();
        fs::write(at("one/new/file"), "new").unwrap();
        note(fs::rename(at("one/new/file"), at("two/new")));
        note(fs::rename(at("one/deep/moved"), at("one/new/moved")));
        note(fs::rename(at("one/new"), at("two/new")));
        note(fs::rename(at("one/new"), at("plain/new")));
        let flags = rustix::fs::RenameFlags::EXCHANGE;
        let (one, two) = (at("one/deep/file"), at("two/file"));
        note(
            rustix::fs::renameat_with(rustix::fs::CWD, one, rustix::fs::CWD, two, flags).map_err(Into::into),
        );
        sh(&at("."), "mv plain/new/file two/copied");
        told
    };
    let cached = told(&mounted.fast);
    mounted.ondeck(&["unmount", "fast"]);
    let found = sh(&mounted.backing, "find one two plain -type f | sort | xargs tail -n +1");
    drop(disk);
    let again = tempfile::tempdir().unwrap();
    let at = again.path().join("disk");
    fs::create_dir(&at).unwrap();
    let _disk = Disk::new(MAKE.0, MAKE.1, &again.path().join("image"), &at, "");
    sh(&at, PROJECTS);
    assert_eq!(cached, told(&at));
    assert!(cached.contains(&Some(Errno::XDEV.raw_os_error())) && cached.contains(&None), "{cached:?}");
    assert_eq!(found, sh(&at, "find one two plain -type f | sort | xargs tail -n +1"));
}

/// On a filesystem that keeps times to the second: what others do within the second in which the cache has written is seen by the size.
#[test]
fn what_others_do_in_the_same_second_is_kept_where_times_are_whole_seconds() {
    let mut disk = None;
    let prepare = |backing: &Path| {
        let image = backing.with_extension("image");
        disk = Some(Disk::new("mkfs.ext4 -q -I 128", "100M", &image, backing, ""));
    };
    let Some(mounted) = Mounted::with(&[], prepare) else { return };
    let changed = |path: &Path| fs::metadata(path).unwrap().ctime();
    for round in 0..50 {
        let (ours, theirs) =
            (mounted.fast.join(format!("{round}")), mounted.backing.join(format!("{round}")));
        fs::write(&ours, "ours").unwrap();
        mounted.ondeck(&["flush", "fast"]);
        let before = changed(&theirs);
        File::options().append(true).open(&theirs).unwrap().write_all(b" and theirs").unwrap();
        fs::write(&ours, "ours again").unwrap();
        if changed(&theirs) != before {
            // The second was over; that is seen by the time.
            continue;
        }
        mounted.ondeck(&["flush", "fast"]);
        assert_eq!(fs::read_to_string(&theirs).unwrap(), "ours and theirs", "round {round}");
        let beside = sh(&mounted.backing, &format!("cat {round}.ondeck-*"));
        assert_eq!(beside, "ours again", "round {round}");
        return;
    }
    panic!("no round was within a second");
}
