//! Attention and the K/V write: against the reference, and bit by bit across splits, holes, block orders and teams.

#![allow(clippy::single_range_in_vec_init)] // a step is a list of ranges, often of one

mod support;

use keepsake_kernels::{
    ops, BlockId, Buffer, Entry, Isa, KvLayout, KvPool, RopeScaling, RopeSpec, RopeStyle, RopeTable,
};
use proptest::prelude::*;
use rand::seq::SliceRandom;
use support::*;

#[derive(Debug, Clone)]
struct Shape {
    layout: KvLayout,
    num_heads: usize,
    rotary_dim: usize,
    style: RopeStyle,
}

impl Shape {
    fn new(num_kv_heads: usize, group: usize, head_dim: usize, chunk_tokens: usize) -> Shape {
        let layout = KvLayout { num_layers: 2, num_kv_heads, head_dim, chunk_tokens };
        Shape { layout, num_heads: num_kv_heads * group, rotary_dim: head_dim, style: RopeStyle::Interleaved }
    }

    fn q_len(&self) -> usize {
        self.num_heads * self.layout.head_dim
    }
}

/// Random rows of one sequence: q, k, v by position.
struct Sequence {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Sequence {
    fn random(seed: u64, shape: &Shape, len: usize) -> Sequence {
        let mut rng = rng(seed);
        let kv = len * shape.layout.token_len();
        let (q, k) = (random(&mut rng, len * shape.q_len(), 2.0), random(&mut rng, kv, 2.0));
        Sequence { q, k, v: random(&mut rng, kv, 1.0) }
    }
}

/// A step: for each sequence, ranges of positions that are computed together.
type Step = Vec<(usize, Vec<std::ops::Range<usize>>)>;

/// Runs steps over sequences and returns every position's output, `[sequence][position][head][dim]`.
fn run(isa: Isa, threads: usize, shape: &Shape, sequences: &[Sequence], steps: &[Step], seed: u64) -> Vec<Vec<f32>> {
    let device = device(isa, threads);
    let layout = shape.layout;
    let (q_len, kv_len) = (shape.q_len(), layout.token_len());
    let lens: Vec<usize> = sequences.iter().map(|s| s.v.len() / kv_len).collect();
    let blocks_of: Vec<usize> = lens.iter().map(|len| len.div_ceil(layout.chunk_tokens)).collect();
    let total_blocks = blocks_of.iter().sum::<usize>() + 3;
    let pool = KvPool::new(&device, layout, total_blocks).expect("memory");
    // What was there before must not matter: not-a-numbers everywhere.
    let stale = vec![0xff; layout.layer_chunk_bytes()];
    for block in 0..total_blocks {
        pool.write_layer(BlockId(block as u32), 1, &stale).expect("in range");
    }
    let mut order: Vec<BlockId> = (0..total_blocks as u32).map(BlockId).collect();
    order.shuffle(&mut rng(seed));
    let mut tables = Vec::new();
    for count in blocks_of {
        tables.push(order.split_off(order.len() - count));
    }
    let table = RopeTable::new(&RopeSpec {
        style: shape.style,
        rotary_dim: shape.rotary_dim,
        theta: 10_000.0,
        scaling: RopeScaling::None,
        freq_factors: None,
        max_positions: 4096,
    })
    .expect("a valid spec");
    let mut outputs: Vec<Vec<f32>> = lens.iter().map(|len| vec![f32::NAN; len * q_len]).collect();
    for step in steps {
        let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
        let (mut positions, mut slots, mut entries, mut block_table) = (vec![], vec![], vec![], vec![]);
        for (sequence, ranges) in step {
            let first_block = block_table.len() as u32;
            block_table.extend_from_slice(&tables[*sequence]);
            for range in ranges {
                entries.push(Entry {
                    first_row: positions.len() as u32,
                    num_rows: range.len() as u32,
                    first_position: range.start as u32,
                    first_block,
                    num_blocks: tables[*sequence].len() as u32,
                });
                for position in range.clone() {
                    let rows = &sequences[*sequence];
                    q.extend_from_slice(&rows.q[position * q_len..(position + 1) * q_len]);
                    k.extend_from_slice(&rows.k[position * kv_len..(position + 1) * kv_len]);
                    v.extend_from_slice(&rows.v[position * kv_len..(position + 1) * kv_len]);
                    let block = tables[*sequence][position / layout.chunk_tokens].0;
                    positions.push(position as u32);
                    slots.push(block * layout.chunk_tokens as u32 + (position % layout.chunk_tokens) as u32);
                }
            }
        }
        let q = Buffer::from_slice(&device, &q).expect("memory");
        let k = Buffer::from_slice(&device, &k).expect("memory");
        let v = Buffer::from_slice(&device, &v).expect("memory");
        let out = Buffer::zeros(&device, q.len()).expect("memory");
        device.run(|w| {
            ops::rope_and_write(w, &q, &k, &v, &positions, &slots, &table, &pool, 1, shape.num_heads).expect("fits");
            let scale = 1.0 / (layout.head_dim as f32).sqrt();
            ops::attention(w, &q, &pool, 1, &entries, &block_table, shape.num_heads, scale, &out).expect("fits");
        });
        let out = all(&out);
        let mut row = 0;
        for (sequence, ranges) in step {
            for position in ranges.iter().cloned().flatten() {
                outputs[*sequence][position * q_len..(position + 1) * q_len]
                    .copy_from_slice(&out[row * q_len..(row + 1) * q_len]);
                row += 1;
            }
        }
    }
    outputs
}

fn prefill(len: usize) -> Vec<Step> {
    vec![vec![(0, vec![0..len])]]
}

fn matches_reference(isa: Isa) {
    for (num_kv_heads, group, head_dim, chunk_tokens, len) in [
        (1, 1, 16, 32, 1),
        (3, 3, 64, 32, 75),
        (2, 4, 80, 16, 40),
        (2, 2, 24, 8, 33),
        (1, 6, 128, 32, 300),
        (2, 1, 20, 5, 9),
    ] {
        let mut shape = Shape::new(num_kv_heads, group, head_dim, chunk_tokens);
        for style in [RopeStyle::Interleaved, RopeStyle::HalfSplit] {
            shape.style = style;
            shape.rotary_dim = if len > 50 { head_dim } else { head_dim / 4 * 2 };
            let sequence = [Sequence::random(7, &shape, len)];
            let want = run(Isa::Reference, 1, &shape, &sequence, &prefill(len), 1);
            let got = run(isa, 2, &shape, &sequence, &prefill(len), 2);
            let error = relative_error(&got[0], &want[0]);
            assert!(error < 2e-3, "{shape:?}: {error}");
        }
    }
}
test_device!(reference, matches_reference);

fn decode_equals_prefill(isa: Isa) {
    let shape = Shape::new(3, 3, 64, 32);
    let len = 290;
    let sequence = [Sequence::random(8, &shape, len)];
    let want = run(isa, 1, &shape, &sequence, &prefill(len), 1);
    let one_by_one: Vec<Step> = (0..len).map(|p| vec![(0, vec![p..p + 1])]).collect();
    let got = run(isa, 2, &shape, &sequence, &one_by_one, 2);
    assert_eq!(bits(&got[0]), bits(&want[0]));
}
test_device!(one_by_one, decode_equals_prefill);

#[test]
fn all_instruction_sets_give_the_same_bits() {
    for (num_kv_heads, group, head_dim) in [(2, 3, 64), (1, 2, 24), (1, 5, 128)] {
        let shape = Shape::new(num_kv_heads, group, head_dim, 32);
        let sequence = [Sequence::random(9, &shape, 270)];
        let steps = vec![vec![(0, vec![0..268])], vec![(0, vec![268..270])]];
        let want = run(Isa::Portable, 1, &shape, &sequence, &steps, 1);
        for isa in fast_isas() {
            let got = run(isa, 2, &shape, &sequence, &steps, 3);
            assert_eq!(bits(&got[0]), bits(&want[0]), "{isa}");
        }
    }
}

/// Cuts `0..len` at random places.
fn splits(len: usize) -> impl Strategy<Value = Vec<std::ops::Range<usize>>> {
    proptest::collection::btree_set(1..len, 0..6).prop_map(move |cuts| {
        let mut edges: Vec<usize> = cuts.into_iter().collect();
        edges.insert(0, 0);
        edges.push(len);
        edges.windows(2).map(|w| w[0]..w[1]).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Two sequences, each prefilled in random pieces that share steps; then some pieces are recomputed as holes, several
    /// in one step. Every row's bits are those of its sequence alone in one piece.
    #[test]
    fn any_batch_gives_the_same_bits(
        a in splits(140),
        b in splits(77),
        holes in proptest::collection::vec(any::<bool>(), 8),
        threads in 1usize..4,
        chunk_tokens in prop_oneof![Just(32usize), Just(16), Just(10)],
        kv_heads in 1usize..3,
        seed in any::<u64>(),
    ) {
        let shape = Shape::new(kv_heads, 2, 32, chunk_tokens);
        let sequences = [Sequence::random(seed, &shape, 140), Sequence::random(seed ^ 1, &shape, 77)];
        let isa = Isa::detect();
        let alone = run(isa, 1, &shape, &sequences, &[vec![(0, vec![0..140])], vec![(1, vec![0..77])]], seed);
        let mut steps: Vec<Step> = Vec::new();
        for i in 0..a.len().max(b.len()) {
            let mut step = Vec::new();
            step.extend(a.get(i).map(|range| (0, vec![range.clone()])));
            step.extend(b.get(i).map(|range| (1, vec![range.clone()])));
            steps.push(step);
        }
        let holes_of = |ranges: &[std::ops::Range<usize>]| -> Vec<std::ops::Range<usize>> {
            ranges.iter().zip(&holes).filter(|(_, hole)| **hole).map(|(range, _)| range.clone()).collect()
        };
        steps.push(vec![(1, holes_of(&b)), (0, holes_of(&a))]);
        let batched = run(isa, threads, &shape, &sequences, &steps, seed ^ 2);
        for (sequence, (got, want)) in batched.iter().zip(&alone).enumerate() {
            prop_assert_eq!(bits(got), bits(want), "sequence {}", sequence);
        }
    }
}

#[test]
fn hostile_shapes_are_errors() {
    let device = device(Isa::detect(), 2);
    let layout = KvLayout { num_layers: 1, num_kv_heads: 2, head_dim: 16, chunk_tokens: 4 };
    let pool = KvPool::new(&device, layout, 3).expect("memory");
    let q = Buffer::zeros(&device, 4 * 64).expect("memory");
    let out = Buffer::zeros(&device, 4 * 64).expect("memory");
    let good = Entry { first_row: 0, num_rows: 4, first_position: 3, first_block: 0, num_blocks: 2 };
    let blocks = [BlockId(2), BlockId(0)];
    let attend = |entry: Entry, blocks: &[BlockId], heads: usize, layer: usize| {
        device.run(|w| ops::attention(w, &q, &pool, layer, &[entry], blocks, heads, 0.25, &out)).is_ok()
    };
    assert!(attend(good, &blocks, 4, 0));
    assert!(attend(Entry { num_rows: 0, ..good }, &blocks, 4, 0), "nothing to do is fine");
    assert!(!attend(good, &blocks, 3, 0), "heads do not group");
    assert!(!attend(good, &blocks, 0, 0), "no heads");
    assert!(!attend(good, &blocks, 4, 1), "no such layer");
    assert!(!attend(good, &[BlockId(2), BlockId(3)], 4, 0), "no such block");
    assert!(!attend(good, &blocks[..1], 4, 0), "block table too short");
    assert!(!attend(Entry { first_position: 5, ..good }, &blocks, 4, 0), "more keys than blocks hold");
    assert!(!attend(Entry { num_rows: 5, ..good }, &blocks, 4, 0), "more rows than q");
    let huge = u32::MAX;
    for entry in [
        Entry { first_row: huge, ..good },
        Entry { first_position: huge, ..good },
        Entry { first_block: huge, ..good },
        Entry { num_blocks: huge, ..good },
        Entry { first_row: huge, num_rows: huge, first_position: huge, first_block: huge, num_blocks: huge },
    ] {
        assert!(!attend(entry, &blocks, 4, 0), "{entry:?}");
    }
    let spec = RopeSpec {
        style: RopeStyle::HalfSplit,
        rotary_dim: 16,
        theta: 1e4,
        scaling: RopeScaling::None,
        freq_factors: None,
        max_positions: 100,
    };
    let table = RopeTable::new(&spec).expect("a valid spec");
    let write = |positions: &[u32], slots: &[u32]| {
        device.run(|w| ops::rope_and_write(w, &q, &q, &q, positions, slots, &table, &pool, 0, 4)).is_ok()
    };
    assert!(!write(&[0], &[12]), "slot behind the pool");
    assert!(!write(&[100], &[0]), "position behind the table");
    assert!(!write(&[0, 1], &[0]), "a slot is missing");
    assert!(!write(&[0; 9], &[0; 9]), "more rows than k");
    assert!(RopeTable::new(&RopeSpec { rotary_dim: 15, ..spec.clone() }).is_err());
    assert!(RopeTable::new(&RopeSpec { freq_factors: Some(vec![1.0; 7]), ..spec.clone() }).is_err());
    assert!(RopeTable::new(&RopeSpec { freq_factors: Some(vec![0.0; 8]), ..spec.clone() }).is_err());
    assert!(RopeTable::new(&RopeSpec { theta: f64::NAN, ..spec }).is_err());
}
