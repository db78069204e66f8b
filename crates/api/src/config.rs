//! The site's configuration, `/etc/ondeck/ondeck.toml`, the same file on all nodes. Everything has a default.

mod scheduler;

pub use scheduler::{Hurry, LimitsConfig, PoolConfig, SchedulerConfig, SlurmConfig};

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Component, Path, PathBuf};

use ondeck_core::{Bytes, NodeName};
use serde::{Deserialize, Deserializer, Serialize};

/// Where the file is looked for if neither `--config` nor `ONDECK_CONFIG` names one.
pub const DEFAULT_PATH: &str = "/etc/ondeck/ondeck.toml";

/// The TCP port of agents.
pub const DEFAULT_PORT: u16 = 7272;

/// The whole file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The RSA nodes and compute nodes whose agents `ondeck ramdisk` asks when none are named.
    pub nodes: Vec<NodeName>,
    /// The TCP port of all agents.
    pub port: u16,
    /// The socket of munged.
    pub munge_socket: PathBuf,
    /// What concerns the agent.
    pub agent: AgentConfig,
    /// What concerns the scheduler.
    pub scheduler: SchedulerConfig,
    /// How Slurm is asked.
    pub slurm: SlurmConfig,
}

/// The part `[agent]`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AgentConfig {
    /// Its Unix socket.
    pub socket: PathBuf,
    /// Where it keeps its state: on a tmpfs, because nothing of it outlives a reboot.
    pub state: PathBuf,
    /// The address it listens on for TCP: an address, or `auto` for what its host name means. Without one it can be
    /// reached from its own machine alone.
    pub listen: Option<Listen>,
    /// The address on the storage network; the same as `listen` if none is given.
    pub storage_address: Option<IpAddr>,
    /// Who may build and destroy RAM disks over TCP, as `user@host`. Root on the node itself always may, through the
    /// Unix socket.
    pub administrators: Vec<Administrator>,
    /// The TCP ports for servers of RAM disks: the first and the last.
    pub server_ports: PortRange,
    /// RAM that is never lent.
    #[serde(deserialize_with = "optional_size")]
    pub reserve: Option<Bytes>,
    /// The directories below which a RAM disk may be shown over the directories that a job uses. Absolute paths. None
    /// means that nothing may be covered on this node.
    pub mount_prefixes: Vec<PathBuf>,
    /// Whether a job may also cover directories of others in which its user may write, as a group's. Whoever shares
    /// them sees the job's RAM disk there on the job's nodes meanwhile, and not the disk: what they write goes to the
    /// job, and what others change on disk they do not see.
    pub cover_writable: bool,
    /// Whether a job may also cover directories of others that its user may only read, with a read-only copy. The job
    /// misses nothing, but on its nodes all other users are shown the copy meanwhile, too, can't write there, and have to
    /// believe that the job's user did not change it: for nodes that are not shared between users.
    pub cover_readable: bool,
    /// The most memory that a user's script may take; by default a quarter of the reserve, or 2 GiB without one.
    #[serde(deserialize_with = "optional_size")]
    pub script_memory: Option<Bytes>,
    /// Whether scripts are refused where no memory group can be made for them. Otherwise only the address space of each
    /// of a script's processes is limited there.
    pub require_memory_group: bool,
    /// What is lent: RAM under the name `ram`, directories under names of their own.
    pub device: BTreeMap<String, DeviceConfig>,
}

/// What an RSA node lends, as the part `[agent.device.NAME]` says.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum DeviceConfig {
    /// RAM of the machine, in a tmpfs for each RAM disk.
    Ram {
        /// The most that is lent; by default the machine's RAM without the reserve.
        #[serde(default, deserialize_with = "optional_size")]
        capacity: Option<Bytes>,
        /// Touch all pages before a RAM disk is handed over.
        #[serde(default)]
        preallocate: bool,
    },
    /// A directory, usually of an SSD's filesystem.
    Dir {
        path: PathBuf,
        /// The most that is lent.
        #[serde(deserialize_with = "size")]
        capacity: Bytes,
    },
}

impl Default for Config {
    fn default() -> Self {
        Config {
            nodes: Vec::new(),
            port: DEFAULT_PORT,
            munge_socket: crate::munge::Munge::default_socket().to_owned(),
            agent: AgentConfig::default(),
            scheduler: SchedulerConfig::default(),
            slurm: SlurmConfig::default(),
        }
    }
}

impl AgentConfig {
    /// The most memory that a user's script may take.
    pub fn script_memory(&self) -> Bytes {
        const USUAL: Bytes = Bytes(2 << 30);
        self.script_memory.unwrap_or_else(|| self.reserve.map_or(USUAL, |reserve| Bytes(reserve.0 / 4)))
    }
}

impl Default for AgentConfig {
    fn default() -> Self {
        AgentConfig {
            socket: "/run/ondeck/agent.sock".into(),
            state: "/run/ondeck/agent".into(),
            listen: None,
            storage_address: None,
            administrators: Vec::new(),
            server_ports: PortRange { first: 24_900, last: 25_899 },
            reserve: None,
            mount_prefixes: Vec::new(),
            cover_writable: false,
            cover_readable: false,
            script_memory: None,
            require_memory_group: false,
            device: BTreeMap::new(),
        }
    }
}

/// An address to listen on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Listen {
    /// What the host name means.
    Auto,
    /// This address, whatever the host name means.
    Address(IpAddr),
}

/// A user on a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Administrator {
    /// The user's name or number.
    pub user: String,
    /// The host they call from, as a name or an address.
    pub host: String,
}

/// A range of TCP ports, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PortRange {
    /// The first that may be taken.
    pub first: u16,
    /// The last that may be taken, itself included.
    pub last: u16,
}

fn text<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<T, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse(&text).map_err(serde::de::Error::custom)
}

fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
    text(deserializer, |text| text.parse().map_err(|error: ondeck_core::size::ParseError| error.to_string()))
}

fn optional_size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Bytes>, D::Error> {
    size(deserializer).map(Some)
}

impl<'de> Deserialize<'de> for Listen {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text(deserializer, |text| match text {
            "auto" => Ok(Listen::Auto),
            _ => match text.parse::<IpAddr>() {
                Ok(address) if address.is_unspecified() => Err(format!(
                    "`{text}` means every address; name the one of the storage network, or `auto`"
                )),
                Ok(address) => Ok(Listen::Address(address)),
                Err(_) => Err(format!("`{text}` is neither an address nor `auto`")),
            },
        })
    }
}

impl<'de> Deserialize<'de> for Administrator {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text(deserializer, |text| match text.split_once('@') {
            Some((user, host)) if !user.is_empty() && !host.is_empty() => {
                Ok(Administrator { user: user.to_owned(), host: host.to_owned() })
            }
            _ => Err(format!("`{text}` is not of the form user@host")),
        })
    }
}

impl<'de> Deserialize<'de> for PortRange {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text(deserializer, |text| {
            let ports = text
                .split_once('-')
                .and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
            match ports {
                Some((first, last)) if 0 < first && first <= last => Ok(PortRange { first, last }),
                _ => Err(format!("`{text}` is not a range of ports like 24900-25899")),
            }
        })
    }
}

/// Why the configuration can't be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are what their names and types say")]
pub enum ConfigError {
    /// The file can't be read.
    #[error("can't read the configuration {}: {why}", .path.display())]
    Unreadable { path: PathBuf, why: std::io::Error },
    /// The file is not understood.
    #[error("{}: {message}{hint}", .path.display())]
    Malformed {
        path: PathBuf,
        /// The line, and what is wrong with it.
        message: String,
        /// The nearest key.
        hint: String,
    },
}

impl Config {
    /// Reads the file at `path`, else the one that `ONDECK_CONFIG` names, else [`DEFAULT_PATH`], which may be missing.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn load(path: Option<&Path>) -> Result<Config, ConfigError> {
        let named = Config::named(path);
        let path = named.clone().unwrap_or_else(|| DEFAULT_PATH.into());
        match std::fs::read_to_string(&path) {
            Ok(text) => Config::parse(&text, &path),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && named.is_none() => {
                Ok(Config::default())
            }
            Err(why) => Err(ConfigError::Unreadable { path, why }),
        }
    }

    /// The file that [`Config::load`] reads.
    pub fn path(path: Option<&Path>) -> PathBuf {
        Config::named(path).unwrap_or_else(|| DEFAULT_PATH.into())
    }

    fn named(path: Option<&Path>) -> Option<PathBuf> {
        path.map(Path::to_owned).or_else(|| std::env::var_os("ONDECK_CONFIG").map(PathBuf::from))
    }

    /// Reads the text of a file; `path` is for messages.
    ///
    /// # Errors
    /// [`ConfigError::Malformed`].
    pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
        let malformed = |message: String| {
            let hint = nearest(&message);
            ConfigError::Malformed { path: path.to_owned(), message, hint }
        };
        let config: Config =
            toml::from_str(text).map_err(|error| malformed(error.to_string().trim_end().to_owned()))?;
        for prefix in &config.agent.mount_prefixes {
            let plain = prefix.is_absolute()
                && prefix.components().count() > 1
                && prefix.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
            if !plain {
                return Err(malformed(format!(
                    "`{}` in mount_prefixes is not an absolute path without `..` below `/`",
                    prefix.display()
                )));
            }
        }
        for (name, device) in &config.agent.device {
            let plain =
                !name.is_empty() && name.bytes().all(|c| c.is_ascii_alphanumeric() || b"-_".contains(&c));
            if !plain {
                return Err(malformed(format!(
                    "`{name}` can't be the name of a device: use letters, digits, `-` and `_`"
                )));
            }
            match device {
                DeviceConfig::Ram { .. } if name != ondeck_ramdisk::device::RAM => {
                    return Err(malformed(format!(
                        "the device `{name}` has kind = \"ram\"; a node's RAM is the one device `ram`"
                    )));
                }
                DeviceConfig::Dir { .. } if name == ondeck_ramdisk::device::RAM => {
                    return Err(malformed(
                        "the device `ram` has kind = \"dir\"; give the directory another name".into(),
                    ));
                }
                DeviceConfig::Dir { path, .. } if !path.is_absolute() => {
                    return Err(malformed(format!(
                        "the path {} of the device `{name}` is not absolute",
                        path.display()
                    )));
                }
                _ => {}
            }
        }
        Ok(config)
    }
}

/// Which known key an unknown one was probably meant to be, from the parser's own message.
fn nearest(message: &str) -> String {
    let Some((_, rest)) = message.split_once("unknown field `") else { return String::new() };
    let Some((unknown, rest)) = rest.split_once('`') else { return String::new() };
    rest.split('`')
        .skip(1)
        .step_by(2)
        .map(|known| (strsim::damerau_levenshtein(unknown, known), known))
        .min()
        .filter(|(distance, known)| *distance <= known.len().div_ceil(2))
        .map_or_else(String::new, |(_, known)| format!("\nDid you mean `{known}`?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("ondeck.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn everything_has_a_default() {
        let config = parse("").unwrap();
        assert_eq!(config.port, DEFAULT_PORT);
        assert_eq!(config.agent.socket, Path::new("/run/ondeck/agent.sock"));
    }

    #[test]
    fn a_whole_file_is_understood() {
        let config = parse(
            r#"
            nodes = ["n1", "n2"]
            [agent]
            listen = "10.77.0.11"
            administrators = ["root@ctl", "1000@10.0.0.1"]
            server_ports = "3000-3010"
            reserve = "2GiB"
            script_memory = "512MiB"
            [agent.device.ram]
            kind = "ram"
            capacity = "100GiB"
            preallocate = true
            [agent.device.nvme]
            kind = "dir"
            path = "/mnt/nvme"
            capacity = "1T"
            "#,
        )
        .unwrap();
        assert_eq!(config.nodes.len(), 2);
        assert_eq!(config.agent.listen, Some(Listen::Address("10.77.0.11".parse().unwrap())));
        assert_eq!(config.agent.administrators[0], Administrator { user: "root".into(), host: "ctl".into() });
        assert_eq!(config.agent.reserve, Some(Bytes(2 << 30)));
        assert_eq!(config.agent.script_memory(), Bytes(512 << 20));
        assert!(matches!(config.agent.device["ram"], DeviceConfig::Ram { preallocate: true, .. }));
        assert!(
            matches!(config.agent.device["nvme"], DeviceConfig::Dir { capacity: Bytes(c), .. } if c == 1 << 40)
        );
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line_and_the_nearest_key() {
        let text = parse("[agent]\nadministrator = []\n").unwrap_err();
        assert!(text.contains("line 2") && text.contains("Did you mean `administrators`?"), "{text}");
        for (bad, says) in [
            ("[agent]\nreserve = \"much\"", "much"),
            ("[agent]\nadministrators = [\"root\"]", "user@host"),
            ("[agent]\nserver_ports = \"9-3\"", "24900-25899"),
            ("[agent]\nlisten = \"everywhere\"", "auto"),
            ("[agent]\nlisten = \"0.0.0.0\"", "every address"),
            ("nodes = [\"a/b\"]", "a/b"),
            ("[agent]\nmount_prefixes = [\"/\"]", "mount_prefixes"),
            ("[agent]\nmount_prefixes = [\"scratch\"]", "mount_prefixes"),
            ("[agent]\nmount_prefixes = [\"/scratch/../home\"]", "mount_prefixes"),
            ("[agent.device.ssd]\nkind = \"ram\"", "the one device `ram`"),
            ("[agent.device.ssd]\nkind = \"dir\"\npath = \"ssd\"\ncapacity = \"1G\"", "not absolute"),
            ("[agent.device.ssd]\nkind = \"dir\"\npath = \"/ssd\"", "capacity"),
            ("[agent.device.ssd]\nkind = \"tape\"", "tape"),
        ] {
            let text = parse(bad).unwrap_err();
            assert!(text.contains(says), "{bad}: {text}");
        }
    }
}
