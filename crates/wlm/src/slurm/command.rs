//! Running a Slurm command, and what its failures mean.

use std::ffi::OsStr;
use std::process::Stdio;
use std::time::Instant;

use ondeck_core::JobId;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;
use tokio::time::timeout;

use super::record::{self, Cutter};
use super::{Observer, Slurm};
use crate::WlmError;

/// A queue of a million jobs is about this large, and a script never is. Tests write less.
const MOST_OUTPUT: usize = if cfg!(test) { 16 << 20 } else { 512 << 20 };

/// More than any message.
const MOST_MESSAGE: usize = 64 << 10;

/// What a command left behind.
#[derive(Debug)]
pub struct Output {
    /// Whether it exited with 0.
    pub success: bool,
    /// What it wrote.
    pub stdout: Vec<u8>,
    /// What it complained about.
    pub stderr: String,
}

impl Slurm {
    /// Runs a command of Slurm with an empty standard input and without the settings that a user of it may have.
    ///
    /// # Errors
    /// [`WlmError::Unavailable`] if it can't be run, takes too long (it is killed then) or is ended by a signal.
    pub(super) async fn run(&self, program: &str, arguments: &[&str]) -> Result<Output, WlmError> {
        self.run_with(program, arguments, None).await
    }

    /// Runs squeue with a format. Every user can read arguments of a process, but not its environment: nobody shall know
    /// what separates the fields.
    ///
    /// Of the fields that users write no more is kept than [`Cutter`] lets through.
    pub(super) async fn squeue(&self, arguments: &[&str], fields: &[&str]) -> Result<Output, WlmError> {
        self.run_with("squeue", arguments, Some(fields)).await
    }

    async fn run_with(
        &self,
        program: &str,
        arguments: &[&str],
        fields: Option<&[&str]>,
    ) -> Result<Output, WlmError> {
        let began = Instant::now();
        let result = self.run_unobserved(program, arguments, fields).await;
        if let Some(Observer(observer)) = &self.observer {
            observer(program, began.elapsed(), result.is_ok());
        }
        result
    }

    async fn run_unobserved(
        &self,
        program: &str,
        arguments: &[&str],
        fields: Option<&[&str]>,
    ) -> Result<Output, WlmError> {
        let unavailable = |what: String| WlmError::Unavailable { message: format!("{program}: {what}") };
        let path = match &self.settings.bin_dir {
            Some(dir) => dir.join(program),
            None => program.into(),
        };
        let mut command = Command::new(path);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for (name, _) in std::env::vars_os().filter(|(name, _)| changes_an_answer(name)) {
            command.env_remove(name);
        }
        let format = fields.map(|fields| ("SQUEUE_FORMAT2", record::format(fields, &self.separator)));
        let mut cutter = fields.map(|fields| Cutter::new(fields, &self.separator));
        let keep = |piece: &[u8], kept: &mut Vec<u8>| match &mut cutter {
            Some(cutter) => cutter.take(piece, kept),
            None => kept.extend_from_slice(piece),
        };
        command.env("LC_ALL", "C").env("SLURM_TIME_FORMAT", "%s").envs(format).kill_on_drop(true);
        if let Some(conf) = &self.settings.conf {
            command.env("SLURM_CONF", conf);
        }
        let mut child = command.spawn().map_err(|error| unavailable(format!("can't be run: {error}")))?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let ended = timeout(self.settings.timeout, async {
            let all = |piece: &[u8], kept: &mut Vec<u8>| kept.extend_from_slice(piece);
            tokio::try_join!(read(stdout, MOST_OUTPUT, keep), read(stderr, MOST_MESSAGE, all), child.wait())
        });
        let (stdout, stderr, status) = ended
            .await
            .map_err(|_| unavailable(format!("no answer within {:?}", self.settings.timeout)))?
            .map_err(|error| unavailable(error.to_string()))?;
        if stdout.len() >= MOST_OUTPUT {
            return Err(WlmError::Malformed { what: format!("{program} does not stop writing") });
        }
        if status.code().is_none() {
            return Err(unavailable(format!("ended by {status}")));
        }
        let stderr = String::from_utf8_lossy(&stderr).into_owned();
        Ok(Output { success: status.success(), stdout, stderr })
    }
}

/// Defaults for options, such as SQUEUE_STATES, SLURM_CLUSTERS or SLURM_JOB_ID, that would change what we see.
fn changes_an_answer(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    let ours = name.starts_with(b"SQUEUE_") || name.starts_with(b"SCONTROL_") || name.starts_with(b"SLURM_");
    ours && name != b"SLURM_CONF" && name != b"SLURM_JWT"
}

/// What `keep` keeps of a stream; when that is more than `most`, the rest is not read.
async fn read(
    stream: Option<impl AsyncRead + Unpin>,
    most: usize,
    mut keep: impl FnMut(&[u8], &mut Vec<u8>),
) -> std::io::Result<Vec<u8>> {
    let mut kept = Vec::new();
    let Some(mut stream) = stream else { return Ok(kept) };
    let mut piece = vec![0; 64 << 10];
    while kept.len() < most {
        match stream.read(&mut piece).await? {
            0 => break,
            length => keep(&piece[..length], &mut kept),
        }
    }
    Ok(kept)
}

/// What Slurm's commands say when they did not reach a controller that works. Any other complaint is about the job.
const NOT_REACHED: &[&str] = &[
    "Unable to contact slurm controller",
    "Unexpected message received",
    "Socket timed out",
    "Zero Bytes were transmitted",
    "Communication connection failure",
    "Communication shutdown failure",
    "Message send failure",
    "Message receive failure",
    "standby mode",
    "Unable to establish control machine address",
    "Unable to establish configuration source",
    "Protocol authentication error",
    "authentication",
    "munge",
    "Connection refused",
    "Connection reset",
    "Connection timed out",
    "Resource temporarily unavailable",
    "temporarily unable",
    "Job state is being modified",
    "Transport endpoint is not connected",
    "No route to host",
    "fatal:",
];

impl Output {
    /// What a failed command means. If it was about no certain `job`, nothing can be refused.
    pub fn failure(&self, job: Option<JobId>) -> WlmError {
        let message = self.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        let says = |words: &str| message.contains(words);
        match job {
            _ if NOT_REACHED.iter().any(|words| says(words)) => WlmError::Unavailable { message },
            Some(job) if says("Invalid job id specified") => WlmError::NoSuchJob(job),
            Some(job) if says("Job script not specified") => WlmError::NoScript(job),
            Some(_) if !message.is_empty() => WlmError::Refused { message },
            _ if message.is_empty() => WlmError::Unavailable { message: "it says nothing".to_owned() },
            _ => WlmError::Unavailable { message },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SlurmSettings, WorkloadManager};
    use std::time::{Duration, Instant};

    fn failure(stderr: &str) -> WlmError {
        Output { success: false, stdout: Vec::new(), stderr: stderr.to_owned() }.failure(Some(JobId(7)))
    }

    /// The messages are those of Slurm 22.05.8.
    #[test]
    fn a_controller_that_is_down_is_no_refusal() {
        for message in [
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
            "slurm_load_jobs error: Socket timed out on send/recv operation\n",
            "job script retrieval failed: Unable to contact slurm controller (connect failure)\n",
            "job script retrieval failed: Socket timed out on send/recv operation\n",
            "Unexpected message received for job 7\n",
            "",
        ] {
            assert!(matches!(failure(message), WlmError::Unavailable { .. }), "{message}");
        }
        for message in [
            "slurm_load_jobs error: Invalid job id specified\n",
            "job script retrieval failed: Invalid job id specified\n",
        ] {
            assert_eq!(failure(message), WlmError::NoSuchJob(JobId(7)));
        }
        assert_eq!(
            failure("job script retrieval failed: Job script not specified\n"),
            WlmError::NoScript(JobId(7))
        );
        let ended = "Job has already finished for job 7\nslurm_suspend error: Job has already finished\n";
        assert!(failure(ended).to_string().starts_with("the workload manager refused: Job has already"));
    }

    fn pretend(script: &str, timeout: Duration) -> (tempfile::TempDir, Slurm) {
        let dir = tempfile::tempdir().unwrap();
        for name in ["squeue", "scontrol"] {
            // Not by this process: a child that another test forks meanwhile would have it open for writing, and nobody could run it.
            let mut writer = std::process::Command::new("sh");
            writer.args(["-c", "printf '#!/bin/sh\\n%s' \"$1\" > \"$0\" && chmod 755 \"$0\""]);
            assert!(writer.arg(dir.path().join(name)).arg(script).status().unwrap().success());
        }
        let settings = SlurmSettings { bin_dir: Some(dir.path().to_owned()), conf: None, timeout };
        (dir, Slurm::new(settings))
    }

    #[tokio::test]
    async fn a_command_that_hangs_is_killed_and_no_empty_queue() {
        let (dir, slurm) = pretend("echo $$ > \"${0%/*}/pid\"; exec sleep 60", Duration::from_millis(500));
        let begin = Instant::now();
        assert!(matches!(slurm.queue().await, Err(WlmError::Unavailable { .. })));
        assert!(begin.elapsed() < Duration::from_secs(10));
        let pid = std::fs::read_to_string(dir.path().join("pid")).unwrap();
        let process = format!("/proc/{}", pid.trim());
        while std::path::Path::new(&process).exists() {
            assert!(begin.elapsed() < Duration::from_secs(20), "it still runs");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn a_command_that_fails_or_is_missing_is_no_empty_queue() {
        let (_dir, slurm) = pretend("exit 1", Duration::from_secs(20));
        assert!(matches!(slurm.queue().await, Err(WlmError::Unavailable { .. })));
        let (_dir, slurm) = pretend("kill -9 $$", Duration::from_secs(20));
        assert!(matches!(slurm.queue().await, Err(WlmError::Unavailable { .. })));
        let missing = SlurmSettings { bin_dir: Some("/nonexistent".into()), ..SlurmSettings::default() };
        assert!(matches!(Slurm::new(missing).queue().await, Err(WlmError::Unavailable { .. })));
    }

    #[tokio::test]
    async fn what_users_write_without_end_costs_nobody_the_queue() {
        let script = r#"format=${SQUEUE_FORMAT2#JobID:} sep=${format%%,*}
            long=$(head -c 60000 /dev/zero | tr '\0' 5)
            line() {
                for field in "$1" N/A 0 5 60 PENDING None 1 '' '(null)' N/A N/A 0:00 1795320395 0 "$2" '(null)' "$1" \
                    "$3" N/A "$4" '(null)' N/A "$4" "$5"; do
                    printf '%s%s' "$field" "$sep"
                done
                echo
            }
            mine=$(line 7 normal "afterok:9(unfulfilled),afterok:$long" "$long" "$long")
            i=0; while [ $i -lt 100 ]; do printf '%s\n' "$mine"; i=$((i + 1)); done
            line 8 normal 'afterok:9(unfulfilled)' account name
            line 9 normal '' account name"#;
        let (_dir, slurm) = pretend(script, Duration::from_secs(60));
        let queue = slurm.queue().await.unwrap();
        assert_eq!(queue.jobs.iter().map(|job| job.id.job.0).collect::<Vec<_>>(), [8, 9]);
        assert_eq!((queue.jobs[0].account.as_str(), queue.jobs[0].dependent), ("account", true));
    }

    #[tokio::test]
    async fn a_script_that_can_not_be_had_is_never_an_empty_one() {
        let (_dir, slurm) = pretend(
            "echo 'job script retrieval failed: Job script not specified' >&2; exit 0",
            Duration::from_secs(20),
        );
        assert_eq!(slurm.script(JobId(7)).await, Err(WlmError::NoScript(JobId(7))));
        let (_dir, slurm) = pretend("printf '#!/bin/sh\\n\\377'", Duration::from_secs(20));
        assert_eq!(slurm.script(JobId(7)).await.unwrap(), b"#!/bin/sh\n\xff");
    }

    #[tokio::test]
    async fn an_argument_is_one_word_however_odd_it_is() {
        let (dir, slurm) = pretend("printf '<%s>' \"$@\" > \"${0%/*}/said\"", Duration::from_secs(20));
        slurm.set_comment(JobId(7), "a 'b' \"c\" $(d)\nPriority=1").await.unwrap();
        let said = std::fs::read_to_string(dir.path().join("said")).unwrap();
        assert_eq!(said, "<update><JobId=7><AdminComment=a 'b' \"c\" $(d) Priority=1>");
    }

    #[tokio::test]
    async fn ping_tells_up_from_down() {
        let (_dir, slurm) = pretend("echo 'Slurmctld(primary) at ctl is UP'", Duration::from_secs(20));
        assert_eq!(slurm.ping().await, Ok(()));
        let (_dir, slurm) = pretend(
            "echo 'Slurmctld(primary) at a is DOWN'; echo 'Slurmctld(backup) at b is UP'",
            Duration::from_secs(20),
        );
        assert_eq!(slurm.ping().await, Ok(()));
        let (_dir, slurm) =
            pretend("echo 'Slurmctld(primary) at ctl is DOWN'; exit 1", Duration::from_secs(20));
        assert!(slurm.ping().await.unwrap_err().to_string().contains("ctl is DOWN"));
    }
}
