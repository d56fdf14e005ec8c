//! Products at the demo model's shapes: microseconds, multiply-adds a second, weight bytes a second.

mod support;

use keepsake_kernels::ops::{self, Accumulate};
use keepsake_kernels::{Activations, Buffer, DType, Device, Isa};
use support::{best_of, threads, weights};

const ROWS: [usize; 8] = [1, 4, 8, 16, 32, 64, 128, 512];

/// All shapes, or the one that the environment variable `SHAPE` counts (from 0); `ROWS` picks one number of rows.
fn shapes<const N: usize>(all: [(DType, usize, usize); N]) -> Vec<(DType, usize, usize)> {
    match std::env::var("SHAPE").ok().and_then(|index| index.parse::<usize>().ok()) {
        Some(index) => all.get(index).copied().into_iter().collect(),
        None => all.to_vec(),
    }
}

fn main() {
    let lowest = if std::env::args().any(|arg| arg == "all") { Isa::Portable } else { Isa::Avx2 };
    println!(
        "{:>12} {:>6} {:>6}x{:<5} {:>5} {:>10} {:>10} {:>9} {:>7}",
        "isa", "dtype", "n", "k", "rows", "wall us", "cpu us", "GMAC/s", "GB/s"
    );
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available() && *isa > lowest) {
        let device = Device::open_cpu(threads(), isa).expect("available");
        for (dtype, n, k) in shapes([
            (DType::Q4_1, 960, 576),
            (DType::Q4_1, 576, 576),
            (DType::Q4_1, 3072, 576),
            (DType::Q4_1, 576, 1536),
            (DType::Q8_0, 49152, 576),
            (DType::Q4K, 2048, 2048),
            (DType::Q6K, 2048, 2048),
            (DType::F16, 2048, 2048),
        ]) {
            let matrix = weights(&device, dtype, n, k);
            for rows in ROWS {
                let wanted = std::env::var("ROWS").map_or(true, |wanted| wanted == rows.to_string());
                if !wanted || n > 40_000 && rows > 16 {
                    continue;
                }
                let acts = Activations::new(&device, rows, k, matrix.input_forms()).expect("memory");
                let x = Buffer::from_slice(&device, &vec![0.5; rows * k]).expect("memory");
                let out = Buffer::zeros(&device, rows * n).expect("memory");
                device.run(|w| ops::prepare(w, &x, rows, k, &acts).expect("shapes fit"));
                let calls = (20_000_000 / (rows * n * k)).clamp(1, 100);
                let (wall, cpu) = best_of(60, || {
                    device.run(|w| {
                        for _ in 0..calls {
                            ops::matmul(w, &acts, &matrix, &out, Accumulate::Set).expect("shapes fit");
                        }
                    })
                });
                let (wall, cpu) = (wall / calls as f64, cpu / calls as f64);
                println!(
                    "{:>12} {:>6} {n:>6}x{k:<5} {rows:>5} {:>10.1} {:>10.1} {:>9.1} {:>7.1}",
                    isa.to_string(),
                    dtype.to_string(),
                    wall * 1e6,
                    cpu * 1e6,
                    (rows * n * k) as f64 / cpu / 1e9,
                    matrix.bytes() as f64 / cpu / 1e9,
                );
            }
        }
    }
}
