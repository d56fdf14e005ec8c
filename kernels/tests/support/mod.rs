//! What the kernel tests share: devices under test, random weights in every storage type.

#![allow(dead_code)]

use half::{bf16, f16};
use keepsake_kernels::{Buffer, DType, Device, Isa};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Every instruction set of this machine but the reference.
pub fn fast_isas() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|isa| *isa != Isa::Reference && isa.is_available()).collect()
}

pub fn device(isa: Isa, threads: usize) -> Device {
    Device::open_cpu(threads, isa).expect("the instruction set is available")
}

pub fn rng(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

pub fn random(rng: &mut StdRng, len: usize, scale: f32) -> Vec<f32> {
    (0..len).map(|_| (rng.random::<f32>() - 0.5) * 2.0 * scale).collect()
}

/// Random rows of a type: plausible scales, any codes.
pub fn random_weights(rng: &mut StdRng, dtype: DType, n: usize, k: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    let put = |bytes: &mut Vec<u8>, value: f32| bytes.extend(f16::from_f32(value).to_le_bytes());
    let scale = |rng: &mut StdRng| 0.002 + 0.01 * rng.random::<f32>();
    for _ in 0..n * k / dtype.block_len() {
        let body =
            |rng: &mut StdRng, bytes: &mut Vec<u8>, len: usize| bytes.extend((0..len).map(|_| rng.random::<u8>()));
        match dtype {
            DType::F32 => bytes.extend((rng.random::<f32>() - 0.5).to_le_bytes()),
            DType::F16 => put(&mut bytes, rng.random::<f32>() - 0.5),
            DType::BF16 => bytes.extend(bf16::from_f32(rng.random::<f32>() - 0.5).to_le_bytes()),
            DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => {
                let d = scale(rng);
                put(&mut bytes, if rng.random() { d } else { -d });
                body(rng, &mut bytes, dtype.block_bytes() - 2);
            }
            DType::Q4_1 | DType::Q5_1 => {
                let d = scale(rng);
                put(&mut bytes, d);
                put(&mut bytes, -d * 7.0 - 0.01 * rng.random::<f32>());
                body(rng, &mut bytes, dtype.block_bytes() - 4);
            }
            DType::Q4K | DType::Q5K => {
                let d = scale(rng) / 40.0;
                put(&mut bytes, d);
                put(&mut bytes, d * 7.0);
                body(rng, &mut bytes, dtype.block_bytes() - 4);
            }
            DType::Q6K => {
                body(rng, &mut bytes, 208);
                let d = scale(rng) / 100.0;
                put(&mut bytes, d);
            }
        }
    }
    bytes
}

/// Bits, so that -0.0 and NaN compare as what they are.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

pub fn all(buffer: &Buffer) -> Vec<f32> {
    buffer.read(0..buffer.len()).expect("the whole buffer")
}

/// Largest difference relative to the root mean square of `want`.
pub fn relative_error(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let rms = (want.iter().map(|v| v * v).sum::<f32>() / want.len().max(1) as f32).sqrt();
    let worst =
        got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, |a, b| if b.is_nan() || b > a { b } else { a });
    worst / rms.max(1e-20)
}

/// One test for each instruction set of the machine; a missing one is said, not passed over in silence.
#[macro_export]
macro_rules! test_device {
    ($name:ident, $body:expr) => {
        mod $name {
            use super::*;

            fn check(isa: Isa) {
                if isa.is_available() {
                    $body(isa);
                } else {
                    eprintln!("SKIPPED {}: this machine has no {isa}", stringify!($name));
                }
            }

            #[test]
            fn portable() {
                check(Isa::Portable);
            }
            #[test]
            fn avx2() {
                check(Isa::Avx2);
            }
            #[test]
            fn avx512() {
                check(Isa::Avx512);
            }
            #[test]
            fn amx() {
                check(Isa::Amx);
            }
        }
    };
}
