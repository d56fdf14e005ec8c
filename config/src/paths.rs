//! The user's folders for data and caches.

use std::path::PathBuf;

/// `$XDG_DATA_HOME/keepsake`, else `~/.local/share/keepsake`: models and durable tiers.
pub fn data_dir() -> PathBuf {
    base("XDG_DATA_HOME", ".local/share").join("keepsake")
}

/// `$XDG_CACHE_HOME/keepsake`, else `~/.cache/keepsake`: what can be made again.
pub fn cache_dir() -> PathBuf {
    base("XDG_CACHE_HOME", ".cache").join("keepsake")
}

fn base(variable: &str, under_home: &str) -> PathBuf {
    // The XDG specification says to ignore relative paths.
    let configured = std::env::var_os(variable).map(PathBuf::from);
    match configured.filter(|path| path.is_absolute()) {
        Some(path) => path,
        None => std::env::home_dir().unwrap_or_else(|| PathBuf::from(".")).join(under_home),
    }
}
