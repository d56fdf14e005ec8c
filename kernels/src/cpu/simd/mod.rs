//! Sixteen f32 lanes under every instruction set, and the dispatch that compiles one kernel body for each of them.
//!
//! All forms do the same correctly rounded operations lane by lane and reduce lanes in the same order, so a kernel
//! written once has the same bits everywhere.

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use super::isa::Isa;
use portable::Portable;

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
