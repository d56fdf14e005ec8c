//! The K/V layout's offsets, byte by byte, and the pool's copies.

mod support;

use half::f16;
use keepsake_kernels::{ops, BlockId, Buffer, Isa, KvLayout, KvPool, RopeScaling, RopeSpec, RopeStyle, RopeTable};
use support::*;

/// Two K/V heads and chunks of two tokens: shapes that a wrong layout could not tell apart by their sizes.
const LAYOUT: KvLayout = KvLayout { num_layers: 3, num_kv_heads: 2, head_dim: 2, chunk_tokens: 2 };

#[test]
fn sizes() {
    assert_eq!(LAYOUT.layer_chunk_bytes(), 2 * 2 * 2 * 2 * 2);
    assert_eq!(LAYOUT.chunk_bytes(), 3 * 32);
    assert_eq!(LAYOUT.layer_range_in_chunk(2), 64..96);
    let pool = KvPool::new(&device(Isa::detect(), 1), LAYOUT, 5).expect("memory");
    assert_eq!(pool.bytes(), 5 * LAYOUT.chunk_bytes());
    assert_eq!(pool.num_blocks(), 5);
}

/// The write of position p, head h, element e lands at `[K|V][token][head][element]` of its block, and nowhere else.
#[test]
fn written_elements_lie_where_the_layout_says() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let device = device(isa, 2);
        let pool = KvPool::new(&device, LAYOUT, 4).expect("memory");
        let table = RopeTable::new(&RopeSpec {
            style: RopeStyle::Interleaved,
            rotary_dim: 2,
            theta: 10_000.0,
            scaling: RopeScaling::None,
            freq_factors: None,
            max_positions: 8,
        })
        .expect("a valid spec");
        // Position 0 is not rotated, so K is stored as it came.
        let k: Vec<f32> = (0..12).map(|i| 100.0 + i as f32).collect();
        let v: Vec<f32> = (0..12).map(|i| 200.0 + i as f32).collect();
        let q = Buffer::zeros(&device, 3 * 8).expect("memory");
        let (k, v) =
            (Buffer::from_slice(&device, &k).expect("memory"), Buffer::from_slice(&device, &v).expect("memory"));
        // Slots: block 2 token 1, block 0 token 0, block 2 token 0.
        device.run(|w| {
            ops::rope_and_write(w, &q, &k, &v, &[0, 0, 0], &[5, 0, 4], &table, &pool, 1, 4).expect("fits");
        });
        let mut layer = vec![0; LAYOUT.layer_chunk_bytes()];
        let read = |block: u32, layer_index: usize, to: &mut [u8]| -> Vec<f32> {
            pool.read_layer(BlockId(block), layer_index, to).expect("in range");
            to.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
        };
        let rows = |first: f32, second: f32| -> Vec<f32> {
            [100.0, 200.0]
                .into_iter()
                .flat_map(|base| [first, second].map(|row| (base, row)))
                .flat_map(|(base, row)| (0..4).map(move |e| if row < 0.0 { 0.0 } else { base + row * 4.0 + e as f32 }))
                .collect()
        };
        assert_eq!(read(2, 1, &mut layer), rows(2.0, 0.0), "{isa}: block 2 holds rows 2 and 0");
        assert_eq!(read(0, 1, &mut layer), rows(1.0, -1.0), "{isa}: block 0 holds row 1");
        for (block, index) in [(1, 1), (3, 1), (0, 0), (2, 0), (0, 2), (2, 2)] {
            assert_eq!(read(block, index, &mut layer), [0.0; 16], "{isa}: block {block} layer {index} untouched");
        }
    }
}

#[test]
fn chunks_travel_whole() {
    let device = device(Isa::detect(), 1);
    let pool = KvPool::new(&device, LAYOUT, 3).expect("memory");
    let chunk: Vec<u8> = (0..LAYOUT.chunk_bytes() as u8).collect();
    pool.write_chunk(BlockId(1), &chunk).expect("in range");
    let mut back = vec![0; chunk.len()];
    pool.read_chunk(BlockId(1), &mut back).expect("in range");
    assert_eq!(back, chunk);
    let mut layer = vec![0; LAYOUT.layer_chunk_bytes()];
    pool.read_layer(BlockId(1), 2, &mut layer).expect("in range");
    assert_eq!(layer, chunk[LAYOUT.layer_range_in_chunk(2)]);
    pool.write_layer(BlockId(2), 0, &layer).expect("in range");
    pool.read_chunk(BlockId(2), &mut back).expect("in range");
    assert_eq!(back[..32], layer[..]);
    assert!(back[32..].iter().all(|b| *b == 0), "other layers untouched");
    pool.read_chunk(BlockId(0), &mut back).expect("in range");
    assert!(back.iter().all(|b| *b == 0), "other blocks untouched");
}

#[test]
fn copies_refuse_what_does_not_fit() {
    let device = device(Isa::detect(), 1);
    let pool = KvPool::new(&device, LAYOUT, 3).expect("memory");
    let mut layer = vec![0; 32];
    assert!(pool.read_layer(BlockId(3), 0, &mut layer).is_err(), "no such block");
    assert!(pool.read_layer(BlockId(u32::MAX), 0, &mut layer).is_err(), "no such block");
    assert!(pool.read_layer(BlockId(0), 3, &mut layer).is_err(), "no such layer");
    assert!(pool.read_layer(BlockId(0), usize::MAX, &mut layer).is_err(), "no such layer");
    assert!(pool.write_layer(BlockId(0), 0, &layer[..31]).is_err(), "too short");
    assert!(pool.write_chunk(BlockId(0), &layer).is_err(), "a layer is not a chunk");
    assert!(pool.read_chunk(BlockId(0), &mut [0; 97]).is_err(), "too long");
    for zero in [
        KvLayout { num_layers: 0, ..LAYOUT },
        KvLayout { num_kv_heads: 0, ..LAYOUT },
        KvLayout { head_dim: 0, ..LAYOUT },
        KvLayout { chunk_tokens: 0, ..LAYOUT },
    ] {
        assert!(KvPool::new(&device, zero, 1).is_err(), "{zero:?}");
    }
    let huge = KvLayout { head_dim: usize::MAX / 2, ..LAYOUT };
    assert!(KvPool::new(&device, huge, 1).is_err());
    assert!(KvPool::new(&device, LAYOUT, usize::MAX).is_err());
    assert!(KvPool::new(
        &device,
        KvLayout { num_layers: 1, num_kv_heads: 1 << 20, head_dim: 1 << 20, chunk_tokens: 32 },
        1 << 20
    )
    .is_err());
    assert_eq!(KvPool::new(&device, LAYOUT, 0).expect("an empty pool").bytes(), 0);
}
