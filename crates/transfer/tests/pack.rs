//! What `pack` and `unpack` promise, with GNU tar, bsdtar and zstd as witnesses.

#![allow(clippy::unwrap_used)]

mod trees;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ondeck_core::PackFormat;
use ondeck_transfer::pack::{
    IndexState, Member, PackError, PackOptions, PackSummary, UnpackOptions, UnpackSummary, list_path,
    pack_path, unpack_path,
};
use ondeck_transfer::{Checksum, Event, Monitor, Progress};
use proptest::prelude::*;
use tempfile::TempDir;

const FORMATS: [PackFormat; 2] = [PackFormat::Tar, PackFormat::TarZst];

fn ram() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

/// Runs something with a monitor; returns also the failures it reported.
fn watched<T>(run: impl FnOnce(&Monitor<'_>) -> T) -> (T, Vec<String>) {
    let failures = Mutex::new(Vec::new());
    let event = |event: Event<'_>| {
        if let Event::Failed(error) = event {
            failures.lock().unwrap().push(error.to_string());
        }
    };
    let result = run(&Monitor { progress: &Progress::new(), event: &event });
    let mut failures = failures.into_inner().unwrap();
    failures.sort();
    (result, failures)
}

fn pack_with(source: &Path, archive: &Path, format: PackFormat) -> (PackSummary, Vec<String>) {
    let options = PackOptions { threads: 2, sync: false, ..PackOptions::default() };
    let (summary, failures) = watched(|monitor| pack_path(source, archive, format, &options, monitor));
    (summary.unwrap(), failures)
}

fn pack(source: &Path, archive: &Path, format: PackFormat) -> PackSummary {
    let (summary, failures) = pack_with(source, archive, format);
    assert_eq!(failures, Vec::<String>::new());
    assert_eq!(fs::metadata(archive).unwrap().len(), summary.archive_bytes);
    summary
}

fn only(paths: &[&str]) -> UnpackOptions {
    let only = (!paths.is_empty()).then(|| paths.iter().map(PathBuf::from).collect());
    UnpackOptions { threads: 2, only, sync: false, same_permissions: true, ..UnpackOptions::default() }
}

fn unpack_with(
    archive: &Path,
    target: &Path,
    options: &UnpackOptions,
) -> (Result<UnpackSummary, PackError>, Vec<String>) {
    watched(|monitor| unpack_path(archive, target, options, monitor))
}

fn unpack(archive: &Path, target: &Path) -> UnpackSummary {
    let (summary, failures) = unpack_with(archive, target, &only(&[]));
    assert_eq!(failures, Vec::<String>::new());
    summary.unwrap()
}

fn members(archive: &Path) -> BTreeMap<Vec<u8>, Member> {
    let listing = list_path(archive).unwrap();
    listing.map(|member| member.unwrap()).map(|member| (member.path.clone(), member)).collect()
}

/// Runs a program that must succeed without a word of complaint.
fn tool(program: &str, arguments: &[&dyn AsRef<OsStr>]) -> Vec<u8> {
    let package = match program {
        "bsdtar" => "libarchive-tools",
        "setfacl" | "getfacl" => "acl",
        "setfattr" => "attr",
        other => other,
    };
    let output = Command::new(program)
        .args(arguments.iter().map(|argument| argument.as_ref()))
        .env("LC_ALL", "C.UTF-8")
        .output()
        .unwrap_or_else(|error| panic!("{program} can't be run ({error}): apt-get install {package}"));
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program}: {complaint}");
    output.stdout
}

/// Removes the sockets of a tree, which no archive can hold.
fn remove_sockets(entry: &mut trees::Entry) {
    if let trees::Kind::Directory(entries) = &mut entry.kind {
        entries.retain(|(_, entry)| !matches!(entry.kind, trees::Kind::Socket));
        entries.iter_mut().for_each(|(_, entry)| remove_sockets(entry));
    }
}

fn file_tree() -> impl Strategy<Value = trees::Entry> {
    trees::tree().prop_map(|mut tree| {
        remove_sockets(&mut tree);
        tree
    })
}

fn compressed() -> impl Strategy<Value = PackFormat> {
    any::<bool>().prop_map(|tar| if tar { PackFormat::Tar } else { PackFormat::TarZst })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_iters: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_random_tree_is_the_same_after_packing_and_unpacking(tree in file_tree(), format in compressed()) {
        let ram = ram();
        let (source, archive, target) = (ram.path().join("s"), ram.path().join("a"), ram.path().join("t"));
        trees::make(&source, &tree);
        let packed = pack(&source, &archive, format);
        let unpacked = unpack(&archive, &target);
        trees::assert_same(&source, &target);
        prop_assert_eq!(unpacked.index, IndexState::Used);
        prop_assert_eq!((packed.files, packed.directories, packed.others, packed.hard_links, packed.bytes),
            (unpacked.files, unpacked.directories, unpacked.others, unpacked.hard_links, unpacked.bytes));
        prop_assert_eq!(unpacked.verified, unpacked.files);
        // The same without the index, by one thread.
        let bare = ram.path().join("bare");
        without_index(&archive, &bare);
        let again = ram.path().join("again");
        let sequential = unpack(&bare, &again);
        trees::assert_same(&source, &again);
        prop_assert_eq!((sequential.index, sequential.verified), (IndexState::None, 0));
        // And over what is there already.
        unpack(&archive, &again);
        trees::assert_same(&source, &again);
        prop_assert_eq!(fs::read_dir(ram.path()).unwrap().count(), 5, "nothing is left behind");
    }

    #[test]
    fn gnu_tar_and_bsdtar_read_a_random_tree(tree in file_tree(), format in compressed()) {
        let ram = ram();
        let (source, archive) = (ram.path().join("s"), ram.path().join("a.tar"));
        trees::make(&source, &tree);
        pack(&source, &archive, format);
        let (gnu, bsd) = (ram.path().join("gnu"), ram.path().join("bsd"));
        for target in [&gnu, &bsd] {
            fs::create_dir(target).unwrap();
        }
        let zstd = if format == PackFormat::TarZst { "--zstd" } else { "--xattrs" };
        // The attributes of every kind that GNU tar can be asked for: with them the trees are the same.
        tool("tar", &[&zstd, &"--acls", &"--xattrs", &"--xattrs-include=*", &"--numeric-owner", &"-xpf", &archive, &"-C", &gnu]);
        trees::assert_same(&source, &gnu);
        tool("bsdtar", &[&"--numeric-owner", &"-xpf", &archive, &"-C", &bsd]);
        let (left, right) = (plain_look(&source), plain_look(&bsd));
        for (path, entry) in &left {
            let name = String::from_utf8_lossy(path);
            prop_assert_eq!(Some(entry), right.get(path), "{}", name);
        }
        prop_assert_eq!(left.len(), right.len());
        let listed = tool("tar", &[&zstd, &"-tf", &archive]);
        prop_assert_eq!(listed.split(|b| *b == b'\n').count() - 1, left.len());
    }
}

/// Mode, owner, time, content.
type PlainLook = (u32, (u32, u32), Option<(i64, i64)>, Vec<u8>);

/// An archive of a few entries of each kind, and where its index begins.
fn small_archive(directory: &Path) -> (Vec<u8>, usize) {
    let source = directory.join("small");
    fs::create_dir_all(source.join("sub/deeper")).unwrap();
    fs::write(source.join("sub/file"), noise(700)).unwrap();
    fs::hard_link(source.join("sub/file"), source.join("sub/deeper/again")).unwrap();
    symlink("/etc", source.join("link")).unwrap();
    fs::write(source.join("sub/deeper/other"), "other").unwrap();
    fs::File::create(source.join("hole")).unwrap().set_len(1 << 20).unwrap();
    tool("setfattr", &[&"-n", &"user.test", &"-v", &"value", &source.join("sub/file")]);
    let archive = directory.join("small.tar");
    pack(&source, &archive, PackFormat::Tar);
    fs::remove_dir_all(&source).unwrap();
    let data = fs::read(&archive).unwrap();
    let length = data.len() - 48;
    let index = u64::from_le_bytes(data[length..length + 8].try_into().unwrap()) as usize;
    let at = data.len() - 64 - index;
    (data, at)
}

/// Writes an archive with another index, and a footer that fits it.
fn with_index(archive: &[u8], at: usize, members: &[u8]) -> Vec<u8> {
    let index = zstd::encode_all(members, 1).unwrap();
    let mut data = archive[..at].to_vec();
    data.extend_from_slice(&index);
    let mut footer = archive[archive.len() - 64..archive.len() - 24].to_vec();
    footer[16..24].copy_from_slice(&(index.len() as u64).to_le_bytes());
    let sum = Checksum::Xxh3.of(&[&index[..], &footer].concat());
    data.extend_from_slice(&footer);
    data.extend_from_slice(sum.as_bytes());
    data.extend_from_slice(&archive[archive.len() - 8..]);
    data
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, max_shrink_iters: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_an_archive_says_nothing_is_written_outside_of_the_target(
        index in any::<bool>(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let ram = ram();
        let (data, at) = small_archive(ram.path());
        let broken = if index {
            // The index says something else than the stream, and its checksum is right.
            let mut members = zstd::decode_all(&data[at..data.len() - 64]).unwrap();
            for (place, byte) in &changes {
                let place = place.index(members.len());
                members[place] = *byte;
            }
            with_index(&data, at, &members)
        } else {
            // No index, and headers that are not what they were, with the sums right.
            let mut data = data[..at].to_vec();
            for (place, byte) in &changes {
                let place = place.index(data.len());
                data[place] = *byte;
            }
            for block in data.chunks_exact_mut(512).filter(|block| &block[257..262] == b"ustar") {
                block[148..156].fill(b' ');
                let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
                block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
            }
            data
        };
        fs::write(ram.path().join("broken"), broken).unwrap();
        // An error or not: no panic, no hang, and nothing beside what was there.
        let _ = unpack_with(&ram.path().join("broken"), &ram.path().join("t/a"), &only(&[]));
        fs::create_dir(ram.path().join("t")).unwrap();
        let (outcome, _) = unpack_with(&ram.path().join("broken"), &ram.path().join("t/a"), &only(&[]));
        if let Ok(summary) = outcome {
            prop_assert_eq!(summary.index == IndexState::Used, index);
        }
        let mut names: Vec<_> = fs::read_dir(ram.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        prop_assert_eq!(names, ["broken", "small.tar", "t"]);
        // A target that nothing came into is not left behind.
        let beside = fs::read_dir(ram.path().join("t")).unwrap().any(|entry| entry.unwrap().file_name() != "a");
        prop_assert!(!beside);
    }
}

/// What bsdtar can restore, but for ACLs, which have a test of their own: not fractions of times before 1970, nor the
/// time of the root.
fn plain_look(root: &Path) -> BTreeMap<Vec<u8>, PlainLook> {
    let mut looks = BTreeMap::new();
    let mut waiting = vec![root.to_owned()];
    while let Some(path) = waiting.pop() {
        let metadata = fs::symlink_metadata(&path).unwrap();
        let told = metadata.mtime() >= 0 && path != root;
        let time = told.then(|| (metadata.mtime(), metadata.mtime_nsec()));
        let content = if metadata.is_file() {
            fs::read(&path).unwrap()
        } else if metadata.is_symlink() {
            fs::read_link(&path).unwrap().into_os_string().into_vec()
        } else {
            if metadata.is_dir() {
                waiting.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            }
            Vec::new()
        };
        let look = (metadata.mode(), (metadata.uid(), metadata.gid()), time, content);
        looks.insert(path.strip_prefix(root).unwrap().as_os_str().as_bytes().to_vec(), look);
    }
    looks
}

/// Copies an archive without the last bytes, where its index has its foot.
fn without_index(archive: &Path, bare: &Path) {
    let mut data = fs::read(archive).unwrap();
    if data.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        // Zstandard wants its frames whole: the index is one.
        let at = data.windows(4).rposition(|bytes| bytes == [0x50, 0x2a, 0x4d, 0x18]).unwrap();
        data.truncate(at);
    } else {
        data.truncate(data.len() - 64);
    }
    fs::write(bare, data).unwrap();
}

/// A tree with everything that is special: names, lengths, sizes and kinds.
fn special_tree(root: &Path) {
    fs::create_dir(root).unwrap();
    let deep = root.join(OsString::from_vec(b"\xff\xfe deep ".repeat(12)));
    fs::create_dir_all(deep.join("x".repeat(200)).join("y".repeat(200))).unwrap();
    fs::write(deep.join("x".repeat(200)).join("y".repeat(200)).join("z".repeat(255)), "far down").unwrap();
    for name in [
        "plain",
        "with space",
        "new\nline",
        "-n",
        "tab\t",
        "back\\slash",
        "ünïcode",
        "%41=",
        "trailing ",
        "\\x",
        "c:y",
    ] {
        fs::write(root.join(name), name).unwrap();
    }
    fs::write(root.join(OsString::from_vec(b"\x80\xc3(".to_vec())), "not UTF-8").unwrap();
    symlink(OsString::from_vec(b"\xfe/".repeat(150)), root.join("link to nowhere")).unwrap();
    symlink("plain", root.join("link")).unwrap();
    fs::hard_link(root.join("link"), root.join("second name of the link")).unwrap();
    fs::hard_link(root.join("plain"), deep.join("hard")).unwrap();
    let holes = fs::File::create(root.join("holes")).unwrap();
    for offset in [1 << 20, 7 << 20, 66 << 20] {
        holes.write_all_at(b"an island", offset).unwrap();
    }
    holes.set_len(70 << 20).unwrap();
    fs::File::create(root.join("only a hole")).unwrap().set_len(5 << 20).unwrap();
    // One that is packed in parts, and one whose checksum is that of chunks.
    for (name, size) in [("large", (9 << 20) + 12_345), ("very large", (64 << 20) + 1)] {
        fs::write(root.join(name), noise(size)).unwrap();
    }
    for number in 0..3000 {
        let directory = root.join(format!("many/{}", number / 100));
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join(format!("file {number}")), noise(number * 7 % 3000)).unwrap();
    }
    tool("setfattr", &[&"-n", &"user.a=b%3D", &"-v", &"0x0a003d", &root.join("plain")]);
    tool("setfacl", &[&"-m", &"u:12345:rw,g:23456:r", &root.join("plain")]);
    tool("setfacl", &[&"-d", &"-m", &"u:12345:rwx", &root.join("many")]);
    fs::set_permissions(root.join("plain"), fs::Permissions::from_mode(0o4755)).unwrap();
}

/// Bytes that compress a little, no two blocks of 4 KiB the same.
fn noise(length: usize) -> Vec<u8> {
    let mut state = length as u64 | 1;
    let block: Vec<u8> = (0..4096)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 60) as u8
        })
        .collect();
    let mut noise = block.repeat(length.div_ceil(4096));
    for (number, block) in noise.chunks_mut(4096).enumerate() {
        block[..8].copy_from_slice(&number.to_le_bytes());
    }
    noise.truncate(length);
    noise
}

#[test]
fn special_names_large_files_and_holes_come_back_by_every_program() {
    let ram = ram();
    let source = ram.path().join("s");
    special_tree(&source);
    let looked = plain_look(&source);
    for format in FORMATS {
        let archive = ram.path().join(format!("a.{format}"));
        let packed = pack(&source, &archive, format);
        assert_eq!(packed.errors, 0);
        assert!(packed.stream_bytes < 120 << 20, "holes are not stored: {}", packed.stream_bytes);
        let target = ram.path().join("t");
        let unpacked = unpack(&archive, &target);
        assert_eq!((unpacked.verified, unpacked.hard_links), (unpacked.files, 2));
        trees::assert_same(&source, &target);
        fs::remove_dir_all(&target).unwrap();
        for program in ["tar", "bsdtar"] {
            fs::create_dir(&target).unwrap();
            tool(program, &[&"-xpf", &archive, &"-C", &target]);
            assert!(plain_look(&target) == looked, "{program} {format}");
            assert!(fs::metadata(target.join("holes")).unwrap().blocks() < 1 << 11, "{program} {format}");
            fs::remove_dir_all(&target).unwrap();
        }
        let list = members(&archive);
        assert_eq!(list.len(), looked.len());
        let member = &list[&b"very large"[..]];
        assert_eq!((member.kind, member.size, member.sparse), (b'f', (64 << 20) + 1, false));
        let links: BTreeSet<_> =
            [&b"link"[..], b"second name of the link"].map(|path| list[path].kind).into();
        assert_eq!(links, BTreeSet::from([b'h', b'l']), "a symlink has a second name, too");
        fs::remove_file(&archive).unwrap();
    }
}

#[test]
fn an_archive_is_the_same_whatever_the_number_of_threads() {
    let ram = ram();
    let source = ram.path().join("s");
    special_tree(&source);
    let archive = |threads| {
        let archive = ram.path().join(format!("{threads}.tar.zst"));
        let options = PackOptions { threads, sync: false, ..PackOptions::default() };
        watched(|monitor| pack_path(&source, &archive, PackFormat::TarZst, &options, monitor)).0.unwrap();
        fs::read(&archive).unwrap()
    };
    let one = archive(1);
    assert!(one == archive(5));
    tool("zstd", &[&"-tq", &ram.path().join("5.tar.zst")]);
}

#[test]
fn archives_of_gnu_tar_are_unpacked() {
    let ram = ram();
    let source = ram.path().join("s");
    special_tree(&source);
    let archive = ram.path().join("gnu.tar");
    tool(
        "tar",
        &[&"--format=pax", &"--xattrs", &"--acls", &"--sparse", &"-cf", &archive, &"-C", &source, &"."],
    );
    let target = ram.path().join("t");
    let summary = unpack(&archive, &target);
    assert_eq!((summary.index, summary.verified), (IndexState::None, 0));
    trees::assert_same(&source, &target);
    assert_eq!(members(&archive).keys().collect::<Vec<_>>(), plain_look(&source).keys().collect::<Vec<_>>());
    // Compressed, in GNU's own format with its long names and old maps of holes, and through a pipe.
    let looked: Vec<_> = plain_look(&source).into_iter().map(|(path, look)| (path, look.3)).collect();
    for arguments in [["--zstd", "--format=gnu"], ["--sparse", "--format=gnu"], ["--zstd", "--format=pax"]] {
        fs::remove_dir_all(&target).unwrap();
        tool("tar", &[&arguments[0], &arguments[1], &"--sparse", &"-cf", &archive, &"-C", &source, &"."]);
        unpack(&archive, &target);
        let unpacked: Vec<_> = plain_look(&target).into_iter().map(|(path, look)| (path, look.3)).collect();
        assert!(unpacked == looked, "{arguments:?}");
        assert!(fs::metadata(target.join("holes")).unwrap().blocks() < 1 << 11, "{arguments:?}");
    }
    for version in ["0.0", "0.1"] {
        fs::remove_dir_all(&target).unwrap();
        let version = format!("--sparse-version={version}");
        tool("tar", &[&"--format=pax", &version, &"--sparse", &"-cf", &archive, &"-C", &source, &"."]);
        unpack(&archive, &target);
        assert!(fs::read(target.join("holes")).unwrap() == fs::read(source.join("holes")).unwrap());
    }
    // An entry that was appended later replaces the first; a name of an ACL is looked up.
    fs::remove_dir_all(&target).unwrap();
    fs::write(source.join("plain"), "newer").unwrap();
    tool("setfacl", &[&"-b", &"-m", &"u:daemon:rw", &source.join("plain")]);
    tool("tar", &[&"--format=pax", &"--acls", &"-rf", &archive, &"-C", &source, &"./plain"]);
    unpack(&archive, &target);
    assert_eq!(fs::read_to_string(target.join("plain")).unwrap(), "newer");
    let acl = String::from_utf8(tool("getfacl", &[&"-n", &"-p", &target.join("plain")])).unwrap();
    let of_daemon = String::from_utf8(tool("id", &[&"-u", &"daemon"])).unwrap();
    assert!(acl.contains(&format!("user:{}:rw-", of_daemon.trim())), "{acl}");
    let bsd = ram.path().join("bsd.tar.zst");
    tool("bsdtar", &[&"--zstd", &"-cf", &bsd, &"-C", &source, &"."]);
    fs::remove_dir_all(&target).unwrap();
    unpack(&bsd, &target);
    assert!(fs::read(target.join("very large")).unwrap() == fs::read(source.join("very large")).unwrap());
}

#[test]
fn one_file_of_a_large_archive_is_taken_without_reading_the_rest() {
    let ram = ram();
    let source = ram.path().join("s");
    special_tree(&source);
    let mut random = vec![0; 30 << 20];
    let source_of_noise = fs::File::open("/dev/urandom").unwrap();
    source_of_noise.read_exact_at(&mut random, 0).unwrap();
    fs::write(source.join("incompressible"), random).unwrap();
    for format in FORMATS {
        let archive = ram.path().join(format!("a.{format}"));
        let whole = pack(&source, &archive, format).archive_bytes;
        let target = ram.path().join("t");
        let (summary, failures) = unpack_with(&archive, &target, &only(&["./many/7/file 777"]));
        let summary = summary.unwrap();
        assert_eq!((failures.len(), summary.files, summary.verified), (0, 1, 1));
        assert!(summary.bytes_read < whole / 10, "{format}: {} of {whole}", summary.bytes_read);
        let path = "many/7/file 777";
        assert_eq!(fs::read(target.join(path)).unwrap(), fs::read(source.join(path)).unwrap());
        assert_eq!(plain_look(&target).len(), 4, "root, many, 7 and the file");
        // A subtree, with its directories' attributes; two at a time; and one that is not there.
        let (summary, failures) =
            unpack_with(&archive, &target, &only(&["many/8/", "plain", "nothing/here"]));
        assert_eq!(summary.unwrap().files, 101);
        assert_eq!(failures, ["nothing/here: unpacking it: the archive has no such path"]);
        trees::assert_same(&source.join("many/8"), &target.join("many/8"));
        fs::remove_dir_all(&target).unwrap();
        // A further name of a file whose first name is not wanted.
        let list = members(&archive);
        let hard = list.values().find(|member| member.kind == b'h' && member.link.ends_with(b"plain"));
        let first = list.values().find(|member| member.kind == b'h' && member.path == b"plain");
        let name = hard.or(first).unwrap();
        let name = Path::new(OsStr::from_bytes(&name.path));
        let options = UnpackOptions { only: Some(vec![name.to_owned()]), ..only(&[]) };
        let (summary, failures) = unpack_with(&archive, &target, &options);
        assert_eq!((summary.unwrap().files, failures.len()), (1, 0));
        assert_eq!(fs::read_to_string(target.join(name)).unwrap(), "plain");
        fs::remove_dir_all(&target).unwrap();
    }
    let options = UnpackOptions { only: Some(vec!["../x".into()]), ..only(&[]) };
    let error = unpack_with(&ram.path().join("a.tar"), &ram.path().join("t"), &options).0.unwrap_err();
    assert_eq!(error.to_string(), "../x: its path leads upwards (`..`)");
}

#[test]
fn a_flipped_byte_is_found_and_only_what_it_hit_is_lost() {
    let ram = ram();
    let source = ram.path().join("s");
    fs::create_dir(&source).unwrap();
    for number in 0..3000 {
        fs::write(source.join(number.to_string()), noise(4000 + number)).unwrap();
    }
    fs::write(source.join("big"), noise(65 << 20)).unwrap();
    for format in FORMATS {
        let archive = ram.path().join(format!("a.{format}"));
        pack(&source, &archive, format);
        let list = members(&archive);
        for name in ["77", "big"] {
            let data = fs::read(&archive).unwrap();
            let mut damaged = data.clone();
            let member = &list[name.as_bytes()];
            let middle = (member.data_offset + member.stored / 2) as usize;
            // Compressed data has no such place; somewhere in the middle of the file is in some frame.
            let at = if format == PackFormat::Tar { middle } else { damaged.len() / 2 };
            damaged[at] ^= 0x10;
            let broken = ram.path().join("broken");
            fs::write(&broken, &damaged).unwrap();
            let target = ram.path().join("t");
            let (summary, failures) = unpack_with(&broken, &target, &only(&[]));
            let summary = summary.unwrap();
            assert_eq!(summary.files + summary.errors, 3001);
            assert_eq!(summary.files, summary.verified);
            assert!(!failures.is_empty());
            if format == PackFormat::Tar {
                assert_eq!(failures.len(), 1);
                let start = format!("{name}: checking it: its checksum is ");
                assert!(failures[0].starts_with(&start), "{failures:?}");
                assert!(!target.join(name).exists());
            }
            for entry in fs::read_dir(&target).unwrap() {
                let name = entry.unwrap().file_name();
                assert!(fs::read(target.join(&name)).unwrap() == fs::read(source.join(&name)).unwrap());
            }
            fs::remove_dir_all(&target).unwrap();
        }
    }
}

#[test]
fn a_link_is_not_made_to_an_older_file_when_its_own_is_damaged() {
    let ram = ram();
    let (source, target) = (ram.path().join("s"), ram.path().join("t"));
    fs::create_dir(&source).unwrap();
    fs::write(source.join("a"), "the content").unwrap();
    let archive = ram.path().join("a.tar");
    fs::hard_link(source.join("a"), source.join("b")).unwrap();
    pack(&source, &archive, PackFormat::Tar);
    let list = members(&archive);
    let first = list.values().find(|member| member.kind == b'f').unwrap();
    let file = fs::OpenOptions::new().write(true).open(&archive).unwrap();
    file.write_all_at(b"THE", first.data_offset).unwrap();
    fs::create_dir(&target).unwrap();
    fs::write(target.join("a"), "old").unwrap();
    fs::write(target.join("b"), "older").unwrap();
    let (summary, failures) = unpack_with(&archive, &target, &only(&[]));
    assert_eq!((summary.unwrap().errors, failures.len()), (2, 2), "{failures:?}");
    assert_eq!(fs::read_to_string(target.join("a")).unwrap(), "old");
    assert_eq!(fs::read_to_string(target.join("b")).unwrap(), "older");
    assert_eq!(fs::read_dir(&target).unwrap().count(), 2);
}

#[test]
fn an_archive_that_is_cut_off_or_has_a_broken_index_gives_what_it_has() {
    let ram = ram();
    let source = ram.path().join("s");
    fs::create_dir(&source).unwrap();
    for number in 0..500 {
        fs::write(source.join(number.to_string()), noise(10_000)).unwrap();
    }
    let target = ram.path().join("t");
    for format in FORMATS {
        let archive = ram.path().join(format!("a.{format}"));
        pack(&source, &archive, format);
        let data = fs::read(&archive).unwrap();
        let broken = ram.path().join("broken");
        // A damaged index: everything is there, but one thread reads it and nobody checks.
        for at in [data.len() - 100, data.len() - 50, data.len() - 20] {
            let mut damaged = data.clone();
            damaged[at] ^= 1;
            fs::write(&broken, &damaged).unwrap();
            let summary = unpack(&broken, &target);
            assert_eq!((summary.index, summary.verified), (IndexState::Damaged, 0));
            trees::assert_same(&source, &target);
            fs::remove_dir_all(&target).unwrap();
            let listing = list_path(&broken).unwrap();
            assert_eq!((listing.index(), listing.count()), (IndexState::Damaged, 501));
        }
        // No footer: the same. A hostile one: lengths beyond the file, or beyond all numbers.
        fs::write(&broken, &data[..data.len() - 64]).unwrap();
        let (summary, _) = unpack_with(&broken, &target, &only(&[]));
        match format {
            PackFormat::Tar => assert_eq!(summary.unwrap().index, IndexState::None),
            // The skippable frame is cut off, after everything was read.
            PackFormat::TarZst => drop(summary),
        }
        trees::assert_same(&source, &target);
        fs::remove_dir_all(&target).unwrap();
        for length in [data.len() as u64, u64::MAX, u64::MAX / 2] {
            let mut damaged = data.clone();
            let at = data.len() - 48;
            damaged[at..at + 8].copy_from_slice(&length.to_le_bytes());
            fs::write(&broken, &damaged).unwrap();
            assert_eq!(unpack(&broken, &target).index, IndexState::Damaged);
            fs::remove_dir_all(&target).unwrap();
        }
        // Half an archive: what came before is there, whole, and the error says so.
        fs::write(&broken, &data[..data.len() / 2]).unwrap();
        let (summary, _) = unpack_with(&broken, &target, &only(&[]));
        let error = summary.unwrap_err();
        assert!(matches!(error, PackError::Truncated { .. }), "{error}");
        assert!(error.to_string().contains("ends too early, at byte"), "{error}");
        let found = fs::read_dir(&target).unwrap().count();
        assert!((100..400).contains(&found), "{found}");
        for entry in fs::read_dir(&target).unwrap() {
            assert_eq!(fs::read(entry.unwrap().path()).unwrap(), noise(10_000));
        }
        fs::remove_dir_all(&target).unwrap();
        let complaint = list_path(&broken).unwrap().last().unwrap().unwrap_err();
        assert!(matches!(complaint, PackError::Truncated { .. }));
    }
    for content in [&b""[..], b"short", &noise(5000)[..]] {
        fs::write(ram.path().join("x"), content).unwrap();
        let error = unpack_with(&ram.path().join("x"), &target, &only(&[])).0.unwrap_err();
        assert!(matches!(error, PackError::NotAnArchive { .. }), "{error}");
    }
    let error = unpack_with(&ram.path().join("missing"), &target, &only(&[])).0.unwrap_err();
    assert!(error.to_string().contains("missing: No such file"), "{error}");
}

/// Appends a member by hand, as no honest program would write it.
fn forge(archive: &mut Vec<u8>, name: &[u8], kind: u8, link: &[u8], content: &[u8]) {
    let mut header = [0_u8; 512];
    header[..name.len()].copy_from_slice(name);
    header[100..107].copy_from_slice(b"0000755");
    header[108..115].copy_from_slice(b"0000000");
    header[116..123].copy_from_slice(b"0000000");
    header[124..135].copy_from_slice(format!("{:011o}", content.len()).as_bytes());
    header[136..147].copy_from_slice(b"00000000001");
    header[148..156].fill(b' ');
    header[156] = kind;
    header[157..157 + link.len()].copy_from_slice(link);
    header[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    archive.extend_from_slice(&header);
    archive.extend_from_slice(content);
    archive.resize(archive.len().next_multiple_of(512), 0);
}

#[test]
fn members_that_would_leave_the_target_are_refused_and_the_rest_goes_on() {
    let ram = ram();
    let outside = ram.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("victim"), "safe").unwrap();
    let outside_name = outside.as_os_str().as_bytes();
    let mut data = Vec::new();
    forge(&mut data, b"good", b'0', b"", b"good");
    forge(&mut data, b"../outside/victim", b'0', b"", b"evil");
    forge(&mut data, b"a/../../outside/victim", b'0', b"", b"evil");
    forge(&mut data, &[outside_name, b"/victim"].concat(), b'0', b"", b"evil");
    forge(&mut data, b"way", b'2', outside_name, b"");
    forge(&mut data, b"way/victim", b'0', b"", b"evil");
    forge(&mut data, b"way/new/deeper", b'0', b"", b"evil");
    forge(&mut data, b"way/", b'5', b"", b"");
    forge(&mut data, b"there/victim", b'0', b"", b"evil");
    forge(&mut data, b"stolen", b'1', b"../outside/victim", b"");
    forge(&mut data, b"stolen2", b'1', b"way/victim", b"");
    forge(&mut data, b"stolen3", b'1', b"there/victim", b"");
    forge(&mut data, b"second", b'1', b"way", b"");
    forge(&mut data, b"second/victim", b'0', b"", b"evil");
    forge(&mut data, b"what", b'Q', b"", b"unknown");
    forge(&mut data, b"also good", b'0', b"", b"also good");
    data.resize(data.len() + 1024, 0);
    let (archive, target) = (ram.path().join("evil.tar"), ram.path().join("t"));
    fs::write(&archive, &data).unwrap();
    fs::create_dir(&target).unwrap();
    symlink(&outside, target.join("there")).unwrap();
    let (summary, failures) = unpack_with(&archive, &target, &only(&[]));
    assert_eq!(summary.unwrap().files, 2, "{failures:#?}");
    let expected = [
        ": unpacking it: its path is absolute",
        "../outside/victim: unpacking it: its path leads upwards (`..`)",
        "a/../../outside/victim: unpacking it: its path leads upwards (`..`)",
        "second/victim: unpacking it: its path leads through a symbolic link",
        "stolen2: unpacking it: its path leads through a symbolic link",
        "stolen3: unpacking it: its path leads through a symbolic link",
        "stolen: unpacking it: its path leads upwards (`..`)",
        "there/victim: unpacking it: its path leads through a symbolic link",
        "way/new/deeper: unpacking it: its path leads through a symbolic link",
        "way/victim: unpacking it: its path leads through a symbolic link",
        "way: unpacking it: its path leads through a symbolic link",
        "what: unpacking it: it is of a type unknown here",
    ];
    for expected in expected {
        assert!(failures.iter().any(|failure| failure.ends_with(expected)), "{expected}: {failures:#?}");
    }
    assert_eq!(failures.len(), expected.len(), "{failures:#?}");
    assert_eq!(fs::read_to_string(outside.join("victim")).unwrap(), "safe");
    assert_eq!(
        (fs::read_dir(&outside).unwrap().count(), fs::metadata(outside.join("victim")).unwrap().nlink()),
        (1, 1)
    );
    assert_eq!(fs::read_to_string(target.join("also good")).unwrap(), "also good");
}

#[test]
fn an_index_that_lies_about_its_archive_does_no_harm() {
    let ram = ram();
    let (source, target) = (ram.path().join("s"), ram.path().join("t"));
    fs::create_dir_all(source.join("dir")).unwrap();
    fs::write(source.join("dir/file"), "content").unwrap();
    symlink("/tmp", source.join("link")).unwrap();
    let archive = ram.path().join("a.tar");
    pack(&source, &archive, PackFormat::Tar);
    // The header at a member's place says another path than the index.
    let list = members(&archive);
    let member = &list[&b"dir/file"[..]];
    let mut data = fs::read(&archive).unwrap();
    let header = member.data_offset as usize - 512;
    data[header..header + 8].copy_from_slice(b"../../xx");
    let sum: u32 =
        (0..512).map(|at| if (148..156).contains(&at) { 32 } else { u32::from(data[header + at]) }).sum();
    data[header + 148..header + 155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    fs::write(&archive, &data).unwrap();
    let (summary, failures) = unpack_with(&archive, &target, &only(&[]));
    assert_eq!((summary.unwrap().files, failures.len()), (0, 1), "{failures:?}");
    assert!(failures[0].starts_with("dir/file: "), "{failures:?}");
    assert!(!ram.path().join("xx").exists() && !ram.path().parent().unwrap().join("xx").exists());
}

#[test]
fn a_cancelled_pack_leaves_nothing_and_a_cancelled_unpack_no_half_files() {
    let ram = ram();
    let source = ram.path().join("s");
    fs::create_dir_all(source.join("dir")).unwrap();
    for number in 0..2000 {
        fs::write(source.join("dir").join(number.to_string()), noise(20_000)).unwrap();
    }
    for format in FORMATS {
        let archive = ram.path().join("a");
        fs::write(&archive, "an older one").unwrap();
        let options = PackOptions { threads: 2, sync: false, ..PackOptions::default() };
        let progress = Progress::new();
        let monitor = Monitor { progress: &progress, event: &|_| {} };
        let outcome = std::thread::scope(|scope| {
            let packing = scope.spawn(|| pack_path(&source, &archive, format, &options, &monitor));
            while progress.entries_done.load(Ordering::Relaxed) < 100 {}
            progress.cancel.store(true, Ordering::Relaxed);
            packing.join().unwrap()
        });
        assert!(matches!(outcome, Err(PackError::Interrupted)), "{outcome:?}");
        assert_eq!(fs::read_to_string(&archive).unwrap(), "an older one");
        assert_eq!(fs::read_dir(ram.path()).unwrap().count(), 2, "nothing else is left");

        let summary = pack(&source, &archive, format);
        assert_eq!((summary.files, summary.directories), (2000, 2));
        let target = ram.path().join("t");
        let progress = Progress::new();
        let monitor = Monitor { progress: &progress, event: &|_| {} };
        let outcome = std::thread::scope(|scope| {
            let unpacking = scope.spawn(|| unpack_path(&archive, &target, &only(&[]), &monitor));
            while progress.entries_done.load(Ordering::Relaxed) < 100 {}
            progress.cancel.store(true, Ordering::Relaxed);
            unpacking.join().unwrap()
        });
        assert!(matches!(outcome, Err(PackError::Interrupted)), "{outcome:?}");
        assert!(
            !target.exists(),
            "no directory has its name yet, and the target is not there for the next run"
        );
        // What a killed run left is in nobody's way.
        fs::create_dir_all(target.join(".dir.ondeck-partial/junk")).unwrap();
        unpack(&archive, &target);
        trees::assert_same(&source, &target);
        fs::remove_dir_all(&target).unwrap();
        fs::remove_file(&archive).unwrap();
    }
}

#[test]
fn counters_and_events_tell_what_happens() {
    let ram = ram();
    let source = ram.path().join("s");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("one"), vec![1; 1000]).unwrap();
    fs::hard_link(source.join("one"), source.join("two")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(source.join("socket")).unwrap();
    // The archive may lie in the tree that is packed, and replace one there.
    let archive = source.join("a.tar.zst");
    fs::write(&archive, "older").unwrap();
    let progress = Progress::new();
    let failures = Mutex::new(Vec::new());
    let event = |event: Event<'_>| {
        if let Event::Failed(error) = event {
            failures.lock().unwrap().push(error.to_string());
        }
    };
    let monitor = Monitor { progress: &progress, event: &event };
    let summary =
        pack_path(&source, &archive, PackFormat::TarZst, &PackOptions::default(), &monitor).unwrap();
    assert_eq!(*failures.lock().unwrap(), ["socket: packing it: an archive can't hold a socket"]);
    assert_eq!((summary.files, summary.hard_links, summary.errors), (1, 1, 1));
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    assert_eq!((count(&progress.entries_found), count(&progress.entries_done)), (3, 2));
    assert_eq!(
        (count(&progress.bytes_found), count(&progress.bytes_done), count(&progress.errors)),
        (1000, 1000, 1)
    );
    assert_eq!(count(&progress.bytes_written), summary.archive_bytes);
    assert_eq!(members(&archive).len(), 3);

    progress.reset();
    let target = ram.path().join("t");
    unpack_path(&archive, &target, &UnpackOptions::default(), &monitor).unwrap();
    assert_eq!((count(&progress.entries_found), count(&progress.entries_done)), (2, 2));
    assert_eq!((count(&progress.bytes_done), count(&progress.bytes_written)), (1000, 1000));
}

#[test]
fn a_file_that_changes_while_it_is_packed_is_reported_and_the_archive_stays_whole() {
    let ram = ram();
    let source = ram.path().join("s");
    fs::create_dir(&source).unwrap();
    for number in 0..300 {
        fs::write(source.join(number.to_string()), noise(30_000)).unwrap();
    }
    let writers: Vec<_> =
        ["grows", "shrinks"].map(|name| fs::File::create(source.join(name)).unwrap()).into_iter().collect();
    for writer in &writers {
        writer.set_len(0).unwrap();
        writer.write_all_at(&noise(24 << 20), 0).unwrap();
    }
    let stop = AtomicBool::new(false);
    for format in FORMATS {
        let archive = ram.path().join(format!("a.{format}"));
        stop.store(false, Ordering::Relaxed);
        let (summary, failures) = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut size = 24 << 20;
                while !stop.load(Ordering::Relaxed) {
                    size += 1;
                    writers[0].set_len(size).unwrap();
                    writers[1].set_len((48 << 20) - size).unwrap();
                }
            });
            let packed = pack_with(&source, &archive, format);
            stop.store(true, Ordering::Relaxed);
            packed
        });
        assert_eq!(failures.len(), 2, "{failures:?}");
        assert!(failures[0].starts_with("grows: packing it: it changed"), "{failures:?}");
        assert_eq!((summary.files, summary.errors), (300, 2));
        tool("tar", &[&"-tf", &archive]);
        tool("bsdtar", &[&"-tf", &archive]);
        let target = ram.path().join("t");
        assert_eq!(unpack(&archive, &target).files, 302);
        fs::remove_dir_all(&target).unwrap();
    }
}

#[test]
fn files_above_8_gib_keep_their_size() {
    let ram = ram();
    let source = ram.path().join("s");
    fs::create_dir(&source).unwrap();
    let file = fs::File::create(source.join("file")).unwrap();
    file.set_len((9 << 30) + 7).unwrap();
    file.write_all_at(b"end", (9 << 30) + 4).unwrap();
    let (archive, target) = (ram.path().join("a.tar"), ram.path().join("t"));
    pack(&source, &archive, PackFormat::Tar);
    unpack(&archive, &target);
    assert_eq!(fs::metadata(target.join("file")).unwrap().len(), (9 << 30) + 7);
    let mut end = [0; 3];
    fs::File::open(target.join("file")).unwrap().read_exact_at(&mut end, (9 << 30) + 4).unwrap();
    assert_eq!(&end, b"end");
    let listed = String::from_utf8(tool("tar", &[&"-tvf", &archive])).unwrap();
    assert!(listed.contains(" 9663676423 "), "{listed}");
}

#[test]
fn a_hundred_thousand_small_files_are_packed_and_unpacked_in_bounded_memory() {
    const FILES: u64 = 100_000;
    let ram = ram();
    let source = ram.path().join("s");
    for directory in 0..100 {
        let directory = source.join(format!("directory number {directory}"));
        fs::create_dir_all(&directory).unwrap();
        for number in 0..FILES / 100 {
            let file = directory.join(format!("file number {number}"));
            fs::write(file, number.to_le_bytes()).unwrap();
        }
    }
    for format in FORMATS {
        let archive = ram.path().join(format!("a.{format}"));
        // The other tests of this process use memory as well, so it is measured in a process of its own.
        let peak =
            peak_of(&["pack", &source.to_string_lossy(), &archive.to_string_lossy(), &format.to_string()]);
        eprintln!("PEAK pack {} KiB", peak >> 10);
        assert!(peak < 48 << 20, "packing {format} took {} KiB", peak >> 10);
        let target = ram.path().join("t");
        let peak = peak_of(&["unpack", &archive.to_string_lossy(), &target.to_string_lossy(), ""]);
        eprintln!("PEAK unpack {} KiB", peak >> 10);
        assert!(peak < 40 << 20, "unpacking {format} took {} KiB", peak >> 10);
        assert_eq!(fs::read_dir(target.join("directory number 7")).unwrap().count(), 1000);
        fs::remove_dir_all(&target).unwrap();
    }
}

/// Runs this test program again to do one thing, and returns the most memory it had.
fn peak_of(arguments: &[&str; 4]) -> u64 {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "in_a_process_of_its_own", "--nocapture", "--ignored"])
        .env("ONDECK_PACK_TEST", arguments.join("\n"))
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let peak = text.lines().find_map(|line| line.split_once("peak ")?.1.parse::<u64>().ok());
    peak.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)))
}

#[test]
#[ignore = "run by a test that measures its memory"]
fn in_a_process_of_its_own() {
    let Ok(arguments) = std::env::var("ONDECK_PACK_TEST") else { return };
    let arguments: Vec<&str> = arguments.split('\n').collect();
    let (from, to) = (Path::new(arguments[1]), Path::new(arguments[2]));
    let memory = |field: &str| -> u64 {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap().to_owned();
        line.trim_matches([':', '\t', ' ', 'k', 'B']).parse::<u64>().unwrap() << 10
    };
    let before = memory("VmRSS");
    if arguments[0] == "pack" {
        pack(from, to, PackFormat::from_word(arguments[3]).unwrap());
    } else if arguments[0] == "bomb" {
        let (summary, failures) = unpack_with(from, to, &cautious(0o022));
        assert!(
            failures.len() >= 900 && failures.iter().all(|failure| failure.len() < 5_000),
            "{}",
            failures.len()
        );
        assert_eq!(summary.unwrap().others, 0);
    } else {
        unpack(from, to);
    }
    println!("\npeak {}", memory("VmHWM") - before);
}

#[test]
fn a_tree_deeper_than_any_path_may_be_long_is_packed_and_unpacked() {
    const DEPTH: u64 = 1000;
    let ram = ram();
    let name = "ten letters";
    let make = |root: &Path| {
        fs::create_dir(root).unwrap();
        let mut directory = fs::File::open(root).unwrap();
        for _ in 0..DEPTH {
            rustix::fs::mkdirat(&directory, name, rustix::fs::Mode::RWXU).unwrap();
            let flags = rustix::fs::OFlags::DIRECTORY;
            directory =
                rustix::fs::openat(&directory, name, flags, rustix::fs::Mode::empty()).unwrap().into();
        }
        let flags = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY;
        let file = rustix::fs::openat(&directory, "bottom", flags, rustix::fs::Mode::RUSR).unwrap();
        rustix::io::write(&file, b"down here").unwrap();
    };
    let (source, target) = (ram.path().join("s"), ram.path().join("t"));
    make(&source);
    let archive = ram.path().join("a.tar.zst");
    let packed = pack(&source, &archive, PackFormat::TarZst);
    assert_eq!((packed.directories, packed.files), (DEPTH + 1, 1));
    let unpacked = unpack(&archive, &target);
    assert_eq!((unpacked.directories, unpacked.files, unpacked.bytes), (DEPTH + 1, 1, 9));
    // Over itself, where everything is there.
    assert_eq!(unpack(&archive, &target).files, 1);
}

#[test]
fn open_descriptors_serve_as_well_as_paths() {
    let ram = ram();
    let source = ram.path().join("s");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("file"), "content").unwrap();
    let open = |path: &Path| fs::File::open(path).unwrap();
    let monitor = Monitor { progress: &Progress::new(), event: &|_| {} };
    let (parent, target) = (open(ram.path()), ram.path().join("t"));
    let options = PackOptions::default();
    let from = open(&source);
    ondeck_transfer::pack::pack(from.as_fd(), parent.as_fd(), c"a.tar", PackFormat::Tar, &options, &monitor)
        .unwrap();
    fs::create_dir(&target).unwrap();
    let (archive, to) = (open(&ram.path().join("a.tar")), open(&target));
    let trusting = UnpackOptions { same_permissions: true, ..UnpackOptions::default() };
    ondeck_transfer::pack::unpack(archive.as_fd(), to.as_fd(), &trusting, &monitor).unwrap();
    trees::assert_same(&source, &target);
    let listed = ondeck_transfer::pack::list(archive.as_fd()).unwrap();
    assert_eq!((listed.index(), listed.count()), (IndexState::Used, 2));
    // Nobody else may write the same archive.
    let partial = ram.path().join(".a.tar.ondeck-partial");
    let held = fs::File::create(&partial).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let busy = pack_path(&source, &ram.path().join("a.tar"), PackFormat::Tar, &options, &monitor);
    assert!(matches!(busy, Err(PackError::Busy { .. })), "{busy:?}");
    assert!(partial.exists());
    rustix::fs::flock(&held, rustix::fs::FlockOperation::Unlock).unwrap();
    rustix::fs::flock(&to, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let busy = unpack_with(&ram.path().join("a.tar"), &target, &only(&[])).0;
    assert!(matches!(busy, Err(PackError::Busy { .. })), "{busy:?}");
    pack(&source, &ram.path().join("a.tar"), PackFormat::Tar);
    assert!(!partial.exists());
}

fn mode(path: &Path) -> String {
    format!("{:o}", fs::symlink_metadata(path).unwrap().mode() & 0o7777)
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn umask(mask: u32) -> rustix::fs::Mode {
    rustix::fs::Mode::from_raw_mode(mask)
}

#[test]
fn an_archive_is_no_more_readable_than_the_umask_and_its_tree_allow() {
    let ram = ram();
    let (source, archive) = (ram.path().join("s"), ram.path().join("a.tar"));
    fs::create_dir(&source).unwrap();
    fs::write(source.join("x"), "x").unwrap();
    let packed = |tree: u32, mask: u32| {
        chmod(&source, tree);
        let options = PackOptions { umask: umask(mask), sync: false, ..PackOptions::default() };
        watched(|monitor| pack_path(&source, &archive, PackFormat::Tar, &options, monitor)).0.unwrap();
        mode(&archive)
    };
    for (tree, mask, expected) in [
        (0o755, 0o022, "644"),
        (0o755, 0o077, "600"),
        (0o755, 0o007, "660"),
        (0o777, 0o000, "666"),
        (0o700, 0o000, "600"),
        (0o750, 0o000, "660"),
        (0o711, 0o022, "600"),
        (0o744, 0o022, "600"),
        (0o705, 0o022, "604"),
    ] {
        assert_eq!(packed(tree, mask), expected, "a tree of {tree:o} and the umask {mask:o}");
    }
    // The mask of an ACL is not what the group may do.
    tool("setfacl", &[&"-m", &"g::---,u:12345:rx,m::rx,o::---", &source]);
    let options = PackOptions { umask: umask(0o022), sync: false, ..PackOptions::default() };
    watched(|monitor| pack_path(&source, &archive, PackFormat::Tar, &options, monitor)).0.unwrap();
    assert_eq!(mode(&archive), "600");
    tool("setfacl", &[&"-b", &source]);
    // One whom the tree shuts out, though all others may read it.
    for entry in ["u:12345:---", "g:12345:--x"] {
        chmod(&source, 0o755);
        tool("setfacl", &[&"-m", &entry, &source]);
        watched(|monitor| pack_path(&source, &archive, PackFormat::Tar, &options, monitor)).0.unwrap();
        assert_eq!(mode(&archive), "600", "{entry}");
        tool("setfacl", &[&"-b", &source]);
    }
    // The group of the archive is another one than the tree's.
    if trees::is_root() {
        std::os::unix::fs::chown(&source, None, Some(12_345)).unwrap();
        assert_eq!(packed(0o750, 0o022), "600");
        assert_eq!(packed(0o755, 0o022), "644");
        assert_eq!(packed(0o705, 0o022), "600");
    }
    // What the directory's default ACL gives to somebody is theirs only if all may read the tree.
    tool("setfacl", &[&"-d", &"-m", &"u::rwx,g::rx,u:12345:rx,m::rx,o::---", &ram.path()]);
    assert_eq!(packed(0o755, 0o022), "640");
    assert!(
        String::from_utf8(tool("getfacl", &[&"-np", &archive]))
            .unwrap()
            .contains("user:12345:r-x\t#effective:r--")
    );
    assert_eq!(packed(0o700, 0o022), "600");
    assert!(!String::from_utf8(tool("getfacl", &[&"-np", &archive])).unwrap().contains("12345"));
}

#[test]
fn an_archive_is_its_makers_alone_until_it_is_complete() {
    let ram = ram();
    let (source, archive) = (ram.path().join("s"), ram.path().join("a.tar"));
    fs::create_dir(&source).unwrap();
    for number in 0..20 {
        fs::write(source.join(number.to_string()), noise(1 << 20)).unwrap();
    }
    let done = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let mut seen = BTreeSet::new();
            while !done.load(Ordering::Relaxed) {
                for entry in fs::read_dir(ram.path()).unwrap().flatten() {
                    if let Ok(metadata) = entry.metadata()
                        && metadata.is_file()
                    {
                        seen.insert((entry.file_name(), metadata.mode() & 0o7777));
                    }
                }
            }
            seen
        });
        for _ in 0..5 {
            let options = PackOptions { umask: umask(0), sync: false, ..PackOptions::default() };
            watched(|monitor| pack_path(&source, &archive, PackFormat::TarZst, &options, monitor)).0.unwrap();
        }
        done.store(true, Ordering::Relaxed);
        watching.join().unwrap()
    });
    let partial: BTreeSet<u32> =
        seen.iter().filter(|(name, _)| name != "a.tar").map(|(_, mode)| *mode).collect();
    // In the moment before it gets its name it has its mode already.
    assert!(partial.contains(&0o600) && partial.iter().all(|mode| [0o600, 0o666].contains(mode)), "{seen:?}");
    assert_eq!(mode(&archive), "666");
}

#[test]
fn directories_that_an_archive_says_nothing_of_follow_the_umask() {
    let ram = ram();
    let (source, archive) = (ram.path().join("s"), ram.path().join("a.tar"));
    fs::create_dir_all(source.join("a/b/c")).unwrap();
    fs::write(source.join("a/b/c/x"), "x").unwrap();
    chmod(&source.join("a/b"), 0o700);
    chmod(&source.join("a/b/c/x"), 0o666);
    pack(&source, &archive, PackFormat::Tar);
    let one = |target: &Path, mask: u32| {
        let options = UnpackOptions { umask: umask(mask), ..only(&["a/b/c/x"]) };
        let (summary, failures) = unpack_with(&archive, target, &options);
        assert_eq!((summary.unwrap().files, failures), (1, Vec::new()));
        [".", "a", "a/b", "a/b/c", "a/b/c/x"].map(|path| mode(&target.join(path)))
    };
    assert_eq!(one(&ram.path().join("t1"), 0o022), ["755", "755", "755", "755", "666"]);
    assert_eq!(one(&ram.path().join("t2"), 0o077), ["700", "700", "700", "700", "666"]);
    assert_eq!(one(&ram.path().join("t3"), 0o000), ["777", "777", "777", "777", "666"]);
    // A set-gid directory hands its group down; a default ACL lets nobody in by way of the mask.
    let shared = ram.path().join("t4");
    fs::create_dir(&shared).unwrap();
    chmod(&shared, 0o2770);
    assert_eq!(one(&shared, 0o027), ["2770", "2750", "2750", "2750", "666"]);
    let listed = ram.path().join("t5");
    fs::create_dir(&listed).unwrap();
    tool("setfacl", &[&"-d", &"-m", &"u:12345:rwx,g::---,m::rwx,o::---", &listed]);
    assert_eq!(one(&listed.join("new"), 0o022)[..2], ["700", "755"]);
    assert_eq!(one(&listed, 0o022)[1..4], ["700", "755", "755"]);
    // A foreign archive without a root, and one whose tree is closed.
    let foreign = ram.path().join("foreign.tar");
    tool("tar", &[&"-cf", &foreign, &"-C", &source, &"a/b/c/x"]);
    let options = UnpackOptions { umask: umask(0o027), ..only(&[]) };
    unpack_with(&foreign, &ram.path().join("t6"), &options).0.unwrap();
    assert_eq!(["t6", "t6/a"].map(|path| mode(&ram.path().join(path))), ["750", "750"]);
    chmod(&source, 0o700);
    pack(&source, &archive, PackFormat::Tar);
    unpack(&archive, &ram.path().join("t7"));
    assert_eq!(mode(&ram.path().join("t7")), "700");
}

#[test]
fn nobody_gets_into_what_is_unpacked_before_it_has_its_mode() {
    let ram = ram();
    let (source, archive) = (ram.path().join("s"), ram.path().join("a.tar"));
    for directory in 0..10 {
        let directory = source.join(format!("d{directory}"));
        fs::create_dir_all(&directory).unwrap();
        chmod(&directory, 0o755);
        for number in 0..40 {
            let file = directory.join(number.to_string());
            fs::write(&file, noise(100_000)).unwrap();
            chmod(&file, 0o666);
        }
    }
    chmod(&source, 0o700);
    pack(&source, &archive, PackFormat::Tar);
    let target = ram.path().join("t");
    let done = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let mut seen = BTreeSet::new();
            while !done.load(Ordering::Relaxed) {
                if let Ok(metadata) = fs::metadata(&target) {
                    seen.insert(metadata.mode() & 0o7777);
                }
            }
            seen
        });
        for _ in 0..5 {
            let _ = fs::remove_dir_all(&target);
            let options = UnpackOptions { umask: umask(0), ..only(&[]) };
            unpack_with(&archive, &target, &options).0.unwrap();
        }
        done.store(true, Ordering::Relaxed);
        watching.join().unwrap()
    });
    assert_eq!(seen, BTreeSet::from([0o700]));
    assert_eq!(mode(&target.join("d0/0")), "666");
}

/// What getfacl(1) says of every entry of a tree.
fn acls(root: &Path) -> String {
    let out = Command::new("getfacl").args(["-n", "-R", "-P", "."]).current_dir(root).output().unwrap();
    assert!(out.status.success(), "{out:?}");
    let text = String::from_utf8(out.stdout).unwrap();
    let mut entries: Vec<&str> = text.split("\n\n").collect();
    entries.sort();
    entries.join("\n\n")
}

/// A tree in which somebody has rights that the group has not.
fn tree_with_acls(root: &Path) {
    fs::create_dir_all(root.join("shared/inner")).unwrap();
    fs::write(root.join("shared/file"), "x").unwrap();
    fs::write(root.join("shared/plain"), "x").unwrap();
    tool(
        "setfacl",
        &[&"-m", &"u:12345:rw,u:daemon:r,g::---,g:23456:rw,m::rw,o::---", &root.join("shared/file")],
    );
    tool("setfacl", &[&"-m", &"u:12345:rwx,g::---,m::rwx,o::r", &root.join("shared")]);
    tool("setfacl", &[&"-d", &"-m", &"u::rwx,g::---,u:12345:rwx,m::rwx,o::---", &root.join("shared/inner")]);
    tool("setfattr", &[&"-n", &"user.test", &"-v", &"value", &root.join("shared/file")]);
}

#[test]
fn acls_are_where_gnu_tar_and_bsdtar_look_for_them() {
    let ram = ram();
    let source = ram.path().join("s");
    tree_with_acls(&source);
    let wanted = acls(&source);
    assert!(wanted.contains("user:12345:rw-") && wanted.contains("default:user:12345:rwx"), "{wanted}");
    for format in FORMATS {
        let archive = ram.path().join("a.tar");
        pack(&source, &archive, format);
        let (gnu, bsd, ours) = (ram.path().join("gnu"), ram.path().join("bsd"), ram.path().join("ours"));
        for target in [&gnu, &bsd] {
            fs::create_dir(target).unwrap();
        }
        let zstd = if format == PackFormat::TarZst { "--zstd" } else { "--xattrs" };
        // Nobody has asked for an attribute of ours: the keys are their own.
        tool("tar", &[&zstd, &"--acls", &"-xpf", &archive, &"-C", &gnu]);
        tool("bsdtar", &[&"--acls", &"-xpf", &archive, &"-C", &bsd]);
        unpack(&archive, &ours);
        for target in [&gnu, &bsd, &ours] {
            assert_eq!(acls(target), wanted, "{}", target.display());
        }
        trees::assert_same(&source, &ours);
        for target in [gnu, bsd, ours] {
            fs::remove_dir_all(target).unwrap();
        }
    }
}

#[test]
fn acls_of_other_programs_archives_are_restored() {
    let ram = ram();
    let source = ram.path().join("s");
    tree_with_acls(&source);
    let wanted = acls(&source);
    let archive = ram.path().join("a.tar");
    let dot = ["-C", source.to_str().unwrap(), "."];
    let programs: [(&str, &[&str]); 5] = [
        ("tar", &["--format=pax", "--acls"]),
        ("tar", &["--format=pax", "--acls", "--numeric-owner"]),
        ("tar", &["--format=pax", "--acls", "--xattrs", "--xattrs-include=*"]),
        // As archives of Ondeck's were before: in the kernel's form.
        ("tar", &["--format=pax", "--xattrs", "--xattrs-include=*"]),
        ("bsdtar", &["--format=pax", "--acls"]),
    ];
    for (program, options) in programs {
        let mut arguments: Vec<&dyn AsRef<OsStr>> = options.iter().map(|option| option as _).collect();
        arguments.extend([&"-cf" as &dyn AsRef<OsStr>, &archive]);
        arguments.extend(dot.iter().map(|word| word as &dyn AsRef<OsStr>));
        tool(program, &arguments);
        let target = ram.path().join("t");
        unpack(&archive, &target);
        assert_eq!(acls(&target), wanted, "{program} {options:?}");
        fs::remove_dir_all(target).unwrap();
    }
}

#[test]
fn an_acl_that_can_not_be_had_here_leaves_the_group_no_more_than_it_had() {
    let ram = ram();
    let source = ram.path().join("s");
    fs::create_dir(&source).unwrap();
    for name in ["named", "broken"] {
        fs::write(source.join(name), "x").unwrap();
        tool("setfacl", &[&"-m", &"u:daemon:rw,u:12345:rw,g::---,m::rw,o::---", &source.join(name)]);
    }
    let archive = ram.path().join("a.tar");
    tool("tar", &[&"--format=pax", &"--acls", &"-cf", &archive, &"-C", &source, &"named", &"broken"]);
    let data = fs::read(&archive).unwrap();
    // As many letters, so that the records keep their lengths.
    let mut text = data.clone();
    let mut places =
        data.windows(13).enumerate().filter(|(_, window)| window == b"user:daemon:r").map(|(at, _)| at);
    let (named, broken) = (places.next().unwrap(), places.next().unwrap());
    text[named..named + 11].copy_from_slice(b"user:nobodx");
    text[broken..broken + 11].copy_from_slice(b"usex:daemon");
    fs::write(&archive, text).unwrap();
    let target = ram.path().join("t");
    let (summary, failures) = unpack_with(&archive, &target, &only(&[]));
    assert_eq!((summary.unwrap().files, failures.len()), (2, 2), "{failures:?}");
    assert!(
        failures[0]
            .contains("broken: it was unpacked, but not all of its access control list: `usex:daemon:rw-`"),
        "{failures:?}"
    );
    assert!(
        failures[1].contains("named: it was unpacked, but not all of its access control list"),
        "{failures:?}"
    );
    assert!(failures[1].contains("`nobodx`"), "{failures:?}");
    let acl = |name: &str| String::from_utf8(tool("getfacl", &[&"-np", &target.join(name)])).unwrap();
    assert!(
        acl("named").contains("user:12345:rw-") && acl("named").contains("group::---"),
        "{}",
        acl("named")
    );
    assert!(acl("broken").contains("group::---") && !acl("broken").contains("mask"), "{}", acl("broken"));
}

/// The header of a member that a stranger made, with records before it, and its content.
fn stranger(
    archive: &mut Vec<u8>,
    name: &str,
    kind: u8,
    mode: u32,
    records: &[(&str, &[u8])],
    content: &[u8],
) {
    let mut extension = Vec::new();
    for (key, value) in records {
        let rest = key.len() + value.len() + 3;
        let length = (rest..).find(|length| rest + length.to_string().len() == *length).unwrap();
        extension.extend_from_slice(format!("{length} {key}=").as_bytes());
        extension.extend_from_slice(value);
        extension.push(b'\n');
    }
    let mut member = |name: &str, kind: u8, content: &[u8]| {
        let at = archive.len();
        forge(archive, name.as_bytes(), kind, b"", content);
        let header = &mut archive[at..at + 512];
        header[100..107].copy_from_slice(format!("{mode:07o}").as_bytes());
        for (field, id) in
            [(108, rustix::process::getuid().as_raw()), (116, rustix::process::getgid().as_raw())]
        {
            header[field..field + 7].copy_from_slice(format!("{id:07o}").as_bytes());
        }
        header[329..336].copy_from_slice(b"0000001");
        header[337..344].copy_from_slice(b"0000003");
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    };
    if !extension.is_empty() {
        member("extension", b'x', &extension);
    }
    member(name, kind, content);
}

/// As somebody unpacks who asks for nothing.
fn cautious(mask: u32) -> UnpackOptions {
    UnpackOptions { threads: 2, sync: false, umask: umask(mask), ..UnpackOptions::default() }
}

#[test]
fn a_strangers_archive_opens_no_more_than_the_umask_does() {
    let ram = ram();
    let acl: (&str, &[u8]) =
        ("SCHILY.acl.access", b"user::rw-,user:12345:rwx,group::---,mask::rwx,other::---");
    let handed_down: (&str, &[u8]) =
        ("SCHILY.acl.default", b"user::rwx,user:12345:rwx,group::rwx,mask::rwx,other::rwx");
    let denied: (&str, &[u8]) =
        ("SCHILY.acl.access", b"user::rw-,user:12345:---,group::r--,mask::r--,other::r--");
    let mut data = Vec::new();
    stranger(&mut data, "./", b'5', 0o7777, &[acl, handed_down], b"");
    let note: (&str, &[u8]) = ("SCHILY.xattr.user.note", b"kept");
    let privileged = [("SCHILY.xattr.trusted.evil", &b"x"[..]), note, ("SCHILY.xattr.security.evil", b"x")];
    stranger(&mut data, "sh", b'0', 0o6755, &privileged, b"#!/bin/sh\n");
    stranger(&mut data, "theirs", b'0', 0o6755, &[("uid", b"12345"), ("gid", b"12345")], b"x");
    stranger(&mut data, "existing/", b'5', 0o7777, &[acl, handed_down, note], b"");
    stranger(&mut data, "existing/x", b'0', 0o666, &[], b"x");
    stranger(&mut data, "new/", b'5', 0o7777, &[handed_down], b"");
    stranger(&mut data, "new/named", b'0', 0o660, &[acl], b"x");
    stranger(&mut data, "new/denied", b'0', 0o644, &[denied], b"x");
    stranger(&mut data, "fifo", b'6', 0o7666, &[], b"");
    stranger(&mut data, "device", b'3', 0o666, &[], b"");
    data.resize(data.len() + 1024, 0);
    let archive = ram.path().join("stranger.tar");
    fs::write(&archive, &data).unwrap();
    let paths = [".", "existing", "existing/x", "sh", "theirs", "new", "new/named", "new/denied", "fifo"];
    for (mask, expected) in [
        (0o022, ["700", "700", "644", "755", "755", "755", "600", "600", "644"]),
        (0o077, ["700", "700", "600", "700", "700", "700", "600", "600", "600"]),
        (0o000, ["700", "700", "666", "755", "755", "777", "600", "600", "666"]),
    ] {
        let target = ram.path().join(format!("t{mask:o}"));
        fs::create_dir_all(target.join("existing")).unwrap();
        chmod(&target, 0o700);
        chmod(&target.join("existing"), 0o700);
        let (summary, failures) = unpack_with(&archive, &target, &cautious(mask));
        assert_eq!(summary.unwrap().files, 5, "{failures:?}");
        assert_eq!(paths.map(|path| mode(&target.join(path))), expected, "{mask:o}");
        assert_eq!(failures.len(), 1, "{failures:?}");
        assert!(failures[0].starts_with("device: ") && failures[0].contains("a device"), "{failures:?}");
        assert!(!acls(&target).contains("12345"), "{}", acls(&target));
        for path in paths {
            let metadata = fs::metadata(target.join(path)).unwrap();
            assert_eq!(
                (metadata.uid(), metadata.gid()),
                (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
            );
        }
        let xattrs = |path| String::from_utf8(tool("getfattr", &[&"-m-", &target.join(path)])).unwrap();
        assert!(xattrs("sh").contains("user.note") && !xattrs("sh").contains("evil"), "{}", xattrs("sh"));
        assert_eq!(xattrs("existing"), "", "a directory that was there stays as it was");
    }
    // A target that is made follows the umask, too.
    unpack_with(&archive, &ram.path().join("made"), &cautious(0o027)).0.unwrap();
    // Its ACL gives the owner alone something, and not the right to search.
    assert_eq!(mode(&ram.path().join("made")), "600");
    // A default ACL shuts out more than the umask does.
    let shared = ram.path().join("shared");
    fs::create_dir(&shared).unwrap();
    chmod(&shared, 0o2770);
    tool("setfacl", &[&"-d", &"-m", &"u::rwx,g::r-x,u:12345:rwx,m::rwx,o::---", &shared]);
    let before = acls(&shared);
    unpack_with(&archive, &shared, &cautious(0)).0.unwrap();
    assert_eq!(
        ["existing/x", "sh", "new", "existing"].map(|path| mode(&shared.join(path))),
        ["666", "750", "2750", "2600"]
    );
    fs::read_dir(&shared).unwrap().map(|entry| entry.unwrap().path()).for_each(|path| {
        if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
    });
    assert_eq!(acls(&shared), before);
}

#[test]
fn an_archive_with_an_index_opens_no_more_than_the_umask_does() {
    let ram = ram();
    let source = ram.path().join("s");
    tree_with_acls(&source);
    fs::write(source.join("tool"), "x").unwrap();
    // One that several threads make.
    fs::write(source.join("large"), noise((64 << 20) + 1)).unwrap();
    for (path, mode) in [("tool", 0o6755), ("large", 0o6777), ("shared/plain", 0o666), ("", 0o3777)] {
        chmod(&source.join(path), mode);
    }
    for format in FORMATS {
        let (archive, target) = (ram.path().join("a"), ram.path().join(format!("t.{format}")));
        pack(&source, &archive, format);
        let (summary, failures) = unpack_with(&archive, &target, &cautious(0o027));
        assert_eq!((summary.unwrap().index, failures), (IndexState::Used, Vec::new()));
        let found = ["", "tool", "large", "shared/plain", "shared", "shared/file"]
            .map(|path| mode(&target.join(path)));
        assert_eq!(found, ["750", "750", "750", "640", "700", "600"]);
        assert!(!acls(&target).contains("12345"), "{}", acls(&target));
    }
}

#[test]
fn a_directory_that_was_there_keeps_its_owner_mode_and_acls() {
    let ram = ram();
    let (source, archive) = (ram.path().join("s"), ram.path().join("a.tar"));
    tree_with_acls(&source);
    fs::write(source.join("tool"), "x").unwrap();
    for (path, mode) in [("tool", 0o6755), ("shared/inner", 0o3777), ("", 0o2777)] {
        chmod(&source.join(path), mode);
    }
    pack(&source, &archive, PackFormat::Tar);
    let target = ram.path().join("t");
    fs::create_dir_all(target.join("shared/inner")).unwrap();
    for path in ["", "shared", "shared/inner"] {
        chmod(&target.join(path), 0o700);
    }
    let shared = acls(&target);
    let trusting = UnpackOptions { same_permissions: true, ..cautious(0o022) };
    let (summary, failures) = unpack_with(&archive, &target, &trusting);
    assert_eq!((summary.unwrap().files, failures), (3, Vec::new()));
    assert!(!shared.contains("12345") && acls(&target).contains("user:12345:rw-"));
    assert_eq!(
        ["", "shared", "shared/inner", "tool"].map(|path| mode(&target.join(path))),
        ["700", "700", "700", "6755"]
    );
    assert!(!acls(&target).contains("default:"), "{}", acls(&target));
    assert_eq!(fs::metadata(&target).unwrap().mtime_nsec(), fs::metadata(&source).unwrap().mtime_nsec());
    // What is made is as it was packed.
    let fresh = ram.path().join("fresh");
    unpack_with(&archive, &fresh, &trusting).0.unwrap();
    trees::assert_same(&source, &fresh);
    // One that its owner may not write to is opened for the time, also if it is not to be completed.
    if !trees::is_root() {
        chmod(&target.join("shared"), 0o500);
        unpack_with(&archive, &target, &trusting).0.unwrap();
        assert_eq!(mode(&target.join("shared")), "500");
    }
}

#[test]
fn headers_full_of_records_are_refused_at_once() {
    let ram = ram();
    let archive = ram.path().join("a.tar");
    let refused = |records: &[(&str, &[u8])], kind: u8| {
        let mut data = Vec::new();
        if kind == b'g' {
            let mut global = Vec::new();
            stranger(&mut global, "a", b'0', 0o644, records, b"");
            global[156] = b'g';
            let sum: u32 =
                (0..512).map(|at| if (148..156).contains(&at) { 32 } else { u32::from(global[at]) }).sum();
            global[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
            data = global;
        } else {
            stranger(&mut data, "bomb", b'0', 0o644, records, b"");
        }
        data.resize(data.len() + 1024, 0);
        fs::write(&archive, &data).unwrap();
        let began = std::time::Instant::now();
        let why = match list_path(&archive) {
            Ok(mut listing) => listing.find_map(Result::err).unwrap().to_string(),
            Err(error) => error.to_string(),
        };
        // It took minutes.
        assert!(began.elapsed() < std::time::Duration::from_secs(20), "{:?}", began.elapsed());
        why
    };
    let named = |what: &str, number: usize| -> Vec<String> {
        (0..number).map(|at| format!("{what}{at:x}")).collect()
    };
    let records = |names: &[String]| -> Vec<(String, Vec<u8>)> {
        names.iter().map(|name| (name.clone(), b"1".to_vec())).collect()
    };
    let borrowed = |records: &[(String, Vec<u8>)], kind| {
        let records: Vec<(&str, &[u8])> = records.iter().map(|(key, value)| (&key[..], &value[..])).collect();
        refused(&records, kind)
    };
    let why = borrowed(&records(&named("SCHILY.xattr.user.", 100_000)), b'x');
    assert!(why.contains("bomb has more than 10000 extended attributes"), "{why}");
    let why = borrowed(&records(&named("SCHILY.xattr.user.", 400_000)), b'x');
    assert!(why.contains("extension has more than 131072 records"), "{why}");
    let why = borrowed(&records(&named("k", 130_000)), b'g');
    assert!(why.contains("its global records are too many"), "{why}");
    // As many attributes as Linux could hold are no bomb.
    let many = records(&named("SCHILY.xattr.user.", 9_000));
    let many: Vec<(&str, &[u8])> = many.iter().map(|(key, value)| (&key[..], &value[..])).collect();
    let mut data = Vec::new();
    stranger(&mut data, "honest", b'0', 0o644, &many, b"");
    data.resize(data.len() + 1024, 0);
    fs::write(&archive, &data).unwrap();
    assert_eq!(list_path(&archive).unwrap().map(Result::unwrap).count(), 1);
}

#[test]
fn paths_that_no_system_has_are_refused_and_not_kept() {
    let ram = ram();
    let archive = ram.path().join("a.tar");
    let mut stream = zstd::Encoder::new(fs::File::create(&archive).unwrap(), 1).unwrap();
    let long = "a".repeat((1 << 20) - 8);
    let deep = format!("{}/", "a".repeat(250)).repeat(64);
    for number in 0..600 {
        let mut member = Vec::new();
        stranger(
            &mut member,
            "l",
            b'2',
            0o777,
            &[("path", format!("{long}{number:06}").as_bytes()), ("linkpath", b"x")],
            b"",
        );
        // Each is 64 directories, and half a megabyte of their paths.
        stranger(&mut member, "d", b'5', 0o777, &[("path", format!("{number}/{deep}").as_bytes())], b"");
        std::io::Write::write_all(&mut stream, &member).unwrap();
    }
    std::io::Write::write_all(&mut stream, &[0; 1024]).unwrap();
    stream.finish().unwrap();
    let target = ram.path().join("t");
    let peak = peak_of(&["bomb", &archive.to_string_lossy(), &target.to_string_lossy(), ""]);
    // It was a megabyte for each symlink, and one and a half for each of the others.
    assert!(peak < 350 << 20, "{} KiB", peak >> 10);
}

#[test]
fn unpacking_is_interrupted_in_the_middle_of_what_has_no_end() {
    let ram = ram();
    let archive = ram.path().join("a.tar");
    let mut stream = zstd::Encoder::new(fs::File::create(&archive).unwrap(), 1).unwrap();
    // Extended headers without a member: one call reads them all.
    let mut header = Vec::new();
    stranger(&mut header, "m", b'0', 0o644, &[("comment", &[b'x'; 100_000])], b"");
    header.truncate(header.len() - 512);
    for _ in 0..20_000 {
        std::io::Write::write_all(&mut stream, &header).unwrap();
    }
    stream.finish().unwrap();
    let progress = Progress::new();
    let monitor = Monitor { progress: &progress, event: &|_| {} };
    let outcome = std::thread::scope(|scope| {
        let unpacking =
            scope.spawn(|| unpack_path(&archive, &ram.path().join("t"), &cautious(0o022), &monitor));
        while !ram.path().join("t").exists() && !unpacking.is_finished() {}
        progress.cancel.store(true, Ordering::Relaxed);
        unpacking.join().unwrap()
    });
    assert!(matches!(outcome, Err(PackError::Interrupted)), "{outcome:?}");
}
