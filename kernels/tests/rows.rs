//! Norm, activation, rope tables, gathers and the team itself.

mod support;

use keepsake_kernels::ops::{self, Accumulate};
use keepsake_kernels::{
    Activations, Buffer, DType, Device, DeviceKind, Isa, KernelError, Matrix, RopeScaling, RopeSpec, RopeStyle,
    RopeTable,
};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicUsize, Ordering};
use support::*;

/// norm, silu and add of random rows, one after the other in one buffer.
fn chain(isa: Isa, threads: usize, rows: usize, dim: usize) -> Vec<f32> {
    let mut rng = rng(dim as u64);
    let device = device(isa, threads);
    let x = Buffer::from_slice(&device, &random(&mut rng, rows * dim, 4.0)).expect("memory");
    let y = Buffer::from_slice(&device, &random(&mut rng, rows * dim, 30.0)).expect("memory");
    let weight = Buffer::from_slice(&device, &random(&mut rng, dim, 1.0)).expect("memory");
    let out = Buffer::zeros(&device, rows * dim).expect("memory");
    device.run(|w| {
        ops::rms_norm(w, &x, &weight, 1e-5, rows, dim, &out).expect("shapes fit");
        ops::silu_mul(w, &y, &out, rows, dim, &out).expect("shapes fit");
        ops::add(w, &x, rows * dim, &out).expect("shapes fit");
    });
    all(&out)
}

fn rows_match_reference(isa: Isa) {
    for (rows, dim) in [(1, 1), (3, 16), (5, 37), (2, 576), (9, 130)] {
        let want = chain(Isa::Reference, 1, rows, dim);
        let got = chain(isa, 3, rows, dim);
        let error = relative_error(&got, &want);
        assert!(error < 1e-5, "{rows} x {dim}: {error}");
        assert_eq!(bits(&got), bits(&chain(Isa::Portable, 1, rows, dim)), "the same bits under every instruction set");
    }
}
test_device!(reference, rows_match_reference);

/// The fused forms are the plain ones in sequence.
fn fused_forms_agree(isa: Isa) {
    let (rows, k, n) = (7, 96, 20);
    let mut rng = rng(5);
    let device = device(isa, 2);
    let matrix = Matrix::pack(&device, DType::Q4_1, n, k, &random_weights(&mut rng, DType::Q4_1, n, k)).expect("fits");
    let new = |values: &[f32]| Buffer::from_slice(&device, values).expect("memory");
    let (x, y) = (new(&random(&mut rng, rows * k, 2.0)), new(&random(&mut rng, rows * k, 2.0)));
    let weight = new(&random(&mut rng, k, 1.0));
    let (plain, fused, between) = (new(&vec![0.0; rows * n]), new(&vec![0.0; rows * n]), new(&vec![0.0; rows * k]));
    let acts = Activations::new(&device, rows, k, matrix.input_forms()).expect("memory");
    device.run(|w| {
        ops::rms_norm(w, &x, &weight, 1e-6, rows, k, &between).expect("shapes fit");
        ops::prepare(w, &between, rows, k, &acts).expect("shapes fit");
        ops::matmul(w, &acts, &matrix, &plain, Accumulate::Set).expect("shapes fit");
        ops::rms_norm_prepare(w, &x, &weight, 1e-6, rows, k, &acts).expect("shapes fit");
        ops::matmul(w, &acts, &matrix, &fused, Accumulate::Set).expect("shapes fit");
    });
    assert_eq!(bits(&all(&plain)), bits(&all(&fused)));
    device.run(|w| {
        ops::silu_mul(w, &x, &y, rows, k, &between).expect("shapes fit");
        ops::prepare(w, &between, rows, k, &acts).expect("shapes fit");
        ops::matmul(w, &acts, &matrix, &plain, Accumulate::Set).expect("shapes fit");
        ops::silu_mul_prepare(w, &x, &y, rows, k, &acts).expect("shapes fit");
        ops::matmul(w, &acts, &matrix, &fused, Accumulate::Set).expect("shapes fit");
    });
    assert_eq!(bits(&all(&plain)), bits(&all(&fused)));
}
test_device!(fused, fused_forms_agree);

#[test]
fn gather_and_embedding_check_their_indices() {
    let device = device(Isa::detect(), 2);
    let x = Buffer::from_slice(&device, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).expect("memory");
    let out = Buffer::zeros(&device, 4).expect("memory");
    let table = Matrix::pack(&device, DType::F32, 3, 2, &[0; 24]).expect("fits");
    device.run(|w| {
        ops::gather_rows(w, &x, &[2, 0], 2, &out).expect("shapes fit");
        assert!(ops::gather_rows(w, &x, &[3], 2, &out).is_err(), "row behind x");
        assert!(ops::gather_rows(w, &x, &[u32::MAX], 2, &out).is_err(), "row far behind x");
        assert!(ops::gather_rows(w, &x, &[0, 1, 2], 2, &out).is_err(), "more rows than out");
        assert!(ops::gather_rows(w, &x, &[0], 2, &x).is_err(), "onto itself");
        assert!(ops::embedding(w, &table, &[3], &out).is_err(), "token behind the table");
        assert!(ops::embedding(w, &table, &[0, 1, 2], &out).is_err(), "more rows than out");
        assert!(ops::rms_norm(w, &x, &x, 1e-5, 1, 2, &out).is_err(), "weight of another size");
        assert!(ops::silu_mul(w, &x, &x, usize::MAX, 2, &out).is_err(), "overflow");
    });
    assert_eq!(all(&out), [5.0, 6.0, 1.0, 2.0]);
}

fn spec(scaling: RopeScaling) -> RopeSpec {
    let style = RopeStyle::HalfSplit;
    RopeSpec { style, rotary_dim: 128, theta: 500_000.0, scaling, freq_factors: None, max_positions: 16 }
}

#[test]
fn rope_frequencies() {
    let plain = spec(RopeScaling::None).frequencies();
    assert_eq!(plain[0], 1.0);
    assert!((plain[32] - 500_000f64.powf(-0.5)).abs() < 1e-12);
    let linear = spec(RopeScaling::Linear { factor: 4.0 }).frequencies();
    assert!(linear.iter().zip(&plain).all(|(l, p)| (l * 4.0 - p).abs() < 1e-12));
    // Llama 3.1's published settings: short wavelengths stay, long ones shrink by 8.
    let llama3 = spec(RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192.0,
    });
    let scaled = llama3.frequencies();
    assert_eq!(scaled[..20], plain[..20]);
    assert!((scaled[63] * 8.0 - plain[63]).abs() < 1e-15);
    assert!(scaled.windows(2).all(|w| w[0] > w[1]), "still falling");
    let yarn = spec(RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_context: 32768.0,
        attention_factor: None,
    });
    assert_eq!(yarn.frequencies()[0], 1.0);
    assert!((yarn.frequencies()[63] * 4.0 - plain[63]).abs() < 1e-15);
    assert!((yarn.attention_factor() - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);
    let mut divided = spec(RopeScaling::None);
    divided.freq_factors = Some(vec![2.0; 64]);
    assert_eq!(divided.frequencies()[0], 0.5);
    assert!(RopeTable::new(&divided).is_ok());
}

#[test]
fn devices_say_what_they_are() {
    assert!(matches!(Device::open(DeviceKind::Cuda, 0), Err(KernelError::DeviceUnavailable { kind: "cuda", .. })));
    let auto = Device::open(DeviceKind::Auto, 3).expect("a cpu");
    assert_eq!(auto.num_workers(), 3);
    assert!(auto.describe().contains("3 threads"));
    assert_eq!(auto.numeric_version(), Device::open(DeviceKind::Cpu, 1).expect("a cpu").numeric_version());
    assert_ne!(auto.numeric_version(), device(Isa::Reference, 1).numeric_version());
}

#[test]
fn regions_run_everywhere_and_survive_panics() {
    let device = device(Isa::detect(), 4);
    for round in 0..200 {
        let count = AtomicUsize::new(0);
        let index = device.run(|w| {
            count.fetch_add(1, Ordering::Relaxed);
            w.barrier();
            assert_eq!(count.load(Ordering::Relaxed), 4, "everyone arrived");
            w.barrier();
            w.index()
        });
        assert_eq!(index, 0, "worker 0's value, round {round}");
    }
    for culprit in 0..4 {
        let region = AssertUnwindSafe(|| {
            device.run(|w| {
                assert_ne!(w.index(), culprit, "on purpose");
                w.barrier();
            })
        });
        assert!(catch_unwind(region).is_err(), "a panic of worker {culprit} reaches the caller");
        assert_eq!(device.run(|w| w.num_workers()), 4, "and the team goes on");
    }
}

#[test]
fn regions_of_several_callers_take_turns() {
    let device = device(Isa::detect(), 2);
    let inside = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    device.run(|w| {
                        if w.index() == 0 {
                            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        }
                        w.barrier();
                        w.barrier();
                        if w.index() == 0 {
                            inside.fetch_sub(1, Ordering::SeqCst);
                        }
                    });
                }
            });
        }
    });
}

#[test]
fn layer_norm_bias_and_relu_mean_what_they_say() {
    let (rows, dim) = (5, 37);
    let mut rng = rng(11);
    let x = random(&mut rng, rows * dim, 3.0);
    let (weight, shift, bias) =
        (random(&mut rng, dim, 1.0), random(&mut rng, dim, 1.0), random(&mut rng, 2 * dim, 1.0));
    let want: Vec<f32> = x
        .chunks(dim)
        .flat_map(|row| {
            let mean = row.iter().sum::<f32>() / dim as f32;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / dim as f32;
            let normed = |i: usize| (row[i] - mean) / (variance + 1e-5).sqrt() * weight[i] + shift[i];
            (0..dim).map(|i| (normed(i) + bias[dim + i]).max(0.0)).collect::<Vec<_>>()
        })
        .collect();
    for isa in fast_isas() {
        let mut outputs = Vec::new();
        for threads in [1, 3] {
            let device = device(isa, threads);
            let buffer = |values: &[f32]| Buffer::from_slice(&device, values).expect("memory");
            let (x, weight, shift, bias) = (buffer(&x), buffer(&weight), buffer(&shift), buffer(&bias));
            let out = Buffer::zeros(&device, rows * dim).expect("memory");
            device.run(|w| {
                ops::layer_norm(w, &x, &weight, &shift, 1e-5, rows, dim, &out).expect("shapes fit");
                ops::add_bias(w, &bias, dim, rows, dim, &out).expect("shapes fit");
                ops::relu(w, rows, dim, &out).expect("shapes fit");
            });
            outputs.push(all(&out));
        }
        assert!(relative_error(&outputs[0], &want) < 1e-5, "{isa}");
        assert_eq!(bits(&outputs[0]), bits(&outputs[1]), "{isa}");
        let device = device(isa, 2);
        let short = Buffer::zeros(&device, dim).expect("memory");
        let refused = device.run(|w| ops::add_bias(w, &short, 1, 1, dim, &short));
        assert!(matches!(refused, Err(KernelError::Shape { .. })));
    }
}

#[test]
fn auto_says_why_there_is_no_gpu() {
    let device = Device::open(DeviceKind::Auto, 1).expect("a device");
    let line = device.describe();
    assert!(line.starts_with("cuda:") || line.contains("no GPU: "), "{line}");
    assert!(!line.contains('\n'), "{line}");
}
