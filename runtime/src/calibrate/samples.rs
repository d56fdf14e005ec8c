//! Statistics of repeated measurements.

/// At least one sample; of an even number, the greater of the middle two.
pub(super) fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}
