//! What programs see.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::time::{Duration, Instant};

use ondeck_testbed::wait_until;

use crate::site::{self, Case, OWNER, Site, View, difference, pattern, write_pattern};

crate::for_engines! {
    tmpfs = TMPFS: [
        programs_find_the_posix_basics,
        files_come_back_byte_for_byte_through_another_client,
        two_and_four_writers_share_a_file_in_strides,
        changes_are_seen_by_the_other_client_in_the_stated_time,
        of_two_clients_one_makes_a_file_with_o_excl,
        two_programs_append_whole_records,
    ]
    gluster = GLUSTER: [
        programs_find_the_posix_basics,
        files_come_back_byte_for_byte_through_another_client,
        two_and_four_writers_share_a_file_in_strides,
        changes_are_seen_by_the_other_client_in_the_stated_time,
        of_two_clients_one_makes_a_file_with_o_excl,
    ]
    ceph = CEPH: [
        programs_find_the_posix_basics,
        files_come_back_byte_for_byte_through_another_client,
        two_and_four_writers_share_a_file_in_strides,
        changes_are_seen_by_the_other_client_in_the_stated_time,
        of_two_clients_one_makes_a_file_with_o_excl,
    ]
}

fn programs_find_the_posix_basics(case: &Case) {
    const SIZE: u64 = 128 << 20;
    let site = Site::new();
    let view = &site.build(case, "posix", &SIZE.to_string(), 1)[0];
    let probe = site.probe.to_string_lossy();
    let (path, size) = (view.text(), SIZE.to_string());
    let mut line = vec![&*probe, "posix", &path, "--size", &size];
    line.extend(case.without.iter().flat_map(|without| ["--without", without]));
    view.host.as_user(OWNER, OWNER).run(&line).assert_success();
    site.destroy("posix");
    site.assert_nothing_is_left();
}

fn files_come_back_byte_for_byte_through_another_client(case: &Case) {
    const LARGE: u64 = (100 << 20) + 4567;
    const SMALL: u64 = 2000;
    let site = Site::new();
    let views = site.build(case, "bytes", "512MiB", 2);
    let [from, to] = [&views[0].outside, &views[1].outside];
    for number in 0..2 {
        write_pattern(&from.join(format!("large-{number}")), LARGE, number);
    }
    fs::create_dir(from.join("small")).unwrap();
    for number in 0..SMALL {
        fs::write(from.join(format!("small/{number}")), pattern(0, 1024, number)).unwrap();
    }
    for number in 0..2 {
        assert_eq!(difference(&to.join(format!("large-{number}")), LARGE, number), None);
    }
    assert_eq!(fs::read_dir(to.join("small")).unwrap().count() as u64, SMALL);
    for number in 0..SMALL {
        let found = fs::read(to.join(format!("small/{number}"))).unwrap();
        assert!(found == pattern(0, 1024, number), "small/{number} has other bytes");
    }
    site.destroy("bytes");
    site.assert_nothing_is_left();
}

fn two_and_four_writers_share_a_file_in_strides(case: &Case) {
    let site = Site::new();
    let views = site.build(case, "shared", "256MiB", 4);
    let mut wrong = Vec::new();
    for (round, (writers, block)) in
        [(2, 1 << 20), (2, 47_008), (4, 1 << 20), (4, 47_008)].into_iter().enumerate()
    {
        let (name, seed) = (format!("by-{writers}-{block}"), round as u64);
        // A whole number of blocks for each writer, about 16 MiB in all.
        let blocks = (16 << 20) / block / writers * writers;
        fs::File::create(views[0].outside.join(&name)).unwrap();
        std::thread::scope(|scope| {
            for (writer, view) in views.iter().enumerate().take(writers) {
                let name = &name;
                scope.spawn(move || {
                    let path = view.outside.join(name);
                    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
                    for number in (writer..blocks).step_by(writers) {
                        let offset = (number * block) as u64;
                        file.write_all_at(&pattern(offset, block, seed), offset).unwrap();
                    }
                    file.sync_all().unwrap();
                });
            }
        });
        let length = (blocks * block) as u64;
        // What another client has just written is seen within the engine's time.
        for view in &views {
            let began = Instant::now();
            loop {
                match difference(&view.outside.join(&name), length, seed) {
                    None => break,
                    Some(_) if began.elapsed() < case.seen_after + Duration::from_millis(500) => {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    Some(what) => {
                        wrong.push(format!(
                            "{writers} writers, blocks of {block}, {}: {what}",
                            view.host.name()
                        ));
                        break;
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    site.destroy("shared");
    site.assert_nothing_is_left();
}

/// Half a second for the machine.
fn soon(case: &Case) -> Duration {
    case.seen_after + Duration::from_millis(500)
}

fn changes_are_seen_by_the_other_client_in_the_stated_time(case: &Case) {
    let site = Site::new();
    let views = site.build(case, "seen", "64MiB", 2);
    let deadline = soon(case);
    let mut slowest = Duration::ZERO;
    for (from, to) in [(&views[0], &views[1]), (&views[1], &views[0])] {
        let at = |view: &View, name: &str| view.outside.join(name);
        let read = |name: &str| fs::read_to_string(at(to, name)).unwrap_or_else(|error| error.to_string());
        let listed = |name: &str| {
            let mut entries = fs::read_dir(&to.outside).unwrap();
            entries.any(|entry| entry.unwrap().file_name() == *name)
        };
        let mut see = |what: &str, condition: &mut dyn FnMut() -> bool| {
            let began = Instant::now();
            wait_until(deadline, what, condition);
            slowest = slowest.max(began.elapsed());
        };

        // The other client is made to remember that there is none.
        assert!(!at(to, "file").exists() && !listed("file"));
        fs::write(at(from, "file"), "one").unwrap();
        see("a new name", &mut || at(to, "file").exists());
        see("the name in the list", &mut || listed("file"));
        see("what it holds", &mut || read("file") == "one");
        fs::write(at(from, "file"), "two").unwrap();
        see("a rewrite of the same size", &mut || read("file") == "two");
        let file = fs::OpenOptions::new().write(true).open(at(from, "file")).unwrap();
        file.write_all_at(b"TWO", 0).unwrap();
        drop(file);
        see("a rewrite in place", &mut || read("file") == "TWO");
        fs::write(at(from, "file"), "longer than before").unwrap();
        see("a new size", &mut || fs::metadata(at(to, "file")).unwrap().len() == 18);
        see("the longer content", &mut || read("file") == "longer than before");

        // Through a descriptor that is open all the time.
        let mut open = fs::File::open(at(to, "file")).unwrap();
        let mut text = String::new();
        open.read_to_string(&mut text).unwrap();
        let file = fs::OpenOptions::new().write(true).open(at(from, "file")).unwrap();
        file.write_all_at(b"LONGER", 0).unwrap();
        drop(file);
        see("a rewrite below an open descriptor", &mut || {
            let mut bytes = [0; 6];
            open.read_exact_at(&mut bytes, 0).unwrap();
            &bytes == b"LONGER"
        });

        fs::set_permissions(at(from, "file"), fs::Permissions::from_mode(0o600)).unwrap();
        see("a mode", &mut || fs::metadata(at(to, "file")).unwrap().permissions().mode() & 0o777 == 0o600);
        fs::write(at(from, "other"), "other").unwrap();
        see("another file", &mut || read("other") == "other");
        fs::rename(at(from, "other"), at(from, "file")).unwrap();
        see("a rename over a file", &mut || read("file") == "other");
        see("the old name gone", &mut || !at(to, "other").exists() && !listed("other"));
        fs::remove_file(at(from, "file")).unwrap();
        see("an unlink", &mut || !at(to, "file").exists() && !listed("file"));
        fs::create_dir(at(from, "dir")).unwrap();
        see("a directory", &mut || at(to, "dir").is_dir());
        fs::remove_dir(at(from, "dir")).unwrap();
        see("its removal", &mut || !at(to, "dir").exists());
    }
    eprintln!("{}: the slowest change was seen after {slowest:?}", case.engine);
    site.destroy("seen");
    site.assert_nothing_is_left();
}

/// What the clients of two hosts did at the same time, ten times over: the sum of what `work` gave.
fn both_at_once<T: Send>(views: &[View], work: impl Fn(&View, usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            views.iter().enumerate().map(|(number, view)| scope.spawn(move || work(view, number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn of_two_clients_one_makes_a_file_with_o_excl(case: &Case) {
    const FILES: usize = 200;
    let site = Site::new();
    let views = site.build(case, "once", "64MiB", 2);
    let made = both_at_once(&views, |view, _| {
        let make = |number: &usize| match fs::File::create_new(view.outside.join(format!("once-{number}"))) {
            Ok(_) => true,
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => false,
            Err(error) => panic!("once-{number}: {error}"),
        };
        (0..FILES).filter(make).count()
    });
    assert_eq!(made.iter().sum::<usize>(), FILES, "some were made twice, or never: {made:?}");
    site.destroy("once");
    site.assert_nothing_is_left();
}

/// Only tmpfs: through FUSE the kernel of each host thinks that it knows the end of the file. With Gluster two clients'
/// records are torn now and then, with Ceph they overwrite each other.
fn two_programs_append_whole_records(case: &Case) {
    const RECORDS: usize = 200;
    const RECORD: usize = 100;
    let site = Site::new();
    let views = site.build(case, "log", "64MiB", 2);
    both_at_once(&views, |view, number| {
        use std::io::Write;
        let path = view.outside.join("log");
        let mut file = fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
        for _ in 0..RECORDS {
            file.write_all(&[number as u8; RECORD]).unwrap();
        }
    });
    let log = fs::read(views[0].outside.join("log")).unwrap();
    assert_eq!(log.len(), 2 * RECORDS * RECORD);
    assert!(log.chunks(RECORD).all(|record| record.iter().all(|byte| *byte == record[0])), "torn records");
    site.destroy("log");
    site.assert_nothing_is_left();
}

#[test]
fn gluster_shows_what_it_cannot_do() {
    let case = &site::GLUSTER;
    if !site::ready(case) {
        return;
    }
    let site = Site::new();
    let views = site.build(case, "limits", "128MiB", 1);
    let view = &views[0];
    let owner = view.host.as_user(OWNER, OWNER);

    // A file lies on one brick: it can't be larger than that, whatever df shows.
    let free = rustix::fs::statvfs(&view.outside).unwrap();
    assert!(free.f_bavail * free.f_frsize > 110 << 20);
    let file = view.outside.join("large");
    let ran = owner.shell(&format!("head -c 90M /dev/zero > {}/large", view.text()));
    assert!(!ran.success() && ran.stderr.contains("No space left"), "{ran:#?}");
    fs::remove_file(file).unwrap();

    let nameless = fs::OpenOptions::new().write(true).custom_flags(libc::O_TMPFILE).open(&view.outside);
    assert_eq!(nameless.unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));

    // One table for both kinds of lock: a program that takes both waits for itself.
    let both = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); \
                fcntl.lockf(file, fcntl.LOCK_EX)";
    let locked = format!("{}/locked", view.text());
    let ran = owner.run(&["timeout", "-s", "KILL", "3", "/usr/bin/python3", "-c", both, &locked]);
    assert!(ran.signal().is_some() || ran.code() == Some(137), "{ran:#?}");
    site.destroy("limits");
    site.assert_nothing_is_left();
}

/// What a program does on a full filesystem that looks at nothing but what write and close say: it writes files that do not
/// fit, each with some more writes afterwards, and then many that are smaller than what a client gathers. Prints the names of the
/// files that are not as they were written, though nobody was told.
const CARELESS: &str = r#"
import errno, os, sys
def write(name, block, count):
    told = False
    path = os.path.join(sys.argv[1], name)
    try:
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        return True
    written, errors = 0, 0
    for _ in range(count):
        try:
            written += os.write(file, b"x" * block)
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            told, errors = True, errors + 1
            # Each takes longer than the one before.
            if errors == 3:
                break
    try:
        os.close(file)
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        told = True
    if not told and os.stat(path).st_size != written:
        print("not told:", name)
    return told
large = [write("large", block, (60 << 20) // block) for block in [1 << 20, 200000, 60000] for _ in range(5)]
small = [write("small-%d" % number, 4096, 100) for number in range(400)]
print("told of", large.count(True), "large and", "some" if True in small else "no", "small files")
"#;

#[test]
fn a_full_gluster_says_so_at_close_at_the_latest_and_its_client_lives() {
    let case = &site::GLUSTER;
    if !site::ready(case) {
        return;
    }
    let site = Site::new();
    let view = &site.build(case, "full", "64MiB", 1)[0];
    let owner = view.host.as_user(OWNER, OWNER);
    let ran = owner.run(&["timeout", "300", "/usr/bin/python3", "-c", CARELESS, &view.text()]);
    assert!(ran.success(), "{ran:#?}");
    assert_eq!(ran.stdout, "told of 15 large and some small files\n", "{ran:#?}");
    fs::remove_file(view.outside.join("large")).unwrap();
    fs::write(view.outside.join("after"), "there is room again").unwrap();
    site.destroy("full");
    site.assert_nothing_is_left();
}
