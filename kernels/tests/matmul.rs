//! Products: every type and instruction set against the reference, and bits against bits.

mod support;

use keepsake_kernels::ops::{self, Accumulate};
use keepsake_kernels::{Activations, Buffer, DType, Isa, KernelError, Matrix};
use proptest::prelude::*;
use rand::Rng;
use support::*;

/// `x . weights^T`, on top of `before` where given.
#[allow(clippy::too_many_arguments)]
fn product(
    isa: Isa,
    threads: usize,
    dtype: DType,
    n: usize,
    k: usize,
    weights: &[u8],
    x: &[f32],
    before: Option<&[f32]>,
) -> Vec<f32> {
    let device = device(isa, threads);
    let rows = x.len() / k;
    let matrix = Matrix::pack(&device, dtype, n, k, weights).expect("weights fit");
    let acts = Activations::new(&device, rows.max(1), k, matrix.input_forms()).expect("memory");
    let x = Buffer::from_slice(&device, x).expect("memory");
    let out = match before {
        Some(before) => Buffer::from_slice(&device, before).expect("memory"),
        None => Buffer::zeros(&device, rows * n).expect("memory"),
    };
    let accumulate = if before.is_some() { Accumulate::Add } else { Accumulate::Set };
    device.run(|w| {
        ops::prepare(w, &x, rows, k, &acts).expect("shapes fit");
        ops::matmul(w, &acts, &matrix, &out, accumulate).expect("shapes fit");
    });
    all(&out)
}

fn tolerance(dtype: DType) -> f32 {
    if dtype.is_float() {
        2e-5
    } else {
        2.5e-3
    }
}

fn matches_reference(isa: Isa) {
    let mut rng = rng(1);
    for dtype in DType::ALL {
        let block = dtype.block_len().max(32);
        for (n, blocks, rows) in [(1, 1, 1), (16, 2, 3), (37, 3, 8), (70, 5, 17), (33, 1, 40)] {
            let k = block * blocks;
            let weights = random_weights(&mut rng, dtype, n, k);
            let x = random(&mut rng, rows * k, 3.0);
            let want = product(Isa::Reference, 1, dtype, n, k, &weights, &x, None);
            let got = product(isa, 2, dtype, n, k, &weights, &x, None);
            let error = relative_error(&got, &want);
            assert!(error < tolerance(dtype), "{dtype} {n} x {k}, {rows} rows: {error}");
            let before = random(&mut rng, rows * n, 1.0);
            let added = product(isa, 2, dtype, n, k, &weights, &x, Some(&before));
            let sum: Vec<f32> = before.iter().zip(&got).map(|(a, b)| a + b).collect();
            assert_eq!(bits(&added), bits(&sum), "{dtype}: Add is Set plus what was there");
        }
    }
}
test_device!(reference, matches_reference);

#[test]
fn all_instruction_sets_give_the_same_bits() {
    let mut rng = rng(2);
    for dtype in DType::ALL {
        let k = dtype.block_len().max(32) * 3;
        for rows in [1, 2, 5, 6, 16, 23] {
            let n = rng.random_range(1..80);
            let weights = random_weights(&mut rng, dtype, n, k);
            let x = random(&mut rng, rows * k, 2.0);
            let want = product(Isa::Portable, 1, dtype, n, k, &weights, &x, None);
            for isa in fast_isas() {
                for threads in [1, 3] {
                    let got = product(isa, threads, dtype, n, k, &weights, &x, None);
                    assert_eq!(bits(&got), bits(&want), "{dtype} on {isa}, {rows} rows, {threads} threads");
                }
            }
        }
    }
}

#[test]
fn extreme_rows_do_not_disturb_others() {
    let mut rng = rng(3);
    let (n, k) = (20, 64);
    let weights = random_weights(&mut rng, DType::Q4_1, n, k);
    let mut x = random(&mut rng, 8 * k, 1.0);
    let calm = product(Isa::detect(), 1, DType::Q4_1, n, k, &weights, &x, None);
    x[k] = f32::NAN;
    x[2 * k] = f32::INFINITY;
    x[3 * k..4 * k].fill(0.0);
    x[4 * k..5 * k].fill(1e-38);
    x[5 * k] = f32::MAX;
    for isa in fast_isas() {
        let got = product(isa, 2, DType::Q4_1, n, k, &weights, &x, None);
        for row in [0, 6, 7] {
            assert_eq!(bits(&got[row * n..(row + 1) * n]), bits(&calm[row * n..(row + 1) * n]), "{isa} row {row}");
        }
        assert!(got[n..3 * n].iter().all(|v| v.is_nan()), "{isa}: not finite in, not finite out");
        assert!(got[3 * n..4 * n].iter().all(|v| *v == 0.0), "{isa}: zeros in, zeros out");
    }
}

#[test]
fn packed_weights_stay_quantised() {
    let mut rng = rng(4);
    let device = device(Isa::detect(), 1);
    for dtype in DType::ALL {
        let (n, k) = (192, 512);
        let weights = random_weights(&mut rng, dtype, n, k);
        let matrix = Matrix::pack(&device, dtype, n, k, &weights).expect("weights fit");
        assert!(
            matrix.bytes() as f64 <= 1.15 * weights.len() as f64,
            "{dtype}: {} for {}",
            matrix.bytes(),
            weights.len()
        );
    }
}

#[test]
fn hostile_shapes_are_errors() {
    let device = device(Isa::detect(), 2);
    for (n, k, len) in
        [(0, 32, 0), (1, 0, 0), (1, 31, 20), (2, 32, 20), (1, 32, 21), (usize::MAX, 32, 20), (1, 1 << 17, 20 << 12)]
    {
        let packed = Matrix::pack(&device, DType::Q4_1, n, k, &vec![0; len]);
        assert!(matches!(packed, Err(KernelError::Shape { .. })), "{n} x {k} from {len} bytes: {packed:?}");
    }
    let matrix = Matrix::pack(&device, DType::Q4_1, 16, 64, &vec![0; 16 * 40]).expect("weights fit");
    let acts = Activations::new(&device, 2, 64, matrix.input_forms()).expect("memory");
    let x = Buffer::zeros(&device, 1024).expect("memory");
    let out = Buffer::zeros(&device, 31).expect("memory");
    device.run(|w| {
        assert!(ops::prepare(w, &x, 3, 64, &acts).is_err(), "more rows than the scratch has");
        assert!(ops::prepare(w, &x, 1, 65, &acts).is_err(), "k beyond the scratch");
        assert!(ops::prepare(w, &x, usize::MAX, 64, &acts).is_err(), "overflow");
        ops::prepare(w, &x, 2, 64, &acts).expect("shapes fit");
        assert!(ops::matmul(w, &acts, &matrix, &out, Accumulate::Set).is_err(), "out too short");
        ops::prepare(w, &x, 1, 32, &acts).expect("shapes fit");
        assert!(ops::matmul(w, &acts, &matrix, &out, Accumulate::Set).is_err(), "another k");
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// A row's products do not depend on the rows around it, on where it stands among them, or on the team.
    #[test]
    fn rows_alone_and_in_any_batch(
        dtype in proptest::sample::select(DType::ALL.to_vec()),
        n in 1usize..100,
        rows in 2usize..40,
        threads in 1usize..4,
        seed in any::<u64>(),
    ) {
        let mut rng = rng(seed);
        let k = dtype.block_len().max(96);
        let weights = random_weights(&mut rng, dtype, n, k);
        let x = random(&mut rng, rows * k, 2.0);
        for isa in fast_isas() {
            let batch = product(isa, threads, dtype, n, k, &weights, &x, None);
            let (at, len) = (rng.random_range(0..rows), rng.random_range(1..rows + 1));
            let some = at..(at + len).min(rows);
            let few = product(isa, 1, dtype, n, k, &weights, &x[some.start * k..some.end * k], None);
            prop_assert_eq!(bits(&few), bits(&batch[some.start * n..some.end * n]), "{} on {}", dtype, isa);
        }
    }
}
