//! Sixteen lanes in one AVX-512 register, or in two of AVX2.

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
            Avx2(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)))
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
        unsafe { Avx2(_mm256_fmadd_ps(self.0, factor.0, addend.0), _mm256_fmadd_ps(self.1, factor.1, addend.1)) }
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
