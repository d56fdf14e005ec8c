//! Sixteen f32 lanes under every instruction set, and the dispatch that compiles one kernel body for each of them.
//!
//! All forms do the same correctly rounded operations lane by lane and reduce lanes in the same order, so a kernel
//! written once has the same bits everywhere.

use super::isa::Isa;

/// Lanes of a [`Simd`] vector.
pub(crate) const LANES: usize = 16;

/// Sixteen f32.
///
/// # Safety
/// Methods may only run where the instruction set of the implementing type is available: inside [`dispatch`].
/// Pointers must be valid for the sixteen elements read or written; no alignment is needed.
#[allow(clippy::missing_safety_doc)]
pub(crate) trait Simd: Copy {
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn load_f16(from: *const u16) -> Self;
    unsafe fn store_f16(self, to: *mut u16);
    unsafe fn load_bf16(from: *const u16) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// `self * factor + addend`, rounded once.
    unsafe fn fma(self, factor: Self, addend: Self) -> Self;
    /// `other` where either is NaN.
    unsafe fn max(self, other: Self) -> Self;
    unsafe fn abs(self) -> Self;
    /// Zero in the lanes where `key < limit`.
    unsafe fn zero_below(self, key: Self, limit: f32) -> Self;
    /// Adds the integer in the low bits of `magic` to the exponents.
    unsafe fn add_exponents(self, magic: Self) -> Self;

    /// Rounded to the nearest integers, ties to even; all fit i16.
    unsafe fn store_i16(self, to: *mut i16);

    /// Writes `a = 256 * high + low` of each integer, both bytes signed. All of `a + 128` fit i16.
    #[inline(always)]
    unsafe fn split_bytes(integers: &[i16; 64], high: *mut i8, low: *mut i8) {
        for (i, &a) in integers.iter().enumerate() {
            let low_byte = a as i8;
            // SAFETY: both hold 64 bytes by the caller's word.
            unsafe {
                *low.add(i) = low_byte;
                *high.add(i) = ((a - i16::from(low_byte)) >> 8) as i8;
            }
        }
    }

    /// Sums of each sixteen integers.
    #[inline(always)]
    unsafe fn sums_of_16(integers: &[i16; 64]) -> [i32; 4] {
        std::array::from_fn(|i| integers[16 * i..16 * i + 16].iter().map(|&a| i32::from(a)).sum())
    }

    /// Asks for a cache line before it is needed; any address will do.
    #[inline(always)]
    unsafe fn prefetch(_at: *const u16) {}

    /// `len` elements, zeros behind.
    #[inline(always)]
    unsafe fn load_part(from: *const f32, len: usize) -> Self {
        let mut lanes = [0.0; LANES];
        // SAFETY: `len <= LANES` elements are readable by the caller's word.
        unsafe {
            std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), len);
            Self::load(lanes.as_ptr())
        }
    }

    /// The first `len` elements.
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, len: usize) {
        // SAFETY: `len <= LANES` elements are writable by the caller's word.
        unsafe {
            let lanes = self.to_array();
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, len);
        }
    }

    #[inline(always)]
    unsafe fn to_array(self) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: sixteen elements of our own.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes
    }

    /// The first lane.
    #[inline(always)]
    unsafe fn first(self) -> f32 {
        // SAFETY: the caller's word about the instruction set.
        unsafe { self.to_array()[0] }
    }

    /// Sum of the lanes, by halves.
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        // SAFETY: the caller's word about the instruction set.
        let mut lanes = unsafe { self.to_array() };
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
            half /= 2;
        }
        lanes[0]
    }

    /// Lane i: `reduce_add` of the i-th vector.
    #[inline(always)]
    unsafe fn reduce_add_each(vectors: &[Self; LANES]) -> Self {
        // SAFETY: the caller's word about the instruction set.
        unsafe {
            let sums: [f32; LANES] = std::array::from_fn(|i| vectors[i].reduce_add());
            Self::load(sums.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        // SAFETY: the caller's word about the instruction set.
        let lanes = unsafe { self.to_array() };
        lanes.into_iter().fold(lanes[0], |max, lane| if lane > max { lane } else { max })
    }

    /// e^x with a relative error near 1e-7; exactly 0 below -87 (so also at minus infinity).
    #[inline(always)]
    unsafe fn exp(self) -> Self {
        // Cephes' expf: x = n ln 2 + r, |r| <= ln 2 / 2, polynomial in r, exponent by integer addition.
        const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
        // SAFETY: the caller's word about the instruction set.
        unsafe {
            let splat = |value: f32| Self::splat(value);
            let x = self.clamp_to(-88.0);
            let magic = x.fma(splat(std::f32::consts::LOG2_E), splat(ROUND));
            let n = magic.sub(splat(ROUND));
            let r = n.fma(splat(-0.693_359_4), x);
            let r = n.fma(splat(2.121_944_4e-4), r);
            let mut p = splat(1.987_569_1e-4);
            for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
                p = p.fma(r, splat(c));
            }
            let y = p.fma(r.mul(r), r).add(splat(1.0));
            y.add_exponents(magic).zero_below(self, -87.0)
        }
    }

    /// Between `floor` (negative) and its opposite.
    #[inline(always)]
    unsafe fn clamp_to(self, floor: f32) -> Self {
        // SAFETY: the caller's word about the instruction set.
        unsafe {
            let zero = Self::splat(0.0);
            let low = Self::splat(floor).max(self);
            zero.sub(Self::splat(floor).max(zero.sub(low)))
        }
    }
}

/// A kernel body, written once over [`Simd`].
pub(crate) trait Kernel {
    /// # Safety
    /// `S` is available on this machine. Implementations are `#[inline(always)]` so that the body is compiled with the
    /// instruction set of the caller in [`dispatch`].
    unsafe fn run<S: Simd>(self);
}

/// Runs a kernel with the vectors of an instruction set.
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) {
    match isa {
        // SAFETY: portable code needs nothing.
        Isa::Reference | Isa::Portable => unsafe { kernel.run::<Portable>() },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a device is opened only with an instruction set the machine has.
        Isa::Avx2 => unsafe { x86::run_avx2(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 | Isa::Amx => unsafe { x86::run_avx512(kernel) },
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: portable code needs nothing.
        _ => unsafe { kernel.run::<Portable>() },
    }
}

/// Plain arrays.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Portable, f: impl Fn(f32, f32) -> f32) -> Portable {
        Portable(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

// SAFETY comments of the methods: each reads or writes the sixteen elements its contract names, nothing else.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Portable {
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Portable([value; LANES])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Portable(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        Portable(bits.map(|b| half::f16::from_bits(b).to_f32()))
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        let bits = self.0.map(|v| half::f16::from_f32(v).to_bits());
        unsafe { to.cast::<[u16; LANES]>().write_unaligned(bits) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        Portable(bits.map(|b| f32::from_bits(u32::from(b) << 16)))
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn fma(self, factor: Self, addend: Self) -> Self {
        Portable(std::array::from_fn(|i| self.0[i].mul_add(factor.0[i], addend.0[i])))
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        Portable(self.0.map(f32::abs))
    }
    #[inline(always)]
    unsafe fn zero_below(self, key: Self, limit: f32) -> Self {
        self.zip(key, |v, k| if k < limit { 0.0 } else { v })
    }
    #[inline(always)]
    unsafe fn store_i16(self, to: *mut i16) {
        unsafe { to.cast::<[i16; LANES]>().write_unaligned(self.0.map(|v| v.round_ties_even() as i16)) }
    }
    #[inline(always)]
    unsafe fn add_exponents(self, magic: Self) -> Self {
        self.zip(magic, |v, m| f32::from_bits(v.to_bits().wrapping_add(m.to_bits() << 23)))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Kernel, Simd};

    /// # Safety
    /// The machine has AVX2, FMA and F16C.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn run_avx2<K: Kernel>(kernel: K) {
        // SAFETY: the features are enabled here.
        unsafe { kernel.run::<Avx2>() }
    }

    /// # Safety
    /// The machine has the AVX-512 subsets named.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(super) unsafe fn run_avx512<K: Kernel>(kernel: K) {
        // SAFETY: the features are enabled here.
        unsafe { kernel.run::<Avx512>() }
    }

    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(__m512);

    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(__m256, __m256);

    // SAFETY comments of the methods: the trait's contract gives the instruction set and the sixteen elements.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Simd for Avx512 {
        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            unsafe { Avx512(_mm512_set1_ps(value)) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            unsafe { Avx512(_mm512_loadu_ps(from)) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe { _mm512_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn load_f16(from: *const u16) -> Self {
            unsafe { Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))) }
        }
        #[inline(always)]
        unsafe fn store_f16(self, to: *mut u16) {
            unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const u16) -> Self {
            unsafe {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
            }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            unsafe { Avx512(_mm512_add_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            unsafe { Avx512(_mm512_sub_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            unsafe { Avx512(_mm512_mul_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn div(self, other: Self) -> Self {
            unsafe { Avx512(_mm512_div_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn fma(self, factor: Self, addend: Self) -> Self {
            unsafe { Avx512(_mm512_fmadd_ps(self.0, factor.0, addend.0)) }
        }
        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            unsafe { Avx512(_mm512_max_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn abs(self) -> Self {
            unsafe { Avx512(_mm512_abs_ps(self.0)) }
        }
        #[inline(always)]
        unsafe fn zero_below(self, key: Self, limit: f32) -> Self {
            unsafe {
                let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(key.0, _mm512_set1_ps(limit));
                Avx512(_mm512_mask_blend_ps(below, self.0, _mm512_setzero_ps()))
            }
        }
        #[inline(always)]
        unsafe fn store_i16(self, to: *mut i16) {
            unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(self.0))) }
        }
        #[inline(always)]
        unsafe fn add_exponents(self, magic: Self) -> Self {
            unsafe {
                let shifted = _mm512_slli_epi32::<23>(_mm512_castps_si512(magic.0));
                Avx512(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(self.0), shifted)))
            }
        }
        #[inline(always)]
        unsafe fn split_bytes(integers: &[i16; 64], high: *mut i8, low: *mut i8) {
            for half in 0..2 {
                unsafe {
                    let a = _mm512_loadu_si512(integers.as_ptr().add(32 * half).cast());
                    let low_byte = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(a));
                    let high_byte = _mm512_srai_epi16::<8>(_mm512_sub_epi16(a, low_byte));
                    _mm256_storeu_si256(low.add(32 * half).cast(), _mm512_cvtepi16_epi8(a));
                    _mm256_storeu_si256(high.add(32 * half).cast(), _mm512_cvtepi16_epi8(high_byte));
                }
            }
        }
        #[inline(always)]
        unsafe fn sums_of_16(integers: &[i16; 64]) -> [i32; 4] {
            unsafe {
                let pairs = |half: usize| {
                    let a = _mm512_loadu_si512(integers.as_ptr().add(32 * half).cast());
                    _mm512_madd_epi16(a, _mm512_set1_epi16(1))
                };
                // Eight pairs a sum: fold 128-bit lanes (0 1 | 2 3 of each half), then four lanes of each.
                let (a, b) = (pairs(0), pairs(1));
                let lanes = _mm512_add_epi32(_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
                let twos = _mm512_add_epi32(lanes, _mm512_shuffle_epi32::<0b01_00_11_10>(lanes));
                let ones = _mm512_add_epi32(twos, _mm512_shuffle_epi32::<0b10_11_00_01>(twos));
                let mut sums = [0i32; 16];
                _mm512_storeu_si512(sums.as_mut_ptr().cast(), ones);
                [sums[0], sums[4], sums[8], sums[12]]
            }
        }
        #[inline(always)]
        unsafe fn prefetch(at: *const u16) {
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
        }
        #[inline(always)]
        unsafe fn first(self) -> f32 {
            unsafe { _mm512_cvtss_f32(self.0) }
        }
        #[inline(always)]
        unsafe fn reduce_add(self) -> f32 {
            unsafe {
                let eight = _mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
                let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
            }
        }
        #[inline(always)]
        unsafe fn reduce_max(self) -> f32 {
            unsafe {
                let eight = _mm256_max_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
                let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
                let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
            }
        }
        #[inline(always)]
        unsafe fn reduce_add_each(vectors: &[Self; 16]) -> Self {
            unsafe {
                // By halves: 8 apart (two vectors become one), 4 apart, 2 apart, 1 apart.
                let eights: [__m512; 8] = std::array::from_fn(|i| {
                    let (a, b) = (vectors[2 * i].0, vectors[2 * i + 1].0);
                    _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b))
                });
                let fours: [__m512; 4] = std::array::from_fn(|i| {
                    let (a, b) = (eights[2 * i], eights[2 * i + 1]);
                    _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
                });
                let twos: [__m512; 2] = std::array::from_fn(|i| {
                    let (a, b) = (fours[2 * i], fours[2 * i + 1]);
                    _mm512_add_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xee>(a, b))
                });
                let (a, b) = (twos[0], twos[1]);
                let ones = _mm512_add_ps(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xdd>(a, b));
                // 128-bit lane l, element e holds the sum of vector 4e + l: put them in order.
                let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
                Avx512(_mm512_permutexvar_ps(order, ones))
            }
        }
    }

    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Simd for Avx2 {
        #[inline(always)]
        unsafe fn prefetch(at: *const u16) {
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
        }
        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            unsafe { Avx2(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            unsafe { Avx2(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe {
                _mm256_storeu_ps(to, self.0);
                _mm256_storeu_ps(to.add(8), self.1);
            }
        }
        #[inline(always)]
        unsafe fn load_f16(from: *const u16) -> Self {
            unsafe {
                let low = _mm_loadu_si128(from.cast());
                let high = _mm_loadu_si128(from.add(8).cast());
                Avx2(_mm256_cvtph_ps(low), _mm256_cvtph_ps(high))
            }
        }
        #[inline(always)]
        unsafe fn store_f16(self, to: *mut u16) {
            unsafe {
                _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0));
                _mm_storeu_si128(to.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1));
            }
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const u16) -> Self {
            unsafe {
                let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(8).cast()));
                Avx2(
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
                )
            }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            unsafe { Avx2(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            unsafe { Avx2(_mm256_sub_ps(self.0, other.0), _mm256_sub_ps(self.1, other.1)) }
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            unsafe { Avx2(_mm256_mul_ps(self.0, other.0), _mm256_mul_ps(self.1, other.1)) }
        }
        #[inline(always)]
        unsafe fn div(self, other: Self) -> Self {
            unsafe { Avx2(_mm256_div_ps(self.0, other.0), _mm256_div_ps(self.1, other.1)) }
        }
        #[inline(always)]
        unsafe fn fma(self, factor: Self, addend: Self) -> Self {
            unsafe {
                Avx2(_mm256_fmadd_ps(self.0, factor.0, addend.0), _mm256_fmadd_ps(self.1, factor.1, addend.1))
            }
        }
        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            unsafe { Avx2(_mm256_max_ps(self.0, other.0), _mm256_max_ps(self.1, other.1)) }
        }
        #[inline(always)]
        unsafe fn abs(self) -> Self {
            unsafe {
                let sign = _mm256_set1_ps(-0.0);
                Avx2(_mm256_andnot_ps(sign, self.0), _mm256_andnot_ps(sign, self.1))
            }
        }
        #[inline(always)]
        unsafe fn zero_below(self, key: Self, limit: f32) -> Self {
            unsafe {
                let limit = _mm256_set1_ps(limit);
                Avx2(
                    _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(key.0, limit), self.0),
                    _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(key.1, limit), self.1),
                )
            }
        }
        #[inline(always)]
        unsafe fn store_i16(self, to: *mut i16) {
            unsafe {
                let packed = _mm256_packs_epi32(_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1));
                // packs works inside 128-bit halves: 0..4, 8..12, 4..8, 12..16.
                _mm256_storeu_si256(to.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
            }
        }
        #[inline(always)]
        unsafe fn add_exponents(self, magic: Self) -> Self {
            unsafe {
                let add = |value: __m256, magic: __m256| {
                    let shifted = _mm256_slli_epi32::<23>(_mm256_castps_si256(magic));
                    _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(value), shifted))
                };
                Avx2(add(self.0, magic.0), add(self.1, magic.1))
            }
        }
    }
}
