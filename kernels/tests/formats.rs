//! ggml's block formats, element by element: bytes written by hand, values worked out by hand.

mod support;

use half::f16;
use keepsake_kernels::{ops, Buffer, DType, Isa, Matrix};
use support::*;

/// One row of a type, read back through the embedding operation.
fn read(isa: Isa, dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let device = device(isa, 1);
    let k = bytes.len() / dtype.block_bytes() * dtype.block_len();
    let matrix = Matrix::pack(&device, dtype, 1, k, bytes).expect("whole blocks");
    let out = Buffer::zeros(&device, k).expect("memory");
    device.run(|w| ops::embedding(w, &matrix, &[0], &out).expect("shapes fit"));
    all(&out)
}

/// The reference reads exactly `want`; packed forms keep it to half a step of 1/32,700 of the row's largest weight.
fn check(dtype: DType, bytes: &[u8], want: &[f32]) {
    assert_eq!(read(Isa::Reference, dtype, bytes), want, "{dtype}");
    let largest = want.iter().fold(0.0f32, |max, v| max.max(v.abs()));
    for isa in fast_isas() {
        let got = read(isa, dtype, bytes);
        for (i, (g, w)) in got.iter().zip(want).enumerate() {
            let error = (g - w).abs() / largest;
            assert!(error < 5e-4, "{dtype} on {isa}, element {i}: {g} for {w}");
        }
    }
}

fn half(value: f32) -> [u8; 2] {
    f16::from_f32(value).to_le_bytes()
}

/// Nibbles whose low half counts up and whose high half counts down.
fn nibbles() -> Vec<u8> {
    (0..16u8).map(|j| j | (15 - j) << 4).collect()
}

fn nibble(i: usize) -> f32 {
    if i < 16 {
        i as f32
    } else {
        31.0 - i as f32
    }
}

#[test]
fn q4_0() {
    let bytes = [half(-0.5).to_vec(), nibbles()].concat();
    let want: Vec<f32> = (0..32).map(|i| -0.5 * (nibble(i) - 8.0)).collect();
    check(DType::Q4_0, &bytes, &want);
}

#[test]
fn q4_1() {
    let bytes = [half(0.25).to_vec(), half(-1.5).to_vec(), nibbles()].concat();
    let want: Vec<f32> = (0..32).map(|i| 0.25 * nibble(i) - 1.5).collect();
    check(DType::Q4_1, &bytes, &want);
}

/// Elements 1, 8, 17 and 31 have the fifth bit.
const FIFTH: [usize; 4] = [1, 8, 17, 31];

fn fifth_bits() -> Vec<u8> {
    FIFTH.iter().fold(0u32, |bits, i| bits | 1 << i).to_le_bytes().to_vec()
}

fn five(i: usize) -> f32 {
    nibble(i) + if FIFTH.contains(&i) { 16.0 } else { 0.0 }
}

#[test]
fn q5_0() {
    let bytes = [half(0.5).to_vec(), fifth_bits(), nibbles()].concat();
    let want: Vec<f32> = (0..32).map(|i| 0.5 * (five(i) - 16.0)).collect();
    check(DType::Q5_0, &bytes, &want);
}

#[test]
fn q5_1() {
    let bytes = [half(0.5).to_vec(), half(-8.0).to_vec(), fifth_bits(), nibbles()].concat();
    let want: Vec<f32> = (0..32).map(|i| 0.5 * five(i) - 8.0).collect();
    check(DType::Q5_1, &bytes, &want);
}

#[test]
fn q8_0() {
    let codes: Vec<i8> = (0..32).map(|i| [-128, -1, 0, 1, 127][i % 5]).collect();
    let bytes = [half(2.0).to_vec(), codes.iter().map(|&q| q as u8).collect()].concat();
    let want: Vec<f32> = codes.iter().map(|&q| 2.0 * f32::from(q)).collect();
    check(DType::Q8_0, &bytes, &want);
}

/// Scales 1..=8 and mins 63, 62, .. of the K formats in their 12 bytes: the first four in six bits of bytes 0..4 and 4..8;
/// the last four's low nibbles in bytes 8..12, their high pairs on top of the first eight.
fn k_scales() -> ([u8; 12], [f32; 8], [f32; 8]) {
    let scales: [u8; 8] = [1, 2, 3, 4, 21, 38, 55, 63];
    let mins: [u8; 8] = [63, 62, 61, 60, 17, 34, 51, 0];
    let mut packed = [0; 12];
    for j in 0..4 {
        packed[j] = scales[j] | scales[j + 4] >> 4 << 6;
        packed[j + 4] = mins[j] | mins[j + 4] >> 4 << 6;
        packed[j + 8] = scales[j + 4] & 15 | mins[j + 4] << 4;
    }
    (packed, scales.map(f32::from), mins.map(f32::from))
}

#[test]
fn q4_k() {
    let (packed, scales, mins) = k_scales();
    // Byte l of pair p: element l of group 2p low, of group 2p + 1 high.
    let codes: Vec<u8> = (0..128).map(|at| (at as u8 * 7) ^ (at as u8 / 32)).collect();
    let bytes = [half(0.5).to_vec(), half(0.125).to_vec(), packed.to_vec(), codes.clone()].concat();
    let want: Vec<f32> = (0..256)
        .map(|i| {
            let (group, l) = (i / 32, i % 32);
            let byte = codes[group / 2 * 32 + l];
            let code = if group % 2 == 0 { byte & 15 } else { byte >> 4 };
            0.5 * scales[group] * f32::from(code) - 0.125 * mins[group]
        })
        .collect();
    check(DType::Q4K, &bytes, &want);
}

#[test]
fn q5_k() {
    let (packed, scales, mins) = k_scales();
    let high: Vec<u8> = (0..32).map(|l| (l as u8).wrapping_mul(29)).collect();
    let codes: Vec<u8> = (0..128).map(|at| (at as u8).wrapping_mul(13)).collect();
    let bytes = [half(0.5).to_vec(), half(0.25).to_vec(), packed.to_vec(), high.clone(), codes.clone()].concat();
    let want: Vec<f32> = (0..256)
        .map(|i| {
            let (group, l) = (i / 32, i % 32);
            let byte = codes[group / 2 * 32 + l];
            let nibble = if group % 2 == 0 { byte & 15 } else { byte >> 4 };
            let code = nibble + 16 * (high[l] >> group & 1);
            0.5 * scales[group] * f32::from(code) - 0.25 * mins[group]
        })
        .collect();
    check(DType::Q5K, &bytes, &want);
}

#[test]
fn q6_k() {
    let low: Vec<u8> = (0..128).map(|at| (at as u8).wrapping_mul(11)).collect();
    let high: Vec<u8> = (0..64).map(|at| (at as u8).wrapping_mul(37)).collect();
    let scales: Vec<i8> = (0..16).map(|s| [1, -1, 127, -128][s % 4]).collect();
    let scale_bytes: Vec<u8> = scales.iter().map(|&s| s as u8).collect();
    let bytes = [low.clone(), high.clone(), scale_bytes, half(0.25).to_vec()].concat();
    let want: Vec<f32> = (0..256)
        .map(|i| {
            // Halves of 128; in each, quarters q of 32: nibbles of ql[32 (q & 1) + l], bits 2q of qh[l].
            let (half, quarter, l) = (i / 128, i % 128 / 32, i % 32);
            let byte = low[64 * half + 32 * (quarter & 1) + l];
            let nibble = if quarter < 2 { byte & 15 } else { byte >> 4 };
            let code = i32::from(nibble) + 16 * i32::from(high[32 * half + l] >> (2 * quarter) & 3) - 32;
            0.25 * f32::from(scales[i / 16]) * code as f32
        })
        .collect();
    check(DType::Q6K, &bytes, &want);
}

#[test]
fn floats() {
    let values = [1.0f32, -0.5, 0.0, 65504.0, 6.1e-5, -3.140625, 2.0, 1024.5];
    let f32s: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let f16s: Vec<u8> = values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
    let bf16s: Vec<u8> = values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        assert_eq!(read(isa, DType::F32, &f32s), values);
        assert_eq!(read(isa, DType::F16, &f16s), values.map(|v| f16::from_f32(v).to_f32()));
        assert_eq!(read(isa, DType::BF16, &bf16s), values.map(|v| half::bf16::from_f32(v).to_f32()));
    }
}

#[test]
fn rows_that_are_not_finite_stay_in_their_row() {
    for isa in fast_isas() {
        let device = device(isa, 1);
        let mut bytes = [half(0.5).to_vec(), half(0.0).to_vec(), nibbles()].concat();
        bytes.extend([half(f32::INFINITY).to_vec(), half(0.0).to_vec(), nibbles()].concat());
        let matrix = Matrix::pack(&device, DType::Q4_1, 2, 32, &bytes).expect("whole blocks");
        let out = Buffer::zeros(&device, 64).expect("memory");
        device.run(|w| ops::embedding(w, &matrix, &[0, 1], &out).expect("shapes fit"));
        let out = all(&out);
        assert!(out[..32].iter().all(|v| v.is_finite()), "{isa}");
        assert!(out[32..].iter().any(|v| !v.is_finite()), "{isa}: an infinite scale shows");
    }
}
