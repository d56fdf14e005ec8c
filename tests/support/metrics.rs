//! `/metrics`, parsed.

use std::collections::BTreeMap;

/// One scrape: series with their labels, as the text format writes them, to values.
#[derive(Clone, Debug, PartialEq)]
pub struct Metrics {
    series: BTreeMap<String, f64>,
}

impl Metrics {
    pub fn parse(text: &str) -> Self {
        let samples = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let series = samples.map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("not a sample: {line:?}"));
            (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("not a number: {line:?}")))
        });
        Self { series: series.collect() }
    }

    /// A series that must exist, such as `keepsake_blocks{state="free"}`.
    pub fn get(&self, series: &str) -> f64 {
        let value = self.series.get(series).copied();
        value.unwrap_or_else(|| panic!("no series {series} among {:?}", self.series.keys().collect::<Vec<_>>()))
    }

    /// A count that must exist.
    pub fn count(&self, series: &str) -> u64 {
        let value = self.get(series);
        assert!(value >= 0.0 && value.fract() == 0.0, "{series} = {value} is not a count");
        value as u64
    }

    /// All series of a family that carry this label, added up; 0 without any.
    pub fn sum(&self, family: &str, label: &str) -> f64 {
        let prefix = format!("{family}{{");
        let of_family = self.series.iter().filter(|(series, _)| series.starts_with(&prefix) && series.contains(label));
        of_family.map(|(_, value)| value).sum()
    }

    /// Input tokens by where their K/V came from: a tier, `recomputed` or `new`.
    pub fn tokens(&self, source: &str) -> u64 {
        self.count(&format!("keepsake_tokens_total{{source=\"{source}\"}}"))
    }

    /// Device blocks: `free`, `clean`, `used` or `total`.
    pub fn blocks(&self, state: &str) -> u64 {
        self.count(&format!("keepsake_blocks{{state=\"{state}\"}}"))
    }

    pub fn tier(&self, what: &str, tier: &str) -> u64 {
        self.count(&format!("keepsake_tier_{what}{{tier=\"{tier}\"}}"))
    }

    /// Nothing runs or waits, and nothing holds a chunk: neither a sequence nor a copy.
    pub(crate) fn is_quiet(&self) -> bool {
        let busy = ["keepsake_num_requests_running", "keepsake_num_requests_waiting", "keepsake_pins"];
        busy.iter().all(|series| self.get(series) == 0.0)
    }

    /// Between the two scrapes no chunk moved and no block changed hands.
    pub(crate) fn same_work(&self, other: &Self) -> bool {
        let families = ["keepsake_moves_total", "keepsake_blocks", "keepsake_generation_tokens_total"];
        let work = |metrics: &Self| -> Vec<(String, f64)> {
            let all = metrics.series.iter().filter(|(series, _)| families.iter().any(|f| series.starts_with(f)));
            all.map(|(series, value)| (series.clone(), *value)).collect()
        };
        work(self) == work(other)
    }
}
