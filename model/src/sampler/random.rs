//! Random numbers without state.

/// A number in [0, 1) that depends on `seed` and `position` alone.
///
/// The SplitMix64 finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014) over a counter;
/// the seed is mixed first so that neighbouring seeds do not give shifted copies of one sequence.
pub(super) fn unit(seed: u64, position: u64) -> f64 {
    const GOLDEN_GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;
    let start = mix(seed.wrapping_add(GOLDEN_GAMMA));
    let counter = position.wrapping_add(1).wrapping_mul(GOLDEN_GAMMA);
    let bits = mix(start.wrapping_add(counter));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
