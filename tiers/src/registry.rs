//! Backends by name: `kind = "..."` in the configuration finds its constructor here.

use std::collections::BTreeMap;
use std::sync::Arc;

use keepsake_config::{ConfigError, TierConfig};
use keepsake_kernels::{KvLayout, KvPool};
use serde::de::DeserializeOwned;

use crate::device::BlockPool;
use crate::rocks::KvStoreConfig;
use crate::{DeviceTier, DramTier, Result, RocksTier, Tier, TierError};

/// What a backend is given beside its own section of the configuration.
#[derive(Clone)]
pub struct TierContext {
    /// The section's place in the file, such as `tiers[1]`, for messages.
    pub toml_path: String,
    pub layout: KvLayout,
    /// [`crate::KeyScope::layout_id`] of the loaded model.
    pub layout_id: [u8; 16],
    /// The device's K/V memory and its free list, for the device tier.
    pub device: Option<(Arc<KvPool>, Arc<BlockPool>)>,
}

impl TierContext {
    /// The backend's own keys as a struct, which should be `deny_unknown_fields`. Refusals name the TOML path.
    pub fn options<T: DeserializeOwned>(&self, config: &TierConfig) -> Result<T> {
        let options = config.parse_options();
        options.map_err(|error| under(&self.toml_path, error).into())
    }

    /// A refusal of one of the section's keys.
    pub fn refuse(&self, key: &str, value: impl Into<String>, reason: impl Into<String>) -> TierError {
        ConfigError::invalid(format!("{}.{key}", self.toml_path), value, reason).into()
    }
}

/// Puts the section's path before an error about one of its keys.
pub(crate) fn under(toml_path: &str, error: ConfigError) -> ConfigError {
    let join = |path: String| format!("{toml_path}.{path}");
    match error {
        ConfigError::Invalid { path, value, reason } => ConfigError::Invalid { path: join(path), value, reason },
        ConfigError::Missing { path, reason } => ConfigError::Missing { path: join(path), reason },
        other => other,
    }
}

/// Makes a tier from its configuration.
pub type Constructor = Arc<dyn Fn(&TierConfig, &TierContext) -> Result<Arc<dyn Tier>> + Send + Sync>;

/// The known kinds of tiers.
#[derive(Clone)]
pub struct Registry {
    constructors: BTreeMap<String, Constructor>,
}

impl Default for Registry {
    /// With the built-in kinds: `device`, `dram`, `rocks`.
    fn default() -> Self {
        let mut registry = Self { constructors: BTreeMap::new() };
        registry.register("device", |config, context| {
            context.options::<NoOptions>(config)?;
            let no_device = || context.refuse("kind", "\"device\"", "there is no device memory to hold it");
            let (pool, blocks) = context.device.clone().ok_or_else(no_device)?;
            Ok(Arc::new(DeviceTier::new(config.name(), pool, blocks)?))
        });
        registry.register("dram", |config, context| {
            context.options::<NoOptions>(config)?;
            let capacity_bytes = config.capacity.as_u64();
            let tier = DramTier::new(config.name(), capacity_bytes, context.layout);
            let refuse = |error: TierError| context.refuse("capacity", config.capacity.to_string(), error.to_string());
            Ok(Arc::new(tier.map_err(refuse)?))
        });
        registry.register("rocks", |config, context| {
            let kv = KvStoreConfig::from_tier(config, context)?;
            Ok(Arc::new(RocksTier::open(kv)?))
        });
        registry
    }
}

impl Registry {
    /// Adds a kind, or replaces one.
    pub fn register<F>(&mut self, kind: &str, constructor: F)
    where
        F: Fn(&TierConfig, &TierContext) -> Result<Arc<dyn Tier>> + Send + Sync + 'static,
    {
        self.constructors.insert(kind.to_owned(), Arc::new(constructor));
    }

    pub fn kinds(&self) -> impl Iterator<Item = &str> {
        self.constructors.keys().map(String::as_str)
    }

    /// Opens the tier that a section of the configuration describes, and says so in the log.
    pub fn open(&self, config: &TierConfig, context: &TierContext) -> Result<Arc<dyn Tier>> {
        let tier = self.open_quietly(config, context)?;
        let usage = tier.usage();
        tracing::info!(
            tier = tier.name(),
            kind = config.kind,
            capacity_bytes = usage.capacity_bytes,
            num_chunks = usage.num_chunks,
            "tier opened"
        );
        Ok(tier)
    }

    /// As [`Registry::open`], for a tier that nobody is served from.
    pub fn open_quietly(&self, config: &TierConfig, context: &TierContext) -> Result<Arc<dyn Tier>> {
        let Some(constructor) = self.constructors.get(&config.kind) else {
            let kinds: Vec<&str> = self.kinds().collect();
            let reason = format!("no such kind of tier; known are {}", kinds.join(", "));
            let path = format!("{}.kind", context.toml_path);
            return Err(ConfigError::invalid(path, format!("{:?}", config.kind), reason).into());
        };
        constructor(config, context)
    }
}

/// The options of a tier that has none.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoOptions {}
