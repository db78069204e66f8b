//! How busy the filesystems of the site's file are, where it says what tells that. It is read every half a minute, or as often as the
//! file says, so that no job waits for it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use ondeck_core::text::plain;
use ondeck_layout::load::LoadSource;
use ondeck_layout::{Filesystem, Load, Site};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};

use crate::context::Context;
use crate::site_file::{self, KnownSite};

/// How often the site's file is looked at.
const LOOK: Duration = Duration::from_secs(30);

/// How long a command may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reads the loads, until the end.
pub(crate) async fn watch(context: Arc<Context>) {
    let mut doubted = BTreeSet::new();
    // What asks a filesystem that hangs can't even be killed: no more is started then.
    let mut hanging: BTreeMap<PathBuf, Child> = BTreeMap::new();
    loop {
        let mut pause = LOOK;
        let known = look(&context).await;
        for filesystem in known.site.iter().flat_map(|site| &site.filesystems) {
            for (what, remedy) in filesystem.doubts() {
                let path = filesystem.path.display();
                if doubted.insert(format!("{path}: {what}")) {
                    tracing::warn!(filesystem = %path, remedy, "the site's file: {what}");
                }
            }
            if let Some(source) = &filesystem.load {
                pause = pause.min(filesystem.load_interval);
                if context.loads.is_due(filesystem) {
                    let read = read_unless_it_hangs(source, filesystem, &mut hanging).await;
                    context.loads.take(filesystem, read);
                }
            }
        }
        tokio::time::sleep(pause).await;
    }
}

/// Looks at the site's file, and says what is known of the site then. A file that hangs is not waited for.
pub(crate) async fn look(context: &Context) -> KnownSite {
    let path = context.config().scheduler.site_file.clone();
    let of = path.clone();
    let read = site_file::read_alone(Arc::clone(&context.loads.reading), site_file::PATIENCE, move || {
        Site::read(&of)
    })
    .await;
    let read = match read {
        Some(read) => read.map_err(|error| error.to_string()),
        None => Err(format!("{}: reading it takes too long", path.display())),
    };
    context.loads.take_site(&path, read)
}

/// Reads a load, unless the command that was to do so the last time has not ended yet.
async fn read_unless_it_hangs(
    source: &LoadSource,
    filesystem: &Filesystem,
    hanging: &mut BTreeMap<PathBuf, Child>,
) -> Result<Load, String> {
    if let Some(mut child) = hanging.remove(&filesystem.path)
        && matches!(child.try_wait(), Ok(None))
    {
        hanging.insert(filesystem.path.clone(), child);
        return Err("what was asked before hangs, and is not asked again until it has ended".into());
    }
    let words = source.command(&filesystem.path);
    let Some((program, arguments)) = words.split_first() else { return Err("no command".into()) };
    let mut command = Command::new(program);
    command.args(arguments).env("LC_ALL", "C").stdin(Stdio::null()).kill_on_drop(true);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.map_err(|error| format!("can't start `{program}`: {error}"))?;
    let ended = tokio::time::timeout(PATIENCE, told_by(&mut child)).await;
    let (status, said, complained) = match ended {
        Ok(Ok(ended)) => ended,
        Ok(Err(error)) => return Err(format!("can't listen to `{program}`: {error}")),
        Err(_) => {
            // One that can be killed has ended the next time.
            let _ = child.start_kill();
            hanging.insert(filesystem.path.clone(), child);
            return Err(format!("`{program}` has not ended within {} s", PATIENCE.as_secs()));
        }
    };
    if !status.success() {
        return Err(format!("`{program}` failed ({status}): {}", plain(complained.trim(), 200)));
    }
    source.read(&said).map_err(|error| format!("`{program}`: {error}"))
}

/// A command is listened to for so many bytes; one that says more finds nobody who listens.
const MOST_SAID: u64 = 1 << 20;

/// How a command ended, what it said, and what it complained of.
async fn told_by(child: &mut Child) -> std::io::Result<(ExitStatus, String, String)> {
    async fn listen(pipe: Option<impl AsyncRead + Unpin>) -> std::io::Result<String> {
        let mut said = Vec::new();
        if let Some(pipe) = pipe {
            pipe.take(MOST_SAID).read_to_end(&mut said).await?;
        }
        Ok(String::from_utf8_lossy(&said).into_owned())
    }
    let (said, complained) = (child.stdout.take(), child.stderr.take());
    let (said, complained) = tokio::try_join!(listen(said), listen(complained))?;
    Ok((child.wait().await?, said, complained))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A filesystem whose load a command of these words tells.
    fn filesystem(words: &[&str]) -> Filesystem {
        let words: Vec<String> = words.iter().map(|word| format!("{word:?}")).collect();
        let text = format!(
            "[nodes]\nlink = \"1GB/s\"\n[[filesystem]]\npath = \"/scratch\"\nkind = \"lustre\"\ntargets = 8\n\
             servers = 4\ntarget = \"1GB/s\"\nload = [{}]\n",
            words.join(", ")
        );
        Site::parse(&text).unwrap().filesystems.remove(0)
    }

    async fn told(words: &[&str]) -> Result<Load, String> {
        let filesystem = filesystem(words);
        let mut none = BTreeMap::new();
        read_unless_it_hangs(filesystem.load.as_ref().unwrap(), &filesystem, &mut none).await
    }

    #[tokio::test]
    async fn of_a_command_that_has_not_ended_no_second_one_is_started_and_a_flood_ends() {
        let filesystem = filesystem(&["echo", "40"]);
        let source = filesystem.load.as_ref().unwrap();
        let child = Command::new("sleep").arg("60").kill_on_drop(true).spawn().unwrap();
        let mut hanging = BTreeMap::from([(filesystem.path.clone(), child)]);
        let read = read_unless_it_hangs(source, &filesystem, &mut hanging).await;
        assert!(read.unwrap_err().contains("what was asked before hangs"));
        let child = hanging.get_mut(&filesystem.path).unwrap();
        child.kill().await.unwrap();
        let read = read_unless_it_hangs(source, &filesystem, &mut hanging).await;
        assert_eq!((read, hanging.len()), (Ok(Load::new(0.4)), 0));
        assert!(told(&["yes"]).await.is_err());
    }

    #[tokio::test]
    async fn a_command_s_words_reach_no_shell_and_what_fails_is_told_by_its_name() {
        assert_eq!(told(&["echo", "$(touch x)", "40"]).await, Ok(Load::new(0.4)));
        assert!(told(&["echo", "busy"]).await.unwrap_err().starts_with("`echo`: "));
        assert!(told(&["/no/such"]).await.unwrap_err().starts_with("can't start `/no/such`: "));
        let failed = told(&["sh", "-c", "echo no such filesystem >&2; exit 3"]).await.unwrap_err();
        assert!(failed.contains("exit status: 3") && failed.ends_with("no such filesystem"), "{failed}");
    }
}
