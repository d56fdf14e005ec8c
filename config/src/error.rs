//! The one error type. Every message is a single line that names the TOML path, the value and the limit.

use std::path::PathBuf;

/// Why a configuration cannot be used. All of these end the start with exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("config: cannot read {}: {cause}", file.display())]
    Unreadable {
        file: PathBuf,
        /// Part of the message and so not a `source`: whoever prints the chain would print it twice.
        cause: std::io::Error,
    },
    /// The file is not TOML.
    #[error("config: {}:{line}:{column}: {message}", file.display())]
    Syntax { file: PathBuf, line: usize, column: usize, message: String },
    /// A key holds a value that cannot be used, or is not known at all.
    #[error("config: {path} = {value}: {reason}")]
    Invalid { path: String, value: String, reason: String },
    /// A required key, or a whole table, is absent.
    #[error("config: {path}: {reason}")]
    Missing { path: String, reason: String },
}

impl ConfigError {
    /// An error about the value at `path`, for checks that live outside this crate (a backend's own keys, say).
    pub fn invalid(path: impl Into<String>, value: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Invalid { path: path.into(), value: value.into(), reason: reason.into() }
    }

    /// The TOML path that the error is about, when it is about one.
    pub fn path(&self) -> Option<&str> {
        match self {
            Self::Invalid { path, .. } | Self::Missing { path, .. } => Some(path),
            Self::Unreadable { .. } | Self::Syntax { .. } => None,
        }
    }

    /// Puts `prefix` before the path, for errors found by code that sees only a part of the file, such as a backend's.
    pub fn under(self, prefix: &str) -> Self {
        let join = |path: String| match (path.is_empty(), prefix.is_empty()) {
            (true, _) => prefix.to_owned(),
            (_, true) => path,
            _ => format!("{prefix}.{path}"),
        };
        match self {
            Self::Invalid { path, value, reason } => Self::Invalid { path: join(path), value, reason },
            Self::Missing { path, reason } => Self::Missing { path: join(path), reason },
            other => other,
        }
    }

    /// Adds to the reason where the value came from.
    pub(crate) fn set_by(self, variable: &str) -> Self {
        let append = |reason: String| format!("{reason} (set by the environment: {variable})");
        match self {
            Self::Invalid { path, value, reason } => Self::Invalid { path, value, reason: append(reason) },
            Self::Missing { path, reason } => Self::Missing { path, reason: append(reason) },
            other => other,
        }
    }
}
