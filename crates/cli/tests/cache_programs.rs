//! Unchanged programs over a cache that is smaller than what they write: each finds what it left at once, after a flush on the
//! backing directory, and after a kill of the server.

#![allow(clippy::unwrap_used)]

mod cached;
mod scene;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use cached::{Mounted, sh, wanted};

/// Eviction and write-back go on all the time.
const BUSY: [&str; 10] =
    ["--age", "1s", "--dirty-high", "30", "--dirty-low", "10", "--full-high", "60", "--full-low", "40"];

/// Runs a program's own check where its files may be: here, on the disk, and here after a kill. It says the same everywhere.
/// What is done between the first two is not on the disk when the server is killed.
#[track_caller]
fn is_found_everywhere(mounted: &Mounted, expected: &str, check: &str, more: &str) {
    assert_eq!(mounted.run(check), expected, "in the cache");
    mounted.ondeck(&["flush", "fast"]);
    assert_eq!(sh(&mounted.backing, check), expected, "on the disk");
    mounted.run(more);
    mounted.kill();
    mounted.mount();
    assert_eq!(mounted.run(check), expected, "after a kill");
    mounted.ondeck(&["unmount", "fast"]);
    assert_eq!(sh(&mounted.backing, check), expected, "on the disk, after a kill");
}

/// A tree as programs unpack it, beside the cache: many files, a large one, holes, links, and attributes.
fn source(mounted: &Mounted) -> PathBuf {
    let source = mounted.scene.dir("source");
    sh(
        &source,
        "for d in 1 2 3 4 5 6 7 8; do
             mkdir $d
             for f in $(seq 40); do head -c $((d * f * 97)) /dev/urandom > $d/f$f; done
         done
         head -c 50000000 /dev/urandom > large; truncate -s 3M holes; echo end >> holes
         ln 1/f1 hard; ln -s 1/f2 soft; ln -s nowhere dangling; mkfifo pipe; mkdir 'a name'
         setfattr -n user.colour -v green 2/f3; setfacl -m u:nobody:r 2/f4; chmod 4751 3/f5; chmod 2770 4
         chown -R nobody 5; touch -d '2001-02-03 04:05:06.789' 6/f6 7",
    );
    source
}

/// Starts a script that tells lines.
fn tells(dir: &Path, script: &str) -> Child {
    let mut command = Command::new("sh");
    command.args(["-ec", script]).current_dir(dir).stdout(Stdio::piped()).stderr(Stdio::null());
    command.spawn().unwrap()
}

/// Transactions of one process in a database that it shares; it tells each one that is done.
fn transactions(process: &str, count: usize) -> String {
    format!(
        "for i in $(seq {count}); do
             echo '.timeout 60000'
             echo \"begin immediate; insert into t select '{process}', $i, n, randomblob(3900) from numbers; commit;\"
             echo \"select $i;\"
         done | sqlite3 -bail database"
    )
}

#[test]
fn a_database_of_sqlite_is_whole_with_two_writers_and_after_a_kill_amid_their_transactions() {
    let Some(mounted) = Mounted::with(&BUSY, |_| ()) else { return };
    mounted.run(
        "sqlite3 database 'pragma journal_mode=wal; create table t (p text, i integer, n integer, data blob);
         create index by_p on t (p, i); create table numbers (n integer); insert into numbers
         with recursive c(n) as (select 1 union all select n + 1 from c where n < 50) select n from c'",
    );
    // A hundred pages each, of which every one is in the write-ahead log first.
    let count = wanted("ONDECK_TRANSACTIONS", 100);
    let writers = ["a", "b"].map(|process| tells(&mounted.fast, &transactions(process, count)));
    for writer in writers {
        assert!(writer.wait_with_output().unwrap().status.success());
    }
    let check =
        "sqlite3 database 'pragma integrity_check; select p, count(distinct i), count(*) from t group by p'";
    let expected = format!("ok\na|{count}|{0}\nb|{count}|{0}\n", count * 50);
    is_found_everywhere(&mounted, &expected, check, "sqlite3 database 'insert into numbers values (51)'");

    // What was committed is there, whatever the server was doing.
    mounted.mount();
    let mut writers = ["c", "d"].map(|process| tells(&mounted.fast, &transactions(process, 100_000)));
    let mut told = writers.each_mut().map(|writer| BufReader::new(writer.stdout.take().unwrap()).lines());
    for lines in &mut told {
        for _ in 0..15 {
            lines.next().unwrap().unwrap();
        }
    }
    mounted.kill();
    let committed = told.map(|lines| lines.map_while(Result::ok).last().map(|line| line.parse().unwrap()));
    for writer in &mut writers {
        assert!(!writer.wait().unwrap().success(), "its files are dead");
    }
    mounted.mount();
    assert_eq!(mounted.run("sqlite3 database 'pragma integrity_check'"), "ok\n");
    for (process, committed) in ["c", "d"].iter().zip(committed) {
        let select =
            format!("sqlite3 database \"select max(i), count(distinct i) from t where p = '{process}'\"");
        let found = mounted.run(&select);
        let (last, count) = found.trim().split_once('|').unwrap();
        assert_eq!(last, count, "{process}");
        let (last, committed): (u64, u64) = (last.parse().unwrap(), committed.unwrap_or(15));
        assert!(committed <= last && last <= committed + 1, "{process}: {last}, and {committed} was told");
    }
    mounted.ondeck(&["unmount", "fast"]);
    assert_eq!(sh(&mounted.backing, "sqlite3 database 'pragma integrity_check'"), "ok\n");
}

#[test]
fn tar_unpacks_what_it_packed() {
    let Some(mounted) = Mounted::with(&BUSY, |_| ()) else { return };
    let source = source(&mounted);
    let tar = "tar --acls --xattrs --sparse --format=posix";
    sh(&source, &format!("{tar} -cf {}/archive.tar .", mounted.fast.display()));
    mounted.run(&format!("mkdir t; cd t; {tar} -xpf ../archive.tar"));
    // Out of the cache again, and compared with what it was.
    let check = format!(
        "cd t; {tar} -df ../archive.tar; cd {source}; {tar} -df $OLDPWD/../archive.tar
         diff -r --no-dereference --exclude=pipe {source} $OLDPWD; getfacl -cp $OLDPWD/2/f4 | grep nobody
         rm -rf ../again; mkdir ../again; {tar} -C $OLDPWD -cf - . | {tar} -C ../again -xpf -
         diff -r --no-dereference --exclude=pipe ../again .",
        source = source.display()
    );
    is_found_everywhere(&mounted, "user:nobody:r--\n", &check, "cd t; cp -a large copy; mv copy large");
}

#[test]
fn rsync_finds_no_difference_to_what_it_copied() {
    let Some(mounted) = Mounted::with(&BUSY, |_| ()) else { return };
    let source = source(&mounted);
    let from = source.display();
    mounted.run(&format!("rsync -aHAXS {from}/ copy/"));
    // A second run finds them by size and time alone, and brings what has changed.
    assert_eq!(mounted.run(&format!("rsync -aHAXi --delete {from}/ copy/")), "");
    sh(&source, "echo more >> 1/f7; rm 2/f8; mv 3 9; head -c 2000000 /dev/urandom > 1/new; chmod 600 6/f9");
    mounted.run(&format!("rsync -aHAXS --delete --inplace --no-whole-file {from}/ copy/"));
    let check = format!("rsync -aHAXcni --delete {from}/ copy/");
    is_found_everywhere(&mounted, "", &check, &format!("rm -r copy; rsync -aHAX {from}/ copy/"));
}

#[test]
fn a_repository_of_git_of_many_files_is_whole() {
    let Some(mounted) = Mounted::with(&BUSY, |_| ()) else { return };
    let files = wanted("ONDECK_GIT_FILES", 1_500);
    mounted.run(&format!(
        "git init -q repository; cd repository; git config user.email a@b; git config user.name n
         git config gc.auto 0; git config core.fsync all
         for d in $(seq 0 19); do mkdir $d; done
         for f in $(seq {files}); do echo \"$f of {files}\" > $((f % 20))/$f; done
         head -c 40000000 /dev/urandom > large
         git add .; git commit -qm one; git checkout -qb other
         for f in $(seq 1 7 {files}); do echo more >> $((f % 20))/$f; done; git commit -qam two
         git mv 3 moved; git commit -qm three; git checkout -q master; git merge -q other; git checkout -q HEAD~2
         git checkout -q master; git gc -q"
    ));
    let check = "cd repository; git fsck --full --strict 2>&1 | grep -v '^dangling' || true
         git status --porcelain; git ls-files | wc -l; git log --format=%s | head -n 3 | tail -n 1";
    let more =
        "cd repository; git checkout -q other; git commit -q --allow-empty -m four; git checkout -q master";
    is_found_everywhere(&mounted, &format!("{}\none\n", files + 1), check, more);
}

/// HDF5 by its own library: `ctypes` needs no package beside it.
const HDF5: &str = r#"
import ctypes, ctypes.util, glob, os, sys, time
h = ctypes.CDLL(ctypes.util.find_library('hdf5_serial') or ctypes.util.find_library('hdf5'))
Id, Size = ctypes.c_int64, ctypes.c_uint64
h.H5open()
LONG, CREATE, ACCESS = [Id.in_dll(h, name).value for name in ('H5T_NATIVE_INT64_g', 'H5P_CLS_DATASET_CREATE_ID_g', 'H5P_CLS_FILE_ACCESS_ID_g')]
def call(name, *arguments):
    function = getattr(h, name)
    function.restype = ctypes.c_int if name in INTS else Id
    result = function(*arguments)
    if result < 0:
        raise OSError(name)
    return result
INTS = ('H5Fclose', 'H5Dwrite', 'H5Dread', 'H5Dflush', 'H5Drefresh', 'H5Dset_extent', 'H5Fstart_swmr_write', 'H5Pset_libver_bounds', 'H5Pset_chunk', 'H5Sget_simple_extent_dims', 'H5Sselect_hyperslab', 'H5Dclose', 'H5Sclose')
def sizes(*values):
    return (Size * len(values))(*values)
def i(value):
    return Id(value)
def access():
    list = call('H5Pcreate', i(ACCESS))
    call('H5Pset_libver_bounds', i(list), 2, 2)
    return list
CHUNK = 8192
def make(file, name):
    space = call('H5Screate_simple', 1, sizes(0), sizes(2 ** 64 - 1))
    how = call('H5Pcreate', i(CREATE))
    call('H5Pset_chunk', i(how), 1, sizes(CHUNK))
    return call('H5Dcreate2', i(file), name, i(LONG), i(space), i(0), i(how), i(0))
def length(data):
    space = call('H5Dget_space', i(data))
    found = sizes(0)
    call('H5Sget_simple_extent_dims', i(space), found, None)
    call('H5Sclose', i(space))
    return found[0]
def move(name, data, begin, buffer):
    there = call('H5Dget_space', i(data))
    call('H5Sselect_hyperslab', i(there), 0, sizes(begin), None, sizes(len(buffer)), None)
    here = call('H5Screate_simple', 1, sizes(len(buffer)), None)
    call(name, i(data), i(LONG), i(here), i(there), i(0), buffer)
    call('H5Sclose', i(here)); call('H5Sclose', i(there))
def append(data, part, seed):
    call('H5Dset_extent', i(data), sizes((part + 1) * CHUNK))
    move('H5Dwrite', data, part * CHUNK, (ctypes.c_int64 * CHUNK)(*range(seed + part * CHUNK, seed + (part + 1) * CHUNK)))
def verify(data, begin, end, seed):
    while begin < end:
        step = min(end - begin, 64 * CHUNK)
        buffer = (ctypes.c_int64 * step)()
        move('H5Dread', data, begin, buffer)
        if list(buffer) != list(range(seed + begin, seed + begin + step)):
            sys.exit('what was read of %d to %d is not what was written' % (begin, begin + step))
        begin += step
what, path, parts = sys.argv[1], sys.argv[2].encode(), int(sys.argv[3])
"#;

/// One writes, and two others read at the same time (SWMR): what is written last comes when both have seen some of it.
const SWMR: &str = r#"
if what == 'write':
    file = call('H5Fcreate', path, 2, i(0), i(access()))
    data = make(file, b'data')
    call('H5Fstart_swmr_write', i(file))
    print('begun', flush=True)
    until = time.monotonic() + 60
    for part in range(parts):
        while part == parts - 1 and len(glob.glob(path + b'.seen-*')) < 2:
            if time.monotonic() > until:
                sys.exit('nobody reads')
            time.sleep(0.001)
        append(data, part, 0)
        call('H5Dflush', i(data))
    call('H5Dclose', i(data)); call('H5Fclose', i(file))
else:
    file = call('H5Fopen', path, 0x40, i(access()))
    data = call('H5Dopen2', i(file), b'data', i(0))
    had, steps, until = 0, 0, time.monotonic() + 60
    while had < parts * CHUNK:
        if time.monotonic() > until:
            sys.exit('only %d has come' % had)
        call('H5Drefresh', i(data))
        now = length(data)
        # The last part may be on its way.
        steps += now > had
        verify(data, had, max(had, now - CHUNK) if now < parts * CHUNK else now, 0)
        had = max(had, now - CHUNK) if now < parts * CHUNK else now
        if steps == 1:
            open(path + b'.seen-%d' % os.getpid(), 'w').close()
    print(steps > 1)
"#;

/// Several write one file, one after the other: HDF5's own lock keeps the others out.
const TURNS: &str = r#"
me = int(what)
h.H5Fopen.restype = Id
# What is locked is no error to be told of.
h.H5Eset_auto2(i(0), None, None)
for part in range(parts):
    until = time.monotonic() + 60
    while True:
        file = h.H5Fopen(path, 1, i(0))
        if file >= 0:
            break
        if time.monotonic() > until:
            sys.exit('the file is not to be had')
        time.sleep(0.001)
    name = b'of-%d' % me
    data = make(file, name) if part == 0 else call('H5Dopen2', i(file), name, i(0))
    append(data, part, me << 40)
    call('H5Dclose', i(data)); call('H5Fclose', i(file))
"#;

/// Reads all of it.
const WHOLE: &str = r#"
file = call('H5Fopen', path, 0, i(0))
for name in what.split(','):
    data = call('H5Dopen2', i(file), name.encode(), i(0))
    if length(data) != parts * CHUNK:
        sys.exit('%s has %d' % (name, length(data)))
    verify(data, 0, parts * CHUNK, int(name[3:]) << 40 if name.startswith('of-') else 0)
print('whole')
"#;

#[test]
fn several_processes_share_files_of_hdf5() {
    let Some(mounted) = Mounted::with(&BUSY, |_| ()) else { return };
    for (name, program) in [("swmr", SWMR), ("turns", TURNS), ("whole", WHOLE)] {
        mounted.scene.file(&format!("{name}.py"), format!("{HDF5}{program}"));
    }
    let python = |name: &str, arguments: &str| {
        format!("exec /usr/bin/python3 {}/{name}.py {arguments}", mounted.scene.dir.path().display())
    };
    fs::create_dir(mounted.fast.join("h")).unwrap();
    let dir = mounted.fast.join("h");
    // 64 KiB a part: more than the cache holds.
    let parts = wanted("ONDECK_HDF5_PARTS", 600);
    let mut writer = tells(&dir, &python("swmr", &format!("write swmr {parts}")));
    let mut begun = String::new();
    BufReader::new(writer.stdout.take().unwrap()).read_line(&mut begun).unwrap();
    assert_eq!(begun, "begun\n");
    let readers = [(); 2].map(|()| tells(&dir, &python("swmr", &format!("read swmr {parts}"))));
    for reader in readers {
        let output = reader.wait_with_output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "True\n", "{}", output.status);
    }
    assert!(writer.wait().unwrap().success());

    sh(&dir, &format!("cp swmr turns; {}", python("whole", &format!("data swmr {parts}"))));
    let turns = 40;
    let writers = [1, 2, 3].map(|me| tells(&dir, &python("turns", &format!("{me} turns {turns}"))));
    for writer in writers {
        assert!(writer.wait_with_output().unwrap().status.success());
    }
    let check = format!(
        "cd h; ({}); ({}); h5ls turns; h5dump -H swmr | grep -c DATASET",
        python("whole", &format!("data swmr {parts}")),
        python("whole", &format!("of-1,of-2,of-3 turns {turns}"))
    );
    let size = |parts: usize| format!("{{{}/Inf}}", parts * 8192);
    let listed: String = ["data", "of-1", "of-2", "of-3"]
        .map(|name| format!("{name:<25}Dataset {}\n", size(if name == "data" { parts } else { turns })))
        .concat();
    let expected = format!("whole\nwhole\n{listed}1\n");
    let more = format!("cd h; cp turns again; {}", python("turns", "4 again 20"));
    is_found_everywhere(&mounted, &expected, &check, &more);
}
