//! Attention at the demo model's shape (9 heads on 3 K/V heads of 64): nanoseconds a pair of key and K/V head for decode,
//! multiply-adds a second for prefill.

mod support;

use keepsake_kernels::{ops, BlockId, Buffer, Device, Entry, Isa, KvLayout, KvPool};
use support::{best_of, threads};

fn main() {
    let lowest = if std::env::args().any(|arg| arg == "all") { Isa::Portable } else { Isa::Avx512 };
    println!(
        "{:>12} {:>6} {:>6} {:>10} {:>10} {:>9} {:>10}",
        "isa", "rows", "past", "wall us", "cpu us", "GMAC/s", "ns/key"
    );
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available() && *isa >= lowest) {
        let device = Device::open_cpu(threads(), isa).expect("available");
        let layout = KvLayout { num_layers: 1, num_kv_heads: 3, head_dim: 64, chunk_tokens: 32 };
        let pool = KvPool::new(&device, layout, 80).expect("memory");
        let blocks: Vec<BlockId> = (0..80).map(|b| BlockId(b * 7 % 80)).collect();
        for (rows, past) in [
            (1, 127),
            (1, 1023),
            (1, 2047),
            (4, 1023),
            (5, 1500),
            (16, 1008),
            (16, 1500),
            (21, 1500),
            (64, 960),
            (512, 0),
            (512, 1024),
        ] {
            let q = Buffer::from_slice(&device, &vec![0.1; rows * 576]).expect("memory");
            let out = Buffer::zeros(&device, rows * 576).expect("memory");
            let entry = Entry {
                first_row: 0,
                num_rows: rows as u32,
                first_position: past as u32,
                first_block: 0,
                num_blocks: 80,
            };
            let (wall, cpu) = best_of(40, || {
                device.run(|w| ops::attention(w, &q, &pool, 0, &[entry], &blocks, 9, 0.125, &out).expect("fits"))
            });
            let pairs: usize = (past + 1..=past + rows).sum();
            println!(
                "{:>12} {rows:>6} {past:>6} {:>10.1} {:>10.1} {:>9.1} {:>10.2}",
                isa.to_string(),
                wall * 1e6,
                cpu * 1e6,
                (pairs * 9 * 64 * 2) as f64 / cpu / 1e9,
                cpu * 1e9 / (pairs * 3) as f64,
            );
        }
    }
}
