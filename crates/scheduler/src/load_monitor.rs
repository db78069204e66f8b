//! How busy the filesystems of the site's file are, where it says what tells that. It is read every half a minute, or as often as the
//! file says, so that no job waits for it.

use std::collections::BTreeSet;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use ondeck_core::text::plain;
use ondeck_layout::load::LoadSource;
use ondeck_layout::{Filesystem, Load};
use tokio::process::Command;

use crate::context::Context;
use crate::site_file;

/// How often the site's file is looked at.
const LOOK: Duration = Duration::from_secs(30);

/// How long a command may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reads the loads, until the end.
pub(crate) async fn watch(context: Arc<Context>) {
    let mut doubted = BTreeSet::new();
    loop {
        let mut pause = LOOK;
        let known = site_file::look(&context).await;
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
                    let read = read(source, filesystem).await;
                    context.loads.take(filesystem, read);
                }
            }
        }
        tokio::time::sleep(pause).await;
    }
}

async fn read(source: &LoadSource, filesystem: &Filesystem) -> Result<Load, String> {
    let words = source.command(&filesystem.path);
    let Some((program, arguments)) = words.split_first() else { return Err("no command".into()) };
    let mut command = Command::new(program);
    command.args(arguments).env("LC_ALL", "C").stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(PATIENCE, command.output()).await;
    let output = match output {
        Ok(Ok(output)) => output,
        Ok(Err(error)) => return Err(format!("can't start `{program}`: {error}")),
        Err(_) => return Err(format!("`{program}` has not ended within {} s", PATIENCE.as_secs())),
    };
    if !output.status.success() {
        let said = plain(String::from_utf8_lossy(&output.stderr).trim(), 200);
        return Err(format!("`{program}` failed ({}): {said}", output.status));
    }
    source.read(&String::from_utf8_lossy(&output.stdout)).map_err(|error| format!("`{program}`: {error}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ondeck_layout::Site;

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
        read(filesystem.load.as_ref().unwrap(), &filesystem).await
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
