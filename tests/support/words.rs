//! Prompts that are the same in every run: words from a seeded generator.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const SYLLABLES: [&str; 24] = [
    "zor", "vax", "qui", "bro", "lan", "mek", "tuv", "pli", "gra", "nox", "fen", "dru", "kal", "sim", "wob", "yar",
    "hux", "jep", "cro", "thi", "ruz", "bex", "olm", "iva",
];

const PLAIN: [&str; 40] = [
    "river", "stone", "garden", "winter", "paper", "music", "window", "bridge", "coffee", "forest", "letter", "summer",
    "market", "silver", "orange", "castle", "island", "doctor", "engine", "flower", "mirror", "pocket", "rabbit",
    "school", "ticket", "valley", "yellow", "artist", "basket", "candle", "dragon", "empire", "finger", "guitar",
    "hammer", "jacket", "kitten", "ladder", "magnet", "needle",
];

pub fn seeded(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

/// A word that no model says by itself and that differs from every other index's.
pub fn canary(index: usize) -> String {
    let count = SYLLABLES.len();
    [index % count, index / count % count, (7 * index + 3) % count].map(|i| SYLLABLES[i]).concat()
}

/// Ordinary words, separated by spaces.
pub fn plain(random: &mut StdRng, num_words: usize) -> String {
    let words: Vec<&str> = (0..num_words).map(|_| PLAIN[random.random_range(0..PLAIN.len())]).collect();
    words.join(" ")
}

/// Token ids that stand for ordinary pieces of text in both models' vocabularies.
pub fn tokens(random: &mut StdRng, count: usize) -> Vec<u32> {
    (0..count).map(|_| random.random_range(260..500)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canaries_differ_and_none_holds_another() {
        let canaries: Vec<String> = (0..200).map(canary).collect();
        for (i, one) in canaries.iter().enumerate() {
            for (j, other) in canaries.iter().enumerate() {
                assert!(i == j || !one.contains(other.as_str()), "{one} holds {other}");
            }
        }
    }
}
