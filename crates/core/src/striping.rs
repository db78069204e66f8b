//! What a job's `#RSA_LAYOUT` lines ask for: how new files of its directories are to be striped over the disks of a parallel
//! filesystem.
//!
//! Only the form of a line is judged here, as `slurm/job_submit.lua` judges it at submission. Which options describe a layout,
//! `ondeck-layout` knows, and a line that describes none costs the job nothing but the layout.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The most bytes of a layout in a job's line.
pub const MOST_OPTIONS: usize = 1024;

/// What a job asks of the layouts of its directories.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct StripingRequest {
    /// `#RSA_LAYOUT`: for directories whose own lines say nothing else.
    pub choice: Option<StripingChoice>,
    /// `#RSA_LAYOUT_DIR`, each; without one, a job's output directories are meant.
    pub directories: Vec<StripingDirectory>,
}

/// A directory whose new files are to be striped.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StripingDirectory {
    /// Which one; as the user wrote it, or absolute.
    pub path: PathBuf,
    /// How; as the whole job's line says if its own says nothing.
    pub choice: Option<StripingChoice>,
    /// Whether it keeps its layout when the job has ended.
    #[serde(default)]
    pub keep: bool,
}

/// How files are to be striped.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StripingChoice {
    /// As is best by what is known of the job.
    Auto,
    /// For files that all processes use.
    Shared,
    /// For files of their own for each process.
    FilePerProcess,
    /// For files that one process reads and writes.
    Single,
    /// For files of which nothing is known.
    Unknown,
    /// As they are.
    None,
    /// As these options of `lfs setstripe` say.
    Options(String),
}

/// Why a text does not say how files are to be striped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StripingChoiceError {
    /// Neither a word nor options.
    #[error("it is neither a word for a layout nor options of `lfs setstripe`")]
    Unknown,
    /// Options have other characters.
    #[error("options of a layout have letters, digits, blanks and `-._=,+` only")]
    Characters,
    /// More than a layout needs.
    #[error("the options are longer than {MOST_OPTIONS} bytes")]
    Long,
}

impl StripingChoice {
    /// The words for all that are no options, in the order of the documentation.
    pub const WORDS: &'static [&'static str] =
        &["auto", "shared", "file-per-process", "single", "unknown", "none"];

    /// Reads a word, or options: a text that begins with `-`.
    ///
    /// # Errors
    /// [`StripingChoiceError`]. That options describe a layout is not looked at.
    pub fn parse(text: &str) -> Result<StripingChoice, StripingChoiceError> {
        match text {
            "auto" => Ok(StripingChoice::Auto),
            "shared" => Ok(StripingChoice::Shared),
            "file-per-process" => Ok(StripingChoice::FilePerProcess),
            "single" => Ok(StripingChoice::Single),
            "unknown" => Ok(StripingChoice::Unknown),
            "none" => Ok(StripingChoice::None),
            options if options.starts_with('-') => {
                let fits = |byte: u8| byte.is_ascii_alphanumeric() || b" -._=,+".contains(&byte);
                if options.len() > MOST_OPTIONS {
                    Err(StripingChoiceError::Long)
                } else if options.bytes().all(fits) {
                    Ok(StripingChoice::Options(options.to_owned()))
                } else {
                    Err(StripingChoiceError::Characters)
                }
            }
            _ => Err(StripingChoiceError::Unknown),
        }
    }
}

impl StripingRequest {
    /// Whether no line asks for anything.
    pub fn is_empty(&self) -> bool {
        self.choice.is_none() && self.directories.is_empty()
    }

    /// The directories that are meant, each with what is asked for: those of its lines, else the job's output directories. Of
    /// several lines for one directory the first counts; the others are the second part of the answer.
    pub fn meant(&self, outputs: &[PathBuf]) -> (Vec<StripingDirectory>, Vec<PathBuf>) {
        let of_output = |path: &PathBuf| StripingDirectory { path: path.clone(), choice: None, keep: false };
        let all: Vec<StripingDirectory> = match (self.directories.is_empty(), &self.choice) {
            (false, _) => self.directories.clone(),
            (true, Some(_)) => outputs.iter().map(of_output).collect(),
            (true, None) => Vec::new(),
        };
        let (mut meant, mut again) = (Vec::<StripingDirectory>::new(), Vec::new());
        for directory in all {
            if meant.iter().any(|known| known.path == directory.path) {
                again.push(directory.path);
                continue;
            }
            let choice = directory.choice.or_else(|| self.choice.clone()).unwrap_or(StripingChoice::Auto);
            meant.push(StripingDirectory { choice: Some(choice), ..directory });
        }
        (meant, again)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read_and_options_are_read_by_their_form_alone() {
        for word in StripingChoice::WORDS {
            let read = StripingChoice::parse(word).unwrap();
            assert_eq!(serde_json::to_value(&read).unwrap(), **word);
        }
        let options = "-E 1G -c 1 -E -1 -c 8 -p fast_1.x";
        assert_eq!(StripingChoice::parse(options), Ok(StripingChoice::Options(options.into())));
        assert_eq!(StripingChoice::parse("Shared"), Err(StripingChoiceError::Unknown));
        for wrong in ["-c 1; touch x", "-c $(touch x)", "-c `x`", "-c 1\t", "-é"] {
            assert_eq!(StripingChoice::parse(wrong), Err(StripingChoiceError::Characters), "{wrong}");
        }
        let long = |length: usize| StripingChoice::parse(&"-".repeat(length));
        assert!(long(MOST_OPTIONS).is_ok() && long(MOST_OPTIONS + 1) == Err(StripingChoiceError::Long));
    }

    #[test]
    fn without_lines_for_directories_the_output_is_meant_and_of_two_lines_the_first_counts() {
        let outputs = [PathBuf::from("/out")];
        let (meant, again) = StripingRequest::default().meant(&outputs);
        assert!(meant.is_empty() && again.is_empty(), "nobody has asked");
        let mut request =
            StripingRequest { choice: Some(StripingChoice::Shared), ..StripingRequest::default() };
        let directory = |path: &str, choice: Option<StripingChoice>| StripingDirectory {
            path: path.into(),
            choice,
            keep: false,
        };
        assert_eq!(request.meant(&outputs).0, [directory("/out", Some(StripingChoice::Shared))]);
        assert!(request.meant(&[]).0.is_empty());
        let single = Some(StripingChoice::Single);
        request.directories =
            vec![directory("/a", single.clone()), directory("/b", None), directory("/a", None)];
        let (meant, again) = request.meant(&outputs);
        assert_eq!(meant, [directory("/a", single), directory("/b", Some(StripingChoice::Shared))]);
        assert_eq!(again, [PathBuf::from("/a")]);
        request.choice = None;
        assert_eq!(request.meant(&outputs).0[1], directory("/b", Some(StripingChoice::Auto)));
    }
}
