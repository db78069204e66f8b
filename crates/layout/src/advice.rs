//! The layout for a job's files, why, and the bandwidth to expect.

use std::fmt;

use ondeck_core::{Bytes, Rate};

use crate::load::Load;
use crate::model::{
    Component, Layout, LayoutError, MOST_STRIPES, Placement, StripeCount, UNIT, stripe_size_within,
};
pub use crate::pattern::Pattern;
use crate::rules::{FilePerProcess, Most, NodeLimit, Rounding, Rules, StripeLimit};
use crate::site::{Filesystem, Nodes};

/// What is known of a job before it runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// How many nodes it has.
    pub nodes: u32,
    /// How many processes, on all of them; nothing: one on each node.
    pub tasks: Option<u32>,
    /// How they use files.
    pub pattern: Pattern,
    /// The size of a large file.
    pub size: Option<Bytes>,
    /// How many files it has at a time; nothing: one of each process, or one.
    pub files: Option<u64>,
    /// The bytes that it writes at a time.
    pub write_size: Option<Bytes>,
    /// The size of its median file.
    pub median: Option<Bytes>,
}

/// A layout, why it is this one, and what to expect of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// The layout.
    pub layout: Layout,
    /// What led to it, in the order of the decisions.
    pub reasons: Vec<Reason>,
    /// What all processes together read or write in a second, at most.
    pub bandwidth: Rate,
}

/// What led to a layout.
#[derive(Clone, Debug, PartialEq)]
pub enum Reason {
    /// What one stripe carries, and what of that is left by others.
    Stripe {
        /// What it carries.
        rate: Rate,
        /// How busy it is.
        load: Load,
    },
    /// What a node reads or writes, and how many stripes that fills.
    Node {
        /// What it reads or writes.
        rate: Rate,
        /// How many stripes.
        stripes: u32,
    },
    /// All nodes use one file.
    Shared {
        /// The nodes.
        nodes: u32,
        /// The stripes of one.
        each: u32,
    },
    /// There are no more.
    Limited {
        /// How many there are.
        most: u32,
        /// Of what.
        of: &'static str,
    },
    /// So that each stripe has as many writers.
    Factor {
        /// The number before.
        from: u32,
        /// A factor of the writers.
        to: u32,
        /// The writers.
        writers: u32,
    },
    /// More nodes than targets use one file.
    Overstriped {
        /// The nodes.
        nodes: u32,
        /// The targets.
        targets: u32,
        /// The stripes on each target.
        each: u32,
    },
    /// A file of one process is not striped.
    OneEach {
        /// The files.
        files: u64,
    },
    /// There are fewer files than targets.
    FewFiles {
        /// The files.
        files: u64,
        /// The targets.
        targets: u32,
    },
    /// By the size of a file.
    BySize {
        /// The size.
        size: Bytes,
    },
    /// A file has no more stripes.
    Small {
        /// Its size.
        size: Bytes,
        /// Its stripes.
        stripes: u32,
    },
    /// Neither the writers nor the size is known: it grows with the file.
    Progressive,
    /// What is smaller stays on one target.
    Head {
        /// Up to here.
        end: Bytes,
        /// Whether the median file ends there.
        is_median: bool,
    },
    /// What is smaller lies with the metadata.
    WithMetadata {
        /// Up to here.
        end: Bytes,
    },
    /// The bytes of a stripe fit what is written at a time.
    WriteSize {
        /// What is written.
        write: Bytes,
        /// The stripe.
        stripe: Bytes,
    },
}

impl Workload {
    fn tasks(&self) -> u32 {
        self.tasks.unwrap_or(self.nodes).max(1)
    }

    fn files(&self) -> u64 {
        match (self.files, self.pattern) {
            (Some(files), _) => files.max(1),
            (None, Pattern::FilePerProcess) => self.tasks().into(),
            (None, _) => 1,
        }
    }

    /// The nodes that read or write.
    fn active_nodes(&self) -> u32 {
        match self.pattern {
            Pattern::Single => 1,
            _ => self.nodes.max(1).min(self.tasks()),
        }
    }

    /// The processes that read or write.
    fn writers(&self) -> u32 {
        if self.pattern == Pattern::Single { 1 } else { self.tasks() }
    }

    /// How many of something share one file, if all share them evenly.
    fn of_a_file(&self, number: u32) -> u32 {
        match self.pattern {
            Pattern::Shared => {
                u32::try_from(u64::from(number).div_ceil(self.files())).unwrap_or(number).max(1)
            }
            _ => number,
        }
    }
}

/// What is known of a filesystem and the nodes that use it.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The filesystem.
    pub filesystem: &'a Filesystem,
    /// The nodes.
    pub nodes: &'a Nodes,
    /// How busy the filesystem is.
    pub load: Load,
}

/// A factor of the writers must be worth this part of the stripes that it replaces.
const FACTOR: f64 = 7.0 / 8.0;

/// A node's number of stripes before anything limits it, and what it follows from.
struct Limits {
    stripe: Rate,
    node: Rate,
    /// The stripes that a node fills.
    each: u32,
    most: u32,
    of: &'static str,
}

impl Rules {
    /// The layout for a job's files.
    ///
    /// # Errors
    /// These rules describe no layout, which those of this crate never do.
    pub fn advise(&self, place: Place<'_>, workload: &Workload) -> Result<Advice, LayoutError> {
        let mut reasons = Vec::new();
        let limits = self.limits(place, workload, &mut reasons);
        let stripe_size = self.stripe_size(workload, &mut reasons);
        let count = match workload.pattern {
            Pattern::Shared => self.shared(place, workload, &limits, &mut reasons),
            Pattern::FilePerProcess => self.file_per_process(place, workload, &limits, &mut reasons),
            Pattern::Unknown if self.by_size => match workload.size {
                Some(size) => {
                    reasons.push(Reason::BySize { size });
                    StripeCount::Of(at_most(by_size(size), &limits, &mut reasons))
                }
                None => {
                    let layout = self.progressive(&limits, workload, stripe_size, &mut reasons)?;
                    let bandwidth = limits.bandwidth(place, workload, &layout);
                    return Ok(Advice { layout, reasons, bandwidth });
                }
            },
            Pattern::Single | Pattern::Unknown => {
                StripeCount::Of(at_most(limits.each, &limits, &mut reasons))
            }
        };
        let count = self.within_size(count, stripe_size, workload, &mut reasons);
        let mut components = Vec::new();
        components.extend(self.head(count, stripe_size, workload, &mut reasons));
        components.push(striped(None, count, stripe_size));
        let layout = Layout::new(components)?;
        let bandwidth = limits.bandwidth(place, workload, &layout);
        Ok(Advice { layout, reasons, bandwidth })
    }

    /// What a job's processes together read or write in a second, at most, with a layout that may be another one.
    pub fn bandwidth(&self, place: Place<'_>, workload: &Workload, layout: &Layout) -> Rate {
        self.limits(place, workload, &mut Vec::new()).bandwidth(place, workload, layout)
    }

    fn limits(&self, place: Place<'_>, workload: &Workload, reasons: &mut Vec<Reason>) -> Limits {
        let filesystem = place.filesystem;
        let share = match (self.stripe, filesystem.server) {
            (StripeLimit::Share, Some(server)) => {
                let part = u128::from(server.0.0) * u128::from(filesystem.servers)
                    / u128::from(filesystem.targets.max(1));
                Rate(filesystem.target.0.min(Bytes(part as u64)))
            }
            _ => filesystem.target,
        };
        let load = if self.load { place.load } else { Load::default() };
        let stripe = load.leaves(share);
        reasons.push(Reason::Stripe { rate: share, load });
        let node = node_rate(place.nodes, workload, self.node);
        let each = match self.round {
            Rounding::Down => node.0.0 / stripe.0.0,
            Rounding::Up => node.0.0.div_ceil(stripe.0.0),
        };
        let each = u32::try_from(each).unwrap_or(u32::MAX).max(1);
        reasons.push(Reason::Node { rate: node, stripes: each });
        let (most, of) = match self.most {
            Most::Servers => (filesystem.servers, "servers"),
            Most::Targets => (filesystem.targets, "targets"),
        };
        let (most, of) = match filesystem.most_stripes {
            Some(cap) if cap < most => (cap, "stripes, as the site allows"),
            _ => (most, of),
        };
        Limits { stripe, node, each, most: most.clamp(1, MOST_STRIPES.into()), of }
    }

    /// One file of all nodes.
    fn shared(
        &self,
        place: Place<'_>,
        workload: &Workload,
        limits: &Limits,
        reasons: &mut Vec<Reason>,
    ) -> StripeCount {
        let nodes = workload.of_a_file(workload.active_nodes());
        reasons.push(Reason::Shared { nodes, each: limits.each });
        let count = at_most(limits.each.saturating_mul(nodes), limits, reasons);
        let targets = place.filesystem.targets;
        let is_capped = place.filesystem.most_stripes.is_some_and(|cap| cap < targets);
        if self.overstripe > 1 && nodes > targets && !is_capped {
            let each = nodes.div_ceil(targets).min(self.overstripe.into());
            if each > 1
                && let Ok(each_of_all) = u8::try_from(each)
            {
                reasons.push(Reason::Overstriped { nodes, targets, each });
                return StripeCount::PerTarget(each_of_all);
            }
        }
        let writers = workload.of_a_file(workload.writers());
        if self.factor_of_writers && u32::from(count) < writers {
            let factor = (1..u32::from(count)).rev().find(|factor| writers.is_multiple_of(*factor));
            // All wait for the stripe that has the most writers: that many stripes are worth as much as `count` of them.
            let worth = f64::from(writers) / f64::from(writers.div_ceil(count.into()));
            if let Some(to) =
                factor.filter(|to| !writers.is_multiple_of(count.into()) && f64::from(*to) >= worth * FACTOR)
            {
                reasons.push(Reason::Factor { from: count.into(), to, writers });
                return StripeCount::Of(u16::try_from(to).unwrap_or(count));
            }
        }
        StripeCount::Of(count)
    }

    fn file_per_process(
        &self,
        place: Place<'_>,
        workload: &Workload,
        limits: &Limits,
        reasons: &mut Vec<Reason>,
    ) -> StripeCount {
        let files = workload.files();
        match self.file_per_process {
            FilePerProcess::Node => StripeCount::Of(at_most(limits.each, limits, reasons)),
            FilePerProcess::One => {
                let targets = place.filesystem.targets;
                // What one process fills: its own part of the node.
                let per_node = workload.tasks().div_ceil(workload.active_nodes()).max(1);
                let one = (limits.node.0.0 / u64::from(per_node)).div_ceil(limits.stripe.0.0);
                let free = u64::from(targets) / files;
                let count = one.min(free);
                if count > 1 {
                    reasons.push(Reason::FewFiles { files, targets });
                    StripeCount::Of(at_most(u32::try_from(count).unwrap_or(u32::MAX), limits, reasons))
                } else {
                    reasons.push(Reason::OneEach { files });
                    StripeCount::Of(1)
                }
            }
        }
    }

    /// No more stripes than a file has, if its size is known.
    fn within_size(
        &self,
        count: StripeCount,
        stripe_size: Bytes,
        workload: &Workload,
        reasons: &mut Vec<Reason>,
    ) -> StripeCount {
        let Some(size) = workload.size.filter(|_| self.by_size) else { return count };
        let stripes = u32::try_from(size.0.div_ceil(stripe_size.0)).unwrap_or(u32::MAX).max(1);
        match count {
            StripeCount::Of(wanted) if u32::from(wanted) > stripes => {
                reasons.push(Reason::Small { size, stripes });
                StripeCount::Of(u16::try_from(stripes).unwrap_or(wanted))
            }
            count => count,
        }
    }

    /// A layout that grows with the file, as [`by_size`] would choose for the end of each part.
    fn progressive(
        &self,
        limits: &Limits,
        workload: &Workload,
        stripe_size: Bytes,
        reasons: &mut Vec<Reason>,
    ) -> Result<Layout, LayoutError> {
        reasons.push(Reason::Progressive);
        let mut components: Vec<Component> = Vec::new();
        if let Some(end) = self.metadata_end(workload) {
            reasons.push(Reason::WithMetadata { end });
            components.push(Component { end: Some(end), placement: Placement::Metadata });
        }
        let mut last = 0;
        for end in [Some(1 << 30), Some(16 << 30), Some(256 << 30), None] {
            let wanted = match end {
                Some(end) => by_size(Bytes(end - 1)),
                None => by_size(Bytes(1 << 40)),
            };
            let count = u16::try_from(wanted.min(limits.most)).unwrap_or(MOST_STRIPES);
            if count == last && components.len() > 1 {
                components.pop();
            }
            components.push(striped(end.map(Bytes), StripeCount::Of(count), stripe_size));
            last = count;
        }
        Layout::new(components)
    }

    /// The beginning of each file, if it is another one than the rest.
    fn head(
        &self,
        count: StripeCount,
        stripe_size: Bytes,
        workload: &Workload,
        reasons: &mut Vec<Reason>,
    ) -> Option<Component> {
        if let Some(end) = self.metadata_end(workload) {
            reasons.push(Reason::WithMetadata { end });
            return Some(Component { end: Some(end), placement: Placement::Metadata });
        }
        if count == StripeCount::Of(1) {
            return None;
        }
        let median = workload.median.filter(|_| self.median);
        let end = median.map_or(self.head, |median| median.max(UNIT).round_up_to(UNIT));
        // Most files would be as large as that: there is nothing to keep small.
        let is_all = workload.size.is_some_and(|size| end >= size);
        if is_all && median.is_some() {
            return None;
        }
        reasons.push(Reason::Head { end, is_median: median.is_some() });
        Some(striped(Some(end), StripeCount::Of(1), stripe_size_within(end, stripe_size)))
    }

    fn metadata_end(&self, workload: &Workload) -> Option<Bytes> {
        let median = workload.median.filter(|_| self.median)?.max(UNIT).round_up_to(UNIT);
        Some(median).filter(|end| *end <= self.with_metadata)
    }

    /// The bytes of a stripe.
    fn stripe_size(&self, workload: &Workload, reasons: &mut Vec<Reason>) -> Bytes {
        let [least, most] = self.stripe_size;
        let Some(write) = workload.write_size.filter(|write| *write > Bytes::ZERO) else { return least };
        // A stripe holds whole writes, or a write fills whole stripes: nobody waits for two targets at once.
        let whole_writes = (1..).map(|writes| write.0.saturating_mul(writes)).find(|size| *size >= least.0);
        let stripe = match whole_writes {
            Some(size) if size <= most.0 && size.is_multiple_of(UNIT.0) => Bytes(size),
            _ => {
                let mut size = most;
                while size > least && !write.0.is_multiple_of(size.0) {
                    size = Bytes(size.0 / 2);
                }
                size
            }
        };
        if stripe != least {
            reasons.push(Reason::WriteSize { write, stripe });
        }
        stripe
    }
}

fn striped(end: Option<Bytes>, count: StripeCount, stripe_size: Bytes) -> Component {
    Component { end, placement: Placement::Striped { count, stripe_size, pool: None } }
}

fn at_most(count: u32, limits: &Limits, reasons: &mut Vec<Reason>) -> u16 {
    if count > limits.most {
        reasons.push(Reason::Limited { most: limits.most, of: limits.of });
    }
    u16::try_from(count.clamp(1, limits.most)).unwrap_or(MOST_STRIPES)
}

/// As `lfs migrate -A` does: one stripe below 1 GiB, else the root of the size in GiB, and one.
fn by_size(size: Bytes) -> u32 {
    let gib = size.0 >> 30;
    if gib == 0 { 1 } else { u32::try_from(gib.isqrt()).unwrap_or(u32::MAX - 1) + 1 }
}

/// What one node reads or writes at most.
fn node_rate(nodes: &Nodes, workload: &Workload, limit: NodeLimit) -> Rate {
    let on_a_node = workload.writers().div_ceil(workload.active_nodes());
    match (limit, nodes.process) {
        (NodeLimit::Processes, Some(process)) => {
            Rate(nodes.link.0.min(Bytes(process.0.0.saturating_mul(on_a_node.into()))))
        }
        _ => nodes.link,
    }
}

impl Limits {
    /// What all processes together read or write at most.
    ///
    /// For files of their own: what the nodes can, and the targets that have a stripe. For one file with k stripes and p processes
    /// that choose a stripe by chance at each moment, k (1 - (1 - 1/k)^p) of the stripes have something to do.
    fn bandwidth(&self, place: Place<'_>, workload: &Workload, layout: &Layout) -> Rate {
        let filesystem = place.filesystem;
        let node = node_rate(place.nodes, workload, NodeLimit::Processes);
        let clients = node.0.0 as f64 * f64::from(workload.active_nodes());
        let Placement::Striped { count, .. } = layout.last().placement else {
            return Rate(Bytes(clients as u64));
        };
        // The servers count here whatever the rules think of.
        let server = filesystem.server.map_or(f64::INFINITY, |server| {
            server.0.0 as f64 * f64::from(filesystem.servers) / f64::from(filesystem.targets)
        });
        let stripe = (self.stripe.0.0 as f64).min(server);
        let targets = f64::from(filesystem.targets);
        let stripes = f64::from(count.among(filesystem.targets));
        let busy = match workload.pattern {
            Pattern::FilePerProcess => (workload.files() as f64 * stripes).min(targets),
            _ => {
                let writers = workload.of_a_file(workload.writers());
                let idle = (1.0 - 1.0 / stripes).powf(f64::from(writers));
                // One process goes through the stripes one after the other, ahead of the targets.
                let busy = if writers == 1 { stripes } else { stripes * (1.0 - idle) };
                (busy * workload.files() as f64).min(targets)
            }
        };
        Rate(Bytes((busy * stripe).min(clients) as u64))
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stripe { rate, load } if load.part() > 0.0 => {
                write!(f, "a target carries {rate}, and is busy to {:.0} %", load.part() * 100.0)
            }
            Self::Stripe { rate, .. } => write!(f, "a target carries {rate}"),
            Self::Node { rate, stripes: 1 } => write!(f, "a node reads or writes {rate}: 1 stripe"),
            Self::Node { rate, stripes } => write!(f, "a node reads or writes {rate}: {stripes} stripes"),
            Self::Shared { nodes: 1, each } => write!(f, "one node uses one file, {each} stripes"),
            Self::Shared { nodes, each: 1 } => write!(f, "{nodes} nodes use one file, a stripe each"),
            Self::Shared { nodes, each } => write!(f, "{nodes} nodes use one file, {each} stripes each"),
            Self::Limited { most, of } => write!(f, "there are {most} {of}"),
            Self::Factor { from, to, writers } => {
                write!(f, "{to} instead of {from} stripes: each has as many of the {writers} writers")
            }
            Self::Overstriped { nodes, targets, each } => {
                write!(f, "{nodes} nodes use one file on {targets} targets: {each} stripes on each")
            }
            Self::OneEach { files } => write!(f, "{files} files: each is on one target, and together on all"),
            Self::FewFiles { files, targets } => {
                write!(f, "{files} files are fewer than the {targets} targets: each is on several")
            }
            Self::BySize { size } => write!(f, "a file of {size}: by its size"),
            Self::Small { size, stripes: 1 } => write!(f, "a file of {size} has 1 stripe"),
            Self::Small { size, stripes } => write!(f, "a file of {size} has {stripes} stripes"),
            Self::Progressive => {
                f.write_str("neither the writers nor the size of a file is known: it grows with the file")
            }
            Self::Head { end, is_median: true } => write!(f, "up to {end}, its median file, one target"),
            Self::Head { end, .. } => write!(f, "up to {end} one target, for small files"),
            Self::WithMetadata { end } => write!(f, "up to {end}, its median file, with the metadata"),
            Self::WriteSize { write, stripe } => {
                write!(f, "it writes {write} at a time: stripes of {stripe}")
            }
        }
    }
}
