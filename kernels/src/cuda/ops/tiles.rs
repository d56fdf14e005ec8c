//! How prefill is cut into tiles, on the host, once a step.

use crate::kv::Entry;

/// Words of a tile on the device.
pub(super) const TILE_WORDS: usize = 8;
/// Keys that the kernel takes at a time.
const STEP_KEYS: usize = 128;
/// What a tile, and a part of a split tile, cost beside their steps, in steps (measured on an H200).
const TILE_COST: usize = 2;
const PART_COST: usize = 4;
/// Splits that are tried.
const SPLITS: [usize; 9] = [1, 2, 3, 4, 6, 8, 12, 16, 24];
/// A part has at least as many steps.
const MIN_PART_STEPS: usize = 4;

/// What the cut depends on besides the entries.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cut {
    /// Query heads a K/V head.
    pub group: usize,
    pub num_kv_heads: usize,
    /// Packed rows (query row, head of the group) of a tile.
    pub tile_rows: usize,
    /// Parts of split tiles that scratch memory holds; 0: the kernel cannot split.
    pub max_slots: usize,
    pub num_multiprocessors: usize,
}

struct Tile<'a> {
    entry: &'a Entry,
    first: usize,
    num_rows: usize,
    keys: usize,
}

impl Cut {
    /// Tiles of the entries, most keys first, flat: first_row, first_position, first_block, first, num_rows, part, parts, slot.
    pub(super) fn tiles<'a>(&self, entries: impl Iterator<Item = &'a Entry>) -> Vec<u32> {
        let mut tiles = Vec::new();
        for entry in entries {
            let packed = entry.num_rows as usize * self.group;
            for first in (0..packed).step_by(self.tile_rows) {
                let num_rows = self.tile_rows.min(packed - first);
                let keys = entry.first_position as usize + (first + num_rows - 1) / self.group + 1;
                tiles.push(Tile { entry, first, num_rows, keys });
            }
        }
        let part_steps = self.part_steps(&tiles);
        let mut words = Vec::new();
        let mut slot = 0;
        for tile in &tiles {
            let parts = tile.keys.div_ceil(STEP_KEYS).div_ceil(part_steps);
            for part in 0..parts {
                let Entry { first_row, first_position, first_block, .. } = *tile.entry;
                let numbers = [tile.first, tile.num_rows, part, parts, slot].map(|number| number as u32);
                let [first, num_rows, part, parts, slot] = numbers;
                let tile_words = [first_row, first_position, first_block, first, num_rows, part, parts, slot];
                words.push((tile.keys / parts as usize, tile_words));
            }
            slot += if parts > 1 { parts } else { 0 };
        }
        // Stable: equal tiles stay in row order.
        words.sort_by_key(|(keys, _)| std::cmp::Reverse(*keys));
        words.into_iter().flat_map(|(_, words)| words).collect()
    }

    /// Steps that a part has at most: few tiles are split until they fill the device, by estimated time.
    fn part_steps(&self, tiles: &[Tile]) -> usize {
        let longest = tiles.iter().map(|tile| tile.keys.div_ceil(STEP_KEYS)).max().unwrap_or(1);
        if self.max_slots == 0 || tiles.len() * self.num_kv_heads >= self.num_multiprocessors {
            return longest;
        }
        let candidates = SPLITS.iter().map(|split| longest.div_ceil(*split).max(MIN_PART_STEPS));
        let estimates = candidates.filter_map(|limit| Some((limit, self.estimate(tiles, limit)?)));
        let best = estimates.min_by(|(_, a), (_, b)| a.total_cmp(b));
        best.map_or(longest, |(limit, _)| limit)
    }

    /// Steps until the last block is done; `None` if the parts do not fit.
    fn estimate(&self, tiles: &[Tile], limit: usize) -> Option<f64> {
        let (mut sum, mut count, mut largest, mut slots) = (0, 0, 0, 0);
        for tile in tiles {
            let steps = tile.keys.div_ceil(STEP_KEYS);
            let parts = steps.div_ceil(limit);
            let cost = steps.div_ceil(parts) + if parts > 1 { PART_COST } else { TILE_COST };
            sum += cost * parts;
            count += parts;
            largest = largest.max(cost);
            slots += if parts > 1 { parts } else { 0 };
        }
        let mean = sum as f64 / count.max(1) as f64;
        let rounds = (count * self.num_kv_heads).div_ceil(self.num_multiprocessors);
        (slots <= self.max_slots).then_some(rounds as f64 * mean + largest as f64 - mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(first_row: u32, num_rows: u32, first_position: u32) -> Entry {
        Entry { first_row, num_rows, first_position, first_block: 3, num_blocks: 100 }
    }

    /// Every packed row of every entry lies in one tile, every part is there once, and no two parts share a slot.
    #[test]
    fn tiles_cover_everything_once() {
        let entries = [entry(0, 300, 0), entry(300, 7, 5000), entry(307, 1, 90), entry(308, 129, 1000)];
        for max_slots in [0, 5, 500] {
            let cut = Cut { group: 4, num_kv_heads: 2, tile_rows: 128, max_slots, num_multiprocessors: 132 };
            let words = cut.tiles(entries.iter());
            let mut covered = vec![0.0f64; 437 * 4];
            let mut slots = Vec::new();
            for tile in words.chunks(TILE_WORDS) {
                let [first_row, _, _, first, num_rows, part, parts, slot] = tile.try_into().expect("eight words");
                assert!(part < parts && num_rows <= 128);
                assert!(max_slots > 0 || parts == 1);
                if parts > 1 {
                    slots.push(slot + part);
                }
                let start = (first_row * 4 + first) as usize;
                covered[start..start + num_rows as usize].iter_mut().for_each(|c| *c += 1.0 / f64::from(parts));
            }
            assert!(covered.iter().all(|c| (c - 1.0).abs() < 1e-9));
            let count = slots.len();
            slots.sort_unstable();
            slots.dedup();
            assert_eq!(slots.len(), count);
            assert!(slots.iter().all(|&slot| (slot as usize) < max_slots));
        }
    }
}
