//! Random weights in every stored type, and what they mean, written from ggml's block layouts
//! (`ggml-common.h`) and independent of the kernels.

use half::{bf16, f16};
use keepsake_kernels::DType;
use rand::rngs::StdRng;
use rand::Rng;

pub const ALL_DTYPES: [DType; 11] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q4K,
    DType::Q5K,
    DType::Q6K,
];

/// `len` values with a deviation of about `deviation`, as stored bytes.
pub fn random(rng: &mut StdRng, dtype: DType, len: usize, deviation: f32) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..len / dtype.block_len() {
        match dtype {
            DType::F32 => bytes.extend(uniform(rng, deviation).to_le_bytes()),
            DType::F16 => put_f16(&mut bytes, uniform(rng, deviation)),
            DType::BF16 => bytes.extend(bf16::from_f32(uniform(rng, deviation)).to_le_bytes()),
            DType::Q4_0 => {
                put_f16(&mut bytes, deviation / 4.6);
                put_random(&mut bytes, rng, 16);
            }
            DType::Q4_1 => {
                put_f16(&mut bytes, deviation / 4.6);
                put_f16(&mut bytes, -1.6 * deviation);
                put_random(&mut bytes, rng, 16);
            }
            DType::Q5_0 => {
                put_f16(&mut bytes, deviation / 9.2);
                put_random(&mut bytes, rng, 20);
            }
            DType::Q5_1 => {
                put_f16(&mut bytes, deviation / 9.2);
                put_f16(&mut bytes, -1.7 * deviation);
                put_random(&mut bytes, rng, 20);
            }
            DType::Q8_0 => {
                put_f16(&mut bytes, deviation / 74.0);
                put_random(&mut bytes, rng, 32);
            }
            DType::Q4K => {
                put_f16(&mut bytes, deviation / 4.6 / 32.0);
                put_f16(&mut bytes, deviation / 4.6 / 32.0 * 7.5);
                put_sub_scales(&mut bytes, rng);
                put_random(&mut bytes, rng, 128);
            }
            DType::Q5K => {
                put_f16(&mut bytes, deviation / 9.2 / 32.0);
                put_f16(&mut bytes, deviation / 9.2 / 32.0 * 15.5);
                put_sub_scales(&mut bytes, rng);
                put_random(&mut bytes, rng, 32 + 128);
            }
            DType::Q6K => {
                put_random(&mut bytes, rng, 128 + 64 + 16);
                put_f16(&mut bytes, deviation / 18.0 / 74.0);
            }
        }
    }
    bytes
}

fn uniform(rng: &mut StdRng, deviation: f32) -> f32 {
    rng.random_range(-1.7..1.7) * deviation
}

fn put_f16(bytes: &mut Vec<u8>, value: f32) {
    bytes.extend(f16::from_f32(value).to_le_bytes());
}

fn put_random(bytes: &mut Vec<u8>, rng: &mut StdRng, count: usize) {
    bytes.extend((0..count).map(|_| rng.random::<u8>()));
}

/// Eight 6-bit scales and minima, near each other so that values centre on zero.
fn put_sub_scales(bytes: &mut Vec<u8>, rng: &mut StdRng) {
    let scales: [u8; 8] = std::array::from_fn(|_| rng.random_range(0..64));
    let minima = scales.map(|scale| (scale + rng.random_range(0..4)).min(63));
    let first = bytes.len();
    bytes.resize(first + 12, 0);
    let packed = &mut bytes[first..];
    for i in 0..4 {
        packed[i] = scales[i] | scales[i + 4] >> 4 << 6;
        packed[i + 4] = minima[i] | minima[i + 4] >> 4 << 6;
        packed[i + 8] = scales[i + 4] & 15 | (minima[i + 4] & 15) << 4;
    }
}

/// The values that the bytes stand for.
pub fn values(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut out = Vec::new();
    for block in bytes.chunks_exact(dtype.block_bytes()) {
        match dtype {
            DType::F32 => out.push(f32::from_le_bytes(block.try_into().unwrap())),
            DType::F16 => out.push(get_f16(block)),
            DType::BF16 => out.push(bf16::from_le_bytes([block[0], block[1]]).to_f32()),
            DType::Q4_0 => nibbles(&block[2..], |q, _| get_f16(block) * (q - 8.0), &mut out),
            DType::Q4_1 => {
                let (scale, min) = (get_f16(block), get_f16(&block[2..]));
                nibbles(&block[4..], |q, _| scale * q + min, &mut out);
            }
            DType::Q5_0 => {
                let high = u32::from_le_bytes(block[2..6].try_into().unwrap());
                let scale = get_f16(block);
                nibbles(&block[6..], |q, i| scale * (q + fifth(high, i) - 16.0), &mut out);
            }
            DType::Q5_1 => {
                let (scale, min) = (get_f16(block), get_f16(&block[2..]));
                let high = u32::from_le_bytes(block[4..8].try_into().unwrap());
                nibbles(&block[8..], |q, i| scale * (q + fifth(high, i)) + min, &mut out);
            }
            DType::Q8_0 => {
                out.extend(block[2..].iter().map(|&q| get_f16(block) * f32::from(q as i8)));
            }
            DType::Q4K => k_quant(block, &block[16..144], None, &mut out),
            DType::Q5K => k_quant(block, &block[48..176], Some(&block[16..48]), &mut out),
            DType::Q6K => q6_k(block, &mut out),
        }
    }
    out
}

fn get_f16(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// Low nibbles are values 0..16 of a block of 32, high nibbles 16..32.
fn nibbles(bytes: &[u8], value: impl Fn(f32, usize) -> f32, out: &mut Vec<f32>) {
    for (i, byte) in bytes.iter().enumerate() {
        out.push(value(f32::from(byte & 15), i));
    }
    for (i, byte) in bytes.iter().enumerate() {
        out.push(value(f32::from(byte >> 4), i + 16));
    }
}

fn fifth(high: u32, i: usize) -> f32 {
    ((high >> i & 1) * 16) as f32
}

/// Eight sub-blocks of 32 with 6-bit scales and minima packed in 12 bytes.
fn k_quant(block: &[u8], low: &[u8], high: Option<&[u8]>, out: &mut Vec<f32>) {
    let (scale, min) = (get_f16(block), get_f16(&block[2..]));
    let packed = &block[4..16];
    for sub in 0..8 {
        let (sub_scale, sub_min) = if sub < 4 {
            (packed[sub] & 63, packed[sub + 4] & 63)
        } else {
            (packed[sub + 4] & 15 | (packed[sub - 4] >> 6) << 4, packed[sub + 4] >> 4 | (packed[sub] >> 6) << 4)
        };
        for i in 0..32 {
            let byte = low[sub / 2 * 32 + i];
            let nibble = if sub % 2 == 0 { byte & 15 } else { byte >> 4 };
            let fifth = high.map_or(0, |high| (high[i] >> sub & 1) * 16);
            let q = f32::from(nibble + fifth);
            out.push(scale * f32::from(sub_scale) * q - min * f32::from(sub_min));
        }
    }
}

fn q6_k(block: &[u8], out: &mut Vec<f32>) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let scale = get_f16(&block[208..]);
    for i in 0..256 {
        let (half, within) = (i / 128, i % 128);
        let byte = low[half * 64 + within % 64];
        let nibble = if within < 64 { byte & 15 } else { byte >> 4 };
        let two = high[half * 32 + within % 32] >> (within / 32 * 2) & 3;
        let q = f32::from((nibble | two << 4) as i8 - 32);
        out.push(scale * f32::from(scales[i / 16] as i8) * q);
    }
}
