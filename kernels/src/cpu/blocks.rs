//! The quantised block formats of ggml, read into one shape: an unsigned code per element and, for each group of
//! elements, `weight = scale * code + min`.
//!
//! Layouts as in ggml's `ggml-common.h` and `ggml-quants.c` (facts of the format; every multi-byte field is little endian).

use half::f16;

use crate::dtype::DType;

/// One row of a quantised matrix.
#[derive(Debug, Default)]
pub(crate) struct Row {
    /// One code an element.
    pub codes: Vec<u8>,
    /// One an `group_len` elements.
    pub scales: Vec<f32>,
    pub mins: Vec<f32>,
}

/// What a quantised format's codes look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Format {
    pub bits: u32,
    /// Elements that share scale and min.
    pub group_len: usize,
    /// `min = -bias * scale`; `None`: mins are stored.
    pub bias: Option<i32>,
}

impl Format {
    /// `None` for float types.
    pub(crate) fn of(dtype: DType) -> Option<Format> {
        let (bits, group_len, bias) = match dtype {
            DType::F32 | DType::F16 | DType::BF16 => return None,
            DType::Q4_0 => (4, 32, Some(8)),
            DType::Q4_1 | DType::Q4K => (4, 32, None),
            DType::Q5_0 => (5, 32, Some(16)),
            DType::Q5_1 | DType::Q5K => (5, 32, None),
            DType::Q8_0 => (8, 32, Some(128)),
            DType::Q6K => (6, 16, Some(32)),
        };
        Some(Format { bits, group_len, bias })
    }
}

impl Row {
    /// Reads a row of whole blocks.
    pub(crate) fn read(&mut self, dtype: DType, bytes: &[u8]) {
        self.codes.clear();
        self.scales.clear();
        self.mins.clear();
        for block in bytes.chunks_exact(dtype.block_bytes()) {
            match dtype {
                DType::F32 | DType::F16 | DType::BF16 => unreachable!("float types have no blocks"),
                DType::Q4_0 => self.simple(block, 2, None, None, Some(8.0)),
                DType::Q4_1 => self.simple(block, 4, None, Some(2), None),
                DType::Q5_0 => self.simple(block, 6, Some(2), None, Some(16.0)),
                DType::Q5_1 => self.simple(block, 8, Some(4), Some(2), None),
                DType::Q8_0 => self.q8_0(block),
                DType::Q4K => self.q4_k(block),
                DType::Q5K => self.q5_k(block),
                DType::Q6K => self.q6_k(block),
            }
        }
    }

    /// The weights as f32.
    pub(crate) fn dequantise(&self, out: &mut [f32]) {
        let group = self.codes.len() / self.scales.len().max(1);
        for (i, (out, &code)) in out.iter_mut().zip(&self.codes).enumerate() {
            *out = self.scales[i / group] * f32::from(code) + self.mins[i / group];
        }
    }

    fn group(&mut self, scale: f32, min: f32) {
        self.scales.push(scale);
        self.mins.push(min);
    }

    /// Q4_0, Q4_1, Q5_0, Q5_1: d, [m], [32 high bits], 16 bytes of nibbles (element j low, j + 16 high).
    fn simple(&mut self, block: &[u8], nibbles: usize, high: Option<usize>, min: Option<usize>, bias: Option<f32>) {
        let high = high.map_or(0, |at| u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]));
        for j in 0..32 {
            let nibble = if j < 16 { block[nibbles + j] & 15 } else { block[nibbles + j - 16] >> 4 };
            self.codes.push(nibble | ((high >> j & 1) as u8) << 4);
        }
        let scale = half_at(block, 0);
        let min = min.map_or(0.0, |at| half_at(block, at));
        self.group(scale, min - bias.unwrap_or(0.0) * scale);
    }

    /// d, 32 signed bytes.
    fn q8_0(&mut self, block: &[u8]) {
        self.codes.extend(block[2..34].iter().map(|&q| q ^ 0x80));
        let scale = half_at(block, 0);
        self.group(scale, -128.0 * scale);
    }

    /// d, dmin, 12 bytes of 6-bit scales and mins, 128 bytes of nibbles (low ones first, 32 elements a turn).
    fn q4_k(&mut self, block: &[u8]) {
        for pair in block[16..144].chunks_exact(32) {
            self.codes.extend(pair.iter().map(|q| q & 15));
            self.codes.extend(pair.iter().map(|q| q >> 4));
        }
        self.k_scales(block);
    }

    /// As Q4_K with 32 bytes of fifth bits (bit g of byte l: element l of group g) before the nibbles.
    fn q5_k(&mut self, block: &[u8]) {
        let high = &block[16..48];
        for (pair, nibbles) in block[48..176].chunks_exact(32).enumerate() {
            let fifth = |l: usize, g: usize| (high[l] >> g & 1) << 4;
            self.codes.extend((0..32).map(|l| nibbles[l] & 15 | fifth(l, 2 * pair)));
            self.codes.extend((0..32).map(|l| nibbles[l] >> 4 | fifth(l, 2 * pair + 1)));
        }
        self.k_scales(block);
    }

    fn k_scales(&mut self, block: &[u8]) {
        let (d, dmin, packed) = (half_at(block, 0), half_at(block, 2), &block[4..16]);
        for j in 0..8 {
            let (scale, min) = if j < 4 {
                (packed[j] & 63, packed[j + 4] & 63)
            } else {
                (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
            };
            self.group(d * f32::from(scale), -dmin * f32::from(min));
        }
    }

    /// 128 bytes of low nibbles, 64 bytes of high pairs, 16 signed scales, d; in two halves of 128 elements.
    fn q6_k(&mut self, block: &[u8]) {
        for half in 0..2 {
            let low = &block[64 * half..64 * half + 64];
            let high = &block[128 + 32 * half..128 + 32 * half + 32];
            for quarter in 0..4 {
                self.codes.extend((0..32).map(|l| {
                    let byte = low[l + 32 * (quarter & 1)];
                    let nibble = if quarter < 2 { byte & 15 } else { byte >> 4 };
                    nibble | (high[l] >> (2 * quarter) & 3) << 4
                }));
            }
        }
        let d = half_at(block, 208);
        for &scale in &block[192..208] {
            let scale = d * f32::from(scale as i8);
            self.group(scale, -32.0 * scale);
        }
    }
}

/// Reads a row of floats.
pub(crate) fn read_floats(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *out = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        DType::F16 => {
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *out = half_at(b, 0);
            }
        }
        DType::BF16 => {
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *out = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
            }
        }
        _ => unreachable!("quantised types are read by Row"),
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}
