//! The folder that stands in for the user's data folder while the bench runs.

use std::path::Path;

use anyhow::Context;
use keepsake_config::{Config, RocksOptions};
use tempfile::TempDir;

/// Removed when dropped.
pub(super) struct Scratch(TempDir);

impl Scratch {
    /// Not in the system's temporary folder unless asked: that is often memory, and no disk to measure.
    pub(super) fn new(parent: Option<&Path>) -> anyhow::Result<Self> {
        let cache = keepsake_config::cache_dir();
        let parent = parent.unwrap_or(&cache);
        std::fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
        // Paths in a configuration may be relative, but a data folder is absolute by definition.
        let parent = parent.canonicalize().with_context(|| format!("cannot find {}", parent.display()))?;
        let folder = tempfile::Builder::new().prefix("bench-").tempdir_in(&parent);
        let folder = folder.with_context(|| format!("cannot write to {}", parent.display()))?;
        Ok(Self(folder))
    }

    /// Sends everything that `config` would write, and the defaults of this process, to this folder. Call it before
    /// there are threads.
    pub(super) fn redirect(&self, config: &mut Config) -> anyhow::Result<()> {
        // The demo model stays where it is.
        if config.model.dummy.is_none() {
            config.model.path = Some(crate::cli::resolve_model(&config.model)?);
        }
        self.redirect_tiers(config);
        // For whatever has no path of its own: a turn store without a rocks tier, backends with defaults.
        std::env::set_var("XDG_DATA_HOME", self.0.path());
        Ok(())
    }

    fn redirect_tiers(&self, config: &mut Config) {
        for tier in &mut config.tiers {
            if tier.kind == RocksOptions::KIND || tier.path.is_some() {
                tier.path = Some(self.0.path().join(tier.name()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keepsake_config::{ByteSize, TierConfig};

    #[test]
    fn no_configured_folder_is_used_and_nothing_stays() {
        let parent = tempfile::tempdir().unwrap();
        let scratch = Scratch::new(Some(parent.path())).unwrap();
        let mut config = Config::default();
        let mut files = TierConfig::new("plain_files", ByteSize::mib(1));
        files.path = Some("state/files".into());
        config.tiers.push(files);
        scratch.redirect_tiers(&mut config);
        for tier in &config.tiers[2..] {
            let path = tier.path.as_ref().unwrap();
            assert!(path.starts_with(parent.path()), "{}: {}", tier.name(), path.display());
        }
        assert_eq!((&config.tiers[0].path, &config.tiers[1].path), (&None, &None));
        drop(scratch);
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
