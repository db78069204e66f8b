//! What is copied: four cases, the same bytes on every machine.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, futimens, utimensat};

use crate::interrupt;
use ondeck_bench::random::Random;
use ondeck_bench::size::{GIB, KIB, MIB, show};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub enum Case {
    /// One flat directory of 1 MiB files
    Medium,
    /// One flat directory of 4 KiB files
    Small,
    /// One large file
    Large,
    /// A tree of many directories, sizes, modes and times, with symlinks
    Tree,
}

impl Case {
    pub const ALL: [Self; 4] = [Self::Medium, Self::Small, Self::Large, Self::Tree];

    /// `quick` is for trying the bench out; its figures are not comparable with the full set's.
    pub fn shape(self, quick: bool) -> Shape {
        match (self, quick) {
            (Self::Medium, false) => Shape::Flat(2048, MIB),
            (Self::Medium, true) => Shape::Flat(512, MIB),
            (Self::Small, false) => Shape::Flat(20_000, 4 * KIB),
            (Self::Small, true) => Shape::Flat(5_000, 4 * KIB),
            (Self::Large, false) => Shape::OneFile(4 * GIB),
            (Self::Large, true) => Shape::OneFile(GIB),
            (Self::Tree, false) => Shape::Tree(200_000),
            (Self::Tree, true) => Shape::Tree(20_000),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Shape {
    /// So many files of one size in one directory.
    Flat(u64, u64),
    /// One file of this size.
    OneFile(u64),
    /// So many files in a tree.
    Tree(u64),
}

/// The name of the file of [`Shape::OneFile`], in the source's directory and in the target's.
pub const ONE_FILE: &str = "data.bin";

impl Shape {
    pub fn title(self) -> String {
        match self {
            Self::Flat(files, size) => format!("{} x {}", grouped(files), show(size)),
            Self::OneFile(size) => format!("one file of {}", show(size)),
            Self::Tree(files) => format!("a tree of {} files", grouped(files)),
        }
    }

    /// Bytes on a filesystem of 4 KiB blocks, rounded up: for deciding whether it fits.
    pub fn space(self) -> u64 {
        match self {
            Self::Flat(files, size) => files * (size + KIB),
            Self::OneFile(size) => size,
            Self::Tree(files) => files * 18 * KIB,
        }
    }

    /// Makes the directory and everything in it.
    pub fn create(self, root: &Path) -> Result<()> {
        fs::create_dir(root).with_context(|| format!("cannot make {}", root.display()))?;
        match self {
            Self::Flat(files, size) => {
                let mut random = Random::new(files ^ size);
                let mut contents = vec![0; usize::try_from(size)?];
                for number in 0..files {
                    random.fill(&mut contents);
                    write_new(&root.join(format!("file-{number:06}.dat")), &contents)?;
                }
                Ok(())
            }
            Self::OneFile(size) => {
                write_large(&root.join(ONE_FILE), size, &mut Random::new(size))?;
                Ok(())
            }
            Self::Tree(files) => TreeBuilder::new(files).create(root),
        }
    }
}

fn write_new(path: &Path, contents: &[u8]) -> Result<File> {
    interrupt::check()?;
    let write = || -> std::io::Result<File> {
        let mut file = File::create_new(path)?;
        file.write_all(contents)?;
        Ok(file)
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// Piece by piece, so that the bench itself stays small.
fn write_large(path: &Path, size: u64, random: &mut Random) -> Result<File> {
    let mut file = write_new(path, &[])?;
    let mut block = vec![0; MIB as usize];
    let mut left = size;
    while left > 0 {
        interrupt::check()?;
        let length = left.min(MIB);
        random.fill(&mut block);
        file.write_all(&block[..length as usize])
            .with_context(|| format!("cannot write {}", path.display()))?;
        left -= length;
    }
    Ok(file)
}

/// Grows a tree whose directories have 10 to 500 entries, at most six levels deep.
struct TreeBuilder {
    random: Random,
    files_left: u64,
    /// Directories to come, with their depth; those that no file is left for are never made.
    open: Vec<(PathBuf, u32)>,
    /// Every directory: their times can only be set once nothing is added to them any more.
    made: Vec<PathBuf>,
    /// Small files are parts of this block: incompressible, and made once, not 200,000 times. It
    /// is small because all that the bench holds counts as memory of the tools it starts.
    block: Vec<u8>,
}

const DEEPEST: u32 = 6;
const LARGEST_TREE_FILE: u64 = 16 * MIB;

impl TreeBuilder {
    fn new(files: u64) -> Self {
        Self {
            random: Random::new(files),
            files_left: files,
            open: Vec::new(),
            made: Vec::new(),
            block: vec![0; MIB as usize],
        }
    }

    fn create(mut self, root: &Path) -> Result<()> {
        self.random.fill(&mut self.block);
        self.open.push((root.to_path_buf(), 0));
        while self.files_left > 0 {
            // The newest half of the time, so that the tree gets deep; any other, so that it gets
            // wide.
            let newest = (self.open.len().checked_sub(1))
                .context("the tree came out too small for its files; choose another number")?;
            let choice = match self.random.between(0, 1) {
                0 => newest,
                _ => self.random.between(0, newest as u64) as usize,
            };
            let (directory, depth) = self.open.swap_remove(choice);
            self.fill(&directory, depth)?;
        }
        for directory in &self.made {
            let mode = self.random.one_of(&[0o755, 0o750, 0o700, 0o2755]);
            fs::set_permissions(directory, fs::Permissions::from_mode(mode))
                .with_context(|| format!("cannot set the mode of {}", directory.display()))?;
            utimensat(CWD, directory, &times(&mut self.random), AtFlags::empty())
                .with_context(|| format!("cannot set the time of {}", directory.display()))?;
        }
        Ok(())
    }

    fn fill(&mut self, directory: &Path, depth: u32) -> Result<()> {
        if depth > 0 {
            fs::create_dir(directory).with_context(|| format!("cannot make {}", directory.display()))?;
        }
        self.made.push(directory.to_owned());
        let entries = self.random.between(10, 500);
        let directories = if depth < DEEPEST { 1 + entries / 20 } else { 0 };
        let links = entries / 100;
        let files = (entries - directories - links).min(self.files_left);
        self.files_left -= files;
        for number in 0..files {
            self.write_file(&directory.join(format!("file-{number:03}.dat")))?;
        }
        for number in 0..links.min(files) {
            let path = directory.join(format!("link-{number:03}"));
            symlink(format!("file-{number:03}.dat"), &path)
                .with_context(|| format!("cannot make {}", path.display()))?;
        }
        for number in 0..directories {
            self.open.push((directory.join(format!("directory-{number:02}")), depth + 1));
        }
        Ok(())
    }

    fn write_file(&mut self, path: &Path) -> Result<()> {
        let file = match self.random.between(0, 9999) {
            0 => write_large(path, LARGEST_TREE_FILE, &mut self.random)?,
            1..=60 => self.write_part_of_block(path, 64 * KIB, MIB)?,
            _ => self.write_part_of_block(path, 0, 16 * KIB)?,
        };
        let mode = self.random.one_of(&[0o644, 0o644, 0o600, 0o640, 0o755, 0o444]);
        file.set_permissions(fs::Permissions::from_mode(mode))
            .with_context(|| format!("cannot set the mode of {}", path.display()))?;
        futimens(file.as_fd(), &times(&mut self.random))
            .with_context(|| format!("cannot set the time of {}", path.display()))
    }

    fn write_part_of_block(&mut self, path: &Path, smallest: u64, largest: u64) -> Result<File> {
        let size = self.random.between(smallest, largest);
        let start = self.random.between(0, MIB - size) as usize;
        write_new(path, &self.block[start..start + size as usize])
    }
}

/// Any nanosecond between 2010 and 2025: whole seconds would hide a copy that drops the rest.
fn times(random: &mut Random) -> Timestamps {
    let time = Timespec {
        tv_sec: random.between(1_262_304_000, 1_735_689_600) as i64,
        tv_nsec: random.between(0, 999_999_999) as _,
    };
    Timestamps { last_access: time, last_modification: time }
}

/// What a tree holds, to tell a copy that is whole from one that only ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    pub files: u64,
    pub bytes: u64,
    pub symlinks: u64,
    pub directories: u64,
}

impl Census {
    /// Counts below a directory, which is counted too.
    pub fn take(root: &Path) -> Result<Self> {
        let mut census = Self { directories: 1, ..Self::default() };
        let mut open = vec![root.to_path_buf()];
        while let Some(directory) = open.pop() {
            interrupt::check()?;
            census
                .add(&directory, &mut open)
                .with_context(|| format!("cannot count {}", directory.display()))?;
        }
        Ok(census)
    }

    fn add(&mut self, directory: &Path, open: &mut Vec<PathBuf>) -> std::io::Result<()> {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                self.directories += 1;
                open.push(entry.path());
            } else if kind.is_symlink() {
                self.symlinks += 1;
            } else {
                self.files += 1;
                self.bytes += entry.metadata()?.len();
            }
        }
        Ok(())
    }

    /// What is missing from a copy, in words; nothing when it is whole.
    pub fn missing_from(&self, copy: &Self) -> Option<String> {
        let lacks = |what: &str, whole: u64, found: u64| {
            (found != whole).then(|| format!("{} of {} {what}", grouped(found), grouped(whole)))
        };
        let missing: Vec<String> = [
            lacks("files", self.files, copy.files),
            lacks("bytes", self.bytes, copy.bytes),
            lacks("symlinks", self.symlinks, copy.symlinks),
            lacks("directories", self.directories, copy.directories),
        ]
        .into_iter()
        .flatten()
        .collect();
        (!missing.is_empty()).then(|| format!("copied {}", missing.join(", ")))
    }
}

impl std::fmt::Display for Census {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let plural = if self.files == 1 { "" } else { "s" };
        write!(f, "{} file{plural}, {}", grouped(self.files), show(self.bytes))?;
        if self.directories > 1 {
            write!(f, ", {} directories", grouped(self.directories))?;
        }
        if self.symlinks > 0 {
            write!(f, ", {} symlinks", grouped(self.symlinks))?;
        }
        Ok(())
    }
}

/// `200000` as `200,000`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_thousands() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(20_000), "20,000");
        assert_eq!(grouped(1_234_567), "1,234,567");
    }

    #[test]
    fn a_tree_has_the_files_asked_for_and_is_the_same_each_time() {
        let root = std::env::temp_dir().join(format!("ondeck-bench-tree-{}", std::process::id()));
        fs::create_dir(&root).unwrap();
        let mut counts = Vec::new();
        for name in ["first", "second"] {
            let tree = root.join(name);
            Shape::Tree(3000).create(&tree).unwrap();
            counts.push(Census::take(&tree).unwrap());
        }
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(counts[0].files, 3000);
        assert!(counts[0].symlinks > 0 && counts[0].directories > 5);
        assert_eq!(counts[0], counts[1]);
    }

    #[test]
    fn a_copy_that_lacks_something_says_what() {
        let whole = Census { files: 2000, bytes: 10, symlinks: 3, directories: 1 };
        let copy = Census { symlinks: 0, ..whole };
        assert_eq!(whole.missing_from(&whole), None);
        assert_eq!(whole.missing_from(&copy).unwrap(), "copied 0 of 3 symlinks");
    }
}
