//! What a daemon that runs takes over from a configuration that was changed, and what needs a new start.
//!
//! The daemons read the file again at SIGHUP. What may change under them stands in [`Config::reload_scheduler`] and
//! [`Config::reload_agent`], setting by setting: everything else keeps its value, and is named.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::Config;
use crate::config::{AgentConfig, ConfigError, DEFAULT_PATH, DeviceConfig, SchedulerConfig, SlurmConfig};

/// Reads the configuration again, from where a daemon was given it.
pub type ReadAgain = Arc<dyn Fn() -> Result<Config, ConfigError> + Send + Sync>;

/// The signals to read the configuration again. None of them ends the process any more.
pub struct HangUps(Signal);

impl HangUps {
    /// Listens from now on.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new() -> std::io::Result<HangUps> {
        signal(SignalKind::hangup()).map(HangUps)
    }

    /// Waits for the next one; several at once are one. `false` if there can be none any more.
    pub async fn next(&mut self) -> bool {
        self.0.recv().await.is_some()
    }
}

/// What becomes of a daemon's configuration.
#[derive(Clone, Debug)]
pub struct Reloaded {
    /// What is in force from now on.
    pub config: Config,
    /// The settings that have another value than before, as `scheduler.limits.prolog`.
    pub taken_over: Vec<String>,
    /// The settings whose new value only a new start brings in force.
    pub left: Vec<String>,
}

impl Reloaded {
    fn new(old: &Config, config: Config, new: &Config) -> Reloaded {
        let (taken_over, left) = (differences(old, &config), differences(&config, new));
        Reloaded { config, taken_over, left }
    }

    /// Says in the log what has become of it, and what to start again for the rest: `ondeck agent`.
    pub fn log(&self, command: &str) {
        if self.taken_over.is_empty() && self.left.is_empty() {
            tracing::info!("read the configuration again; nothing that concerns {command} has changed");
        }
        if !self.taken_over.is_empty() {
            tracing::info!("read the configuration again; taken over: {}", self.taken_over.join(", "));
        }
        if !self.left.is_empty() {
            tracing::warn!(
                "of the configuration, this needs a new start of {command}, and keeps its former value until then: {}",
                self.left.join(", ")
            );
        }
    }
}

/// Says in the log that the configuration could not be read again.
pub fn log_refused(why: &str) {
    tracing::error!("the configuration that was read before stays in force: {why}");
}

impl Config {
    /// Reads the file again that [`Config::load`] has read. One that is missing now is an error: it does not mean that
    /// everything has its default.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn read_again(path: Option<&Path>) -> Result<Config, ConfigError> {
        let named = path.map(Path::to_owned).or_else(|| std::env::var_os("ONDECK_CONFIG").map(PathBuf::from));
        Config::load(Some(&named.unwrap_or_else(|| DEFAULT_PATH.into())))
    }

    /// What a scheduler that runs with this configuration takes over from a new one.
    ///
    /// # Errors
    /// What can't be, in words.
    pub fn reload_scheduler(&self, new: &Config) -> Result<Reloaded, String> {
        new.scheduler.site(&new.nodes)?;
        let (old, new) = (self.of_scheduler(), new.of_scheduler());
        let mut config = self.clone();
        {
            let (to, from) = (&mut config.scheduler, &new.scheduler);
            to.proportion = from.proportion;
            to.fractions = from.fractions;
            to.delay = from.delay;
            to.sharing = from.sharing;
            to.patience = from.patience;
            to.debounce = from.debounce;
            to.horizon = from.horizon;
            to.attempts = from.attempts;
            to.stage_out_attempts = from.stage_out_attempts;
            to.backoff = from.backoff;
            to.node_failures = from.node_failures;
            to.node_timeout = from.node_timeout;
            to.user_nodes = from.user_nodes;
            to.account_nodes = from.account_nodes;
            to.bandwidth = from.bandwidth;
            to.staging = from.staging;
            to.kept_waiting = from.kept_waiting;
            to.hurry = from.hurry;
            to.limits = from.limits.clone();
            to.shared_nodes = from.shared_nodes;
            to.keep = from.keep;
            to.site_file.clone_from(&from.site_file);
            to.watch_nodes = from.watch_nodes;
        }
        config.slurm.interval = new.slurm.interval;
        config.scheduler.site(&config.nodes)?;
        let reloaded = Reloaded::new(&old, config.of_scheduler(), &new);
        Ok(Reloaded { config, ..reloaded })
    }

    /// What an agent that runs with this configuration takes over from a new one.
    pub fn reload_agent(&self, new: &Config) -> Reloaded {
        let mut config = self.clone();
        // It only tells where its node looks for the scheduler.
        config.scheduler = new.scheduler.clone();
        let (old, new) = (self.of_agent(), new.of_agent());
        let (to, from) = (&mut config.agent, &new.agent);
        to.reserve = from.reserve;
        to.mount_prefixes.clone_from(&from.mount_prefixes);
        to.cover_writable = from.cover_writable;
        to.cover_readable = from.cover_readable;
        to.script_memory = from.script_memory;
        to.require_memory_group = from.require_memory_group;
        for (name, device) in &from.device {
            // What was built of a device is looked for where it was.
            if to.device.get(name).is_none_or(|known| is_same_place(known, device)) {
                to.device.insert(name.clone(), device.clone());
            }
        }
        let reloaded = Reloaded::new(&old, config.of_agent(), &new);
        Reloaded { config, ..reloaded }
    }

    /// Of the configuration what concerns a scheduler that runs. Where it is asked, hooks and commands read anew each
    /// time.
    fn of_scheduler(&self) -> Config {
        let agent = AgentConfig { socket: self.agent.socket.clone(), ..AgentConfig::default() };
        let mut config = Config { agent, ..self.clone() };
        config.scheduler.host = None;
        if !config.scheduler.pool.is_empty() {
            config.nodes.clear();
        }
        config
    }

    /// Of the configuration what concerns an agent that runs.
    fn of_agent(&self) -> Config {
        let (scheduler, slurm) = (SchedulerConfig::default(), SlurmConfig::default());
        Config { nodes: Vec::new(), scheduler, slurm, ..self.clone() }
    }
}

fn is_same_place(one: &DeviceConfig, other: &DeviceConfig) -> bool {
    match (one, other) {
        (DeviceConfig::Ram { .. }, DeviceConfig::Ram { .. }) => true,
        (DeviceConfig::Dir { path, .. }, DeviceConfig::Dir { path: other, .. }) => path == other,
        _ => false,
    }
}

/// The settings that are not the same, as they stand in the file: `agent.device.ram.capacity`.
fn differences(one: &Config, other: &Config) -> Vec<String> {
    fn compare(at: &str, one: Option<&Value>, other: Option<&Value>, found: &mut Vec<String>) {
        match (one, other) {
            (Some(Value::Object(one)), Some(Value::Object(other)))
                if at.is_empty() || is_part(one, other) =>
            {
                let names: std::collections::BTreeSet<&String> = one.keys().chain(other.keys()).collect();
                for name in names {
                    let at = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
                    compare(&at, one.get(name), other.get(name), found);
                }
            }
            _ if one == other => {}
            _ => found.push(at.to_owned()),
        }
    }
    // A time is shown as two numbers.
    fn is_part(one: &serde_json::Map<String, Value>, other: &serde_json::Map<String, Value>) -> bool {
        ![one, other].iter().any(|part| part.contains_key("nanos"))
    }
    let mut found = Vec::new();
    // What can't be written as JSON would be a defect, and no setting.
    let [one, other] = [one, other].map(|config| serde_json::to_value(config).ok());
    compare("", one.as_ref(), other.as_ref(), &mut found);
    found
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Config {
        Config::parse(text, Path::new("ondeck.toml")).unwrap()
    }

    const OLD: &str = "nodes = [\"r1\"]\n[agent.device.ram]\nkind = \"ram\"\n[agent.device.ssd]\nkind = \"dir\"\n\
                       path = \"/ssd\"\ncapacity = \"1G\"\n";

    #[test]
    fn what_a_scheduler_can_not_take_over_keeps_its_value_and_is_named() {
        let old = parse(OLD);
        let new = parse(&format!(
            "{OLD}[scheduler]\nhost = \"ctl\"\npatience = \"3m\"\nlock_in = \"priority\"\n[scheduler.limits]\n\
             prolog = \"7s\"\n[scheduler.pool.default]\nnodes = [\"r1\", \"r2\"]\n[slurm]\ntimeout = \"3s\"\n\
             interval = \"2s\"\n[agent]\nreserve = \"1G\"\n"
        ));
        let reloaded = old.reload_scheduler(&new).unwrap();
        assert_eq!(
            reloaded.taken_over,
            ["scheduler.limits.prolog", "scheduler.patience", "slurm.interval"],
            "{reloaded:?}"
        );
        let left = ["nodes", "scheduler.lock_in", "scheduler.pool.default", "slurm.timeout"];
        assert_eq!(reloaded.left, left, "{reloaded:?}");
        assert_eq!(reloaded.config.scheduler.patience.as_secs(), 180);
        assert!(reloaded.config.scheduler.pool.is_empty());
        let again = reloaded.config.reload_scheduler(&new).unwrap();
        assert_eq!((again.taken_over.len(), again.left), (0, reloaded.left));
        let none = parse("[scheduler]\npatience = \"3m\"");
        assert!(old.reload_scheduler(&none).unwrap_err().contains("has no nodes"));
    }

    #[test]
    fn what_an_agent_can_not_take_over_keeps_its_value_and_is_named() {
        let old = parse(OLD);
        let new = parse(
            "[agent]\nreserve = \"1G\"\nmount_prefixes = [\"/scratch\"]\nlisten = \"auto\"\n[agent.device.ram]\n\
             kind = \"ram\"\ncapacity = \"2G\"\n[agent.device.ssd]\nkind = \"dir\"\npath = \"/other\"\n\
             capacity = \"2G\"\n[agent.device.nvme]\nkind = \"dir\"\npath = \"/nvme\"\ncapacity = \"2G\"\n\
             [scheduler]\npatience = \"3m\"",
        );
        let reloaded = old.reload_agent(&new);
        let taken_over =
            ["agent.device.nvme", "agent.device.ram.capacity", "agent.mount_prefixes", "agent.reserve"];
        assert_eq!(reloaded.taken_over, taken_over);
        assert_eq!(
            reloaded.left,
            ["agent.device.ssd.capacity", "agent.device.ssd.path", "agent.listen"],
            "{reloaded:?}"
        );
        let without = reloaded.config.reload_agent(&parse(""));
        assert!(without.left.contains(&"agent.device.ssd".to_owned()), "{without:?}");
        assert_eq!(without.config.agent.device.len(), 3);
    }
}
