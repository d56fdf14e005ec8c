//! `[sessions]`, `[[tenants]]` and `[telemetry]`.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize, Serializer};

use crate::check::{duration_in, not_empty};
use crate::units;
use crate::ConfigError;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SessionsConfig {
    /// A session without requests for this long leaves memory; its turns stay on disk. Default `10m`, 1s to 30 days.
    #[serde(with = "units::duration")]
    pub idle_after: Duration,
}

impl Default for SessionsConfig {
    fn default() -> Self {
        Self { idle_after: Duration::from_secs(10 * 60) }
    }
}

impl SessionsConfig {
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        let (second, month) = (Duration::from_secs(1), Duration::from_secs(30 * 24 * 3600));
        duration_in("sessions.idle_after", self.idle_after, second, month)
    }
}

/// Whoever holds one of `keys`. Tenants never share cached state or see each other's turns.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    /// Name in logs, metrics and stored turns. Required, unique.
    pub name: String,
    /// API keys, each unique in the file. At least one.
    pub keys: Vec<Secret>,
    /// Share of the device beside other tenants' when requests wait. Default 1, 0.01 to 100.
    #[serde(default = "one")]
    pub weight: f64,
}

fn one() -> f64 {
    1.0
}

/// An API key. Prints and serialises as `***`.
#[derive(Clone, PartialEq, Eq, Hash, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    pub fn new(key: impl Into<String>) -> Self {
        Self(key.into())
    }

    /// The key itself, for comparing.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("***")
    }
}

pub(crate) fn validate_tenants(tenants: &[TenantConfig]) -> Result<(), ConfigError> {
    let mut names: HashMap<&str, usize> = HashMap::new();
    let mut keys: HashMap<&str, String> = HashMap::new();
    for (i, tenant) in tenants.iter().enumerate() {
        let name_path = format!("tenants[{i}].name");
        not_empty(&name_path, &tenant.name)?;
        if let Some(first) = names.insert(&tenant.name, i) {
            let reason = format!("the same name as tenants[{first}]");
            return Err(ConfigError::invalid(name_path, format!("{:?}", tenant.name), reason));
        }
        if !(0.01..=100.0).contains(&tenant.weight) {
            let reason = "must be 0.01 to 100";
            return Err(ConfigError::invalid(format!("tenants[{i}].weight"), tenant.weight.to_string(), reason));
        }
        if tenant.keys.is_empty() {
            return Err(ConfigError::invalid(format!("tenants[{i}].keys"), "[]", "a tenant needs at least one key"));
        }
        for (k, key) in tenant.keys.iter().enumerate() {
            let path = format!("tenants[{i}].keys[{k}]");
            let refuse = |reason: &str| Err(ConfigError::invalid(path.as_str(), "***", reason));
            if key.expose().is_empty() {
                return refuse("empty key");
            }
            // A key travels in an HTTP header: anything else could never match.
            if !key.expose().bytes().all(|b| b.is_ascii_graphic()) {
                return refuse("a key may hold only printable ASCII without spaces");
            }
            if let Some(first) = keys.insert(key.expose(), path.clone()) {
                return refuse(&format!("the same key as {first}"));
            }
        }
    }
    Ok(())
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TelemetryConfig {
    /// Log filter: a level, or levels per module such as `"info,keepsake_tiers=debug"`. Default `"info"`.
    pub log: String,
    /// `"text"` or `"json"`, one line an event on stderr. Default `"text"`.
    pub format: LogFormat,
}

/// The shape of a log line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self { log: "info".to_owned(), format: LogFormat::Text }
    }
}

impl TelemetryConfig {
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        not_empty("telemetry.log", &self.log)
    }
}
