//! Keepsake's configuration: one TOML file, typed, with defaults, checked before anything starts.
//!
//! Layers, later ones win: the defaults below, the file, the environment (`KEEPSAKE__SECTION__KEY`). A section refuses
//! keys it does not know. Every error is one line with the TOML path, the value and the limit.
//!
//! Depends on nothing else in the workspace. Invariants: [`DEFAULT_TOML`] says exactly what [`Config::default`] says (a
//! test holds them equal), and a loaded configuration is valid on this machine. Deliberately absent: reloading (a
//! server is restarted, its state survives that), and knowledge of backends beyond the built-in ones: a backend reads
//! its own keys with [`TierConfig::parse_options`].

mod check;
mod error;
mod load;
mod machine;
mod model;
mod paths;
mod scheduler;
mod server;
mod sessions;
mod tiers;
pub mod units;

use std::path::Path;

use serde::{Deserialize, Serialize};

pub use bytesize::ByteSize;
pub use error::ConfigError;
pub use machine::Machine;
pub use model::{DeviceConfig, DeviceKind, ModelConfig};
pub use paths::{cache_dir, data_dir};
pub use scheduler::{CalibrateMode, QueueOrder, SchedulerConfig};
pub use server::ServerConfig;
pub use sessions::{LogFormat, Secret, SessionsConfig, TelemetryConfig, TenantConfig};
pub use tiers::{RocksOptions, TierConfig};

/// The defaults as a commented file, what `keepsake config default` prints.
pub const DEFAULT_TOML: &str = include_str!("../keepsake.toml");

/// The whole configuration. Sections and keys are those of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub server: ServerConfig,
    pub model: ModelConfig,
    pub device: DeviceConfig,
    pub scheduler: SchedulerConfig,
    /// Fastest first: device, then host memory, then durable. A file that has any replaces the default list.
    pub tiers: Vec<TierConfig>,
    pub sessions: SessionsConfig,
    /// Empty: no keys, everyone is one tenant.
    pub tenants: Vec<TenantConfig>,
    pub telemetry: TelemetryConfig,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            server: ServerConfig::default(),
            model: ModelConfig::default(),
            device: DeviceConfig::default(),
            scheduler: SchedulerConfig::default(),
            tiers: TierConfig::defaults(),
            sessions: SessionsConfig::default(),
            tenants: Vec::new(),
            telemetry: TelemetryConfig::default(),
        }
    }
}

impl Config {
    /// Defaults, then `file`, then the environment; valid on this machine.
    pub fn load(file: Option<&Path>) -> Result<Self, ConfigError> {
        let config = Self::read(file)?;
        config.validate(&Machine::this())?;
        Ok(config)
    }

    /// As [`Config::load`], not validated yet: for a caller that changes something first.
    pub fn read(file: Option<&Path>) -> Result<Self, ConfigError> {
        load::read(file)
    }

    /// Every check that needs no model: ranges, and what fits `machine`.
    pub fn validate(&self, machine: &Machine) -> Result<(), ConfigError> {
        self.validate_sections(machine).map_err(load::name_variable)
    }

    fn validate_sections(&self, machine: &Machine) -> Result<(), ConfigError> {
        self.server.validate()?;
        self.model.validate()?;
        self.device.validate()?;
        self.scheduler.validate()?;
        tiers::validate_tiers(&self.tiers, self.device.kind, machine)?;
        self.sessions.validate()?;
        sessions::validate_tenants(&self.tenants)?;
        self.telemetry.validate()?;
        self.check_exposure()
    }

    /// Blocks that the device pool holds. Refused if that is none: the check that needs the model's K/V layout.
    pub fn check_device_pool(&self, chunk_bytes: u64) -> Result<u64, ConfigError> {
        let device = self.tiers.first().ok_or_else(|| ConfigError::Missing {
            path: "tiers".to_owned(),
            reason: "no tiers: at least a `device` tier is needed".to_owned(),
        })?;
        match device.capacity.as_u64() / chunk_bytes.max(1) {
            0 => {
                let reason = format!(
                    "smaller than one chunk of this model ({}, {} tokens)",
                    units::approximate(chunk_bytes),
                    self.scheduler.chunk_tokens
                );
                let value = check::quoted_size(device.capacity);
                Err(ConfigError::invalid("tiers[0].capacity", value, reason))
            }
            blocks => Ok(blocks),
        }
    }

    /// Whoever can reach the port can use the server, so others may reach it only with keys or on request.
    fn check_exposure(&self) -> Result<(), ConfigError> {
        let guarded = !self.tenants.is_empty() || self.server.allow_unauthenticated;
        if guarded || self.server.bind.ip().is_loopback() {
            return Ok(());
        }
        let reason =
            "not a loopback address and no [[tenants]] have keys: add a key, or set server.allow_unauthenticated";
        Err(ConfigError::invalid("server.bind", format!("\"{}\"", self.server.bind), reason))
    }
}
