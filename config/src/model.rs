//! `[model]` and `[device]`: what is served, and on what.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::{not_empty, number_in};
use crate::ConfigError;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// A GGUF file, or a Hugging Face folder with config.json and safetensors. Default: the demo model, fetched on
    /// first use.
    pub path: Option<PathBuf>,
    /// Name that clients ask for. Default: from the file.
    pub name: Option<String>,
    /// Random weights of a named shape instead of a file, for benchmarks. Excludes `path`. Default: none.
    pub dummy: Option<String>,
    /// Longest context in tokens, 1 or more. Default: the model's own; more than that has no effect.
    pub max_context: Option<usize>,
    /// A Jinja file used instead of the model's chat template. Default: the model's.
    pub chat_template: Option<PathBuf>,
}

impl ModelConfig {
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        if let (Some(_), Some(dummy)) = (&self.path, &self.dummy) {
            let reason = "excludes model.path: set one of the two";
            return Err(ConfigError::invalid("model.dummy", format!("{dummy:?}"), reason));
        }
        for (path, text) in [("model.name", &self.name), ("model.dummy", &self.dummy)] {
            if let Some(text) = text {
                not_empty(path, text)?;
            }
        }
        for (key, path) in [("model.path", &self.path), ("model.chat_template", &self.chat_template)] {
            if let Some(path) = path.as_ref().filter(|path| !path.exists()) {
                return Err(ConfigError::invalid(key, format!("{path:?}"), "no such file or folder"));
            }
        }
        match self.max_context {
            Some(max_context) => number_in("model.max_context", max_context, 1, u32::MAX as usize),
            None => Ok(()),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeviceConfig {
    /// `"auto"`, `"cpu"` or `"cuda"`. Default `"auto"`: CUDA where this build and machine have it, else the CPU.
    pub kind: DeviceKind,
    /// Threads of a forward pass on the CPU. Default 0: every core. At most 1024.
    pub threads: usize,
}

impl DeviceConfig {
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        number_in("device.threads", self.threads, 0, 1024)
    }
}

/// What a forward pass runs on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    #[default]
    Auto,
    Cpu,
    Cuda,
}
