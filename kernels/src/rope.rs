//! Rotary position embedding: frequencies (with the scalings in use) and a table of angles.

use crate::error::{ensure, Result};

/// Which elements of a head form a rotated pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Elements 2i and 2i+1: the llama architecture's GGUF files, whose Q and K weights are permuted for it.
    Interleaved,
    /// Elements i and i + half: Hugging Face checkpoints ("neox").
    HalfSplit,
}

/// How frequencies are changed for contexts longer than the training's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    None,
    /// Positions divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, smooth between.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_context: f64,
    },
    /// YaRN (arXiv 2309.00071). `attention_factor` scales cos and sin; `None`: 0.1 ln(factor) + 1.
    Yarn {
        factor: f64,
        beta_fast: f64,
        beta_slow: f64,
        original_context: f64,
        attention_factor: Option<f64>,
    },
}

/// What a [`RopeTable`] is made of.
#[derive(Debug, Clone)]
pub struct RopeSpec {
    pub style: RopeStyle,
    /// Leading elements of a head that rotate; the rest pass through. Even.
    pub rotary_dim: usize,
    pub theta: f64,
    pub scaling: RopeScaling,
    /// Divisors of the frequencies, one a pair (GGUF's `rope_freqs.weight`).
    pub freq_factors: Option<Vec<f32>>,
    /// Positions `0..max_positions` can be rotated.
    pub max_positions: usize,
}

/// Positions of the fine table; the coarse one has one entry for each such stretch.
const FINE: usize = 256;

/// Angles by position: cos and sin of `position * frequency` come from a coarse and a fine f64 table by the addition
/// theorem, so the table is small at any context and its error far below f32's.
#[derive(Debug, Clone)]
pub struct RopeTable {
    style: RopeStyle,
    half: usize,
    max_positions: usize,
    scale: f64,
    /// `[position % FINE][cos.., sin..]`, `half` each.
    fine: Vec<f64>,
    /// `[position / FINE][cos.., sin..]`
    coarse: Vec<f64>,
}

impl RopeSpec {
    /// The frequency of each pair, in radians a position.
    pub fn frequencies(&self) -> Vec<f64> {
        let dim = self.rotary_dim as f64;
        (0..self.rotary_dim / 2)
            .map(|pair| {
                let base = self.theta.powf(-2.0 * pair as f64 / dim);
                let factor = self.freq_factors.as_ref().map_or(1.0, |f| f64::from(f[pair]));
                self.scale_frequency(base / factor, pair as f64)
            })
            .collect()
    }

    /// The factor on cos and sin.
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor: Some(given), .. } => given,
            RopeScaling::Yarn { factor, .. } if factor > 1.0 => 0.1 * factor.ln() + 1.0,
            _ => 1.0,
        }
    }

    fn scale_frequency(&self, frequency: f64, pair: f64) -> f64 {
        let wavelength = std::f64::consts::TAU / frequency;
        match self.scaling {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                if wavelength > original_context / low_freq_factor {
                    frequency / factor
                } else if wavelength < original_context / high_freq_factor {
                    frequency
                } else {
                    let smooth =
                        (original_context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, .. } => {
                // The pair whose frequency turns `rotations` times over the original context.
                let pair_of = |rotations: f64| {
                    self.rotary_dim as f64 * (original_context / (rotations * std::f64::consts::TAU)).ln()
                        / (2.0 * self.theta.ln())
                };
                let low = pair_of(beta_fast).floor().max(0.0);
                let high = pair_of(beta_slow).ceil().min(self.rotary_dim as f64 - 1.0);
                let ramp = ((pair - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                frequency / factor * ramp + frequency * (1.0 - ramp)
            }
        }
    }
}

impl RopeTable {
    pub fn new(spec: &RopeSpec) -> Result<RopeTable> {
        let half = spec.rotary_dim / 2;
        ensure!(
            "RopeTable",
            spec.rotary_dim > 0 && spec.rotary_dim.is_multiple_of(2),
            "rotary_dim {}",
            spec.rotary_dim
        );
        ensure!("RopeTable", spec.theta > 1.0 && spec.theta.is_finite(), "theta {}", spec.theta);
        ensure!("RopeTable", spec.max_positions <= 1 << 28, "max_positions {}", spec.max_positions);
        if let Some(factors) = &spec.freq_factors {
            ensure!("RopeTable", factors.len() == half, "{} factors for {half} pairs", factors.len());
        }
        let frequencies = spec.frequencies();
        let usable = frequencies.iter().all(|f| f.is_finite() && *f >= 0.0) && spec.attention_factor().is_finite();
        ensure!("RopeTable", usable, "frequencies of {:?} are not finite", spec.scaling);
        let table = |step: usize, count: usize| {
            let mut values = Vec::with_capacity(count * 2 * half);
            for index in 0..count {
                let angles = frequencies.iter().map(|f| f * (index * step) as f64);
                values.extend(angles.clone().map(f64::cos));
                values.extend(angles.map(f64::sin));
            }
            values
        };
        Ok(RopeTable {
            style: spec.style,
            half,
            max_positions: spec.max_positions,
            scale: spec.attention_factor(),
            fine: table(1, FINE),
            coarse: table(FINE, spec.max_positions.div_ceil(FINE)),
        })
    }

    /// Rotates nothing: for models whose positions are learned.
    pub fn identity(max_positions: usize) -> RopeTable {
        let style = RopeStyle::HalfSplit;
        RopeTable { style, half: 0, max_positions, scale: 1.0, fine: Vec::new(), coarse: Vec::new() }
    }

    pub fn style(&self) -> RopeStyle {
        self.style
    }

    /// Rotated elements of a head.
    pub fn rotary_dim(&self) -> usize {
        2 * self.half
    }

    pub fn max_positions(&self) -> usize {
        self.max_positions
    }

    /// cos and sin of every pair at a position below `max_positions`.
    pub(crate) fn angles(&self, position: usize, cos: &mut [f32], sin: &mut [f32]) {
        let half = self.half;
        let (fine, coarse) = (position % FINE * 2 * half, position / FINE * 2 * half);
        let (fine_cos, fine_sin) = self.fine[fine..fine + 2 * half].split_at(half);
        let (coarse_cos, coarse_sin) = self.coarse[coarse..coarse + 2 * half].split_at(half);
        for i in 0..half {
            cos[i] = (self.scale * (coarse_cos[i] * fine_cos[i] - coarse_sin[i] * fine_sin[i])) as f32;
            sin[i] = (self.scale * (coarse_sin[i] * fine_cos[i] + coarse_cos[i] * fine_sin[i])) as f32;
        }
    }
}
