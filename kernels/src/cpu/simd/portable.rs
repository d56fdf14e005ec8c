//! Sixteen lanes in an array.

use super::{Simd, LANES};

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
