//! What a job's user was told last, as far as something depends on it.

use serde::{Deserialize, Serialize};

use crate::Incarnation;

/// What a job's user was told last, beside the words for it ([`Job::message`](super::Job::message)).
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Told {
    /// A version that noted the words alone has told it. [`Told::read`] says what it was.
    #[default]
    InWordsAlone,
    /// Nothing yet, or what was told does not hold any more.
    Nothing,
    /// That its RAM disk is ready, or that it waits for it.
    Ready,
    /// That its results are not on disk: they wait in RAM, or may be lost.
    NotOnDisk,
    /// That it works on disk, for this reason.
    WorksOnDisk(String),
    /// The same, because it is too small for an RSA node.
    TooSmall(String),
    /// What nothing depends on.
    Other,
}

impl Told {
    /// What the words of a former version were about.
    ///
    /// This is the only place where what was said is read, and it is as that version said it: whatever is said now leaves
    /// it as it is.
    #[must_use]
    pub fn read(self, job: Incarnation, message: &str) -> Told {
        const ON_DISK: &str = "; the job works on disk";
        if self != Told::InWordsAlone {
            return self;
        }
        let too_small = message.contains(&format!("job {job} too small, marking ineligible"));
        match message {
            "" => Told::Nothing,
            "its RAM disk is ready" => Told::Ready,
            _ if message.starts_with("staging out failed: ")
                || message.starts_with("results may be lost: ") =>
            {
                Told::NotOnDisk
            }
            _ if too_small => Told::TooSmall(message.replace(ON_DISK, "")),
            _ if message.contains(ON_DISK) => Told::WorksOnDisk(message.replace(ON_DISK, "")),
            _ => Told::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::JobId;

    #[test]
    fn what_a_former_version_has_told_is_understood_from_its_words() {
        let job = Incarnation { job: JobId(7), submitted: 1, restarts: 0 };
        let read = |message: &str| Told::default().read(job, message);
        assert_eq!(read(""), Told::Nothing);
        assert_eq!(read("its RAM disk is ready"), Told::Ready);
        for message in [
            "staging out failed: disk quota exceeded; it is tried again in 60 s",
            "results may be lost: the RSA node r1 was lost; what the job wrote in /a is kept where it still is",
        ] {
            assert_eq!(read(message), Told::NotOnDisk);
        }
        let why = "construct: exit code 3";
        assert_eq!(read(&format!("{why}; the job works on disk")), Told::WorksOnDisk(why.into()));
        let why = "no RAM disk: job 7 too small, marking ineligible: it has 1 compute nodes, and 2 get one RSA node";
        assert_eq!(read(&format!("{why}; the job works on disk")), Told::TooSmall(why.into()));
        for message in ["its results are on disk", "its results were abandoned by alice"] {
            assert_eq!(read(message), Told::Other);
        }
        // What is known is not read again.
        assert_eq!(Told::Other.read(job, "its RAM disk is ready"), Told::Other);
    }
}
