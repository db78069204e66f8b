//! The site's file: what it said last, and what is wrong with it.
//!
//! It is edited while jobs wait by what it says. So what can't be read or understood changes nothing; and a file that is gone may be on
//! its way to be written anew: only when it has stayed away for a while, there is none.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ondeck_layout::Site;

/// A file that was there counts for so long when it is not there any more.
const MISSED: Duration = Duration::from_secs(300);

/// How long reading it may take: it may lie on a filesystem that hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3);

/// The site's file as it was read last.
#[derive(Default)]
pub(crate) struct SiteFile {
    /// Nothing if it was not read yet, or there is none.
    site: Option<Arc<Site>>,
    /// Whether it was read, or found not to be there.
    is_known: bool,
    /// What is wrong with it.
    fault: Option<String>,
    /// Since when it is not there any more.
    missed: Option<Instant>,
}

/// What is known of the site at a moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct KnownSite {
    /// What its file said last; nothing if there is none, or it was never read.
    pub site: Option<Arc<Site>>,
    /// What is wrong with the file now.
    pub fault: Option<String>,
}

impl SiteFile {
    /// Takes what was found at a moment: nothing where there is no file. Whether what counts is another one now.
    pub fn take(&mut self, path: &Path, read: Result<Option<Site>, String>, now: Instant) -> bool {
        let fault = match read {
            Ok(Some(site)) => {
                if self.fault.take().is_some() {
                    tracing::info!(file = %path.display(), "the site's file can be read again");
                }
                *self = SiteFile { site: Some(Arc::new(site)), is_known: true, ..SiteFile::default() };
                return true;
            }
            Ok(None) if self.site.is_none() => {
                *self = SiteFile { is_known: true, ..SiteFile::default() };
                return false;
            }
            Ok(None) => {
                let since = *self.missed.get_or_insert(now);
                if now.duration_since(since) >= MISSED {
                    tracing::warn!(file = %path.display(), "the site's file has not come back; what it said counts no longer");
                    *self = SiteFile { is_known: true, ..SiteFile::default() };
                    return true;
                }
                format!(
                    "{}: it is not there any more; what it said counts for {} minutes",
                    path.display(),
                    MISSED.as_secs() / 60
                )
            }
            Err(wrong) => {
                self.missed = None;
                wrong
            }
        };
        if self.fault.as_ref() != Some(&fault) {
            tracing::warn!(error = fault, "the site's file can't be read; what it said last counts");
            self.fault = Some(fault);
        }
        false
    }

    /// Whether it was read, or found not to be there.
    pub fn is_known(&self) -> bool {
        self.is_known
    }

    /// What is known of the site now.
    pub fn known(&self) -> KnownSite {
        KnownSite { site: self.site.clone(), fault: self.fault.clone() }
    }
}

/// Whoever reads the file holds it: where a filesystem hangs, one thread hangs with it, and no more.
pub(crate) type Alone = Arc<tokio::sync::Mutex<()>>;

/// Reads when nobody else does; nothing if that takes too long.
pub(crate) async fn read_alone<T: Send + 'static>(
    reading: Alone,
    patience: Duration,
    read: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let all = async {
        let alone = reading.lock_owned().await;
        let read = move || {
            let read = read();
            drop(alone);
            read
        };
        tokio::task::spawn_blocking(read).await.ok()
    };
    tokio::time::timeout(patience, all).await.ok().flatten()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SITE: &str = "[nodes]\nlink = \"1GB/s\"\n[[filesystem]]\npath = \"/scratch\"\nkind = \"lustre\"\n\
        targets = 8\nservers = 4\ntarget = \"1GB/s\"\n";

    #[tokio::test]
    async fn a_file_that_hangs_is_not_waited_for_and_takes_one_thread() {
        let (reading, short) = (Alone::default(), Duration::from_millis(50));
        let (go, waits) = std::sync::mpsc::channel::<()>();
        let hangs = move || waits.recv();
        assert_eq!(read_alone(Arc::clone(&reading), short, hangs).await, None);
        for _ in 0..3 {
            let begun = || panic!("a second thread hangs");
            assert_eq!(read_alone(Arc::clone(&reading), short, begun).await, None::<()>);
        }
        go.send(()).unwrap();
        assert_eq!(read_alone(reading, Duration::from_secs(60), || 5).await, Some(5));
    }

    #[test]
    fn what_can_not_be_read_changes_nothing_and_what_is_gone_counts_for_a_while() {
        let (mut file, path, began) = (SiteFile::default(), Path::new("/site.toml"), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        // Nobody has said anything: that is known.
        assert!(!file.is_known());
        assert!(!file.take(path, Ok(None), at(0)) && file.is_known() && file.known().fault.is_none());
        let site = || Ok(Some(Site::parse(SITE).unwrap()));
        assert!(file.take(path, site(), at(1)));
        assert!(!file.take(path, Err("/site.toml: no".into()), at(2)));
        let known = file.known();
        assert_eq!((known.site.is_some(), known.fault.as_deref()), (true, Some("/site.toml: no")));
        // It is written anew: for a moment there is none.
        assert!(!file.take(path, Ok(None), at(10)) && !file.take(path, Ok(None), at(300)));
        let known = file.known();
        assert!(known.site.is_some() && known.fault.unwrap().contains("is not there any more"));
        assert!(file.take(path, site(), at(301)) && file.known().fault.is_none());
        // The time begins anew, and is over.
        assert!(!file.take(path, Ok(None), at(302)) && !file.take(path, Ok(None), at(601)));
        assert!(file.take(path, Ok(None), at(602)));
        let known = file.known();
        assert!(file.is_known() && known.site.is_none() && known.fault.is_none());
        // Unread at the daemon's beginning: nothing is known.
        let mut file = SiteFile::default();
        assert!(!file.take(path, Err("no".into()), at(0)) && !file.is_known());
    }
}
