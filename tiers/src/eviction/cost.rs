//! What computing K/V costs, as a function of the context length.

use serde::{Deserialize, Serialize};

/// Seconds of some work by the context length it attends to: measured points, straight lines between them, the last line
/// continued behind them and the first value kept before them.
///
/// Pensieve (EuroSys'25, section 4.3) measures attention at power-of-two lengths and interpolates in the same way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<(u32, f64)>", into = "Vec<(u32, f64)>")]
pub struct CostCurve {
    points: Vec<(u32, f64)>,
}

/// Points that make no curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a cost curve needs points of ascending length and of positive, finite seconds")]
pub struct InvalidCurve;

impl CostCurve {
    /// `points`: context length in tokens, seconds; ascending lengths, at least one.
    pub fn new(points: Vec<(u32, f64)>) -> Result<Self, InvalidCurve> {
        let ascending = points.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let positive = points.iter().all(|(_, seconds)| *seconds > 0.0 && seconds.is_finite());
        match !points.is_empty() && ascending && positive {
            true => Ok(Self { points }),
            false => Err(InvalidCurve),
        }
    }

    /// The same at every length.
    pub fn flat(seconds: f64) -> Result<Self, InvalidCurve> {
        Self::new(vec![(1, seconds)])
    }

    /// Seconds at a context of `tokens`; never negative, however noisy the measurement was.
    pub fn at(&self, tokens: u32) -> f64 {
        let above = self.points.partition_point(|(length, _)| *length < tokens);
        let (low, high) = match (above, self.points.len()) {
            (0, _) | (_, 1) => return self.points[0].1,
            (above, len) if above == len => (self.points[len - 2], self.points[len - 1]),
            (above, _) => (self.points[above - 1], self.points[above]),
        };
        let slope = (high.1 - low.1) / f64::from(high.0 - low.0);
        (low.1 + slope * f64::from(tokens.saturating_sub(low.0))).max(low.1.min(high.1))
    }

    pub fn points(&self) -> &[(u32, f64)] {
        &self.points
    }
}

impl TryFrom<Vec<(u32, f64)>> for CostCurve {
    type Error = InvalidCurve;

    fn try_from(points: Vec<(u32, f64)>) -> Result<Self, InvalidCurve> {
        Self::new(points)
    }
}

impl From<CostCurve> for Vec<(u32, f64)> {
    fn from(curve: CostCurve) -> Self {
        curve.points
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_between_points_and_beyond_the_last() {
        let curve = CostCurve::new(vec![(100, 1.0), (200, 3.0), (400, 4.0)]).unwrap();
        let at = [1, 100, 150, 200, 300, 400, 800].map(|tokens| curve.at(tokens));
        assert_eq!(at, [1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 6.0]);
        assert_eq!(CostCurve::flat(2.0).unwrap().at(9_999), 2.0);
        // Noise must not make a long context free.
        let falling = CostCurve::new(vec![(100, 1.0), (200, 0.9)]).unwrap();
        assert_eq!(falling.at(10_000), 0.9);
    }

    #[test]
    fn refuses_what_is_no_curve() {
        for points in [vec![], vec![(2, 1.0), (1, 1.0)], vec![(1, 0.0)], vec![(1, f64::NAN)]] {
            assert_eq!(CostCurve::new(points), Err(InvalidCurve));
        }
    }
}
