//! A server's configuration, as the TOML file that an operator would write.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Tokens of a chunk in every test.
pub const CHUNK_TOKENS: usize = 32;

/// What the server runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelKind {
    /// SmolLM2 135M, fetched by `make test`: real text, real tokenizer and template.
    Demo,
    /// Generated weights of a tiny shape with a byte tokenizer: a thousand turns in seconds, never an end-of-turn.
    Tiny,
}

impl ModelKind {
    /// K and V of one chunk: layers x 2 x tokens x heads x dimensions x 2 bytes.
    pub fn chunk_bytes(self) -> u64 {
        let values = match self {
            Self::Demo => 30 * 2 * CHUNK_TOKENS * 3 * 64,
            Self::Tiny => 2 * 2 * CHUNK_TOKENS * 2 * 32,
        };
        2 * values as u64
    }
}

/// A configuration under construction. Tier sizes are given in chunks.
#[derive(Clone, Debug)]
pub struct Settings {
    model: ModelKind,
    device_chunks: usize,
    dram_chunks: usize,
    rocks_chunks: usize,
    rocks_folder: Option<PathBuf>,
    write_buffer_bytes: u64,
    turns_bytes: u64,
    turn_ttl: Option<&'static str>,
    /// Section to key to TOML value.
    sections: BTreeMap<&'static str, BTreeMap<&'static str, String>>,
    tenants: Vec<(&'static str, &'static str)>,
}

impl Settings {
    /// One tier with room for everything, and a rocks tier for the turns whose share of K/V is as small as it can be.
    pub fn roomy(model: ModelKind) -> Self {
        Self::tiers(model, if model == ModelKind::Demo { 600 } else { 8192 }, 0, 16)
    }

    /// A zero leaves the tier out.
    pub fn tiers(model: ModelKind, device_chunks: usize, dram_chunks: usize, rocks_chunks: usize) -> Self {
        Self {
            model,
            device_chunks,
            dram_chunks,
            rocks_chunks,
            rocks_folder: None,
            write_buffer_bytes: 4 << 20,
            turns_bytes: 64 << 20,
            turn_ttl: None,
            sections: BTreeMap::new(),
            tenants: Vec::new(),
        }
    }

    /// `value` as TOML spells it: numbers plain, text in quotes.
    pub fn set(mut self, section: &'static str, key: &'static str, value: &str) -> Self {
        self.sections.entry(section).or_default().insert(key, value.to_owned());
        self
    }

    pub fn tenant(mut self, name: &'static str, key: &'static str) -> Self {
        self.tenants.push((name, key));
        self
    }

    /// Puts the rocks tier and the turns somewhere else than in the data folder.
    pub fn rocks_folder(mut self, folder: &Path) -> Self {
        self.rocks_folder = Some(folder.to_owned());
        self
    }

    pub fn turns_bytes(mut self, bytes: u64) -> Self {
        self.turns_bytes = bytes;
        self
    }

    /// Turns this old are forgotten; needs a rocks tier.
    pub fn turn_ttl(mut self, ttl: &'static str) -> Self {
        self.turn_ttl = Some(ttl);
        self
    }

    pub fn model(&self) -> ModelKind {
        self.model
    }

    pub fn device_chunks(&self) -> usize {
        self.device_chunks
    }

    pub fn tier_bytes(&self, chunks: usize) -> u64 {
        chunks as u64 * self.model.chunk_bytes()
    }

    /// Memory that the configuration grants: tiers in memory and RocksDB's write buffers (of `kv/` and of `turns/`).
    pub fn memory_bytes(&self) -> u64 {
        let rocks = if self.rocks_chunks > 0 { 2 * self.write_buffer_bytes } else { 0 };
        self.tier_bytes(self.device_chunks + self.dram_chunks) + rocks
    }

    /// Where the rocks tier's files are, for a server whose data folder is `data`.
    pub fn rocks_in(&self, data: &Path) -> PathBuf {
        self.rocks_folder.clone().unwrap_or_else(|| data.join("keepsake").join("rocks"))
    }

    pub(crate) fn first_key(&self) -> Option<&'static str> {
        self.tenants.first().map(|(_, key)| *key)
    }

    /// The file. The port is the operating system's choice; the log says which.
    pub(crate) fn to_toml(&self) -> String {
        let mut sections = self.sections.clone();
        let server = sections.entry("server").or_default();
        server.entry("bind").or_insert_with(|| quoted("127.0.0.1:0"));
        let telemetry = sections.entry("telemetry").or_default();
        telemetry.entry("format").or_insert_with(|| quoted("json"));
        // Seconds at each of a hundred starts, for costs that no result depends on.
        sections.entry("scheduler").or_default().entry("calibrate").or_insert_with(|| quoted("off"));
        let model = sections.entry("model").or_default();
        match self.model {
            ModelKind::Demo => model.entry("path").or_insert_with(|| quoted(&demo_model().to_string_lossy())),
            ModelKind::Tiny => model.entry("dummy").or_insert_with(|| quoted("tiny")),
        };
        let mut toml = String::new();
        for (section, keys) in &sections {
            writeln!(toml, "[{section}]").expect("writing to a string cannot fail");
            for (key, value) in keys {
                writeln!(toml, "{key} = {value}").expect("writing to a string cannot fail");
            }
        }
        self.push_tiers(&mut toml);
        for (name, key) in &self.tenants {
            toml.push_str(&format!("[[tenants]]\nname = {}\nkeys = [{}]\n", quoted(name), quoted(key)));
        }
        toml
    }

    fn push_tiers(&self, toml: &mut String) {
        let tiers = [("device", self.device_chunks), ("dram", self.dram_chunks), ("rocks", self.rocks_chunks)];
        for (kind, chunks) in tiers.into_iter().filter(|(_, chunks)| *chunks > 0) {
            let bytes = self.tier_bytes(chunks);
            toml.push_str(&format!("[[tiers]]\nkind = \"{kind}\"\ncapacity = \"{bytes} B\"\n"));
            if kind == "rocks" {
                toml.push_str(&format!("write_buffer = \"{} B\"\n", self.write_buffer_bytes));
                toml.push_str(&format!("turns_capacity = \"{} B\"\n", self.turns_bytes));
                if let Some(ttl) = self.turn_ttl {
                    toml.push_str(&format!("turn_ttl = {}\n", quoted(ttl)));
                }
                if let Some(folder) = &self.rocks_folder {
                    toml.push_str(&format!("path = {}\n", quoted(&folder.to_string_lossy())));
                }
            }
        }
    }
}

/// A TOML basic string. The texts here hold neither quotes nor control characters.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\"))
}

/// `make test` fetches it; tests never download anything.
fn demo_model() -> PathBuf {
    let path = keepsake_config::data_dir().join("models").join("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.is_file(), "the demo model is missing at {}: run `make test`, which fetches it", path.display());
    path
}
