//! `[[tiers]]`: where chunks live, fastest first.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use figment::providers::Serialized;
use figment::Figment;
use serde::de::{self, DeserializeOwned, MapAccess};
use serde::{Deserialize, Deserializer, Serialize};

use crate::check::{duration_in, not_empty, quoted_size, size_in};
use crate::load::explain;
use crate::machine::Machine;
use crate::units::{self, approximate, format_size, MAX_DURATION};
use crate::{data_dir, ConfigError, DeviceKind};

/// One `[[tiers]]` table. The keys below are common to all backends; any other key belongs to the backend, which
/// refuses what it does not know.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TierConfig {
    /// The backend: `"device"`, `"dram"`, `"rocks"`, or another that is registered. Required.
    pub kind: String,
    /// Name in metrics and logs, unique. Default: `kind`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Most bytes that the tier holds. Required, 1 B or more, and within the memory or disk of the machine.
    #[serde(with = "units::size")]
    pub capacity: ByteSize,
    /// Folder of a durable tier. Default: a folder of the tier's name in Keepsake's data folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Eviction policy, by its registered name. Default `"lru"`.
    pub policy: String,
    /// Chunks idle for longer than this go first, whatever they cost. Default: no such bound. 1s to 100 years.
    #[serde(with = "humantime_serde::option", skip_serializing_if = "Option::is_none")]
    pub idle_cutoff: Option<Duration>,
    /// The backend's own keys.
    #[serde(flatten)]
    pub options: toml::Table,
}

impl TierConfig {
    pub const DEFAULT_POLICY: &'static str = "lru";

    /// A tier of `kind` with every optional key at its default.
    pub fn new(kind: &str, capacity: ByteSize) -> Self {
        Self {
            kind: kind.to_owned(),
            name: None,
            capacity,
            path: None,
            policy: Self::DEFAULT_POLICY.to_owned(),
            idle_cutoff: None,
            options: toml::Table::new(),
        }
    }

    /// Device 512 MiB, DRAM 1 GiB, RocksDB 4 GiB: fits a small machine beside the demo model.
    pub(crate) fn defaults() -> Vec<Self> {
        vec![
            Self::new("device", ByteSize::mib(512)),
            Self::new("dram", ByteSize::gib(1)),
            Self::new("rocks", ByteSize::gib(4)),
        ]
    }

    /// The configured name, else the kind.
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or(&self.kind)
    }

    /// The configured folder, else one of the tier's name in the data folder.
    pub fn folder(&self) -> PathBuf {
        match &self.path {
            Some(path) => path.clone(),
            None => data_dir().join(self.name()),
        }
    }

    /// The backend's own keys as the backend's own type. Give that type `#[serde(default, deny_unknown_fields)]` and
    /// an unknown key or a wrong type is reported like any other, with the path relative to the tier.
    pub fn parse_options<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        let figment = Figment::from(Serialized::defaults(&self.options));
        figment.extract().map_err(|error| explain(error, &self.options))
    }
}

impl<'de> Deserialize<'de> for TierConfig {
    /// By hand: `serde(flatten)` would lose the path of an error, and excludes `deny_unknown_fields`.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(TierVisitor)
    }
}

struct TierVisitor;

impl<'de> de::Visitor<'de> for TierVisitor {
    type Value = TierConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table such as {kind = \"dram\", capacity = \"1 GiB\"}")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TierConfig, A::Error> {
        #[derive(Deserialize)]
        struct Size(#[serde(with = "units::size")] ByteSize);
        #[derive(Deserialize)]
        struct Time(#[serde(with = "units::duration")] Duration);

        let (mut kind, mut capacity) = (None, None);
        let mut tier = TierConfig::new("", ByteSize(0));
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "kind" => kind = Some(map.next_value()?),
                "capacity" => capacity = Some(map.next_value::<Size>()?.0),
                "name" => tier.name = Some(map.next_value()?),
                "path" => tier.path = Some(map.next_value()?),
                "policy" => tier.policy = map.next_value()?,
                "idle_cutoff" => tier.idle_cutoff = Some(map.next_value::<Time>()?.0),
                _ => {
                    tier.options.insert(key, map.next_value()?);
                }
            }
        }
        tier.kind = kind.ok_or_else(|| de::Error::missing_field("kind"))?;
        tier.capacity = capacity.ok_or_else(|| de::Error::missing_field("capacity"))?;
        Ok(tier)
    }
}

/// The keys of a `rocks` tier besides the common ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RocksOptions {
    /// Most bytes of stored turns (token logs and items), on top of `capacity`. Default `1 GiB`, 16 MiB to 1024 TiB.
    #[serde(with = "units::size")]
    pub turns_capacity: ByteSize,
    /// Turns this old are deleted from the turn store even in a conversation that is still in use. Default
    /// `30days`, 1s to 100 years.
    #[serde(with = "units::duration")]
    pub turn_ttl: Duration,
    /// Memory of RocksDB's write buffers. Default: scales with `capacity`. 1 MiB to 4 GiB.
    #[serde(with = "units::optional_size", skip_serializing_if = "Option::is_none")]
    pub write_buffer: Option<ByteSize>,
}

impl Default for RocksOptions {
    fn default() -> Self {
        Self { turns_capacity: ByteSize::gib(1), turn_ttl: Duration::from_secs(30 * 24 * 3600), write_buffer: None }
    }
}

impl RocksOptions {
    pub const KIND: &'static str = "rocks";

    /// The options of a `rocks` tier, in range.
    pub fn of(tier: &TierConfig) -> Result<Self, ConfigError> {
        let options: Self = tier.parse_options()?;
        let most = ByteSize::tib(1024);
        size_in("turns_capacity", options.turns_capacity, ByteSize::mib(16), most)?;
        duration_in("turn_ttl", options.turn_ttl, Duration::from_secs(1), MAX_DURATION)?;
        if let Some(write_buffer) = options.write_buffer {
            size_in("write_buffer", write_buffer, ByteSize::mib(1), ByteSize::gib(4))?;
        }
        Ok(options)
    }
}

/// Where a tier's bytes are, which is also the order tiers come in.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Device,
    Host,
    /// Durable, and every backend this crate does not know.
    Below,
}

fn place(tier: &TierConfig) -> Place {
    match tier.kind.as_str() {
        "device" => Place::Device,
        "dram" | "memory" => Place::Host,
        _ => Place::Below,
    }
}

pub(crate) fn validate_tiers(tiers: &[TierConfig], device: DeviceKind, machine: &Machine) -> Result<(), ConfigError> {
    check_each(tiers)?;
    check_order(tiers)?;
    check_memory(tiers, device, machine)?;
    check_disks(tiers, machine)
}

fn check_each(tiers: &[TierConfig]) -> Result<(), ConfigError> {
    let mut names = HashMap::new();
    for (i, tier) in tiers.iter().enumerate() {
        not_empty(&format!("tiers[{i}].kind"), &tier.kind)?;
        not_empty(&format!("tiers[{i}].name"), tier.name())?;
        not_empty(&format!("tiers[{i}].policy"), &tier.policy)?;
        if let Some(idle_cutoff) = tier.idle_cutoff {
            duration_in(&format!("tiers[{i}].idle_cutoff"), idle_cutoff, Duration::from_secs(1), MAX_DURATION)?;
        }
        if tier.capacity.as_u64() == 0 {
            let reason = "must be larger than 0; leave the tier out instead";
            return Err(ConfigError::invalid(capacity_path(i), "\"0 B\"", reason));
        }
        if let Some(first) = names.insert(tier.name(), i) {
            let reason = format!("the same name as tiers[{first}]; give one of them another `name`");
            return Err(ConfigError::invalid(format!("tiers[{i}].name"), format!("{:?}", tier.name()), reason));
        }
        let options = match tier.kind.as_str() {
            "device" | "dram" => tier.parse_options::<NoOptions>().map(|_| ()),
            RocksOptions::KIND => RocksOptions::of(tier).map(|_| ()),
            _ => Ok(()),
        };
        options.map_err(|error| error.under(&format!("tiers[{i}]")))?;
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NoOptions {}

fn check_order(tiers: &[TierConfig]) -> Result<(), ConfigError> {
    let Some(first) = tiers.first() else {
        let reason = "no tiers: at least a `device` tier is needed".to_owned();
        return Err(ConfigError::Missing { path: "tiers".to_owned(), reason });
    };
    let out_of_order = |i: usize, reason: String| {
        let value = format!("{:?}", tiers[i].kind);
        Err(ConfigError::invalid(format!("tiers[{i}].kind"), value, format!("tiers out of order: {reason}")))
    };
    if place(first) != Place::Device {
        return out_of_order(0, "the first must be `device`".to_owned());
    }
    for i in 1..tiers.len() {
        if place(&tiers[i]) == Place::Device {
            return out_of_order(i, "only the first may be `device`".to_owned());
        }
        if place(&tiers[i]) < place(&tiers[i - 1]) {
            return out_of_order(i, format!("host memory comes before `{}`", tiers[i - 1].kind));
        }
    }
    Ok(())
}

fn check_memory(tiers: &[TierConfig], device: DeviceKind, machine: &Machine) -> Result<(), ConfigError> {
    // Auto counts too: it may fall back to the CPU, whose device pool is host memory.
    let in_memory = |tier: &TierConfig| match place(tier) {
        Place::Device => device != DeviceKind::Cuda,
        Place::Host => true,
        Place::Below => false,
    };
    let limit = machine.memory_bytes;
    let mut sum = 0_u64;
    for (i, tier) in tiers.iter().enumerate().filter(|(_, tier)| in_memory(tier)) {
        let capacity = tier.capacity.as_u64();
        let refuse = |reason: String| Err(ConfigError::invalid(capacity_path(i), quoted_size(tier.capacity), reason));
        if capacity > limit {
            return refuse(format!("larger than this machine's memory ({})", approximate(limit)));
        }
        sum = sum.saturating_add(capacity);
        if sum > limit {
            return refuse(format!(
                "with the tiers before it {}, larger than this machine's memory ({}): lower one of them",
                approximate(sum),
                approximate(limit)
            ));
        }
    }
    Ok(())
}

fn check_disks(tiers: &[TierConfig], machine: &Machine) -> Result<(), ConfigError> {
    for (i, tier) in tiers.iter().enumerate().filter(|(_, tier)| place(tier) == Place::Below) {
        // A backend that this crate does not know uses a disk only if it is given a folder.
        if tier.kind != RocksOptions::KIND && tier.path.is_none() {
            continue;
        }
        let folder = tier.folder();
        if folder.exists() && !folder.is_dir() {
            return Err(ConfigError::invalid(format!("tiers[{i}].path"), format!("{folder:?}"), "not a folder"));
        }
        let turns = match tier.kind.as_str() {
            RocksOptions::KIND => RocksOptions::of(tier)?.turns_capacity.as_u64(),
            _ => 0,
        };
        let wanted = tier.capacity.as_u64().saturating_add(turns);
        let Some(available) = machine.disk_bytes(&folder) else {
            continue;
        };
        if wanted > available {
            let turns = match turns {
                0 => String::new(),
                turns => format!("with turns_capacity {}, ", format_size(ByteSize(turns))),
            };
            let reason =
                format!("{turns}larger than the disk space at {} ({})", folder.display(), approximate(available));
            return Err(ConfigError::invalid(capacity_path(i), quoted_size(tier.capacity), reason));
        }
    }
    Ok(())
}

fn capacity_path(tier: usize) -> String {
    format!("tiers[{tier}].capacity")
}
