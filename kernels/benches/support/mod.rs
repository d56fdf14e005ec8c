//! Timing that the benches share: the best of several runs, because other processes only ever add time.

#![allow(dead_code)]

use std::time::Instant;

use keepsake_kernels::{DType, Device, Matrix};

/// Seconds of the fastest of `reps` runs by the wall clock, and by this thread's processor time (which other processes do
/// not inflate; it is the work of worker 0).
pub fn best_of(reps: usize, mut run: impl FnMut()) -> (f64, f64) {
    let (mut wall, mut cpu) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..reps {
        let (start, cpu_start) = (Instant::now(), thread_seconds());
        run();
        wall = wall.min(start.elapsed().as_secs_f64());
        cpu = cpu.min(thread_seconds() - cpu_start);
    }
    (wall, cpu)
}

/// Workers, from the environment variable `THREADS`; all cores without it.
pub fn threads() -> usize {
    std::env::var("THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or(0)
}

fn thread_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the one structure it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Weights with plausible scales; the codes do not matter for speed.
pub fn weights(device: &Device, dtype: DType, n: usize, k: usize) -> Matrix {
    let bytes = n * k / dtype.block_len() * dtype.block_bytes();
    let mut state = 1u32;
    let mut data: Vec<u8> = (0..bytes)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect();
    for block in data.chunks_exact_mut(dtype.block_bytes()) {
        let scale = 0x1c00u16.to_le_bytes(); // about 0.004 as f16
        block[..2].copy_from_slice(&scale);
        if matches!(dtype, DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K) {
            block[2..4].copy_from_slice(&scale);
        }
        if dtype == DType::Q6K {
            block[208..].copy_from_slice(&scale);
        }
    }
    Matrix::pack(device, dtype, n, k, &data).expect("whole rows")
}
